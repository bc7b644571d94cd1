"""Teacher signals in other formats, read into the columns of this package.

One function reads one format: a row of the foreign dataset becomes a [`ForeignRow`], which says what is known of each
entry. What the numbers are (log-probabilities, probabilities, logits), what they were normalised over, and which token
an entry describes is declared by the caller, fixed by the format, or read off the data; where the data allows two
readings, the import is refused and names them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from .codecs import Layout, MinMassLayout, SampledLayout, encode_topk, get_layout
from .columns import FEATURES
from .manifest import TeacherManifest, chat_template_hash, tokenizer_fingerprint
from .topk import TeacherTopK


AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)

VALUE_KINDS = ("logprob", "probability", "logit")
DESCRIBES = ("next", "same")
NORMALIZERS = ("vocabulary", "support")

# Rows looked at before anything is imported.
SAMPLE_ROWS = 64
# Padding such as -1e9 is no log-probability.
_PADDING_BELOW = -1e4
_MASS_TOLERANCE = 1e-2
# A normalised support sums to 1 up to the rounding of half precision.
_UNIT_TOLERANCE = 2e-3


@dataclass
class ForeignRow:
    """One row of a foreign dataset. Entry `t` of each list belongs to `input_ids[t]`.

    Args:
        input_ids (`list[int]`): Tokens, `T`.
        trained (`list[bool]`, *optional*): Which tokens are trained; None for all.
        token_ids (`list` of `[k]` ids): The support, `T` entries; empty where there is none.
        values (`list` of `[k]` floats): What the foreign format stores.
        log_normalizer (`list[float]`, *optional*): `log sum exp` of the logits over the whole vocabulary.
        log_tail (`list[float]`, *optional*): Log of the mass outside the support, where it was stored.
        log_tail_at (`list` of `[M]` floats, *optional*): The tail at the manifest's extra temperatures.
        manifest (`TeacherManifest`, *optional*): Where the row brings its own.
    """

    input_ids: list[int]
    trained: list[bool] | None
    token_ids: list[Sequence[int]]
    values: list[Sequence[float]]
    log_normalizer: list[float] | None = None
    log_tail: list[float | None] | None = None
    log_tail_at: list[Sequence[float]] | None = None
    manifest: TeacherManifest | None = None


@dataclass(frozen=True)
class ForeignFormat:
    """A format that can be imported.

    Args:
        columns: The columns that tell it.
        read: Reads a row.
        value_kind, describes, normalizer: What the format fixes; None where it must be declared or detected.
    """

    columns: frozenset[str]
    read: Callable[[dict[str, Any]], ForeignRow]
    value_kind: str | None = None
    describes: str | None = None
    normalizer: str | None = None


def _flags(values: Iterable[Any] | None) -> list[bool] | None:
    return None if values is None else [bool(value) for value in values]


def _trained_by_labels(row: dict[str, Any]) -> list[bool] | None:
    labels = row.get("labels")
    if labels is None:
        return _flags(row.get("loss_mask"))
    if len(labels) != len(row["input_ids"]):
        raise ValueError(
            f"`labels` has {len(labels)} entries and `input_ids` {len(row['input_ids'])}; there must be one for each "
            "token."
        )
    for token, (label, token_id) in enumerate(zip(labels, row["input_ids"])):
        if label not in (-100, token_id):
            raise ValueError(
                f"`labels[{token}]` is {label} and `input_ids[{token}]` {token_id}: the row of a masked language "
                "model, whose teacher sees the tokens after a position. A causal student cannot learn from it. Score "
                "the text with a causal teacher."
            )
    return [label != -100 for label in labels]


def _read_typed(row: dict[str, Any]) -> ForeignRow:
    manifest = row.get("teacher_manifest")
    return ForeignRow(
        input_ids=row["input_ids"],
        trained=_trained_by_labels(row),
        token_ids=row["teacher_token_ids"],
        values=row["teacher_logprobs"],
        log_tail=row.get("teacher_log_tail"),
        log_tail_at=row.get("teacher_log_tail_at"),
        manifest=None if manifest is None else TeacherManifest.from_json(manifest),
    )


def _read_llama_405b(row: dict[str, Any]) -> ForeignRow:
    # The name says logits; the numbers are probabilities. The raw logits stand in `top_values`.
    mask = row.get("attention_mask")
    return ForeignRow(
        input_ids=row["input_ids"],
        trained=_trained_by_labels(row) if "labels" in row else _flags(mask),
        token_ids=row["token_ids"],
        values=row["normalized_logits"],
    )


def _token_id(entry: Any) -> int:
    """An id, or the N of a string `token_id:N`."""
    if isinstance(entry, str):
        prefix, _, number = entry.partition(":")
        if prefix != "token_id" or not number.isdecimal():
            raise ValueError(
                f"a candidate is the text {entry!r}; an id or 'token_id:N' is needed, because several ids may share "
                "one text. Ask the server for token ids (`return_tokens_as_token_ids` in vLLM)."
            )
        return int(number)
    return int(entry)


def _at_the_end(entries: list[Any], length: int) -> list[Any]:
    """Entries of the response alone, moved to the last tokens of the row."""
    if len(entries) > length:
        raise ValueError(
            f"the teacher's columns hold {len(entries)} entries for {length} tokens; there can be no more."
        )
    return [[]] * (length - len(entries)) + list(entries)


def _read_axolotl(row: dict[str, Any]) -> ForeignRow:
    length = len(row["input_ids"])
    token_ids = [[_token_id(entry) for entry in ids] for ids in row["target_token_ids"]]
    values = [list(entry) for entry in row["target_logprobs"]]
    if row.get("target_mask") is not None:
        kept = [[bool(flag) for flag in mask] for mask in row["target_mask"]]
        token_ids = [[i for i, flag in zip(*entry) if flag] for entry in zip(token_ids, kept)]
        values = [[v for v, flag in zip(*entry) if flag] for entry in zip(values, kept)]
    return ForeignRow(
        input_ids=row["input_ids"],
        trained=_trained_by_labels(row),
        token_ids=_at_the_end(token_ids, length),
        values=_at_the_end(values, length),
    )


def _read_chat_logprobs(row: dict[str, Any]) -> ForeignRow:
    content = row["logprobs"]["content"] if isinstance(row["logprobs"], dict) else row["logprobs"]
    candidates = [entry["top_logprobs"] for entry in content]
    length = len(row["input_ids"])
    return ForeignRow(
        input_ids=row["input_ids"],
        trained=_trained_by_labels(row),
        token_ids=_at_the_end([[_token_id(c["token"]) for c in entry] for entry in candidates], length),
        values=_at_the_end([[c["logprob"] for c in entry] for entry in candidates], length),
    )


def _read_nemo_aligner(row: dict[str, Any]) -> ForeignRow:
    tokens, labels = list(row["tokens"]), list(row["labels"])
    if tokens[1:] != labels[:-1]:
        raise ValueError(
            "`labels` is not `tokens` moved by one; this format stores labels already shifted. Import rows with "
            "unshifted labels as axolotl or typed columns."
        )
    mask = _flags(row.get("loss_mask")) or [True] * len(labels)
    normalizer = row.get("log_sum_exp_logits")
    return ForeignRow(
        input_ids=[*tokens, labels[-1]],
        trained=[False, *mask],
        token_ids=[*row["topk_token_ids"], []],
        values=[*row["topk_logits"], []],
        log_normalizer=None if normalizer is None else [*normalizer, 0.0],
    )


FORMATS: dict[str, ForeignFormat] = {
    "typed": ForeignFormat(
        frozenset({"input_ids", "teacher_token_ids", "teacher_logprobs"}), _read_typed, "logprob", "next", "vocabulary"
    ),
    "llama_405b_logits": ForeignFormat(
        frozenset({"input_ids", "token_ids", "normalized_logits", "top_values"}), _read_llama_405b, "probability"
    ),
    "axolotl": ForeignFormat(frozenset({"input_ids", "target_token_ids", "target_logprobs"}), _read_axolotl),
    "nemo_aligner": ForeignFormat(
        frozenset({"tokens", "labels", "topk_logits", "topk_token_ids"}), _read_nemo_aligner, "logit", "next"
    ),
    "chat_logprobs": ForeignFormat(
        frozenset({"input_ids", "logprobs"}), _read_chat_logprobs, "logprob", "same", "vocabulary"
    ),
}


def _refuse_unreadable(row: dict[str, Any]) -> None:
    """Refuse formats that hold no usable distribution, with the reason."""
    if {"compressed_logprobs", "bytepacked_indices"} & set(row):
        raise ValueError(
            "`dataset` is in DistillKit's compressed form (`compressed_logprobs`, `bytepacked_indices`): the widths, "
            "the polynomial and the number of exact entries stand only in the YAML of the capture, and the bytes fit "
            "many of them. Export it with DistillKit to ids and log-probabilities, or capture again."
        )
    for name in ("logprobs", "token_logprobs", "completion_logprobs", "sampled_logprobs", "prompt_logprobs"):
        values = row.get(name)
        if isinstance(values, Sequence) and not isinstance(values, str) and any(isinstance(v, float) for v in values):
            raise ValueError(
                f"`{name}` holds one number for each token, the log-probability of the sampled token alone: it says "
                "nothing of the other tokens, so there is no distribution to learn from. Capture again with several "
                "candidates a token."
            )


def detect_format(row: dict[str, Any]) -> str:
    """Name of the foreign format of a row, by its columns.

    Raises:
        `ValueError`: for a format that cannot be imported, with the reason, or one that is not known.
    """
    _refuse_unreadable(row)
    found = [name for name, form in FORMATS.items() if form.columns <= set(row)]
    if len(found) != 1:
        known = {name: sorted(form.columns) for name, form in FORMATS.items()}
        raise ValueError(
            f"`source`: the columns {sorted(row)} fit {found or 'no format'}; known formats and their columns are "
            f"{known}. Name the format, or rename the columns."
        )
    return found[0]


def import_teacher(
    dataset: AnyDataset,
    *,
    tokenizer: Any,
    teacher: str | None = None,
    source: str | None = None,
    value_kind: str | None = None,
    describes: str | None = None,
    normalizer: str | None = None,
    vocab_size: int | None = None,
    top_k: int | None = None,
    layout: str = "default",
    drop_leading: int = 0,
) -> AnyDataset:
    """Read a teacher signal in another format into a cached dataset.

    A token is trained if the foreign row trains it (`labels`, a loss mask; all tokens where there is neither) and the
    teacher has an entry for it. The mass outside the support is `1 - sum`, in double precision, unless the format
    stores it.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            The foreign dataset.
        tokenizer (`PreTrainedTokenizerBase`):
            The teacher's tokenizer.
        teacher (`str`, *optional*):
            Id of the teacher; needed unless the rows bring a manifest.
        source (`str`, *optional*):
            A name of `FORMATS`; by default told by the columns.
        value_kind (`str`, *optional*):
            `"logprob"`, `"probability"` or `"logit"`; by default fixed by the format or read off the data.
        describes (`str`, *optional*):
            `"next"` if entry `t` describes token `t + 1`, `"same"` if it describes token `t`; by default fixed by the
            format or read off the data (which reading finds the text among the teacher's candidates).
        normalizer (`str`, *optional*):
            `"vocabulary"` if the values are normalised over all tokens. `"support"` accepts values that are normalised
            over the support alone, or logits without their normaliser: the tail is then unknown and stored as empty;
            train on it with
            `tail="renormalize"`.
        vocab_size (`int`, *optional*):
            Number of token ids; by default the tokenizer's.
        top_k (`int`, *optional*):
            Keep the most likely entries only.
        layout (`str`):
            Layout of the blobs: `"default"`, `"compact"` or `"min_mass"`. Rows with a manifest keep theirs.
        drop_leading (`int`):
            Tokens to cut from the start of each row, a doubled begin-of-sequence token for one.

    Returns:
        A cached dataset.

    Raises:
        `ValueError`: for a format without a distribution, an ambiguous one, or a row that is none; the message names
        the row.
    """
    for name, value, choices in (
        ("source", source, FORMATS),
        ("value_kind", value_kind, VALUE_KINDS),
        ("describes", describes, DESCRIBES),
        ("normalizer", normalizer, NORMALIZERS),
    ):
        if value is not None and value not in choices:
            raise ValueError(f"`{name}` is {value!r}; it must be one of {list(choices)}. Choose one, or leave it out.")
    sample = list(islice(iter(dataset), SAMPLE_ROWS))
    if not sample:
        raise ValueError("`dataset` is empty; give at least one row.")
    _refuse_unreadable(sample[0])
    source = source or detect_format(sample[0])
    form = FORMATS[source]
    missing = sorted(form.columns - set(sample[0]))
    if missing:
        raise ValueError(f"`dataset` lacks the columns {missing} of format {source!r} (it has {sorted(sample[0])}).")
    rows = [_read(form, row, index) for index, row in enumerate(sample)]
    kind = value_kind or form.value_kind or _detect_value_kind(rows)
    shift = _resolve_shift(describes or form.describes, rows)
    over = _resolve_normalizer(normalizer or form.normalizer, kind, rows)
    size = vocab_size or len(tokenizer)
    if layout == "sampled":
        raise ValueError(
            "`layout` is 'sampled', which needs the full distribution; imported supports are cut. Choose another."
        )
    manifest = None
    if rows[0].manifest is None:
        if teacher is None:
            raise ValueError("`teacher` is missing; the rows do not say what made them. Give the teacher's id.")
        manifest = TeacherManifest(
            teacher=teacher,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            vocab_size=size,
            top_k=top_k or max((len(ids) for row in rows for ids in row.token_ids), default=1),
            layout=layout,
            min_mass=getattr(get_layout(layout), "mass", None),
            chat_template_hash=chat_template_hash(getattr(tokenizer, "chat_template", None)),
            source_format=source,
            value_kind=kind if over == "vocabulary" else f"{kind}, normalised over the support",
        )
    convert = _Converter(form, kind, shift, over, top_k, drop_leading, manifest)
    return dataset.map(convert, with_indices=True, remove_columns=list(sample[0]), features=FEATURES)


def join_sidecar(
    dataset: Dataset,
    sidecar: Dataset,
    *,
    key: str,
    token_ids: str = "token_ids",
    values: str = "logprobs",
    forced_entries: int = 1,
) -> Dataset:
    """Bring the teacher's columns of a second data set to the rows of the first, by row id.

    Args:
        dataset (`Dataset`):
            The tokens: `input_ids`, the key, and `labels` where there are any.
        sidecar (`Dataset`):
            The key and the teacher's candidates, in any order.
        key (`str`):
            Column that names a row, in both.
        token_ids, values (`str`):
            Columns of the sidecar, `[T][k]`.
        forced_entries (`int`):
            Entries beyond the teacher's best that were forced in (the true token, whatever its rank). As many of the
            least likely are dropped from each position: a support must not depend on the text.

    Returns:
        `Dataset` in the form `"axolotl"`, for [`import_teacher`].

    Raises:
        `ValueError`: for a row that the sidecar lacks or holds twice.
    """
    for name, columns, wanted in (
        ("dataset", dataset.column_names, [key, "input_ids"]),
        ("sidecar", sidecar.column_names, [key, token_ids, values]),
    ):
        missing = sorted(set(wanted) - set(columns))
        if missing:
            raise ValueError(f"`{name}` lacks the columns {missing} (it has {sorted(columns)}). Name the right ones.")
    places: dict[Any, int] = {}
    for place, row_key in enumerate(sidecar[key]):
        if row_key in places:
            raise ValueError(
                f"`sidecar` holds {key}={row_key!r} twice (rows {places[row_key]} and {place}); a row id must be "
                "unique. Drop one."
            )
        places[row_key] = place
    absent = [row_key for row_key in dataset[key] if row_key not in places]
    if absent:
        raise ValueError(
            f"`sidecar` lacks {len(absent)} of the {len(dataset)} rows, {key}={absent[0]!r} first; rows are never "
            "matched by their order. Filter the data set to the rows it holds."
        )

    def join(row: dict[str, Any]) -> dict[str, Any]:
        found = sidecar[places[row[key]]]
        ids, numbers = [], []
        for entry_ids, entry_values in zip(found[token_ids], found[values]):
            kept = sorted(zip(entry_values, entry_ids), reverse=True)
            kept = kept[: max(len(kept) - forced_entries, 0)]
            ids.append([token_id for _, token_id in kept])
            numbers.append([value for value, _ in kept])
        return {"target_token_ids": ids, "target_logprobs": numbers}

    return dataset.map(join)


def _read(form: ForeignFormat, row: dict[str, Any], index: int) -> ForeignRow:
    """A row read and checked; an error names it."""
    try:
        read = form.read(row)
        length = len(read.input_ids)
        if read.trained is not None and len(read.trained) != length:
            raise ValueError(
                f"the mask has {len(read.trained)} entries for {length} tokens; there must be one for each."
            )
        for name in ("token_ids", "values", "log_normalizer", "log_tail", "log_tail_at"):
            column = getattr(read, name)
            # An entry for each token but the last, which predicts nothing in the row.
            if column is not None and len(column) == length - 1:
                setattr(read, name, [*column, [] if name in ("token_ids", "values", "log_tail_at") else 0.0])
            elif column is not None and len(column) != length:
                raise ValueError(
                    f"the teacher's {name} has {len(column)} entries for {length} tokens; there must be one for each."
                )
        for token, (ids, values) in enumerate(zip(read.token_ids, read.values)):
            if len(ids) != len(values):
                raise ValueError(
                    f"token {token} has {len(ids)} candidates and {len(values)} values; they come in pairs."
                )
        return read
    except ValueError as error:
        raise ValueError(f"row {index} of `dataset`: {error}") from error


def _predicted(row: ForeignRow, shift: str) -> Iterable[tuple[int, int]]:
    """(token, entry that describes it) of each trained token with candidates."""
    for token in range(1, len(row.input_ids)):
        entry = token - 1 if shift == "next" else token
        if (row.trained is None or row.trained[token]) and len(row.token_ids[entry]):
            yield token, entry


def _entry_values(rows: list[ForeignRow]) -> list[np.ndarray]:
    entries = [np.asarray(values, np.float64) for row in rows for values in row.values if len(values)]
    return [entry[entry > _PADDING_BELOW] for entry in entries]


def _detect_value_kind(rows: list[ForeignRow]) -> str:
    entries = [entry for entry in _entry_values(rows) if len(entry)]
    if not entries:
        raise ValueError(
            "`value_kind` cannot be read off rows without candidates. Declare it: " + ", ".join(VALUE_KINDS)
        )
    largest = max(float(entry.max()) for entry in entries)
    smallest = min(float(entry.min()) for entry in entries)
    with np.errstate(over="ignore"):
        masses = np.array([np.exp(entry).sum() for entry in entries])
    sums = np.array([entry.sum() for entry in entries])
    if largest > _MASS_TOLERANCE:
        if smallest >= 0 and sums.max() <= 1 + _MASS_TOLERANCE:
            if max(map(len, entries)) > 1:
                return "probability"
            reading = "single numbers between 0 and 1 are probabilities or logits"
        else:
            return "logit"
    elif masses.max() > 1 + _MASS_TOLERANCE:
        return "logit"
    elif masses.mean() >= 0.2:
        return "logprob"
    else:
        reading = (
            f"negative numbers, exponentials of which sum to {masses.mean():.3g}, are log-probabilities or logits"
        )
    raise ValueError(f"`value_kind` cannot be told from the data: {reading}. Declare it: one of {list(VALUE_KINDS)}.")


def _agreement(rows: list[ForeignRow], shift: str) -> tuple[int, float]:
    """Tokens, and the share of them that are the best candidate of the entry said to describe them."""
    hits = [
        row.token_ids[entry][int(np.argmax(row.values[entry]))] == row.input_ids[token]
        for row in rows
        for token, entry in _predicted(row, shift)
    ]
    return len(hits), float(np.mean(hits)) if hits else 0.0


def _resolve_shift(declared: str | None, rows: list[ForeignRow]) -> str:
    found = {shift: _agreement(rows, shift) for shift in DESCRIBES}
    best = max(found, key=lambda shift: found[shift][1])
    other = DESCRIBES[1 - DESCRIBES.index(best)]
    (count, rate), (_, other_rate) = found[best], found[other]
    # Three standard errors of a share, and twice the other: the right reading finds the text often, the wrong one not.
    certain = count > 0 and rate - other_rate > 3 * 0.5 / math.sqrt(count) and rate > 2 * other_rate
    rates = (
        f"the teacher's best candidate is the text at {found['next'][1]:.1%} of the tokens if entries describe the "
        f"next token and at {found['same'][1]:.1%} if they describe their own"
    )
    if declared is None and not certain:
        raise ValueError(
            f"`describes` cannot be told from the data ({count} tokens): {rates}. Declare it: one of "
            f"{list(DESCRIBES)}."
        )
    if declared is not None and certain and best != declared:
        raise ValueError(f"`describes` is {declared!r}, but {rates}. Declare {best!r}, or check the columns.")
    return declared or best


def _resolve_normalizer(declared: str | None, kind: str, rows: list[ForeignRow]) -> str:
    if kind == "logit":
        if declared is None and any(row.log_normalizer is None for row in rows):
            raise ValueError(
                "`normalizer`: logits without their log-sum-exp over the vocabulary leave the mass outside the "
                "support unknown. Pass normalizer='support' to normalise over the support (and train with "
                "tail='renormalize'), or bring the normaliser."
            )
        if declared == "vocabulary" and any(row.log_normalizer is None for row in rows):
            raise ValueError(
                "`normalizer` is 'vocabulary', but the rows hold no log-sum-exp of their logits. Bring it, or use "
                "'support'."
            )
        return declared or "vocabulary"
    if declared is not None:
        return declared
    entries = [entry for entry in _entry_values(rows) if len(entry)]
    sums = np.array([entry.sum() if kind == "probability" else np.exp(entry).sum() for entry in entries])
    if len(sums) and float((np.abs(sums - 1) <= _UNIT_TOLERANCE).mean()) > 0.95:
        raise ValueError(
            "`normalizer`: the candidates of nearly every token sum to 1, so they were normalised over the support "
            "and the mass outside it is lost. Pass normalizer='support' to accept that (and train with "
            "tail='renormalize'), or 'vocabulary' if the teacher really was that sure."
        )
    return "vocabulary"


@dataclass
class _Converter:
    """A foreign row to a cached one."""

    form: ForeignFormat
    kind: str
    shift: str
    over: str
    top_k: int | None
    drop_leading: int
    manifest: TeacherManifest | None

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        read = _read(self.form, row, index)
        manifest = self.manifest or read.manifest
        pairs = list(_predicted(read, self.shift))
        labels, blobs = [-100] * len(read.input_ids), [b""] * len(read.input_ids)
        if pairs:
            try:
                teacher = self._signal(read, [entry for _, entry in pairs], manifest)
                encoded = encode_topk(teacher, vocab_size=manifest.vocab_size, layout=_layout_of(manifest))
            except ValueError as error:
                raise ValueError(
                    f"row {index} of `dataset`, among its {len(pairs)} trained tokens: {error}"
                ) from error
            for (token, _), blob in zip(pairs, encoded):
                # A position whose candidates are all padding has no teacher and is not trained.
                if blob:
                    blobs[token - 1], labels[token] = blob, read.input_ids[token]
        cut = self.drop_leading
        labels[: cut + 1] = [-100] * len(labels[: cut + 1])  # nothing predicts the first token that is kept
        return {
            "input_ids": read.input_ids[cut:],
            "labels": labels[cut:],
            "teacher_topk": blobs[cut:],
            "teacher_manifest": manifest.to_json(),
        }

    def _as_logprobs(self, values: np.ndarray) -> np.ndarray:
        """Logarithms of probabilities; log-probabilities and logits as they are."""
        if self.kind != "probability":
            return values
        if (values < 0).any():
            raise ValueError(f"a probability is {values.min()}; they lie in 0..1. Declare another `value_kind`.")
        return np.log(values, out=np.full_like(values, -np.inf), where=values != 0)

    def _signal(self, read: ForeignRow, entries: list[int], manifest: TeacherManifest) -> TeacherTopK:
        width = max(len(read.token_ids[entry]) for entry in entries)
        token_ids = np.zeros((len(entries), width), np.int64)
        logprobs = np.full((len(entries), width), -np.inf)
        for place, entry in enumerate(entries):
            ids, values = _without_repeats(read.token_ids[entry], read.values[entry])
            token_ids[place, : len(ids)], logprobs[place, : len(ids)] = ids, self._as_logprobs(np.array(values))
        if self.kind == "logit" and self.over == "vocabulary":
            logprobs -= np.asarray([read.log_normalizer[entry] for entry in entries], np.float64)[:, None]
        values = torch.from_numpy(logprobs)
        stored = read.log_tail is not None and all(read.log_tail[entry] is not None for entry in entries)
        if self.over == "support":
            total = values.logsumexp(-1, keepdim=True)
            values = torch.where(total > -torch.inf, values - total, values)
            log_tail = torch.full((len(entries),), -torch.inf, dtype=torch.float64)
        elif stored:
            log_tail = torch.tensor([read.log_tail[entry] for entry in entries], dtype=torch.float64)
        else:
            rest = 1 - values.exp().sum(-1)
            log_tail = torch.where(rest > 1e-9, rest.clamp(min=1e-9).log(), -torch.inf)
        # Where every candidate is padding the teacher is absent, not certain.
        log_tail = torch.where(values.isneginf().all(-1), 0.0, log_tail)
        at = None
        if manifest.tail_temperatures and read.log_tail_at is not None:
            at = torch.tensor([list(read.log_tail_at[entry]) for entry in entries], dtype=torch.float64)
        teacher = TeacherTopK(
            torch.from_numpy(token_ids), values, log_tail, at, manifest.tail_temperatures if at is not None else ()
        )
        return teacher if self.top_k is None else teacher.narrow(self.top_k)


def _without_repeats(ids: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Candidates with each id once; an id that is listed twice with one value is merged."""
    kept: dict[int, float] = {}
    for token_id, value in zip(ids, values):
        if value is None or value < _PADDING_BELOW:
            continue
        if token_id in kept and abs(kept[token_id] - value) > 1e-3 * max(1.0, abs(value)):
            raise ValueError(
                f"token id {token_id} is listed twice, with {kept[token_id]} and {value}; a support lists each token "
                "once. Drop one."
            )
        kept.setdefault(int(token_id), float(value))
    return list(kept), list(kept.values())


def _layout_of(manifest: TeacherManifest) -> Layout:
    """The layout a manifest names, with its parameters."""
    if manifest.layout == "sampled" and manifest.draws is not None:
        return SampledLayout(manifest.draws)
    if manifest.layout == "min_mass" and manifest.min_mass is not None:
        return MinMassLayout(manifest.min_mass)
    return get_layout(manifest.layout)
