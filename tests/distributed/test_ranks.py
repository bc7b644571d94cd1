"""
Two processes over gloo equal one process on the union of their batches, which hold 2 and 20, 5 and 0, and 9 and 3
trained tokens. A rank without trained tokens must not hang the other.
"""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_students import assert_same_parameters


SCRIPT = Path(__file__).with_name("ranks.py")
# What one and two processes count differently: time, memory, and transformers' estimate of the FLOPs of padding
UNCOMPARED = (
    "tokens_per_second",
    "data_wait",
    "peak_memory_gb",
    "total_flos",
    "runtime",
    "per_second",
    "preparation_time",
)
# Before torch 2.10 the norm that FSDP2 reports is that of one rank's shards; the parameters are compared all the same
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    UNCOMPARED += ("grad_norm",)
DDP = ("plain", "means of ranks", "accumulated", "streamed", "flattened", "adapter on the head", "tied", "positions")
SHARDED = ("plain", "accumulated", "tied", "recompute", "adapter", "evaluated in training")


def launch(group: str, world: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = SCRIPT.parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), group, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=420)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Results of each group and number of processes, run when first asked for, once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "ranks"
    folder.mkdir(exist_ok=True)

    def ask(group: str, world: int) -> dict:
        done, failed = folder / f"{group}-{world}.pt", folder / f"{group}-{world}.failed"
        with open(folder / f"{group}-{world}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists() and not failed.exists():
                try:
                    launch(group, world, folder)
                except (AssertionError, subprocess.TimeoutExpired) as error:  # not launched again by the next test
                    failed.write_text(str(error))
        assert not failed.exists(), failed.read_text()
        return torch.load(done, weights_only=False)

    ask.folder = folder
    return ask


def assert_same_logs(two: list[dict], one: list[dict]) -> None:
    assert len(two) == len(one)
    for ours, expected in zip(two, one, strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            if not any(part in name for part in UNCOMPARED):
                assert ours[name] == pytest.approx(value, abs=2e-5), name


@pytest.mark.parametrize("scenario", DDP)
def test_ddp(results, scenario):
    one, two = results("ddp", 1)[scenario], results("ddp", 2)[scenario]
    assert two["wrapper"] == "DistributedDataParallel"
    assert_same_parameters(two["parameters"], one["parameters"], atol=2e-6)
    assert_same_logs(two["log"], one["log"])


@pytest.mark.parametrize("scenario", SHARDED)
def test_fsdp2(results, scenario):
    one, two = results("fsdp2", 1)[scenario], results("fsdp2", 2)[scenario]
    assert two["wrapper"].startswith("FSDP")
    assert_same_parameters(two["parameters"], one["parameters"], atol=2e-6)
    assert_same_logs(two["log"], one["log"])


def assert_teacher_is_whole(mixed: dict, plain: dict) -> None:
    """Mixed precision rounds the student; what the teacher alone decides stays exact."""
    for ours, expected in zip(mixed["log"], plain["log"], strict=True):
        for name in ("captured_mass", "teacher_entropy"):
            if name in expected:
                assert ours[name] == pytest.approx(expected[name], abs=1e-6)
    first = mixed["log"][0]
    assert first["loss"] == pytest.approx(plain["log"][0]["loss"], abs=0.05)
    assert first["loss"] == pytest.approx(first["kd_loss"] + 0.5 * first["ce_loss"], rel=1e-6)  # and not in bf16 steps


def test_mixed_precision_does_not_round_the_teacher(results):
    assert_teacher_is_whole(results("fsdp2", 2)["bf16"], results("fsdp2", 1)["plain"])


def test_a_trained_head_that_fsdp_would_shard_is_refused(results):
    assert results("fsdp2", 1)["adapter on the head"]["error"] is None
    assert "which FSDP cuts" in results("fsdp2", 2)["adapter on the head"]["error"]


@pytest.mark.slow  # DeepSpeed compiles a library first, for minutes
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(results, stage):
    pytest.importorskip("deepspeed")
    one, two = results("fsdp2", 1), results(f"zero{stage}", 2)
    for scenario in SHARDED:
        assert two[scenario]["wrapper"] == "DeepSpeedEngine"
        assert_same_parameters(two[scenario]["parameters"], one[scenario]["parameters"], atol=2e-6)
        assert_same_logs(two[scenario]["log"], one[scenario]["log"])
    assert_same_parameters(two["interrupted"]["resumed"]["parameters"], two["interrupted"]["parameters"], atol=1e-6)
    assert_teacher_is_whole(two["bf16"], one["plain"])
    refusal = two["adapter on the head"]["error"]
    assert refusal is None if stage == 2 else "which ZeRO-3 cuts" in refusal


@pytest.mark.parametrize("group", ["ddp", "fsdp2"])
def test_resume_on_two_ranks(results, group):
    one, two = results(group, 1)["interrupted"], results(group, 2)["interrupted"]
    if two is None:
        pytest.skip("torch resumes on several CPU processes from 2.10 on")
    assert_same_parameters(two["parameters"], one["parameters"], atol=2e-6)
    assert_same_parameters(two["resumed"]["parameters"], two["parameters"], atol=0.0)
    assert two["resumed"]["log"][-1]["num_tokens"] == two["log"][-1]["num_tokens"]


@pytest.mark.parametrize(("scenario", "rows"), [("evaluated", 5), ("evaluated flat", 5), ("evaluated packed", 3)])
def test_evaluation_counts_every_row_once(results, scenario, rows):
    assert results("ddp", 2)[scenario]["rows"] == rows  # which two ranks share unequally
    assert_same_logs([results("ddp", 2)[scenario]["metrics"]], [results("ddp", 1)[scenario]["metrics"]])


def test_every_rank_stops_for_a_row_that_one_of_them_found(results):
    expected = results("ddp", 1)["damaged"]["error"]
    assert "Row 5 of the train dataset" in expected
    assert results("ddp", 2)["damaged"]["error"] == expected
    assert torch.load(results.folder / "damaged-1.pt")["error"] == expected
