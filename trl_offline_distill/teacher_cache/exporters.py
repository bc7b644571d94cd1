"""A cached dataset as typed columns, for people and for other tools."""

from typing import Any, TypeVar

from datasets import Dataset, Features, IterableDataset, List, Value

from .codecs import decode_topk
from .columns import FEATURES
from .manifest import TeacherManifest


AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)

# Nested lists count their values in 32 bits: a batch of rows must stay below 2**31 entries.
MAX_VALUES_IN_BATCH = 2**31 - 1
_LONGEST_ROW = 131_072


def to_typed_columns(dataset: AnyDataset) -> AnyDataset:
    """Replace `teacher_topk` by columns of numbers that need no codec.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            A cached dataset.

    Returns:
        The same rows with, in place of `teacher_topk`, for each token `t` and for the token after it

        - `teacher_token_ids` (`[T][K]` int32) and `teacher_logprobs` (`[T][K]` float32, natural log, descending),
        - `teacher_log_tail` (`[T]` float32, null where there is no teacher),
        - `teacher_log_tail_at` (`[T][M]` float32, the tail at the `tail_temperatures` of the manifest).

        `K` differs from token to token; it is 0 where there is no teacher. `import_teacher(..., source="typed")` reads
        them back. They read tens of times slower than blobs: `benchmarks/data_loading.py` measures it.
    """
    first = next(iter(dataset), None)
    if first is None or not set(FEATURES) <= set(first):
        found = None if first is None else sorted(first)
        raise ValueError(
            f"`dataset` has the columns {found}; a cached dataset with at least one row is needed: {list(FEATURES)}."
        )
    kept = dataset.features or Features({name: FEATURES[name] for name in first if name in FEATURES})
    features = Features({name: feature for name, feature in kept.items() if name != "teacher_topk"})
    features["teacher_token_ids"] = List(List(Value("int32")))
    features["teacher_logprobs"] = List(List(Value("float32")))
    features["teacher_log_tail"] = List(Value("float32"))
    features["teacher_log_tail_at"] = List(List(Value("float32")))
    if isinstance(dataset, IterableDataset):
        return dataset.map(_typed_row, remove_columns=["teacher_topk"], features=features)
    top_k = TeacherManifest.from_json(first["teacher_manifest"]).top_k
    rows = max(1, MAX_VALUES_IN_BATCH // (_LONGEST_ROW * top_k))
    return dataset.map(_typed_row, remove_columns=["teacher_topk"], features=features, writer_batch_size=rows)


def _typed_row(row: dict[str, Any]) -> dict[str, Any]:
    teacher = decode_topk(row["teacher_topk"])
    counts = (teacher.logprobs > float("-inf")).sum(-1).tolist()
    filled = [bool(blob) for blob in row["teacher_topk"]]
    at = [[]] * len(counts) if teacher.log_tail_at is None else teacher.log_tail_at.tolist()
    return {
        "teacher_token_ids": [ids[:k] for ids, k in zip(teacher.token_ids.tolist(), counts)],
        "teacher_logprobs": [values[:k] for values, k in zip(teacher.logprobs.tolist(), counts)],
        "teacher_log_tail": [value if held else None for value, held in zip(teacher.log_tail.tolist(), filled)],
        "teacher_log_tail_at": [values if held else [] for values, held in zip(at, filled)],
    }
