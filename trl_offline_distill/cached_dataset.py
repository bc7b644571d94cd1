"""
What the trainer does to a cached dataset before the first step: it checks every row, cuts tokens and teacher together,
and packs them together.

Map-style datasets are checked in one pass over the stored columns; streamed rows are checked as they come.
"""

import difflib
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from trl import pack_dataset

from .teacher_cache.codecs import decode_topk
from .teacher_cache.manifest import TeacherManifest, check_student


TOKEN_COLUMNS = ("input_ids", "labels", "teacher_topk")
COLUMNS = (*TOKEN_COLUMNS, "teacher_manifest")
VISION_COLUMNS = ("image", "images", "pixel_values", "image_grid_thw")

# Tokens decoded at a time while rows are checked: 100 candidates of 8 bytes each stay below 30 MB
_CHECKED_TOKENS = 32_768
# Bytes of teacher signal that packing may hold in memory at a time
_PACKED_BYTES = 512 * 2**20


@dataclass
class StudentLimits:
    """
    What a cached row must fit: the student and the objective. `head_rows` is filled in once the student is loaded,
    after streamed datasets were prepared with it.
    """

    args: Any = None  # `OfflineDistillationConfig`
    tokenizer: Any = None
    head_rows: int | None = None
    accepted: dict[str, TeacherManifest] = field(default_factory=dict)  # by their text, as stored

    def check_manifests(self, texts: list[str]) -> None:
        """Compares each manifest with the student and the objective, and keeps it in `accepted`."""
        manifests = [TeacherManifest.from_json(text) for text in texts]
        check_student(manifests, tokenizer=self.tokenizer, head_rows=self.head_rows)
        if self.args is not None:
            check_sampled(manifests, self.args)
        self.accepted.update(zip(texts, manifests, strict=True))


def check_sampled(manifests: list[TeacherManifest], args: Any) -> None:
    """
    A sampled support estimates the teacher without bias in what is linear in it: the forward KL, as cached.

    Raises:
        ValueError: for a cache of draws and an objective that needs more; names argument, value, teacher and fix.
    """
    sampled = [manifest.teacher for manifest in manifests if manifest.layout == "sampled"]
    forward = args.divergence == "forward_kl" or (args.divergence == "generalized_jsd" and args.beta == 0.0)
    for name, value, fine in (
        ("divergence", args.divergence, forward),
        ("temperature", args.temperature, args.temperature == 1.0),
        ("kd_top_k", args.kd_top_k, args.kd_top_k is None),
    ):
        if sampled and not fine:
            raise ValueError(
                f"`{name}={value!r}` cannot be used with the cache of {sampled[0]!r}, whose layout is 'sampled': "
                "random draws stand for the teacher only in `divergence='forward_kl'` at `temperature=1.0` with "
                f"all draws kept. Change `{name}`, or use a cache of another layout."
            )


def check_columns(dataset: Dataset | IterableDataset, name: str) -> dict[str, Any]:
    """
    Refuses a dataset that is empty or lacks a cached column.

    Returns:
        `dict`: the first row.

    Raises:
        ValueError: names the dataset, the column and the fix.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"The {name} dataset is empty: pass at least one row.")
    found = list(first)
    vision = [column for column in VISION_COLUMNS if column in found]
    if vision:
        raise ValueError(
            f"The {name} dataset has the vision column {vision[0]!r}: only text can be distilled. Remove the column."
        )
    for column in COLUMNS:
        if column in found:
            continue
        close = difflib.get_close_matches(column, [c for c in found if c not in COLUMNS], n=1, cutoff=0.6)
        fix = (
            f"Rename the column with `dataset.rename_column({close[0]!r}, {column!r})`."
            if close
            else "Build the dataset with `build_distillation_dataset`."
        )
        raise ValueError(
            f"The {name} dataset has no column {column!r} (columns: {', '.join(found)}); a cached dataset has "
            f"{', '.join(COLUMNS)}. {fix}"
        )
    for column in TOKEN_COLUMNS:
        if not isinstance(first[column], (list, tuple)) and not hasattr(first[column], "__len__"):
            raise ValueError(
                f"The {name} dataset holds {type(first[column]).__name__} in column {column!r}, expected one entry "
                "for each token. Build the dataset with `build_distillation_dataset`."
            )
    return first


def check_trained_positions(labels: list[int], blobs: list[bytes], head_rows: int | None, where: str) -> bool:
    """
    Checks the teacher of one row.

    Args:
        labels (`list[int]`): Labels of the row; the label of token `t + 1` is described by blob `t`.
        blobs (`list[bytes]`): `teacher_topk` of the row.
        head_rows (`int`, *optional*): Rows of the student's head.
        where (`str`): Names dataset and row in messages.

    Returns:
        `bool`: whether any position is trained.

    Raises:
        ValueError: names the row, the position and the fix.
    """
    if len(blobs) != len(labels):
        raise ValueError(
            f"{where}: `teacher_topk` has {len(blobs)} entries for {len(labels)} tokens; it must have one for each. "
            "Cut tokens and teacher together, or build the dataset again."
        )
    positions = [t for t in range(len(labels) - 1) if labels[t + 1] != -100]
    if not positions:
        return False
    for t in positions:
        if not blobs[t]:
            raise ValueError(
                f"{where}: token {t + 1} is trained (label {labels[t + 1]}), but `teacher_topk[{t}]` is empty. Set "
                "its label to -100, or capture it."
            )
    try:
        teacher = decode_topk([blobs[t] for t in positions])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    present = teacher.logprobs != -torch.inf
    wrong = (torch.isnan(teacher.logprobs) | (teacher.logprobs == torch.inf)).any(-1)
    wrong |= torch.isnan(teacher.log_tail) | (teacher.log_tail == torch.inf)
    if wrong.any():
        t = positions[int(wrong.nonzero()[0])]
        raise ValueError(
            f"{where}: `teacher_topk[{t}]` holds NaN or +inf, and token {t + 1} is trained. Set its label to -100, or "
            "capture the row again."
        )
    if head_rows is not None:
        beyond = present & ((teacher.token_ids >= head_rows) | (teacher.token_ids < 0))
        if beyond.any():
            row, k = beyond.nonzero()[0].tolist()
            raise ValueError(
                f"{where}: `teacher_topk[{positions[row]}]` holds token id {int(teacher.token_ids[row, k])}, and the "
                f"student's head has {head_rows} rows. Use a student with a wider head, or capture with a teacher "
                "whose vocabulary the student shares."
            )
    return True


def _row_lengths(dataset: Dataset, columns: tuple[str, ...]):
    """Yields `(first row index, {column: list of lengths})` without decoding any value."""
    start = 0
    for table in dataset.select_columns(list(columns)).with_format("arrow").iter(1000):
        yield start, {column: pc.list_value_length(table[column]).to_pylist() for column in columns}
        start += len(table)


def check_lengths(dataset: Dataset, name: str) -> int:
    """Refuses rows whose token columns differ in length. Returns the length of the longest row."""
    longest = 0
    for start, lengths in _row_lengths(dataset, TOKEN_COLUMNS):
        for i, (tokens, *others) in enumerate(zip(*(lengths[column] for column in TOKEN_COLUMNS), strict=True)):
            for column, length in zip(TOKEN_COLUMNS[1:], others, strict=True):
                if length != tokens:
                    raise ValueError(
                        f"Row {start + i} of the {name} dataset: `{column}` has {length} entries for {tokens} tokens; "
                        "it must have one for each. Cut the columns together, or build the dataset again."
                    )
            longest = max(longest, tokens or 0)
    return longest


def check_rows(dataset: Dataset, name: str, head_rows: int | None, rank: int = 0, world_size: int = 1) -> bool:
    """
    Checks the teacher of every row, or of this rank's share of them.

    Returns:
        `bool`: whether any position of the checked rows is trained.

    Raises:
        ValueError: names the row and the fix.
    """
    # The first rows to the first ranks, one more to each of the first `len % world_size`
    small, larger = divmod(len(dataset), world_size)
    row = rank * small + min(rank, larger)
    count = small + (rank < larger)
    if count == 0:
        return False
    trained = False
    share = dataset.select_columns(list(TOKEN_COLUMNS)).select(range(row, row + count)).with_format("arrow")
    longest = max(
        (max(lengths["input_ids"], default=1) for _, lengths in _row_lengths(share, ("input_ids",))), default=1
    )
    for table in share.iter(max(1, _CHECKED_TOKENS // max(1, longest))):
        labels, blobs = table["labels"].combine_chunks(), table["teacher_topk"].combine_chunks()
        try:
            trained |= _check_batch(labels, blobs, head_rows)
        except ValueError:
            # Find the row at fault, which names itself
            for i in range(len(table)):
                where = f"Row {row + i} of the {name} dataset"
                check_trained_positions(labels[i].as_py(), blobs[i].as_py(), head_rows, where)
            raise
        row += len(table)
    return trained


def _check_batch(labels: pa.ListArray, blobs: pa.ListArray, head_rows: int | None) -> bool:
    """`check_trained_positions` for several rows at once, as one row: their last positions train nothing."""
    flat_labels = pc.list_flatten(labels).to_numpy(zero_copy_only=False).copy()
    lengths = pc.list_value_length(labels).to_numpy(zero_copy_only=False)
    starts = (lengths.cumsum() - lengths)[lengths > 0]
    flat_labels[starts] = -100
    return check_trained_positions(flat_labels.tolist(), pc.list_flatten(blobs).to_pylist(), head_rows, "")


def trained_labels(labels: list[int]) -> bool:
    """Whether anything is predicted: the first token never is."""
    return any(label != -100 for label in labels[1:])


class _StreamedRow:
    """Checks and cuts one streamed row."""

    def __init__(self, limits: StudentLimits, name: str, cut: slice | None):
        self.limits, self.name, self.cut = limits, name, cut

    def __call__(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        where = f"Row {index} of the {self.name} dataset"
        if example["teacher_manifest"] not in self.limits.accepted:
            try:
                self.limits.check_manifests([example["teacher_manifest"]])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        if len(example["input_ids"]) != len(example["labels"]):
            raise ValueError(
                f"{where}: `labels` has {len(example['labels'])} entries for {len(example['input_ids'])} tokens; it "
                "must have one for each."
            )
        check_trained_positions(example["labels"], example["teacher_topk"], self.limits.head_rows, where)
        if self.cut is None:
            return example
        return {**example, **{column: example[column][self.cut] for column in TOKEN_COLUMNS}}


def _cut(example: dict[str, Any], cut: slice) -> dict[str, Any]:
    return {column: example[column][cut] for column in TOKEN_COLUMNS}


def prepare_cached_dataset(
    dataset: Dataset | IterableDataset, args, packing: bool, name: str, limits: StudentLimits
) -> Dataset | IterableDataset:
    """
    What `SFTTrainer._prepare_dataset` does to a tokenised dataset, with the teacher carried along: truncation to
    `max_length` (rows left without a trained token are dropped), packing, shuffling.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): Cached dataset.
        args ([`OfflineDistillationConfig`]): Options of the preparation.
        packing (`bool`): Whether to pack.
        name (`str`): Name of the dataset, for messages and progress bars.
        limits ([`StudentLimits`]): What streamed rows are compared with.

    Returns:
        The prepared dataset.
    """
    map_style = isinstance(dataset, Dataset)
    cut = None
    if args.max_length is not None and not packing:
        cut = slice(None, args.max_length) if args.truncation_mode == "keep_start" else slice(-args.max_length, None)
    if map_style:
        longest = check_lengths(dataset, name)
        # Cutting writes the whole teacher to disk again, so rows that fit already are left where they are
        if cut is not None and longest > args.max_length:
            dataset = dataset.map(
                _cut,
                fn_kwargs={"cut": cut},
                num_proc=args.dataset_num_proc,
                writer_batch_size=_rows_at_a_time(dataset),
                desc=f"Truncating {name} dataset",
            )
        if cut is not None:
            dataset = dataset.filter(
                trained_labels,
                input_columns=["labels"],
                num_proc=args.dataset_num_proc,
                desc=f"Dropping untrained rows from {name} dataset",
            )
    else:
        features = dataset.features
        dataset = dataset.map(_StreamedRow(limits, name, cut), with_indices=True, features=features)
        if cut is not None:
            dataset = dataset.filter(trained_labels, input_columns=["labels"])

    if packing:
        if args.max_length is None:
            raise ValueError("`packing=True` needs the length to pack to: set `max_length`.")
        dataset = dataset.select_columns(list(TOKEN_COLUMNS))
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        map_kwargs = {}
        if map_style:
            rows = _rows_at_a_time(dataset)
            map_kwargs = {
                "num_proc": args.dataset_num_proc,
                "desc": f"Packing {name} dataset",
                "batch_size": rows,
                "writer_batch_size": rows,
            }
        dataset = pack_dataset(dataset, args.max_length, args.packing_strategy, map_kwargs)

    if args.shuffle_dataset:
        dataset = dataset.shuffle(seed=args.seed)
    return dataset


def _rows_at_a_time(dataset: Dataset) -> int:
    """Rows whose teacher takes about `_PACKED_BYTES`, at most the 1000 of `Dataset.map`."""
    first = dataset[0]["teacher_topk"]
    blob_bytes = max((len(blob) for blob in first), default=1)
    longest = max(
        (max(lengths["input_ids"], default=1) for _, lengths in _row_lengths(dataset, ("input_ids",))), default=1
    )
    return min(1000, max(1, _PACKED_BYTES // max(1, blob_bytes * longest)))
