"""The benchmarks of the loss run, check what they time, and write what they say they write."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the benchmarks are not beside the tests")


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("loss_benchmark", BENCHMARKS / "loss.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_method_computes_what_it_says(bench):
    ran = []
    for name, method in bench.methods("cpu").items():
        # What compiles takes a minute, and is checked by the benchmark itself
        if method.why_not("cpu") is None and not method.compiled:
            assert bench.check(method, torch.float32, "cpu") < bench.TOLERANCE[torch.float32]
            ran.append(name)
    assert ran[:4] == ["in_forward", "frozen", "recompute", "evaluation"]
    assert {"dense", "forward_chunked", "paper"} <= {*ran}


def test_a_wrong_method_is_found_out(bench):
    method = bench.methods("cpu")["paper"]
    assert bench.check(replace(method, definition=bench.bucket), torch.float32, "cpu") > 1e-2
    half = replace(method, run=lambda problem: bench.paper(problem) + 1e-3 * problem.weight.square().sum())
    assert bench.check(half, torch.float32, "cpu") > bench.TOLERANCE[torch.float32]


def test_the_table(bench, tmp_path, capsys):
    arguments = ["--tokens", "8", "16", "--hidden_size", "16", "--vocab_size", "300", "--top_k", "5"]
    arguments += ["--repeats", "2", "--no_memory"]
    chosen = ["--methods", "in_forward", "frozen", "recompute", "evaluation", "dense", "paper", "liger_kl_triton"]
    bench.main([*arguments, *chosen, "--output_dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert "at most 1.10  trained head, in_forward, of 3 units" in out
    assert "at most 0.65  time against the paper's" in out
    with (tmp_path / "loss_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["tokens"]) for row in rows][::7] == [("in_forward", "8"), ("in_forward", "16")]
    assert all(float(row["units"]) > 0 for row in rows if row["method"] != "liger_kl_triton")
    assert {row["note"] for row in rows if row["method"] == "liger_kl_triton"} <= {
        "Triton kernels, CUDA only",
        "liger_kernel is not installed",
    }
    assert (tmp_path / "loss_cpu_time.png").stat().st_size > 10_000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_memory_is_what_a_step_holds(bench):
    shape = {"hidden_size": 64, "vocab_size": 16_384, "top_k": 8}
    dense = bench.memory_of(bench.methods("cpu")["dense"], [512], shape, torch.float32)[0]
    # Student and teacher log-probabilities and the logits' gradient exist at once, 32 MiB each
    assert 90 < dense < 250
    ours = bench.memory_of(bench.methods("cpu")["evaluation"], [4], shape, torch.float32)[0]
    assert ours < 20


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is not installed")
def test_the_gpu_script_runs_dry(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry", "--output_dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads((tmp_path / "loss_dry_run_on_cpu.json").read_text())
    assert facts["parity_tests"]["exit"] == 0
    assert len(facts["parity"]) == 6
    assert all(part["pass"] for part in [*facts["parity"], facts["beyond_32_bits"]])
    assert {entry["kernel"] for entry in facts["bandwidth"]} == {"triton", "torch"}
    assert {"dense twin, bf16", "torch, fp32 logits, 4 chunks"} <= facts["logits_dtype"].keys()
    assert facts["targets"]
    with (tmp_path / "loss_dry_run_on_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["tokens"] for row in rows} == {"8", "16"}
    assert all(row["units"] or row["note"] for row in rows)
    assert (tmp_path / "loss_dry_run_on_cpu_time.png").exists()
