"""
What one training step costs: `OfflineDistillationTrainer` against TRL's `SFTTrainer` on the same student and the same
rows, and against TRL's online GKD (`lmbda=0`) with the teacher resident.

    python benchmarks/step.py                 # a table and benchmarks/results/step.{md,json,png}
    python benchmarks/step.py --rounds 3 --threads 2

The student has the shape of SmolLM2-135M with 15 of its 30 layers, the teacher all 30; the weights are random, which
costs the same. Rows of 512 tokens, 2 a step, fp32 on a CPU and bf16 autocast on a GPU, AdamW, no gradient
checkpointing. Every variant runs in a fresh process, in turn, for some rounds; the fastest step and the smallest peak
count.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import fields
from datetime import date
from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value
from fresh_process import Clock, measure
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_offline_distill import OfflineDistillationConfig, OfflineDistillationTrainer, TeacherTopK, encode_topk
from trl_offline_distill.teacher_cache.manifest import TeacherManifest, tokenizer_fingerprint


RESULTS = Path(__file__).parent / "results"
VOCAB, HIDDEN, LENGTH, ROWS_A_STEP, TOP_K = 49_152, 576, 512, 2, 100
VARIANTS = ("sft", "offline", "sft_lora", "offline_lora", "gkd")
# (ours, theirs, which number, its name, the bar on a CPU, the bar on a GPU)
BARS = (
    ("offline", "sft", "seconds", "step time against SFTTrainer, full training", 0.90, 1.05),
    ("offline_lora", "sft_lora", "seconds", "step time against SFTTrainer, LoRA", 0.85, 1.00),
    ("offline", "sft", "peak_bytes", "peak memory against SFTTrainer, full training", 1.02, 1.02),
    ("offline_lora", "sft_lora", "peak_bytes", "peak memory against SFTTrainer, LoRA", 1.02, 1.02),
    ("offline", "gkd", "seconds", "step time against online GKD", 0.65, 0.65),
    ("offline", "gkd", "peak_bytes", "peak memory against online GKD", 0.75, 0.75),
)


def model_of(layers: int, seed: int) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def tokenizer_of() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w2"
    )


def rows_of(count: int, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Random tokens, and for each a random top 100 that holds about 90 % of the mass."""
    generator = torch.Generator().manual_seed(0)
    manifest = TeacherManifest(
        teacher="random", tokenizer_fingerprint=tokenizer_fingerprint(tokenizer), vocab_size=VOCAB, top_k=TOP_K
    ).to_json()
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        top = torch.stack([torch.randperm(VOCAB, generator=generator)[:TOP_K] for _ in range(LENGTH)])
        logprobs = (torch.randn(LENGTH, TOP_K, generator=generator) * 2).log_softmax(-1) + torch.tensor(0.9).log()
        blobs = encode_topk(TeacherTopK(top, logprobs, torch.full((LENGTH,), 0.1).log()), vocab_size=VOCAB)
        rows.append(
            {
                "input_ids": ids.tolist(),
                "labels": [-100, *ids[1:].tolist()],
                "teacher_topk": [*blobs[:-1], b""],
                "teacher_manifest": manifest,
            }
        )
    features = Features(
        input_ids=List(Value("int32")),
        labels=List(Value("int32")),
        teacher_topk=List(Value("large_binary")),
        teacher_manifest=Value("string"),
    )
    return Dataset.from_list(rows, features=features)


def run_variant(variant: str, steps: int, workers: int) -> dict:
    """Trains for `steps` steps and returns what they cost."""
    tokenizer, on_gpu = tokenizer_of(), torch.cuda.is_available()
    dataset = rows_of(ROWS_A_STEP * steps, tokenizer)
    plain = dataset.select_columns(["input_ids", "labels"])
    options = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS_A_STEP,
        "max_steps": steps,
        "logging_steps": 1,
        "max_length": None,
        "disable_tqdm": True,
        "dataloader_num_workers": workers,
    }
    peft_config = None
    if variant.endswith("_lora"):
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    clock, student = Clock(), model_of(15, seed=1)
    shared = {"processing_class": tokenizer, "callbacks": [clock]}
    if variant.startswith("offline"):
        trainer = OfflineDistillationTrainer(
            student, OfflineDistillationConfig(**options), train_dataset=dataset, peft_config=peft_config, **shared
        )
    elif variant.startswith("sft"):
        trainer = SFTTrainer(student, SFTConfig(**options), train_dataset=plain, peft_config=peft_config, **shared)
    else:
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        known = {field.name for field in fields(GKDConfig)}
        trainer = GKDTrainer(
            student,
            teacher_model=model_of(30, seed=2),
            args=GKDConfig(lmbda=0.0, beta=0.0, **{name: value for name, value in options.items() if name in known}),
            data_collator=DataCollatorForLanguageModeling(pad_token_id=0),
            train_dataset=plain,
            **shared,
        )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    waits = [entry["data_wait"] for entry in trainer.state.log_history[1:] if "data_wait" in entry]
    return {**clock.summary(), "data_wait": max(waits, default=None)}


def table_of(results: dict[str, dict], on_gpu: bool) -> str:
    lines = [
        "| variant | fastest step (s) | median (s) | processor time (s) | peak memory (GB) |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        times = " | ".join(f"{found[key]:.2f}" for key in ("seconds", "median_seconds", "processor_seconds"))
        lines.append(f"| {name} | {times} | {found['peak_bytes'] / 1e9:.2f} |")
    lines += ["", "| ratio | measured | at most | |", "|---|---|---|---|"]
    for ours, theirs, key, what, cpu, gpu in BARS:
        if ours in results and theirs in results:
            ratio, bar = results[ours][key] / results[theirs][key], gpu if on_gpu else cpu
            processor = ""
            if key == "seconds" and not on_gpu:
                own, other = results[ours]["processor_seconds"], results[theirs]["processor_seconds"]
                processor = f" ({own / other:.3f} in processor time)"
            lines.append(f"| {what} | {ratio:.3f}{processor} | {bar:.2f} | {'holds' if ratio <= bar else 'missed'} |")
    if "offline" in results and results["offline"]["data_wait"] is not None:
        wait = results["offline"]["data_wait"]
        lines.append(
            f"| share of a step waiting for data | {wait:.4f} | 0.02 | {'holds' if wait <= 0.02 else 'missed'} |"
        )
    return "\n".join(lines)


def draw(results: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    names = list(results)
    colours = ["C0" if name.startswith("offline") else "0.65" for name in names]
    for axis, key, scale, label in (
        (axes[0], "seconds", 1, "seconds a step"),
        (axes[1], "peak_bytes", 1e9, "peak memory (GB)"),
    ):
        bars = axis.barh(names, [results[name][key] / scale for name in names], color=colours)
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="times every variant is run, in turn")
    parser.add_argument("--steps", type=int, default=5, help="steps of one run; the first does not count")
    parser.add_argument("--threads", type=int, default=2, help="threads of one run")
    parser.add_argument("--workers", type=int, default=1, help="processes that read the data")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run_variant(arguments.run, arguments.steps, arguments.workers)))
        return 0
    results: dict[str, dict] = {}
    for number in range(arguments.rounds):
        for variant in arguments.variants:
            found = measure(
                __file__,
                "--run",
                variant,
                "--steps",
                str(arguments.steps),
                "--workers",
                str(arguments.workers),
                threads=arguments.threads,
            )
            print(f"round {number + 1}, {variant}: {found['seconds']:.2f} s a step", flush=True)
            best = results.setdefault(variant, found)
            for key in ("seconds", "median_seconds", "processor_seconds", "peak_bytes"):
                best[key] = min(best[key], found[key])
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {arguments.threads} threads"
    table = f"{device}, {date.today()}, torch {torch.__version__}\n\n{table_of(results, on_gpu)}\n"
    print(f"\n{table}")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "step.md").write_text(table)
    (arguments.output_dir / "step.json").write_text(json.dumps({"device": device, "results": results}, indent=1))
    draw(results, arguments.output_dir / "step.png")
    return int("| missed |" in table)


if __name__ == "__main__":
    sys.exit(main())
