"""One blob for each token: how a teacher's support and tail become bytes, and back.

A blob describes itself; numbers are little-endian. Byte 0 holds the format of the values (high half) and a small
argument of that format (low half), byte 1 the width of an id in bits. The number of entries K follows from the blob's
length.

| format | argument | after the header |
|---|---|---|
| 1 ranked | number M of extra temperatures | temperatures, tail, K fp16 log-probabilities, ids |
| 2 compact | number M of extra temperatures | temperatures, tail, 12 fp16, last fp16, K - 12 codes of 8 bits, ids |
| 3 sampled | width of a count in bits | counts, ids |

Temperatures are M thousandths (uint16), the tail is 1 + M fp16: `log_tail`, then `log_tail_at`. Entries are in
descending order of their value, so a reader may keep fewer. Integers of w bits (ids, counts) are split into planes of
16, 8, 4, 2 and 1 bits, one for each bit set in w, low bits first: 18 bits are K uint16 and then K pairs of bits. A
plane fills whole bytes. An empty blob stands for a position without a teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .topk import TeacherTopK


HEADER_BYTES = 2
MAX_ID_BITS = 31
MAX_EXTRA_TEMPERATURES = 15
_PLANE_BITS = (16, 8, 4, 2, 1)
# Log-probabilities that went through fp16 may sum to a little more than 1; raw bf16 logits overshoot by far more.
_MASS_TOLERANCE = 1e-2
_ABSENT_KEY = np.iinfo(np.int64).max


def id_bits(vocab_size: int) -> int:
    """Bits that the ids `0 .. vocab_size - 1` need."""
    return max(1, int(vocab_size - 1).bit_length())


def _plane_widths(bits: int) -> list[int]:
    return [width for width in _PLANE_BITS if bits & width]


def _plane_bytes(count: int, bits: int) -> int:
    return sum(-(-count * width // 8) for width in _plane_widths(bits))


def _pack_integers(values: np.ndarray, bits: int) -> np.ndarray:
    """`values` `[n, K]` below `2**bits` -> `[n, _plane_bytes(K, bits)]` uint8."""
    rows, count = values.shape
    planes, shift = [], 0
    for width in _plane_widths(bits):
        part = (values >> shift) & ((1 << width) - 1)
        shift += width
        if width >= 8:
            planes.append(np.ascontiguousarray(part, dtype=f"<u{width // 8}").view(np.uint8).reshape(rows, -1))
            continue
        per_byte = 8 // width
        padded = np.zeros((rows, -(-count // per_byte) * per_byte), np.uint8)
        padded[:, :count] = part
        padded = padded.reshape(rows, -1, per_byte)
        planes.append(np.bitwise_or.reduce(padded << (np.arange(per_byte, dtype=np.uint8) * width), axis=-1))
    return np.concatenate(planes, axis=1)


@cache
def _byte_table(width: int) -> np.ndarray:
    """`[256]`: the `8 // width` values packed in each byte, one uint8 each, side by side in one integer."""
    shifts = np.arange(8 // width, dtype=np.uint8) * np.uint8(width)
    values = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << width) - 1)
    return values.view(f"<u{8 // width}").reshape(256)


def _unpack_integers(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """`packed` `[n, _plane_bytes(count, bits)]` uint8 -> `[n, count]` int32."""
    values, start, shift = None, 0, 0
    for width in _plane_widths(bits):
        stop = start + -(-count * width // 8)
        plane = np.ascontiguousarray(packed[:, start:stop])
        if width >= 8:
            part = plane.view(f"<u{width // 8}")
        else:
            part = _byte_table(width).take(plane).view(np.uint8)[:, :count]
        if values is None:
            values = part.astype(np.int32)
        else:
            values |= np.left_shift(part, np.int32(shift), dtype=np.int32)
        start, shift = stop, shift + width
    return values


def _to_fp16(values: np.ndarray) -> np.ndarray:
    """Round to fp16; a finite value stays finite, however small."""
    largest = np.finfo(np.float16).max
    return np.where(np.isinf(values), values, np.clip(values, -largest, largest)).astype("<f2")


def _from_fp16(packed: np.ndarray) -> Tensor:
    """`[n, 2 * K]` uint8 -> `[n, K]` float32."""
    # A copy: a slice of one row counts as contiguous with the strides of the whole row, which torch refuses
    return torch.from_numpy(np.array(packed, order="C").view(np.float16)).float()


@dataclass
class _Rows:
    """Rows with the same number of present entries, sorted, on their way to bytes."""

    token_ids: np.ndarray  # [n, K] int64
    logprobs: np.ndarray  # [n, K] float32 that fp16 holds exactly, descending
    tail: np.ndarray  # [n, 1 + M]: log_tail, log_tail_at
    temperatures: tuple[float, ...]


class Layout(Protocol):
    """How one row becomes bytes. `format_code` is the high half of the first byte."""

    format_code: int

    def keep(self, teacher: TeacherTopK) -> TeacherTopK:
        """What of the signal this layout stores; refuses a signal it cannot store."""

    def select(
        self,
        logprobs: Tensor,
        top_k: int,
        tail_temperatures: tuple[float, ...],
        seed: int,
        row_keys: Tensor | None,
    ) -> TeacherTopK:
        """The support to store, from full log-probabilities `[n, V]`."""

    def header_bytes(self, argument: int) -> int:
        """Length of what blobs must share to be decoded together."""

    def blob_bytes(self, argument: int, bits: int, count: int) -> int:
        """Length of a blob with `count` entries; never falls with `count`. A reader takes the largest that fits."""

    def encode_rows(self, rows: _Rows, bits: int) -> list[bytes]:
        """One blob for each row."""

    def decode_rows(self, packed: np.ndarray, argument: int, bits: int, count: int) -> TeacherTopK:
        """`packed` `[n, blob_bytes]` uint8 with one header -> `[n, count]` entries."""


def topk_from_logprobs(logprobs: Tensor, top_k: int, tail_temperatures: Sequence[float] = ()) -> TeacherTopK:
    """The `top_k` most likely tokens of full log-probabilities and the tail's own log-sums.

    Args:
        logprobs (`Tensor`, `[n, V]`):
            Natural log-probabilities under the full vocabulary, fp32 or better.
        top_k (`int`):
            Size of the support; the whole vocabulary if that is smaller.
        tail_temperatures (`Sequence[float]`):
            Temperatures other than 1 at which the tail's `log sum exp(logprob / T)` is wanted.

    Returns:
        `TeacherTopK` of `[n, min(top_k, V)]`, descending.
    """
    values, token_ids = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    rest = logprobs.scatter(-1, token_ids, -torch.inf)
    at = [torch.logsumexp(rest / temperature, -1) for temperature in tail_temperatures]
    return TeacherTopK(
        token_ids=token_ids,
        logprobs=values,
        log_tail=torch.logsumexp(rest, -1),
        log_tail_at=torch.stack(at, -1) if at else None,
        tail_temperatures=tuple(tail_temperatures),
        vocab_size=logprobs.shape[-1],
    )


class _TopKLayout:
    """Shared by the layouts that store a top-K support and its tail; the values are left to the subclass."""

    format_code: int

    def keep(self, teacher: TeacherTopK) -> TeacherTopK:
        return teacher

    def select(
        self,
        logprobs: Tensor,
        top_k: int,
        tail_temperatures: tuple[float, ...],
        seed: int,
        row_keys: Tensor | None,
    ) -> TeacherTopK:
        return self.keep(topk_from_logprobs(logprobs, top_k, tail_temperatures))

    def value_bytes(self, count: int) -> int:
        """Bytes that `count` log-probabilities take."""
        return 2 * count

    def pack_values(self, logprobs: np.ndarray) -> np.ndarray:
        """`[n, K]` descending -> `[n, value_bytes(K)]` uint8."""
        return _to_fp16(logprobs).view(np.uint8)

    def unpack_values(self, packed: np.ndarray, count: int) -> Tensor:
        """`[n, value_bytes(count)]` uint8 -> `[n, count]` float32, descending."""
        return _from_fp16(packed)

    def header_bytes(self, argument: int) -> int:
        return HEADER_BYTES + 2 * argument

    def blob_bytes(self, argument: int, bits: int, count: int) -> int:
        return HEADER_BYTES + 2 + 4 * argument + self.value_bytes(count) + _plane_bytes(count, bits)

    def encode_rows(self, rows: _Rows, bits: int) -> list[bytes]:
        count = len(rows.token_ids)
        header = np.empty((count, HEADER_BYTES + 2 * len(rows.temperatures)), np.uint8)
        header[:, 0] = self.format_code << 4 | len(rows.temperatures)
        header[:, 1] = bits
        header[:, HEADER_BYTES:] = np.array([round(1000 * t) for t in rows.temperatures], "<u2").view(np.uint8)
        tail = np.ascontiguousarray(_to_fp16(rows.tail)).view(np.uint8)
        values = self.pack_values(np.ascontiguousarray(rows.logprobs))
        return _split(np.concatenate([header, tail, values, _pack_integers(rows.token_ids, bits)], axis=1))

    def decode_rows(self, packed: np.ndarray, argument: int, bits: int, count: int) -> TeacherTopK:
        tail_start = self.header_bytes(argument)
        temperatures = packed[0, HEADER_BYTES:tail_start].copy().view("<u2")
        value_start = tail_start + 2 + 2 * argument
        id_start = value_start + self.value_bytes(count)
        tail = _from_fp16(packed[:, tail_start:value_start])
        return TeacherTopK(
            token_ids=torch.from_numpy(_unpack_integers(packed[:, id_start:], count, bits)),
            logprobs=self.unpack_values(packed[:, value_start:id_start], count),
            log_tail=tail[:, 0],
            log_tail_at=tail[:, 1:] if argument else None,
            tail_temperatures=tuple(int(thousandths) / 1000 for thousandths in temperatures),
        )


class RankedLayout(_TopKLayout):
    """The default: fp16 log-probabilities in descending order. 429 bytes at K = 100 and ids of 18 bits."""

    format_code = 1


class CompactLayout(_TopKLayout):
    """The first 12 log-probabilities in fp16, the others in 8 bits down to the last. 343 bytes at K = 100.

    The codes divide `1 - exp(-x / 4)` evenly, where `x` is the distance from the 12th value: steps grow with the
    distance, as the probability that an error there would move shrinks. `benchmarks/cache_layouts.py` measures what
    that costs.
    """

    format_code = 2
    exact = 12
    curve = 0.25

    def value_bytes(self, count: int) -> int:
        return 2 * count if count <= self.exact else 2 * self.exact + 2 + count - self.exact

    def pack_values(self, logprobs: np.ndarray) -> np.ndarray:
        if logprobs.shape[1] <= self.exact:
            return super().pack_values(logprobs)
        exact, rest = logprobs[:, : self.exact], logprobs[:, self.exact :]
        top, last = exact[:, -1:], rest[:, -1:]
        span = np.maximum(-np.expm1(self.curve * (last - top)), np.finfo(np.float32).tiny)
        codes = np.rint(-255 * np.expm1(self.curve * (rest - top)) / span).astype(np.uint8)
        edges = _to_fp16(np.concatenate([exact, last], axis=1)).view(np.uint8)
        return np.concatenate([edges, codes], axis=1)

    def unpack_values(self, packed: np.ndarray, count: int) -> Tensor:
        if count <= self.exact:
            return super().unpack_values(packed, count)
        edges = _from_fp16(packed[:, : 2 * self.exact + 2])
        top, last = edges[:, -2:-1], edges[:, -1:]
        codes = torch.from_numpy(packed[:, 2 * self.exact + 2 :].astype(np.float32))
        rest = codes.mul_(torch.expm1(self.curve * (last - top)) / 255).log1p_().div_(self.curve).add_(top)
        # Over a very wide range the last code rounds to a distance without end.
        return torch.cat([edges[:, :-1], torch.maximum(rest, last)], dim=1)


class MinMassLayout(RankedLayout):
    """The default, each support cut where it holds a mass of `mass`, never below `min_k` entries.

    Args:
        mass (`float`): Mass of the full vocabulary at which a support stops, in (0, 1].
        min_k (`int`): Smallest support, at least 1.
        step (`int`):
            A support is cut at a multiple of this many entries. Rows of one length are read in one go, so a few more
            entries than the mass needs make a batch faster to read.
    """

    def __init__(self, mass: float = 0.999, min_k: int = 8, step: int = 4) -> None:
        if not 0 < mass <= 1:
            raise ValueError(f"`mass` is {mass}; it must lie in (0, 1]. Give the part of the mass to keep, 0.999 say.")
        if min_k < 1:
            raise ValueError(f"`min_k` is {min_k}; it must be at least 1. A support holds one token or more.")
        if step < 1:
            raise ValueError(
                f"`step` is {step}; it must be at least 1. With 1 each support stops at the mass exactly."
            )
        self.mass, self.min_k, self.step = mass, min_k, step

    def keep(self, teacher: TeacherTopK) -> TeacherTopK:
        logprobs, order = teacher.logprobs.sort(dim=-1, descending=True, stable=True)
        before = logprobs.double().exp().cumsum(-1) - logprobs.double().exp()  # mass in front of each entry
        starts = torch.arange(logprobs.shape[-1], device=logprobs.device) // self.step * self.step
        dropped = before[..., starts] >= self.mass
        dropped[..., : self.min_k] = False
        moved = logprobs.masked_fill(~dropped, -torch.inf)
        log_tail_at = teacher.log_tail_at
        if log_tail_at is not None:
            sums = [torch.logsumexp(moved / temperature, -1) for temperature in teacher.tail_temperatures]
            log_tail_at = torch.logaddexp(log_tail_at, torch.stack(sums, -1)) if sums else log_tail_at
        return replace(
            teacher,
            token_ids=teacher.token_ids.gather(-1, order),
            logprobs=logprobs.masked_fill(dropped, -torch.inf),
            log_tail=torch.logaddexp(teacher.log_tail, torch.logsumexp(moved, -1)),
            log_tail_at=log_tail_at,
        )


class SampledLayout:
    """Ids drawn from the teacher's full distribution, with the number of times each was drawn. No tail.

    With `draws` draws of which `c` hit a token, the token's weight is `c / draws`. Its expectation is the token's
    probability, so the gradient of the forward KL to these weights is, in expectation, the gradient to the full
    teacher (importance sampling with the teacher as the proposal, arXiv 2503.16870). The draws of a position are
    spread evenly over its cumulative distribution behind one random offset: a token of probability `p` is hit
    `floor(draws * p)` or `ceil(draws * p)` times, which is unbiased and varies less than independent draws.

    The weights are a sample, not log-probabilities: they serve the forward KL at temperature 1 and nothing else.

    Args:
        draws (`int`): Draws a position, 1 to 255.
    """

    format_code = 3

    def __init__(self, draws: int = 24) -> None:
        if not 1 <= draws <= 255:
            raise ValueError(f"`draws` is {draws}; it must lie in 1..255. A count is stored in 8 bits at most.")
        self.draws = draws

    def keep(self, teacher: TeacherTopK) -> TeacherTopK:
        counts = self._counts(teacher.logprobs)
        weights = teacher.logprobs.exp() * self.draws
        drawn = ((weights - counts).abs() <= 0.25).all(-1) & (counts.sum(-1) == self.draws)
        if teacher.tail_temperatures or not bool((drawn & teacher.log_tail.isneginf()).all()):
            raise ValueError(
                f"`teacher` is no sample of {self.draws} draws; layout 'sampled' stores logprobs = log(count / draws) "
                "with an empty tail, which only the full distribution can give. Make it with "
                "`select_support(logprobs, "
                'layout="sampled", row_keys=...)`, or choose another layout for a top-K signal.'
            )
        return teacher

    def _counts(self, logprobs: Tensor) -> Tensor:
        return (logprobs.exp() * self.draws).round()

    def select(
        self,
        logprobs: Tensor,
        top_k: int,
        tail_temperatures: tuple[float, ...],
        seed: int,
        row_keys: Tensor | None,
    ) -> TeacherTopK:
        if tail_temperatures:
            raise ValueError(
                f"`tail_temperatures` is {tail_temperatures}; layout 'sampled' has no tail and serves temperature 1 "
                "alone. Leave them out or choose another layout."
            )
        if row_keys is None or row_keys.shape != logprobs.shape[:1]:
            found = None if row_keys is None else tuple(row_keys.shape)
            raise ValueError(
                f"`row_keys` has shape {found}; layout 'sampled' needs one integer for each of the {len(logprobs)} "
                "positions, so that a position is drawn alike in every run. Give row index and token index mixed into "
                "one number."
            )
        offsets = torch.from_numpy(_uniform(row_keys.cpu().numpy(), seed)).to(logprobs.device)
        steps = torch.arange(self.draws, device=logprobs.device, dtype=torch.float64)
        quantiles = (steps + offsets[:, None]) / self.draws  # [n, draws], ascending, in (0, 1)
        hits = torch.empty(quantiles.shape, dtype=torch.int64, device=logprobs.device)
        # fp64 sums of a few rows at a time: at most 32 MiB beside the chunk.
        block = max(1, 2**22 // logprobs.shape[1])
        for start in range(0, len(logprobs), block):
            mass = logprobs[start : start + block].double().exp().cumsum(-1)
            targets = quantiles[start : start + block] * mass[:, -1:]
            hits[start : start + block] = torch.searchsorted(mass, targets, right=True)
        # Hits ascend: a token drawn more than once is a run.
        first = torch.ones_like(hits, dtype=torch.bool)
        first[:, 1:] = hits[:, 1:] != hits[:, :-1]
        slot = first.cumsum(-1) - 1
        counts = torch.zeros_like(quantiles).scatter_add_(-1, slot, torch.ones_like(quantiles))
        token_ids = torch.zeros_like(hits).scatter_(-1, slot, hits)
        width = int(slot.max()) + 1 if len(slot) else 1
        return TeacherTopK(
            token_ids=token_ids[:, :width],
            logprobs=(counts[:, :width] / self.draws).log().float(),
            log_tail=logprobs.new_full((len(logprobs),), -torch.inf, dtype=torch.float32),
            vocab_size=logprobs.shape[1],
        )

    def header_bytes(self, argument: int) -> int:
        return HEADER_BYTES

    def blob_bytes(self, argument: int, bits: int, count: int) -> int:
        return HEADER_BYTES + _plane_bytes(count, argument) + _plane_bytes(count, bits)

    def encode_rows(self, rows: _Rows, bits: int) -> list[bytes]:
        counts = self._counts(torch.from_numpy(rows.logprobs)).long().numpy()
        # One width for all rows, though most counts are small: rows of one length are read in one go.
        width = self.draws.bit_length()
        header = np.empty((len(counts), HEADER_BYTES), np.uint8)
        header[:] = self.format_code << 4 | width, bits
        return _split(
            np.concatenate([header, _pack_integers(counts, width), _pack_integers(rows.token_ids, bits)], axis=1)
        )

    def decode_rows(self, packed: np.ndarray, argument: int, bits: int, count: int) -> TeacherTopK:
        id_start = HEADER_BYTES + _plane_bytes(count, argument)
        counts = torch.from_numpy(_unpack_integers(packed[:, HEADER_BYTES:id_start], count, argument)).double()
        return TeacherTopK(
            token_ids=torch.from_numpy(_unpack_integers(packed[:, id_start:], count, bits)),
            logprobs=(counts / counts.sum(-1, keepdim=True)).log().float(),
            log_tail=torch.full((len(packed),), -torch.inf),
        )


def _uniform(keys: np.ndarray, seed: int) -> np.ndarray:
    """`[n]` float64 in [0, 1), a function of each key and the seed alone (the SplitMix64 finaliser, Steele et al.
    2014)."""

    def mix(state: np.ndarray) -> np.ndarray:
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))

    mixed = mix(keys.astype(np.uint64) ^ mix(np.array([seed % 2**64], np.uint64)))
    return (mixed >> np.uint64(40)).astype(np.float64) / 2**24


def _split(packed: np.ndarray) -> list[bytes]:
    """Rows of a `[n, L]` uint8 array as `bytes`."""
    length, data = packed.shape[1], packed.tobytes()
    return [data[start : start + length] for start in range(0, len(data), length)]


LAYOUTS: dict[str, Layout] = {
    "default": RankedLayout(),
    "compact": CompactLayout(),
    "min_mass": MinMassLayout(),
    "sampled": SampledLayout(),
}
# One decoder for each format: layouts that differ only in what they keep share it.
_DECODERS: dict[int, Layout] = {layout.format_code: layout for layout in reversed(LAYOUTS.values())}


def get_layout(layout: "str | Layout") -> Layout:
    """A layout by its name in `LAYOUTS`; a layout object is returned as it is."""
    if not isinstance(layout, str):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` is {layout!r}; it must be one of {sorted(LAYOUTS)}. Choose one of these.")
    return LAYOUTS[layout]


def select_support(
    logprobs: Tensor,
    *,
    layout: "str | Layout" = "default",
    top_k: int = 100,
    tail_temperatures: Sequence[float] = (),
    seed: int = 0,
    row_keys: Tensor | None = None,
) -> TeacherTopK:
    """What a layout keeps of full log-probabilities: what capture hands to `encode_topk`.

    Args:
        logprobs (`Tensor`, `[n, V]`):
            Natural log-probabilities under the full vocabulary (a chunk), fp32 or better.
        layout (`str` or layout object):
            A name of `LAYOUTS`, or a configured layout.
        top_k (`int`):
            Largest support; unused by `"sampled"`, whose support is drawn.
        tail_temperatures (`Sequence[float]`):
            Temperatures other than 1 at which the tail's log-sum is wanted; `"sampled"` has no tail and refuses them.
        seed (`int`):
            Seed of `"sampled"`.
        row_keys (`Tensor` of int64, `[n]`, *optional*):
            A number that tells each position of the data set apart (row index and token index mixed, say). With it a
            position is sampled alike in whatever chunk it arrives. Required by `"sampled"`, unused elsewhere.

    Returns:
        `TeacherTopK` of `[n, K]`; rows with a smaller support end in absent entries.
    """
    if logprobs.dim() != 2:
        raise ValueError(f"`logprobs` has shape {tuple(logprobs.shape)}; it must be [n, V]: flatten the positions.")
    if top_k < 1:
        raise ValueError(f"`top_k` is {top_k}; it must be at least 1. Ask for a support of one token or more.")
    return get_layout(layout).select(logprobs, top_k, _checked_temperatures(tail_temperatures), seed, row_keys)


def _checked_temperatures(temperatures: Sequence[float]) -> tuple[float, ...]:
    checked = tuple(float(temperature) for temperature in temperatures)
    for temperature in checked:
        thousandths = round(1000 * temperature)
        if not 0 < thousandths < 1 << 16 or thousandths / 1000 != temperature or temperature == 1.0:
            raise ValueError(
                f"`tail_temperatures` holds {temperature}; a temperature must be positive, below 65.536, a whole "
                "number of thousandths, and not 1 (that is `log_tail`). Round it or leave it out."
            )
    if len(set(checked)) != len(checked) or len(checked) > MAX_EXTRA_TEMPERATURES:
        raise ValueError(
            f"`tail_temperatures` is {checked}; it must hold at most {MAX_EXTRA_TEMPERATURES} different values. "
            "Leave out the surplus."
        )
    return checked


def _refuse_first(bad: np.ndarray, message: str) -> None:
    """Raise for the first row marked in `bad` `[n]`; `message` may use `{row}`."""
    rows = np.flatnonzero(bad)
    if len(rows):
        raise ValueError(message.format(row=int(rows[0])))


def _checked_arrays(teacher: TeacherTopK, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids `[n, K]` int64 (-1 where absent), log-probabilities `[n, K]`, tails `[n, 1 + M]`; an error names the row."""
    if teacher.logprobs.dim() != 2:
        raise ValueError(
            f"`teacher.logprobs` has shape {tuple(teacher.logprobs.shape)}; it must be [n, K]: flatten the positions."
        )
    if not 1 <= vocab_size <= 1 << MAX_ID_BITS:
        raise ValueError(
            f"`vocab_size` is {vocab_size}; it must lie in 1..{1 << MAX_ID_BITS}. Give the head's row count."
        )
    if teacher.top_k > vocab_size:
        raise ValueError(
            f"`teacher` has a support of K={teacher.top_k} for vocab_size={vocab_size}; K must not be larger than the "
            "vocabulary. Ask for fewer candidates."
        )
    if teacher.token_ids.is_floating_point():
        raise ValueError(f"`teacher.token_ids` has dtype {teacher.token_ids.dtype}; ids must be integers. Cast them.")

    def array(tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()
        return (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()

    token_ids = teacher.token_ids.detach().cpu().to(torch.int64).numpy()
    logprobs = array(teacher.logprobs)
    tail = array(teacher.log_tail)[:, None]
    if teacher.log_tail_at is not None:
        tail = np.concatenate([tail, array(teacher.log_tail_at)], axis=1)
    _refuse_first(
        (np.isnan(logprobs) | (logprobs > _MASS_TOLERANCE)).any(1),
        "`teacher.logprobs` holds NaN, +inf or a positive value in row {row}; log-probabilities are at most 0, and "
        "-inf where absent. Apply log_softmax over the whole vocabulary in fp32.",
    )
    _refuse_first(
        (np.isnan(tail) | (tail == np.inf)).any(1) | (tail[:, 0] > _MASS_TOLERANCE),
        "`teacher.log_tail` (or `log_tail_at`) holds NaN, +inf or a log-mass above 0 in row {row}; it must be the log "
        "of the mass outside the support, -inf where there is none.",
    )
    _refuse_first(
        np.exp(logprobs).sum(1) + np.exp(tail[:, 0]) > 1 + _MASS_TOLERANCE,
        "`teacher` has a mass clearly above 1 in row {row} (support and tail together); log-probabilities must be "
        "normalised over the whole vocabulary. Logits or values rounded to bf16 must be normalised in fp32 first.",
    )
    absent = np.isneginf(logprobs)
    _refuse_first(
        (((token_ids < 0) | (token_ids >= vocab_size)) & ~absent).any(1),
        f"`teacher.token_ids` holds an id outside 0..{vocab_size - 1} in row {{row}} (vocab_size={vocab_size}). Give "
        "the row count of the teacher's head, or leave out ids that are no tokens.",
    )
    # Absent entries become different negative numbers, which never collide.
    marked = np.where(absent, -1 - np.arange(token_ids.shape[1]), token_ids)
    ordered = np.sort(marked, axis=1)
    _refuse_first(
        (ordered[:, 1:] == ordered[:, :-1]).any(1),
        "`teacher.token_ids` holds the same id twice in row {row}; a support lists each token once. Merge or drop the "
        "repeats.",
    )
    _refuse_first(
        absent.all(1) & np.isneginf(tail[:, 0]),
        "`teacher` has no mass at all in row {row}: every entry is absent and `log_tail` is -inf. Leave such rows out "
        "(an empty blob stands for a position without a teacher).",
    )
    return np.where(absent, -1, token_ids), logprobs, tail


def encode_topk(teacher: TeacherTopK, *, vocab_size: int, layout: "str | Layout" = "default") -> list[bytes]:
    """Turn a teacher's signal into one blob for each row.

    Entries are stored in descending order of their fp16 value, equal ones by id, so equal rows give equal bytes
    whatever order they came in. Absent entries are left out: the support may differ from row to row. A row without any
    entry becomes `b""`.

    Args:
        teacher ([`TeacherTopK`]):
            The signal, `[n, K]`.
        vocab_size (`int`):
            Number of token ids; every id must be below it. It sets the width of an id.
        layout (`str` or layout object):
            A name of `LAYOUTS`, or a configured layout.

    Returns:
        `list[bytes]` of length n.

    Raises:
        `ValueError`: for a row that is no distribution (NaN, +inf, mass above 1), repeats an id, or holds an id
        outside
            the vocabulary. The message names the row.
    """
    chosen = get_layout(layout)
    temperatures = _checked_temperatures(teacher.tail_temperatures)
    token_ids, logprobs, tail = _checked_arrays(teacher, vocab_size)
    kept = chosen.keep(teacher)
    if kept is not teacher:
        token_ids, logprobs, tail = _checked_arrays(kept, vocab_size)
    # One integer sorts by fp16 value (descending: the bits of -logprob grow with it), then by id, absent entries last.
    value_bits = _to_fp16(np.maximum(-logprobs, 0)).view(np.uint16).astype(np.int64)
    keys = np.sort(np.where(token_ids < 0, _ABSENT_KEY, value_bits << 32 | token_ids), axis=1)
    counts = (keys < _ABSENT_KEY).sum(1)
    token_ids = keys & 0xFFFFFFFF
    logprobs = -(keys >> 32).astype(np.uint16).view(np.float16).astype(np.float32)
    blobs: list[bytes] = [b""] * len(keys)
    for count in np.unique(counts[counts > 0]):
        chosen_rows = np.flatnonzero(counts == count)
        part = _Rows(token_ids[chosen_rows, :count], logprobs[chosen_rows, :count], tail[chosen_rows], temperatures)
        for row, blob in zip(chosen_rows.tolist(), chosen.encode_rows(part, id_bits(vocab_size)), strict=True):
            blobs[row] = blob
    return blobs


@lru_cache(maxsize=4096)
def _blob_kind(header: bytes, length: int) -> tuple[Layout, int, int, int]:
    """Decoder, argument, id width and K of blobs of `length` bytes that start with `header`."""
    code, argument, bits = header[0] >> 4, header[0] & 15, header[-1]
    if len(header) < HEADER_BYTES or code not in _DECODERS or not 1 <= bits <= MAX_ID_BITS:
        raise ValueError(
            f"unknown header {header.hex()!r}; this version reads the formats {sorted(_DECODERS)} (first half of byte "
            f"0) with ids of 1..{MAX_ID_BITS} bits (byte 1). Read the cache with the package version its manifest "
            "names."
        )
    layout = _DECODERS[code]
    count, above = 0, 8 * length
    while above - count > 1:
        middle = (count + above) // 2
        count, above = (middle, above) if layout.blob_bytes(argument, bits, middle) <= length else (count, middle)
    if count == 0 or layout.blob_bytes(argument, bits, count) != length:
        raise ValueError(
            f"a length of {length} bytes fits no number of entries under header {header.hex()!r}. The blob was cut or "
            "altered: rebuild or download this row again."
        )
    return layout, argument, bits, count


def _decode_group(packed: np.ndarray, rows: np.ndarray) -> list[tuple[np.ndarray, TeacherTopK]]:
    """Blobs of one length `[n, L]` at `rows` `[n]`, decoded in one go for each header among them."""
    try:
        layout, argument, bits, count = _blob_kind(packed[0, :HEADER_BYTES].tobytes(), packed.shape[1])
    except ValueError as error:
        raise ValueError(f"`blobs[{int(rows[0])}]`: {error}") from error
    headers = packed[:, : layout.header_bytes(argument)]
    same = (headers == headers[0]).all(1)
    if same.all():
        return [(rows, layout.decode_rows(packed, argument, bits, count))]
    return _decode_group(packed[same], rows[same]) + _decode_group(packed[~same], rows[~same])


def decode_topk(blobs: Sequence[bytes], *, top_k: int | None = None) -> TeacherTopK:
    """Read blobs back, all of them in one go.

    Args:
        blobs (`Sequence[bytes]`):
            Blobs of any layouts and lengths; `b""` gives a row of absent entries with an empty tail (`log_tail` 0).
        top_k (`int`, *optional*):
            Keep at most this many entries; the dropped mass moves into the tail.

    Returns:
        `TeacherTopK` of `[n, K]` with the K of the widest blob (int32 ids, float32 values). Narrower rows end in
        absent entries (id 0, `-inf`). Of the extra temperatures, those that every non-empty blob holds.

    Raises:
        `ValueError`: for a header or a length this version does not know; the message names the blob.
    """
    total = len(blobs)
    lengths = np.fromiter(map(len, blobs), dtype=np.int64, count=total)
    filled = np.flatnonzero(lengths)
    sizes, counts = np.unique(lengths[filled], return_counts=True)
    if len(sizes) > 1:
        filled = filled[np.argsort(lengths[filled], kind="stable")]
        blobs = [blobs[row] for row in filled.tolist()]
    data = np.frombuffer(b"".join(blobs), np.uint8)
    groups: list[tuple[np.ndarray, TeacherTopK]] = []
    row = byte = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        packed = data[byte : byte + size * count].reshape(count, size)
        groups += _decode_group(packed, filled[row : row + count])
        row, byte = row + count, byte + size * count
    teacher = _assemble(groups, total)
    return teacher if top_k is None else teacher.narrow(top_k)


def _assemble(groups: list[tuple[np.ndarray, TeacherTopK]], total: int) -> TeacherTopK:
    """Groups of decoded rows, put back in their places among `total` rows."""
    if len(groups) == 1 and len(groups[0][0]) == total:
        return groups[0][1]
    width = max((part.top_k for _, part in groups), default=1)
    temperatures = groups[0][1].tail_temperatures if groups else ()
    for _, part in groups:
        temperatures = tuple(t for t in temperatures if t in part.tail_temperatures)
    token_ids = torch.zeros(total, width, dtype=torch.int32)
    logprobs = torch.full((total, width), -torch.inf)
    log_tail = torch.zeros(total)
    log_tail_at = torch.zeros(total, len(temperatures)) if temperatures else None
    for rows, part in groups:
        index = torch.from_numpy(rows)
        # An in-order run of rows is a plain copy; scattered rows are written through their index.
        where = slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] + 1 == len(rows) else index
        token_ids[where, : part.top_k] = part.token_ids
        logprobs[where, : part.top_k] = part.logprobs
        log_tail[where] = part.log_tail
        if log_tail_at is not None:
            columns = [part.tail_temperatures.index(temperature) for temperature in temperatures]
            log_tail_at[where] = part.log_tail_at[:, columns]
    return TeacherTopK(token_ids, logprobs, log_tail, log_tail_at, temperatures)


def max_token_id(blobs: Sequence[bytes]) -> int:
    """Largest id in `blobs`, -1 where there is none: what a student's head must reach."""
    teacher = decode_topk(blobs)
    present = teacher.token_ids[teacher.logprobs > -torch.inf]
    return int(present.max()) if present.numel() else -1
