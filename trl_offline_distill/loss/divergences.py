"""
Divergences between teacher and student on the K+1 outcomes of one position: the K tokens of the support and one
"everything else" outcome, the tail, which comes last.

Every function takes natural log-probabilities `student [n, K+1]` and `teacher [n, K+1]` and returns the divergence of
each row `[n]`, in nats. It is an ordinary differentiable function of `student`; the head and the vocabulary are
unknown here. Both inputs are finite: an outcome that does not exist (an absent candidate, a tail without mass) holds
`LOG_ZERO`, whose exponential is exactly 0, so that `0 * LOG_ZERO` is 0 and no gradient is NaN.

A new divergence is one function and one line of `DIVERGENCES`.
"""

from collections.abc import Callable

import torch
from torch import Tensor


# Finite stand-in for log(0) that is safe in fp32: the difference of two of them is still finite
LOG_ZERO = -1e30
# A teacher probability that the student's mass is measured against is read as at least the smallest normal fp32 number
# (1.2e-38): with nothing there at all, KL(student || teacher) would be infinite and would have no gradient.
TEACHER_FLOOR = -87.33654475055310


def forward_kl(student: Tensor, teacher: Tensor, beta: float | None = None) -> Tensor:
    """`KL(teacher || student) = sum_j p_j (log p_j - log q_j)`. `beta` is not used."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor, beta: float | None = None) -> Tensor:
    """
    `KL(student || teacher) = sum_j q_j (log q_j - log p_j)`, with `log p_j` at least `TEACHER_FLOOR`. `beta` is not
    used.
    """
    return (student.exp() * (student - teacher.clamp(min=TEACHER_FLOOR))).sum(-1)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """
    Generalised Jensen-Shannon divergence with the mixture `m = (1 - beta) * student + beta * teacher`:
    `beta * KL(teacher || m) + (1 - beta) * KL(student || m)`, and, as in TRL's GKD, `forward_kl` at `beta=0` and
    `reverse_kl` at `beta=1` ([Agarwal et al., 2023](https://huggingface.co/papers/2306.13649)).
    """
    if beta == 0.0:
        return forward_kl(student, teacher)
    if beta == 1.0:
        return reverse_kl(student, teacher)
    # Weights enter as logarithms of Python numbers: exact at the ends of the open interval, no tensor on the device
    log_beta = torch.tensor(beta, dtype=torch.float64).log().item()
    log_rest = torch.tensor(1.0 - beta, dtype=torch.float64).log().item()
    mixture = torch.logaddexp(student + log_rest, teacher + log_beta)
    return beta * forward_kl(mixture, teacher) + (1.0 - beta) * (student.exp() * (student - mixture)).sum(-1)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "generalized_jsd": generalized_jsd,
}

TAILS = ("bucket", "none", "renormalize")


def check_objective(divergence: str, beta: float | None, tail: str, temperature: float) -> None:
    """
    Refuses combinations that are not objectives.

    Raises:
        ValueError: names the argument, its value, the rule and the fix.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"`divergence` must be one of {', '.join(map(repr, DIVERGENCES))}, got {divergence!r}.")
    if tail not in TAILS:
        raise ValueError(f"`tail` must be one of {', '.join(map(repr, TAILS))}, got {tail!r}.")
    if divergence == "generalized_jsd":
        if beta is None:
            raise ValueError("`beta` is required with `divergence='generalized_jsd'`: a number from 0.0 to 1.0.")
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"`beta` must be from 0.0 (forward KL) to 1.0 (reverse KL), got {beta}.")
    elif beta is not None:
        raise ValueError(
            f"`beta` is only used by `divergence='generalized_jsd'`, got beta={beta} with divergence={divergence!r}. "
            "Leave it at `None`."
        )
    if not (temperature > 0.0 and temperature < float("inf")):
        raise ValueError(f"`temperature` must be a positive finite number, got {temperature}.")
    forward = divergence == "forward_kl" or (divergence == "generalized_jsd" and beta == 0.0)
    reverse = divergence == "reverse_kl" or (divergence == "generalized_jsd" and beta == 1.0)
    if tail == "none" and not forward:
        raise ValueError(
            f"`tail='none'` cannot be used with divergence={divergence!r}: the student's mass outside the support "
            "would be free. Use `tail='bucket'`."
        )
    if tail == "renormalize" and reverse:
        raise ValueError(
            f"`tail='renormalize'` cannot be used with divergence={divergence!r}"
            f"{'' if beta is None else f' and beta={beta}'}: a teacher without any mass outside its support is "
            "infinitely far from a student that has some. Use `tail='bucket'`."
        )
