"""
What reading the cached teacher costs in a DataLoader, and what an epoch does to memory.

    python benchmarks/data_loading.py                  # a table, a CSV and a picture in benchmarks/results
    python benchmarks/data_loading.py --epoch_mib 0    # the times only

Times: microseconds of CPU a token that the teacher costs, for shuffled indices (in the process and with two workers)
and for streaming from Parquet with two workers; typed lists beside. `decode` is what the collator takes beyond the
same collator without a teacher, measured where it runs. `epoch` is the whole, over all processes: reading, decoding,
and moving the tensors out of the worker, less an epoch of the same rows without their teacher. CPU time holds on a
busy machine, where the clock does not.

Memory: what belongs to a fresh process alone while it reads a cache of `--epoch_mib` for an epoch, shuffled from a
mapped file (whose pages are the kernel's, which can drop them) and streaming from shards of 256 MiB, the size that
builds write.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, IterableDataset, disable_progress_bars, load_dataset, load_from_disk
from torch.utils.data import DataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_offline_distill import DataCollatorForOfflineDistillation
from trl_offline_distill.teacher_cache import TeacherManifest, TeacherTopK, encode_topk
from trl_offline_distill.teacher_cache.columns import FEATURES
from trl_offline_distill.teacher_cache.exporters import to_typed_columns


RESULTS = Path(__file__).parent / "results"
MIB = 2**20
VOCAB = 151_936
BATCH = 4
SHARD_MIB = 256


def make_rows(rows: int, length: int, top_k: int, layout: str, seed: int = 0) -> list[dict]:
    """Rows of random tokens with a random teacher at every position: the layout and the sizes of a real cache."""
    generator = np.random.default_rng(seed)
    manifest = TeacherManifest("random", "0" * 32, VOCAB, top_k, layout=layout).to_json()
    made = []
    for _ in range(rows):
        token_ids = np.sort(generator.integers(0, VOCAB - top_k, (length - 1, top_k)), axis=1) + np.arange(top_k)
        values = torch.from_numpy(generator.normal(0, 3, (length - 1, top_k + 1))).log_softmax(-1)
        blobs = encode_topk(
            TeacherTopK(torch.from_numpy(token_ids), values[:, 1:], values[:, 0]), vocab_size=VOCAB, layout=layout
        )
        ids = generator.integers(0, VOCAB, length).tolist()
        labels = [-100, *ids[1:]]
        made.append({"input_ids": ids, "labels": labels, "teacher_topk": [*blobs, b""], "teacher_manifest": manifest})
    return made


class TypedCollator(DataCollatorForLanguageModeling):
    """The same tensors from nested lists of numbers, as other software stores them."""

    def torch_call(self, examples: list[dict]) -> dict:
        batch = super().torch_call(examples)
        shape = batch["input_ids"].shape
        width = max(map(len, examples[0]["teacher_token_ids"]))
        batch["teacher_token_ids"] = torch.zeros(*shape, width, dtype=torch.int32)
        batch["teacher_logprobs"] = torch.full((*shape, width), -torch.inf)
        batch["teacher_log_tail"] = torch.zeros(shape)
        for row, example in enumerate(examples):
            filled = [token for token, ids in enumerate(example["teacher_token_ids"]) if ids]
            for name in ("teacher_token_ids", "teacher_logprobs", "teacher_log_tail"):
                batch[name][row, filled] = torch.tensor([example[name][token] for token in filled]).to(batch[name])
        return batch


@dataclass
class Timed:
    """Two collators on the same rows; the batch says by how much longer the first one took (CPU seconds)."""

    collator: DataCollatorForLanguageModeling
    plain: DataCollatorForLanguageModeling

    def __call__(self, examples: list[dict]) -> dict:
        start = time.thread_time()
        batch = self.collator(examples)
        middle = time.thread_time()
        self.plain(examples)
        extra = 2 * middle - start - time.thread_time()
        return {"input_ids": batch["input_ids"], "extra_seconds": torch.tensor(extra, dtype=torch.float64)}


def cpu_seconds() -> float:
    """User and system time of this process and of the ended ones it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def read_epoch(source: Dataset | IterableDataset, collator, workers: int) -> tuple[float, float, int]:
    """CPU seconds of an epoch, of its collator beyond a plain one where that was measured, and tokens."""
    shuffle = None if isinstance(source, IterableDataset) else True
    loader = DataLoader(source, batch_size=BATCH, shuffle=shuffle, num_workers=workers, collate_fn=collator)
    cpu, extra, tokens = cpu_seconds(), 0.0, 0
    for batch in loader:
        tokens += batch["input_ids"].numel()
        extra += float(batch.get("extra_seconds", 0.0))
    return cpu_seconds() - cpu, extra, tokens


@dataclass
class Timing:
    """Microseconds of CPU a token that the teacher adds: in the collator, and to the whole epoch."""

    storage: str
    reading: str
    decode_us: float
    epoch_us: float


def time_storage(name: str, folder: Path, collator, columns: list[str], repeats: int) -> list[Timing]:
    """Times of one stored form, each against the same rows read without their teacher. The best of `repeats`."""
    mapped = load_from_disk(str(folder / name))
    plain = DataCollatorForLanguageModeling(pad_token_id=0)

    def streamed(kept: list[str]) -> IterableDataset:
        files = str(folder / f"{name}-*.parquet")
        return load_dataset("parquet", data_files=files, split="train", streaming=True, columns=kept)

    found = []
    for reading, workers, make in (
        ("shuffled, in the process", 0, mapped.select_columns),
        ("shuffled, 2 workers", 2, mapped.select_columns),
        ("streaming, 2 workers", 2, streamed),
    ):
        decode, epoch = [], []
        for _ in range(repeats):
            taught = make(["input_ids", "labels", *columns])
            with_teacher, _, tokens = read_epoch(taught, collator, workers)
            without, _, _ = read_epoch(make(["input_ids", "labels"]), plain, workers)
            _, extra, _ = read_epoch(taught, Timed(collator, plain), workers)
            epoch.append(1e6 * (with_teacher - without) / tokens)
            decode.append(1e6 * extra / tokens)
        found.append(Timing(name, reading, min(decode), min(epoch)))
    return found


def write_forms(folder: Path, rows: int, length: int, top_k: int) -> list[tuple[str, object, list[str]]]:
    """The layouts, and the default as typed lists, as an Arrow folder and two Parquet files each."""
    collator = DataCollatorForOfflineDistillation(pad_token_id=0)
    forms = []
    for layout in ("default", "compact", "min_mass"):
        dataset = Dataset.from_list(make_rows(rows, length, top_k, layout), features=FEATURES)
        write(dataset, folder, layout)
        forms.append((layout, collator, ["teacher_topk"]))
    typed = to_typed_columns(load_from_disk(str(folder / "default")))
    write(typed, folder, "typed lists")
    columns = ["teacher_token_ids", "teacher_logprobs", "teacher_log_tail"]
    return [*forms, ("typed lists", TypedCollator(pad_token_id=0), columns)]


def write(dataset: Dataset, folder: Path, name: str) -> None:
    dataset.save_to_disk(str(folder / name))
    for part in range(2):
        dataset.shard(2, part).to_parquet(folder / f"{name}-{part}.parquet", batch_size=8)


# Memory


def anonymous_mib() -> float:
    """MiB that belong to this process alone, without the pages of mapped files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def memory_of_an_epoch(args: argparse.Namespace) -> dict:
    """Runs in a fresh process: writes a cache of `--epoch_mib` in pieces and reads it once."""
    torch.set_num_threads(1)
    start, folder = anonymous_mib(), Path(args.memory_in)
    rows = max(1, args.epoch_mib * MIB // (args.length * 437))
    piece = make_rows(8, args.length, args.top_k, "default")

    def generate():
        for index in range(rows):
            yield {**piece[index % 8], "input_ids": [index, *piece[index % 8]["input_ids"][1:]]}

    dataset = Dataset.from_generator(generate, features=FEATURES, cache_dir=str(folder), writer_batch_size=16)
    if args.memory_mode == "streaming":
        parts = max(2, args.epoch_mib // SHARD_MIB)
        for part in range(parts):
            dataset.shard(parts, part).to_parquet(folder / f"cache-{part}.parquet", batch_size=16)
        source = load_dataset("parquet", data_files=str(folder / "*.parquet"), split="train", streaming=True)
    else:
        source = dataset
    cached = dataset.data.nbytes / MIB
    shuffle = None if args.memory_mode == "streaming" else True
    collator = DataCollatorForOfflineDistillation(pad_token_id=0)
    loader = DataLoader(source, batch_size=BATCH, shuffle=shuffle, collate_fn=collator)
    curve, seen = [], 0
    every = max(1, rows // BATCH // 50)
    for number, batch in enumerate(loader):
        seen += len(batch["input_ids"])
        if number % every == 0:
            curve.append((seen / rows, anonymous_mib()))
    if seen != rows:
        raise RuntimeError(f"read {seen} rows of {rows}")
    return {"mode": args.memory_mode, "cache_mib": cached, "imports_mib": start, "curve": curve}


def memory_in_a_fresh_process(args: argparse.Namespace, mode: str) -> dict:
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        command = [sys.executable, __file__, "--memory_in", folder, "--memory_mode", mode]
        for name in ("epoch_mib", "length", "top_k"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HOME": folder}
        )
    return json.loads(done.stdout.splitlines()[-1])


def growth(result: dict) -> float:
    """MiB by which the second half of the epoch rises above the first, by the largest of each."""
    half = len(result["curve"]) // 2
    return max(mib for _, mib in result["curve"][half:]) - max(mib for _, mib in result["curve"][1:half])


def draw(timings: list[Timing], memory: list[dict], path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, *rest = figure.subplots(1, 2 if memory else 1, squeeze=False)[0]
    storages = list(dict.fromkeys(timing.storage for timing in timings))
    readings = list(dict.fromkeys(timing.reading for timing in timings))
    for number, reading in enumerate(readings):
        found = {timing.storage: timing.decode_us for timing in timings if timing.reading == reading}
        drawn = bars.bar(
            np.arange(len(storages)) + 0.27 * (number - 1), [found[name] for name in storages], 0.25, label=reading
        )
        bars.bar_label(drawn, fmt="%.2f", fontsize=7)
    bars.axhline(1, color="black", linewidth=1, linestyle="--")
    bars.set(yscale="log", ylabel="CPU microseconds a token to decode")
    bars.set_xticks(range(len(storages)), storages)
    bars.legend(fontsize="small")
    for lines in rest:
        for result in memory:
            where, mib = zip(*result["curve"])
            lines.plot(where, mib, label=f"{result['mode']}: cache of {result['cache_mib']:,.0f} MiB")
        lines.axhline(memory[0]["imports_mib"], color="black", linewidth=1, linestyle="--", label="imports alone")
        lines.legend(fontsize="small")
        lines.set(xlabel="part of the epoch", ylabel="MiB of the process", ylim=(0, None))
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=256, help="few rows measure the start of the workers")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--epoch_mib", type=int, default=3072, help="size of the cache of the memory run; 0 leaves it out"
    )
    parser.add_argument("--scratch", help="folder for the data; default: the system's temporary folder")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--memory_in", help=argparse.SUPPRESS)
    parser.add_argument("--memory_mode", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    disable_progress_bars()
    if args.memory_in:
        print(json.dumps(memory_of_an_epoch(args)))
        return 0
    torch.set_num_threads(1)
    timings = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for name, collator, columns in write_forms(Path(folder), args.rows, args.length, args.top_k):
            timings += time_storage(
                name, Path(folder), collator, columns, 1 if name == "typed lists" else args.repeats
            )
    memory = [memory_in_a_fresh_process(args, mode) for mode in ("shuffled", "streaming")] if args.epoch_mib else []

    title = f"{args.rows * args.length:,} tokens, K={args.top_k}, V={VOCAB:,}, batches of {BATCH}, {date.today()}"
    lines = [title, f"{'stored as':16}{'read':28}{'decode us/token':>17}{'epoch us/token':>16}"]
    lines += [f"{t.storage:16}{t.reading:28}{t.decode_us:17.3f}{t.epoch_us:16.3f}" for t in timings]
    for result in memory:
        peak = max(mib for _, mib in result["curve"])
        lines.append(
            f"{result['mode']}: cache {result['cache_mib']:,.0f} MiB, imports {result['imports_mib']:,.0f} MiB, "
            f"peak {peak:,.0f} MiB, second half of the epoch {growth(result):+.1f} MiB"
        )
    print("\n".join(lines))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "data_loading.txt").write_text("\n".join(lines) + "\n")
    with (args.output_dir / "data_loading.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Timing)])
        writer.writeheader()
        writer.writerows(asdict(timing) for timing in timings)
    draw(timings, memory, args.output_dir / "data_loading.png", title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
