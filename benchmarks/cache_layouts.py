"""
What each layout of the teacher cache costs and what it loses, on a real teacher over real text.

    python benchmarks/cache_layouts.py                      # SmolLM2-135M over public-domain speeches
    python benchmarks/cache_layouts.py --model ORG/NAME --text_file book.txt

A table, a CSV and a picture in benchmarks/results. The student is the teacher without two of its layers, so it is
near. Bytes: the teacher column alone, in Arrow memory and in a zstd Parquet file, a token. Value error: KL between the
exact K+1 outcomes and the stored ones, in nats. Angles: between the gradient that a layout's forward KL gives and the
one of the full distribution, for the logits of one token (mean) and for the head's weight over all tokens, where what
is unbiased averages out. Times: one thread, best of several.
"""

import argparse
import csv
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import date
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_offline_distill.demo import load_smollm2, load_texts
from trl_offline_distill.healing import drop_layers
from trl_offline_distill.teacher_cache import TeacherTopK, decode_topk, encode_topk, select_support


RESULTS = Path(__file__).parent / "results"
CHUNK = 256
TAILS = ("bucket", "none", "renormalize")


@dataclass
class Row:
    """One line of the table."""

    name: str
    arrow_bytes: float = math.nan
    parquet_bytes: float = math.nan
    entries: float = math.nan
    value_error: float = math.nan
    worst_value_error: float = math.nan
    token_angle: float = math.nan
    head_angle: float = math.nan
    encode_us: float = math.nan
    decode_us: float = math.nan


@dataclass
class Case:
    """A way to store the teacher, and what is gathered over the text."""

    name: str
    layout: str | None
    top_k: int
    tail: str = "bucket"
    blobs: list[bytes] = field(default_factory=list)
    entries: int = 0
    value_errors: list[Tensor] = field(default_factory=list)
    angles: list[Tensor] = field(default_factory=list)
    head_gradient: Tensor | None = None


def read_tokens(tokenizer, texts: list[str], rows: int, length: int) -> Tensor:
    """`[rows, length]` token ids, the documents taken evenly."""
    found = []
    for text in texts[:: max(len(texts) // (2 * rows), 1)]:
        ids = tokenizer(text, truncation=True, max_length=length + 1)["input_ids"]
        if len(ids) >= length:
            found.append(ids[:length])
        if len(found) == rows:
            return torch.tensor(found)
    raise SystemExit(f"The text gives {len(found)} documents of {length} tokens; {rows} are asked for: lower --rows.")


@torch.no_grad()
def chunks(teacher, student, input_ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Teacher log-probabilities and student probabilities `[n, V]` in fp64, student hidden states `[n, H]`."""
    for row in input_ids:
        states = [model.base_model(input_ids=row[None]).last_hidden_state[0] for model in (teacher, student)]
        for start in range(0, len(row), CHUNK):
            part = [hidden[start : start + CHUNK] for hidden in states]
            logits = [
                model.get_output_embeddings()(hidden).double() for model, hidden in zip((teacher, student), part)
            ]
            yield logits[0].log_softmax(-1), logits[1].softmax(-1), part[1]


def logit_gradient(stored: TeacherTopK, student: Tensor, tail: str) -> Tensor:
    """Gradient of the forward KL to the stored teacher on the student's logits, `[n, V]`."""
    ids = stored.token_ids.long()
    support = stored.logprobs.double().exp()
    if tail == "renormalize":
        support = support / support.sum(-1, keepdim=True)
    if tail == "bucket":
        held = torch.zeros_like(student).scatter_(1, ids, (support > 0).double())
        outside = (student * (1 - held)).sum(-1, keepdim=True)
        target = student * (1 - held) * (stored.log_tail.double().exp()[:, None] / outside)
        return student - target.scatter_add_(1, ids, support)
    mass = support.sum(-1, keepdim=True)
    return mass * student - torch.zeros_like(student).scatter_add_(1, ids, support)


def outcome_error(exact: TeacherTopK, stored: TeacherTopK) -> Tensor:
    """KL between the exact outcomes of the stored support and the stored ones `[n]`, both normalised."""
    log_p = torch.cat([exact.logprobs, exact.log_tail[:, None]], 1).log_softmax(-1)
    log_q = torch.cat([stored.logprobs, stored.log_tail[:, None]], 1).double().log_softmax(-1)
    return torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def angle(first: Tensor, second: Tensor) -> Tensor:
    """Degrees between vectors in the last dimension."""
    cosine = torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=-1)
    return torch.rad2deg(torch.arccos(cosine.clamp(-1, 1)))


def measure_chunk(
    case: Case, full: Tensor, student: Tensor, hidden: Tensor, exact_gradient: Tensor, keys: Tensor
) -> None:
    if case.layout is None:
        stored = select_support(full, top_k=case.top_k)
    else:
        kept = select_support(full, layout=case.layout, top_k=case.top_k, row_keys=keys)
        blobs = encode_topk(kept, vocab_size=full.shape[1], layout=case.layout)
        stored = decode_topk(blobs)
        case.blobs += blobs
        if case.layout != "sampled":
            # The stored order of equal values may differ: compare id by id.
            present = stored.logprobs > -torch.inf
            exact = full.gather(1, stored.token_ids.long()).masked_fill(~present, -torch.inf)
            outside = full.clone()
            filled = torch.where(present, stored.token_ids, stored.token_ids[:, :1]).long()
            outside.scatter_(1, filled, -torch.inf)
            tail = outside.logsumexp(-1)
            case.value_errors.append(outcome_error(TeacherTopK(stored.token_ids, exact, tail), stored))
    case.entries += int((stored.logprobs > -torch.inf).sum())
    gradient = logit_gradient(stored, student, case.tail)
    case.angles.append(angle(gradient, exact_gradient))
    case.head_gradient += gradient.float().T @ hidden


def best_time(run: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def stored_bytes(column: pa.Array, tokens: int, folder: str) -> tuple[float, float]:
    """Bytes a token in Arrow and in Parquet with zstd."""
    path = Path(folder) / "column.parquet"
    pq.write_table(pa.table({"teacher": column}), path, compression="zstd")
    return column.nbytes / tokens, path.stat().st_size / tokens


def finish(case: Case, exact_head: Tensor, tokens: int, folder: str) -> Row:
    row = Row(case.name, entries=case.entries / tokens)
    row.token_angle = float(torch.cat(case.angles).mean())
    row.head_angle = float(angle(case.head_gradient.flatten(), exact_head.flatten()))
    if case.value_errors:
        errors = torch.cat(case.value_errors)
        row.value_error, row.worst_value_error = float(errors.mean()), float(errors.max())
    if case.blobs:
        column = pa.array([case.blobs], pa.list_(pa.large_binary()))
        row.arrow_bytes, row.parquet_bytes = stored_bytes(column, tokens, folder)
        stored, size = decode_topk(case.blobs), len(case.head_gradient)
        row.encode_us = 1e6 * best_time(partial(encode_topk, stored, vocab_size=size, layout=case.layout), 3) / tokens
        row.decode_us = 1e6 * best_time(lambda: decode_topk(case.blobs)) / tokens
    return row


def typed_row(case: Case, tokens: int, folder: str) -> Row:
    """The default's numbers as nested lists of int32 and float32."""
    teacher = decode_topk(case.blobs)
    ids, values = teacher.token_ids.tolist(), teacher.logprobs.tolist()
    start = time.perf_counter()
    column = pa.array(
        [{"ids": i, "logprobs": v} for i, v in zip(ids, values)],
        pa.struct({"ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())}),
    )
    seconds = time.perf_counter() - start
    row = Row("typed lists (int32, float32)", *stored_bytes(column, tokens, folder), entries=case.entries / tokens)
    row.encode_us = 1e6 * seconds / tokens

    def read() -> None:
        read_rows = column.to_pylist()
        torch.tensor([entry["ids"] for entry in read_rows]), torch.tensor([entry["logprobs"] for entry in read_rows])

    row.decode_us = 1e6 * best_time(read, 2) / tokens
    return row


def format_table(rows: list[Row]) -> str:
    head = f"{'layout':30}{'Arrow B':>9}{'zstd B':>9}{'entries':>9}{'KL error':>10}{'worst':>10}"
    head += f"{'angle/token':>13}{'angle/head':>12}{'encode us':>11}{'decode us':>11}"

    def number(value: float, form: str) -> str:
        return f"{'-':>{form.split('.')[0]}}" if math.isnan(value) else f"{value:{form}}"

    lines = [head]
    for row in rows:
        cells = (
            (row.arrow_bytes, "9.1f"),
            (row.parquet_bytes, "9.1f"),
            (row.entries, "9.1f"),
            (row.value_error, "10.1e"),
            (row.worst_value_error, "10.1e"),
            (row.token_angle, "13.2f"),
            (row.head_angle, "12.2f"),
            (row.encode_us, "11.2f"),
            (row.decode_us, "11.3f"),
        )
        lines.append(f"{row.name:30}" + "".join(number(value, form) for value, form in cells))
    return "\n".join(lines)


def draw(rows: list[Row], path: Path, title: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axis = figure.subplots()
    shown = [row for row in rows if not math.isnan(row.head_angle) and not math.isnan(row.arrow_bytes)]
    for column, marker, name in (("token_angle", "o", "logits of one token"), ("head_angle", "s", "head, all tokens")):
        axis.scatter(
            [row.arrow_bytes for row in shown], [getattr(row, column) for row in shown], marker=marker, label=name
        )
    before = 0.0
    for row in sorted(shown, key=lambda row: row.arrow_bytes):
        # Slanted above its points, or below where a neighbour's name stands above.
        above = row.arrow_bytes > 1.1 * before
        before = row.arrow_bytes
        point = max(row.token_angle, row.head_angle) if above else min(row.token_angle, row.head_angle)
        place = {"xytext": (2, 7), "rotation": 30} if above else {"xytext": (2, -7), "rotation": -30, "va": "top"}
        axis.annotate(row.name, (row.arrow_bytes, point), textcoords="offset points", fontsize=8, **place)
    axis.set(xscale="log", yscale="log", xlabel="bytes a token (Arrow)", ylabel="angle to the full gradient (degrees)")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ticks.set_minor_formatter(NullFormatter())
    axis.margins(0.2)
    axis.legend()
    axis.grid(alpha=0.3, which="both")
    axis.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="id or path of a teacher; default: SmolLM2-135M-Instruct")
    parser.add_argument("--text_file", help="UTF-8 text; default: State of the Union speeches")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--drop", type=int, nargs="*", default=[14, 15], help="layers the student lacks")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)

    if args.model is None:
        teacher, tokenizer, source = load_smollm2()
    else:
        teacher = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer, source = AutoTokenizer.from_pretrained(args.model), f"teacher: {args.model}"
    texts, text_source = load_texts(args.text_file)
    student = drop_layers(teacher.eval(), args.drop).eval()
    input_ids = read_tokens(tokenizer, texts, args.rows, args.length)
    k = args.top_k
    cases = [
        *(Case(f"{layout}", layout, k) for layout in ("default", "compact", "min_mass", "sampled")),
        *(Case(f"default, K={small}", "default", small) for small in (k // 2, k // 5, k // 10)),
        *(Case(f"K={k}, tail={tail}", None, k, tail) for tail in TAILS[1:]),
    ]
    head = teacher.get_output_embeddings().weight
    exact_head = torch.zeros_like(student.get_output_embeddings().weight)
    for case in cases:
        case.head_gradient = torch.zeros_like(head)
    tokens = 0
    for full, probabilities, hidden in chunks(teacher, student, input_ids):
        exact_gradient = probabilities - full.exp()
        exact_head += exact_gradient.float().T @ hidden
        keys = tokens + torch.arange(len(full))
        for case in cases:
            measure_chunk(case, full, probabilities, hidden, exact_gradient, keys)
        tokens += len(full)
        print(f"\r{tokens}/{input_ids.numel()} tokens", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = [finish(case, exact_head, tokens, folder) for case in cases]
        rows.insert(4, typed_row(cases[0], tokens, folder))
    student_name = f"student: the teacher without layers {', '.join(map(str, args.drop))}"
    title = f"{source}; {text_source}; {student_name}; {tokens} tokens, K={k}, {date.today()}"
    table = format_table(rows)
    print(title, table, sep="\n")
    (args.output_dir / "cache_layouts.txt").write_text(f"{title}\n{table}\n")
    with (args.output_dir / "cache_layouts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in fields(Row)])
        writer.writerows([getattr(row, column.name) for column in fields(Row)] for row in rows)
    draw(rows, args.output_dir / "cache_layouts.png", f"{source}, {tokens} tokens, K={k}, {student_name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
