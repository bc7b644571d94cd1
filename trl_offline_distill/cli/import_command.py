"""`trl-offline-distill import`: options named like the arguments of `import_teacher`."""

from dataclasses import dataclass, field

from . import check_new_folder, reading


@dataclass
class ImportArguments:
    """A dataset with another tool's teacher, and how to read it."""

    dataset_name: str = field(metadata={"help": "Dataset to import: Hub name or folder, or `json`, `parquet`."})
    tokenizer: str = field(metadata={"help": "The teacher's tokenizer, by name."})
    output_dir: str = field(metadata={"help": "Folder of the cached dataset."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name."})
    dataset_split: str = field(default="train", metadata={"help": "Split."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision on the Hub."})
    dataset_data_files: list[str] | None = field(
        default=None, metadata={"help": "Files, for `--dataset_name json` and the like."}
    )
    teacher: str | None = field(default=None, metadata={"help": "Id of the teacher that made the signal."})
    source: str | None = field(
        default=None,
        metadata={
            "help": "Format: typed, llama_405b_logits, axolotl, nemo_aligner or chat_logprobs. Default: told by the "
            "columns. Others are refused with the reason."
        },
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace what `output_dir` holds."})
    value_kind: str | None = field(
        default=None, metadata={"help": "What the numbers are: logprob, probability or logit. Default: detected."}
    )
    describes: str | None = field(
        default=None, metadata={"help": "Whether an entry describes the next or the same token. Default: detected."}
    )
    normalizer: str | None = field(
        default=None, metadata={"help": "What they were normalised over: vocabulary or support. Default: detected."}
    )
    vocab_size: int | None = field(default=None, metadata={"help": "Token ids. Default: the tokenizer's."})
    top_k: int | None = field(default=None, metadata={"help": "Keep only the most likely entries."})
    layout: str = field(default="default", metadata={"help": "Layout of the blobs."})
    drop_leading: int = field(default=0, metadata={"help": "Tokens to cut from the start of each row."})


_PASSED = (
    "teacher",
    "source",
    "value_kind",
    "describes",
    "normalizer",
    "vocab_size",
    "top_k",
    "layout",
    "drop_leading",
)


def run(argv: list[str]) -> int:
    from .arguments import expand, help_text, make_parser, parse
    from .build_command import load_named
    from .inspect_command import first_positional

    parser = make_parser([ImportArguments], "import", "Turn another tool's cached teacher into our columns.")
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(first_positional(argv, "dataset_name"), "import.yaml"))

    check_new_folder("output_dir", args.output_dir, args.overwrite)

    from transformers import AutoTokenizer

    from ..teacher_cache.importers import import_teacher

    foreign = load_named(args)
    options = {name: getattr(args, name) for name in _PASSED}
    with reading("tokenizer", args.tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    cached = import_teacher(foreign, tokenizer=tokenizer, **options)
    cached.save_to_disk(args.output_dir)
    print(f"{len(cached):,} rows imported. Look at them: trl-offline-distill inspect {args.output_dir}")
    return 0
