import math

import pytest
import torch

from trl_offline_distill.loss.divergences import DIVERGENCES, LOG_ZERO, TEACHER_FLOOR, forward_kl, reverse_kl


def probabilities(seed, n=6, k=5):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(n, k, generator=generator, dtype=torch.float64)).log_softmax(-1)


def naive(name, q, p, beta):
    """The textbook sums, one outcome at a time, in Python numbers."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    if name == "forward_kl":
        return kl(p, q)
    if name == "reverse_kl":
        return kl(q, p)
    m = [(1 - beta) * x + beta * y for x, y in zip(q, p, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize(("name", "beta"), [("forward_kl", None), ("reverse_kl", None), ("generalized_jsd", 0.3)])
def test_equals_the_definition(name, beta):
    student, teacher = probabilities(0), probabilities(1)
    found = DIVERGENCES[name](student, teacher, beta)
    expected = [naive(name, q, p, beta) for q, p in zip(student.exp().tolist(), teacher.exp().tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert (found > 0).all()
    assert DIVERGENCES[name](teacher, teacher, beta).abs().max() < 1e-15
    leaf = student.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: DIVERGENCES[name](s, teacher, beta), leaf)


def test_generalized_jsd_is_that_of_trl():
    from trl.experimental.gkd import GKDTrainer

    student, teacher = probabilities(0), probabilities(1)
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum")
        torch.testing.assert_close(DIVERGENCES["generalized_jsd"](student, teacher, beta).sum(), theirs)


@pytest.mark.parametrize(("name", "beta"), [("forward_kl", None), ("reverse_kl", None), ("generalized_jsd", 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_does_not_exist_costs_nothing(name, beta, dtype):
    student, teacher = probabilities(0).to(dtype), probabilities(1).to(dtype)
    absent = torch.full_like(student[:, :2], LOG_ZERO)
    wide = torch.cat([student, absent], -1).requires_grad_()
    found = DIVERGENCES[name](wide, torch.cat([teacher, absent], -1), beta)
    torch.testing.assert_close(found.detach(), DIVERGENCES[name](student, teacher, beta))
    (gradient,) = torch.autograd.grad(found.sum(), wide)
    assert gradient.isfinite().all()
    assert (gradient[:, -2:] == 0).all()


def test_student_mass_where_the_teacher_has_none():
    student = torch.tensor([[0.25, 0.75]]).log()
    teacher = torch.tensor([[0.0, LOG_ZERO]])
    expected = 0.25 * math.log(0.25) + 0.75 * (math.log(0.75) - TEACHER_FLOOR)
    assert reverse_kl(student, teacher).item() == pytest.approx(expected)
    assert forward_kl(student, teacher).item() == pytest.approx(math.log(4.0))
