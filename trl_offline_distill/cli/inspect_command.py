"""`trl-offline-distill inspect`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import UsageError, check_output, reading


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass
class InspectArguments:
    """A cached dataset and what to say of it."""

    dataset_name: str = field(
        metadata={"help": "Cached dataset: Hub name or folder; may stand first, without the option's name."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name."})
    dataset_split: str = field(default="train", metadata={"help": "Split."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision on the Hub."})
    streaming: bool = field(default=False, metadata={"help": "Read from the Hub without downloading it first."})
    max_rows: int | None = field(default=None, metadata={"help": "Read the first rows only."})
    plot: str | None = field(default=None, metadata={"help": "Also draw the report to this PNG."})
    teacher: str | None = field(
        default=None,
        metadata={"help": "Score a sample again with this teacher (model or path), and report the difference."},
    )
    rows: int = field(default=16, metadata={"help": "Rows of that sample."})
    decode: int | None = field(default=None, metadata={"help": "Show this row as text with the teacher's candidates."})
    candidates: int = field(default=5, metadata={"help": "Candidates shown for each token of it."})
    processing_class: str | None = field(
        default=None, metadata={"help": "Tokenizer for `decode`. Default: that of the teacher in the manifest."}
    )


def load_cached_split(args: Any) -> "Dataset | IterableDataset":
    """The split that `dataset_name`, `dataset_config`, `dataset_split` and `dataset_revision` name."""
    from datasets import load_from_disk

    from ..teacher_cache.hub import load_cache

    folder = Path(args.dataset_name)
    if (folder / "state.json").is_file():
        return load_from_disk(args.dataset_name)
    if (folder / "dataset_dict.json").is_file():
        return load_from_disk(args.dataset_name)[args.dataset_split]
    with reading("dataset_name", args.dataset_name):
        return load_cache(
            args.dataset_name,
            args.dataset_config,
            split=args.dataset_split,
            revision=args.dataset_revision,
            streaming=getattr(args, "streaming", False),
        )


def first_positional(argv: list[str], option: str) -> list[str]:
    """`argv` with a first word that is no option turned into `--option word`."""
    return [f"--{option}", *argv] if argv and not argv[0].startswith("-") else argv


def run(argv: list[str]) -> int:
    from .arguments import expand, help_text, make_parser, parse

    parser = make_parser(
        [InspectArguments], "inspect", "What a cached dataset holds, before anyone pays for training on it."
    )
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(first_positional(argv, "dataset_name"), "inspect.yaml"))

    from ..cache_report import compare_with_teacher, describe_row, inspect_cache
    from ..teacher_cache.manifest import TeacherManifest

    check_output("plot", args.plot)
    dataset = load_cached_split(args)
    if args.decode is not None:
        from itertools import islice

        from datasets import Dataset
        from transformers import AutoTokenizer

        row = next(islice(iter(dataset), args.decode, None), None)
        if row is None or args.decode < 0:
            count = f", it has {len(dataset):,}" if isinstance(dataset, Dataset) else ""
            raise UsageError(f"`decode={args.decode}`: the dataset has no such row{count}.")
        manifest = TeacherManifest.from_json(row["teacher_manifest"])
        name = args.processing_class or args.teacher or manifest.teacher
        if name == manifest.teacher and manifest.teacher_revision is None and not Path(name).exists():
            raise UsageError(
                f"`decode` needs a tokenizer, and the teacher {name!r} of this cache was a local folder. Give "
                "`processing_class`: a folder or Hub name with its tokenizer."
            )
        with reading("processing_class", name):
            tokenizer = AutoTokenizer.from_pretrained(name)
        print(describe_row(row, tokenizer, candidates=args.candidates))
        return 0
    report = inspect_cache(dataset, max_rows=args.max_rows)
    print(report.to_text())
    if args.plot is not None:
        print(f"Drawn to {report.draw(args.plot, args.dataset_name)}")
    if args.teacher is not None:
        score = make_scorer(args.teacher, next(iter(dataset))["teacher_manifest"])
        print()
        print(compare_with_teacher(dataset, score, rows=args.rows).to_text())
    return 0


def make_scorer(teacher: str, manifest: str) -> Any:
    """What `compare_with_teacher` asks the live teacher with: the capture's own engine and the manifest's settings."""
    from transformers import AutoTokenizer

    from ..capture.build import Vocabulary
    from ..capture.engine import ScoreRequest, TokenRow
    from ..capture.transformers_engine import TransformersTeacher
    from ..teacher_cache.manifest import TeacherManifest

    met = TeacherManifest.from_json(manifest)
    engine = TransformersTeacher(teacher)
    request = ScoreRequest(
        top_k=met.top_k,
        tail_temperatures=met.tail_temperatures,
        token_mask_size=met.vocab_size,
        missing_ids=Vocabulary.of(AutoTokenizer.from_pretrained(teacher), engine.head_rows).missing,
    )

    def score(asked: list) -> list:
        rows = [TokenRow(ids, positions, number) for number, (ids, positions) in enumerate(asked)]
        return [signal for _, signal in sorted(engine.score(rows, request), key=lambda pair: pair[0])]

    engine.load()
    return score
