"""Counts and sums of a cache, gathered while it is built and added up over its shards."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


MASS_BINS = 1000


@dataclass
class CacheStatistics:
    """Sums over rows and trained tokens; divided once, when read.

    Attributes:
        rows, tokens, trained_tokens: counts.
        blob_bytes: bytes of all blobs.
        mass_sum, mass_min: of the teacher's mass on the support, over trained tokens.
        entropy_sum: of the teacher's entropy in nats, the tail counted as one outcome.
        mass_histogram: trained tokens in `MASS_BINS` equal bins of captured mass over 0..1.
    """

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    blob_bytes: int = 0
    mass_sum: float = 0.0
    mass_min: float = 1.0
    entropy_sum: float = 0.0
    mass_histogram: list[int] = field(default_factory=lambda: [0] * MASS_BINS)

    @classmethod
    def of(
        cls, *, rows: int, tokens: int, blob_bytes: int, masses: np.ndarray, entropies: np.ndarray
    ) -> "CacheStatistics":
        """Statistics of some rows; `masses` and `entropies` `[n]` of their trained tokens."""
        return cls(
            rows=rows,
            tokens=tokens,
            trained_tokens=len(masses),
            blob_bytes=blob_bytes,
            mass_sum=float(masses.sum()),
            mass_min=float(masses.min()) if len(masses) else 1.0,
            entropy_sum=float(entropies.sum()),
            mass_histogram=np.histogram(masses.clip(0, 1), bins=MASS_BINS, range=(0, 1))[0].tolist(),
        )

    @classmethod
    def merged(cls, records: Iterable[Mapping[str, Any]]) -> "CacheStatistics":
        """Sum of records that hold at least these fields."""
        total = cls()
        for record in records:
            for name in ("rows", "tokens", "trained_tokens", "blob_bytes", "mass_sum", "entropy_sum"):
                setattr(total, name, getattr(total, name) + record[name])
            total.mass_min = min(total.mass_min, record["mass_min"])
            total.mass_histogram = [
                one + other for one, other in zip(total.mass_histogram, record["mass_histogram"], strict=True)
            ]
        return total

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def mean_mass(self) -> float:
        return self.mass_sum / max(self.trained_tokens, 1)

    @property
    def mean_entropy(self) -> float:
        return self.entropy_sum / max(self.trained_tokens, 1)

    @property
    def bytes_per_token(self) -> float:
        """Blob bytes of a trained token."""
        return self.blob_bytes / max(self.trained_tokens, 1)

    def mass_quantile(self, quantile: float) -> float:
        """Captured mass that this share of the trained tokens does not exceed, to the width of a bin."""
        counts = np.cumsum(self.mass_histogram)
        place = int(np.searchsorted(counts, quantile * counts[-1], side="left"))
        return min(1.0, (place + 1) / MASS_BINS)
