import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_offline_distill.teacher_cache import LAYOUTS, TeacherTopK, decode_topk, encode_topk, select_support
from trl_offline_distill.teacher_cache.codecs import MinMassLayout, SampledLayout, id_bits, max_token_id


def peaked_logprobs(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Full log-probabilities `[rows, V]` of a language model's shape: few likely tokens, a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    logits += 6.0 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) * (logits > 6)
    return logits.log_softmax(-1)


def signal(rows: int, top_k: int, vocab_size: int, seed: int = 0, temperatures: tuple[float, ...] = ()) -> TeacherTopK:
    """A signal over a vocabulary too large to write out: random ids, half of the mass in the tail."""
    generator = np.random.default_rng(seed)
    token_ids = np.stack([generator.choice(vocab_size, top_k, replace=False) for _ in range(rows)])
    logprobs = torch.from_numpy(generator.normal(0, 2, (rows, top_k))).log_softmax(-1) + math.log(0.5)
    return TeacherTopK(
        torch.from_numpy(token_ids),
        logprobs,
        torch.full((rows,), math.log(0.5), dtype=torch.float64),
        torch.from_numpy(generator.normal(2, 1, (rows, len(temperatures)))) if temperatures else None,
        temperatures,
        vocab_size,
    )


def as_dicts(teacher: TeacherTopK) -> list[dict[int, float]]:
    return [
        {int(i): float(p) for i, p in zip(ids, values) if p > -math.inf}
        for ids, values in zip(teacher.token_ids, teacher.logprobs)
    ]


@pytest.mark.parametrize(
    ("layout", "vocab_size", "limit"),
    [
        ("default", 151_936, 430),
        ("default", 201_088, 430),
        ("default", 262_144, 430),
        ("default", 262_208, 450),
        ("compact", 151_936, 345),
        ("compact", 201_088, 345),
    ],
)
def test_bytes_a_token(layout, vocab_size, limit):
    blobs = encode_topk(signal(4, 100, vocab_size), vocab_size=vocab_size, layout=layout)
    assert max(map(len, blobs)) <= limit


@pytest.mark.parametrize("layout", ["default", "compact"])
@pytest.mark.parametrize("vocab_size", [2, 256, 32_000, 65_537, 131_073, 151_936, 262_208, 2**24 + 1, 2**31 - 1])
@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 9, 33, 100])
def test_ids_are_exact(layout, vocab_size, top_k):
    top_k = min(top_k, vocab_size)
    teacher = signal(3, top_k, min(vocab_size, 2**24), seed=top_k)
    if vocab_size - 1 not in teacher.token_ids[0]:
        teacher.token_ids[0, 0] = vocab_size - 1
    decoded = decode_topk(encode_topk(teacher, vocab_size=vocab_size, layout=layout))
    assert decoded.top_k == top_k
    assert [set(row) for row in as_dicts(decoded)] == [set(row) for row in as_dicts(teacher)]


def test_default_layout_keeps_fp16_values_in_descending_order():
    full = peaked_logprobs(64, 5000)
    teacher = select_support(full, top_k=100)
    decoded = decode_topk(encode_topk(teacher, vocab_size=5000))
    expected = [{i: float(np.float16(p)) for i, p in row.items()} for row in as_dicts(teacher)]
    assert as_dicts(decoded) == expected
    assert torch.equal(decoded.log_tail, teacher.log_tail.half().float())
    assert bool((decoded.logprobs.diff(dim=-1) <= 0).all())


def test_log_tail_is_stored_and_not_rebuilt_from_rounded_values():
    full = torch.full((1, 40), -30.0, dtype=torch.float64)
    full[0, :4] = math.log(0.25)
    full = full.log_softmax(-1)
    decoded = decode_topk(encode_topk(select_support(full, top_k=4), vocab_size=40))
    rebuilt = 1 - decoded.logprobs.double().exp().sum()
    true = full[0, 4:].exp().sum()
    assert float(decoded.log_tail.exp()) == pytest.approx(float(true), rel=0.02)
    assert abs(float(rebuilt - true)) > 100 * float(true)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_round_trip_property(data):
    vocab_size = data.draw(st.integers(1, 300_000), label="vocab_size")
    rows = data.draw(st.integers(0, 6), label="rows")
    width = data.draw(st.integers(1, min(vocab_size, 40)), label="K")
    temperatures = tuple(data.draw(st.lists(st.sampled_from([0.5, 2.0, 4.0, 1.375]), unique=True, max_size=3)))
    layout = data.draw(st.sampled_from(["default", "compact"]))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    spread = data.draw(st.sampled_from([0.01, 1.0, 5.0, 30.0]), label="spread")
    token_ids = np.stack(
        [generator.choice(vocab_size, width, replace=False) for _ in range(rows)] or [np.zeros(width)]
    )
    token_ids = token_ids[:rows].astype(np.int64)
    mass = torch.from_numpy(generator.normal(0, spread, (rows, width + 1))).log_softmax(-1)
    logprobs, log_tail = mass[:, :-1].clone(), mass[:, -1]
    absent = torch.from_numpy(generator.random((rows, width)) < 0.3)
    logprobs[absent] = -torch.inf
    token_ids[absent.numpy()] = generator.integers(-(2**40), 2**40)
    at = torch.from_numpy(generator.normal(0, 3, (rows, len(temperatures)))) if temperatures else None
    teacher = TeacherTopK(torch.from_numpy(token_ids), logprobs, log_tail, at, temperatures)
    blobs = encode_topk(teacher, vocab_size=vocab_size, layout=layout)
    decoded = decode_topk(blobs)
    assert len(blobs) == rows
    for row, (blob, before, after) in enumerate(zip(blobs, as_dicts(teacher), as_dicts(decoded))):
        assert set(before) == set(after)
        if not blob:
            assert not before
            continue
        assert float(decoded.log_tail[row]) == pytest.approx(float(log_tail[row]), rel=2**-11, abs=1e-7)
        ranked = sorted(before, key=before.get, reverse=True)
        twelfth = before[ranked[min(11, len(ranked) - 1)]]
        for rank, token_id in enumerate(ranked):
            tolerance = 2**-10 * abs(before[token_id]) + 1e-7
            if layout == "default" or rank < 12:
                assert after[token_id] == pytest.approx(before[token_id], abs=tolerance)
            else:
                # The 8-bit codes divide exp(-x / 4) evenly, x the distance from the 12th value.
                wanted, found = (math.exp((side[token_id] - twelfth) / 4) for side in (before, after))
                assert found == pytest.approx(
                    wanted, abs=0.51 / 255 + 2**-10 * (abs(twelfth) + abs(before[token_id]) * wanted)
                )
    if temperatures and any(blobs):
        assert decoded.tail_temperatures == temperatures
        filled = torch.tensor([bool(blob) for blob in blobs])
        torch.testing.assert_close(decoded.log_tail_at[filled].double(), at[filled], rtol=2**-11, atol=1e-6)
    # What was read is written again as the same bytes.
    again = encode_topk(decoded, vocab_size=vocab_size)
    assert encode_topk(decode_topk(again), vocab_size=vocab_size) == again


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.sampled_from(["", "default3", "default5", "compact12", "wide", "min_mass", "sampled", "at2"]), max_size=12
    )
)
def test_mixed_blobs_decode_as_each_alone(kinds):
    full = peaked_logprobs(4, 600, seed=3)
    sample = select_support(full, layout="sampled", row_keys=torch.arange(4))
    made = {
        "": [b""] * 4,
        "default3": encode_topk(select_support(full, top_k=3), vocab_size=600),
        "default5": encode_topk(select_support(full, top_k=5), vocab_size=600),
        "compact12": encode_topk(select_support(full, top_k=12), vocab_size=600, layout="compact"),
        "wide": encode_topk(select_support(full, top_k=5), vocab_size=262_208),
        "min_mass": encode_topk(select_support(full, top_k=50), vocab_size=600, layout=MinMassLayout(0.6, min_k=2)),
        "sampled": encode_topk(sample, vocab_size=600, layout="sampled"),
        "at2": encode_topk(select_support(full, top_k=3, tail_temperatures=(2.0,)), vocab_size=600),
    }
    blobs = [made[kind][row % 4] for row, kind in enumerate(kinds)]
    together = decode_topk(blobs)
    for row, blob in enumerate(blobs):
        alone = decode_topk([blob])
        width = alone.top_k
        assert torch.equal(together.token_ids[row, :width], alone.token_ids[0])
        assert torch.equal(together.logprobs[row, :width], alone.logprobs[0])
        assert torch.equal(together.log_tail[row], alone.log_tail[0])
        assert bool((together.logprobs[row, width:] == -torch.inf).all())
        assert bool((together.token_ids[row, width:] == 0).all())
    present = {kind for kind in kinds if kind}
    assert together.tail_temperatures == ((2.0,) if present == {"at2"} else ())


def test_empty_blobs():
    decoded = decode_topk([b"", b""])
    assert decoded.logprobs.shape[0] == 2
    assert bool(decoded.logprobs.isneginf().all())
    assert torch.equal(decoded.log_tail, torch.zeros(2))
    assert decode_topk([]).logprobs.shape[0] == 0


def test_a_row_of_absent_entries_becomes_an_empty_blob():
    logprobs = torch.tensor([[-torch.inf, -torch.inf], [-1.0, -torch.inf]])
    teacher = TeacherTopK(torch.tensor([[7, 7], [1, 9]]), logprobs, torch.tensor([0.0, -0.5]))
    blobs = encode_topk(teacher, vocab_size=5)
    assert blobs[0] == b""
    assert as_dicts(decode_topk(blobs)) == [{}, {1: -1.0}]


def test_bytes_do_not_depend_on_the_order_of_candidates_or_on_neighbours():
    teacher = select_support(peaked_logprobs(5, 400), top_k=20)
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    mixed = TeacherTopK(teacher.token_ids[:, shuffled], teacher.logprobs[:, shuffled], teacher.log_tail)
    blobs = encode_topk(teacher, vocab_size=400)
    assert encode_topk(mixed, vocab_size=400) == blobs
    assert [encode_topk(teacher[row : row + 1], vocab_size=400)[0] for row in range(5)] == blobs


def test_ties_are_ordered_by_id():
    teacher = TeacherTopK(torch.tensor([[9, 3, 5]]), torch.full((1, 3), -2.0), torch.tensor([-0.6]))
    assert decode_topk(encode_topk(teacher, vocab_size=10)).token_ids.tolist() == [[3, 5, 9]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32, torch.int16])
def test_any_dtype_gives_the_same_bytes(dtype, id_dtype):
    values = torch.tensor([[-0.5, -1.5, -2.0]])
    teacher = TeacherTopK(torch.tensor([[4, 0, 2]]), values, torch.tensor([-4.0]))
    cast = TeacherTopK(teacher.token_ids.to(id_dtype), values.to(dtype), teacher.log_tail.to(dtype))
    assert encode_topk(cast, vocab_size=5) == encode_topk(teacher, vocab_size=5)


def test_stored_format_does_not_change():
    """Bytes written by version 1 of the format; caches hold them, so a change here needs a new format code."""
    teacher = TeacherTopK(
        torch.tensor([[151_000, 3, 70_000, 1, 2, 5, 8, 9, 151_935]]),
        torch.tensor([[-0.5, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0]]),
        torch.tensor([-2.5]),
        torch.tensor([[1.5]]),
        (2.0,),
    )
    ids = "d84d 0300 7011 0100 0200 0500 0800 0900 7f51 1200 02"
    values = "00c1 003e 00b8 00c0 00c2 00c4 00c5 00c6 00c7 00c8 80c8"
    for layout, header in {"default": "1112", "compact": "2112"}.items():
        stored = encode_topk(teacher, vocab_size=151_936, layout=layout)[0].hex()
        assert stored == f"{header} d007 {values} {ids}".replace(" ", "")
    longer = TeacherTopK(torch.arange(14)[None], -1.0 - torch.arange(14.0)[None], torch.tensor([-2.0]))
    values = "00c0 00bc 00c0 00c2 00c4 00c5 00c6 00c7 00c8 80c8 00c9 80c9 00ca 00cb 8f ff"
    stored = encode_topk(longer, vocab_size=16, layout="compact")[0].hex()
    assert stored == f"2004{values} 1032547698badc".replace(" ", "")
    counts = torch.tensor([[14.0, 8.0, 5.0, 1.0]])
    sample = TeacherTopK(torch.tensor([[9, 1, 0, 6]]), (counts / 28).log(), torch.tensor([-torch.inf]))
    # Counts of 5 bits (four low ones as pairs in a byte, then the high ones), then ids of 4 bits as pairs.
    assert encode_topk(sample, vocab_size=10, layout=SampledLayout(28))[0].hex() == "3504" + "8e15" + "00" + "1960"


@pytest.mark.parametrize(("vocab_size", "bits"), [(1, 1), (2, 1), (3, 2), (65_536, 16), (65_537, 17), (262_145, 19)])
def test_id_bits(vocab_size, bits):
    assert id_bits(vocab_size) == bits


# Fewer candidates


@pytest.mark.parametrize("layout", ["default", "compact"])
def test_reading_fewer_candidates_moves_their_mass_into_the_tail(layout):
    full = peaked_logprobs(6, 800)
    blobs = encode_topk(select_support(full, top_k=60, tail_temperatures=(2.0,)), vocab_size=800, layout=layout)
    fewer = decode_topk(blobs, top_k=7)
    direct = select_support(full, top_k=7, tail_temperatures=(2.0,))
    assert fewer.top_k == 7
    torch.testing.assert_close(fewer.log_tail.double(), direct.log_tail, rtol=0, atol=2e-2)
    torch.testing.assert_close(fewer.log_tail_at.double(), direct.log_tail_at, rtol=0, atol=2e-2)
    total = fewer.logprobs.exp().sum(-1) + fewer.log_tail.exp()
    torch.testing.assert_close(total, torch.ones(6), rtol=0, atol=5e-3)


# Layouts


def test_select_support_tail_normalisers():
    full = peaked_logprobs(3, 50)
    teacher = select_support(full, top_k=5, tail_temperatures=(0.5, 2.0, 4.0))
    for row in range(3):
        rest = sorted(full[row].tolist())[:-5]
        assert float(teacher.log_tail[row]) == pytest.approx(math.log(sum(map(math.exp, rest))))
        for column, temperature in enumerate((0.5, 2.0, 4.0)):
            expected = math.log(sum(math.exp(value / temperature) for value in rest))
            assert float(teacher.log_tail_at[row, column]) == pytest.approx(expected)


def test_compact_layout_keeps_its_first_twelve_and_its_last_value():
    teacher = select_support(peaked_logprobs(20, 3000), top_k=100)
    exact = decode_topk(encode_topk(teacher, vocab_size=3000)).logprobs
    compact = decode_topk(encode_topk(teacher, vocab_size=3000, layout="compact")).logprobs
    assert torch.equal(compact[:, :12], exact[:, :12])
    torch.testing.assert_close(compact[:, -1], exact[:, -1])
    assert bool((compact.diff(dim=-1) <= 0).all())
    log_p = torch.cat([teacher.logprobs, teacher.log_tail[:, None]], 1)
    log_q = torch.cat([compact.double(), teacher.log_tail[:, None]], 1).log_softmax(-1)
    assert float((log_p.exp() * (log_p - log_q)).sum(1).max()) < 1e-5


def test_compact_layout_with_equal_values_and_short_supports():
    for count in range(1, 16):
        teacher = TeacherTopK(
            torch.arange(count)[None], torch.full((1, count), -math.log(20)), torch.tensor([math.log(1 - count / 20)])
        )
        decoded = decode_topk(encode_topk(teacher, vocab_size=20, layout="compact"))
        torch.testing.assert_close(decoded.logprobs, teacher.logprobs.half().float())


def test_min_mass_stops_at_the_mass_and_keeps_the_rest_in_the_tail():
    probabilities = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.03, 0.01], [0.99, 0.002, 0.002, 0.002, 0.002, 0.002]])
    full = probabilities.double().log()
    layout = MinMassLayout(0.85, min_k=2, step=1)
    decoded = decode_topk(encode_topk(select_support(full, top_k=5, layout=layout), vocab_size=6, layout=layout))
    assert [len(row) for row in as_dicts(decoded)] == [3, 2]
    torch.testing.assert_close(decoded.log_tail.exp(), torch.tensor([0.1, 0.008]), rtol=2e-3, atol=1e-4)


def test_min_mass_bounds():
    full = peaked_logprobs(200, 1000)
    blobs = encode_topk(select_support(full, top_k=100), vocab_size=1000, layout="min_mass")
    sizes = [len(row) for row in as_dicts(decode_topk(blobs))]
    assert min(sizes) >= 8
    assert max(sizes) <= 100
    for row, size in enumerate(sizes):
        ranked = full[row].exp().sort(descending=True).values
        assert size == 100 or size == 8 or float(ranked[:size].sum()) >= 0.999
        assert size == 8 or float(ranked[: size - 4].sum()) < 0.999
        assert size % 4 == 0


def test_min_mass_moves_the_mass_at_each_temperature():
    full = peaked_logprobs(4, 300)
    layout = MinMassLayout(0.5, min_k=3)
    kept = select_support(full, top_k=40, tail_temperatures=(2.0,), layout=layout)
    size = [len(row) for row in as_dicts(kept)]
    for row in range(4):
        rest = full[row].sort().values[: 300 - size[row]]
        assert float(kept.log_tail_at[row, 0]) == pytest.approx(float(torch.logsumexp(rest / 2, 0)))


def dense_weights(teacher: TeacherTopK, vocab_size: int) -> torch.Tensor:
    """`[n, V]` probabilities."""
    weights = torch.zeros(len(teacher.log_tail), vocab_size, dtype=torch.float64)
    return weights.scatter_add_(1, teacher.token_ids, teacher.logprobs.double().exp())


def test_sampled_weights_sum_to_one_and_have_no_tail():
    full = peaked_logprobs(50, 2000)
    layout = SampledLayout(28)
    teacher = select_support(full, layout=layout, row_keys=torch.arange(50))
    decoded = decode_topk(encode_topk(teacher, vocab_size=2000, layout=layout))
    torch.testing.assert_close(decoded.logprobs.exp().sum(-1), torch.ones(50))
    assert bool(decoded.log_tail.isneginf().all())
    counts = decoded.logprobs.double().exp() * 28
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-5)
    for row, weights in enumerate(as_dicts(decoded)):
        for token_id, weight in weights.items():
            assert abs(28 * math.exp(weight) - 28 * float(full[row, token_id].exp())) < 1 + 1e-4


def test_sampled_is_unbiased():
    """Mean of 4000 samples against the distribution, each token within five standard errors of its own count."""
    full = torch.tensor([[0.4, 0.25, 0.2, 0.1, 0.04, 0.007, 0.003, 0.0]], dtype=torch.float64).log()
    samples, draws = 4000, 4
    layout = SampledLayout(draws)
    teacher = select_support(full.expand(samples, -1), layout=layout, row_keys=torch.arange(samples), seed=5)
    mean = dense_weights(teacher, 8).mean(0)
    fraction = (draws * full[0].exp()) % 1
    error = (fraction * (1 - fraction)).sqrt() / draws / math.sqrt(samples)
    assert bool(((mean - full[0].exp()).abs() <= 5 * error + 1e-8).all())
    assert float(mean[-1]) == 0


def test_sampled_gradient_is_unbiased_for_the_forward_kl():
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(1, 12, generator=generator, dtype=torch.float64).log_softmax(-1)
    student = torch.randn(1, 12, generator=generator, dtype=torch.float64)
    teacher = select_support(full.expand(6000, -1), layout=SampledLayout(3), row_keys=torch.arange(6000))
    gradient = student.softmax(-1) - dense_weights(teacher, 12)
    exact = student.softmax(-1) - full.exp()
    standard_error = gradient.std(0) / math.sqrt(6000)
    assert bool(((gradient.mean(0) - exact[0]).abs() < 5 * standard_error + 1e-9).all())


def test_sampled_depends_on_seed_and_key_and_not_on_the_chunk():
    full = peaked_logprobs(8, 500)
    keys = torch.arange(8) + 2**40
    whole = select_support(full, layout="sampled", row_keys=keys, seed=1)
    halves = [slice(0, 3), slice(3, 8)]
    parts = [select_support(full[part], layout="sampled", row_keys=keys[part], seed=1) for part in halves]
    assert as_dicts(TeacherTopK.cat(parts)) == as_dicts(whole)
    assert as_dicts(select_support(full, layout="sampled", row_keys=keys, seed=2)) != as_dicts(whole)
    assert as_dicts(select_support(full, layout="sampled", row_keys=keys + 8, seed=1)) != as_dicts(whole)


# Refusals


def broken(**changes) -> TeacherTopK:
    values = {
        "token_ids": torch.tensor([[0, 1], [2, 3]]),
        "logprobs": torch.tensor([[-1.0, -2.0], [-1.0, -2.0]]),
        "log_tail": torch.tensor([-1.0, -1.0]),
    }
    return TeacherTopK(**{**values, **changes})


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        (broken(token_ids=torch.tensor([[0, 1], [2, 2]])), "twice in row 1"),
        (broken(token_ids=torch.tensor([[0, 1], [2, 9]])), "outside 0..8 in row 1"),
        (broken(token_ids=torch.tensor([[0, 1], [-1, 2]])), "outside 0..8 in row 1"),
        (broken(logprobs=torch.tensor([[-1.0, -2.0], [-1.0, torch.nan]])), "row 1"),
        (broken(logprobs=torch.tensor([[-1.0, -2.0], [torch.inf, -1.0]])), "row 1"),
        (broken(logprobs=torch.tensor([[12.0, 3.0], [-1.0, -2.0]])), "row 0"),
        (broken(log_tail=torch.tensor([-1.0, torch.nan])), "log_tail.*row 1"),
        (broken(log_tail=torch.tensor([torch.inf, -1.0])), "log_tail.*row 0"),
        (broken(log_tail=torch.tensor([-1.0, -0.1])), "mass clearly above 1 in row 1"),
        (broken(logprobs=torch.tensor([[-0.1, -0.2], [-1.0, -2.0]])), "mass clearly above 1 in row 0"),
        (broken(log_tail_at=torch.tensor([[0.0], [torch.nan]]), tail_temperatures=(2.0,)), "log_tail_at.*row 1"),
        (broken(logprobs=torch.full((2, 2), -torch.inf), log_tail=torch.full((2,), -torch.inf)), "no mass at all"),
        (broken(token_ids=torch.tensor([[0.0, 1.0], [2.0, 3.0]])), "integers"),
        (broken(log_tail_at=torch.zeros(2, 1), tail_temperatures=(1.0,)), "tail_temperatures"),
        (broken(log_tail_at=torch.zeros(2, 1), tail_temperatures=(1.00001,)), "thousandths"),
        (broken(log_tail_at=torch.zeros(2, 2), tail_temperatures=(2.0, 2.0)), "different"),
    ],
)
def test_encode_refuses(teacher, words):
    with pytest.raises(ValueError, match=words):
        encode_topk(teacher, vocab_size=9)


def test_encode_refuses_a_support_larger_than_the_vocabulary():
    with pytest.raises(ValueError, match="K=2 for vocab_size=1"):
        encode_topk(broken(), vocab_size=1)


def test_encode_refuses_an_unknown_layout():
    with pytest.raises(ValueError, match=r"'dense'.*compact.*default"):
        encode_topk(broken(), vocab_size=9, layout="dense")


def test_encode_refuses_a_signal_that_is_no_sample():
    with pytest.raises(ValueError, match="no sample of 24 draws"):
        encode_topk(broken(), vocab_size=9, layout="sampled")


@pytest.mark.parametrize("changes", [{"row_keys": None}, {"row_keys": torch.arange(3)}, {"tail_temperatures": (2.0,)}])
def test_sampled_refuses_what_it_cannot_do(changes):
    arguments = {"row_keys": torch.arange(2), **changes}
    with pytest.raises(ValueError, match=next(iter(changes))):
        select_support(peaked_logprobs(2, 30), layout="sampled", **arguments)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: MinMassLayout(0.0), "mass"),
        (lambda: MinMassLayout(1.1), "mass"),
        (lambda: MinMassLayout(min_k=0), "min_k"),
        (lambda: MinMassLayout(step=0), "step"),
        (lambda: SampledLayout(0), "draws"),
        (lambda: SampledLayout(256), "draws"),
        (lambda: select_support(torch.zeros(3), top_k=1), "logprobs"),
        (lambda: select_support(torch.zeros(3, 3), top_k=0), "top_k"),
    ],
)
def test_bad_arguments(make, word):
    with pytest.raises(ValueError, match=f"`{word}`"):
        make()


def test_decode_refuses_unknown_headers_by_name():
    blob = encode_topk(broken(), vocab_size=9)[0]
    for header in (b"\xf0\x04", b"\x00\x04", b"\x10\x00", b"\x10\x20"):
        with pytest.raises(ValueError, match=rf"blobs\[1\]`: unknown header '{header.hex()}'"):
            decode_topk([blob, header + blob[2:]])
    with pytest.raises(ValueError, match=r"blobs\[0\]`: unknown header '10'"):
        decode_topk([b"\x10"])


def test_decode_refuses_every_length_that_no_support_has():
    whole = encode_topk(signal(1, 30, 151_936), vocab_size=151_936)[0]
    valid = {2 + 2 + 4 * count + math.ceil(count / 4) for count in range(1, 31)}
    for length in range(2, len(whole)):
        if length in valid:
            assert decode_topk([whole[:length]]).top_k < 30
        else:
            with pytest.raises(ValueError, match=rf"blobs\[0\]`: a length of {length} bytes"):
                decode_topk([whole[:length]])


@pytest.mark.parametrize("layout", ["default", "compact", "min_mass"])
def test_length_tells_the_number_of_entries(layout):
    chosen = LAYOUTS[layout]
    for argument, bits in itertools.product((1, 2, 5), (1, 15, 16, 17, 18, 19, 31)):
        lengths = [chosen.blob_bytes(argument, bits, count) for count in range(1, 300)]
        assert lengths == sorted(set(lengths))


def test_sampled_entries_that_share_a_byte_come_back():
    """Ids and counts of a few bits: several numbers of entries give the same length."""
    for count in range(1, 17):
        counts = torch.ones(1, count)
        layout = SampledLayout(count)
        teacher = TeacherTopK(torch.arange(count)[None], (counts / count).log(), torch.tensor([-torch.inf]))
        decoded = decode_topk(encode_topk(teacher, vocab_size=16, layout=layout))
        assert as_dicts(decoded)[0] == pytest.approx(dict.fromkeys(range(count), -math.log(count)))


@pytest.mark.parametrize("layout", ["default", "compact", "min_mass"])
def test_decoding_works_on_whole_batches(layout):
    """The interpreter makes as many calls for sixteen times the tokens: nothing loops over them."""
    teacher = select_support(peaked_logprobs(256, 2000), top_k=100)
    blobs = encode_topk(teacher, vocab_size=2000, layout=layout)

    def calls(count: int) -> int:
        events = []
        batch = blobs * count
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            decode_topk(batch)
        finally:
            sys.setprofile(None)
        return len(events)

    calls(1)
    assert calls(16) <= 1.2 * calls(1) + 50


def test_max_token_id():
    assert max_token_id([]) == -1
    assert max_token_id([b"", *encode_topk(broken(), vocab_size=9)]) == 3
