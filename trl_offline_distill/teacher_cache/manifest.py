"""What made a cached teacher signal, and whether a student can learn from it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any


FORMAT_VERSION = 1


@dataclass(frozen=True)
class TeacherManifest:
    """What made the signal of a row; the same on every row of one capture.

    Args:
        teacher (`str`): Id or path of the teacher.
        tokenizer_fingerprint (`str`): See [`tokenizer_fingerprint`].
        vocab_size (`int`):
            Number of token ids the teacher's distribution is over: every cached id is below it, and a student's head
            needs as many rows.
        top_k (`int`): Largest support of a position.
        layout (`str`): Name of the blob layout.
        min_mass (`float`, *optional*): Mass at which a support stops.
        draws (`int`, *optional*): Draws a position, for a sampled support.
        seed (`int`, *optional*): Seed of the draws or of the teacher's completions.
        tail_temperatures (`tuple[float, ...]`): Temperatures at which the tail was cached, beside 1.
        teacher_revision, chat_template_hash, engine, dtype, attn_implementation (`str`, *optional*):
            The weights, the template and the way the teacher was run.
        dataset, dataset_revision, dataset_split (`str`, *optional*): The text.
        package_version (`str`, *optional*): Version of this package.
        template_date (`str`, *optional*): Date given to a template that prints one.
        source_format (`str`, *optional*): The foreign format the signal was imported from.
        value_kind (`str`, *optional*): What the foreign values were (`"logprob"`, `"probability"`, `"logit"`).
        format_version (`int`): Version of the cache format.
    """

    teacher: str
    tokenizer_fingerprint: str
    vocab_size: int
    top_k: int
    layout: str = "default"
    min_mass: float | None = None
    draws: int | None = None
    seed: int | None = None
    tail_temperatures: tuple[float, ...] = ()
    teacher_revision: str | None = None
    chat_template_hash: str | None = None
    engine: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    dataset: str | None = None
    dataset_revision: str | None = None
    dataset_split: str | None = None
    package_version: str | None = None
    template_date: str | None = None
    source_format: str | None = None
    value_kind: str | None = None
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Canonical JSON: the same manifest is always the same string. Fields that are None are left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(known, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> "TeacherManifest":
        """Read a manifest back.

        Raises:
            `ValueError`: if `text` is no manifest, or one of a format this version does not know.
        """
        try:
            found = json.loads(text)
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"`teacher_manifest` is {text!r:.80}; it must be the JSON text that the capture wrote on every row. "
                "Rebuild the cache, or load the column as it was stored."
            ) from error
        if not isinstance(found, dict) or found.get("format_version") != FORMAT_VERSION:
            version = found.get("format_version") if isinstance(found, dict) else None
            raise ValueError(
                f"`teacher_manifest` has format_version {version!r}; this version of the package reads "
                f"{FORMAT_VERSION}. Install the version that wrote the cache, or rebuild it."
            )
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(found) - names)
        missing = sorted({"teacher", "tokenizer_fingerprint", "vocab_size", "top_k"} - set(found))
        if unknown or missing:
            raise ValueError(
                f"`teacher_manifest` has unknown fields {unknown} and lacks {missing}; format_version "
                f"{FORMAT_VERSION} fixes the fields. Install the version that wrote the cache, or rebuild it."
            )
        return cls(**{**found, "tail_temperatures": tuple(found.get("tail_temperatures", ()))})

    def differences(self, other: "TeacherManifest") -> dict[str, tuple[Any, Any]]:
        """Fields in which two manifests differ, each with both values."""
        mine, theirs = asdict(self), asdict(other)
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what an id means: ids to tokens, and which ids are special.

    Which special token plays the role of padding or of the end is left out: a student may choose its own without any
    cached id changing its meaning.

    Args:
        tokenizer (`PreTrainedTokenizerBase` or a processor that holds one):
            The tokenizer.

    Returns:
        `str` of 32 hexadecimal digits.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    vocabulary = sorted((int(token_id), token) for token, token_id in tokenizer.get_vocab().items())
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = sorted(int(token_id) for token_id, token in added.items() if token.special)
    return _digest({"vocabulary": vocabulary, "special": special})


def chat_template_hash(chat_template: str | dict | None) -> str | None:
    """A hash of a chat template; None where there is none."""
    return None if chat_template is None else _digest(chat_template)


def check_student(
    manifests: TeacherManifest | Iterable[TeacherManifest],
    *,
    tokenizer: Any = None,
    head_rows: int | None = None,
) -> None:
    """Refuse a student that gives cached ids another meaning, or has no logit for some of them.

    Args:
        manifests ([`TeacherManifest`] or several):
            The manifests met in the cache. Several teachers may be mixed if they share a tokenizer.
        tokenizer (*optional*):
            The student's tokenizer.
        head_rows (`int`, *optional*):
            Rows of the student's head. A head wider than the teacher's vocabulary is fine.

    Raises:
        `ValueError`: naming both sides.
    """
    met = [manifests] if isinstance(manifests, TeacherManifest) else list(manifests)
    if not met:
        raise ValueError("`teacher_manifest`: no manifest was met; every cached row carries one. Rebuild the cache.")
    first = met[0]
    for other in met[1:]:
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise ValueError(
                f"`teacher_manifest`: the teachers {first.teacher!r} (tokenizer {first.tokenizer_fingerprint}) and "
                f"{other.teacher!r} (tokenizer {other.tokenizer_fingerprint}) use different tokenizers; rows of one "
                "data set must share one. Train on them separately."
            )
    if tokenizer is not None:
        own = tokenizer_fingerprint(tokenizer)
        if own != first.tokenizer_fingerprint:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ValueError(
                f"`processing_class`: the student's tokenizer {name!r} (fingerprint {own}, {len(tokenizer)} tokens) "
                f"is not the one the teacher {first.teacher!r} was cached with (fingerprint "
                f"{first.tokenizer_fingerprint}, ids below {first.vocab_size}); cached ids would mean other tokens. "
                "Use a student with the teacher's tokenizer, or capture again with a teacher that shares the "
                "student's."
            )
    for manifest in met:
        if head_rows is not None and head_rows < manifest.vocab_size:
            raise ValueError(
                f"`model`: the student's head has {head_rows} rows, and the cache of {manifest.teacher!r} holds ids "
                f"below vocab_size={manifest.vocab_size}; each cached id needs a row. Use a student with as many "
                "rows, or capture again with a vocabulary cut to the tokenizer's tokens."
            )
