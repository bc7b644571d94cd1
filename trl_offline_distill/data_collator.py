"""Tokens and their cached teacher rows, padded together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from .teacher_cache.codecs import decode_topk
from .teacher_cache.topk import TeacherTopK


@dataclass
class DataCollatorForOfflineDistillation(DataCollatorForLanguageModeling):
    """TRL's language-modelling collator, with the teacher's rows of every trained position.

    Each example holds `input_ids`, `labels` and `teacher_topk` (one blob for each token, entry `t` describes token `t
    + 1`), and `seq_lengths` if it was packed. Beside TRL's keys the batch holds

    - `teacher_token_ids` (`[B, S, K]` int32), `teacher_logprobs` (`[B, S, K]` float32, `-inf` where absent),
    - `teacher_log_tail` (`[B, S]` float32, log of the mass outside the support),
    - `teacher_log_tail_at` (`[B, S, M]` float32), only where the tail was cached at M extra temperatures,

    with K the widest support of the batch. Row `t` describes token `t + 1`: nothing is shifted here. A position whose
    next label is not trained (masked, padding, the last one of a sample) has ids 0, log-probabilities `-inf` and
    `log_tail` 0, whatever its blob holds: such blobs are not even read. The last row of a sample never describes the
    first token of the next one, because that token's label is masked in packed and flattened batches.

    Args:
        pad_token_id (`int`):
            Token id of the padding.
        padding_free (`bool`):
            Flatten the batch into one sequence, as in TRL.
        return_position_ids (`bool`):
            Return position ids in the padded form too, as in TRL.
        pad_to_multiple_of (`int`, *optional*):
            Pad the sequence length to a multiple of this value.
        return_tensors (`str`):
            `"pt"`.
        top_k (`int`, *optional*):
            Keep the `top_k` most likely tokens of each row; the dropped mass moves into the tail.
        tail_temperatures (`tuple[float, ...]`, *optional*):
            The extra temperatures to return, one column each; every trained row must hold them. By default those that
            all rows of the batch hold.
        return_example_ids (`bool`):
            Return `example_ids` (`[B, S]` int64): which example of the batch a token comes from. Flattening hides it.
    """

    top_k: int | None = None
    tail_temperatures: tuple[float, ...] | None = None
    return_example_ids: bool = False

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"`top_k` is {self.top_k}; it must be at least 1, or None for all that is cached. Raise it or leave "
                "it out."
            )

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Batch of `[B, S]` tokens (`[1, S]` if `padding_free`) and their teacher rows."""
        columns = [_teacher_blobs(example, row) for row, example in enumerate(examples)]
        batch = super().torch_call(examples)
        labels = batch["labels"]
        # Where each example begins in the flattened batch.
        if self.padding_free:
            offsets = np.cumsum([0, *map(len, columns[:-1])])
        else:
            offsets = labels.shape[1] * np.arange(len(columns))
        # TRL masks the first token of each packed sample only where it makes position ids.
        for example, offset in zip(examples, offsets):
            if "seq_lengths" in example:
                starts = offset + np.cumsum(example["seq_lengths"])[:-1]
                labels.view(-1)[torch.from_numpy(starts)] = -100
        trained = torch.zeros_like(labels, dtype=torch.bool)
        trained[:, :-1] = labels[:, 1:] != -100
        if self.return_example_ids:
            places = np.searchsorted(offsets, np.arange(labels.numel()), side="right") - 1
            batch["example_ids"] = torch.from_numpy(places).view_as(labels)
        return batch | self._teacher_rows(columns, offsets, trained)

    def _teacher_rows(self, columns: list[Sequence[bytes]], offsets: np.ndarray, trained: Tensor) -> dict[str, Tensor]:
        """Teacher tensors of a batch, filled where `trained` `[B, S]`."""
        shape, flat = trained.shape, trained.view(-1)
        blobs: list[bytes] = []
        for column, offset in zip(columns, offsets.tolist()):
            blobs.extend(compress(column, flat[offset : offset + len(column)].tolist()))
        positions = flat.nonzero().squeeze(1)

        def place(index: int) -> str:
            position = int(positions[index])
            row = int(np.searchsorted(offsets, position, side="right")) - 1
            return f"row {row} of the batch, token {position - offsets[row]}"

        if not all(blobs):
            raise ValueError(
                f"`teacher_topk` has no blob at {place(blobs.index(b''))}, whose next token is trained (`labels`); "
                "every trained token needs the teacher's row. Capture again, or set that label to -100."
            )
        teacher = decode_topk(blobs, top_k=self.top_k)
        # The largest value tells NaN, +inf and positive numbers apart from log-probabilities in one pass.
        if blobs and not (float(teacher.logprobs.max()) <= 0 and float(teacher.log_tail.max()) <= 0):
            sound = (teacher.logprobs <= 0).all(1) & (teacher.log_tail <= 0)
            raise ValueError(
                "`teacher_topk` holds NaN, +inf or a positive log-probability at "
                f"{place(int((~sound).nonzero()[0]))}, whose next token is trained; log-probabilities are at most 0. "
                "The cache is damaged: capture this row again, or drop it."
            )

        def scatter(values: Tensor, fill: float) -> Tensor:
            full = values.new_full((shape.numel(), *values.shape[1:]), fill)
            full.index_copy_(0, positions, values)
            return full.view(*shape, *values.shape[1:])

        rows = {
            "teacher_token_ids": scatter(teacher.token_ids, 0),
            "teacher_logprobs": scatter(teacher.logprobs, -torch.inf),
            "teacher_log_tail": scatter(teacher.log_tail, 0.0),
        }
        log_tail_at = self._tail_columns(teacher)
        if log_tail_at is not None:
            rows["teacher_log_tail_at"] = scatter(log_tail_at, 0.0)
        return rows

    def _tail_columns(self, teacher: TeacherTopK) -> Tensor | None:
        """`[n, M]`: the tail at the temperatures asked for, None where there are none."""
        wanted, held = self.tail_temperatures, teacher.tail_temperatures
        if wanted is None:
            return teacher.log_tail_at
        lacking = [temperature for temperature in wanted if temperature not in held]
        if not wanted or not len(teacher.log_tail):
            return teacher.log_tail.new_zeros(0, len(wanted)) if wanted else None
        if lacking:
            raise ValueError(
                f"`tail_temperatures` asks for {lacking}; the rows of this batch hold {list(held)} beside 1. Ask for "
                "cached temperatures, or capture again with the ones needed."
            )
        return teacher.log_tail_at[:, [held.index(temperature) for temperature in wanted]]


def _teacher_blobs(example: dict[str, Any], row: int) -> Sequence[bytes]:
    """The blobs of one example, one for each token, or an error that names the column."""
    if "teacher_topk" not in example:
        raise ValueError(
            f"`teacher_topk` is missing in row {row} of the batch (columns: {sorted(example)}); offline distillation "
            "needs the cached teacher. Build it with `build_distillation_dataset`, and keep the column "
            "(`remove_unused_columns`)."
        )
    blobs = example["teacher_topk"]
    # NumPy's fixed-width bytes lose the zero bytes at the end of a blob.
    if isinstance(blobs, np.ndarray) and blobs.dtype.kind == "S":
        raise ValueError(
            f"`teacher_topk` is a NumPy array of dtype {blobs.dtype} in row {row} of the batch; blobs must be Python "
            "`bytes`. Load the data set without a NumPy format (`dataset.with_format(None)`)."
        )
    if len(blobs) != len(example["input_ids"]):
        raise ValueError(
            f"`teacher_topk` has {len(blobs)} entries and `input_ids` {len(example['input_ids'])} in row {row} of the "
            "batch; there must be one for each token. Truncate, pack or filter both columns together."
        )
    return blobs
