"""
What the Triton kernels must do. `test_fused_triton.py` runs this file in a process of its own: under Triton's
interpreter, on CPU tensors, in the default run; compiled, on a GPU, by `make test-gpu`.
"""

import math

import pytest
import torch
from loss_utils import OBJECTIVES, leaves, problem

from trl_offline_distill import fused_distillation_loss
from trl_offline_distill.loss import fused_triton
from trl_offline_distill.loss.fused import PER_TOKEN, ModuleHead, TorchKernels, marker, run_fused_loss
from trl_offline_distill.loss.fused_triton import TritonKernels
from trl_offline_distill.loss.logit_transform import LogitTransform


DEVICE = "cpu" if fused_triton.INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRANSFORMS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(scale=0.7),
    "softcap": LogitTransform(softcap=5.0),
    "both": LogitTransform(scale=-1.5, softcap=4.0),
}
SCHEMES = ("in_forward", "recompute")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a row without large tiles, and none of them full at the end."""
    monkeypatch.setattr(fused_triton, "BLOCK", 32)


def poisoned(n: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tile `[n, V]` of random logits, and the buffer of NaN that it is a part of: two more rows, three columns."""
    buffer = torch.full((n + 2, vocab_size + 3), math.nan, dtype=dtype, device=DEVICE)
    tile = buffer[1 : n + 1, 1 : vocab_size + 1]
    generator = torch.Generator().manual_seed(0)
    tile.copy_(4 * torch.randn(n, vocab_size, generator=generator))
    return tile, buffer


def exact_stats(tile: torch.Tensor, transform: LogitTransform, temperature: float) -> list[torch.Tensor]:
    """Maximum, lse, lse_tempered and entropy of each row, in fp64, row by row, over the entries that are there."""
    rows = []
    for row in tile.double():
        logits = transform(row[row > marker(tile.dtype) / 2])
        log_q = logits.log_softmax(-1)
        rows.append(
            (
                logits.max() if len(logits) else torch.tensor(-1e30),
                logits.logsumexp(-1),
                (logits / temperature).logsumexp(-1),
                -(log_q.exp() * log_q).sum(),
            )
        )
    return [torch.stack([value.float().to(tile.device) for value in column]) for column in zip(*rows, strict=True)]


def exact_gradient(tile, transform, temperature, kd, ce):
    """The gradient of `kd * T * lse_tempered + ce * lse`, in fp64, by autograd; 0 for entries that are not there."""
    raw = tile.double().requires_grad_()
    there = tile > marker(tile.dtype) / 2
    logits = transform(torch.where(there, raw, 0.0))
    logits = torch.where(there, logits, -math.inf)
    some = there.any(-1)
    lse = (logits[some]).logsumexp(-1)
    tempered = temperature * (logits[some] / temperature).logsumexp(-1)
    return torch.autograd.grad((kd[some] * tempered + ce[some] * lse).sum(), raw)[0]


@pytest.mark.parametrize("processors", [1, 64], ids=["whole_rows", "split_rows"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels(dtype, transform, temperature, processors, monkeypatch):
    monkeypatch.setattr(fused_triton, "_processors", lambda device: processors)
    transform = TRANSFORMS[transform]
    tile, buffer = poisoned(3, 75, dtype)
    # A block without entries, a row without any, and the last entry of a row
    tile[0, 32:64] = tile[1] = tile[2, -1] = marker(dtype)
    kd, ce = torch.tensor([0.7, 0.3, -0.4], device=DEVICE), torch.tensor([-0.2, 0.1, 0.5], device=DEVICE)
    expected = exact_gradient(tile, transform, temperature, kd, ce)

    stats = TritonKernels().reduce_tail(tile, transform, temperature)
    found = (stats.maximum, stats.lse, stats.lse_tempered, stats.entropy)
    for value, exact in zip(found, exact_stats(tile, transform, temperature), strict=True):
        torch.testing.assert_close(value, exact, rtol=2e-6, atol=2e-6)

    TritonKernels().write_tail_gradient(tile, transform, temperature, kd, ce, stats)
    torch.testing.assert_close(tile.double(), expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6)
    assert (tile[0, 32:64] == 0).all()
    assert (tile[1] == 0).all()
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside[1:-1, 1:-2] = False
    assert buffer[outside].isnan().all()


@pytest.mark.parametrize("processors", [1, 64], ids=["whole_rows", "split_rows"])
def test_one_row(processors, monkeypatch):
    monkeypatch.setattr(fused_triton, "_processors", lambda device: processors)
    tile, _ = poisoned(1, 75, torch.float32)
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 2.0)
    found = (stats.maximum, stats.lse, stats.lse_tempered, stats.entropy)
    for value, exact in zip(found, exact_stats(tile, LogitTransform(), 2.0), strict=True):
        torch.testing.assert_close(value, exact)


def test_no_row():
    tile = torch.empty(0, 75, device=DEVICE)
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 1.0)
    assert stats.lse.shape == (0,)
    TritonKernels().write_tail_gradient(tile, LogitTransform(), 1.0, tile[:, 0], tile[:, 0], stats)


def test_extreme_logits():
    tile, _ = poisoned(3, 75, torch.float32)
    tile *= torch.tensor([2500.0, 1.0, 1.0], device=DEVICE)[:, None]
    tile[1, 0], tile[2] = 1e4, -1e4
    exact = exact_stats(tile, LogitTransform(), 1.0)
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 1.0)
    torch.testing.assert_close(stats.lse, exact[1])
    torch.testing.assert_close(stats.entropy, exact[3], rtol=1e-5, atol=1e-5)
    one, none = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    TritonKernels().write_tail_gradient(tile, LogitTransform(), 1.0, one, none, stats)
    torch.testing.assert_close(tile.sum(-1), one, rtol=2e-3, atol=0)


def test_a_nan_is_not_hidden():
    tile, _ = poisoned(2, 75, torch.float32)
    tile[0, 40] = math.nan
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 1.0)
    assert stats.lse[0].isnan()
    assert stats.entropy[0].isnan()
    assert stats.lse[1].isfinite()


def test_offsets_beyond_32_bits():
    # Two rows 2^31 entries apart: untouched memory between them is never made real
    stride = 2**30 + 64
    tile = torch.empty(2 * stride + 45, dtype=torch.float16, device=DEVICE).as_strided((3, 45), (stride, 1))
    tile.copy_(torch.randn(3, 45, generator=torch.Generator().manual_seed(0)))
    one = torch.ones(3, device=DEVICE)
    exact, expected = exact_stats(tile, LogitTransform(), 1.0), exact_gradient(tile, LogitTransform(), 1.0, one, one)
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 1.0)
    torch.testing.assert_close(stats.lse, exact[1])
    TritonKernels().write_tail_gradient(tile, LogitTransform(), 1.0, one, one, stats)
    torch.testing.assert_close(tile.double(), expected, rtol=2e-3, atol=1e-6)


def test_a_tile_of_any_strides():
    tile = poisoned(75, 3, torch.float32)[0].T
    exact = exact_stats(tile, LogitTransform(), 1.0)
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 1.0)
    torch.testing.assert_close(stats.lse, exact[1])
    one = torch.ones(3, device=DEVICE)
    expected = exact_gradient(tile, LogitTransform(), 1.0, one, one)
    TritonKernels().write_tail_gradient(tile, LogitTransform(), 1.0, one, one, stats)
    torch.testing.assert_close(tile.double(), expected, rtol=1e-5, atol=1e-6)


def on_device(inputs: dict, dtype: torch.dtype | None = None) -> dict:
    moved = {**inputs, "teacher": inputs["teacher"].to(DEVICE)}
    if inputs.get("labels") is not None:
        moved["labels"] = inputs["labels"].to(DEVICE)
    for name in ("hidden_states", "lm_head_weight", "bias"):
        if inputs.get(name) is not None:
            moved[name] = inputs[name].detach().to(DEVICE, dtype).requires_grad_()
    return moved


def evaluate(inputs: dict, **options) -> list[torch.Tensor]:
    """Loss, per-token values and gradients, under an upstream gradient of -0.8."""
    output = fused_distillation_loss(**inputs, **options)
    gradients = torch.autograd.grad(output.loss * -0.8, leaves(inputs))
    return [output.loss.detach(), *(getattr(output, name) for name in PER_TOKEN), *gradients]


CONTINUOUS = [0, 1, 2, 3, 6, 7, 8, 9]  # of what `evaluate` returns: all but the two agreements


def error(values: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Largest difference of each, relative to the largest exact value."""
    return [
        ((values[i].double() - exact[i].double()).abs().max() / exact[i].double().abs().max().clamp(min=1e-3)).item()
        for i in CONTINUOUS
    ]


def check(inputs: dict, dtype: torch.dtype, **options) -> None:
    """Triton against the dense twin in fp64, judged by the dense twin's own error in this dtype, and against torch."""
    inputs = on_device(inputs, dtype)
    found = evaluate(inputs, backend="triton", **options)
    assert all(value.isfinite().all() for value in found)
    dense = {name: value for name, value in options.items() if name not in ("backward", "chunk_size")}
    exact = evaluate(on_device(inputs, torch.float64), backend="reference", **dense)
    twin = error(evaluate(inputs, backend="reference", **dense), exact)
    torch_backend = error(evaluate(inputs, backend="torch", **options), exact)
    margin = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    for ours, dense_error, torch_error in zip(error(found, exact), twin, torch_backend, strict=True):
        assert ours <= 2 * dense_error + margin
        assert ours <= torch_error + margin


@pytest.mark.parametrize("backward", SCHEMES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_end_to_end(dtype, divergence, beta, tail, transform, temperature, backward):
    transform = TRANSFORMS[transform]
    check(
        problem(n=5, vocab_size=29, hidden_size=4, dtype=torch.float32),
        dtype,
        divergence=divergence,
        beta=beta,
        tail=tail,
        temperature=temperature,
        kd_weight=0.8,
        ce_weight=0.3,
        logit_scale=transform.scale,
        final_logit_softcapping=transform.softcap,
        backward=backward,
        chunk_size=3,
    )


@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=["bf16_logits", "fp32_logits"])
def test_logits_dtype(logits_dtype):
    check(problem(n=5, vocab_size=29, dtype=torch.float32), torch.bfloat16, logits_dtype=logits_dtype)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_several_blocks_a_row(chunk_size):
    inputs = problem(n=5, vocab_size=75, top_k=7, dtype=torch.float32)
    check(inputs, torch.float32, chunk_size=chunk_size, ce_weight=0.5, temperature=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("labelled", [True, False])
def test_the_support_is_the_vocabulary(labelled, dtype):
    inputs = problem(n=3, vocab_size=11, top_k=11, dtype=torch.float32)
    if not labelled:
        inputs["labels"] = None
    check(inputs, dtype, ce_weight=0.5 if labelled else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("labelled", [True, False])
def test_nothing_is_in_the_support(labelled, dtype):
    inputs = problem(n=3, vocab_size=29, dtype=torch.float32)
    inputs["teacher"].logprobs.fill_(-math.inf)
    inputs["teacher"].log_tail.fill_(0.0)
    inputs["teacher"].token_ids.fill_(-7)
    if not labelled:
        inputs["labels"] = None
    check(inputs, dtype, ce_weight=0.5 if labelled else 0.0)


def test_a_head_without_gradient():
    inputs = on_device(problem(n=5, vocab_size=29, dtype=torch.float32), torch.float32)
    inputs["lm_head_weight"].requires_grad_(False)
    inputs["bias"].requires_grad_(False)
    for name in ("triton", "torch"):
        fused_distillation_loss(**inputs, backend=name).loss.backward()
        if name == "triton":
            found, inputs["hidden_states"].grad = inputs["hidden_states"].grad, None
    torch.testing.assert_close(found, inputs["hidden_states"].grad)
    assert inputs["lm_head_weight"].grad is None


@pytest.mark.parametrize("backward", SCHEMES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_of_the_models_own(dtype, divergence, beta, tail, temperature, backward):
    """Judged as `check` judges: by the dense twin's own error in this dtype."""

    def results(backend: str, kind: torch.dtype) -> list[torch.Tensor]:
        inputs = on_device(problem(n=5, vocab_size=29, hidden_size=4, dtype=torch.float32))
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 29))
        module = module.to(dtype).to(DEVICE, kind)  # rounded first: the same numbers in every dtype
        hidden = inputs["hidden_states"].detach().to(dtype).to(kind).requires_grad_()
        output = run_fused_loss(
            ModuleHead(module, 29),
            hidden,
            tuple(module.parameters()),
            inputs["teacher"],
            inputs["labels"],
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=temperature,
            kd_weight=0.8,
            ce_weight=0.3,
            num_items=None,
            chunk_size=3,
            loss_memory_budget=None,
            backward=backward,
            backend=backend,
        )
        return [output.loss.detach(), *torch.autograd.grad(output.loss, [hidden, *module.parameters()])]

    def errors(found: list[torch.Tensor]) -> list[float]:
        return [((a.double() - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in zip(found, exact, strict=True)]

    exact = results("reference", torch.float64)
    margin = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for ours, dense in zip(errors(results("triton", dtype)), errors(results("reference", dtype)), strict=True):
        assert ours <= 2 * dense + margin


def test_the_kernels_ran(monkeypatch):
    """`backend="triton"` means these kernels, not those in torch."""
    monkeypatch.setattr(TorchKernels, "reduce_tail", None)
    monkeypatch.setattr(TorchKernels, "write_tail_gradient", None)
    inputs = on_device(problem(n=3, vocab_size=29, dtype=torch.float32))
    fused_distillation_loss(**inputs, backend="triton").loss.backward()
    with pytest.raises(TypeError, match="not callable"):
        fused_distillation_loss(**inputs, backend="torch")
