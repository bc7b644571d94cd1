"""Command line: `trl-offline-distill COMMAND`. Thin commands over the package, one module each."""

import importlib
import os
import re
import sys


# Command -> what it does; `cli/<command>_command.py` does it.
COMMANDS = {
    "demo": "the whole story on a laptop: cache a small teacher, heal a student, compare",
    "build": "run the teacher once over a text dataset and store its top-K",
    "train": "train a student on a cached dataset (through `accelerate launch`)",
    "inspect": "what a cached dataset holds: teacher, tokens, bytes, captured mass",
    "estimate": "memory, disk and time of a run, from a model's configuration alone",
    "recipes": "list, show or copy the shipped recipes",
    "drop-layers": "make a student by dropping layers of a model",
    "import": "turn another tool's cached teacher into this format",
    "export": "write a cached dataset with typed columns, for people and other tools",
    "plot": "draw a run's curves to a PNG",
}
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}")


def main(argv: list[str] | None = None) -> int:
    """
    Runs one command.

    Returns:
        `int`: 0 when it succeeded, 1 when the run failed, 2 when the command line or a file it names is wrong.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from .. import __version__

        print(f"trl-offline-distill {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        print(f"error: unknown command {command!r}{nearest(command, COMMANDS)}\n\n{_help()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{command.replace('-', '_')}_command", __name__)
    if os.environ.get("TRL_OFFLINE_DISTILL_TRACEBACK"):
        return module.run(rest) or 0
    try:
        return module.run(rest) or 0
    except UsageError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"error: {redact(_describe(error))}", file=sys.stderr)
        print("(TRL_OFFLINE_DISTILL_TRACEBACK=1 shows where)", file=sys.stderr)
        return 1


class UsageError(Exception):
    """The command line, or a file it names, is wrong."""


def nearest(word: str, words) -> str:
    """`": did you mean ...?"`, or nothing."""
    import difflib

    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def redact(text: str) -> str:
    """`text` without Hub tokens: those of the environment, and whatever looks like one."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        value = os.environ.get(name)
        if value:
            text = text.replace(value, "<hidden>")
    return _SECRET.sub("<hidden>", text)


def _describe(error: Exception) -> str:
    """The message, and what to do about the failures that a message from below does not explain."""
    import errno

    message = str(error) or type(error).__name__
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if getattr(error, "errno", None) == errno.ENOSPC:
        return f"{message}. The disk is full: free space, or choose another `--output_dir` (or HF_HOME)."
    if kinds & {"LocalTokenNotFoundError"}:
        return f"{message} Log in with `hf auth login`, or set HF_TOKEN."
    if kinds & {"GatedRepoError", "RepositoryNotFoundError"}:
        return (
            f"{message}\nCheck the name. If the repository is private or gated: `hf auth login`, and ask for access."
        )
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}:
        return f"{message}\nThe Hub cannot be reached: check the network, or give a local path instead of a Hub name."
    return message


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trl-offline-distill COMMAND [options]",
            "",
            "Offline top-K distillation: cache the teacher once, train students at the price of fine-tuning.",
            "",
            *lines,
            "",
            "trl-offline-distill COMMAND --help lists a command's options, which are named like the Python arguments.",
            "build, train and demo also read them from a YAML file: --config FILE, or --recipe NAME.",
            "-V, --version prints the version.",
        ]
    )
