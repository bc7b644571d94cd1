"""
The teacher's side of the loss: its log-probabilities on K+1 outcomes (the support, then the tail), for a treatment of
the tail and a temperature. Only the cached signal is read, never the head.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .divergences import LOG_ZERO


if TYPE_CHECKING:
    from ..teacher_cache.topk import TeacherTopK


def check_temperature(
    temperature: float, tail: str, tail_temperatures: tuple[float, ...], vocab_size: int | None
) -> None:
    """
    Refuses a temperature at which the cached signal does not determine the teacher's distribution: its normaliser
    needs the tail's `log sum exp(z / T)`, which log-probabilities of K tokens at `T = 1` do not contain.

    Raises:
        ValueError: names the temperature, what is cached, and the ways out.
    """
    if temperature == 1.0 or tail == "renormalize" or temperature in tail_temperatures:
        return
    known = [1.0 / t for t in (1.0, *tail_temperatures)]
    if vocab_size is not None and tail_temperatures:
        known.append(0.0)
    if tail_temperatures and min(known) <= 1.0 / temperature <= max(known):
        return
    cached = ", ".join(map(str, tail_temperatures)) or "none"
    raise ValueError(
        f"`temperature={temperature}` needs the tail's normaliser at that temperature, and the cached teacher has it "
        f"at: {cached}. Use `temperature=1.0`, or rebuild the cache with tail temperatures around {temperature}, or "
        "choose `tail='renormalize'`, which ignores the mass outside the support."
    )


def tail_normalizer(teacher: "TeacherTopK", temperature: float) -> Tensor:
    """
    `log sum exp(logprob / T)` over the teacher's tail, `[n]`; `T = 1` is `log_tail` itself.

    Between cached temperatures it is interpolated in `1 / T` by the polynomial through all of them, with the anchor
    `log(V - K)` at `1 / T = 0` where the vocabulary size is known: the function is smooth and convex there. Cache the
    temperature that is trained at, where it is known: then nothing is interpolated. Else 1.25, 2 and 4 come closer
    than 2 and 4 alone.
    """
    if temperature == 1.0:
        return teacher.log_tail
    if temperature in teacher.tail_temperatures:
        return teacher.log_tail_at[..., teacher.tail_temperatures.index(temperature)]
    nodes = [1.0, *(1.0 / t for t in teacher.tail_temperatures)]
    values = [teacher.log_tail, *teacher.log_tail_at.unbind(-1)]
    if teacher.vocab_size is not None:
        outside = teacher.vocab_size - (teacher.logprobs > -math.inf).sum(-1)
        nodes.append(0.0)
        values.append(outside.clamp(min=1).to(teacher.log_tail.dtype).log())
    at = 1.0 / temperature
    result = torch.zeros_like(teacher.log_tail)
    for i, (node, value) in enumerate(zip(nodes, values, strict=True)):
        weight = math.prod((at - other) / (node - other) for j, other in enumerate(nodes) if j != i)
        result = result + weight * value
    # A tail without mass has none at any temperature; the sum above is NaN there
    return torch.where(teacher.log_tail == -math.inf, -math.inf, result)


def teacher_outcomes(teacher: "TeacherTopK", tail: str, temperature: float, dtype: torch.dtype) -> Tensor:
    """
    The teacher's log-probabilities on K+1 outcomes.

    Args:
        teacher (`TeacherTopK`):
            Signal of `n` positions.
        tail (`str`):
            `"bucket"`: the tail is one outcome with its mass. `"none"`: the tail counts for nothing and the support
            keeps its mass below one. `"renormalize"`: the support is scaled to mass one.
        temperature (`float`):
            The teacher's distribution is `softmax(logits / temperature)`.
        dtype (`torch.dtype`):
            Floating type of the result.

    Returns:
        `Tensor`: `[n, K+1]`, the support in the given order, the tail last, `LOG_ZERO` for what does not exist.
    """
    logprobs = teacher.logprobs.to(dtype)
    if temperature != 1.0:
        logprobs = logprobs / temperature
    if tail == "renormalize":
        log_tail = torch.full_like(logprobs[..., 0], -math.inf)
        total = logprobs.logsumexp(-1)
    else:
        log_tail = tail_normalizer(teacher, temperature).to(dtype)
        # At T = 1 the cached numbers are normalised already, and rounding is not worth hiding
        total = None if temperature == 1.0 else torch.logaddexp(logprobs.logsumexp(-1), log_tail)
    if total is not None:
        total = torch.where(total > -math.inf, total, 0.0)[..., None]
        logprobs, log_tail = logprobs - total, log_tail - total[..., 0]
    if tail == "none":
        log_tail = torch.full_like(log_tail, -math.inf)
    return torch.cat([logprobs, log_tail[..., None]], dim=-1).clamp(min=LOG_ZERO)
