import types

import pytest
from datasets import Dataset
from tiny_students import FEATURES, VOCAB, cached_dataset, make_trainer, tiny_model, tiny_tokenizer, token_rows

from trl_offline_distill import cached_dataset as module
from trl_offline_distill.cached_dataset import (
    StudentLimits,
    check_columns,
    check_lengths,
    check_rows,
    check_trained_positions,
    prepare_cached_dataset,
)


@pytest.fixture(scope="module")
def teacher():
    return tiny_model(seed=1).eval()


@pytest.fixture(scope="module")
def cached(teacher):
    return cached_dataset(token_rows([5, 3, 7, 9, 4], prompt=1), teacher)


def arguments(**options):
    defaults = {
        "max_length": None,
        "truncation_mode": "keep_start",
        "packing_strategy": "bfd",
        "shuffle_dataset": False,
        "dataset_num_proc": None,
        "seed": 0,
    }
    return types.SimpleNamespace(**{**defaults, **options})


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_every_row_is_checked_by_one_rank_under_its_own_number(cached, world_size):
    rows = cached.to_list()
    for bad in range(len(rows)):
        damaged = [dict(row) for row in rows]
        damaged[bad]["teacher_topk"] = [b"\xf0\x06ab"] * len(rows[bad]["input_ids"])
        dataset = Dataset.from_list(damaged, features=FEATURES)
        found = []
        for rank in range(world_size):
            try:
                check_rows(dataset, "train", VOCAB, rank, world_size)
            except ValueError as error:
                found.append(str(error))
        assert len(found) == 1
        assert found[0].startswith(f"Row {bad} of the train dataset: ")


@pytest.mark.parametrize("tokens_at_a_time", [1, 8, 10_000])
def test_checked_in_batches_of_any_size(cached, monkeypatch, tokens_at_a_time):
    monkeypatch.setattr(module, "_CHECKED_TOKENS", tokens_at_a_time)
    assert check_rows(cached.shuffle(seed=1), "train", VOCAB)
    with pytest.raises(ValueError, match=r"Row \d of the train dataset: .* holds token id \d+"):
        check_rows(cached, "train", 10)


def test_whether_anything_trains(teacher):
    masked = [{"input_ids": [3, 4, 5], "labels": [3, -100, -100]}]  # nothing predicts the first token
    assert not check_rows(cached_dataset(masked, teacher), "train", VOCAB)
    assert not check_trained_positions([3, -100], [b"", b""], VOCAB, "here")
    assert not check_trained_positions([3], [b""], VOCAB, "here")


def test_an_indexed_dataset_is_read_through_its_indices(cached):
    chosen = cached.select([4, 0])
    assert check_lengths(chosen, "train") == 5
    assert check_columns(chosen, "train")["input_ids"] == cached[4]["input_ids"]
    assert check_rows(chosen, "train", VOCAB)


def test_a_shuffled_dataset_is_not_written_out(tmp_path, cached, capfd):
    make_trainer(tmp_path, tiny_model(), cached.shuffle(seed=1))
    assert "Flattening" not in capfd.readouterr().err


def test_rows_in_memory_are_bounded_by_bytes(cached, monkeypatch):
    monkeypatch.setattr(module, "_PACKED_BYTES", 1)
    one_by_one = prepare_cached_dataset(cached, arguments(max_length=9), True, "train", StudentLimits())
    assert [len(row["seq_lengths"]) for row in one_by_one] == [1] * 5
    monkeypatch.undo()
    together = prepare_cached_dataset(cached, arguments(max_length=9), True, "train", StudentLimits())
    assert sum(len(row["seq_lengths"]) for row in together) == 5
    assert len(together) < 5


def test_streamed_rows_learn_the_head_once_the_student_is_there(cached):
    limits = StudentLimits(tokenizer=tiny_tokenizer())
    stream = prepare_cached_dataset(cached.to_iterable_dataset(), arguments(max_length=4), False, "train", limits)
    assert [len(row["input_ids"]) for row in stream] == [4, 3, 4, 4, 4]
    limits.head_rows = 10
    limits.accepted.clear()
    with pytest.raises(ValueError, match="head has 10 rows"):
        next(iter(stream))


def test_typed_lists_are_named(cached):
    wrong = cached.remove_columns("teacher_topk").add_column("teacher_topk", [3] * 5)
    with pytest.raises(ValueError, match="holds int in column 'teacher_topk'"):
        check_columns(wrong, "train")
