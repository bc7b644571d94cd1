"""
Everything about the loss that needs a GPU, in one call of less than eight minutes: parity of the Triton kernels on
real shapes, their bandwidth, the loss beside its peers from 1K to 256K tokens, and what the dtype of the logits costs.

    python benchmarks/gpu.py --output_dir benchmarks/results
    python benchmarks/gpu.py --dry --output_dir /tmp/dry     # the same code on small shapes, on CPU

Every row is printed when it is known, and all files are written again after each part, so an interrupted run keeps
what it had. Memory is `torch.cuda.max_memory_allocated`, which does not depend on what ran before in the process.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any


if "--dry" in sys.argv:
    # Read when Triton's kernels are defined
    os.environ["TRITON_INTERPRET"] = "1"
# Methods of very different sizes take turns, which would leave holes between fixed segments
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from loss import (
    DTYPES,
    HEADER,
    TOLERANCE,
    UNIT_ROWS,
    Clock,
    Row,
    check,
    draw,
    make_problem,
    methods,
    relative_error,
    time_in_turns,
    write_csv,
)

from trl_offline_distill import TeacherTopK, fused_distillation_loss
from trl_offline_distill.loss import fused_triton
from trl_offline_distill.loss.fused import TorchKernels, auto_chunk_size, marker
from trl_offline_distill.loss.fused_triton import TritonKernels
from trl_offline_distill.loss.logit_transform import LogitTransform


CASES = Path(__file__).parents[1] / "tests" / "loss" / "triton_cases.py"
GIB = 2**30
K = 2**10


@dataclass
class Plan:
    """Shapes of a run."""

    device: str
    top_k: int
    shapes: list[tuple[int, int, list[int]]]  # hidden size, vocabulary, tokens; the last is the one with targets
    slow_compilers_at: set[int]  # tokens at which methods that torch.compile are worth their compilation
    parity: list[tuple[int, int, int]]  # tokens, hidden size, vocabulary
    beyond_32_bits: tuple[int, int]  # rows and columns of a tile
    bandwidth: tuple[int, int]
    launches: list[tuple[int, int]]  # block, warps
    errors: tuple[int, int, int]
    chunks: list[int]
    repeats: int
    pytest: list[str]


H200 = Plan(
    device="cuda",
    top_k=100,
    shapes=[
        (1024, 151_936, [8 * K, 32 * K]),
        (2880, 201_088, [8 * K, 32 * K]),
        (4096, 131_072, [K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K]),
    ],
    slow_compilers_at={4 * K, 32 * K},
    parity=[(512, 4096, 131_072), (512, 1024, 151_936), (300, 768, 50_257), (1, 1024, 151_936)],
    beyond_32_bits=(16_400, 151_936),
    bandwidth=(4096, 131_072),
    launches=[(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16_384, 16)],
    errors=(512, 4096, 131_072),
    chunks=[1, 16, 256],
    repeats=5,
    pytest=["-n", "8"],
)
DRY = Plan(
    device="cpu",
    top_k=8,
    shapes=[(8, 500, [8]), (16, 300, [8, 16])],
    slow_compilers_at=set(),
    parity=[(2, 16, 300)],
    beyond_32_bits=(3, 64),
    bandwidth=(2, 600),
    launches=[(512, 4)],
    errors=(8, 16, 300),
    chunks=[1, 4],
    repeats=2,
    pytest=["--collect-only"],
)


@dataclass
class Report:
    """What is known so far, and where it is written."""

    stem: Path
    plan: Plan
    until: float
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def left(self) -> float:
        return self.until - time.monotonic()

    def write(self, pictures: bool = False) -> None:
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        self.stem.with_suffix(".json").write_text(json.dumps(self.facts, indent=1) + "\n")
        if self.rows:
            write_csv(self.rows, self.stem.with_suffix(".csv"))
        if self.rows and pictures:
            hidden_size, vocab_size, _ = self.plan.shapes[-1]
            drawn = [row for row in self.rows if row.hidden_size == hidden_size]
            draw(drawn, self.stem, f"{self.facts['device']}, bf16, H={hidden_size}, V={vocab_size:,}, {date.today()}")


def say(*words: object) -> None:
    print(*words, flush=True)


def environment(device: str) -> dict[str, Any]:
    facts = {"date": date.today().isoformat(), "torch": torch.__version__, "python": sys.version.split()[0]}
    facts["triton"] = getattr(fused_triton.triton, "__version__", None)
    if device != "cuda":
        return facts | {"device": "dry run on CPU", "memory_gib": None}
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def run_parity_tests(report: Report) -> None:
    """The cases that the interpreter runs on CPU, compiled."""
    if not CASES.exists():
        report.facts["parity_tests"] = "not run: the tests are not beside the benchmarks"
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *report.plan.pytest]
    environ = {**os.environ}
    if report.plan.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    done = subprocess.run([*command, str(CASES)], env=environ, cwd=CASES.parents[2], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    failures = [line for line in lines if re.match(r"(FAILED|ERROR)", line)]
    report.facts["parity_tests"] = {"exit": done.returncode, "summary": lines[-1], "failures": failures[:20]}
    say("\n".join([lines[-1], *failures[:20]]))


def with_tail_at(teacher: TeacherTopK, temperature: float) -> TeacherTopK:
    """A plausible tail normaliser at a temperature: that of a flat tail."""
    outside = teacher.vocab_size - teacher.top_k
    at = teacher.log_tail / temperature + (1 - 1 / temperature) * torch.tensor(float(outside)).log()
    return TeacherTopK(
        teacher.token_ids, teacher.logprobs, teacher.log_tail, at[:, None], (temperature,), teacher.vocab_size
    )


def loss_and_gradients(problem, dtype: torch.dtype, **options) -> list[torch.Tensor]:
    hidden = problem.hidden.detach().to(dtype).requires_grad_()
    weight = problem.weight.detach().to(dtype).requires_grad_()
    loss = fused_distillation_loss(hidden, weight, problem.teacher, problem.labels, ce_weight=0.5, **options).loss
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]


def parity(report: Report) -> None:
    """Triton on real shapes against the dense twin in fp64, beside the dense twin in the same dtype."""
    found = report.facts["parity"] = []
    settings = {
        "plain": {},
        "softcap, T=2": {"logit_scale": 0.8, "final_logit_softcapping": 30.0, "temperature": 2.0},
    }
    for n, hidden_size, vocab_size in report.plan.parity:
        problem = make_problem(n, hidden_size, vocab_size, report.plan.top_k, torch.float32, report.plan.device)
        problem.teacher = with_tail_at(problem.teacher, 2.0)
        for name, options in settings.items():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                # What all of them read is what that dtype can hold
                problem.hidden, problem.weight = problem.hidden.to(dtype), problem.weight.to(dtype)
                exact = loss_and_gradients(problem, torch.float64, backend="reference", **options)
                errors = {}
                for backend in ("triton", "torch", "reference"):
                    values = loss_and_gradients(problem, dtype, backend=backend, **options)
                    errors[backend] = [relative_error(a, b) for a, b in zip(values, exact, strict=True)]
                margin = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
                good = all(a <= 2 * b + margin for a, b in zip(errors["triton"], errors["reference"], strict=True))
                found.append(
                    {"shape": [n, hidden_size, vocab_size], "dtype": str(dtype)[6:], "head": name, "pass": good}
                    | {f"error_{backend}": values for backend, values in errors.items()}
                )
                say(
                    f"{'pass' if good else 'FAIL'}  N={n} H={hidden_size} V={vocab_size} {dtype} {name}:",
                    *(f"{backend} " + " ".join(f"{e:.1e}" for e in errors[backend]) for backend in errors),
                )
                del exact, values
        del problem


def beyond_32_bits(report: Report) -> None:
    """A tile of more than 2^31 entries: its last rows must be reduced and overwritten like any others."""
    n, vocab_size = report.plan.beyond_32_bits
    generator = torch.Generator(report.plan.device).manual_seed(0)
    tile = torch.empty(n, vocab_size, dtype=torch.bfloat16, device=report.plan.device)
    tile.normal_(generator=generator)
    tile[:, 7] = marker(tile.dtype)
    last = tile[-2:].clone()
    one = torch.ones(n, device=tile.device)
    stats = TritonKernels().reduce_tail(tile, LogitTransform(), 1.0)
    TritonKernels().write_tail_gradient(tile, LogitTransform(), 1.0, one, 0 * one, stats)
    expected = TorchKernels().reduce_tail(last, LogitTransform(), 1.0)
    TorchKernels().write_tail_gradient(last, LogitTransform(), 1.0, one[-2:], 0 * one[-2:], expected)
    difference = (tile[-2:].float() - last.float()).abs().max() / last.float().abs().max()
    good = bool(torch.allclose(stats.lse[-2:], expected.lse, atol=1e-4) and difference < 1e-2)
    report.facts["beyond_32_bits"] = {"entries": n * vocab_size, "pass": good}
    say(f"{'pass' if good else 'FAIL'}  tile of {n * vocab_size:,} entries")


def bandwidth(report: Report) -> None:
    """Bytes a second of both passes over one tile, for a few ways to launch them, beside torch's."""
    n, vocab_size = report.plan.bandwidth
    clock = Clock(report.plan.device)
    found = report.facts["bandwidth"] = []
    coefficient = torch.full((n,), 1e-3, device=report.plan.device)
    default = (fused_triton.BLOCK, fused_triton.WARPS)
    kernels = [("triton", *launch) for launch in report.plan.launches] + [("torch", None, None)]
    try:
        for dtype in (torch.bfloat16, torch.float32):
            tile = torch.randn(n, vocab_size, device=report.plan.device).to(dtype)
            size = tile.numel() * tile.element_size()
            for name, block, warps in kernels:
                if name == "triton":
                    fused_triton.BLOCK, fused_triton.WARPS = block, warps
                kernel = TritonKernels() if name == "triton" else TorchKernels()
                for temperature in (1.0, 2.0) if (block, warps) in (default, (None, None)) else (1.0,):
                    stats = kernel.reduce_tail(tile, LogitTransform(), temperature)

                    def gradient(kernel=kernel, temperature=temperature, stats=stats, tile=tile):
                        kernel.write_tail_gradient(
                            tile, LogitTransform(), temperature, coefficient, coefficient, stats
                        )

                    def reduce(kernel=kernel, temperature=temperature, tile=tile):
                        kernel.reduce_tail(tile, LogitTransform(), temperature)

                    gradient()
                    times = [[clock(function) for _ in range(report.plan.repeats)] for function in (reduce, gradient)]
                    reading, writing = (sorted(values)[len(values) // 2] for values in times)
                    found.append(
                        {"kernel": name, "block": block, "warps": warps, "dtype": str(dtype)[6:]}
                        | {"temperature": temperature, "default": (block, warps) == default}
                        | {"reduce_gb_s": round(size / reading / 1e9, 3), "reduce_ms": reading * 1e3}
                        | {"gradient_gb_s": round(2 * size / writing / 1e9, 3), "gradient_ms": writing * 1e3}
                    )
                    say(
                        f"{name:<7}{block!s:>6}{warps!s:>5} {str(dtype)[6:]:<9}T={temperature:.0f}"
                        f"  reduce {found[-1]['reduce_gb_s']:>8} GB/s  gradient {found[-1]['gradient_gb_s']:>8} GB/s"
                    )
            del tile
    finally:
        fused_triton.BLOCK, fused_triton.WARPS = default


def peak_gib(function) -> float | None:
    """Most bytes that the step holds beyond what is there before it."""
    if not torch.cuda.is_available():
        function()
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def first_line(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0][:120]}"


# What a peer that its own dependencies, Triton or this GPU break may raise: a row of the table, not the end of it
BROKEN = (RuntimeError, ImportError, AttributeError, TypeError, ValueError, AssertionError)
if fused_triton.triton is not None:
    BROKEN += (fused_triton.triton.TritonError,)


def measure_shape(report: Report, hidden_size: int, vocab_size: int, n: int, errors: dict[str, float | str]) -> None:
    plan, dtype = report.plan, torch.bfloat16
    known = methods(plan.device)
    problem = make_problem(n, hidden_size, vocab_size, plan.top_k, dtype, plan.device, dense="head")
    # The dense teacher's logits stay beside everything else, so they may not crowd it out
    target = n * vocab_size * dtype.itemsize
    room = report.facts["memory_gib"]
    has_target = room is None or target < 0.15 * room * GIB
    if has_target:
        problem.teacher_logits = torch.randn(n, vocab_size, dtype=dtype, device=plan.device)
    rows, chosen = [], {}
    # What the timing needs beside them
    product = torch.empty(min(n, UNIT_ROWS), vocab_size, dtype=dtype, device=plan.device)
    reserved = 0.0
    for name, method in known.items():
        row = Row(name, method.label, n, hidden_size, vocab_size, plan.top_k, "bf16", method.units)
        row.device = report.facts["device"]
        rows.append(row)
        slow = method.compiled and not method.cuda_only
        if isinstance(errors[name], str):
            row.note = errors[name]
        elif slow and n not in plan.slow_compilers_at:
            row.note = "compiles anew at each size, and is measured at some only"
        elif method.dense == "logits" and not has_target:
            row.note = f"its teacher's logits alone take {target / GIB:.0f} GiB"
        elif report.left() < reserved:
            row.note = "time was up"
        else:
            row.error = errors[name]
            try:
                method.step(problem)
                problem.hidden.grad = problem.weight.grad = None
                began = time.monotonic()
                peak = peak_gib(lambda method=method: method.step(problem))
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            except torch.OutOfMemoryError:
                row.note = "out of memory"
            except BROKEN as failure:
                row.note = first_line(failure)
            else:
                row.peak_mib = None if peak is None else peak * 1024
                rounds = (plan.repeats + method.compiled) * (time.monotonic() - began) * (1 + 1 / method.units)
                if report.left() < reserved + rounds:
                    row.note = "time was up"
                else:
                    reserved += rounds
                    chosen[name] = method
            problem.hidden.grad = problem.weight.grad = None
    del product
    seconds, units = time_in_turns(chosen, problem, plan.repeats, Clock(plan.device))
    for row in rows:
        if row.method in chosen:
            row.fill(seconds[row.method], units[row.method])
        say(row.line())
    report.rows += rows


def measure(report: Report) -> None:
    """The loss beside its peers, smallest sizes first."""
    known = methods(report.plan.device)
    errors: dict[str, float | str] = {}
    for name, method in known.items():
        reason = method.why_not(report.plan.device)
        if reason is None and method.compiled and not method.cuda_only and not report.plan.slow_compilers_at:
            reason = "compiles, which a dry run leaves out"
        if reason is None:
            try:
                error = check(method, torch.bfloat16, report.plan.device)
                reason = None if error < TOLERANCE[torch.bfloat16] else f"its loss or a gradient is off by {error:.1e}"
            except BROKEN as failure:
                reason = first_line(failure)
        errors[name] = error if reason is None else reason
    for hidden_size, vocab_size, tokens in report.plan.shapes:
        say(f"\nH={hidden_size} V={vocab_size} K={report.plan.top_k} bf16\n{HEADER}")
        for n in tokens:
            measure_shape(report, hidden_size, vocab_size, n, errors)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            report.write()


def logits_dtype(report: Report) -> None:
    """Relative error of loss and gradients against fp64, for bf16 inputs: the dense twin, and what the tile holds."""
    n, hidden_size, vocab_size = report.plan.errors
    problem = make_problem(n, hidden_size, vocab_size, report.plan.top_k, torch.bfloat16, report.plan.device)
    exact = loss_and_gradients(problem, torch.float64, backend="reference")
    backend = "triton" if report.plan.device == "cuda" else "torch"
    ways = {"dense twin, bf16": {"backend": "reference"}}
    for chunks in report.plan.chunks:
        for dtype in ("bf16", "fp32"):
            ways[f"{backend}, {dtype} logits, {chunks} chunks"] = {
                "backend": backend,
                "chunk_size": max(n // chunks, 1),
                "logits_dtype": None if dtype == "bf16" else DTYPES[dtype],
            }
    found = report.facts["logits_dtype"] = {}
    for name, options in ways.items():
        values = loss_and_gradients(problem, torch.bfloat16, **options)
        found[name] = [relative_error(a, b) for a, b in zip(values, exact, strict=True)]
        say(f"{name:<36}" + " ".join(f"{what} {e:.2e}  " for what, e in zip(("loss", "dH", "dW"), found[name])))


def targets(report: Report) -> None:
    """What was aimed at before a GPU was at hand, beside what was measured."""
    hidden_size, vocab_size, tokens = report.plan.shapes[-1]
    at = {(row.method, row.tokens): row for row in report.rows if row.hidden_size == hidden_size and row.units}
    ours = {n: at["in_forward", n] for n in tokens if ("in_forward", n) in at}
    if not ours:
        return
    found = report.facts["targets"] = []

    def compare(what: str, measured: float, limit: float, at_most: bool) -> None:
        good = measured <= limit if at_most else measured >= limit
        found.append({"what": what, "measured": measured, "target": limit, "pass": good})
        bound = f"at {'most' if at_most else 'least'} {limit:g}"
        say(f"{'met   ' if good else 'MISSED'}  {measured:9.3f}  {bound}  {what}")

    work = {n: 6 * n * hidden_size * vocab_size / row.seconds / 1e12 for n, row in ours.items()}
    compare("TFLOP/s of 3-unit work, best size", max(work.values()), 600, at_most=False)
    chunk = auto_chunk_size(vocab_size, 2, report.plan.device) * vocab_size * 2
    for n, row in ours.items():
        if row.peak_mib is not None:
            held = row.peak_mib / 1024 + n * hidden_size * 2 / GIB
            limit = (n * 4 * hidden_size + vocab_size * hidden_size * 4 + chunk) / GIB
            compare(f"GiB at {n} tokens, hidden states included, fp32 head gradient", held, limit, at_most=True)
            for size, gib in ((32 * K, 3.0), (256 * K, 6.5)):
                if n == size:
                    compare(f"GiB at {n} tokens", held, gib, at_most=True)
        if ("forward_chunked", n) in at:
            ratio = row.seconds / at["forward_chunked", n].seconds
            compare(f"time against forward-chunked at {n} tokens", ratio, 1.0, at_most=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0, help="after these, no new measurement begins")
    parser.add_argument("--dry", action="store_true", help="small shapes on CPU, Triton interpreted")
    args = parser.parse_args(argv)
    plan = DRY if args.dry else H200
    if plan.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible: run this on a GPU, or pass --dry")
    started = time.monotonic()
    facts = environment(plan.device)
    name = re.sub(r"\W+", "_", facts["device"]).strip("_").lower()
    report = Report(args.output_dir / f"loss_{name}", plan, started + 60 * args.minutes, facts)
    say(facts)
    for part in (run_parity_tests, parity, beyond_32_bits, bandwidth, measure, logits_dtype, targets):
        say(f"\n{part.__name__}, after {time.monotonic() - started:.0f} s")
        part(report)
        report.facts["seconds"] = round(time.monotonic() - started, 1)
        report.write(pictures=part is measure)
    say(f"\nwrote {report.stem}.* after {time.monotonic() - started:.0f} s")
    parts = [report.facts["beyond_32_bits"], *report.facts["parity"]]
    tests = report.facts["parity_tests"]
    return int(not all(part["pass"] for part in parts) or (isinstance(tests, dict) and tests["exit"] != 0))


if __name__ == "__main__":
    sys.exit(main())
