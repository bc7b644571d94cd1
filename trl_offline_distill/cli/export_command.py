"""`trl-offline-distill export`."""

from dataclasses import dataclass, field
from pathlib import Path

from . import check_output


@dataclass
class ExportArguments:
    """A cached dataset, and where its typed copy goes."""

    dataset_name: str = field(
        metadata={"help": "Cached dataset: Hub name or folder; may stand first, without the option's name."}
    )
    output_file: str = field(metadata={"help": "Parquet file to write, or a JSON Lines file if it ends in .jsonl."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name."})
    dataset_split: str = field(default="train", metadata={"help": "Split."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision on the Hub."})


def run(argv: list[str]) -> int:
    from .arguments import expand, help_text, make_parser, parse
    from .inspect_command import first_positional, load_cached_split

    parser = make_parser(
        [ExportArguments],
        "export",
        "Write a cached dataset with columns of numbers (teacher_token_ids, teacher_logprobs, teacher_log_tail).",
    )
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(first_positional(argv, "dataset_name"), "export.yaml"))

    from ..teacher_cache.exporters import to_typed_columns

    check_output("output_file", args.output_file)
    typed = to_typed_columns(load_cached_split(args))
    partial = Path(f"{args.output_file}.partial")
    try:
        (typed.to_json if args.output_file.endswith(".jsonl") else typed.to_parquet)(str(partial))
        partial.replace(args.output_file)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{len(typed):,} rows written to {args.output_file}")
    return 0
