"""From the candidate lists of a served teacher to a signal, with a check that what was asked came back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..teacher_cache.topk import TeacherTopK
from .engine import ScoreRequest, TokenRow


# Served log-probabilities are fp32: their sum is known to about 1e-6, and so is the tail, which is what is left of 1.
# A smaller tail than this cannot be told from rounding.
SMALLEST_TAIL = 1e-7
_MASS_TOLERANCE = 1e-3


class BadAnswerError(RuntimeError):
    """The server answered, but not what was asked."""


def signal_from_candidates(
    prompt_logprobs: Sequence[Mapping[Any, Any] | None] | None, row: TokenRow, request: ScoreRequest
) -> TeacherTopK:
    """Signal `[len(row.positions), K]` from vLLM's `prompt_logprobs`.

    Args:
        prompt_logprobs: one entry a token of the row: `None` for the first, then a mapping from token id (an integer,
            or the integer as a string) to its log-probability and rank, given as attributes or keys. An entry holds
            the K most likely tokens in any order, and the token of the row where that is not among them.

    Raises:
        BadAnswerError: if an entry is missing, is about another token, or does not hold exactly the K most likely
        ones.
    """
    if prompt_logprobs is None:
        raise BadAnswerError(
            f"Row {row.source_row}: the answer has no prompt_logprobs. The server ignores the option; only vLLM and "
            "servers that follow it can be a teacher."
        )
    if len(prompt_logprobs) != len(row.input_ids):
        raise BadAnswerError(
            f"Row {row.source_row}: {len(row.input_ids)} tokens were sent, {len(prompt_logprobs)} entries came back."
        )
    top_k = request.top_k
    token_ids = np.zeros((len(row.positions), top_k), np.int32)
    logprobs = np.full((len(row.positions), top_k), -np.inf)
    log_tail = np.zeros(len(row.positions))
    for index, position in enumerate(row.positions):
        where = f"Row {row.source_row}, token {position + 1}"
        entry = prompt_logprobs[position + 1]
        if not entry:
            raise BadAnswerError(f"{where}: the entry is empty; only the first token's may be.")
        best = _most_likely(entry, top_k, row.input_ids[position + 1], where)
        mass = math.fsum(math.exp(logprob) for _, logprob in best)
        if mass > 1 + _MASS_TOLERANCE:
            raise BadAnswerError(f"{where}: the probabilities sum to {mass:.4f}; these are no log-probabilities.")
        # Ids that are no tokens (padded head rows) are cut and the rest normalised again, as far as they are known.
        known = [pair for pair in best if _is_token(pair[0], request)]
        kept = 1.0
        if len(known) < len(best):
            kept = max(1 - math.fsum(math.exp(logprob) for id_, logprob in best if not _is_token(id_, request)), 1e-6)
        for place, (token_id, logprob) in enumerate(known):
            token_ids[index, place], logprobs[index, place] = token_id, min(logprob - math.log(kept), 0.0)
        support = math.fsum(np.exp(logprobs[index, : len(known)]))
        covers_all = top_k >= (request.token_mask_size or math.inf) - len(request.missing_ids)
        log_tail[index] = -math.inf if covers_all else math.log(max(1 - support, SMALLEST_TAIL))
    return TeacherTopK(
        token_ids=torch.from_numpy(token_ids),
        logprobs=torch.from_numpy(logprobs).float(),
        log_tail=torch.from_numpy(log_tail).float(),
        vocab_size=request.token_mask_size,
    )


def _is_token(token_id: int, request: ScoreRequest) -> bool:
    return (
        request.token_mask_size is None or token_id < request.token_mask_size
    ) and token_id not in request.missing_ids


def _most_likely(entry: Mapping[Any, Any], top_k: int, actual: int, where: str) -> list[tuple[int, float]]:
    """The K most likely (id, log-probability) of one entry, descending."""
    candidates = []
    for key, value in entry.items():
        logprob, rank = _field(value, "logprob"), _field(value, "rank")
        if not isinstance(logprob, (int, float)) or math.isnan(logprob) or logprob > _MASS_TOLERANCE:
            raise BadAnswerError(f"{where}: candidate {key} has the log-probability {logprob!r}.")
        candidates.append((-float(logprob), rank if rank is not None else math.inf, int(key)))
    ids = [token_id for _, _, token_id in candidates]
    if len(set(ids)) != len(ids):
        raise BadAnswerError(f"{where}: a candidate is listed twice.")
    if actual not in ids:
        raise BadAnswerError(
            f"{where}: the token of the row ({actual}) is not in the answer; the server scored other tokens."
        )
    ranked = all(rank != math.inf for _, rank, _ in candidates)
    best = [item for item in candidates if item[1] <= top_k] if ranked else sorted(candidates)[:top_k]
    # The token of the row comes on top of the K, so it may only be missing among them.
    extra = len(candidates) - len(best)
    if (
        len(best) != top_k
        or extra > 1
        or (ranked and sorted(rank for _, rank, _ in best) != list(range(1, top_k + 1)))
    ):
        raise BadAnswerError(
            f"{where}: {top_k} candidates were asked for; {len(candidates)} came back with the ranks "
            f"{sorted(rank for _, rank, _ in candidates)[:12]}... Does the server cap them (vLLM: --max-logprobs)?"
        )
    return [(token_id, -negative) for negative, _, token_id in sorted(best)]


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
