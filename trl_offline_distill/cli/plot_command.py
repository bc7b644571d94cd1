"""`trl-offline-distill plot`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from . import UsageError, check_output


@dataclass
class PlotArguments:
    """A run, and where its picture goes."""

    run: str = field(
        metadata={
            "help": "A run's output_dir, checkpoint or trainer_state.json; may stand first, without the option's name."
        }
    )
    output_file: str | None = field(default=None, metadata={"help": "PNG to write. Default: beside the run's state."})
    title: str | None = field(default=None, metadata={"help": "Title of the picture."})


def find_state(run: str) -> Path:
    """The `trainer_state.json` of a run: its own, or that of its last checkpoint."""
    path = Path(run)
    if path.is_file():
        return path
    checkpoints = sorted(path.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    for folder in [path, *reversed(checkpoints)]:
        if (folder / "trainer_state.json").is_file():
            return folder / "trainer_state.json"
    raise UsageError(f"`run={run}`: there is no trainer_state.json in it or in a checkpoint of it.")


def run(argv: list[str]) -> int:
    from .arguments import expand, help_text, make_parser, parse
    from .inspect_command import first_positional

    parser = make_parser([PlotArguments], "plot", "Draw the curves of a run.")
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(first_positional(argv, "run"), "plot.yaml"))

    from ..callbacks import plot_log_history

    state = find_state(args.run)
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    check_output("output_file", args.output_file)
    target = args.output_file or state.with_name("distillation.png")
    print(f"Drawn to {plot_log_history(history, target, args.title)}")
    return 0
