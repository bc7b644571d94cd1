"""
The loss alone, from hidden states and a head to the gradients of both: this package's schemes beside the ways other
software takes, as multiples of one GEMM over the head.

    python benchmarks/loss.py                  # CPU: a table, a CSV and two pictures in benchmarks/results
    python benchmarks/loss.py --tokens 1024    # the largest size alone

One unit is a plain `[N, H] x [H, V]` product, timed right before each measurement: the ratio holds on a busy machine,
where the seconds do not. Every method's loss and gradients are compared with its own objective's definition before it
is timed. All methods take turns in one process; memory is measured in a fresh process for each.
"""

import argparse
import csv
import ctypes
import gc
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path


# Read when TRL imports what it calls experimental
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_offline_distill import TeacherTopK, fused_distillation_loss
from trl_offline_distill.loss.fused import auto_chunk_size
from trl_offline_distill.loss.reference import dense_loss


RESULTS = Path(__file__).parent / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 2**20


@dataclass
class Problem:
    """What a method may read. `[N, V]` targets exist only for the methods that need them."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    teacher: TeacherTopK
    labels: Tensor  # [N]
    teacher_hidden: Tensor | None = None  # [N, H]
    teacher_weight: Tensor | None = None  # [V, H]
    teacher_logits: Tensor | None = None  # [N, V]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`(N, H, V)`"""
        return *self.hidden.shape, len(self.weight)

    @property
    def chunk_size(self) -> int:
        return auto_chunk_size(len(self.weight), self.hidden.element_size(), self.hidden.device.type)


def spread_teacher(n: int, vocab_size: int, top_k: int, generator: torch.Generator) -> TeacherTopK:
    """Distinct random ids by random gaps, and log-probabilities that leave a tail: cheap for any size."""
    device = generator.device
    gaps = torch.randint(1, vocab_size // top_k + 1, (n, top_k), generator=generator, device=device)
    logits = 2 * torch.randn(n, top_k + 1, generator=generator, device=device)
    logprobs = logits.log_softmax(-1)
    ids = gaps.cumsum(-1) - 1
    return TeacherTopK(ids, logprobs[:, :-1].contiguous(), logprobs[:, -1].contiguous(), vocab_size=vocab_size)


def make_problem(
    n: int, hidden_size: int, vocab_size: int, top_k: int, dtype: torch.dtype, device: str = "cpu", dense: str = ""
) -> Problem:
    """
    Random inputs. `dense` says what of the dense teacher exists: `""` nothing, `"head"` its hidden states and head,
    `"logits"` its logits; `"all"` both, and the sparse teacher is then the top of the dense one.
    """
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    hidden, weight = randn(n, hidden_size), randn(vocab_size, hidden_size, scale=hidden_size**-0.5)
    labels = torch.randint(0, vocab_size, (n,), generator=generator, device=device)
    problem = Problem(hidden, weight, spread_teacher(n, vocab_size, top_k, generator), labels)
    if dense in ("head", "all"):
        problem.teacher_hidden, problem.teacher_weight = randn(n, hidden_size), randn(*weight.shape, scale=0.02)
    if dense == "logits":
        problem.teacher_logits = randn(n, vocab_size)
    if dense == "all":
        problem.teacher_logits = problem.teacher_hidden @ problem.teacher_weight.T
        full = problem.teacher_logits.double().log_softmax(-1)
        values, ids = full.topk(top_k, -1)
        tail = full.scatter(1, ids, -math.inf).logsumexp(-1)
        problem.teacher = TeacherTopK(ids, values.float(), tail.float(), vocab_size=vocab_size)
    return problem


# The methods: each returns the loss, a mean over positions, from which `backward` reaches hidden states and head


def ours(problem: Problem, **options) -> Tensor:
    return fused_distillation_loss(problem.hidden, problem.weight, problem.teacher, problem.labels, **options).loss


def dense_kl(problem: Problem) -> Tensor:
    """Both distributions in full, as losses on logits are usually written."""
    student = F.linear(problem.hidden, problem.weight).float().log_softmax(-1)
    teacher = problem.teacher_logits.float().log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def trl_gkd(problem: Problem) -> Tensor:
    """The same as TRL's on-policy trainers compute it from logits."""
    from trl.experimental.gkd import GKDTrainer

    logits = F.linear(problem.hidden, problem.weight)
    return GKDTrainer.generalized_jsd_loss(logits, problem.teacher_logits, problem.labels, beta=0.0)


def truncated_kl_terms(logits: Tensor, teacher: TeacherTopK) -> tuple[Tensor, Tensor]:
    """Rows of arXiv 2608.03796's loss from logits `[n, V]`, and their `logsumexp`."""
    lse = logits.float().logsumexp(-1)
    probabilities = teacher.logprobs.exp()
    student = logits.gather(1, teacher.token_ids).float() - lse[:, None]
    return (probabilities * (teacher.logprobs - student)).sum(-1), lse


def truncated_kl_gradient(logits: Tensor, lse: Tensor, teacher: TeacherTopK, scale: Tensor) -> Tensor:
    """`d loss / d logits` of these rows, `[n, V]` in the logits' dtype."""
    probabilities = teacher.logprobs.exp() * scale
    gradient = (logits.float() - lse[:, None]).exp_().mul_(probabilities.sum(-1, keepdim=True))
    return gradient.scatter_add_(1, teacher.token_ids, -probabilities).to(logits.dtype)


class ChunkedOnLogits(torch.autograd.Function):
    """The sparse teacher's loss, chunk by chunk, over logits `[N, V]` that exist in full, as does their gradient."""

    @staticmethod
    def forward(ctx, logits: Tensor, teacher: TeacherTopK, chunk_size: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.teacher, ctx.chunk_size = teacher, chunk_size
        n = len(logits)
        chunks = (slice(start, start + chunk_size) for start in range(0, n, chunk_size))
        return torch.stack([truncated_kl_terms(logits[rows], teacher[rows])[0].sum() for rows in chunks]).sum() / n

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        (logits,) = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            lse = logits[rows].float().logsumexp(-1)
            gradient[rows] = truncated_kl_gradient(logits[rows], lse, ctx.teacher[rows], grad_output / len(logits))
        return gradient, None, None


def forward_chunked(problem: Problem) -> Tensor:
    return ChunkedOnLogits.apply(F.linear(problem.hidden, problem.weight), problem.teacher, problem.chunk_size)


class ThreeProjections(torch.autograd.Function):
    """
    The paper's fused scheme, from its description: nothing of a chunk survives the forward pass; the backward pass
    projects once to have the normaliser again and once more to form the gradient, then multiplies it into both
    gradients. Five GEMMs over the head.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, teacher: TeacherTopK, chunk_size: int) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.teacher, ctx.chunk_size = teacher, chunk_size
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            total += truncated_kl_terms(hidden[rows] @ weight.T, teacher[rows])[0].sum()
        return total / len(hidden)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        hidden, weight = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight)
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            teacher = ctx.teacher[rows]
            lse = truncated_kl_terms(hidden[rows] @ weight.T, teacher)[1]
            gradient = truncated_kl_gradient(hidden[rows] @ weight.T, lse, teacher, grad_output / len(hidden))
            hidden_gradient[rows] = gradient @ weight
            weight_gradient.addmm_(gradient.T, hidden[rows])
        return hidden_gradient, weight_gradient, None, None


def paper(problem: Problem) -> Tensor:
    return ThreeProjections.apply(problem.hidden, problem.weight, problem.teacher, problem.chunk_size)


def trl_nll(problem: Problem) -> Tensor:
    """TRL's fused head as its SFTTrainer calls it, with the metrics it logs."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    logprobs, *_ = ChunkedLogProbFunction.apply(
        problem.hidden,
        problem.weight,
        None,
        problem.labels,
        1.0,
        _CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        ("log_probs", "entropy", "is_top1"),
    )
    return -logprobs.mean()


def liger_jsd(problem: Problem, beta: float) -> Tensor:
    """Liger's chunked JSD in torch, compiled as it is by default. It projects the teacher as well: one unit more."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
    return loss(problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight, problem.labels)


def liger_jsd_triton(problem: Problem) -> Tensor:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.5)
    return loss(problem.hidden, problem.weight, problem.teacher_hidden, problem.teacher_weight, problem.labels)


def liger_kl_triton(problem: Problem) -> Tensor:
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

    return LigerFusedLinearKLDivLoss()(problem.hidden, problem.weight, problem.teacher_logits.softmax(-1))


def cut_cross_entropy(problem: Problem, impl: str) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(problem.hidden, problem.weight, problem.labels, impl=impl)


# What each of them computes, from full logits in fp64


def sparse_definition(problem: Problem, tail: str) -> Tensor:
    options = {"divergence": "forward_kl", "beta": None, "tail": tail, "temperature": 1.0}
    logits = F.linear(problem.hidden, problem.weight)
    return dense_loss(logits, problem.teacher, None, **options)["kd"].mean()


def dense_definition(problem: Problem, beta: float) -> Tensor:
    log_q = F.linear(problem.hidden, problem.weight).log_softmax(-1)
    log_p = problem.teacher_logits.log_softmax(-1)
    if beta == 0.0:
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    log_m = ((1 - beta) * log_q.exp() + beta * log_p.exp()).log()
    teacher, student = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * teacher + (1 - beta) * student).sum(-1).mean()


def nll_definition(problem: Problem) -> Tensor:
    return F.cross_entropy(F.linear(problem.hidden, problem.weight), problem.labels)


@dataclass
class Method:
    """
    Args:
        label: name in the table.
        run: the loss of a problem.
        definition: the same loss from its definition.
        units: GEMMs over the head that the scheme cannot do without.
        dense: what it needs of a dense teacher.
        trained: whether hidden states and head (`"head"`), hidden states (`"hidden"`) or nothing (`""`) is trained.
        package: what it comes from, if not from here.
        cuda_only: whether it is written in Triton.
        compiled: whether a first run at each size compiles.
    """

    label: str
    run: Callable[[Problem], Tensor]
    definition: Callable[[Problem], Tensor]
    units: int
    dense: str = ""
    trained: str = "head"
    package: str = ""
    cuda_only: bool = False
    compiled: bool = False

    def why_not(self, device: str) -> str | None:
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.package == "trl" and not hasattr(importlib.import_module("trl.kernels"), "ChunkedLogProbFunction"):
            return "TRL has had it from 1.16 on"
        if self.cuda_only and device != "cuda":
            return "Triton kernels, CUDA only"
        return None

    def step(self, problem: Problem) -> Tensor:
        """Loss and, where something is trained, gradients in `.grad`."""
        problem.hidden.requires_grad_(self.trained != "").grad = None
        problem.weight.requires_grad_(self.trained == "head").grad = None
        with torch.set_grad_enabled(self.trained != ""):
            loss = self.run(problem)
        if self.trained:
            loss.backward()
        return loss.detach()


def bucket(problem: Problem) -> Tensor:
    return sparse_definition(problem, "bucket")


def truncated(problem: Problem) -> Tensor:
    return sparse_definition(problem, "none")


def methods(device: str) -> dict[str, Method]:
    found = {
        "in_forward": Method("ours, in_forward", ours, bucket, 3),
        "frozen": Method("ours, frozen head", ours, bucket, 2, trained="hidden"),
        "recompute": Method("ours, recompute", lambda p: ours(p, backward="recompute"), bucket, 4),
        "evaluation": Method("ours, evaluation", ours, bucket, 1, trained=""),
    }
    if device == "cuda":
        found["in_forward_torch"] = Method("ours, torch", lambda p: ours(p, backend="torch"), bucket, 3)
        found["in_forward_fp32"] = Method(
            "ours, fp32 logits", lambda p: ours(p, logits_dtype=torch.float32), bucket, 3
        )
    return found | {
        "dense": Method("dense KL", dense_kl, lambda p: dense_definition(p, 0.0), 3, dense="logits"),
        "trl_gkd": Method(
            "dense KL, TRL's GKD", trl_gkd, lambda p: dense_definition(p, 0.0), 3, dense="logits", package="trl"
        ),
        "forward_chunked": Method("forward-chunked", forward_chunked, truncated, 3),
        "paper": Method("paper, 3 projections", paper, truncated, 5),
        "trl_nll": Method("TRL fused NLL", trl_nll, nll_definition, 4, package="trl"),
        "liger_jsd": Method(
            "Liger JSD, torch",
            lambda p: liger_jsd(p, 0.5),
            lambda p: dense_definition(p, 0.5),
            4,
            dense="head",
            package="liger_kernel",
            compiled=True,
        ),
        "liger_kl": Method(
            "Liger KL (JSD, beta 0), torch",
            lambda p: liger_jsd(p, 0.0),
            lambda p: dense_definition(p, 0.0),
            4,
            dense="head",
            package="liger_kernel",
            compiled=True,
        ),
        "liger_jsd_triton": Method(
            "Liger JSD, Triton",
            liger_jsd_triton,
            lambda p: dense_definition(p, 0.5),
            4,
            dense="head",
            package="liger_kernel",
            cuda_only=True,
            compiled=True,
        ),
        "liger_kl_triton": Method(
            "Liger KL, Triton",
            liger_kl_triton,
            lambda p: dense_definition(p, 0.0),
            3,
            dense="logits",
            package="liger_kernel",
            cuda_only=True,
            compiled=True,
        ),
        "cce_torch": Method(
            "cut-cross-entropy, torch",
            lambda p: cut_cross_entropy(p, "torch_compile"),
            nll_definition,
            3,
            package="cut_cross_entropy",
            compiled=True,
        ),
        "cce_triton": Method(
            "cut-cross-entropy, Triton",
            lambda p: cut_cross_entropy(p, "cce"),
            nll_definition,
            4,
            package="cut_cross_entropy",
            cuda_only=True,
            compiled=True,
        ),
    }


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def check(method: Method, dtype: torch.dtype, device: str) -> float:
    """Largest relative error of loss and gradients against the definition in fp64, on a small problem."""
    problem = make_problem(48, 64, 1000, 20, dtype, device, dense="all")
    exact = Problem(
        **{
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in vars(problem).items()
        }
    )
    exact.hidden.requires_grad_()
    exact.weight.requires_grad_()
    expected = method.definition(exact)
    gradients = torch.autograd.grad(expected, [exact.hidden, exact.weight])
    loss = method.step(problem)
    errors = [abs(loss.double() - expected.detach()).item() / abs(expected.item())]
    for tensor, gradient in zip((problem.hidden, problem.weight), gradients, strict=True):
        if tensor.grad is not None:
            errors.append(relative_error(tensor.grad, gradient))
    return max(errors)


# Relative error of gradients that the rounding of logits in that dtype explains
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class Clock:
    """Seconds a call takes, on CPU or on the device's own clock."""

    def __init__(self, device: str):
        self.device = device

    def __call__(self, function: Callable[[], object]) -> float:
        if self.device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


@dataclass
class Row:
    """One line of the table. `units` is the median of the ratios to the GEMM before it, `peak_mib` beyond inputs."""

    method: str
    label: str
    tokens: int
    hidden_size: int
    vocab_size: int
    top_k: int
    dtype: str
    floor_units: int
    seconds: float | None = None
    unit_seconds: float | None = None
    units: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    note: str = ""
    date: str = field(default_factory=lambda: date.today().isoformat())
    device: str = ""
    torch: str = torch.__version__

    def fill(self, seconds: list[float], units: list[float]) -> None:
        """Medians of `seconds`, of the GEMM's, and of their ratios round by round."""
        self.seconds, self.unit_seconds = statistics.median(seconds), statistics.median(units)
        self.units = statistics.median(a / b for a, b in zip(seconds, units, strict=True))

    def line(self) -> str:
        if self.units is None:
            return f"{self.label:<30}{self.tokens:>8}  does not run: {self.note}"
        peak = "" if self.peak_mib is None else f"{self.peak_mib:>10.0f}"
        return (
            f"{self.label:<30}{self.tokens:>8}{self.seconds:>10.4f}{self.units:>8.2f}"
            f"{self.units / self.floor_units:>8.2f}{peak:>10}{self.error:>11.1e}"
        )


HEADER = f"{'method':<30}{'tokens':>8}{'seconds':>10}{'units':>8}{'/floor':>8}{'MiB':>10}{'error':>11}"


# Rows of the GEMM that is the unit: all of them, or as many as a large chunk has
UNIT_ROWS = 4096


def time_in_turns(
    chosen: dict[str, Method], problem: Problem, repeats: int, clock: Clock
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each method and of the GEMM right before it, `repeats` rounds, everyone's turn in each."""
    n, _, vocab_size = problem.sizes
    product = problem.hidden.new_empty(min(n, UNIT_ROWS), vocab_size)
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    units: dict[str, list[float]] = {name: [] for name in chosen}

    def gemm() -> None:
        for hidden in problem.hidden.detach().split(UNIT_ROWS):
            torch.mm(hidden, problem.weight.detach().T, out=product[: len(hidden)])

    gemm()
    for method in chosen.values():
        if method.compiled:
            method.step(problem)
    for _ in range(repeats):
        for name, method in chosen.items():
            gc.collect()
            units[name].append(clock(gemm))
            seconds[name].append(clock(lambda method=method: method.step(problem)))
            problem.hidden.grad = problem.weight.grad = None
    return seconds, units


def memory_of(method: Method, tokens: list[int], shape: dict, dtype: torch.dtype) -> list[float]:
    """
    Peak MiB of resident memory beyond the inputs, over one step at each size, by the kernel's high-water mark. A first
    small run loads libraries and starts threads, and a compiled method compiles before the run that counts.
    """

    def status(name: str) -> float:
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{name}:")[1].split()[0]) / 1024

    method.step(make_problem(16, 64, 512, 8, dtype, dense="all"))
    peaks = []
    for n in tokens:
        problem = make_problem(n, **shape, dtype=dtype, dense=method.dense)
        if method.compiled:
            method.step(problem)
        # The library's packing buffers, which every product in the process shares
        problem.hidden[:256].detach() @ problem.weight[: 2**14].detach().T
        problem.hidden.grad = problem.weight.grad = None
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        method.step(problem)
        peaks.append(status("VmHWM") - before)
    return peaks


def memory_in_a_fresh_process(name: str, args: argparse.Namespace) -> dict[int, float]:
    command = [sys.executable, __file__, "--memory_of", name, "--tokens", *map(str, args.tokens)]
    for option in ("hidden_size", "vocab_size", "top_k", "dtype"):
        command += [f"--{option}", str(getattr(args, option))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(zip(args.tokens, json.loads(done.stdout.splitlines()[-1]), strict=True))


def bars(rows: list[Row], per_round: dict[str, list[float]], chunk_mib: float) -> list[tuple[str, float, float]]:
    """`(what, measured, at most)` of issue-level promises at the largest size, as ratios in this run."""
    at = {row.method: row for row in rows if row.units is not None}
    first = at["in_forward"]
    found = [
        ("trained head, in_forward, of 3 units", first.units / 3, 1.10),
        ("frozen head, in_forward, of 2 units", at["frozen"].units / 2, 1.15),
        ("recompute, of 4 units", at["recompute"].units / 4, 1.10),
        ("evaluation, of 1 unit", at["evaluation"].units, 1.20),
    ]
    for name, label, limit in (
        ("dense", "dense KL", 1.0),
        ("trl_gkd", "dense KL of TRL's GKD", 1.0),
        ("paper", "the paper's", 0.65),
        ("trl_nll", "TRL's", 0.65),
    ):
        if name in at:
            ratios = [a / b for a, b in zip(per_round["in_forward"], per_round[name], strict=True)]
            found.append((f"time against {label}", statistics.median(ratios), limit))
    if first.peak_mib is not None:
        # A teacher is held as well: ids and log-probabilities, or one number a token of the vocabulary
        target = first.tokens * first.vocab_size * DTYPES[first.dtype].itemsize / MIB
        support = first.tokens * (12 * first.top_k + 4) / MIB
        for name, label in (("dense", "dense KL"), ("trl_gkd", "dense KL of TRL's GKD")):
            if name in at:
                ratio = (first.peak_mib + support) / (at[name].peak_mib + target)
                found.append((f"extra memory against {label}, teachers included", ratio, 0.2))
        gradients = (first.tokens + first.vocab_size) * first.hidden_size * DTYPES[first.dtype].itemsize / MIB
        found.append(("extra memory of chunk + [N, H] + [V, H]", first.peak_mib / (gradients + chunk_mib), 1.05))
    return found


# One colour and marker a method, in every picture
STYLES = {
    "in_forward": ("#0b5fa5", "o", "-"),
    "frozen": ("#3d9be0", "o", "--"),
    "recompute": ("#0b5fa5", "s", ":"),
    "evaluation": ("#9cc9ef", "o", ":"),
    "in_forward_torch": ("#5b7fa5", "^", "-."),
    "in_forward_fp32": ("#27408b", "v", "-."),
    "dense": ("#444444", "D", "-"),
    "trl_gkd": ("#777777", "d", ":"),
    "forward_chunked": ("#8a8a8a", "D", "--"),
    "paper": ("#d1495b", "X", "-"),
    "trl_nll": ("#e0a100", "P", "-"),
    "liger_jsd": ("#3a7d44", "^", "-"),
    "liger_kl": ("#7fb069", "v", "--"),
    "liger_jsd_triton": ("#1f5a2b", "^", "-"),
    "liger_kl_triton": ("#5c8d3f", "v", "--"),
    "cce_torch": ("#8e5ea2", "<", "-"),
    "cce_triton": ("#5e3a72", "<", "--"),
}


def draw(rows: list[Row], stem: Path, title: str) -> list[Path]:
    """Time and memory against tokens, log scales, one line a method; returns the paths of the pictures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = []
    for quantity, unit in (("seconds", "seconds a step"), ("peak_mib", "peak memory beyond the inputs, MiB")):
        lines = {}
        for row in rows:
            if getattr(row, quantity) is not None:
                lines.setdefault(row.method, []).append((row.tokens, getattr(row, quantity), row.label))
        if not lines:
            continue
        figure, axes = plt.subplots(figsize=(9, 5.5), constrained_layout=True)
        if quantity == "seconds":
            floor = {row.tokens: row.unit_seconds for row in rows if row.method == "in_forward" and row.units}
            sizes = sorted(floor)
            label = "3 GEMMs: the floor of an exact method"
            axes.plot(sizes, [3 * floor[n] for n in sizes], color="black", lw=1.2, ls=(0, (5, 2)), label=label)
        order = sorted(lines, key=lambda name: -lines[name][-1][1])
        for name in order:
            tokens, values, labels = zip(*sorted(lines[name]), strict=True)
            colour, marker, style = STYLES[name]
            width = 2.4 if labels[0].startswith("ours") else 1.3
            axes.plot(tokens, values, color=colour, marker=marker, ls=style, ms=5, lw=width, label=labels[0])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row.tokens for row in rows})
        axes.set_xticks(sizes, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.grid(alpha=0.3)
        axes.set_xlabel("tokens")
        axes.set_ylabel(unit)
        axes.set_title(title, fontsize=10)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        path = stem.with_name(f"{stem.name}_{'time' if quantity == 'seconds' else 'memory'}.png")
        figure.savefig(path, dpi=130)
        plt.close(figure)
        paths.append(path)
    return paths


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=65_536)
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=methods("cpu"), default=list(methods("cpu")))
    parser.add_argument("--no_memory", action="store_true", help="skip the fresh processes for memory")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    dtype = DTYPES[args.dtype]
    shape = {"hidden_size": args.hidden_size, "vocab_size": args.vocab_size, "top_k": args.top_k}
    known = methods("cpu")
    if args.memory_of:
        print(json.dumps(memory_of(known[args.memory_of], args.tokens, shape, dtype)))
        return 0

    print(f"H={args.hidden_size} V={args.vocab_size} K={args.top_k} {args.dtype}, {torch.get_num_threads()} threads")
    print(HEADER, flush=True)
    rows, refused, errors = [], {}, {}
    for name in args.methods:
        refused[name] = known[name].why_not("cpu")
        if refused[name] is None:
            errors[name] = check(known[name], dtype, "cpu")
            if errors[name] > TOLERANCE[dtype]:
                refused[name] = f"its loss or a gradient is off by {errors[name]:.1e}"
    chosen = {name: known[name] for name in args.methods if refused[name] is None}
    peaks = {} if args.no_memory else {name: memory_in_a_fresh_process(name, args) for name in chosen}
    per_round: dict[str, list[float]] = {}
    for n in args.tokens:
        problem = make_problem(n, **shape, dtype=dtype, dense="head")
        problem.teacher_logits = torch.randn(n, args.vocab_size, dtype=dtype)
        per_round, units = time_in_turns(chosen, problem, args.repeats, Clock("cpu"))
        chunk_mib = problem.chunk_size * args.vocab_size * dtype.itemsize / MIB
        del problem
        for name in args.methods:
            row = Row(
                name, known[name].label, n, **shape, dtype=args.dtype, floor_units=known[name].units, device="cpu"
            )
            if name in chosen:
                row.error = errors[name]
                row.fill(per_round[name], units[name])
                row.peak_mib = peaks.get(name, {}).get(n)
            else:
                row.note = refused[name]
            rows.append(row)
            print(row.line(), flush=True)

    failed = 0
    largest = [row for row in rows if row.tokens == args.tokens[-1]]
    if {"in_forward", "frozen", "recompute", "evaluation"} <= chosen.keys():
        print(f"\nN={args.tokens[-1]}, medians of {args.repeats} ratios")
        for what, measured, limit in bars(largest, per_round, chunk_mib):
            failed += measured > limit
            print(f"{'pass' if measured <= limit else 'FAIL'}  {measured:6.3f}  at most {limit:.2f}  {what}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    stem = args.output_dir / "loss_cpu"
    write_csv(rows, stem.with_suffix(".csv"))
    title = f"CPU, {args.dtype}, H={args.hidden_size}, V={args.vocab_size:,}, K={args.top_k}, {date.today()}"
    written = [stem.with_suffix(".csv"), *(draw(rows, stem, title) if len(args.tokens) > 1 else [])]
    print("wrote", *written)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
