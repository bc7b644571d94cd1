"""What a cached dataset holds: what users ask before they pay for training."""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .teacher_cache.codecs import decode_topk
from .teacher_cache.manifest import TeacherManifest
from .teacher_cache.topk import TeacherTopK


# Rows of (token ids, positions whose next token is wanted) -> the teacher's signal at those positions.
Scorer = Callable[[list[tuple[list[int], list[int]]]], Sequence[TeacherTopK]]

# Tokens decoded at a time.
BATCH_TOKENS = 32_768
MASS_BINS = 10_000
ENTROPY_BINS = 120
ENTROPY_STEP = 0.1  # nats
# Where the label stands among the teacher's candidates: the last rank of each class but the last two.
RANK_EDGES = (1, 2, 5, 10)
RANK_NAMES = ("1", "2", "3-5", "6-10", "11 or later", "outside")
LONGEST = 5


@dataclass
class CacheReport:
    """Sums and counts over a cached dataset; the properties divide.

    Masses, entropies (nats, the tail as one outcome) and ranks are over the trained tokens that hold a teacher.
    """

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    taught_tokens: int = 0  # trained tokens with a readable teacher
    untaught_rows: list[tuple[int, int]] = field(default_factory=list)  # (row, trained tokens without a blob)
    unsound_rows: list[tuple[int, int]] = field(default_factory=list)  # (row, trained tokens with NaN or +inf)
    blob_bytes: int = 0
    smallest_blob: int = 0
    largest_blob: int = 0
    support_sum: int = 0
    mass_sum: float = 0.0
    smallest_mass: float = 1.0
    mass_counts: np.ndarray = field(default_factory=lambda: np.zeros(MASS_BINS, np.int64))
    entropy_sum: float = 0.0
    effective_support_sum: float = 0.0
    entropy_counts: np.ndarray = field(default_factory=lambda: np.zeros(ENTROPY_BINS, np.int64))
    rank_counts: np.ndarray = field(default_factory=lambda: np.zeros(len(RANK_NAMES), np.int64))
    largest_token_id: int = -1
    row_lengths: array = field(default_factory=lambda: array("i"))
    longest_rows: list[tuple[int, int]] = field(default_factory=list)  # (tokens, row)
    manifests: Counter = field(default_factory=Counter)

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / max(self.tokens, 1)

    @property
    def bytes_per_trained_token(self) -> float:
        return self.blob_bytes / max(self.trained_tokens, 1)

    @property
    def mean_mass(self) -> float:
        return self._mean(self.mass_sum)

    @property
    def mean_support(self) -> float:
        return self._mean(self.support_sum)

    @property
    def mean_entropy(self) -> float:
        return self._mean(self.entropy_sum)

    @property
    def effective_support(self) -> float:
        """Mean of exp(entropy): how many equally likely outcomes would be as uncertain."""
        return self._mean(self.effective_support_sum)

    @property
    def label_agreement(self) -> float:
        """Share of trained tokens whose label is the teacher's most likely token."""
        return self._mean(self.rank_counts[0])

    @property
    def label_in_support(self) -> float:
        return self._mean(self.rank_counts[:-1].sum())

    def mass_quantile(self, quantile: float) -> float:
        """Captured mass below which this share of the tokens lies, to 1e-4."""
        if not self.taught_tokens:
            return math.nan
        reached = np.searchsorted(self.mass_counts.cumsum(), quantile * self.taught_tokens)
        return float(min(reached, MASS_BINS - 1) + 0.5) / MASS_BINS

    def _mean(self, total: float) -> float:
        return float(total) / self.taught_tokens if self.taught_tokens else math.nan

    def parsed_manifests(self) -> list[tuple[int, TeacherManifest]]:
        """(rows, manifest) of each manifest met, the most frequent first."""
        return [(rows, TeacherManifest.from_json(text)) for text, rows in self.manifests.most_common()]

    def to_text(self) -> str:
        """The report as lines of text."""
        longest = ", ".join(f"row {row}: {tokens:,}" for tokens, row in self.longest_rows)
        lines = [
            f"rows                       {self.rows:,}",
            f"tokens                     {self.tokens:,}",
            f"trained tokens             {self.trained_tokens:,} ({self.trained_share:.1%})",
            f"teacher bytes a token      {self.bytes_per_trained_token:.1f} (trained tokens; {self.smallest_blob} to "
            f"{self.largest_blob})",
            f"captured mass              mean {self.mean_mass:.4f}, p5 {self.mass_quantile(0.05):.4f}, "
            f"minimum {self.smallest_mass if self.taught_tokens else math.nan:.4f}",
            f"entries a token            {self.mean_support:.1f}",
            f"effective support          {self.effective_support:.2f} (mean of exp(entropy))",
            f"teacher entropy            {self.mean_entropy:.4f} nats (the tail as one outcome)",
            f"agreement with the label   {self.label_agreement:.1%} (the teacher's best); in the support "
            f"{self.label_in_support:.1%}",
            f"largest token id           {self.largest_token_id:,}",
            f"longest rows               {longest}",
        ]
        for rows, manifest in self.parsed_manifests():
            lines.append(f"manifest of {rows:,} rows")
            known = {name: value for name, value in vars(manifest).items() if value not in (None, ())}
            lines += [f"  {name:24} {value}" for name, value in known.items()]
            if manifest.layout == "sampled":
                lines.append(
                    "  Sampled supports: mass is 1 by construction; entropy and ranks are those of the draws."
                )
        for found, what in ((self.untaught_rows, "no teacher"), (self.unsound_rows, "NaN, +inf or a positive value")):
            if found:
                tokens, (row, _) = sum(count for _, count in found), found[0]
                lines.append(
                    f"PROBLEM: {tokens:,} trained tokens in {len(found):,} rows hold {what}, first in row {row}."
                )
        return "\n".join(lines)

    def draw(self, path: str | Path, title: str = "Cached teacher") -> Path:
        """Write the picture of the report: captured mass, entropy, rank of the label, row lengths (PNG).

        Raises:
            `ModuleNotFoundError`: without matplotlib, which the extra `plot` installs.
        """
        return _draw(self, Path(path), title)


def _trained_positions(labels: Sequence[int]) -> list[int]:
    return [token for token, label in enumerate(labels[1:]) if label != -100]


def _check_columns(row: dict[str, Any]) -> None:
    missing = [name for name in ("input_ids", "labels", "teacher_topk", "teacher_manifest") if name not in row]
    if missing:
        raise ValueError(
            f"`dataset` lacks the columns {missing} (it has {sorted(row)}); a cached dataset holds input_ids, labels, "
            "teacher_topk and teacher_manifest. Build it with `build_distillation_dataset`."
        )
    if not len(row["input_ids"]) == len(row["labels"]) == len(row["teacher_topk"]):
        sizes = {name: len(row[name]) for name in ("input_ids", "labels", "teacher_topk")}
        raise ValueError(
            f"`dataset` has a row of unequal lengths {sizes}; each column holds one entry for each token."
        )


def inspect_cache(dataset: Iterable[dict[str, Any]], *, max_rows: int | None = None) -> CacheReport:
    """Read a cached dataset once and sum up what it holds. Memory does not grow with it, but for 4 bytes a row.

    Args:
        dataset (`Dataset`, `IterableDataset` or any iterable of rows):
            The cached dataset.
        max_rows (`int`, *optional*):
            Read the first rows only.

    Returns:
        [`CacheReport`]

    Raises:
        `ValueError`: for a missing column, unequal lengths, or a blob of an unknown format.
    """
    report = CacheReport()
    waiting: list[tuple[int, dict[str, Any]]] = []
    tokens = 0
    for index, row in enumerate(islice(dataset, max_rows)):
        _check_columns(row)
        waiting.append((index, row))
        tokens += len(row["input_ids"])
        if tokens >= BATCH_TOKENS:
            _add_rows(report, waiting)
            waiting, tokens = [], 0
    _add_rows(report, waiting)
    return report


def _add_rows(report: CacheReport, rows: list[tuple[int, dict[str, Any]]]) -> None:
    blobs: list[bytes] = []
    labels: list[int] = []
    owners: list[int] = []
    for index, row in rows:
        length = len(row["input_ids"])
        positions = _trained_positions(row["labels"])
        held = [token for token in positions if row["teacher_topk"][token]]
        report.rows += 1
        report.tokens += length
        report.trained_tokens += len(positions)
        report.row_lengths.append(length)
        report.longest_rows = sorted([*report.longest_rows, (length, index)], key=lambda r: (-r[0], r[1]))[:LONGEST]
        report.manifests[row["teacher_manifest"]] += 1
        report.largest_token_id = max(report.largest_token_id, *row["input_ids"], -1)
        if len(held) < len(positions):
            report.untaught_rows.append((index, len(positions) - len(held)))
        blobs += [row["teacher_topk"][token] for token in held]
        labels += [row["labels"][token + 1] for token in held]
        owners += [index] * len(held)
    if not blobs:
        return
    sizes = list(map(len, blobs))
    report.blob_bytes += sum(sizes)
    report.smallest_blob = min(sizes) if report.smallest_blob == 0 else min(report.smallest_blob, *sizes)
    report.largest_blob = max(report.largest_blob, *sizes)
    teacher = decode_topk(blobs)
    sound = (teacher.logprobs <= 0).all(1) & (teacher.log_tail <= 0)
    if not bool(sound.all()):
        bad = Counter(owner for owner, good in zip(owners, sound.tolist()) if not good)
        report.unsound_rows += sorted(bad.items())
    _add_signal(report, teacher[sound], torch.tensor(labels)[sound])


def _add_signal(report: CacheReport, teacher: TeacherTopK, labels: Tensor) -> None:
    """Add positions `[n]` and their labels `[n]`."""
    if not len(labels):
        return
    present = teacher.logprobs > -torch.inf
    mass = -torch.expm1(teacher.log_tail.double())
    entropy = outcome_entropy(teacher)
    hit = (teacher.token_ids == labels[:, None]) & present
    # Entries descend, so the column is the rank.
    places = torch.bucketize(hit.int().argmax(1) + 1, torch.tensor(RANK_EDGES))
    places[~hit.any(1)] = len(RANK_NAMES) - 1
    report.taught_tokens += len(labels)
    report.support_sum += int(present.sum())
    report.mass_sum += float(mass.sum())
    report.smallest_mass = min(report.smallest_mass, float(mass.min()))
    report.mass_counts += torch.bincount(
        (mass * MASS_BINS).long().clamp(0, MASS_BINS - 1), minlength=MASS_BINS
    ).numpy()
    report.entropy_sum += float(entropy.sum())
    report.effective_support_sum += float(entropy.exp().sum())
    bins = (entropy / ENTROPY_STEP).long().clamp(0, ENTROPY_BINS - 1)
    report.entropy_counts += torch.bincount(bins, minlength=ENTROPY_BINS).numpy()
    report.rank_counts += torch.bincount(places, minlength=len(RANK_NAMES)).numpy()
    report.largest_token_id = max(report.largest_token_id, int(teacher.token_ids[present].max()))


def outcome_entropy(teacher: TeacherTopK) -> Tensor:
    """Entropy of the K+1 outcomes (the support, and the tail as one) `[n]`, in nats, fp64."""
    outcomes = torch.cat([teacher.logprobs, teacher.log_tail[:, None]], 1).double()
    return torch.special.entr(outcomes.exp()).sum(1)


def _draw(report: CacheReport, path: Path, title: str) -> Path:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'Drawing needs matplotlib: `pip install "trl-offline-distill[plot]"`, or ask for no picture.',
            name="matplotlib",
        ) from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    mass_axis, entropy_axis, rank_axis, length_axis = figure.subplots(2, 2).flat
    taught = max(report.taught_tokens, 1)

    coarse = report.mass_counts.reshape(50, -1).sum(1) / taught
    mass_axis.bar((np.arange(50) + 0.5) / 50, coarse, width=1 / 50, color="tab:blue")
    for value, name, style in (
        (report.mean_mass, "mean", "-"),
        (report.mass_quantile(0.05), "p5", "--"),
        (report.smallest_mass, "minimum", ":"),
    ):
        if math.isfinite(value):
            mass_axis.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{name} {value:.3f}")
    mass_axis.legend(loc="upper left")
    mass_axis.set(xlabel="captured mass of the teacher", ylabel="share of trained tokens", xlim=(0, 1))

    used = max(int(np.flatnonzero(report.entropy_counts).max(initial=0)) + 1, 10)
    edges = np.arange(used) * ENTROPY_STEP
    entropy_axis.bar(
        edges, report.entropy_counts[:used] / taught, width=ENTROPY_STEP, align="edge", color="tab:orange"
    )
    entropy_axis.set(xlabel="teacher entropy (nats)", ylabel="share of trained tokens")
    entropy_axis.set_title(f"effective support {report.effective_support:.1f} outcomes", fontsize="medium")

    bars = rank_axis.bar(RANK_NAMES, report.rank_counts / taught, color="tab:green")
    rank_axis.bar_label(bars, [f"{share:.1%}" for share in report.rank_counts / taught])
    rank_axis.set(xlabel="rank of the label among the teacher's candidates", ylabel="share of trained tokens")
    rank_axis.margins(y=0.12)

    length_axis.hist(np.asarray(report.row_lengths), bins=40, color="tab:purple")
    length_axis.set(xlabel="tokens in a row", ylabel="rows")
    length_axis.set_title(f"longest {max(report.row_lengths, default=0):,} tokens", fontsize="medium")

    figure.suptitle(
        f"{title}: {report.rows:,} rows, {report.tokens:,} tokens, {report.trained_share:.1%} trained, "
        f"{report.bytes_per_trained_token:.0f} teacher bytes a trained token"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path


@dataclass
class SignalDifference:
    """How far two signals of the same positions lie apart. Means over positions, except where named otherwise."""

    tokens: int
    mean_logprob_error: float  # |difference| of the log-probability, over the ids both hold
    largest_logprob_error: float
    same_best: float  # share of positions with the same most likely token
    same_ids: float  # share of the first signal's ids that the second holds too
    divergence: float  # KL(first || second) on the common ids and the rest, nats

    @classmethod
    def between(cls, first: TeacherTopK, second: TeacherTopK) -> "SignalDifference":
        """Two signals `[n]` with descending entries."""
        held = first.logprobs > -torch.inf
        match = (first.token_ids[:, :, None] == second.token_ids[:, None, :]) & held[:, :, None]
        match &= (second.logprobs > -torch.inf)[:, None, :]
        common = match.any(2)
        other = torch.where(common, second.logprobs.double().gather(1, match.int().argmax(2)), -torch.inf)
        mine = torch.where(common, first.logprobs.double(), -torch.inf)
        error = torch.where(common, (mine - other).abs(), 0.0)

        def rest(signal: TeacherTopK, used: Tensor) -> Tensor:
            unused = torch.where(used, -torch.inf, signal.logprobs.double())
            return torch.logaddexp(torch.logsumexp(unused, 1), signal.log_tail.double())[:, None]

        log_p = torch.cat([mine, rest(first, common)], 1).log_softmax(1)
        log_q = torch.cat([other, rest(second, match.any(1))], 1).log_softmax(1)
        terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
        return cls(
            tokens=len(held),
            mean_logprob_error=float(error.sum() / common.sum().clamp(min=1)),
            largest_logprob_error=float(error.max()) if error.numel() else 0.0,
            same_best=float((first.token_ids[:, 0] == second.token_ids[:, 0]).double().mean()),
            same_ids=float(common.sum() / held.sum().clamp(min=1)),
            divergence=float(terms.sum(1).mean()),
        )


@dataclass
class TeacherComparison:
    """The cached signal against a live teacher, beside two live passes against each other."""

    rows: int
    cached: SignalDifference
    live: SignalDifference

    def to_text(self) -> str:
        """A table: what was measured, cache against teacher, teacher against itself."""
        names = {
            "mean_logprob_error": "mean |log-probability difference|",
            "largest_logprob_error": "largest |log-probability difference|",
            "same_best": "same most likely token",
            "same_ids": "ids in common",
            "divergence": "KL (nats)",
        }
        lines = [
            f"{self.rows} rows, {self.cached.tokens} trained tokens",
            f"{'':37}{'cache - live':>14}{'live - live':>14}",
        ]
        for name, text in names.items():
            mine, base = getattr(self.cached, name), getattr(self.live, name)
            number = "14.2%" if name.startswith("same") else "14.3e"
            lines.append(f"{text:37}{mine:{number}}{base:{number}}")
        return "\n".join(lines)


def compare_with_teacher(dataset: Iterable[dict[str, Any]], score: Scorer, *, rows: int = 16) -> TeacherComparison:
    """Score a sample of the rows again and measure how far the cache lies from the teacher.

    The teacher is asked twice, for all rows together and for each row alone, which shows what its own arithmetic does
    to the numbers: a cache cannot be closer than that.

    Args:
        dataset (iterable of rows):
            The cached dataset. Rows are taken evenly over a `Dataset`, from the start of a stream.
        score (`Callable`):
            Takes a list of (token ids, positions) and returns the teacher's signal at the positions of each, `[n, K]`:
            entry
            `i` describes the token after `positions[i]`.
        rows (`int`):
            Rows to score.

    Returns:
        [`TeacherComparison`]
    """
    if rows < 1:
        raise ValueError(f"`rows` is {rows}; it must be at least 1. Ask for one row or more.")
    sample = [row for row in _spread(dataset, rows) if _trained_positions(row["labels"])]
    if not sample:
        raise ValueError(
            "`dataset` has no trained token in the rows looked at; nothing can be compared. Ask for more `rows`."
        )
    asked, blobs = [], []
    for row in sample:
        _check_columns(row)
        positions = [token for token in _trained_positions(row["labels"]) if row["teacher_topk"][token]]
        asked.append((list(row["input_ids"]), positions))
        blobs += [row["teacher_topk"][token] for token in positions]
    cached = decode_topk(blobs)
    together = _joined(score(asked))
    alone = _joined([score([row])[0] for row in asked])
    width = cached.top_k
    return TeacherComparison(
        rows=len(sample),
        cached=SignalDifference.between(cached, together),
        live=SignalDifference.between(together.narrow(width), alone.narrow(width)),
    )


def _joined(parts: Sequence[TeacherTopK]) -> TeacherTopK:
    return TeacherTopK.cat([part.to("cpu") for part in parts])


def _spread(dataset: Iterable[dict[str, Any]], rows: int) -> Iterator[dict[str, Any]]:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        yield from islice(dataset, rows)
        return
    count = min(rows, len(dataset))
    for index in range(count):
        yield dataset[index * len(dataset) // count]


def describe_row(row: dict[str, Any], tokenizer: Any, *, candidates: int = 5) -> str:
    """One cached row as text: each token, whether it is trained, and what the teacher expected there.

    Args:
        row (`dict`):
            A row of the cached dataset.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the teacher.
        candidates (`int`):
            Candidates shown for each token.

    Returns:
        `str`, one line for each token. Probabilities are the teacher's, before it saw the token; `rest` is the mass of
        all other tokens.
    """
    _check_columns(row)

    def text(token_id: int) -> str:
        return repr(tokenizer.decode([token_id]))

    teacher = decode_topk(row["teacher_topk"])
    lines = [f"{'':>5} {'token':24} {'':7}  teacher's candidates"]
    for token, (token_id, label) in enumerate(zip(row["input_ids"], row["labels"])):
        trained = label != -100 and token > 0
        line = f"{token:5} {text(token_id):24} {'trained' if trained else '':7}"
        if trained:
            entries = [
                (int(i), math.exp(p))
                for i, p in zip(teacher.token_ids[token - 1].tolist(), teacher.logprobs[token - 1].tolist())
                if p > -math.inf
            ]
            shown = [f"{'*' if i == label else ''}{text(i)} {p:.3f}" for i, p in entries[:candidates]]
            rank = next((rank for rank, (i, _) in enumerate(entries) if i == label), None)
            if rank is not None and rank >= candidates:
                shown.append(f"... *{text(label)} {entries[rank][1]:.3f} (rank {rank + 1})")
            rest = max(0.0, 1 - sum(p for _, p in entries[:candidates]))
            line += f"  {', '.join(shown)}, rest {rest:.3f}" if entries else "  no teacher"
        lines.append(line.rstrip())
    return "\n".join(lines)
