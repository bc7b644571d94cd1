"""Inputs and measurements that the tests of the loss share."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trl_offline_distill import TeacherTopK


OBJECTIVES = [
    ("forward_kl", None, "bucket"),
    ("forward_kl", None, "none"),
    ("forward_kl", None, "renormalize"),
    ("reverse_kl", None, "bucket"),
    ("generalized_jsd", 0.3, "bucket"),
    ("generalized_jsd", 0.3, "renormalize"),
]
TAIL_TEMPERATURES = (0.5, 2.0)


def top_k_of(logits: Tensor, top_k: int, temperatures: tuple[float, ...] = ()) -> TeacherTopK:
    """The teacher's signal from its full logits `[N, V]`, from the definition."""
    full = logits.log_softmax(-1)
    values, ids = full.topk(top_k, -1)
    rest = full.scatter(1, ids, -math.inf)
    at = torch.stack([(rest / t).logsumexp(-1) for t in temperatures], -1) if temperatures else None
    return TeacherTopK(ids, values, rest.logsumexp(-1), at, temperatures, logits.shape[-1])


def ragged(teacher: TeacherTopK) -> TeacherTopK:
    """Row 0 loses its last candidate to the tail, row 1 all of them; what stands there instead may be anything."""
    ids, logprobs, log_tail = teacher.token_ids.clone(), teacher.logprobs.clone(), teacher.log_tail.clone()
    at = None if teacher.log_tail_at is None else teacher.log_tail_at.clone()
    for row, start in ((0, ids.shape[1] - 1), (1, 0)):
        dropped = logprobs[row, start:]
        log_tail[row] = torch.logaddexp(log_tail[row], dropped.logsumexp(-1))
        for column, temperature in enumerate(teacher.tail_temperatures):
            at[row, column] = torch.logaddexp(at[row, column], (dropped / temperature).logsumexp(-1))
    logprobs[0, -1], logprobs[1], ids[0, -1], ids[1] = -math.inf, -math.inf, 10**6, -5
    return TeacherTopK(ids, logprobs, log_tail, at, teacher.tail_temperatures, teacher.vocab_size)


def problem(
    n: int = 7, hidden_size: int = 5, vocab_size: int = 11, top_k: int = 4, dtype=torch.float64, seed: int = 0
) -> dict:
    """Random hidden states, head, teacher and labels: a label in the support, one outside it, one that is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    teacher = top_k_of(2 * randn(n, vocab_size).double(), top_k, TAIL_TEMPERATURES)
    labels = torch.randint(0, vocab_size, (n,), generator=generator)
    if n > 4:
        teacher = ragged(teacher)
        labels[2] = teacher.token_ids[2, 0]
        labels[3] = -100
        outside = set(range(vocab_size)) - set(teacher.token_ids[4].tolist())
        labels[4] = next(iter(outside), labels[4].item())
    return {
        "hidden_states": randn(n, hidden_size).requires_grad_(),
        "lm_head_weight": randn(vocab_size, hidden_size).requires_grad_(),
        "bias": randn(vocab_size).requires_grad_(),
        "teacher": teacher,
        "labels": labels,
    }


def leaves(inputs: dict) -> list[Tensor]:
    return [inputs[name] for name in ("hidden_states", "lm_head_weight", "bias") if inputs.get(name) is not None]


def peak_memory(function: Callable[[], object]) -> int:
    """Most bytes of tensors that were allocated at once while `function` ran, beyond those from before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    current = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak
