"""A tiny model served in the shape of vLLM: over HTTP, and as a module that looks like `vllm`."""

import json
import threading
import types
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch


def prompt_candidates(model, input_ids: list[int], top_k: int) -> list[dict[int, tuple[float, int]] | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, id -> (log-probability, rank), itself included."""
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([input_ids])).logits[0].float().log_softmax(-1)
    entries: list[dict[int, tuple[float, int]] | None] = [None]
    for position in range(len(input_ids) - 1):
        row, actual = logprobs[position], input_ids[position + 1]
        entry = {actual: (float(row[actual]), int((row >= row[actual]).sum()))}
        values, ids = row.topk(top_k)
        for rank, (value, token_id) in enumerate(zip(values.tolist(), ids.tolist()), start=1):
            entry[token_id] = (value, rank)
        entries.append(entry)
    return entries


def continue_prompt(model, input_ids: list[int], max_tokens: int, temperature: float, seed: int | None) -> list[int]:
    generator = torch.Generator().manual_seed(seed or 0)
    ids, written = list(input_ids), []
    for _ in range(max_tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        if temperature > 0:
            chosen = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        ids.append(chosen)
        written.append(chosen)
        if chosen == model.config.eos_token_id:
            break
    return written


class CompletionServer:
    """`/v1/models` and `/v1/completions` with token-id prompts.

    Args:
        model: a tiny model.
        max_logprobs: requests above it get status 400, as vLLM's do.
        change_answer: called with (body of the request, answer) before the answer is sent; returns the answer to send.
        statuses: answered instead, one a request, until used up; 0 closes the connection without an answer.
    """

    def __init__(
        self,
        model,
        max_logprobs: int = 20,
        max_model_len: int = 64,
        change_answer: Callable[[dict, dict], dict] | None = None,
        statuses: tuple[int, ...] = (),
        api_key: str | None = None,
    ) -> None:
        server = self
        self.requests: list[dict] = []
        self.statuses = list(statuses)
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0
        self.down = False

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def send_json(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            def refuse(self, message):
                self.send_json(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})

            def do_GET(self):
                assert self.path == "/v1/models"
                self.send_json(200, {"data": [{"id": "tiny", "max_model_len": max_model_len}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append(body)
                    status = server.statuses.pop(0) if server.statuses else 200
                    server.in_flight += 1
                    server.most_in_flight = max(server.most_in_flight, server.in_flight)
                try:
                    self.answer(body, 0 if server.down else status)
                finally:
                    with server.lock:
                        server.in_flight -= 1

            def answer(self, body, status):
                if status == 0:
                    self.close_connection = True
                    self.connection.close()
                    return
                if status != 200:
                    self.send_json(status, {"error": {"message": "busy"}})
                    return
                if api_key is not None and self.headers.get("Authorization") != f"Bearer {api_key}":
                    self.send_json(401, {"error": {"message": "Unauthorized"}})
                    return
                prompt, top_k = body["prompt"], body.get("prompt_logprobs")
                if top_k is not None and top_k > max_logprobs:
                    self.refuse(
                        f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {max_logprobs}"
                    )
                    return
                if len(prompt) + body["max_tokens"] > max_model_len:
                    self.refuse(f"This model's maximum context length is {max_model_len} tokens.")
                    return
                written = continue_prompt(model, prompt, body["max_tokens"], body["temperature"], body.get("seed"))
                choice = {"index": 0, "text": "", "finish_reason": "length"}
                if body.get("return_token_ids"):
                    choice["token_ids"] = written
                if top_k is not None:
                    choice["prompt_logprobs"] = [
                        entry
                        and {
                            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": "?"}
                            for token_id, (logprob, rank) in entry.items()
                        }
                        for entry in prompt_candidates(model, prompt, top_k)
                    ]
                answer = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
                if change_answer is not None:
                    answer = change_answer(body, answer)
                if isinstance(answer, bytes):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                    return
                self.send_json(200, answer)

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def __enter__(self) -> "CompletionServer":
        threading.Thread(target=self.httpd.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()


def vllm_module(load_model: Callable[[str], torch.nn.Module]) -> types.ModuleType:
    """A module with the parts of `vllm` that the engine uses, in their shape."""
    module = types.ModuleType("vllm")
    module.calls = []

    class SamplingParams(SimpleNamespace):
        prompt_logprobs = None
        seed = None

    class LLM:
        def __init__(self, model, max_logprobs=20, **kwargs):
            self.model, self.max_logprobs = load_model(model), max_logprobs
            module.calls.append(("LLM", model, max_logprobs, kwargs))

        def generate(self, prompts, sampling, use_tqdm=True):
            assert use_tqdm is False
            many = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
            module.calls.append(("generate", len(prompts)))
            return [self.one(prompt["prompt_token_ids"], params) for prompt, params in zip(prompts, many, strict=True)]

        def one(self, input_ids, params):
            top_k, entries = params.prompt_logprobs, None
            if top_k is not None:
                if top_k > self.max_logprobs:
                    raise ValueError(f"Requested prompt logprobs of {top_k}, greater than {self.max_logprobs}")
                entries = [
                    entry and {id_: SimpleNamespace(logprob=p, rank=r) for id_, (p, r) in entry.items()}
                    for entry in prompt_candidates(self.model, input_ids, top_k)
                ]
            written = continue_prompt(self.model, input_ids, params.max_tokens, params.temperature, params.seed)
            return SimpleNamespace(prompt_logprobs=entries, outputs=[SimpleNamespace(token_ids=tuple(written))])

    module.SamplingParams, module.LLM = SamplingParams, LLM
    return module
