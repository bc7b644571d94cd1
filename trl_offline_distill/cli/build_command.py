"""`trl-offline-distill build`: options named like the arguments of `build_distillation_dataset`."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import UsageError, check_output, reading


if TYPE_CHECKING:
    from datasets import Dataset
    from trl import DatasetMixtureConfig


@dataclass
class BuildArguments:
    """Source, teacher and cache of one build. What is not about the source is passed to the builder as it is."""

    # What is read
    teacher: str = field(metadata={"help": "Model id, path, or URL of an OpenAI-compatible server."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Text dataset: Hub name, or folder. `datasets:` in YAML mixes several."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of the source dataset."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision of the source dataset."})
    dataset_data_files: list[str] | None = field(
        default=None, metadata={"help": "Files of the source dataset, for `--dataset_name text`, `json`, `csv` ..."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the source dataset."})
    dataset_rows: int | None = field(default=None, metadata={"help": "Only the first rows of it, for a trial."})
    processing_class: str | None = field(
        default=None, metadata={"help": "Tokenizer, by name. Default: the teacher's."}
    )
    student: str | None = field(
        default=None,
        metadata={
            "help": "Student that will learn from the cache: its tokenizer and head are compared with the teacher's "
            "before the teacher runs."
        },
    )

    # How it is tokenised, as SFTConfig has it
    max_length: int | None = field(default=None, metadata={"help": "Longest row, in tokens; longer ones are cut."})
    truncation_mode: str = field(
        default="keep_start", metadata={"help": "Which end of a long row stays: keep_start or keep_end."}
    )
    completion_only_loss: bool | None = field(
        default=None, metadata={"help": "Cache only the completion. Default: yes for prompt/completion datasets."}
    )
    assistant_only_loss: bool = field(default=False, metadata={"help": "Cache only the assistant's turns."})
    dataset_text_field: str = field(default="text", metadata={"help": "Text column."})
    eos_token: str | None = field(default=None, metadata={"help": "End-of-sequence token to use."})
    chat_template_path: str | None = field(
        default=None, metadata={"help": "Tokenizer or Jinja file whose chat template replaces the teacher's."}
    )
    template_date: str | None = field(
        default=None, metadata={"help": "ISO date for chat templates that print today's. Default: day of the start."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})

    # What is kept
    top_k: int = field(default=100, metadata={"help": "Candidates kept for each token."})
    layout: str = field(
        default="default", metadata={"help": "How a position is stored: default, compact, min_mass or sampled."}
    )
    tail_temperatures: list[float] = field(
        default_factory=list,
        metadata={"help": "Temperatures other than 1 at which the tail is kept too; training at T != 1 needs them."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the sampled layout."})

    # How the teacher runs
    engine: str = field(default="auto", metadata={"help": "auto, transformers, vllm or server."})
    model_init_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Options of the engine, as JSON (dtype, device_map, api_key ...)."}
    )
    batch_tokens: int = field(default=8192, metadata={"help": "Padded tokens of one forward pass."})
    chunk_size: int | None = field(default=None, metadata={"help": "Positions of one pass over the head."})
    generation: dict | str | None = field(
        default=None, metadata={"help": "How the teacher writes completions for rows of prompts only, as JSON."}
    )
    long_rows: str = field(default="error", metadata={"help": "Rows longer than the teacher takes: error or skip."})

    # Where it goes
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the cached dataset."})
    overwrite: bool = field(
        default=False, metadata={"help": "Discard what `output_dir` holds of a build with other settings."}
    )
    split: str = field(default="train", metadata={"help": "Split name of the cached dataset."})
    shard_bytes: int = field(default=256 * 2**20, metadata={"help": "Size of a shard before compression."})
    num_shards: int = field(default=1, metadata={"help": "Jobs that share the work through `output_dir`."})
    shard_index: int = field(default=0, metadata={"help": "Which of them this one is."})
    push_to_hub: str | None = field(default=None, metadata={"help": "Dataset repository to push to."})
    private: bool | None = field(default=None, metadata={"help": "Make the repository private."})
    hub_revision: str | None = field(default=None, metadata={"help": "Branch of the repository."})
    config_name: str = field(default="default", metadata={"help": "Configuration name in the repository."})
    hub_token: str | None = field(default=None, metadata={"help": "Token; better left to `hf auth login`."})
    license: str | None = field(default=None, metadata={"help": "Licence named in the dataset card."})

    def __post_init__(self):
        for name in ("model_init_kwargs", "generation"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError as error:
                    raise ValueError(f"`{name}` must be a JSON object: {error}") from error
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"`{name}={value!r}` must be a JSON object.")
            setattr(self, name, value)


# About the source or the student, not arguments of the builder.
_OWN = (
    "dataset_name",
    "dataset_config",
    "dataset_revision",
    "dataset_data_files",
    "dataset_split",
    "dataset_rows",
    "student",
)
_FILE_FORMATS = ("json", "text", "csv", "parquet")
HELP_GROUPS = {
    "teacher and source": ("teacher", *_OWN, "processing_class"),
    "what is kept": ("top_k", "layout", "tail_temperatures", "seed"),
    "where it goes": (
        *("output_dir", "overwrite", "split", "push_to_hub", "private", "hub_revision", "config_name", "hub_token"),
        *("license", "shard_bytes", "num_shards", "shard_index"),
    ),
    "how it is tokenised (as SFTConfig)": (
        *("max_length", "truncation_mode", "completion_only_loss", "assistant_only_loss", "dataset_text_field"),
        *("eos_token", "chat_template_path", "template_date", "dataset_num_proc"),
    ),
    "how the teacher runs": (
        *("engine", "model_init_kwargs", "batch_tokens", "chunk_size", "generation", "long_rows"),
    ),
}


def builder_arguments(args: BuildArguments) -> dict[str, Any]:
    """Keyword arguments of `build_distillation_dataset`."""
    return {item.name: getattr(args, item.name) for item in fields(args) if item.name not in _OWN}


def run(argv: list[str]) -> int:
    from trl import DatasetMixtureConfig

    from .arguments import expand, help_text, make_parser, parse

    parser = make_parser(
        [BuildArguments, DatasetMixtureConfig], "build", "Run the teacher once and store its top-K for every token."
    )
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, HELP_GROUPS, rest="a mixture of datasets (in YAML)"))
        return 0
    args, mixture, _ = parse(parser, expand(argv, "build.yaml"))
    if args.output_dir is None and args.push_to_hub is None:
        raise UsageError("say where the cache goes: `output_dir`, `push_to_hub`, or both.")
    check_output("output_dir", args.output_dir)
    if not args.teacher.startswith(("http://", "https://")):
        from transformers import AutoConfig

        names = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "gguf_file")
        options = {name: value for name, value in (args.model_init_kwargs or {}).items() if name in names}
        with reading("teacher", args.teacher):
            AutoConfig.from_pretrained(args.teacher, **options)
    dataset = load_source(args, mixture)
    if args.student is not None:
        print(check_student_model(args.teacher, args.student, args.processing_class))

    from ..capture.build import build_distillation_dataset

    cached = build_distillation_dataset(dataset, **builder_arguments(args))
    place = args.push_to_hub or args.output_dir
    print(f"{len(cached):,} rows cached in {place}. Look at them: trl-offline-distill inspect {place}")
    return 0


def load_named(args: Any) -> "Dataset":
    """The dataset that `dataset_name`, `_config`, `_split`, `_revision` and `_data_files` name; also for `import`."""
    from datasets import load_dataset, load_from_disk

    if (Path(args.dataset_name) / "state.json").is_file():
        return load_from_disk(args.dataset_name)
    for file in args.dataset_data_files or []:
        # Beside a Hub name they are files of that repository.
        if args.dataset_name in _FILE_FORMATS and not {"*", ":"} & set(file) and not Path(file).exists():
            raise UsageError(f"`dataset_data_files`: there is no file {file!r}. Make it first, or name another.")
    with reading("dataset_name", args.dataset_name):
        return load_dataset(
            args.dataset_name,
            args.dataset_config,
            split=args.dataset_split,
            revision=args.dataset_revision,
            data_files=args.dataset_data_files,
        )


def load_source(args: BuildArguments, mixture: "DatasetMixtureConfig") -> "Dataset":
    """The text dataset that the arguments name."""
    from trl import get_dataset

    if bool(args.dataset_name) == bool(mixture.datasets):
        raise UsageError("name the text dataset by `dataset_name` or by `datasets`: exactly one of them.")
    if mixture.datasets:
        mixed = get_dataset(mixture)
        if args.dataset_split not in mixed:
            raise ValueError(
                f"`dataset_split={args.dataset_split!r}`: the mixture has the splits {', '.join(mixed)}. Name one."
            )
        dataset = mixed[args.dataset_split]
    else:
        dataset = load_named(args)
    if args.dataset_rows is not None:
        dataset = dataset.select(range(min(args.dataset_rows, len(dataset))))
    return dataset


def check_student_model(teacher: str, student: str, processing_class: str | None = None) -> str:
    """
    Compares tokenizer and head of a student with the teacher's, from their configurations and tokenizers alone.

    Returns:
        `str`: The sentence that says they fit.

    Raises:
        ValueError: They do not; both sides are named.
    """
    from transformers import AutoConfig, AutoTokenizer

    from ..teacher_cache.manifest import TeacherManifest, check_student, tokenizer_fingerprint

    served = teacher.startswith(("http://", "https://"))
    if served and processing_class is None:
        raise ValueError(
            "`student` cannot be compared with a served teacher without its tokenizer: set `processing_class`."
        )
    with reading("processing_class" if processing_class else "teacher", processing_class or teacher):
        teacher_tokenizer = AutoTokenizer.from_pretrained(processing_class or teacher)
    with reading("student", student):
        student_rows = AutoConfig.from_pretrained(student).get_text_config().vocab_size
        student_tokenizer = AutoTokenizer.from_pretrained(student)
    manifest = TeacherManifest(
        teacher=teacher,
        tokenizer_fingerprint=tokenizer_fingerprint(teacher_tokenizer),
        vocab_size=len(teacher_tokenizer),
        top_k=1,
        layout="default",
    )
    try:
        check_student(manifest, tokenizer=student_tokenizer, head_rows=student_rows)
    except ValueError as error:
        raise ValueError(f"`student={student}` does not fit `teacher={teacher}`: {error}") from error
    return (
        f"{student} has the teacher's tokenizer and {student_rows:,} head rows for {len(teacher_tokenizer):,} tokens."
    )
