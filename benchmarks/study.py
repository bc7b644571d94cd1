"""
Which choices matter: SmolLM2-135M loses 15 or 10 of its 30 layers and is healed on its own cached log-probabilities,
with every objective, support and layout, in English and in Brazilian Portuguese.

    python benchmarks/study.py --english FILE --portuguese FILE     # make study fetches both
    python benchmarks/study.py --report                             # tables and pictures of what is there

One run is one student, one arm and one seed, in a process of its own; `--jobs` of them at a time. A finished run is a
file in `--work_dir`: stop the study at any moment, start it again, and it goes on. Results go to
`benchmarks/results/study.{csv,md}` and `study_*.png`.

Every arm of a seed sees the same rows in the same order, and the optimizer's settings are the same for all: they were
not tuned for any arm. Half of the rows are English, half are Portuguese; held-out rows come from parts of the text
that no training row comes from. The KL is measured to the full distribution of the teacher, whatever the arm was
trained on.
"""

import argparse
import concurrent.futures
import csv
import importlib.metadata
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from trl_offline_distill import OfflineDistillationConfig, OfflineDistillationTrainer, build_distillation_dataset
from trl_offline_distill.demo import load_smollm2, split_rows
from trl_offline_distill.healing import drop_layers
from trl_offline_distill.teacher_cache.codecs import MinMassLayout


RESULTS = Path(__file__).parent / "results"
LANGUAGES = ("english", "portuguese")
DROPPED = {20: range(16, 26), 15: range(8, 23)}
LAYOUT_OF = {"default": "default", "compact": "compact", "min_mass": MinMassLayout(mass=0.999)}
# Label, and what differs from offline distillation with the default layout, K = 100 and the bucket.
ARMS = {
    "cross_entropy": ("cross-entropy alone", {"kd_weight": 0.0, "ce_weight": 1.0}),
    "none": ("no tail (the paper)", {"tail": "none"}),
    "bucket": ("bucket, K = 100", {}),
    "bucket_ce": ("bucket + cross-entropy, half each", {"kd_weight": 0.5, "ce_weight": 0.5}),
    "compact": ("bucket, compact layout", {"cache": "compact"}),
    "min_mass": ("bucket, mass .999", {"cache": "min_mass"}),
    "k5": ("bucket, K = 5", {"kd_top_k": 5}),
    "k20": ("bucket, K = 20", {"kd_top_k": 20}),
    "online": ("online, full KL", {"online": "full"}),
    "online_top_k": ("online, the same top 100 and bucket", {"online": "top_k"}),
}
BINS = 15
# What a work folder was made with.
SETTINGS = (
    *("max_steps", "batch_rows", "row_tokens", "held_out_rows"),
    *("curve_rows", "curve_steps", "learning_rate", "top_k"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path, help="plain text")
    parser.add_argument("--portuguese", type=Path, help="plain text")
    parser.add_argument("--students", type=int, nargs="+", choices=list(DROPPED), default=list(DROPPED))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--batch_rows", type=int, default=2, help="rows a step")
    parser.add_argument("--row_tokens", type=int, default=128, help="tokens a row")
    parser.add_argument("--held_out_rows", type=int, default=20, help="rows of each language at the end of a run")
    parser.add_argument("--curve_rows", type=int, default=4, help="the first of them, for the curve")
    parser.add_argument("--curve_steps", type=int, default=10, help="steps between two points of the curve")
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of one run")
    parser.add_argument("--work_dir", type=Path, default=Path("study_output"))
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="only draw and tabulate the runs that are there")
    parser.add_argument("--run", nargs=3, metavar=("LAYERS", "ARM", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args()


# Material


def paragraphs_of(file: Path) -> str:
    """The prose of a plain text manual: no tables, listings, menus or headings."""
    found = []
    for block in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
        lines = [line.strip() for line in block.splitlines()]
        paragraph = " ".join(lines)
        if len(lines) > 1 and len(paragraph) > 150 and "|" not in paragraph and paragraph[-1] in ".:!?":
            found.append(paragraph)
    return "\n\n".join(found)


def prepare(arguments: argparse.Namespace) -> None:
    """Teacher, students, the three caches, and the teacher's full log-probabilities on the held-out rows; once."""
    folder = arguments.work_dir
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    record = folder / "settings.json"
    if record.exists():
        made = json.loads(record.read_text())
        changed = [
            f"{name}: {made[name]} before, {value} now" for name, value in settings.items() if made[name] != value
        ]
        if changed:
            raise SystemExit(
                f"{folder} holds a study with other settings ({'; '.join(changed)}): name another --work_dir."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    teacher, tokenizer, source = load_smollm2()
    print(source, flush=True)
    teacher.eval()
    teacher.save_pretrained(folder / "teacher")
    for layers, dropped in DROPPED.items():
        student = drop_layers(teacher, dropped)
        student.save_pretrained(folder / f"student_{layers}")
        tokenizer.save_pretrained(folder / f"student_{layers}")
    # Half again of what one run takes, so that seeds differ in rows and not in their order alone.
    train_rows = arguments.max_steps * arguments.batch_rows * 3 // 4
    train = []
    for language in LANGUAGES:
        text = paragraphs_of(getattr(arguments, language))
        size = len(text) // 40
        documents = [text[start : start + size] for start in range(0, size * 40, size)]
        # 6 characters a token fill a row in both languages; truncation makes the rows equally long.
        own, held_out = split_rows(documents, train_rows, arguments.held_out_rows, 6 * arguments.row_tokens, seed=0)
        train += own
        ids = [tokenizer(row)["input_ids"][: arguments.row_tokens] for row in held_out]
        np.save(folder / f"{language}.npy", np.array(ids))
        write_full_logprobs(teacher, ids, folder / f"{language}_logprobs.npy")
    random.Random(0).shuffle(train)
    for name, layout in LAYOUT_OF.items():
        build_distillation_dataset(
            Dataset.from_list([{"text": row} for row in train]),
            teacher,
            tokenizer,
            top_k=arguments.top_k,
            layout=layout,
            max_length=arguments.row_tokens,
            batch_tokens=2048,
            output_dir=str(folder / f"{name}.build"),
        ).save_to_disk(folder / name)
    record.write_text(json.dumps(settings))


def write_full_logprobs(teacher, rows: list[list[int]], path: Path) -> None:
    """fp16 `[rows, tokens - 1, V]`: off by 4e-3 nats at most in the far tail, nothing where the mass is."""
    with torch.no_grad():
        full = [teacher(torch.tensor([row])).logits[0, :-1].log_softmax(-1).half().numpy() for row in rows]
    np.save(path, np.stack(full))


# One run


def held_out(model, folder: Path, rows: int) -> dict[str, dict[str, float]]:
    """Of each language: perplexity, KL(teacher || model) over the full vocabulary in nats a token, and calibration.

    `calibration_error` is the expected calibration error of the most likely token, over 15 bins of equal width;
    `overconfidence` is its mean probability minus the share of positions where it is right.
    """
    result = {}
    for language in LANGUAGES:
        ids = np.load(folder / f"{language}.npy")[:rows]
        teacher = np.load(folder / f"{language}_logprobs.npy", mmap_mode="r")
        nll, kl, confidence, right = [], [], [], []
        with torch.no_grad():
            for row, target in zip(torch.from_numpy(ids), teacher, strict=False):
                logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)  # [n, V]
                target = torch.from_numpy(target).float()
                kl.append((target.exp() * (target - logprobs)).sum(-1))
                nll.append(-logprobs.gather(-1, row[1:, None])[:, 0])
                best = logprobs.max(-1)
                confidence.append(best.values.exp())
                right.append((best.indices == row[1:]).float())
        confidence, right = torch.cat(confidence), torch.cat(right)
        bins = (confidence * BINS).long().clamp(max=BINS - 1)
        gaps = torch.zeros(BINS).index_add(0, bins, confidence - right)
        result[language] = {
            "kl": float(torch.cat(kl).mean()),
            "perplexity": math.exp(float(torch.cat(nll).mean())),
            "calibration_error": float(gaps.abs().sum() / len(confidence)),
            "overconfidence": float((confidence - right).mean()),
        }
    return result


class OnlineTrainer(OfflineDistillationTrainer):
    """The teacher is resident and scores every batch; full logits of both, no padding in these rows."""

    teacher, top_k = None, None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        with torch.no_grad():
            target = self.teacher(ids).logits[:, :-1].log_softmax(-1).flatten(0, 1)
        student = model(ids).logits[:, :-1].log_softmax(-1).flatten(0, 1)
        if self.top_k is not None:
            best = target.topk(self.top_k).indices
            target, student = (
                torch.cat([x.gather(-1, best), x.scatter(-1, best, -torch.inf).logsumexp(-1)[:, None]], dim=-1)
                for x in (target, student)
            )
        return torch.nn.functional.kl_div(student, target, reduction="sum", log_target=True) / num_items_in_batch


class Curve(TrainerCallback):
    """Held-out figures during the run."""

    def __init__(self, folder: Path, rows: int, every: int):
        self.folder, self.rows, self.every, self.points = folder, rows, every, []

    def _measure(self, model, step: int) -> None:
        model.eval()
        self.points.append({"step": step, **held_out(model, self.folder, self.rows)})
        model.train()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._measure(model, 0)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            self._measure(model, state.global_step)


def run(arguments: argparse.Namespace, layers: int, arm: str, seed: int) -> dict:
    folder = arguments.work_dir
    options = dict(ARMS[arm][1])
    rows = load_from_disk(folder / options.pop("cache", "default")).shuffle(seed=seed)
    online = options.pop("online", None)
    curve = Curve(folder, arguments.curve_rows, arguments.curve_steps)
    student = AutoModelForCausalLM.from_pretrained(folder / f"student_{layers}", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = (OfflineDistillationTrainer if online is None else OnlineTrainer)(
            student,
            OfflineDistillationConfig(
                scratch,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                gradient_checkpointing=False,
                per_device_train_batch_size=arguments.batch_rows,
                train_sampling_strategy="sequential",
                max_steps=arguments.max_steps,
                logging_steps=1,
                learning_rate=arguments.learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=max(arguments.max_steps // 20, 1),
                disable_tqdm=True,
                seed=seed,
                **options,
            ),
            train_dataset=rows.select(range(arguments.max_steps * arguments.batch_rows)),
            processing_class=AutoTokenizer.from_pretrained(folder / f"student_{layers}"),
            callbacks=[curve],
        )
        if online is not None:
            trainer.teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32).eval()
            trainer.top_k = arguments.top_k if online == "top_k" else None
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {
        "layers": layers,
        "arm": arm,
        "seed": seed,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "curve": curve.points,
        "final": held_out(student.eval(), folder, arguments.held_out_rows),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")},
        "date": date.today().isoformat(),
    }


def run_file(arguments: argparse.Namespace, layers: int, arm: str, seed: int) -> Path:
    return arguments.work_dir / "runs" / f"{layers}-{arm}-{seed}.json"


def run_all(arguments: argparse.Namespace) -> list[str]:
    """Runs what is missing, a whole seed after the other; returns the names of the runs that failed."""
    # The comparison of one loss, online and cached, needs one seed.
    wanted = [
        (layers, arm, seed)
        for seed in range(arguments.seeds)
        for layers in arguments.students
        for arm in arguments.arms
        if seed == 0 or arm != "online_top_k"
    ]
    missing = [key for key in wanted if not run_file(arguments, *key).exists()]
    (arguments.work_dir / "runs").mkdir(exist_ok=True)
    own = [value for value in sys.argv[1:] if value != "--report"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false"}

    def start(key: tuple[int, str, int]) -> str | None:
        command = [sys.executable, __file__, *own, "--run", *map(str, key)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return None if done.returncode == 0 else f"{key}: {done.stderr[-2000:]}"

    failed = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        bar = tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="run", desc="study")
        for done in concurrent.futures.as_completed([pool.submit(start, key) for key in missing]):
            bar.update()
            if done.result() is not None:
                failed.append(done.result())
                tqdm.write(done.result())
    return failed


# Report


def steps_to(points: list[dict], language: str, level: float) -> float | None:
    """First step, between two points by a straight line, at which the held-out KL is at most `level`."""
    for before, after in itertools.pairwise(points):
        high, low = before[language]["kl"], after[language]["kl"]
        if low <= level:
            share = (high - level) / (high - low) if high > level else 0.0
            return before["step"] + share * (after["step"] - before["step"])
    return None


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.mean(values):.{digits}f}"
    return middle if len(values) < 2 else f"{middle} ± {statistics.stdev(values):.{digits}f}"


def report(arguments: argparse.Namespace) -> None:
    files = sorted((arguments.work_dir / "runs").glob("*.json"))
    runs = [json.loads(file.read_text()) for file in files]
    settings = json.loads((arguments.work_dir / "settings.json").read_text())
    if not runs:
        raise SystemExit(f"No finished run in {arguments.work_dir}.")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with (arguments.output_dir / "study.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        measures = ("kl", "perplexity", "calibration_error", "overconfidence")
        writer.writerow(("layers", "arm", "seed", "language", *measures, "date", *runs[0]["versions"]))
        for r in runs:
            for language in LANGUAGES:
                figures = (f"{r['final'][language][name]:.5f}" for name in measures)
                writer.writerow(
                    (r["layers"], r["arm"], r["seed"], language, *figures, r["date"], *r["versions"].values())
                )
    (arguments.output_dir / "study.md").write_text(table_of(runs, settings))
    print((arguments.output_dir / "study.md").read_text())
    draw_arms(runs, arguments.output_dir / "study_arms.png")
    draw_curves(runs, arguments.output_dir / "study_curves.png")
    draw_online(runs, arguments.output_dir / "study_online.png")


def grouped(runs: list[dict], layers: int) -> dict[str, dict[int, dict]]:
    """The runs of one student by arm and seed, in the order of `ARMS`."""
    found = {arm: {r["seed"]: r for r in runs if (r["layers"], r["arm"]) == (layers, arm)} for arm in ARMS}
    return {arm: by_seed for arm, by_seed in found.items() if by_seed}


def table_of(runs: list[dict], settings: dict) -> str:
    dates = sorted({r["date"] for r in runs})
    versions = sorted({", ".join(f"{name} {version}" for name, version in r["versions"].items()) for r in runs})
    tokens = settings["row_tokens"] - 1
    lines = [
        f"{' to '.join(sorted({dates[0], dates[-1]}))}; {'; '.join(versions)}. {settings['max_steps']} steps of "
        f"{settings['batch_rows'] * tokens} trained tokens, learning rate {settings['learning_rate']:g} (cosine), "
        f"{settings['held_out_rows'] * tokens:,} held-out tokens of each language. "
        "Mean ± standard deviation over seeds.",
    ]
    for layers in DROPPED:
        arms = grouped(runs, layers)
        if not arms:
            continue
        for language in LANGUAGES:
            start = next(iter(next(iter(arms.values())).values()))["curve"][0][language]["kl"]
            reference = arms.get("cross_entropy", {})
            lines += [
                "",
                f"### {layers} of 30 layers, {language.capitalize()} (KL before training {start:.2f})",
                "",
                "| arm | seeds | KL to the teacher | minus `bucket`, same seed | perplexity | calibration error | "
                "overconfidence | steps to the KL of cross-entropy |",
                "|---|---|---|---|---|---|---|---|",
            ]
            for arm, by_seed in arms.items():
                final = [r["final"][language] for r in by_seed.values()]
                shared = [seed for seed in by_seed if seed in arms.get("bucket", {})]
                paired = [
                    by_seed[seed]["final"][language]["kl"] - arms["bucket"][seed]["final"][language]["kl"]
                    for seed in shared
                ]
                reached = [
                    steps_to(r["curve"], language, reference[seed]["curve"][-1][language]["kl"])
                    for seed, r in by_seed.items()
                    if seed in reference
                ]
                steps = spread(reached, 0) if reached and None not in reached else "not reached"
                lines.append(
                    f"| {ARMS[arm][0]} | {len(by_seed)} | {spread([f['kl'] for f in final], 3)} | "
                    f"{spread(paired, 3) if paired else ''} | {spread([f['perplexity'] for f in final], 1)} | "
                    f"{spread([f['calibration_error'] for f in final], 3)} | "
                    f"{spread([f['overconfidence'] for f in final], 3)} | {steps} |"
                )
    same = online_difference(runs)
    if same:
        lines += ["", "The same loss, cached and online, seed 0: " + "; ".join(same) + "."]
    return "\n".join(lines) + "\n"


def online_difference(runs: list[dict]) -> list[str]:
    found = []
    for layers in DROPPED:
        arms = grouped(runs, layers)
        cached, online = arms.get("bucket", {}).get(0), arms.get("online_top_k", {}).get(0)
        if cached and online:
            worst = max(abs(a - b) for a, b in zip(cached["losses"], online["losses"], strict=True))
            found.append(f"{layers} layers, the losses of any step differ by at most {worst:.1e} nats")
    return found


def figure_of(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def use_log_scale(axis) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_yscale("log")
    for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_arms(runs: list[dict], path: Path) -> None:
    """Final held-out KL and calibration error: one row an arm, one point a seed."""
    measures = (("kl", "held-out KL to the teacher (nats a token)"), ("calibration_error", "calibration error"))
    students = [layers for layers in DROPPED if grouped(runs, layers)]
    figure, axes = figure_of(len(students), len(measures), (11, 4.2 * len(students)))
    for line, layers in zip(axes, students, strict=True):
        arms = {arm: by_seed for arm, by_seed in grouped(runs, layers).items() if arm != "online_top_k"}
        for axis, (measure, label) in zip(line, measures, strict=True):
            for language, marker, colour in zip(LANGUAGES, "o^", ("C0", "C1"), strict=True):
                points = [
                    (r["final"][language][measure], place)
                    for place, by_seed in enumerate(arms.values())
                    for r in by_seed.values()
                ]
                axis.plot(*zip(*points, strict=True), marker, color=colour, alpha=0.7, label=language.capitalize())
            axis.set_yticks(range(len(arms)), [ARMS[arm][0] for arm in arms] if axis is line[0] else [])
            axis.invert_yaxis()
            axis.set_xlabel(label)
            axis.set_title(f"{layers} of 30 layers", fontsize=10)
        line[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def draw_curves(runs: list[dict], path: Path) -> None:
    """Held-out KL over the steps, mean of the seeds."""
    shown = ("cross_entropy", "none", "bucket", "bucket_ce", "k5", "online")
    students = [layers for layers in DROPPED if grouped(runs, layers)]
    figure, axes = figure_of(len(students), len(LANGUAGES), (11, 3.8 * len(students)))
    for line, layers in zip(axes, students, strict=True):
        arms = grouped(runs, layers)
        for axis, language in zip(line, LANGUAGES, strict=True):
            for number, arm in enumerate(name for name in shown if name in arms):
                curves = [[point[language]["kl"] for point in r["curve"]] for r in arms[arm].values()]
                steps = [point["step"] for point in next(iter(arms[arm].values()))["curve"]]
                style = {"color": "black", "linestyle": "--"} if arm == "online" else {"color": f"C{number}"}
                axis.plot(steps, np.mean(curves, axis=0), label=ARMS[arm][0], linewidth=1.4, **style)
            use_log_scale(axis)
            axis.set_xlabel("step")
            axis.set_title(f"{layers} of 30 layers, {language.capitalize()}", fontsize=10)
        line[0].set_ylabel("held-out KL (nats a token)")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_online(runs: list[dict], path: Path) -> None:
    """Training loss of one seed: cached, the same loss online, and the full KL online."""
    students = [layers for layers in DROPPED if 0 in grouped(runs, layers).get("bucket", {})]
    if not students:
        return
    figure, axes = figure_of(1, len(students), (11, 3.8))
    styles = {
        "bucket": ("cached top 100 and bucket", {"color": "C0", "linewidth": 4, "alpha": 0.45}),
        "online_top_k": ("online, the same loss", {"color": "black", "linewidth": 0.9}),
        "online": ("online, full KL", {"color": "C3", "linewidth": 0.9, "linestyle": "--"}),
    }
    for axis, layers in zip(axes[0], students, strict=True):
        arms = grouped(runs, layers)
        for arm, (label, style) in styles.items():
            if 0 in arms.get(arm, {}):
                losses = arms[arm][0]["losses"]
                axis.plot(range(1, len(losses) + 1), losses, label=label, **style)
        use_log_scale(axis)
        axis.set_xlabel("step")
        axis.set_title(f"{layers} of 30 layers, seed 0", fontsize=10)
    axes[0, 0].set_ylabel("training loss (nats a token)")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> int:
    arguments = parse()
    if arguments.run:
        layers, arm, seed = arguments.run
        path = run_file(arguments, int(layers), arm, int(seed))
        text = json.dumps(run(arguments, int(layers), arm, int(seed)))
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
        return 0
    failed = []
    if not arguments.report:
        for language in LANGUAGES:
            if getattr(arguments, language) is None and not (arguments.work_dir / "settings.json").exists():
                raise SystemExit(f"--{language} FILE is needed: plain text to learn from and to hold out.")
        prepare(arguments)
        failed = run_all(arguments)
    report(arguments)
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
