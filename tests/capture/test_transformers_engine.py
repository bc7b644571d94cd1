"""The transformers engine against the model's ordinary forward."""

import math

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny_teachers import make_teacher, reference_logprobs
from torch.utils._python_dispatch import TorchDispatchMode

from trl_offline_distill.capture.engine import ScoreRequest, TokenRow, length_sorted_batches
from trl_offline_distill.capture.transformers_engine import TransformersTeacher, chunk_topk, cut_after_end


FAMILIES = ["llama", "mistral", "gemma2", "granite", "cohere", "phi", "qwen3_moe", "gpt2", "opt", "mamba"]


def random_rows(lengths, vocab_size=310, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenRow(torch.randint(0, vocab_size, (length,), generator=generator).tolist(), list(range(length - 1)), row)
        for row, length in enumerate(lengths)
    ]


def score(model, rows, request, **options):
    engine = TransformersTeacher(model, **{"batch_tokens": 64, **options})
    engine.load()
    signals = dict(engine.score(rows, request))
    engine.close()
    assert sorted(signals) == list(range(len(rows)))
    return [signals[index] for index in range(len(rows))]


def assert_signal(signal, wanted, top_k, temperatures=(), tolerance=2e-5):
    """`signal` `[n, K]` holds the top K of the log-probabilities `wanted` `[n, V]` and the tail's own sums."""
    values, _ = wanted.topk(top_k)
    torch.testing.assert_close(signal.logprobs, values, atol=tolerance, rtol=0)
    torch.testing.assert_close(wanted.gather(1, signal.token_ids.long()), signal.logprobs, atol=tolerance, rtol=0)
    rest = wanted.scatter(1, signal.token_ids.long(), -torch.inf)
    torch.testing.assert_close(signal.log_tail, rest.logsumexp(-1), atol=tolerance, rtol=0)
    for column, temperature in enumerate(temperatures):
        at = (rest / temperature).logsumexp(-1)
        torch.testing.assert_close(signal.log_tail_at[:, column], at, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_forward_alone_and_in_a_batch(family):
    model = make_teacher(family)
    rows = random_rows([3, 17, 9, 30, 9, 2])
    request = ScoreRequest(top_k=7, tail_temperatures=(2.0, 0.5), token_mask_size=310)
    together = score(model, rows, request)
    for row, signal in zip(rows, together):
        assert_signal(signal, reference_logprobs(model, row.input_ids)[:-1], 7, (2.0, 0.5))
        (alone,) = score(model, [row], request)
        torch.testing.assert_close(alone.logprobs, signal.logprobs, atol=5e-6, rtol=0)
        torch.testing.assert_close(alone.log_tail, signal.log_tail, atol=5e-6, rtol=0)


def test_only_wanted_positions_are_scored():
    model = make_teacher()
    rows = random_rows([12, 5])
    rows[0].positions, rows[1].positions = [3, 10], [0]
    first, second = score(model, rows, ScoreRequest(top_k=4, token_mask_size=310))
    assert_signal(first, reference_logprobs(model, rows[0].input_ids)[[3, 10]], 4)
    assert_signal(second, reference_logprobs(model, rows[1].input_ids)[[0]], 4)


@pytest.mark.parametrize("chunk_size", [1, 7, 128, 10_000, None])
def test_chunk_size_changes_nothing(chunk_size):
    model = make_teacher()
    rows = random_rows([40, 25, 3])
    wanted = score(model, rows, ScoreRequest(top_k=5, token_mask_size=310), chunk_size=10_000)
    found = score(model, rows, ScoreRequest(top_k=5, token_mask_size=310), chunk_size=chunk_size)
    for one, other in zip(wanted, found):
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=5e-6, rtol=0)
        torch.testing.assert_close(one.log_tail, other.log_tail, atol=5e-6, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def test_full_logits_never_exist():
    # 4096 tokens x 50,000 ids would be 819 MB; a chunk of 128 is 25.6 MB.
    model = make_teacher(vocab_size=50_000, num_hidden_layers=1)
    rows = random_rows([512] * 8, vocab_size=50_000)
    engine = TransformersTeacher(model, batch_tokens=4096, chunk_size=128)
    engine.load()
    with LargestTensor() as largest:
        signals = dict(engine.score(rows, ScoreRequest(top_k=10, token_mask_size=50_000)))
    assert sum(len(signal.logprobs) for signal in signals.values()) == 8 * 511
    assert largest.bytes <= 128 * 50_000 * 4


def test_ids_the_tokenizer_lacks_are_never_emitted():
    # Rows 300..309 of the head are padding, id 17 is a hole; both are made the most likely everywhere.
    model = make_teacher()
    with torch.no_grad():
        model.lm_head.weight[[17, 305]] = 50 * model.lm_head.weight.sum(0).sign()
    rows = random_rows([20], vocab_size=300)
    (signal,) = score(model, rows, ScoreRequest(top_k=6, token_mask_size=300, missing_ids=(17,)))
    assert int(signal.token_ids.max()) < 300
    assert not (signal.token_ids == 17).any()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([rows[0].input_ids])).logits[0, :-1, :300].clone()
    logits[:, 17] = -torch.inf
    assert_signal(signal, logits.log_softmax(-1), 6)
    mass = signal.logprobs.exp().sum(-1) + signal.log_tail.exp()
    torch.testing.assert_close(mass, torch.ones(19))


@pytest.mark.parametrize("vocab_size", [5, 64, 130, 1000, 4099])
@pytest.mark.parametrize("top_k", [1, 5, 30])
def test_chunk_topk_is_the_top_k(vocab_size, top_k):
    if top_k > vocab_size:
        top_k = vocab_size
    logits = torch.randn(11, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    logits[3] = torch.arange(vocab_size) * 1e-3  # the whole support in the last blocks
    logits[4] = -torch.arange(vocab_size) * 1e-3
    signal = chunk_topk(logits.clone(), top_k, (2.0,))
    wanted = logits.log_softmax(-1)
    if top_k == vocab_size:
        torch.testing.assert_close(signal.logprobs, wanted.topk(top_k).values)
        assert (signal.log_tail == -torch.inf).all()
    else:
        assert_signal(signal, wanted, top_k, (2.0,))
    assert (signal.logprobs.diff(dim=-1) <= 0).all()


def test_ties_are_distinct_ids():
    signal = chunk_topk(torch.zeros(2, 640), 5)
    assert all(len(set(ids)) == 5 for ids in signal.token_ids.tolist())
    torch.testing.assert_close(signal.log_tail.exp(), torch.full((2,), 635 / 640))


def test_tail_is_not_a_subtraction():
    # Tail mass near 1e-9: 1 - sum(p) in fp32 is 0 or off by a factor.
    logits = torch.full((1, 1000), -20.0)
    logits[0, :2] = torch.tensor([10.0, 9.0])
    signal = chunk_topk(logits.double(), 2)
    found = chunk_topk(logits.clone(), 2)
    exact = math.log(998) - 20.0 - math.log(math.exp(10) + math.exp(9) + 998 * math.exp(-20))
    assert abs(float(signal.log_tail[0]) - exact) < 1e-12
    assert abs(float(found.log_tail[0]) - exact) < 1e-5


def test_modes_and_flags_are_restored():
    model = make_teacher(attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    model.lm_head.weight.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rows = random_rows([12])
    (signal,) = score(model, rows, ScoreRequest(top_k=5, token_mask_size=310))
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert not signal.logprobs.requires_grad
    assert_signal(signal, reference_logprobs(model.eval(), rows[0].input_ids)[:-1], 5)


def test_adapters_are_part_of_the_teacher():
    model = make_teacher()
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    ).eval()
    rows = random_rows([15])
    (signal,) = score(adapted, rows, ScoreRequest(top_k=5, token_mask_size=310))
    assert_signal(signal, reference_logprobs(adapted, rows[0].input_ids)[:-1], 5)
    prefixed = get_peft_model(make_teacher(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="virtual tokens"):
        TransformersTeacher(prefixed)


def test_low_precision_teacher():
    model = make_teacher().to(torch.bfloat16)
    rows = random_rows([15])
    (signal,) = score(model, rows, ScoreRequest(top_k=5, token_mask_size=310))
    assert signal.logprobs.dtype == torch.float32
    assert_signal(signal, reference_logprobs(model, rows[0].input_ids)[:-1], 5, tolerance=0.1)


def test_a_head_that_is_not_the_last_step_is_refused():
    class Shifted(type(make_teacher())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if kwargs["input_ids"].any():
                output.logits = output.logits + 1.0 + torch.arange(output.logits.shape[-1])
            return output

    model = make_teacher()
    model.__class__ = Shifted
    with pytest.raises(ValueError, match="Shifted cannot be used"):
        score(model, random_rows([5]), ScoreRequest(top_k=2))


def test_options_are_checked():
    with pytest.raises(ValueError, match="`batch_tokens` is 0"):
        TransformersTeacher(make_teacher(), batch_tokens=0)
    with pytest.raises(ValueError, match="already a model in memory"):
        TransformersTeacher(make_teacher(), model_init_kwargs={"dtype": "bfloat16"})


def test_fingerprint_follows_every_weight():
    model = make_teacher()
    before = TransformersTeacher(model).describe().fingerprint
    assert TransformersTeacher(make_teacher()).describe().fingerprint == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    assert TransformersTeacher(model).describe().fingerprint != before
    rows = model.model.embed_tokens.weight
    with torch.no_grad():
        rows[[4, 5]] = rows[[5, 4]]
    swapped = TransformersTeacher(model).describe().fingerprint
    with torch.no_grad():
        rows[[4, 5]] = rows[[5, 4]]
    assert TransformersTeacher(model).describe().fingerprint != swapped


def test_batches_are_bounded_and_stable():
    lengths = [3, 10, 4, 10, 1, 70]
    batches = length_sorted_batches(lengths, 20)
    assert batches == [[5], [1, 3], [2, 0, 4]]
    assert length_sorted_batches([], 20) == []


def test_completions_end_with_their_end():
    assert cut_after_end([5, 6, 0, 7], {0}) == [5, 6, 0]
    assert cut_after_end([5, 6], {0}) == [5, 6]
