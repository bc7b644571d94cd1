"""
What capturing a teacher costs: `build_distillation_dataset` against the teacher's plain forward with full logits.

    python benchmarks/capture.py                       # a table and benchmarks/results/capture.{md,json,png}
    python benchmarks/capture.py --model ORG/NAME      # a real teacher instead of random weights, which cost the same

All score the same rows in the same batches. The plain forward computes `model(...).logits` and throws them away. The
capture is what a build does to every row: backbone, head in chunks, top-K and tail, blobs. The whole build adds what
it does once: the weights' fingerprint, the check of the head, the tokenizer's fingerprint, Parquet on disk. Times: in
turn in one process, the fastest of some rounds. Memory: each in a fresh process, above the loaded model.
"""

import argparse
import json
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from fresh_process import measure, peak_bytes, reset_peak
from step import model_of, tokenizer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_offline_distill import build_distillation_dataset, encode_topk
from trl_offline_distill.capture.engine import ScoreRequest, TokenRow
from trl_offline_distill.capture.transformers_engine import TransformersTeacher


RESULTS = Path(__file__).parent / "results"
TIME_BAR, MEMORY_BAR = 1.10, 1.00
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model id or path; default: random weights in the shape of SmolLM2-135M")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--batch_tokens", type=int, default=2048 if DEVICE == "cpu" else 8192)
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--child", choices=("time", "plain", "build"), help=argparse.SUPPRESS)
    return parser.parse_args()


def load(args: argparse.Namespace):
    """Model and tokenizer; bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if args.model is None:
        model, tokenizer = model_of(30, seed=0), tokenizer_of()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    return model.to(DEVICE, dtype).eval(), tokenizer


def rows_of(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab_size, (args.rows, args.length), generator=generator).tolist()


def plain(model, rows: list[list[int]], args: argparse.Namespace) -> None:
    """The teacher's own forward over the batches that the capture makes."""
    size = max(1, args.batch_tokens // args.length)
    for start in range(0, len(rows), size):
        input_ids = torch.tensor(rows[start : start + size], device=DEVICE)
        with torch.no_grad():
            model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def build(model, tokenizer, rows: list[list[int]], args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build_distillation_dataset(
            Dataset.from_dict({"input_ids": rows}),
            model,
            tokenizer,
            top_k=args.top_k,
            batch_tokens=args.batch_tokens,
            output_dir=folder,
            progress=False,
        )


def capture(engine: TransformersTeacher, vocab_size: int, rows: list[list[int]], args: argparse.Namespace) -> None:
    """What a build does to each row once the teacher is loaded: score it and turn the signal into blobs."""
    token_rows = [TokenRow(ids, range(len(ids) - 1), number) for number, ids in enumerate(rows)]
    request = ScoreRequest(top_k=args.top_k, token_mask_size=vocab_size)
    for _, signal in engine.score(token_rows, request):
        encode_topk(signal, vocab_size=vocab_size)


def child(args: argparse.Namespace) -> dict:
    torch.set_num_threads(args.threads)
    disable_progress_bars()
    model, tokenizer = load(args)
    rows = rows_of(args, min(len(tokenizer), model.config.get_text_config().vocab_size))
    variants = {"plain": lambda: plain(model, rows, args), "build": lambda: build(model, tokenizer, rows, args)}
    if args.child != "time":
        # Imports and first-use buffers do not count: a short run comes first.
        short = argparse.Namespace(**{**vars(args), "rows": 1})
        plain(model, rows[:1], short)
        build(model, tokenizer, rows[:1], short)
        reset_peak()
        before = peak_bytes()
        variants[args.child]()
        return {"peak_bytes": peak_bytes() - before}
    engine = TransformersTeacher(model, batch_tokens=args.batch_tokens)
    engine.load()
    vocab_size = len(tokenizer)
    variants["capture"] = lambda: capture(engine, vocab_size, rows, args)
    wall: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for _ in range(args.rounds):
        for name, run in variants.items():
            start, start_processor = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - start_processor)
    return {
        "seconds": {name: min(times) for name, times in wall.items()},
        "processor_seconds": {name: min(times) for name, times in processor.items()},
    }


def main() -> None:
    args = parse()
    if args.child:
        print(json.dumps(child(args)))
        return
    passed = [f"--{name}={value}" for name, value in vars(args).items() if value is not None and name != "child"]
    times = measure(__file__, *passed, "--child=time", threads=args.threads)
    seconds, processor = times["seconds"], times["processor_seconds"]
    memory = {
        name: measure(__file__, *passed, f"--child={name}", threads=args.threads)["peak_bytes"]
        for name in ("plain", "build")
    }
    tokens = args.rows * args.length
    results = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {args.threads} threads",
        "model": args.model or "random weights, shape of SmolLM2-135M",
        "tokens": tokens,
        "length": args.length,
        "batch_tokens": args.batch_tokens,
        "top_k": args.top_k,
        "seconds": seconds,
        "processor_seconds": processor,
        "tokens_per_second": {name: tokens / value for name, value in seconds.items()},
        "peak_bytes": memory,
        "time_ratio": seconds["capture"] / seconds["plain"],
        "processor_time_ratio": processor["capture"] / processor["plain"],
        "memory_ratio": memory["build"] / max(memory["plain"], 1),
    }
    table = table_of(results)
    print(table)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "capture.json").write_text(json.dumps(results, indent=2) + "\n")
    (args.output_dir / "capture.md").write_text(table + "\n")
    draw(results, args.output_dir / "capture.png")


def table_of(results: dict) -> str:
    lines = [
        f"{results['date']}, {results['device']}: {results['model']}, {results['tokens']:,} tokens in rows of "
        f"{results['length']}, batches of {results['batch_tokens']}, top {results['top_k']}",
        "",
        "| | seconds | tokens/s | peak above the model |",
        "|---|---|---|---|",
    ]
    for name, title in (("plain", "forward with full logits"), ("capture", "capture"), ("build", "whole build")):
        peak = f"{results['peak_bytes'][name] / 2**20:.0f} MiB" if name in results["peak_bytes"] else ""
        lines.append(
            f"| {title} | {results['seconds'][name]:.2f} | {results['tokens_per_second'][name]:.0f} | {peak} |"
        )
    for name, bar in (("time", TIME_BAR), ("memory", MEMORY_BAR)):
        ratio = results[f"{name}_ratio"]
        lines.append(f"\n{name} ratio {ratio:.3f}, bar {bar:.2f}: {'met' if ratio <= bar else 'MISSED'}")
    lines.append(f"\nprocessor time ratio {results['processor_time_ratio']:.3f} (little disturbed by other programs)")
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), dpi=120, layout="constrained")
    for axes, key, ours, unit, scale in zip(
        figure.subplots(1, 2),
        ("tokens_per_second", "peak_bytes"),
        ("capture", "build"),
        ("tokens/s", "MiB above the model"),
        (1, 2**20),
    ):
        bars = axes.bar(["full logits", ours], [results[key][name] / scale for name in ("plain", ours)])
        axes.bar_label(bars, fmt="%.0f")
        axes.set_ylabel(unit)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Capture against the plain forward ({results['device']})")
    figure.savefig(path)


if __name__ == "__main__":
    main()
