"""
The loss written down from its definition on full logits: the dense twin that every fast path is compared with. Nothing
is chunked, and gradients are autograd's.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .divergences import DIVERGENCES, LOG_ZERO
from .outcomes import teacher_outcomes


if TYPE_CHECKING:
    from ..teacher_cache.topk import TeacherTopK


def dense_outcomes(logits: Tensor, teacher: "TeacherTopK") -> Tensor:
    """
    The student's log-probabilities on the teacher's K+1 outcomes, `[n, K+1]`, from full logits `[n, V]`. The tail is
    the `logsumexp` over exactly the tokens outside the support, never `1 - sum`.
    """
    n, vocab_size = logits.shape
    absent = teacher.logprobs == -math.inf
    # One column more than the vocabulary has, for the ids of absent candidates
    ids = torch.where(absent, vocab_size, teacher.token_ids.long())
    in_support = torch.zeros(n, vocab_size + 1, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)
    log_q = torch.log_softmax(logits, dim=-1)
    support = torch.nn.functional.pad(log_q, (0, 1), value=LOG_ZERO).gather(1, ids)
    outside = torch.where(in_support[:, :vocab_size], LOG_ZERO, log_q).logsumexp(-1)
    return torch.cat([support, outside[:, None]], dim=-1)


def dense_loss(
    logits: Tensor,
    teacher: "TeacherTopK",
    labels: Tensor | None,
    *,
    divergence: str,
    beta: float | None,
    tail: str,
    temperature: float,
) -> dict[str, Tensor]:
    """
    Per-token terms of the loss from full logits.

    Args:
        logits (`Tensor`): `[n, V]`, after scale, soft-cap and bias, at temperature 1.
        teacher (`TeacherTopK`): signal of the same `n` positions.
        labels (`Tensor`, *optional*): `[n]`, token ids, none of them ignored.

    Returns:
        `dict`: `kd` and `ce` `[n]`, differentiable, in nats (`kd` includes the factor `temperature ** 2`); `entropy`,
        `support_mass`, `label_agreement`, `teacher_agreement` `[n]`, detached.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits = logits.to(dtype)
    teacher_logprobs = teacher_outcomes(teacher, tail, temperature, dtype)
    student_logprobs = dense_outcomes(logits / temperature, teacher)
    kd = temperature**2 * DIVERGENCES[divergence](student_logprobs, teacher_logprobs, beta)
    if tail == "renormalize":  # a support without entries cannot be scaled up: nothing is asked of the student there
        kd = torch.where((teacher.logprobs > -math.inf).any(-1), kd, 0.0)

    log_q = torch.log_softmax(logits, dim=-1)
    if labels is None:
        ce = label_agreement = torch.zeros_like(kd)
    else:
        ce = -log_q.gather(1, labels[:, None])[:, 0]
        label_agreement = (logits.argmax(-1) == labels).to(dtype)
    with torch.no_grad():
        q = log_q.exp()
        absent = teacher.logprobs == -math.inf
        ids = torch.where(absent, 0, teacher.token_ids.long())
        top1 = ids.gather(1, teacher.logprobs.argmax(-1, keepdim=True))[:, 0]
        return {
            "kd": kd,
            "ce": ce,
            "entropy": -torch.xlogy(q, q).sum(-1),
            "support_mass": torch.where(absent, 0.0, q.gather(1, ids)).sum(-1),
            "label_agreement": label_agreement.detach(),
            "teacher_agreement": ((logits.argmax(-1) == top1) & ~absent.all(-1)).to(dtype),
        }
