import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_utils import OBJECTIVES, TAIL_TEMPERATURES, leaves, peak_memory, problem, ragged, top_k_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trl_offline_distill import TeacherTopK, fused_distillation_loss
from trl_offline_distill.loss.fused import PER_TOKEN, auto_chunk_size


SCHEMES = ("in_forward", "recompute")


def evaluate(inputs, upstream=1.0, **options):
    """Loss, per-token values and gradients, under a random upstream gradient."""
    output = fused_distillation_loss(**inputs, **options)
    wanted = [leaf for leaf in leaves(inputs) if leaf.requires_grad]
    gradients = torch.autograd.grad(output.loss * upstream, wanted) if wanted else ()
    return [output.loss.detach(), *(getattr(output, name) for name in PER_TOKEN), *gradients]


def assert_equal(left, right, **tolerance):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("backward", SCHEMES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
def test_equals_the_dense_twin(divergence, beta, tail, temperature, backward):
    options = {"divergence": divergence, "beta": beta, "tail": tail, "temperature": temperature}
    options |= {"num_items": 5.5}
    inputs = problem()
    for weights in ({}, {"kd_weight": 0.6, "ce_weight": 0.7}, {"kd_weight": 0.0, "ce_weight": 1.0}):
        for head in ({}, {"logit_scale": 0.5, "final_logit_softcapping": 3.0}):
            expected = evaluate(inputs, -1.7, backend="reference", **options, **weights, **head)
            for chunk_size in (1, 4, 7, 100):  # of 6 positions: one not dividing them
                found = evaluate(
                    inputs,
                    -1.7,
                    backend="torch",
                    backward=backward,
                    chunk_size=chunk_size,
                    **options,
                    **weights,
                    **head,
                )
                assert_equal(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backward", SCHEMES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
def test_gradcheck(divergence, beta, tail, temperature, backward):
    inputs = problem(n=5, hidden_size=3, vocab_size=7, top_k=3)

    def loss(hidden_states, lm_head_weight, bias):
        return fused_distillation_loss(
            hidden_states,
            lm_head_weight,
            inputs["teacher"],
            inputs["labels"],
            bias=bias,
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=temperature,
            ce_weight=0.4,
            final_logit_softcapping=4.0,
            chunk_size=2,
            backward=backward,
        ).loss

    assert torch.autograd.gradcheck(loss, leaves(inputs))


def test_only_what_needs_a_gradient_gets_one():
    inputs = problem()
    full = evaluate(inputs, ce_weight=0.3)[-3:]
    for keep in range(3):
        for i, leaf in enumerate(leaves(inputs)):
            leaf.requires_grad_(i == keep)
        for backward in SCHEMES:
            torch.testing.assert_close(
                evaluate(inputs, ce_weight=0.3, backward=backward, chunk_size=3)[-1], full[keep]
            )


@given(
    n=st.integers(0, 6),
    vocab_size=st.integers(1, 9),
    data=st.data(),
    chunk_size=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    objective=st.sampled_from(OBJECTIVES),
    backward=st.sampled_from(SCHEMES),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_equals_the_dense_twin(n, vocab_size, data, chunk_size, seed, objective, backward):
    divergence, beta, tail = objective
    inputs = problem(n, 3, vocab_size, data.draw(st.integers(1, vocab_size)), seed=seed)
    options = {"divergence": divergence, "beta": beta, "tail": tail, "ce_weight": 0.5}
    expected = evaluate(inputs, 0.9, backend="reference", **options)
    found = evaluate(inputs, 0.9, backend="torch", chunk_size=chunk_size, backward=backward, **options)
    assert all(value.isfinite().all() for value in found)
    assert_equal(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("backward", SCHEMES)
def test_no_position(backward):
    inputs = problem(n=0)
    output = fused_distillation_loss(**inputs, backward=backward, ce_weight=1.0)
    output.loss.backward()
    assert output.loss == 0.0
    assert output.num_tokens == 0
    assert all((leaf.grad == 0).all() for leaf in leaves(inputs))
    # Everything ignored is the same
    inputs = problem()
    inputs["labels"].fill_(-100)
    fused_distillation_loss(**inputs, backward=backward).loss.backward()
    assert all((leaf.grad == 0).all() for leaf in leaves(inputs))


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalize"])
def test_the_whole_vocabulary_is_the_full_divergence(tail):
    inputs = problem(n=4, vocab_size=11)
    teacher_logits = torch.randn(4, 11, dtype=torch.float64)
    inputs |= {"teacher": top_k_of(teacher_logits, 11), "labels": None}
    logits = torch.nn.functional.linear(inputs["hidden_states"], inputs["lm_head_weight"], inputs["bias"])
    expected = torch.nn.functional.kl_div(
        logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="batchmean", log_target=True
    )
    gradients = torch.autograd.grad(expected, leaves(inputs))
    found = evaluate(inputs, tail=tail, chunk_size=3)
    torch.testing.assert_close(found[0], expected)
    assert_equal(found[-3:], gradients)


def of_probabilities(p, q, top_k):
    """Student with probabilities `q` and teacher with probabilities `p`, K=top_k, of one position."""
    teacher = top_k_of(torch.tensor([p], dtype=torch.float64).log(), top_k)
    hidden = torch.tensor([q], dtype=torch.float64).log()
    return {"hidden_states": hidden, "lm_head_weight": torch.eye(len(q), dtype=torch.float64), "teacher": teacher}


def test_worked_example():
    p, q = [0.5, 0.2, 0.2, 0.1], [0.8, 0.1, 0.05, 0.05]
    expected = {
        (1, "none"): -0.2350,
        (1, "bucket"): 0.2231,
        (2, "bucket"): 0.2332,
        (2, "renormalize"): 0.2190,
        **{(4, tail): 0.2502 for tail in ("none", "bucket", "renormalize")},
    }
    for backend in ("reference", "torch"):
        for (top_k, tail), value in expected.items():
            loss = fused_distillation_loss(**of_probabilities(p, q, top_k), tail=tail, backend=backend).loss
            assert loss.item() == pytest.approx(value, abs=5e-5), (top_k, tail)


def test_without_a_tail_the_minimum_is_negative_and_over_confident():
    p, mass = torch.tensor([0.5, 0.2, 0.2, 0.1]), 0.7
    q = [0.5 / mass, 0.2 / mass, 1e-12, 1e-12]
    inputs = of_probabilities(p.tolist(), q, 2)
    inputs["hidden_states"].requires_grad_()
    output = fused_distillation_loss(**inputs, tail="none")
    assert output.loss.item() == pytest.approx(mass * math.log(mass), abs=1e-8)
    (gradient,) = torch.autograd.grad(output.loss, inputs["hidden_states"])
    assert gradient.abs().max() < 1e-8
    # Its gradient is M times the renormalised one: what the truncation biases, M does not repair
    inputs = problem(n=4)
    inputs["labels"] = None
    mass = inputs["teacher"].logprobs.exp().sum(-1)
    inputs["teacher"], inputs["hidden_states"] = inputs["teacher"][2:3], inputs["hidden_states"][2:3]
    without, scaled = (evaluate(inputs, tail=tail)[-2] for tail in ("none", "renormalize"))
    torch.testing.assert_close(without, mass[2] * scaled)


def test_a_one_hot_teacher_is_the_cross_entropy():
    inputs = problem()
    labels = inputs["labels"].clamp(min=0)
    one_hot = TeacherTopK(labels[:, None], torch.zeros(7, 1), torch.full((7,), -math.inf))
    logits = torch.nn.functional.linear(inputs["hidden_states"], inputs["lm_head_weight"], inputs["bias"])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    gradients = torch.autograd.grad(expected, leaves(inputs))
    for tail in ("bucket", "none", "renormalize"):
        found = evaluate(inputs | {"teacher": one_hot, "labels": labels}, tail=tail, chunk_size=2)
        torch.testing.assert_close(found[0], expected)
        assert_equal(found[-3:], gradients)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("divergence", "beta", "tail"), [o for o in OBJECTIVES if o[2] == "bucket"])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(divergence, beta, tail, temperature):
    inputs = problem()
    logits = torch.nn.functional.linear(inputs["hidden_states"], inputs["lm_head_weight"], inputs["bias"]).detach()
    inputs["teacher"] = ragged(top_k_of(logits, 4, TAIL_TEMPERATURES))
    found = evaluate(inputs, divergence=divergence, beta=beta, tail=tail, temperature=temperature)
    assert found[0].abs() < 1e-12
    assert all(gradient.abs().max() < 1e-12 for gradient in found[-3:])


def test_both_ends_of_beta_are_the_two_divergences():
    inputs = problem()
    for beta, name in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        assert_equal(evaluate(inputs, divergence="generalized_jsd", beta=beta), evaluate(inputs, divergence=name))


def test_disjoint_supports_are_finite():
    for divergence, beta in (("forward_kl", None), ("reverse_kl", None), ("generalized_jsd", 0.5)):
        inputs = {
            "hidden_states": torch.tensor([[0.0, 80.0, 0.0]], requires_grad=True),
            "lm_head_weight": torch.eye(3),
            "teacher": TeacherTopK(torch.tensor([[0]]), torch.zeros(1, 1), torch.full((1,), -math.inf)),
        }
        found = evaluate(inputs, divergence=divergence, beta=beta)
        assert found[0].isfinite()
        assert found[-1].isfinite().all()
    # The mixture is half of each: two separated distributions are log 2 apart
    assert found[0].item() == pytest.approx(math.log(2.0), rel=1e-6)


def edge_rows():
    """Teachers and student logits at the limits of fp32, one position each."""
    inf = math.inf
    return {
        "mass one": ([0, 1], [math.log(0.5)] * 2, -inf, [1.0, 2.0, 3.0, -1.0]),
        "mass above one": ([0, 1], [math.log(0.5), math.log(0.5 + 1e-7)], -inf, [1.0, 2.0, 3.0, -1.0]),
        "tail underflow": ([0, 1], [math.log(0.5)] * 2, -300.0, [60.0, 60.0, -60.0, -60.0]),
        "tiny student tail": ([0, 1], [-0.1, -2.4], -6.0, [110.0, 100.0, -10.0, -10.0]),
        "all absent": ([-7, 10**9], [-inf, -inf], 0.0, [1.0, 2.0, 3.0, -1.0]),
        "large logits": ([0, 1], [-0.1, -2.4], -6.0, [1e4, 1e4 - 3, 0.0, -1e4]),
        "whole vocabulary": ([2, 0, 3, 1], [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)], -inf, [1.0, 2.0, 3.0, -1.0]),
        "fp16 floor": ([0, 1], [0.0, -65504.0], -65504.0, [1.0, 2.0, 3.0, -1.0]),
    }


@pytest.mark.parametrize("name", edge_rows())
@pytest.mark.parametrize(
    ("divergence", "beta"), [("forward_kl", None), ("reverse_kl", None), ("generalized_jsd", 0.4)]
)
def test_edges_are_finite_and_right(name, divergence, beta):
    ids, logprobs, log_tail, logits = edge_rows()[name]
    options = {"divergence": divergence, "beta": beta, "ce_weight": 0.5}

    def inputs(dtype):
        return {
            "hidden_states": torch.tensor([logits], dtype=dtype, requires_grad=True),
            "lm_head_weight": torch.eye(4, dtype=dtype),
            "teacher": TeacherTopK(torch.tensor([ids]), torch.tensor([logprobs]), torch.tensor([log_tail])),
            "labels": torch.tensor([2]),
        }

    exact = evaluate(inputs(torch.float64), backend="reference", **options)
    assert all(value.isfinite().all() for value in exact)
    # A logit of 1e4 has a spacing of 1e-3 in fp32
    atol = 2e-3 if name == "large logits" else 2e-6
    for backward in SCHEMES:
        found = evaluate(inputs(torch.float32), backward=backward, **options)
        assert_equal([value.double() for value in found], exact, rtol=2e-5, atol=atol)
    if name != "large logits":
        wide = inputs(torch.float64)
        hidden = wide.pop("hidden_states")
        assert torch.autograd.gradcheck(lambda h: fused_distillation_loss(h, **wide, **options).loss, hidden)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
def test_a_position_without_a_teacher_asks_for_nothing(divergence, beta, tail, backend):
    """No support and all mass in the tail: what position selection leaves where the teacher is not wanted."""
    inputs = problem()
    inputs["teacher"].logprobs[2:] = -math.inf
    inputs["teacher"].log_tail[2:] = 0.0
    options = {"divergence": divergence, "beta": beta, "tail": tail, "backend": backend, "num_items": 4.0}
    found = evaluate(inputs, **options)
    masked = {**inputs, "labels": inputs["labels"].clone()}
    masked["labels"][2:] = -100
    expected = evaluate(masked, **options)
    assert_equal([found[0], *found[-3:]], [expected[0], *expected[-3:]], rtol=1e-9, atol=1e-11)


def test_the_tail_is_not_a_difference():
    # Tail mass 1e-6: one minus the support's sum has lost all digits of it in fp32
    logits = torch.tensor([[10.0, 9.0, *[10.0 - math.log(1e6) - math.log(98)] * 98]])
    teacher = top_k_of(logits.double(), 2)
    inputs = {"hidden_states": logits.requires_grad_(), "lm_head_weight": torch.eye(100), "teacher": teacher}
    (gradient,) = torch.autograd.grad(fused_distillation_loss(**inputs).loss, logits)
    tail_mass = teacher.log_tail.exp().item()
    assert gradient[0, 2:].sum().abs().item() < 1e-5 * tail_mass


def test_masked_positions_may_hold_anything():
    inputs = problem()
    expected = evaluate(inputs, ce_weight=0.5)
    poisoned = dict(inputs)
    poisoned["hidden_states"] = inputs["hidden_states"].detach().clone()
    poisoned["hidden_states"][3] = math.nan
    poisoned["hidden_states"].requires_grad_()
    teacher = inputs["teacher"]
    logprobs, log_tail, ids = teacher.logprobs.clone(), teacher.log_tail.clone(), teacher.token_ids.clone()
    logprobs[3], log_tail[3], ids[3] = math.nan, math.inf, 10**9
    poisoned["teacher"] = TeacherTopK(ids, logprobs, log_tail)
    found = evaluate(poisoned, ce_weight=0.5)
    assert_equal(found, expected)
    assert (found[-3][3] == 0).all()


def test_unused_memory_is_never_read(monkeypatch):
    expected = evaluate(problem(), ce_weight=0.5, chunk_size=4)
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=original, **k: _make(*a, **k).fill_(math.nan))
    original_new = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: original_new(*a, **k).fill_(math.nan))
    for backward in SCHEMES:
        assert_equal(evaluate(problem(), ce_weight=0.5, chunk_size=4, backward=backward), expected)


def test_a_graph_can_be_walked_twice_only_where_it_is_kept():
    inputs = problem()
    for backward in SCHEMES:
        loss = fused_distillation_loss(**inputs, backward=backward).loss
        first = torch.autograd.grad(loss, leaves(inputs), retain_graph=True)
        assert_equal(first, torch.autograd.grad(loss, leaves(inputs)))
    loss = fused_distillation_loss(**inputs).loss
    torch.autograd.grad(loss, leaves(inputs))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, leaves(inputs))


@pytest.mark.parametrize("backward", SCHEMES)
def test_nests_under_checkpointing_offloading_and_compile(backward):
    inputs = problem()
    rest = {k: v for k, v in inputs.items() if k not in ("hidden_states", "lm_head_weight")}
    expected = evaluate(inputs, backward=backward)[-3:]

    def loss(hidden_states, lm_head_weight):
        return fused_distillation_loss(
            torch.tanh(hidden_states).atanh(), lm_head_weight, **rest, backward=backward
        ).loss

    def check(function):
        found = torch.autograd.grad(function(inputs["hidden_states"], inputs["lm_head_weight"]), leaves(inputs))
        assert_equal(found, expected)

    check(functools.partial(checkpoint, loss, use_reentrant=False))
    with torch.autograd.graph.save_on_cpu():
        check(loss)
    check(torch.compile(loss, backend="eager"))
    value = checkpoint(loss, inputs["hidden_states"], inputs["lm_head_weight"], use_reentrant=True)
    value.backward()
    assert_equal([leaf.grad for leaf in leaves(inputs)], expected)


class Shapes(TorchDispatchMode):
    """Shapes of all tensors that operations return, views of older ones included."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.seen.add(tuple(tensor.shape))
        return result


def large(frozen=False, bias=False):
    inputs = problem(n=64, hidden_size=16, vocab_size=1024, top_k=8, dtype=torch.float32)
    inputs["labels"] = torch.randint(0, 1024, (64,))
    inputs["lm_head_weight"].requires_grad_(not frozen)
    if not bias:
        inputs["bias"] = None
    return inputs


@pytest.mark.parametrize(
    ("frozen", "backward", "units"),
    [(False, "in_forward", 3), (False, "recompute", 4), (True, "in_forward", 2), (True, "recompute", 3)],
)
def test_flops(frozen, backward, units):
    inputs = large(frozen)
    unit = 2 * 64 * 1024 * 16
    with FlopCounterMode(display=False) as counter:
        fused_distillation_loss(**inputs, ce_weight=0.5, chunk_size=24, backward=backward).loss.backward()
    assert counter.get_total_flops() == units * unit
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fused_distillation_loss(**inputs, ce_weight=0.5, chunk_size=24, backward=backward)
    assert counter.get_total_flops() == unit
    # A position without a label does not reach the head
    inputs["labels"][:32] = -100
    with FlopCounterMode(display=False) as counter:
        fused_distillation_loss(**inputs, chunk_size=24, backward=backward).loss.backward()
    assert counter.get_total_flops() == units * unit // 2


def test_a_frozen_head_has_no_buffer_of_its_size():
    shapes = {}
    for frozen in (False, True):
        inputs = large(frozen)
        with Shapes() as mode:
            fused_distillation_loss(**inputs, chunk_size=16).loss.backward()
        shapes[frozen] = mode.seen
    assert (1024, 16) in shapes[False]
    large_ones = {shape for shape in shapes[True] if math.prod(shape) >= 1024 * 16}
    # The weight itself, detached and transposed, and the tile
    assert large_ones <= {(1024, 16), (16, 1024)}
    trained, frozen = large(False), large(True)
    trained = peak_memory(lambda: fused_distillation_loss(**trained, chunk_size=16).loss.backward())
    frozen = peak_memory(lambda: fused_distillation_loss(**frozen, chunk_size=16).loss.backward())
    assert trained - frozen >= 0.99 * 1024 * 16 * 4


def test_nothing_is_formed_for_evaluation():
    inputs = large()
    with torch.no_grad():
        assert not fused_distillation_loss(**inputs).loss.requires_grad
    with Shapes() as mode, torch.no_grad():
        fused_distillation_loss(**inputs, chunk_size=8)
    assert (64, 1024) not in mode.seen


@pytest.mark.parametrize("backward", SCHEMES)
def test_peak_memory_does_not_grow_with_the_positions(backward):
    hidden_size, vocab_size = 64, 4096
    weight = torch.randn(vocab_size, hidden_size, requires_grad=True)

    def peak(n):
        hidden = torch.randn(n, hidden_size, requires_grad=True)
        teacher = top_k_of(torch.randn(n, 64), 4)
        labels = torch.randint(0, 64, (n,))
        return peak_memory(
            lambda: fused_distillation_loss(
                hidden, weight, teacher, labels, ce_weight=1.0, chunk_size=32, backward=backward
            ).loss.backward()
        )

    small, big = peak(64), peak(1024)
    # The gradient of the hidden states, and per-token values and checks of [N, K]: nothing of the vocabulary's width
    assert big - small <= 960 * (hidden_size * 4 + 60 * 8) < 0.15 * 960 * vocab_size * 4
    chunk, weight_gradient, hidden_gradient = 32 * vocab_size * 4, vocab_size * hidden_size * 4, 1024 * hidden_size * 4
    assert big <= 1.35 * (chunk + weight_gradient + hidden_gradient)


def against_exact(dtype, chunk_size, backend="torch", n=256, **options):
    """Relative error of loss and gradients in `dtype`, against fp64 on the same rounded inputs."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(n, 32).to(dtype), (torch.randn(512, 32) * 0.5).to(dtype)
    teacher = top_k_of(torch.nn.functional.linear(hidden.double() + 0.05, weight.double()), 16)
    results = []
    for kind, name in ((torch.float64, "reference"), (dtype, backend)):
        leaf, head = hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_()
        output = fused_distillation_loss(leaf, head, teacher, backend=name, chunk_size=chunk_size, **options)
        output.loss.backward()
        results.append([output.loss.detach().double(), leaf.grad.double(), head.grad.double()])
    return [((a - b).norm() / b.norm()).item() for b, a in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("backward", SCHEMES)
def test_low_precision_is_no_worse_than_the_dense_twin(dtype, logits_dtype, backward):
    dense = against_exact(dtype, None, backend="reference")
    ours = against_exact(dtype, 64, backward=backward, logits_dtype=logits_dtype)
    for ours_error, dense_error in zip(ours, dense, strict=True):
        assert ours_error <= 1.1 * dense_error + 2e-4


def test_the_head_gradient_does_not_degrade_with_the_number_of_chunks():
    errors = {chunks: against_exact(torch.bfloat16, 256 // chunks)[2] for chunks in (1, 16, 256)}
    assert max(errors.values()) <= 1.05 * min(errors.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backward", SCHEMES)
def test_fp16_gradients_survive_until_the_scaler(backward, autocast):
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16), torch.randn(64, 16)
    teacher = top_k_of(torch.nn.functional.linear(hidden + 0.1, weight), 8)
    # Divided by as many positions as a large batch has, a gradient is below what fp16 can hold
    num_items, scale = 2.0**22, 2.0**16
    exact = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    fused_distillation_loss(*exact, teacher, num_items=num_items, backend="reference").loss.backward()
    dtype = torch.float32 if autocast else torch.float16
    leaves = [hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()]
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        loss = fused_distillation_loss(*leaves, teacher, num_items=num_items, backward=backward).loss
    (loss * scale).backward()
    for leaf, reference in zip(leaves, exact, strict=True):
        assert (leaf.grad.float() / scale - reference.grad).norm() < 0.02 * reference.grad.norm()


@pytest.mark.parametrize("backward", SCHEMES)
def test_autocast_projects_in_its_dtype_and_returns_full_precision(backward):
    torch.manual_seed(0)
    hidden, weight = torch.randn(32, 16), torch.randn(128, 16, requires_grad=True)
    teacher = top_k_of(torch.randn(32, 128), 8)
    results = []
    for backend in ("reference", "torch"):
        weight.grad = None
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = fused_distillation_loss(
                leaf, weight, teacher, backend=backend, backward=backward, chunk_size=8
            ).loss
        loss.backward()
        assert leaf.grad.dtype == weight.grad.dtype == torch.float32
        results.append([loss.detach(), leaf.grad, weight.grad])
    assert_equal(results[1], results[0], rtol=0.02, atol=2e-4)


def test_values_of_each_position():
    inputs = problem()
    output = fused_distillation_loss(**inputs, ce_weight=0.5, kd_weight=2.0)
    kept = inputs["labels"] != -100
    logits = torch.nn.functional.linear(inputs["hidden_states"], inputs["lm_head_weight"], inputs["bias"]).detach()
    assert output.num_tokens == output.num_items == 6
    for name in PER_TOKEN:
        values = getattr(output, name)
        assert values.shape == (7,)
        assert not values.requires_grad
        assert values[3] == 0.0
    torch.testing.assert_close(output.kd_sum, output.kd.sum())
    torch.testing.assert_close(output.ce_sum, output.ce.sum())
    torch.testing.assert_close(output.loss.detach(), (2.0 * output.kd_sum + 0.5 * output.ce_sum) / 6)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(output.entropy[kept], entropy[kept])
    assert torch.equal(output.label_agreement[kept], (logits.argmax(-1) == inputs["labels"])[kept].double())


def test_num_items_may_be_a_tensor():
    inputs = problem()
    assert_equal(evaluate(inputs, num_items=torch.tensor(9)), evaluate(inputs, num_items=9))


def test_chunk_size_from_a_budget():
    assert auto_chunk_size(1000, 4, "cpu", 1e5) == auto_chunk_size(1000, 4, "cpu", 100_000) == 16
    assert isinstance(auto_chunk_size(1000, 4, "cpu", 1e5), int)
    # 32 MiB on CPU, 1 GiB elsewhere
    assert auto_chunk_size(65536, 4, "cpu") == 128
    assert auto_chunk_size(131072, 2, "cuda") == 4096
    assert auto_chunk_size(151936, 4, "cuda") == 1760
    assert auto_chunk_size(10**9, 4, "cpu") == 1
    assert auto_chunk_size(1000, 4, "cpu", budget=400_000) == 96
    peaks = [
        peak_memory(functools.partial(fused_distillation_loss, **large(), loss_memory_budget=budget))
        for budget in (2**16, 2**18)
    ]
    # 16 and 64 positions at a time
    assert 0.9 * 48 * 1024 * 4 <= peaks[1] - peaks[0] <= 1.6 * 48 * 1024 * 4


def bad_teacher(name, value):
    teacher = problem()["teacher"]
    fields = {"token_ids": teacher.token_ids, "logprobs": teacher.logprobs, "log_tail": teacher.log_tail}
    fields[name] = fields[name].clone()
    fields[name][5 if name == "log_tail" else (5, 1)] = value
    return {"teacher": TeacherTopK(**fields)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"divergence": "kl"}, r"`divergence` must be one of 'forward_kl', 'reverse_kl'.*got 'kl'"),
        ({"tail": "drop"}, r"`tail` must be one of 'bucket', 'none', 'renormalize', got 'drop'"),
        ({"divergence": "generalized_jsd"}, r"`beta` is required"),
        ({"divergence": "generalized_jsd", "beta": 1.5}, r"`beta` must be from 0.0.*got 1.5"),
        ({"beta": 0.5}, r"`beta` is only used by"),
        ({"divergence": "reverse_kl", "tail": "none"}, r"`tail='none'` cannot be used with divergence='reverse_kl'"),
        ({"divergence": "generalized_jsd", "beta": 0.5, "tail": "none"}, r"would be free"),
        ({"divergence": "reverse_kl", "tail": "renormalize"}, r"infinitely far"),
        ({"divergence": "generalized_jsd", "beta": 1.0, "tail": "renormalize"}, r"infinitely far"),
        ({"temperature": 0.0}, r"`temperature` must be a positive finite number, got 0.0"),
        (
            {"temperature": 3.0, **bad_teacher("log_tail", -1.0)},
            r"`temperature=3.0` needs the tail's normaliser.*none",
        ),
        ({"kd_weight": -1.0}, r"`kd_weight` must be a finite number of at least 0.0, got -1.0"),
        ({"ce_weight": math.inf}, r"`ce_weight` must be a finite number"),
        ({"kd_weight": 0.0}, r"both 0.0"),
        ({"ce_weight": 1.0, "labels": None}, r"`labels` are required with `ce_weight=1.0`"),
        ({"num_items": 0}, r"`num_items` must be positive"),
        ({"chunk_size": 0}, r"`chunk_size` must be at least 1.*got 0"),
        ({"loss_memory_budget": -1}, r"`loss_memory_budget` must be at least 1.*got -1"),
        ({"backward": "later"}, r"`backward` must be one of 'in_forward', 'recompute', got 'later'"),
        ({"backend": "cuda"}, r"`backend` must be one of 'auto', 'reference', 'torch', 'triton', got 'cuda'"),
        ({"final_logit_softcapping": 0.0}, r"`final_logit_softcapping` must be a positive finite number"),
        ({"logit_scale": math.nan}, r"`logit_scale` must be a finite number"),
        ({"logits_dtype": torch.float16}, r"`logits_dtype` must be"),
        ({"hidden_states": torch.randn(7, 4)}, r"`lm_head_weight` must be \[V, H\].*\[11, 5\] and \[7, 4\]"),
        ({"hidden_states": torch.randn(7, 5)}, r"same dtype"),
        ({"hidden_states": torch.randn(6, 5).double()}, r"`teacher.token_ids` must have shape \[6, 4\]"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"`labels` must have shape \[7\], got \[3\]"),
        ({"bias": torch.zeros(4)}, r"`bias` must be \[11\]"),
        ({"lm_head_weight": torch.randn(3, 5).double(), "bias": None}, r"K=4 candidates.*3 rows"),
        ({"labels": torch.full((7,), 11)}, r"`labels` of position 0 is 11.*0 to 10"),
        (bad_teacher("token_ids", 11), r"`teacher.token_ids` of position 5 holds id 11.*11 rows"),
        (bad_teacher("token_ids", -2), r"position 5 holds id -2"),
        (bad_teacher("logprobs", math.nan), r"`teacher.logprobs` of position 5 holds nan"),
        (bad_teacher("logprobs", math.inf), r"`teacher.logprobs` of position 5 holds inf"),
        (bad_teacher("log_tail", math.nan), r"`teacher.log_tail` of position 5 holds nan"),
        (
            bad_teacher("token_ids", problem()["teacher"].token_ids[5, 0].item()),
            r"`teacher.token_ids` of position 5 holds id \d+ twice",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        fused_distillation_loss(**(problem() | change))


def test_an_explicit_backend_never_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from trl_offline_distill.loss import fused_triton

    monkeypatch.setattr(fused_triton, "why_not", lambda device, dtype: "there is no such device")
    with pytest.raises(RuntimeError, match="`backend='triton'` cannot run here: there is no such device"):
        fused_distillation_loss(**problem(), backend="triton")
