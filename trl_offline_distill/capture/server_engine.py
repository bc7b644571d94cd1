"""The teacher behind an OpenAI-compatible server that follows vLLM: one request a row, many at a time."""

import http.client
import json
import logging
import random
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..teacher_cache.topk import TeacherTopK
from .candidates import BadAnswerError, signal_from_candidates
from .engine import (
    GenerationOptions,
    RowTooLongError,
    ScoreRequest,
    TeacherDescription,
    TeacherUnavailableError,
    TokenRow,
)


logger = logging.getLogger(__name__)

_RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_MAX_WAIT = 60.0


class ServerTeacher:
    """Scores rows through `/v1/completions` with `prompt_logprobs`.

    A server only tells the K most likely tokens, so tail log-sums at other temperatures and the sampled layout are not
    available, and the tail is what the K leave of 1 (to about 1e-7).

    Args:
        url (`str`):
            Address of the server, with or without `/v1`.
        model (`str`, *optional*):
            Model name the server knows. Default: the only one it serves.
        api_key (`str`, *optional*):
            Sent as a bearer token.
        max_length (`int`, *optional*):
            Longest row. Default: `max_model_len` as told by the server, less the one token it must generate.
        max_top_k (`int`, *optional*):
            The server's `--max-logprobs`, if known; asking for more is then refused before anything is sent.
        revision (`str`, *optional*):
            Revision named in the manifest; a server does not tell it.
        concurrency (`int`, *optional*, defaults to `16`):
            Requests in flight.
        timeout (`float`, *optional*, defaults to `600.0`):
            Seconds one request may take.
        retries (`int`, *optional*, defaults to `8`):
            Further tries after a timeout, a broken connection, or status 408, 425, 429 or 5xx, with growing pauses
            (`Retry-After` is followed).
        backoff (`float`, *optional*, defaults to `1.0`):
            Seconds before the first further try; doubled each time, at most a minute.
    """

    full_distribution = False

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_length: int | None = None,
        max_top_k: int | None = None,
        revision: str | None = None,
        concurrency: int = 16,
        timeout: float = 600.0,
        retries: int = 8,
        backoff: float = 1.0,
    ) -> None:
        for name, holds in (("concurrency", concurrency >= 1), ("timeout", timeout > 0), ("retries", retries >= 0)):
            if not holds:
                raise ValueError(f"`{name}` is {locals()[name]}; it must be positive.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self.max_top_k = max_top_k
        self.revision = revision
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self._model = model
        self._max_length = max_length
        self._card: dict[str, Any] | None = None

    @property
    def model(self) -> str:
        """Name of the model, asked of the server if it was not given."""
        if self._model is None:
            self._model = self._model_card()["id"]
        return self._model

    @property
    def max_length(self) -> int | None:
        if self._max_length is None:
            length = self._model_card().get("max_model_len")
            self._max_length = None if length is None else int(length) - 1
        return self._max_length

    def describe(self) -> TeacherDescription:
        return TeacherDescription(teacher=self.model, revision=self.revision, engine="server")

    def load(self) -> None:
        if self._model is None or self._max_length is None:
            self._model_card()

    def close(self) -> None:
        self._card = None

    def score(self, rows: Sequence[TokenRow], request: ScoreRequest) -> Iterator[tuple[int, TeacherTopK]]:
        yield from self._concurrently(lambda row: self._score_row(row, request), rows)

    def generate(
        self, prompts: Sequence[Sequence[int]], source_rows: Sequence[int], options: GenerationOptions
    ) -> list[list[int]]:
        jobs = list(zip(prompts, source_rows, strict=True))
        return [ids for _, ids in self._concurrently(lambda job: self._complete(*job, options), jobs)]

    def _concurrently(self, call: Any, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """`(index, call(item))` in order, `concurrency` at a time, with a bounded number of answers held."""
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="teacher")
        waiting: deque[tuple[int, Future]] = deque()
        try:
            for index, item in enumerate(items):
                waiting.append((index, pool.submit(call, item)))
                if len(waiting) >= 2 * self.concurrency:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _score_row(self, row: TokenRow, request: ScoreRequest) -> TeacherTopK:
        answer = self._post(
            {
                "model": self.model,
                "prompt": list(row.input_ids),
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": request.top_k,
            },
            f"Row {row.source_row}",
            row.source_row,
        )
        choice = _only_choice(answer, row.source_row)
        told = (answer.get("usage") or {}).get("prompt_tokens", len(row.input_ids))
        if told != len(row.input_ids):
            raise BadAnswerError(
                f"Row {row.source_row}: {len(row.input_ids)} tokens were sent, the server counted {told}; it added or "
                "cut tokens."
            )
        prompt_logprobs = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
        return signal_from_candidates(prompt_logprobs, row, request)

    def _complete(self, prompt: Sequence[int], source_row: int, options: GenerationOptions) -> list[int]:
        answer = self._post(
            {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": options.max_new_tokens,
                "temperature": options.temperature,
                "top_p": options.top_p,
                "top_k": options.top_k,
                "seed": options.seed * 1_000_003 + source_row,
                "return_token_ids": True,
            },
            f"Row {source_row}",
            source_row,
        )
        token_ids = _only_choice(answer, source_row).get("token_ids")
        if token_ids is None:
            raise BadAnswerError(
                f"Row {source_row}: the answer has no token_ids. The server ignores `return_token_ids`; vLLM gives "
                "them from 0.10.2 on."
            )
        return [int(token_id) for token_id in token_ids]

    def _model_card(self) -> dict[str, Any]:
        if self._card is None:
            cards = self._request("GET", "/v1/models", None, "The list of models")["data"]
            names = [card["id"] for card in cards]
            chosen = [card for card in cards if self._model in (None, card["id"])]
            if len(chosen) != 1:
                raise ValueError(
                    f"The server at {self.url} serves {names}; `model` is {self._model!r}. Name exactly one of them."
                )
            self._card = chosen[0]
        return self._card

    def _post(self, body: dict[str, Any], what: str, source_row: int) -> dict[str, Any]:
        try:
            return self._request("POST", "/v1/completions", body, what)
        except _RefusedError as error:
            if any(
                word in str(error) for word in ("maximum context length", "max_model_len", "longer than the maximum")
            ):
                raise RowTooLongError(str(error), source_row) from error
            raise

    def _request(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self.retries + 1):
            pause = min(self.backoff * 2**attempt, _MAX_WAIT) * random.uniform(0.5, 1.0)
            try:
                request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read(), object_pairs_hook=_no_repeats)
            except urllib.error.HTTPError as error:
                text = error.read().decode("utf-8", "replace")[:500]
                if error.code not in _RETRIED_STATUS:
                    raise _RefusedError(f"{what}: the server at {self.url} answered {error.code}: {text}") from error
                told = error.headers.get("Retry-After", "")
                pause = min(float(told), _MAX_WAIT) if told.isdigit() else pause
                reason = f"status {error.code}: {text}"
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}"
            except json.JSONDecodeError as error:
                reason = f"an answer cut short ({error})"
            if attempt < self.retries:
                logger.warning("%s: %s; trying again in %.1f s.", what, reason, pause)
                time.sleep(pause)
        raise TeacherUnavailableError(
            f"{what}: the server at {self.url} did not answer after {self.retries + 1} tries (last: {reason}). "
            "Finished shards are kept; start the server and run the build again to resume."
        )


class _RefusedError(ValueError):
    """The server understood the request and refused it; another try would not help."""


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadAnswerError(f"The server's answer lists {repeated!r} twice.")
    return found


def _only_choice(answer: dict[str, Any], source_row: int) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise BadAnswerError(f"Row {source_row}: one choice was asked for, the answer has {choices!r:.200}.")
    return choices[0]
