import math
import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_offline_distill import DataCollatorForOfflineDistillation
from trl_offline_distill.teacher_cache import TeacherTopK, decode_topk, encode_topk, select_support
from trl_offline_distill.teacher_cache.codecs import MinMassLayout


VOCAB = 40
FEATURES = Features(
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
    teacher_topk=List(Value("large_binary")),
    teacher_manifest=Value("string"),
)


def one_hot_blob(token_id: int) -> bytes:
    """A teacher that is sure of one token."""
    return encode_topk(
        TeacherTopK(torch.tensor([[token_id]]), torch.zeros(1, 1), torch.tensor([-torch.inf])), vocab_size=VOCAB
    )[0]


def example(input_ids: list[int], prompt: int = 1, garbage: bytes = b"") -> dict:
    """A cached row whose teacher is sure of the token that follows; `garbage` at rows that predict nothing."""
    labels = [-100] * prompt + input_ids[prompt:]
    blobs = [one_hot_blob(token) if label != -100 else garbage for token, label in zip(input_ids[1:], labels[1:])]
    return {"input_ids": input_ids, "labels": labels, "teacher_topk": [*blobs, garbage]}


def taught(batch: dict) -> list[tuple[int, int]]:
    """(trained label, the teacher's token) of every position that has a trained label, after the shift."""
    labels = batch["labels"][:, 1:]
    trained = labels != -100
    ids = batch["teacher_token_ids"][:, :-1][trained]
    values = batch["teacher_logprobs"][:, :-1][trained]
    assert bool((values.max(-1).values > -torch.inf).all())
    return list(zip(labels[trained].tolist(), ids[:, 0].tolist()))


def assert_blank_elsewhere(batch: dict) -> None:
    blank = torch.ones_like(batch["labels"], dtype=torch.bool)
    blank[:, :-1] = batch["labels"][:, 1:] == -100
    assert bool(batch["teacher_logprobs"][blank].isneginf().all())
    assert bool((batch["teacher_token_ids"][blank] == 0).all())
    assert bool((batch["teacher_log_tail"][blank] == 0).all())


def test_row_t_describes_token_t_plus_one():
    """Garbage at the rows that predict nothing never reaches the batch."""
    row = example([5, 6, 7, 8, 9], prompt=2, garbage=b"\xff garbage")
    batch = DataCollatorForOfflineDistillation(pad_token_id=0)([row])
    assert batch["teacher_token_ids"][0, :, 0].tolist() == [0, 7, 8, 9, 0]
    assert batch["teacher_logprobs"][0, :, 0].tolist() == [-math.inf, 0, 0, 0, -math.inf]
    assert taught(batch) == [(7, 7), (8, 8), (9, 9)]


@pytest.mark.parametrize(
    "options", [{}, {"padding_free": True}, {"return_position_ids": True}, {"pad_to_multiple_of": 8}]
)
def test_keys_and_values_of_trl_are_untouched(options):
    rows = [example([5, 6, 7, 8, 9]), example([1, 2, 3], prompt=2)]
    ours = DataCollatorForOfflineDistillation(pad_token_id=0, **options)(rows)
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, **options)(rows)
    assert set(ours) - set(theirs) == {"teacher_token_ids", "teacher_logprobs", "teacher_log_tail"}
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key
    shape = theirs["input_ids"].shape
    assert ours["teacher_token_ids"].shape == ours["teacher_logprobs"].shape == (*shape, 1)
    assert ours["teacher_log_tail"].shape == shape
    assert ours["teacher_logprobs"].dtype == ours["teacher_log_tail"].dtype == torch.float32


SAMPLES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda drawn: (drawn[0], min(drawn))), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=60)
@given(samples=SAMPLES, multiple=st.sampled_from([None, 4]), cached_last=st.booleans())
def test_padded_flattened_and_packed_rows_teach_the_same(samples, multiple, cached_last):
    """Whatever the form, a label meets the row that predicts it, and no sample meets its neighbour's first token.

    `cached_last`: the last row of a sample holds a blob, as after truncation, and the first label is not masked, as in
    a fragment of a split sample.
    """
    generator = np.random.default_rng(len(samples))
    rows = []
    for length, prompt in samples:
        row = example(generator.integers(1, VOCAB, length).tolist(), prompt=prompt)
        if cached_last:
            row["teacher_topk"][-1] = one_hot_blob(0)
            row["labels"][0] = row["input_ids"][0]
        rows.append(row)
    packed = {key: [entry for row in rows for entry in row[key]] for key in ("input_ids", "labels", "teacher_topk")}
    packed["seq_lengths"] = [length for length, _ in samples]
    expected = sorted((label, label) for row in rows for label in row["labels"][1:] if label != -100)
    options = {"pad_token_id": 0, "pad_to_multiple_of": multiple}
    flat = {**options, "padding_free": True}
    for chosen, examples, copies in (
        (options, rows, 1),
        (flat, rows, 1),
        (options, [packed], 1),
        (flat, [packed], 1),
        (options, [packed, packed], 2),
        (flat, [packed, packed], 2),
    ):
        batch = DataCollatorForOfflineDistillation(**chosen)(examples)
        assert sorted(taught(batch)) == sorted(expected * copies)
        assert_blank_elsewhere(batch)


def test_packing_by_trl_keeps_samples_apart():
    rows = [example([3, 4, 5, 6, 7], prompt=0), example([8, 9, 10], prompt=0), example(list(range(11, 18)), prompt=0)]
    dataset = Dataset.from_list([{**row, "teacher_manifest": "{}"} for row in rows], features=FEATURES)
    packed = pack_dataset(dataset.remove_columns("teacher_manifest"), seq_length=15, strategy="bfd")
    assert len(packed) == 1
    flat = DataCollatorForOfflineDistillation(pad_token_id=0, padding_free=True)([packed[0]])
    padded = DataCollatorForOfflineDistillation(pad_token_id=0)(rows)
    assert sorted(taught(flat)) == sorted(taught(padded))
    assert len(taught(flat)) == 15 - 3
    assert all(label == token for label, token in taught(flat))


def test_ragged_supports_are_filled_with_absent_entries():
    full = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    blobs = [
        encode_topk(select_support(full[row : row + 1], top_k=k), vocab_size=VOCAB)[0]
        for row, k in enumerate((2, 5, 3))
    ]
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "teacher_topk": [*blobs, b""]}
    batch = DataCollatorForOfflineDistillation(pad_token_id=0)([row])
    assert batch["teacher_logprobs"].shape == (1, 4, 5)
    assert (batch["teacher_logprobs"][0] > -torch.inf).sum(-1).tolist() == [2, 5, 3, 0]


def test_rows_of_several_teachers_and_layouts():
    full = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    blobs = [
        encode_topk(select_support(full[:1], top_k=4, tail_temperatures=(2.0, 4.0)), vocab_size=VOCAB)[0],
        encode_topk(select_support(full[1:2], top_k=20, tail_temperatures=(2.0,)), vocab_size=VOCAB, layout="compact")[
            0
        ],
        encode_topk(select_support(full[2:3], top_k=20), vocab_size=VOCAB, layout=MinMassLayout(0.5, min_k=2))[0],
        encode_topk(
            select_support(full[3:], layout="sampled", row_keys=torch.arange(1)), vocab_size=VOCAB, layout="sampled"
        )[0],
    ]
    rows = [{"input_ids": [1, 2], "labels": [-100, 2], "teacher_topk": [blob, b""]} for blob in blobs]
    batch = DataCollatorForOfflineDistillation(pad_token_id=0)(rows)
    for row, blob in enumerate(blobs):
        alone = decode_topk([blob])
        present = batch["teacher_logprobs"][row, 0] > -torch.inf
        assert torch.equal(
            batch["teacher_logprobs"][row, 0][present], alone.logprobs[0][alone.logprobs[0] > -torch.inf]
        )
        assert batch["teacher_log_tail"][row, 0] == alone.log_tail[0]
    assert "teacher_log_tail_at" not in batch
    two = DataCollatorForOfflineDistillation(pad_token_id=0)(rows[:2])
    assert two["teacher_log_tail_at"].shape == (2, 2, 1)
    assert torch.equal(
        two["teacher_log_tail_at"][:, 0, 0], torch.stack([decode_topk([b]).log_tail_at[0, 0] for b in blobs[:2]])
    )


def test_tail_temperatures_are_chosen_in_the_order_asked_for():
    full = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    blob = encode_topk(select_support(full, top_k=4, tail_temperatures=(2.0, 4.0)), vocab_size=VOCAB)[0]
    row = {"input_ids": [1, 2], "labels": [-100, 2], "teacher_topk": [blob, b""]}
    batch = DataCollatorForOfflineDistillation(pad_token_id=0, tail_temperatures=(4.0, 2.0))([row])
    assert torch.equal(batch["teacher_log_tail_at"][0, 0], decode_topk([blob]).log_tail_at[0].flip(0))
    masked = {**row, "labels": [-100, -100]}
    empty = DataCollatorForOfflineDistillation(pad_token_id=0, tail_temperatures=(4.0, 2.0))([masked])
    assert empty["teacher_log_tail_at"].shape == (1, 2, 2)
    with pytest.raises(ValueError, match=r"asks for \[8.0\].*\[2.0, 4.0\]"):
        DataCollatorForOfflineDistillation(pad_token_id=0, tail_temperatures=(8.0,))([row])


def test_top_k_moves_the_dropped_mass_into_the_tail():
    full = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    blobs = encode_topk(select_support(full, top_k=20), vocab_size=VOCAB)
    row = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "teacher_topk": [*blobs, b""]}
    batch = DataCollatorForOfflineDistillation(pad_token_id=0, top_k=3)([row])
    assert batch["teacher_logprobs"].shape == (1, 3, 3)
    total = batch["teacher_logprobs"][0, :2].exp().sum(-1) + batch["teacher_log_tail"][0, :2].exp()
    torch.testing.assert_close(total, torch.ones(2), rtol=0, atol=2e-3)


def test_a_batch_in_which_nothing_is_trained():
    row = {"input_ids": [1, 2], "labels": [-100, -100], "teacher_topk": [b"", b""]}
    for padding_free in (False, True):
        batch = DataCollatorForOfflineDistillation(pad_token_id=0, padding_free=padding_free)([row, row])
        assert batch["teacher_logprobs"].shape[-1] == 1
        assert_blank_elsewhere(batch)


# Schema: whatever capture returned, what is stored has one type and gives one batch


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64", "numpy", "lists"])
def test_one_schema_and_one_batch_whatever_the_source_type(kind):
    ids, logprobs, log_tail = [[3, 7], [1, 9]], [[-0.5, -2.0], [-0.25, -3.0]], [-1.5, -2.0]
    dtype = getattr(torch, kind, torch.float32)
    parts = [ids, logprobs, log_tail]
    if kind == "numpy":
        parts = [np.array(value) for value in parts]
    elif kind != "lists":
        parts = [torch.tensor(ids), torch.tensor(logprobs, dtype=dtype), torch.tensor(log_tail, dtype=dtype)]
    blobs = encode_topk(TeacherTopK(*parts), vocab_size=VOCAB)
    row = {"input_ids": [1, 3, 1], "labels": [-100, 3, 1], "teacher_topk": [*blobs, b""], "teacher_manifest": "{}"}
    dataset = Dataset.from_list([row], features=FEATURES)
    empty = Dataset.from_dict({name: [] for name in FEATURES}, features=FEATURES)
    joined = concatenate_datasets([empty, dataset])
    assert joined.features == FEATURES
    batch = DataCollatorForOfflineDistillation(pad_token_id=0)([joined[0]])
    assert batch["teacher_token_ids"][0].tolist() == [[3, 7], [1, 9], [0, 0]]
    assert batch["teacher_logprobs"][0, :2].tolist() == logprobs


# Reading: the same tensors as a plain NumPy reading of the bytes, for every shape, through workers


def numpy_decode(blob: bytes, bits: int) -> tuple[list[int], list[float], float]:
    """Reads one blob of the default layout bit by bit, from the description of the format."""
    size = next(
        k for k in range(1, 200) if 4 + 2 * k + sum(-(-k * w // 8) for w in (16, 8, 4, 2, 1) if bits & w) == len(blob)
    )
    values = np.frombuffer(blob[4 : 4 + 2 * size], "<f2")
    ids, start, shift = [0] * size, 4 + 2 * size, 0
    for width in (16, 8, 4, 2, 1):
        if not bits & width:
            continue
        plane = int.from_bytes(blob[start : start + -(-size * width // 8)], "little")
        for entry in range(size):
            ids[entry] |= ((plane >> (entry * width)) & ((1 << width) - 1)) << shift
        start, shift = start + -(-size * width // 8), shift + width
    return ids, values.tolist(), float(np.frombuffer(blob[2:4], "<f2")[0])


@pytest.mark.parametrize("vocab_size", [40, 32_000, 151_936, 262_208])
@pytest.mark.parametrize(("lengths", "supports"), [([2], [1]), ([2, 9], [5]), ([4, 4], [1]), ([6, 6, 6], [7, 3, 1])])
def test_batches_equal_a_plain_numpy_reading(vocab_size, lengths, supports):
    generator = np.random.default_rng(0)
    rows = []
    for length, top_k in zip(lengths, supports * len(lengths)):
        ids = torch.from_numpy(
            np.stack([generator.choice(vocab_size, top_k, replace=False) for _ in range(length - 1)])
        )
        values = torch.from_numpy(generator.normal(0, 2, (length - 1, top_k + 1))).log_softmax(-1)
        blobs = encode_topk(TeacherTopK(ids, values[:, 1:], values[:, 0]), vocab_size=vocab_size)
        tokens = list(range(length))
        rows.append({"input_ids": tokens, "labels": [-100, *tokens[1:]], "teacher_topk": [*blobs, b""]})
    batch = DataCollatorForOfflineDistillation(pad_token_id=0)(rows)
    for row, cached in enumerate(rows):
        for token, blob in enumerate(cached["teacher_topk"][:-1]):
            ids, values, log_tail = numpy_decode(blob, (vocab_size - 1).bit_length())
            assert batch["teacher_token_ids"][row, token, : len(ids)].tolist() == ids
            assert batch["teacher_logprobs"][row, token, : len(ids)].tolist() == values
            assert batch["teacher_log_tail"][row, token].item() == log_tail


@pytest.mark.parametrize("streaming", [False, True])
def test_works_in_dataloader_workers(streaming):
    rows = [{**example([1 + index, 2 + index, 3 + index]), "teacher_manifest": "{}"} for index in range(8)]
    dataset = Dataset.from_list(rows, features=FEATURES)
    source = dataset.to_iterable_dataset(num_shards=2) if streaming else dataset
    collator = DataCollatorForOfflineDistillation(pad_token_id=0)
    pairs = [
        pair
        for batch in DataLoader(source, batch_size=2, num_workers=2, collate_fn=collator)
        for pair in taught(batch)
    ]
    assert sorted(pairs) == sorted((token, token) for index in range(8) for token in (2 + index, 3 + index))


def test_is_picklable():
    collator = DataCollatorForOfflineDistillation(pad_token_id=3, top_k=2, tail_temperatures=(2.0,))
    assert pickle.loads(pickle.dumps(collator)) == collator


# Refusals


def poisoned(value: float, where: str) -> bytes:
    blob = bytearray(
        encode_topk(TeacherTopK(torch.tensor([[3]]), torch.tensor([[-1.0]]), torch.tensor([-1.0])), vocab_size=VOCAB)[
            0
        ]
    )
    start = {"log_tail": 2, "logprobs": 4}[where]
    blob[start : start + 2] = np.array(value, "<f2").tobytes()
    return bytes(blob)


@pytest.mark.parametrize("value", [math.nan, math.inf, 5.0])
@pytest.mark.parametrize("where", ["logprobs", "log_tail"])
@pytest.mark.parametrize("padding_free", [False, True])
def test_nan_in_a_trained_row_is_refused_and_elsewhere_never_matters(value, where, padding_free):
    collator = DataCollatorForOfflineDistillation(pad_token_id=0, padding_free=padding_free)
    good, bad = example([5, 6, 7, 8], prompt=2), example([1, 2, 3, 4, 9], prompt=2)
    bad["teacher_topk"][2] = poisoned(value, where)
    with pytest.raises(ValueError, match="row 1 of the batch, token 2"):
        collator([good, bad])
    bad["labels"][3] = -100
    clean = example([1, 2, 3, 4, 9], prompt=2)
    clean["labels"][3], clean["teacher_topk"][2] = -100, b""
    expected = collator([good, clean])
    for key, tensor in collator([good, bad]).items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(expected[key])), key


def test_a_trained_token_without_a_blob_is_refused():
    row = example([5, 6, 7, 8])
    row["teacher_topk"][1] = b""
    with pytest.raises(ValueError, match=r"no blob at row 1 of the batch, token 1.*labels"):
        DataCollatorForOfflineDistillation(pad_token_id=0)([example([1, 2]), row])


def test_other_lengths_are_refused():
    row = example([5, 6, 7, 8])
    row["teacher_topk"] = row["teacher_topk"][:3]
    with pytest.raises(ValueError, match=r"`teacher_topk` has 3 entries and `input_ids` 4 in row 1"):
        DataCollatorForOfflineDistillation(pad_token_id=0)([example([1, 2]), row])


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"`teacher_topk` is missing in row 0.*input_ids"):
        DataCollatorForOfflineDistillation(pad_token_id=0)([{"input_ids": [1, 2], "labels": [-100, 2]}])


def test_unknown_blobs_are_refused_where_they_are_trained():
    row = example([5, 6, 7])
    row["teacher_topk"][0] = b"\xf3\x01\x02"
    with pytest.raises(ValueError, match="unknown header 'f301'"):
        DataCollatorForOfflineDistillation(pad_token_id=0)([row])


def test_numpy_bytes_that_lost_their_zeros_are_refused():
    row = example([5, 6, 7])
    row["teacher_topk"] = np.array(row["teacher_topk"])
    with pytest.raises(ValueError, match="must be Python `bytes`"):
        DataCollatorForOfflineDistillation(pad_token_id=0)([row])


def test_top_k_must_be_positive():
    with pytest.raises(ValueError, match="`top_k` is 0"):
        DataCollatorForOfflineDistillation(pad_token_id=0, top_k=0)
