"""Measurements of training in a process of their own: a process remembers its peak memory."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback


def measure(script: str | Path, *arguments: str, threads: int) -> dict:
    """Runs `script` with `arguments` in a fresh process and returns the JSON of its last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{Path(script).name} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def reset_peak() -> None:
    """What came before (loading, imports) no longer counts as peak, where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak memory: allocated on the GPU, else resident in this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Clock(TrainerCallback):
    """Wall and processor seconds of every step, and the peak memory over all of them."""

    def __init__(self):
        self.times: list[tuple[float, float]] = []

    def _now(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append((time.perf_counter(), time.process_time()))

    def on_train_begin(self, args, state, control, **kwargs):
        reset_peak()
        self._now()

    def on_step_end(self, args, state, control, **kwargs):
        self._now()

    def summary(self, warmup: int = 1) -> dict:
        """Fastest and median step after `warmup` steps. Processor time suffers least from other programs."""
        steps = [
            (later[0] - earlier[0], later[1] - earlier[1])
            for earlier, later in zip(self.times, self.times[1:], strict=False)
        ][warmup:]
        wall, processor = zip(*steps, strict=True)
        return {
            "seconds": min(wall),
            "median_seconds": statistics.median(wall),
            "processor_seconds": min(processor),
            "peak_bytes": peak_bytes(),
            "steps": len(steps),
        }
