"""
The fused chunked distillation loss: hidden states and the head's weight go in, a scalar comes out, and the logits
exist for one chunk of positions at a time.

Per chunk: (a) project onto the vocabulary and reduce to the support's logits and the tail's normaliser, (b) a
divergence on K+1 outcomes (`divergences.py`), differentiated by autograd on `[n, K+1]`, (c) turn the tile of logits
into its own gradient, from one coefficient a row and K+1 corrections, and multiply it into the gradients of the hidden
states and of the head. (a) and (c) know no divergence, (b) knows no vocabulary. The derivation is in `README.md`
beside this file.

Legend: `N` positions, `n` positions of one chunk, `H` hidden size, `V` head rows, `K` support size.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .divergences import DIVERGENCES, LOG_ZERO, check_objective
from .logit_transform import LogitTransform
from .outcomes import check_temperature, teacher_outcomes
from .reference import dense_loss


if TYPE_CHECKING:
    from ..teacher_cache.topk import TeacherTopK


BACKENDS = ("auto", "reference", "torch", "triton")
BACKWARDS = ("in_forward", "recompute")
IGNORE_INDEX = -100
# Bytes of logits that may exist at once when neither `chunk_size` nor `loss_memory_budget` is given. A trained head
# adds to `[V, H]` accumulators once a chunk, so larger chunks save memory traffic, up to about 4096 positions.
DEFAULT_MEMORY_BUDGET = {"cpu": 32 * 2**20, "cuda": 2**30}
MAX_AUTO_CHUNK = 4096
# fp16 reaches down to 6e-8 only: gradients of logits, which are at most about 1, are multiplied by this before they
# are rounded to it, and the products are divided by it in fp32.
FP16_TILE_SCALE = 1024.0
# Rows of a chunk from which the module road lowers that factor.
FP16_CHUNK_ROWS = 16


@dataclass
class FusedDistillationOutput:
    """
    Result of [`fused_distillation_loss`].

    Args:
        loss (`Tensor`):
            Scalar, differentiable: `(kd_weight * kd_sum + ce_weight * ce_sum) / num_items`.
        kd_sum, ce_sum (`Tensor`):
            Scalars, detached, unweighted, in nats.
        num_items (`Tensor` or `float`):
            What the sums were divided by.
        num_tokens (`int`):
            Positions that counted: those whose label is not -100.
        kd, ce, entropy, label_agreement, teacher_agreement, support_mass (`Tensor`):
            `[N]`, detached, one value a position, 0 where the label is -100: divergence (with its factor
            `temperature ** 2`), cross-entropy (0 without labels), entropy of the student's full distribution in nats,
            whether the student's most likely token is the label and whether it is the teacher's most likely one (a tie
            counts as agreement), and the student's probability of the teacher's support.
    """

    loss: Tensor
    kd_sum: Tensor
    ce_sum: Tensor
    num_items: Tensor | float
    num_tokens: int
    kd: Tensor
    ce: Tensor
    entropy: Tensor
    label_agreement: Tensor
    teacher_agreement: Tensor
    support_mass: Tensor


PER_TOKEN = ("kd", "ce", "entropy", "label_agreement", "teacher_agreement", "support_mass")


@dataclass
class TailStats:
    """
    What a kernel reports of a tile `[n, V]` of logits, over the entries that are not `LOG_ZERO` markers; each `[n]`.

    Args:
        maximum: the largest logit, `LOG_ZERO` for a row without entries.
        lse: `log sum exp(z)`, `-inf` for a row without entries.
        lse_tempered: `log sum exp(z / T)`; the same tensor as `lse` at `T = 1`.
        entropy: entropy in nats of `softmax(z)` among these entries, 0 for a row without entries.
    """

    maximum: Tensor
    lse: Tensor
    lse_tempered: Tensor
    entropy: Tensor


class Kernels(Protocol):
    """A backend: steps (a) and (c) on one tile. `torch` below, `triton` in `fused_triton.py`."""

    def reduce_tail(self, tile: Tensor, transform: LogitTransform, temperature: float) -> TailStats:
        """Reads the raw tile once; entries at or below `marker(tile.dtype) / 2` are not part of the tail."""

    def write_tail_gradient(
        self,
        tile: Tensor,
        transform: LogitTransform,
        temperature: float,
        kd_coefficient: Tensor,
        ce_coefficient: Tensor,
        stats: TailStats,
    ) -> None:
        """
        Overwrites each raw entry `u` with logit `z` by `(kd_coefficient * exp(z / T - lse_tempered) + ce_coefficient *
        exp(z - lse)) * dz/du`, markers by 0. Coefficients `[n]`.
        """


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Normalisers, sums over the vocabulary and accumulators are fp32, fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(hidden: Tensor) -> torch.dtype:
    """What the head's products are computed in: the autocast dtype where autocast is on."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def marker(dtype: torch.dtype) -> float:
    """What replaces a logit that was taken out of a tile: `LOG_ZERO`, or the lowest number of a type without it."""
    return max(LOG_ZERO, torch.finfo(dtype).min)


class TorchKernels:
    """
    The kernels in plain torch, on any device, a few rows at a time: the intermediate results of a slice stay in cache
    (CPU) or small (GPU), and the tile is the only buffer of its size.
    """

    # Entries of a slice, which is never more than a 16th of the tile: 2 MiB of fp32 stays in a CPU's cache
    SLICE: ClassVar = {"cpu": 2**19, "cuda": 2**25}

    def _slices(self, tile: Tensor) -> Iterator[slice]:
        n, vocab_size = tile.shape
        rows = max(1, min(self.SLICE.get(tile.device.type, 2**25) // vocab_size, n // 16))
        return (slice(start, min(start + rows, n)) for start in range(0, n, rows))

    @staticmethod
    def _logits(raw: Tensor, transform: LogitTransform) -> Tensor:
        dtype = stats_dtype(raw.dtype)
        if transform.is_identity and raw.dtype == dtype:
            return raw
        logits = transform(raw.to(dtype))
        return logits.masked_fill_(raw <= marker(raw.dtype) / 2, LOG_ZERO)

    def reduce_tail(self, tile: Tensor, transform: LogitTransform, temperature: float) -> TailStats:
        n, dtype = tile.shape[0], stats_dtype(tile.dtype)
        maximum, lse, tempered, entropy = tile.new_empty((4, n), dtype=dtype)
        slices = list(self._slices(tile))
        # Made once: on CPU, memory that comes back from the system with each slice costs more than the exponentials
        buffers = tile.new_empty((2, slices[0].stop if n else 0, tile.shape[1]), dtype=dtype)
        for rows in slices:
            logits = self._logits(tile[rows], transform)
            top = logits.amax(-1)
            empty = top <= LOG_ZERO / 2
            shift = torch.where(empty, 0.0, top)[:, None]
            shifted = torch.sub(logits, shift, out=buffers[0, : len(logits)])
            weights = torch.exp(shifted, out=buffers[1, : len(logits)])
            total = weights.sum(-1)
            log_total = total.log()
            maximum[rows] = torch.where(empty, LOG_ZERO, top)
            lse[rows] = log_total + shift[:, 0]
            mean = torch.linalg.vecdot(weights, shifted) / total
            entropy[rows] = torch.where(empty, 0.0, log_total - mean)
            if temperature != 1.0:
                weights = torch.mul(shifted, 1.0 / temperature, out=weights).exp_()
                tempered[rows] = weights.sum(-1).log() + shift[:, 0] / temperature
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
        lse = torch.where(stats.lse > -math.inf, stats.lse, 0.0)[:, None]
        tempered = torch.where(stats.lse_tempered > -math.inf, stats.lse_tempered, 0.0)[:, None]
        for rows in self._slices(tile):
            raw = tile[rows]
            logits = self._logits(raw, transform)
            if temperature == 1.0:
                coefficient = (kd_coefficient[rows] + ce_coefficient[rows])[:, None]
                gradient = torch.sub(logits, lse[rows], out=raw if logits is raw else None).exp_().mul_(coefficient)
            else:
                gradient = (logits / temperature).sub_(tempered[rows]).exp_().mul_(kd_coefficient[rows][:, None])
                gradient.addcmul_(torch.sub(logits, lse[rows]).exp_(), ce_coefficient[rows][:, None])
            if not transform.is_identity:
                # Markers have gradient 0 already; the clamp keeps their slope finite
                floor = LOG_ZERO if transform.softcap is None else -transform.softcap
                gradient.mul_(transform.slope(logits.clamp_(min=floor)))
            if gradient is not raw:
                raw.copy_(gradient)


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """
    The backend that `backend` stands for: itself, or for `"auto"` `"triton"` on CUDA where Triton is installed and the
    dtype is not fp64, else `"torch"`.

    Raises:
        ValueError: for an unknown name.
        RuntimeError: for `"triton"` where it cannot run; an explicit choice never falls back.
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}.")
    if backend in ("reference", "torch"):
        return backend
    if backend == "auto" and (device.type != "cuda" or dtype == torch.float64):
        return "torch"
    from .fused_triton import why_not

    reason = why_not(device, dtype)
    if reason is None:
        return "triton"
    if backend == "triton":
        raise RuntimeError(f"`backend='triton'` cannot run here: {reason}. Use `backend='torch'` or `'auto'`.")
    return "torch"


def _kernels(backend: str) -> Kernels:
    if backend == "triton":
        from .fused_triton import TritonKernels

        return TritonKernels()
    return TorchKernels()


# Columns of a projection that are computed at once on CPU: the rows of the head behind them stay in cache while they
# are packed, which otherwise costs a quarter of the product of a small chunk
CPU_COLUMNS = 1024


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`out = a @ b` with fp32 accumulation and a single rounding, to `out`'s dtype."""
    if a.dtype == out.dtype == torch.float32 and a.device.type == "cpu":
        for columns in zip(b.split(CPU_COLUMNS, 1), out.split(CPU_COLUMNS, 1), strict=True):
            torch.mm(a, columns[0], out=columns[1])
        return out
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """
    `total += a @ b`, or `total = a @ b` for the first chunk, without rounding the product to the inputs' dtype: a sum
    of rounded products is biased.
    """
    beta = 0 if first else 1
    if a.dtype != total.dtype and total.device.type == "cuda":
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


class LinearHead:
    """
    A head whose logits are a known transform of `hidden @ weight.T + bias`; `tensors` is `(weight, bias)`.

    Args:
        transform (`LogitTransform`):
            Scale and soft-cap after the projection.
        logits_dtype (`torch.dtype`, *optional*):
            What the tile is kept in: the dtype of the projection (`None`, as the model's own forward does), or fp32.
    """

    def __init__(self, transform: LogitTransform, logits_dtype: torch.dtype | None = None):
        self.transform = transform
        self.logits_dtype = logits_dtype
        self._tile: Tensor | None = None

    def rows(self, tensors: tuple[Tensor, ...]) -> int:
        return tensors[0].shape[0]

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        tile = self.logits_dtype or dtype
        return tile.itemsize + (dtype.itemsize if tile != dtype else 0)

    @contextlib.contextmanager
    def running(self, hidden: Tensor, tensors: tuple[Tensor, ...], chunk_size: int) -> Iterator[None]:
        """Casts the head once, for as many chunks as run inside, and holds the one tile they share."""
        dtype = product_dtype(hidden)
        weight, bias = tensors
        self._weight = weight.detach().to(dtype)
        self._bias = None if bias is None else bias.detach()
        self._tile = hidden.new_empty((min(chunk_size, len(hidden)), len(weight)), dtype=self.logits_dtype or dtype)
        try:
            with torch.autocast(hidden.device.type, enabled=False):
                yield
        finally:
            del self._weight, self._bias
            self._tile = None

    def project(self, hidden: Tensor, differentiable: bool) -> tuple[Tensor, Any]:
        """Raw output `[n, V]` in a buffer of its own, and what `backproject` needs besides."""
        hidden = hidden.to(self._weight.dtype)
        tile = _matmul(hidden, self._weight.T, out=self._tile[: len(hidden)])
        if self._bias is not None:
            tile.add_(self._bias)
        return tile, hidden

    def backproject(self, tile: Tensor, hidden: Tensor, gradients: "Gradients", rows: slice) -> None:
        """Multiplies `d loss / d raw` `[n, V]` into the gradients."""
        gradient = tile.to(hidden.dtype)
        weight_gradient, bias_gradient = gradients.tensors
        if gradients.hidden is not None:
            target = gradients.hidden[rows]
            if target.dtype == hidden.dtype:
                torch.mm(gradient, self._weight, out=target)
            else:
                target.copy_(torch.mm(gradient, self._weight))
        if weight_gradient is not None:
            _accumulate(weight_gradient, gradient.T, hidden, first=gradients.first)
        if bias_gradient is not None:
            bias_gradient.add_(gradient.sum(0, dtype=bias_gradient.dtype))


class ModuleHead:
    """
    Any other head: `forward` maps hidden states `[n, H]` to logits `[n, V]`, and is differentiated chunk by chunk.
    `tensors` are its parameters. The logits exist twice, as the module made them and as the tile.

    Args:
        forward (`Callable[[Tensor], Tensor]`):
            The model's own code from the last hidden state to the logits.
        rows (`int`):
            Columns of the logits.
    """

    transform = LogitTransform()

    def __init__(self, forward: Callable[[Tensor], Tensor], rows: int):
        self.forward = forward
        self._rows = rows

    def rows(self, tensors: tuple[Tensor, ...]) -> int:
        return self._rows

    def bytes_per_logit(self, dtype: torch.dtype) -> int:
        return 2 * dtype.itemsize + stats_dtype(dtype).itemsize

    @contextlib.contextmanager
    def running(self, hidden: Tensor, tensors: tuple[Tensor, ...], chunk_size: int) -> Iterator[None]:
        self._tensors = tensors
        self._is_fp16 = product_dtype(hidden) == torch.float16
        try:
            yield
        finally:
            del self._tensors, self._is_fp16

    def project(self, hidden: Tensor, differentiable: bool) -> tuple[Tensor, Any]:
        with torch.set_grad_enabled(differentiable):
            hidden = hidden.detach().requires_grad_(differentiable)
            logits = self.forward(hidden)
        return logits.detach().to(stats_dtype(logits.dtype), copy=True), (hidden, logits)

    def backproject(self, tile: Tensor, saved: Any, gradients: "Gradients", rows: slice) -> None:
        hidden, logits = saved
        wanted = [i for i, g in enumerate(gradients.tensors) if g is not None]
        inputs = [self._tensors[i] for i in wanted] + ([hidden] if gradients.hidden is not None else [])
        products, scale = self._products(logits, inputs, tile)
        for i, product in zip(wanted, products, strict=False):
            if product is not None:
                gradients.tensors[i].add_(product, alpha=1.0 / scale)
        if gradients.hidden is not None:
            gradients.hidden[rows] = products[-1].to(gradients.hidden.dtype) / scale

    def _products(self, logits: Tensor, inputs: list[Tensor], tile: Tensor) -> tuple[tuple[Tensor | None, ...], float]:
        """
        Gradients of `inputs`, times the second result. In fp16 the module sums a whole chunk up and rounds the sum to
        fp16, so its factor shrinks with the number of rows, and again while a sum overflows.
        """
        if not self._is_fp16:
            return torch.autograd.grad(logits, inputs, tile.to(logits.dtype), allow_unused=True), 1.0
        scale = min(1.0, FP16_CHUNK_ROWS / len(tile))
        tile.mul_(scale)
        while True:
            products = torch.autograd.grad(logits, inputs, tile.to(logits.dtype), allow_unused=True, retain_graph=True)
            # Beyond that the sum itself is at fault, which a gradient scaler has to see
            if scale < 1e-6 or all(bool(p.isfinite().all()) for p in products if p is not None):
                return products, scale
            tile.mul_(1 / 32)
            scale /= 32


@dataclass
class Gradients:
    """
    Gradients under way: `hidden` `[N, H]` and one accumulator for each tensor of the head, `None` for what needs none.
    `first` says that no chunk has been added yet.
    """

    hidden: Tensor | None
    tensors: list[Tensor | None]
    first: bool = True


@dataclass
class _Run:
    """One evaluation of the loss: everything that is not differentiated."""

    head: LinearHead | ModuleHead
    kernels: Kernels
    teacher: "TeacherTopK"
    labels: Tensor | None
    divergence: str
    beta: float | None
    tail: str
    temperature: float
    kd_weight: float
    ce_weight: float
    inverse_num_items: Tensor
    chunk_size: int
    in_forward: bool
    grad_enabled: bool
    # Of the sums, and of the head's products
    dtype: torch.dtype
    product_dtype: torch.dtype

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """What the tile's gradient is multiplied by, and what the products of that are still to be multiplied by."""
        if self.product_dtype != torch.float16:
            return self.inverse_num_items, None
        return torch.full_like(self.inverse_num_items, FP16_TILE_SCALE), self.inverse_num_items / FP16_TILE_SCALE

    def chunks(self, n: int) -> Iterator[slice]:
        return (slice(start, min(start + self.chunk_size, n)) for start in range(0, n, self.chunk_size))

    def new_gradients(self, hidden: Tensor, tensors: tuple[Tensor, ...], wanted: tuple[bool, ...]) -> Gradients:
        # What a chunk writes once may stay in the dtype of its tensor, but for fp16, where it could underflow before a
        # gradient scaler's factor arrives
        dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        linear = isinstance(self.head, LinearHead)
        totals: list[Tensor | None] = []
        for i, (tensor, want) in enumerate(zip(tensors, wanted[1:], strict=True)):
            # The first chunk overwrites the weight's accumulator
            make = torch.empty if linear and i == 0 and len(hidden) else torch.zeros
            totals.append(make(tensor.shape, dtype=stats_dtype(tensor.dtype), device=tensor.device) if want else None)
        return Gradients(torch.empty_like(hidden, dtype=dtype) if wanted[0] else None, totals)

    def chunk(self, hidden: Tensor, rows: slice, stats: Tensor | None, gradients: Gradients | None) -> None:
        """One chunk: fills `stats[:, rows]` `[len(PER_TOKEN), n]` and adds to `gradients`, where they are given."""
        raw, saved = self.head.project(hidden[rows], differentiable=gradients is not None)
        self.tile(raw, rows, stats, None if gradients is None else self.factors()[0])
        if gradients is not None:
            self.head.backproject(raw, saved, gradients, rows)
            gradients.first = False

    def tile(self, tile: Tensor, rows: slice, stats: Tensor | None, factor: Tensor | None) -> None:
        """
        Steps (a) and (b) on raw head outputs `[n, V]`, and, where `factor` is given, step (c), which overwrites them
        with `factor * d (kd_weight * sum kd + ce_weight * sum ce) / d raw`.
        """
        teacher, temperature, transform = self.teacher[rows], self.temperature, self.head.transform
        labels = None if self.labels is None else self.labels[rows]

        # (a) The support's logits, and the tail's normaliser with the support taken out. A slot without a candidate
        # stands in for the first that has one (its own id may be anything); in a row without any, for the label.
        present = teacher.logprobs > -math.inf
        any_present = present.any(-1, keepdim=True)
        first = present.int().argmax(-1, keepdim=True)
        ids = teacher.token_ids.long()
        ids = torch.where(present, ids, ids.gather(1, first))
        ids = torch.where(any_present, ids, 0 if labels is None else labels[:, None])
        raw_support = tile.gather(1, ids)
        raw_label = None if labels is None else tile.gather(1, labels[:, None])
        tile.scatter_(1, ids, torch.where(any_present, marker(tile.dtype), raw_support))
        tail = self.kernels.reduce_tail(tile, transform, temperature)
        logits = transform(raw_support.to(self.dtype))

        def log_outcomes(logits: Tensor, lse_tail: Tensor) -> tuple[Tensor, Tensor]:
            support = torch.where(present, logits, -math.inf)
            lse = torch.logaddexp(lse_tail, support.logsumexp(-1))[:, None]
            return (torch.cat([support, lse_tail[:, None]], -1) - lse).clamp_(min=LOG_ZERO), lse

        log_q, lse = log_outcomes(logits, tail.lse)
        log_q_tempered = log_q
        if temperature != 1.0:
            log_q_tempered, _ = log_outcomes(logits / temperature, tail.lse_tempered)

        # (b) The divergence, and its slope in each of the student's K+1 log-probabilities
        log_p = teacher_outcomes(teacher, self.tail, temperature, self.dtype)
        with torch.set_grad_enabled(factor is not None):
            student = log_q_tempered.detach().requires_grad_(factor is not None)
            kd = DIVERGENCES[self.divergence](student, log_p, self.beta)
            if self.tail == "renormalize":  # no support, no teacher
                kd = torch.where(any_present[:, 0], kd, 0.0)
            slopes = torch.autograd.grad(kd.sum(), student)[0] if factor is not None else None
        label_logit = None if raw_label is None else transform(raw_label.to(self.dtype))
        if stats is not None:
            best = torch.maximum(tail.maximum, torch.where(present, logits, LOG_ZERO).amax(-1))
            top1 = logits.gather(1, teacher.logprobs.argmax(-1, keepdim=True))[:, 0]
            stats[0, rows] = temperature**2 * kd.detach()
            stats[1, rows] = 0.0 if labels is None else (lse - label_logit)[:, 0]
            stats[2, rows] = log_q[:, -1].exp() * tail.entropy - (log_q.exp() * log_q).sum(-1)
            stats[3, rows] = 0.0 if labels is None else (label_logit[:, 0] >= best).to(self.dtype)
            stats[4, rows] = ((top1 >= best) & any_present[:, 0]).to(self.dtype)
            stats[5, rows] = log_q[:, :-1].exp().sum(-1)
        if factor is None:
            return
        slopes = slopes.masked_fill(torch.cat([~present, torch.zeros_like(any_present)], -1), 0.0)

        # (c) d loss / d z is, for a token v of the tail, kd * T * q_v * (slope_tail / Q_tail - sum of slopes) + ce *
        # q_v, and for a token j of the support kd * T * (slope_j - q_j * sum of slopes) + ce * q_j; the label has ce
        # less. (The T^2 of the objective and the 1 / T of z / T leave T.) Tokens with a value of their own are summed
        # up in full precision and written once.
        kd_factor, ce_factor = factor * (self.kd_weight * temperature), factor * self.ce_weight
        total = slopes.sum(-1, keepdim=True)
        kd_tail = (slopes[:, -1:] - total * log_q_tempered[:, -1:].exp()) * kd_factor
        ce_tail = log_q[:, -1:].exp() * ce_factor
        self.kernels.write_tail_gradient(tile, transform, temperature, kd_tail[:, 0], ce_tail[:, 0], tail)

        values = (slopes[:, :-1] - log_q_tempered[:, :-1].exp() * total) * kd_factor + log_q[:, :-1].exp() * ce_factor
        if labels is not None:
            is_label = present & (ids == labels[:, None])
            values = values - is_label * ce_factor
            # The label outside the support: a token of the tail
            at_label = (label_logit / temperature - tail.lse_tempered[:, None]).exp() * kd_tail
            at_label = at_label + ((label_logit - lse).exp() - 1.0) * ce_factor
            at_label = torch.where(is_label.any(-1, keepdim=True), (values * is_label).sum(-1, keepdim=True), at_label)
        values = values * transform.slope(logits)
        values = torch.where(present, values, values.gather(1, first))
        if labels is None:
            values = torch.where(any_present, values.to(tile.dtype), tile.gather(1, ids))
        else:
            at_label = at_label * transform.slope(label_logit)
            ids = torch.cat([ids, labels[:, None]], -1)
            values = torch.cat([torch.where(any_present, values, at_label), at_label], -1)
        tile.scatter_(1, ids, values.to(tile.dtype))


class _FusedLoss(torch.autograd.Function):
    """`(loss, stats [len(PER_TOKEN), N])` of `hidden` `[N, H]` and the head's tensors; only `loss` is
    differentiable."""

    @staticmethod
    def forward(ctx, run: _Run, hidden: Tensor, *tensors: Tensor | None):
        wanted = ctx.needs_input_grad[1:] if run.grad_enabled else (False,) * (1 + len(tensors))
        stats = torch.empty((len(PER_TOKEN), len(hidden)), dtype=run.dtype, device=hidden.device)
        gradients = run.new_gradients(hidden, tensors, wanted) if run.in_forward and any(wanted) else None
        ctx.rng_state = _rng_state(hidden.device) if any(wanted) and gradients is None else None
        with run.head.running(hidden, tensors, run.chunk_size):
            for rows in run.chunks(len(hidden)):
                run.chunk(hidden, rows, stats, gradients)
        ctx.run, ctx.gradients, ctx.wanted = run, gradients, wanted
        ctx.autocast = _autocast_state(hidden.device.type)
        if any(wanted) and gradients is None:
            ctx.save_for_backward(hidden, *tensors)
        else:
            ctx.dtypes = [None if t is None else t.dtype for t in (hidden, *tensors)]
        ctx.mark_non_differentiable(stats)
        kd_sum, ce_sum = stats[:2].sum(-1)
        return (run.kd_weight * kd_sum + run.ce_weight * ce_sum) * run.inverse_num_items, stats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss: Tensor, _):
        run = ctx.run
        if run.in_forward:
            if ctx.gradients is None:
                raise RuntimeError(
                    "The gradients that `backward='in_forward'` formed have been handed out by an earlier backward "
                    "pass. Pass `retain_graph=True` to every backward pass but the last, or use "
                    "`backward='recompute'`."
                )
            gradients, dtypes = ctx.gradients, ctx.dtypes
            # In place, but where the graph lives on for another backward pass
            inplace = not _graph_is_kept()
            if inplace:
                ctx.gradients = None
        else:
            hidden, *tensors = ctx.saved_tensors
            gradients, dtypes = (
                run.new_gradients(hidden, tensors, ctx.wanted),
                [None if t is None else t.dtype for t in (hidden, *tensors)],
            )
            inplace = True
            with (
                _replay(hidden.device, ctx.rng_state, ctx.autocast),
                run.head.running(hidden, tensors, run.chunk_size),
            ):
                for rows in run.chunks(len(hidden)):
                    run.chunk(hidden, rows, None, gradients)
        remaining = run.factors()[1]
        factor = grad_loss if remaining is None else grad_loss * remaining
        return None, *(
            None if total is None else (total.mul_(factor) if inplace else total.mul(factor)).to(dtype)
            for total, dtype in zip((gradients.hidden, *gradients.tensors), dtypes, strict=True)
        )


def _graph_is_kept() -> bool:
    # Whether this backward pass runs with `retain_graph=True`, as AOTAutograd asks it before it reuses buffers. To be
    # dropped once torch tells a custom Function.
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _autocast_state(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
    }


@contextlib.contextmanager
def _replay(device: torch.device, rng_state: tuple[Tensor, Tensor | None], autocast: dict[str, Any]) -> Iterator[None]:
    """The random numbers (dropout in an adapter on the head) and the autocast mode of the forward pass, once more."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.autocast(**autocast):
        torch.set_rng_state(rng_state[0])
        if rng_state[1] is not None:
            torch.cuda.set_rng_state(rng_state[1], device)
        yield


def auto_chunk_size(rows: int, bytes_per_logit: int, device_type: str, budget: int | None = None) -> int:
    """
    Positions a chunk that keep its logits within a budget.

    Args:
        rows (`int`): rows of the head, `V`.
        bytes_per_logit (`int`): bytes of all buffers of a tile's size.
        device_type (`str`): where the loss runs; decides the default budget.
        budget (`int`, *optional*): bytes. Defaults to 32 MiB on CPU and 1 GiB elsewhere.

    Returns:
        `int`: from 1 to 4096, a multiple of 16 from 16 on.
    """
    if budget is None:
        budget = DEFAULT_MEMORY_BUDGET.get(device_type, DEFAULT_MEMORY_BUDGET["cuda"])
    chunk = min(MAX_AUTO_CHUNK, max(1, int(budget // (rows * bytes_per_logit))))
    return chunk - chunk % 16 if chunk >= 16 else chunk


@torch.compiler.disable
def run_fused_loss(
    head: LinearHead | ModuleHead,
    hidden_states: Tensor,
    tensors: tuple[Tensor | None, ...],
    teacher: "TeacherTopK",
    labels: Tensor | None,
    *,
    divergence: str,
    beta: float | None,
    tail: str,
    temperature: float,
    kd_weight: float,
    ce_weight: float,
    num_items: Tensor | float | None,
    chunk_size: int | None,
    loss_memory_budget: int | None,
    backward: str,
    backend: str,
) -> FusedDistillationOutput:
    """[`fused_distillation_loss`] for any head; its checks are here."""
    check_objective(divergence, beta, tail, temperature)
    check_temperature(temperature, tail, teacher.tail_temperatures, teacher.vocab_size)
    check_weights(kd_weight, ce_weight)
    check_options(chunk_size, loss_memory_budget, backward)
    if ce_weight and labels is None:
        raise ValueError(f"`labels` are required with `ce_weight={ce_weight}`. Pass them, or use `ce_weight=0.0`.")
    if isinstance(num_items, (int, float)) and num_items <= 0:
        raise ValueError(f"`num_items` must be positive, or `None` to count the trained positions, got {num_items}.")
    rows = head.rows(tensors)
    _check_shapes(hidden_states, teacher, labels, rows)
    n = len(hidden_states)
    if teacher.token_ids.device != hidden_states.device:
        teacher = teacher.to(hidden_states.device)

    kept = None
    if labels is not None:
        mask = labels != IGNORE_INDEX
        if not mask.all():
            kept = mask.nonzero()[:, 0]
            hidden_states, labels, teacher = hidden_states[kept], labels[kept], teacher[kept]
    _check_values(teacher, labels, rows, kept)
    num_tokens = len(hidden_states)
    if num_items is None:
        num_items = max(num_tokens, 1)
    dtype = stats_dtype(hidden_states.dtype)
    if isinstance(num_items, Tensor):
        inverse = num_items.to(hidden_states.device, dtype).clamp(min=1.0).reciprocal()
    else:
        inverse = torch.full((), 1.0 / num_items, dtype=dtype, device=hidden_states.device)

    backend = resolve_backend(backend, hidden_states.device, hidden_states.dtype)
    if backend == "reference":
        logits = _dense_logits(head, hidden_states, tensors)
        values = dense_loss(
            logits, teacher, labels, divergence=divergence, beta=beta, tail=tail, temperature=temperature
        )
        loss = (kd_weight * values["kd"].sum() + ce_weight * values["ce"].sum()) * inverse
        stats = torch.stack([values[name].detach() for name in PER_TOKEN])
    else:
        if chunk_size is None:
            size = head.bytes_per_logit(product_dtype(hidden_states))
            chunk_size = auto_chunk_size(rows, size, hidden_states.device.type, loss_memory_budget)
        run = _Run(
            head=head,
            kernels=_kernels(backend),
            teacher=teacher,
            labels=labels,
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=temperature,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            inverse_num_items=inverse,
            chunk_size=chunk_size,
            in_forward=backward == "in_forward",
            grad_enabled=torch.is_grad_enabled(),
            dtype=dtype,
            product_dtype=product_dtype(hidden_states),
        )
        loss, stats = _FusedLoss.apply(run, hidden_states, *tensors)
    kd_sum, ce_sum = stats[:2].sum(-1)
    if kept is not None:
        stats = stats.new_zeros(len(stats), n).index_copy_(1, kept, stats)
    return FusedDistillationOutput(
        loss=loss,
        kd_sum=kd_sum,
        ce_sum=ce_sum,
        num_items=num_items,
        num_tokens=num_tokens,
        **dict(zip(PER_TOKEN, stats, strict=True)),
    )


def _dense_logits(head: LinearHead | ModuleHead, hidden: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
    if isinstance(head, ModuleHead):
        return head.forward(hidden)
    logits = head.transform(nn.functional.linear(hidden, *tensors))
    return logits.to(stats_dtype(logits.dtype))


def check_options(chunk_size: int | None, loss_memory_budget: int | None, backward: str) -> None:
    """
    Raises:
        ValueError: for a chunk or a budget of nothing, or an unknown backward scheme.
    """
    for name, value in (("chunk_size", chunk_size), ("loss_memory_budget", loss_memory_budget)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, or `None` to choose it automatically, got {value}.")
    if backward not in BACKWARDS:
        raise ValueError(f"`backward` must be one of {', '.join(map(repr, BACKWARDS))}, got {backward!r}.")


def check_weights(kd_weight: float, ce_weight: float) -> None:
    """
    Raises:
        ValueError: for a weight that is negative or not finite, or two that are 0.
    """
    for name, value in (("kd_weight", kd_weight), ("ce_weight", ce_weight)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a finite number of at least 0.0, got {value}.")
    if kd_weight == 0.0 and ce_weight == 0.0:
        raise ValueError("`kd_weight` and `ce_weight` are both 0.0, so nothing would be trained. Raise one of them.")


def _check_shapes(hidden: Tensor, teacher: "TeacherTopK", labels: Tensor | None, rows: int) -> None:
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(
            f"`hidden_states` must be a floating point tensor [N, H], got {hidden.dtype} {list(hidden.shape)}."
        )
    n, top_k = len(hidden), teacher.token_ids.shape[-1]
    for name, shape, expected in (
        ("teacher.token_ids", teacher.token_ids.shape, (n, top_k)),
        ("teacher.logprobs", teacher.logprobs.shape, (n, top_k)),
        ("teacher.log_tail", teacher.log_tail.shape, (n,)),
        *(() if labels is None else (("labels", labels.shape, (n,)),)),
    ):
        if tuple(shape) != expected:
            raise ValueError(f"`{name}` must have shape {list(expected)}, got {list(shape)} (N={n}, K={top_k}).")
    if not 1 <= top_k <= rows:
        raise ValueError(
            f"`teacher.token_ids` holds K={top_k} candidates a position, and the student's head has {rows} rows: K "
            "must be from 1 to the number of rows. Narrow the teacher's signal."
        )


def _check_values(teacher: "TeacherTopK", labels: Tensor | None, rows: int, kept: Tensor | None) -> None:
    """
    Refuses what would crash or silently spoil a kernel, with the position in the caller's numbering. One transfer to
    the host, for all checks together.
    """
    if not len(teacher.token_ids):
        return
    present = teacher.logprobs > -math.inf
    ids = torch.where(present, teacher.token_ids.long(), -1 - torch.arange(present.shape[1], device=present.device))
    ordered = ids.sort(-1).values
    bad = {
        "logprobs": (teacher.logprobs.isnan() | (teacher.logprobs == math.inf)).any(-1),
        "log_tail": teacher.log_tail.isnan() | (teacher.log_tail == math.inf),
        "token_ids": (present & ((ids < 0) | (ids >= rows))).any(-1),
        "duplicates": (ordered[:, 1:] == ordered[:, :-1]).any(-1),
    }
    if labels is not None:
        bad["labels"] = (labels < 0) | (labels >= rows)
    found = torch.stack([*bad.values()])
    if not found.any():
        return
    which, position = found.nonzero()[0].tolist()
    name = [*bad][which]
    row = position if kept is None else kept[position].item()
    if name in ("logprobs", "log_tail"):
        value = getattr(teacher, name)[position]
        value = value[value.isnan() | (value == math.inf)][0].item() if value.ndim else value.item()
        raise ValueError(
            f"`teacher.{name}` of position {row} holds {value}: a natural log-probability is finite or -inf (absent)."
        )
    if name == "token_ids":
        wrong = ids[position][present[position] & ((ids[position] < 0) | (ids[position] >= rows))][0].item()
        raise ValueError(
            f"`teacher.token_ids` of position {row} holds id {wrong}, and the student's head has {rows} rows (ids 0 "
            f"to {rows - 1}). The teacher has to emit only ids that the student knows: check that both share a "
            "tokenizer."
        )
    if name == "duplicates":
        same = ordered[position][1:][ordered[position][1:] == ordered[position][:-1]][0].item()
        raise ValueError(
            f"`teacher.token_ids` of position {row} holds id {same} twice: every candidate counts once. Merge them."
        )
    raise ValueError(
        f"`labels` of position {row} is {labels[position].item()}: a label is {IGNORE_INDEX} (ignored) or an id from "
        f"0 to {rows - 1}."
    )


def fused_distillation_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    teacher: "TeacherTopK",
    labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    divergence: str = "forward_kl",
    beta: float | None = None,
    tail: str = "bucket",
    temperature: float = 1.0,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    num_items: Tensor | float | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    chunk_size: int | None = None,
    loss_memory_budget: int | None = None,
    backward: str = "in_forward",
    backend: str = "auto",
    logits_dtype: torch.dtype | None = None,
) -> FusedDistillationOutput:
    """
    Distillation loss of hidden states under a linear head against a teacher's cached top-K log-probabilities, without
    ever holding the logits of more than one chunk.

    `loss = (kd_weight * sum_t T^2 * D(teacher_t, student_t) + ce_weight * sum_t -log q_t[label_t]) / num_items`, where
    `D` compares the distributions at temperature `T` on K+1 outcomes, the teacher's support and its tail, and the
    student's logits are `final_logit_softcapping * tanh(logit_scale * (hidden @ weight.T + bias) /
    final_logit_softcapping)`.

    Args:
        hidden_states (`Tensor`):
            `[N, H]`, the student's last hidden states at the positions whose next token is trained.
        lm_head_weight (`Tensor`):
            `[V, H]`. A weight that does not require a gradient costs neither a `[V, H]` buffer nor its product.
        teacher (`TeacherTopK`):
            Signal of the same positions: `token_ids` `[N, K]`, `logprobs` `[N, K]`, `log_tail` `[N]`, natural
            logarithms under the full vocabulary at temperature 1. A `logprobs` entry of `-inf` is absent, and its id
            may be anything.
        labels (`Tensor`, *optional*):
            `[N]`, the next token's id, or -100 for a position that counts for neither term and does not reach the
            head.
        bias (`Tensor`, *optional*):
            `[V]`.
        divergence (`str`, *optional*, defaults to `"forward_kl"`):
            `"forward_kl"`, `"reverse_kl"` or `"generalized_jsd"`.
        beta (`float`, *optional*):
            For `"generalized_jsd"`: 0.0 is the forward KL, 1.0 the reverse, between them the mixture is
            `(1 - beta) * student + beta * teacher`.
        tail (`str`, *optional*, defaults to `"bucket"`):
            The mass outside the support. `"bucket"` keeps it as one outcome of its own, which leaves the objective
            nearly unbiased. `"none"` drops it, as arXiv 2608.03796 does; the result is no divergence and may be
            negative. `"renormalize"` scales the teacher's support to mass one.
        temperature (`float`, *optional*, defaults to `1.0`):
            Both distributions are softened by it and the divergence is multiplied by its square, in value and
            gradient. Other values than 1 need the cached tail normalisers, or `tail="renormalize"`.
        kd_weight, ce_weight (`float`, *optional*, default to `1.0` and `0.0`):
            Weights of divergence and cross-entropy, both at least 0. The cross-entropy is at temperature 1.
        num_items (`Tensor` or `float`, *optional*):
            Common denominator of both terms. Defaults to the number of positions that count.
        logit_scale (`float`, *optional*, defaults to `1.0`), final_logit_softcapping (`float`, *optional*):
            What the model does to its head's output.
        chunk_size (`int`, *optional*):
            Positions whose logits exist at once. Defaults to what fits into `loss_memory_budget`.
        loss_memory_budget (`int`, *optional*):
            Bytes of logits that may exist at once. Defaults to 32 MiB on CPU and 1 GiB elsewhere.
        backward (`str`, *optional*, defaults to `"in_forward"`):
            `"in_forward"` forms the gradients while a chunk's logits are at hand: 3 GEMMs over the head (2 with a
            frozen head), the exact minimum. `"recompute"` keeps only the inputs, and projects again in the backward
            pass: 4.
        backend (`str`, *optional*, defaults to `"auto"`):
            `"torch"`, `"triton"` (CUDA), `"reference"` (dense, for comparison), or `"auto"`: Triton where it runs,
            else torch. A backend asked for by name never falls back.
        logits_dtype (`torch.dtype`, *optional*):
            What a chunk's logits are kept in: that of the projection (default, as in the model's own forward), or
            `torch.float32`.

    Returns:
        `FusedDistillationOutput`

    Raises:
        ValueError: for arguments that do not fit, with the argument, its value, the rule and the fix.
        RuntimeError: for a backend that cannot run here.
    """
    tensors = (lm_head_weight, bias)
    _check_head(hidden_states, lm_head_weight, bias, logits_dtype)
    return run_fused_loss(
        LinearHead(LogitTransform(logit_scale, final_logit_softcapping), logits_dtype),
        hidden_states,
        tensors,
        teacher,
        labels,
        divergence=divergence,
        beta=beta,
        tail=tail,
        temperature=temperature,
        kd_weight=kd_weight,
        ce_weight=ce_weight,
        num_items=num_items,
        chunk_size=chunk_size,
        loss_memory_budget=loss_memory_budget,
        backward=backward,
        backend=backend,
    )


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, logits_dtype: torch.dtype | None) -> None:
    if weight.ndim != 2 or hidden.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            "`lm_head_weight` must be [V, H] with the H of `hidden_states` [N, H], got "
            f"{list(weight.shape)} and {list(hidden.shape)}."
        )
    if bias is not None and tuple(bias.shape) != (len(weight),):
        raise ValueError(f"`bias` must be [{len(weight)}], one entry a row of the head, got {list(bias.shape)}.")
    if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(
            f"`lm_head_weight` is {weight.dtype} and `hidden_states` {hidden.dtype}: outside autocast both must have "
            "the same dtype."
        )
    if logits_dtype not in (None, torch.float32, weight.dtype):
        raise ValueError(
            f"`logits_dtype` must be `None` (the projection's own), torch.float32 or {weight.dtype}, got "
            f"{logits_dtype}."
        )
