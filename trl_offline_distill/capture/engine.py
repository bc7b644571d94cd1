"""What the dataset builder asks of a teacher, whatever runs it. One engine is one file; all pass one contract test."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..teacher_cache.codecs import LAYOUTS, Layout
from ..teacher_cache.topk import TeacherTopK


@dataclass
class TokenRow:
    """One row to score.

    Attributes:
        input_ids: token ids, as the teacher sees them.
        positions: ascending positions `t` whose next token is wanted, each below `len(input_ids) - 1`.
        source_row: number of the row in the source dataset, for error messages and sampling.
    """

    input_ids: Sequence[int]
    positions: Sequence[int]
    source_row: int


@dataclass(frozen=True)
class ScoreRequest:
    """What is kept of the teacher's distribution.

    Attributes:
        top_k: support size K.
        tail_temperatures: temperatures other than 1 at which the tail's log-sum is wanted.
        layout: how a position is stored; the sampled one draws its support from the whole distribution.
        seed: seed of the sampled layout.
        token_mask_size: ids from here on are no tokens of the tokenizer (padded head rows) and are never emitted.
        missing_ids: ids below it that the tokenizer does not have.
    """

    top_k: int
    tail_temperatures: tuple[float, ...] = ()
    layout: Layout = LAYOUTS["default"]
    seed: int = 0
    token_mask_size: int | None = None
    missing_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationOptions:
    """How the teacher writes completions for rows that have none.

    Attributes:
        max_new_tokens: longest completion in tokens.
        temperature: 0 takes the most likely token; above 0 samples.
        top_p: sample from the smallest set of tokens with this mass.
        top_k: sample from this many tokens; 0 for all.
        seed: seed of the sampling. Equal inputs and equal seeds give equal completions with the transformers engine.
    """

    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
        ):
            if not holds:
                raise ValueError(f"`generation` has {name}={getattr(self, name)}; it must be {rule}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TeacherDescription:
    """What the manifest says of the teacher.

    Attributes:
        teacher: model id or path name.
        revision: commit of the Hub repository, or `None`.
        fingerprint: changes when the weights change; `None` where an engine cannot see them.
        engine: engine name with the version of what runs it.
        dtype: dtype of the weights.
        attn_implementation: attention implementation, where known.
        options: anything else that may change the numbers.
    """

    teacher: str
    engine: str
    revision: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class RowTooLongError(ValueError):
    """A row that the engine cannot take; `source_row` names it."""

    def __init__(self, message: str, source_row: int) -> None:
        super().__init__(message)
        self.source_row = source_row


class TeacherUnavailableError(RuntimeError):
    """The teacher stopped answering; finished work is kept and the build can be resumed."""


@runtime_checkable
class TeacherEngine(Protocol):
    """Scores token rows.

    Attributes:
        full_distribution: the engine sees the whole distribution, so it can provide tail log-sums at other
            temperatures and samples. A served teacher sees only the K most likely tokens.
        max_length: longest row in tokens, or `None`.
        max_top_k: largest K, or `None`.
    """

    full_distribution: bool
    max_length: int | None
    max_top_k: int | None

    def describe(self) -> TeacherDescription:
        """What the manifest says of this teacher. May be called before `load`; costs no forward pass."""

    def load(self) -> None:
        """Makes the teacher ready. Called once, and only if there is something to score."""

    def score(self, rows: Sequence[TokenRow], request: ScoreRequest) -> Iterator[tuple[int, TeacherTopK]]:
        """Yields `(index into rows, signal of its positions [len(positions), K] on CPU)`, each row once, any order.

        Entry `i` describes the token at `positions[i] + 1`. A row alone gives what it gives among others, up to the
        rounding of the teacher's own arithmetic.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], source_rows: Sequence[int], options: GenerationOptions
    ) -> list[list[int]]:
        """Completions without their prompts, ended by an end-of-sequence token unless `max_new_tokens` cut them."""

    def close(self) -> None:
        """Gives back what `load` took and restores what it changed."""


def length_sorted_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of at most `batch_tokens` padded tokens, longest first; a longer row goes alone.

    Ties keep their order, so equal lengths give equal batches.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
