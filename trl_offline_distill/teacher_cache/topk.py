"""The teacher's signal: its most likely tokens, their log-probabilities, and the mass of the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class TeacherTopK:
    """What is kept of the teacher's distribution at each position.

    Leading dimensions are arbitrary (`[N]` or `[B, S]`). Log-probabilities are natural logarithms under the teacher's
    full vocabulary at temperature 1.

    Args:
        token_ids (`Tensor` of integers, `[..., K]`):
            Token ids of the support. Any value where `logprobs` is `-inf`.
        logprobs (`Tensor`, `[..., K]`):
            Log-probability of each id of the support; `-inf` marks an absent entry.
        log_tail (`Tensor`, `[...]`):
            Log of the mass outside the support; `-inf` where there is none.
        log_tail_at (`Tensor`, `[..., M]`, *optional*):
            `log(sum over the tail of exp(logprob / T))`, one column for each of `tail_temperatures`.
        tail_temperatures (`tuple[float, ...]`):
            The temperatures of `log_tail_at`. Temperature 1 is `log_tail` itself and is not listed.
        vocab_size (`int`, *optional*):
            Number of token ids the teacher's distribution is over.
    """

    token_ids: Tensor
    logprobs: Tensor
    log_tail: Tensor
    log_tail_at: Tensor | None = None
    tail_temperatures: tuple[float, ...] = ()
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        # An engine may bring NumPy arrays or lists
        for name in ("token_ids", "logprobs", "log_tail", "log_tail_at"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                setattr(self, name, torch.as_tensor(value))
        self.tail_temperatures = tuple(float(temperature) for temperature in self.tail_temperatures)
        if self.token_ids.shape != self.logprobs.shape or self.logprobs.dim() == 0:
            raise ValueError(
                f"`token_ids` has shape {tuple(self.token_ids.shape)} and `logprobs` {tuple(self.logprobs.shape)}; "
                "both must be [..., K]: give one log-probability for each id."
            )
        if self.log_tail.shape != self.logprobs.shape[:-1]:
            raise ValueError(
                f"`log_tail` has shape {tuple(self.log_tail.shape)}; it must hold one value for each row of "
                f"`logprobs`, {tuple(self.logprobs.shape[:-1])}."
            )
        columns = len(self.tail_temperatures)
        found = None if self.log_tail_at is None else tuple(self.log_tail_at.shape)
        if (found or (*self.log_tail.shape, 0)) != (*self.log_tail.shape, columns):
            raise ValueError(
                f"`log_tail_at` has shape {found} for tail_temperatures={self.tail_temperatures}; it must be "
                f"{(*self.log_tail.shape, columns)}: one column for each temperature."
            )

    @property
    def top_k(self) -> int:
        """Width of the support."""
        return self.logprobs.shape[-1]

    def to(self, device: torch.device | str) -> "TeacherTopK":
        """The same signal on `device`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            logprobs=self.logprobs.to(device),
            log_tail=self.log_tail.to(device),
            log_tail_at=None if self.log_tail_at is None else self.log_tail_at.to(device),
        )

    def __getitem__(self, index: Any) -> "TeacherTopK":
        """Rows chosen by an index over the leading dimensions."""
        return replace(
            self,
            token_ids=self.token_ids[index],
            logprobs=self.logprobs[index],
            log_tail=self.log_tail[index],
            log_tail_at=None if self.log_tail_at is None else self.log_tail_at[index],
        )

    def narrow(self, top_k: int) -> "TeacherTopK":
        """Keep the `top_k` most likely tokens of each row; the mass of the dropped ones moves into the tail.

        Args:
            top_k (`int`):
                Size of the new support, at least 1. A support that is no larger is returned as it is.

        Returns:
            `TeacherTopK` with `[..., min(top_k, K)]` entries in descending order.
        """
        if top_k < 1:
            raise ValueError(f"`top_k` is {top_k}; it must be at least 1. Ask for a support of one token or more.")
        if top_k >= self.top_k:
            return self
        token_ids, logprobs = self.token_ids, self.logprobs
        if not bool((logprobs[..., :-1] >= logprobs[..., 1:]).all()):
            order = logprobs.argsort(dim=-1, descending=True, stable=True)
            token_ids, logprobs = token_ids.gather(-1, order), logprobs.gather(-1, order)
        dropped = logprobs[..., top_k:]
        log_tail_at = self.log_tail_at
        if log_tail_at is not None:
            moved = [torch.logsumexp(dropped / temperature, -1) for temperature in self.tail_temperatures]
            log_tail_at = torch.logaddexp(log_tail_at, torch.stack(moved, -1)) if moved else log_tail_at
        return replace(
            self,
            token_ids=token_ids[..., :top_k],
            logprobs=logprobs[..., :top_k],
            log_tail=torch.logaddexp(self.log_tail, torch.logsumexp(dropped, -1)),
            log_tail_at=log_tail_at,
        )

    @staticmethod
    def cat(parts: Sequence["TeacherTopK"]) -> "TeacherTopK":
        """Rows of several signals `[n_i, K_i]` after one another; narrower ones are filled up with absent entries."""
        if not parts:
            raise ValueError("`parts` is empty; give at least one `TeacherTopK`.")
        kinds = {(part.tail_temperatures, part.vocab_size) for part in parts}
        if len(kinds) > 1:
            raise ValueError(
                f"`parts` differ in (tail_temperatures, vocab_size): {sorted(map(str, kinds))}; they must agree: "
                "concatenate signals of one capture."
            )
        width = max(part.top_k for part in parts)

        def fill(tensor: Tensor, value: float) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]), value=value)

        return replace(
            parts[0],
            token_ids=torch.cat([fill(part.token_ids, 0) for part in parts]),
            logprobs=torch.cat([fill(part.logprobs, -torch.inf) for part in parts]),
            log_tail=torch.cat([part.log_tail for part in parts]),
            log_tail_at=None if parts[0].log_tail_at is None else torch.cat([part.log_tail_at for part in parts]),
        )
