# /// script
# requires-python = ">=3.10"
# dependencies = ["trl-offline-distill"]
# ///
"""Every step of a recipe: `uv run recipes/run_recipe.py NAME [--tiny]`, or `hf jobs uv run` of the same."""

import sys

from trl_offline_distill.cli import main


if __name__ == "__main__":
    sys.exit(main(["recipes", "run", *sys.argv[1:]]))
