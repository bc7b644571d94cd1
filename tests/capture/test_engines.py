"""One contract for all engines, and what can go wrong with a served teacher."""

import json
import sys

import pytest
import torch
from datasets import Dataset
from served_teacher import CompletionServer, vllm_module
from tiny_teachers import make_teacher, make_tokenizer, reference_logprobs

from trl_offline_distill.capture.build import build_distillation_dataset
from trl_offline_distill.capture.candidates import SMALLEST_TAIL, BadAnswerError, signal_from_candidates
from trl_offline_distill.capture.engine import (
    GenerationOptions,
    RowTooLongError,
    ScoreRequest,
    TeacherEngine,
    TeacherUnavailableError,
    TokenRow,
)
from trl_offline_distill.capture.server_engine import ServerTeacher
from trl_offline_distill.capture.transformers_engine import TransformersTeacher
from trl_offline_distill.capture.vllm_engine import VLLMTeacher
from trl_offline_distill.teacher_cache import decode_topk


VOCAB = 310
ENGINES = ["transformers", "vllm", "server"]


@pytest.fixture(scope="module")
def model():
    return make_teacher(max_position_embeddings=64)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def engine(request, model, folder, monkeypatch):
    if request.param == "transformers":
        yield TransformersTeacher(folder, batch_tokens=48)
    elif request.param == "vllm":
        monkeypatch.setitem(sys.modules, "vllm", vllm_module(lambda path: model))
        yield VLLMTeacher(folder, max_logprobs=20)
    else:
        with CompletionServer(model) as server:
            yield ServerTeacher(server.url, max_top_k=20, backoff=0.01, retries=2, concurrency=3)


def some_rows(count=9):
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row in range(count):
        length = int(torch.randint(2, 20, (1,), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        rows.append(TokenRow(ids, list(range(0, length - 1, 1 + row % 2)), 100 + row))
    return rows


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_contract(engine, model):
    assert isinstance(engine, TeacherEngine)
    description = engine.describe()
    assert description.engine.split()[0] == type(engine).__name__.removesuffix("Teacher").lower()
    assert engine.max_length >= 20
    rows, request = some_rows(), ScoreRequest(top_k=7, token_mask_size=VOCAB)
    engine.load()
    signals = dict(engine.score(rows, request))
    alone = dict(engine.score(rows[4:5], request))[0]
    assert dict(engine.score([], request)) == {}
    engine.close()
    assert sorted(signals) == list(range(len(rows)))
    for index, row in enumerate(rows):
        signal, wanted = signals[index], reference_logprobs(model, row.input_ids)[row.positions]
        assert signal.logprobs.shape == (len(row.positions), 7)
        assert (signal.logprobs.diff(dim=-1) <= 0).all()
        torch.testing.assert_close(signal.logprobs, wanted.topk(7).values, atol=2e-5, rtol=0)
        torch.testing.assert_close(wanted.gather(1, signal.token_ids.long()), signal.logprobs, atol=2e-5, rtol=0)
        rest = wanted.scatter(1, signal.token_ids.long(), -torch.inf).logsumexp(-1)
        torch.testing.assert_close(signal.log_tail, rest, atol=1e-4, rtol=0)
    torch.testing.assert_close(alone.logprobs, signals[4].logprobs, atol=5e-6, rtol=0)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_completions(engine, model):
    engine.load()
    prompts, rows = [[5, 6, 7], [9, 10], [11, 12, 13, 14]], [0, 1, 2]
    greedy = engine.generate(prompts, rows, GenerationOptions(max_new_tokens=6, temperature=0.0))
    for prompt, completion in zip(prompts, greedy):
        assert 1 <= len(completion) <= 6
        logits = reference_logprobs(model, prompt + completion)
        assert completion == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    sampled = GenerationOptions(max_new_tokens=6, temperature=1.5, seed=1)
    first, again = engine.generate(prompts, rows, sampled), engine.generate(prompts, rows, sampled)
    other = engine.generate(prompts, rows, GenerationOptions(max_new_tokens=6, temperature=1.5, seed=2))
    engine.close()
    assert first == again
    assert first != other


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_all_engines_build_the_same_dataset(engine, folder):
    texts = ["hello world the sky is blue", "why", "the sun is far away now"]
    dataset = Dataset.from_dict({"text": texts})
    wanted = build_distillation_dataset(dataset, folder, top_k=5, progress=False)
    found = build_distillation_dataset(dataset, engine, make_tokenizer(), top_k=5, progress=False)
    assert found.features == wanted.features
    assert list(found["input_ids"]) == list(wanted["input_ids"])
    assert list(found["labels"]) == list(wanted["labels"])
    for one, other in zip(found["teacher_topk"], wanted["teacher_topk"]):
        assert [blob == b"" for blob in one] == [blob == b"" for blob in other]
        one, other = decode_topk(one), decode_topk(other)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=5e-3, rtol=0)
        torch.testing.assert_close(one.log_tail, other.log_tail, atol=5e-3, rtol=0)


def test_only_the_transformers_engine_sees_the_whole_distribution(model, folder):
    dataset = Dataset.from_dict({"text": ["hello world"]})
    with CompletionServer(model) as server:
        for options in ({"tail_temperatures": (2.0,)}, {"layout": "sampled"}):
            with pytest.raises(ValueError, match="whole distribution"):
                build_distillation_dataset(dataset, server.url, make_tokenizer(), top_k=3, progress=False, **options)
        assert server.requests == []


def test_server_is_found_by_its_url_and_used_concurrently(model):
    dataset = Dataset.from_dict({"text": ["hello world the sky is blue"] * 12})
    with CompletionServer(model) as server:
        cached = build_distillation_dataset(dataset, server.url + "/v1/", make_tokenizer(), top_k=3, progress=False)
    assert len(cached) == 12
    assert server.most_in_flight > 1
    assert all(request["max_tokens"] == 1 and request["prompt_logprobs"] == 3 for request in server.requests)
    assert '"engine":"server"' in cached[0]["teacher_manifest"]


ROW = TokenRow([5, 6, 7, 8], [0, 1, 2], 4)


def ask(server, row=ROW, top_k=3, **options):
    engine = ServerTeacher(server.url, **{"backoff": 0.01, "retries": 3, "timeout": 20, **options})
    engine.load()
    return next(engine.score([row], ScoreRequest(top_k=top_k, token_mask_size=VOCAB)))[1]


def test_passing_faults_are_waited_out(model):
    with CompletionServer(model, statuses=(503, 429, 0)) as server:
        signal = ask(server)
        assert len(server.requests) == 4
    assert torch.isfinite(signal.logprobs).all()


def test_an_answer_cut_short_is_asked_for_again(model):
    cut = iter([True])

    def change(body, answer):
        return json.dumps(answer).encode()[:-40] if next(cut, False) else answer

    with CompletionServer(model, change_answer=change) as server:
        ask(server)
        assert len(server.requests) == 2


def test_a_server_that_stays_down_is_an_error_that_says_how_to_go_on(model):
    with CompletionServer(model, statuses=(500,) * 20) as server:
        with pytest.raises(TeacherUnavailableError, match=r"after 3 tries.*kept"):
            ask(server, retries=2)
    with pytest.raises(TeacherUnavailableError, match="Row 4"):
        ask(server, retries=0, max_length=60, model="tiny")


def test_a_refusal_is_not_repeated(model):
    with CompletionServer(model, max_logprobs=2) as server:
        with pytest.raises(ValueError, match=r"Row 4.*400.*max allowed: 2"):
            ask(server)
        assert len(server.requests) == 1
        with pytest.raises(RowTooLongError, match="maximum context length"):
            ask(server, TokenRow(list(range(80)), [0], 9), top_k=1)
    with CompletionServer(model, api_key="secret") as server:
        with pytest.raises(ValueError, match="401"):
            ask(server)
        assert torch.isfinite(ask(server, api_key="secret").logprobs).all()


def changed(change_entries):
    def change(body, answer):
        change_entries(answer["choices"][0]["prompt_logprobs"])
        return answer

    return change


def _set(entries, position, key, value):
    entries[position][key] = value


def _drop_best(entries):
    entry = entries[2]
    del entry[next(key for key, value in entry.items() if value["rank"] == 2)]


def _drop_actual(entries):
    # The K most likely are all there, but not the token that was sent.
    entry = entries[2]
    if len(entry) == 3:
        entry[next(key for key in map(str, range(VOCAB)) if key not in entry)] = {"logprob": -9.0, "rank": 50}
    entry.pop("7")


WRONG = {
    "left_out": (lambda body, answer: {**answer, "choices": [{"index": 0}]}, "no prompt_logprobs"),
    "no_choice": (lambda body, answer: {"choices": []}, "one choice"),
    "too_short": (changed(lambda entries: entries.pop()), "4 tokens were sent, 3 entries"),
    "empty_entry": (changed(lambda entries: entries.__setitem__(2, None)), "token 2: the entry is empty"),
    "missing": (changed(_drop_best), "3 candidates were asked for"),
    "another_token": (changed(_drop_actual), r"the token of the row \(7\) is not in the answer"),
    "not_a_number": (changed(lambda entries: _set(entries, 1, "6", {"logprob": None, "rank": 1})), "None"),
    "positive": (changed(lambda entries: _set(entries, 1, "6", {"logprob": 0.7, "rank": 1})), "0.7"),
    "more_tokens": (lambda body, answer: {**answer, "usage": {"prompt_tokens": 5}}, "the server counted 5"),
    "repeated_candidate": (
        changed(lambda entries: _set(entries, 1, "06", {"logprob": -0.5, "rank": 3})),
        "a candidate is listed twice",
    ),
    "repeated": (
        lambda body, answer: json.dumps(answer).replace('"choices"', '"usage": {}, "choices"').encode(),
        "'usage' twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused(name, model):
    change, message = WRONG[name]
    with CompletionServer(model, change_answer=change) as server:
        with pytest.raises(BadAnswerError, match=message):
            ask(server)


def test_candidates_in_any_order_with_the_extra_one():
    entry = {"9": {"logprob": -8.0, "rank": 40}, "3": {"logprob": -1.0, "rank": 2}, "1": {"logprob": -0.7, "rank": 1}}
    row, request = TokenRow([5, 9], [0], 0), ScoreRequest(top_k=2, token_mask_size=VOCAB)
    signal = signal_from_candidates([None, entry], row, request)
    assert signal.token_ids.tolist() == [[1, 3]]
    torch.testing.assert_close(signal.logprobs, torch.tensor([[-0.7, -1.0]]))
    torch.testing.assert_close(signal.log_tail.exp(), 1 - signal.logprobs.exp().sum(-1))


def test_padded_head_rows_of_a_served_teacher_are_cut_and_the_rest_normalised():
    entry = {"9": {"logprob": -0.7, "rank": 1}, "60": {"logprob": -1.0, "rank": 2}}
    signal = signal_from_candidates(
        [None, entry], TokenRow([5, 9], [0], 0), ScoreRequest(top_k=2, token_mask_size=50, missing_ids=(3,))
    )
    padded = torch.tensor(-1.0).exp()
    torch.testing.assert_close(signal.logprobs[0], torch.tensor([-0.7 - float((1 - padded).log()), -torch.inf]))
    torch.testing.assert_close(signal.logprobs.exp().sum() + signal.log_tail.exp(), torch.ones(1))


def test_a_tail_below_rounding_is_not_taken_for_none():
    entry = {"9": {"logprob": 0.0, "rank": 1}}
    row = TokenRow([5, 9], [0], 0)
    signal = signal_from_candidates([None, entry], row, ScoreRequest(top_k=1, token_mask_size=VOCAB))
    torch.testing.assert_close(signal.log_tail.exp(), torch.full((1,), SMALLEST_TAIL))
    whole = signal_from_candidates([None, entry], row, ScoreRequest(top_k=1, token_mask_size=1))
    assert whole.log_tail.tolist() == [-torch.inf]


def test_masses_above_one_are_refused():
    entry = {"9": {"logprob": 0.0, "rank": 1}, "3": {"logprob": -0.1, "rank": 2}}
    with pytest.raises(BadAnswerError, match=r"sum to 1.9"):
        signal_from_candidates([None, entry], TokenRow([5, 9], [0], 0), ScoreRequest(top_k=2))


def test_the_wrong_model_name_is_refused(model):
    with CompletionServer(model) as server:
        with pytest.raises(ValueError, match=r"serves \['tiny'\].*'other'"):
            ServerTeacher(server.url, model="other").load()
        assert ServerTeacher(server.url).model == "tiny"


def test_vllm_says_how_to_get_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    engine = VLLMTeacher(folder)
    with pytest.raises(ModuleNotFoundError, match="pip install vllm"):
        engine.load()


def test_engine_names_are_checked(folder):
    dataset = Dataset.from_dict({"text": ["hello"]})
    with pytest.raises(ValueError, match="'tpu'; choose"):
        build_distillation_dataset(dataset, folder, engine="tpu")
    with pytest.raises(ValueError, match="by its URL"):
        build_distillation_dataset(dataset, folder, engine="server")
    with pytest.raises(ValueError, match="by its URL"):
        build_distillation_dataset(dataset, "http://127.0.0.1:1", engine="vllm")
    with pytest.raises(TypeError, match="`teacher` is a list"):
        build_distillation_dataset(dataset, [])
