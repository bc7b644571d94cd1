import math

import pytest
import torch
from loss_utils import ragged, top_k_of

from trl_offline_distill import TeacherTopK
from trl_offline_distill.loss.outcomes import check_temperature, tail_normalizer, teacher_outcomes


def test_the_three_treatments_of_the_tail():
    teacher = top_k_of(torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64).log(), 2)
    expected = {"bucket": [0.5, 0.2, 0.3], "none": [0.5, 0.2, 0.0], "renormalize": [0.5 / 0.7, 0.2 / 0.7, 0.0]}
    for tail, probabilities in expected.items():
        found = teacher_outcomes(teacher, tail, 1.0, torch.float64).exp()
        torch.testing.assert_close(found, torch.tensor([probabilities], dtype=torch.float64))


def test_temperature_is_not_a_division_of_log_probabilities():
    logits = torch.tensor([[4.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    teacher = top_k_of(logits, 4)
    assert (teacher.logprobs / 2).exp().sum().item() == pytest.approx(1.574, abs=1e-3)
    found = teacher_outcomes(teacher, "renormalize", 2.0, torch.float64).exp()[0, :4]
    assert found.tolist() == pytest.approx([0.579, 0.213, 0.129, 0.078], abs=1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
def test_a_cached_temperature_is_exact(temperature):
    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    teacher = ragged(top_k_of(logits, 6, (0.5, 2.0, 4.0)))
    exact = (logits / temperature).softmax(-1)
    found = teacher_outcomes(teacher, "bucket", temperature, torch.float64).exp()
    torch.testing.assert_close(found.sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(found[2:, :6], exact.gather(1, teacher.token_ids.clamp(0, 39))[2:])
    assert found[1].tolist() == pytest.approx([0.0] * 6 + [1.0])


def language_like_logits(n, vocab_size):
    """A few candidates far ahead of a tail that falls with the logarithm of the rank, as language models have it."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, vocab_size + 1, dtype=torch.float64)
    slope = 0.8 + 0.8 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(n, vocab_size, generator=generator, dtype=torch.float64)
    return -slope * ranks.log() + noise + 4 * (ranks <= 5) * torch.rand(n, 1, generator=generator, dtype=torch.float64)


def test_interpolated_tail_mass():
    logits = language_like_logits(200, 20_000)
    teacher = top_k_of(logits, 100, (1.25, 2.0, 4.0))
    for temperature in (1.25, 1.4, 1.5, 1.75, 2.5, 3.0, 5.0, 6.0, 8.0):
        q = (logits / temperature).softmax(-1)
        exact = 1 - q.gather(1, teacher.token_ids).sum(-1)
        found = teacher_outcomes(teacher, "bucket", temperature, torch.float64)[:, -1].exp()
        assert (found - exact).abs().max() < 0.004, temperature


def test_a_power_of_the_tail_mass_would_be_wrong():
    logits = language_like_logits(50, 20_000)
    teacher = top_k_of(logits, 100, (2.0,))
    exact = teacher_outcomes(teacher, "bucket", 2.0, torch.float64)[:, -1].exp()
    powered = (teacher.log_tail / 2).exp()
    naive = powered / (powered + (teacher.logprobs / 2).exp().sum(-1))
    assert ((exact - naive).abs() > 0.3).all()


def test_a_tail_without_mass_has_none_at_any_temperature():
    teacher = top_k_of(torch.randn(3, 6, dtype=torch.float64), 6, (2.0,))
    teacher = TeacherTopK(
        teacher.token_ids, teacher.logprobs, teacher.log_tail, teacher.log_tail_at, teacher.tail_temperatures, 6
    )
    for temperature in (1.0, 1.5, 2.0, 3.0):
        assert (tail_normalizer(teacher, temperature) == -math.inf).all()


@pytest.mark.parametrize(
    ("temperature", "cached", "vocab_size", "fine"),
    [
        (1.0, (), None, True),
        (2.0, (), 100, False),
        (2.0, (2.0,), None, True),
        (1.5, (2.0,), None, True),
        (3.0, (2.0,), None, False),
        (3.0, (2.0,), 100, True),
        (0.7, (2.0,), 100, False),
        (0.7, (0.5,), 100, True),
        (0.5, (0.5,), None, True),
    ],
)
def test_which_temperatures_a_cache_determines(temperature, cached, vocab_size, fine):
    check_temperature(temperature, "renormalize", cached, vocab_size)
    if fine:
        check_temperature(temperature, "bucket", cached, vocab_size)
    else:
        with pytest.raises(ValueError, match=rf"`temperature={temperature}` needs the tail's normaliser.*rebuild"):
            check_temperature(temperature, "bucket", cached, vocab_size)


def test_tempered_outcomes_differentiate_nothing_of_the_cache():
    teacher = top_k_of(torch.randn(2, 9), 3, (2.0,))
    assert not teacher_outcomes(teacher, "bucket", 1.5, torch.float32).requires_grad
