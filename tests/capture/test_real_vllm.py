"""The server and vLLM engines against a real vLLM on CPU; run by `make test-vllm`, which makes its environment."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from datasets import Dataset
from tiny_teachers import make_teacher, make_tokenizer, reference_logprobs

from trl_offline_distill.capture.build import build_distillation_dataset
from trl_offline_distill.capture.engine import GenerationOptions, RowTooLongError, ScoreRequest, TokenRow
from trl_offline_distill.capture.server_engine import ServerTeacher
from trl_offline_distill.capture.vllm_engine import VLLMTeacher
from trl_offline_distill.teacher_cache import decode_topk


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"),
]
TOP_K = 100
MAX_LENGTH = 256
VOCAB = 310
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def model():
    # Head dimension 32 is the smallest vLLM's CPU attention has.
    return make_teacher(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.1,
        max_position_embeddings=MAX_LENGTH,
    )


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def url(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            folder,
            "--served-model-name",
            "tiny",
        ),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-logprobs", "128", "--max-model-len", str(MAX_LENGTH)),
    ]
    server = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if server.poll() is not None:
                pytest.fail(f"vLLM ended with status {server.returncode} before it served.")
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        else:
            pytest.fail("vLLM did not serve within 5 minutes.")
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def in_process(folder):
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    engine = VLLMTeacher(folder, max_logprobs=128, dtype="float32", enforce_eager=True, max_model_len=MAX_LENGTH)
    engine.load()
    yield engine
    engine.close()
    patch.undo()


@pytest.fixture(params=["server", "in_process"])
def engine(request):
    if request.param == "in_process":
        return request.getfixturevalue("in_process")
    return ServerTeacher(request.getfixturevalue("url"), concurrency=4)


def rows():
    generator = torch.Generator().manual_seed(5)
    lengths = [2, 40, 200, 17, 3]
    return [
        TokenRow(torch.randint(0, VOCAB, (length,), generator=generator).tolist(), list(range(length - 1)), row)
        for row, length in enumerate(lengths)
    ]


def test_scores_equal_the_model(engine, model):
    for index, signal in engine.score(rows(), ScoreRequest(top_k=TOP_K, token_mask_size=VOCAB)):
        wanted = reference_logprobs(model, rows()[index].input_ids)[:-1]
        torch.testing.assert_close(signal.logprobs, wanted.topk(TOP_K).values, atol=2e-3, rtol=0)
        torch.testing.assert_close(wanted.gather(1, signal.token_ids.long()), signal.logprobs, atol=2e-3, rtol=0)
        rest = wanted.scatter(1, signal.token_ids.long(), -torch.inf).logsumexp(-1)
        torch.testing.assert_close(signal.log_tail, rest, atol=2e-3, rtol=0)


def test_completions_equal_the_model(engine, model):
    prompts = [[5, 6, 7], [9, 10]]
    written = engine.generate(prompts, [0, 1], GenerationOptions(max_new_tokens=8, temperature=0.0))
    for prompt, completion in zip(prompts, written):
        wanted = reference_logprobs(model, prompt + completion)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert completion == wanted
        assert len(completion) == 8 or completion[-1] == 0
    sampled = GenerationOptions(max_new_tokens=8, temperature=1.0, seed=3)
    assert engine.generate(prompts, [0, 1], sampled) == engine.generate(prompts, [0, 1], sampled)


def test_a_dataset_is_built_as_with_transformers(engine, folder):
    dataset = Dataset.from_dict({"text": ["hello world the sky is blue", "why", "the sun is far away now"]})
    wanted = build_distillation_dataset(dataset, folder, top_k=20, progress=False)
    source = engine if isinstance(engine, ServerTeacher) else _Loaded(engine)
    found = build_distillation_dataset(dataset, source, make_tokenizer(), top_k=20, progress=False)
    assert list(found["input_ids"]) == list(wanted["input_ids"])
    for one, other in zip(found["teacher_topk"], wanted["teacher_topk"]):
        torch.testing.assert_close(decode_topk(one).logprobs, decode_topk(other).logprobs, atol=1e-2, rtol=0)


class _Loaded:
    """An engine that is loaded already and stays so."""

    def __init__(self, engine):
        self.engine = engine

    def load(self):
        pass

    def close(self):
        pass

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_the_servers_limits_are_told(url):
    engine = ServerTeacher(url)
    assert engine.model == "tiny"
    assert engine.max_length == MAX_LENGTH - 1
    with pytest.raises(ValueError, match="400"):
        list(engine.score(rows()[:1], ScoreRequest(top_k=200, token_mask_size=VOCAB)))
    with pytest.raises(RowTooLongError):
        list(engine.score([TokenRow([5] * 400, [3], 8)], ScoreRequest(top_k=5, token_mask_size=VOCAB)))
