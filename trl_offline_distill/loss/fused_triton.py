"""
The kernels of the fused loss in Triton: one pass that reduces a tile of logits `[n, V]` to a few numbers a row, and
one that overwrites it with its gradient. Both read the raw tile once, in its own dtype, and compute in fp32 registers.
The GEMMs around them stay in cuBLAS. `TorchKernels` in `fused.py` is the same in torch.

The module imports without Triton; `why_not` then says so.
"""

# Annotations stay text: `tl` exists only with Triton
from __future__ import annotations

import functools

import torch
from torch import Tensor

from .divergences import LOG_ZERO
from .fused import TailStats, marker
from .logit_transform import LogitTransform


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Columns a program handles at once, and its warps: 16 entries a thread
BLOCK = 4096
WARPS = 8
# Triton 3.9 warns where this is left to its changing default
FUSE_MULTIPLY_ADD = {"enable_fp_fusion": True}
# A chunk of few rows is cut along the vocabulary until this many programs a multiprocessor are in flight
PROGRAMS_A_PROCESSOR = 4
MAX_SPLITS = 64
# Volta, the oldest architecture that Triton compiles for
MIN_CAPABILITY = (7, 0)

# Kernels are interpreted on the host, where CPU tensors are, if this was set when they were defined
INTERPRETED = triton is not None and triton.knobs.runtime.interpret


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run on tensors of this device and dtype, as half a sentence, or `None` if they can."""
    if triton is None:
        return "the `triton` package is not installed"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels compute in fp32, which is too little for {dtype}"
    if device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} is older than compute capability 7.0"
        return None
    if device.type == "cpu" and INTERPRETED:
        return None
    return f"the tensors are on {device.type!r}, and it needs 'cuda' (or TRITON_INTERPRET=1, for tests on 'cpu')"


def _jit(function):
    return function if triton is None else triton.jit(function)


@_jit
def _logits(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    # (logits, d logits / d raw). With e = exp(-2 |x|): |tanh(x)| = (1 - e) / (1 + e), and its slope 4 e / (1 + e)^2
    # stays exact where the soft-cap saturates
    logits = raw * scale
    slope = scale
    if HAS_SOFTCAP:
        x = logits / softcap
        e = tl.exp(-2.0 * tl.abs(x))
        logits = softcap * tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
        slope = scale * 4.0 * e / ((1.0 + e) * (1.0 + e))
    return logits, slope


@_jit
def _store_stats(out_ptr, n_rows, row, top, total, moment, tempered, inverse_temperature, TEMPERED: tl.constexpr):
    # `out` [4, n]: maximum, lse, entropy, lse_tempered. An empty row has total 0 and therefore lse -inf
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + n_rows + row, top + tl.log(total))
    entropy = tl.where(total > 0.0, tl.log(total) - moment / total, 0.0)
    # A NaN among the logits shows in every number of its row
    tl.store(out_ptr + 2 * n_rows + row, tl.where(total == total, entropy, total))
    if TEMPERED:
        tl.store(out_ptr + 3 * n_rows + row, top * inverse_temperature + tl.log(tempered))


@_jit
def _reduce_kernel(
    tile_ptr,
    row_stride,
    column_stride,
    n_columns,
    out_ptr,
    partial_ptr,
    n_rows,
    splits,
    split_columns,
    threshold,
    scale,
    softcap,
    inverse_temperature,
    LOG_ZERO: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERED: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program reduces `split_columns` columns of one row, a multiple of BLOCK. The maximum is one number; the sums
    # keep an entry for each lane until the end, so a block costs one reduction and one exponential an entry (two at a
    # temperature).
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    split = program % splits
    row_ptr = tile_ptr + row * row_stride
    start = split * split_columns
    stop = tl.minimum(start + split_columns, n_columns)

    top = tl.full([], LOG_ZERO, tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)  # sum exp(z - top)
    moment = tl.full([BLOCK], 0.0, tl.float32)  # sum exp(z - top) (z - top)
    tempered = tl.full([BLOCK], 0.0, tl.float32)  # sum exp((z - top) / T)
    for first in range(start, stop, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < n_columns
        raw = tl.load(row_ptr + columns.to(tl.int64) * column_stride, mask=mask, other=-float("inf"))
        raw = raw.to(tl.float32)
        out = raw <= threshold
        logits, _ = _logits(raw, scale, softcap, HAS_SOFTCAP)
        logits = tl.where(out, LOG_ZERO, logits)
        new_top = tl.maximum(top, tl.max(logits, axis=0))
        step = top - new_top
        shrink = tl.exp(step)
        shifted = logits - new_top
        weights = tl.where(out, 0.0, tl.exp(shifted))
        moment = shrink * (moment + step * total) + weights * shifted
        total = shrink * total + weights
        if TEMPERED:
            weights = tl.where(out, 0.0, tl.exp(shifted * inverse_temperature))
            tempered = tl.exp(step * inverse_temperature) * tempered + weights
        top = new_top

    total = tl.sum(total, axis=0)
    moment = tl.sum(moment, axis=0)
    tempered = tl.sum(tempered, axis=0)
    if WHOLE_ROW:
        _store_stats(out_ptr, n_rows, row, top, total, moment, tempered, inverse_temperature, TEMPERED)
    else:
        # [4, splits, n], with few rows
        partial_ptr += split * n_rows + row
        part = splits * n_rows
        tl.store(partial_ptr, top)
        tl.store(partial_ptr + part, total)
        tl.store(partial_ptr + 2 * part, moment)
        tl.store(partial_ptr + 3 * part, tempered)


@_jit
def _combine_kernel(
    partial_ptr,
    out_ptr,
    n_rows,
    inverse_temperature,
    TEMPERED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # A program joins the parts of one row; a part without entries holds `LOG_ZERO`, 0, 0, 0
    row = tl.program_id(0).to(tl.int64)
    at = partial_ptr + tl.arange(0, SPLITS) * n_rows + row
    part = SPLITS * n_rows
    tops = tl.load(at)
    total = tl.load(at + part)
    moment = tl.load(at + 2 * part)
    tempered = tl.load(at + 3 * part)
    top = tl.max(tops, axis=0)
    step = tops - top
    shrink = tl.exp(step)
    moment = tl.sum(shrink * (moment + step * total), axis=0)
    total = tl.sum(shrink * total, axis=0)
    tempered = tl.sum(tl.exp(step * inverse_temperature) * tempered, axis=0)
    _store_stats(out_ptr, n_rows, row, top, total, moment, tempered, inverse_temperature, TEMPERED)


@_jit
def _gradient_kernel(
    tile_ptr,
    row_stride,
    column_stride,
    n_columns,
    blocks,
    kd_ptr,
    ce_ptr,
    lse_ptr,
    lse_tempered_ptr,
    threshold,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program overwrites one block of one row
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n_columns
    pointers = tile_ptr + row * row_stride + columns.to(tl.int64) * column_stride
    raw = tl.load(pointers, mask=mask, other=-float("inf")).to(tl.float32)
    logits, slope = _logits(raw, scale, softcap, HAS_SOFTCAP)
    kd = tl.load(kd_ptr + row)
    ce = tl.load(ce_ptr + row)
    probability = tl.exp(logits - tl.load(lse_ptr + row))
    if TEMPERED:
        tempered = tl.exp(logits * inverse_temperature - tl.load(lse_tempered_ptr + row))
        gradient = kd * tempered + ce * probability
    else:
        gradient = (kd + ce) * probability
    gradient = tl.where(raw <= threshold, 0.0, gradient * slope)
    tl.store(pointers, gradient.to(tile_ptr.dtype.element_ty), mask=mask)


@functools.lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits(n_rows: int, blocks: int, processors: int) -> int:
    """Programs a row: a power of two, 1 unless the rows alone leave the device idle."""
    wanted = min(PROGRAMS_A_PROCESSOR * processors // n_rows, blocks, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def _transform_arguments(tile: Tensor, transform: LogitTransform, temperature: float) -> dict[str, float | bool]:
    return {
        "threshold": marker(tile.dtype) / 2,
        "scale": float(transform.scale),
        "softcap": 1.0 if transform.softcap is None else float(transform.softcap),
        "inverse_temperature": 1.0 / temperature,
        "HAS_SOFTCAP": transform.softcap is not None,
        "TEMPERED": temperature != 1.0,
    }


class TritonKernels:
    """The kernels in Triton, for tiles in fp32, bf16 or fp16 of any strides; see `Kernels` in `fused.py`."""

    def reduce_tail(self, tile: Tensor, transform: LogitTransform, temperature: float) -> TailStats:
        n, n_columns = tile.shape
        out = tile.new_empty((4, n), dtype=torch.float32)
        if n:
            blocks = triton.cdiv(n_columns, BLOCK)
            splits = _splits(n, blocks, _processors(tile.device))
            partial = out if splits == 1 else tile.new_empty((4, splits, n), dtype=torch.float32)
            arguments = _transform_arguments(tile, transform, temperature)
            with torch.cuda.device_of(tile):
                _reduce_kernel[(n * splits,)](
                    tile,
                    *tile.stride(),
                    n_columns,
                    out,
                    partial,
                    n,
                    splits,
                    triton.cdiv(blocks, splits) * BLOCK,
                    **arguments,
                    LOG_ZERO=LOG_ZERO,
                    WHOLE_ROW=splits == 1,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                    **FUSE_MULTIPLY_ADD,
                )
                if splits > 1:
                    _combine_kernel[(n,)](
                        partial,
                        out,
                        n,
                        arguments["inverse_temperature"],
                        TEMPERED=arguments["TEMPERED"],
                        SPLITS=splits,
                        num_warps=1,
                        **FUSE_MULTIPLY_ADD,
                    )
        maximum, lse, entropy, tempered = out
        return TailStats(maximum, lse, lse if temperature == 1.0 else tempered, entropy)

    def write_tail_gradient(
        self,
        tile: Tensor,
        transform: LogitTransform,
        temperature: float,
        kd_coefficient: Tensor,
        ce_coefficient: Tensor,
        stats: TailStats,
    ) -> None:
        n, n_columns = tile.shape
        if not n:
            return
        blocks = triton.cdiv(n_columns, BLOCK)
        with torch.cuda.device_of(tile):
            _gradient_kernel[(n * blocks,)](
                tile,
                *tile.stride(),
                n_columns,
                blocks,
                kd_coefficient.contiguous(),
                ce_coefficient.contiguous(),
                stats.lse,
                stats.lse_tempered,
                **_transform_arguments(tile, transform, temperature),
                BLOCK=BLOCK,
                num_warps=WARPS,
                **FUSE_MULTIPLY_ADD,
            )
