import copy
import math

import pytest
import torch

from trl_offline_distill.teacher_cache import TeacherTopK, topk_from_logprobs


def full_logprobs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)


def test_narrow_equals_a_smaller_capture():
    full = full_logprobs(5, 40)
    wide = topk_from_logprobs(full, 20, (0.5, 2.0))
    for top_k in (1, 3, 19):
        narrow, direct = wide.narrow(top_k), topk_from_logprobs(full, top_k, (0.5, 2.0))
        assert torch.equal(narrow.token_ids, direct.token_ids)
        torch.testing.assert_close(narrow.log_tail, direct.log_tail)
        torch.testing.assert_close(narrow.log_tail_at, direct.log_tail_at)
        assert narrow.vocab_size == 40


def test_narrow_keeps_the_most_likely_of_unsorted_rows_and_any_leading_shape():
    wide = topk_from_logprobs(full_logprobs(6, 30), 10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    mixed = TeacherTopK(wide.token_ids[:, order], wide.logprobs[:, order], wide.log_tail)
    shaped = TeacherTopK(mixed.token_ids.view(2, 3, 10), mixed.logprobs.view(2, 3, 10), mixed.log_tail.view(2, 3))
    narrow = shaped.narrow(4)
    assert torch.equal(narrow.token_ids.view(6, 4), wide.token_ids[:, :4])
    torch.testing.assert_close(narrow.log_tail.view(6), wide.narrow(4).log_tail)


def test_narrow_with_absent_entries_and_an_empty_tail_stays_finite():
    teacher = TeacherTopK(
        torch.tensor([[3, 0, 0]]), torch.tensor([[0.0, -torch.inf, -torch.inf]]), torch.tensor([-torch.inf])
    )
    narrow = teacher.narrow(1)
    assert narrow.logprobs.tolist() == [[0.0]]
    assert narrow.log_tail.tolist() == [-math.inf]


def test_narrow_to_more_is_the_same_object_and_zero_is_refused():
    teacher = topk_from_logprobs(full_logprobs(2, 9), 4)
    assert teacher.narrow(4) is teacher
    assert teacher.narrow(9) is teacher
    with pytest.raises(ValueError, match="`top_k` is 0"):
        teacher.narrow(0)


def test_the_whole_vocabulary_leaves_no_tail():
    teacher = topk_from_logprobs(full_logprobs(2, 9), 50, (2.0,))
    assert teacher.top_k == 9
    assert bool(teacher.log_tail.isneginf().all())
    assert bool(teacher.log_tail_at.isneginf().all())


def test_indexing_and_to():
    teacher = topk_from_logprobs(full_logprobs(6, 9), 4, (2.0,))
    rows = teacher[torch.tensor([True, False, True, False, False, False])]
    assert torch.equal(rows.token_ids, teacher.token_ids[[0, 2]])
    assert torch.equal(rows.log_tail_at, teacher.log_tail_at[[0, 2]])
    assert rows.tail_temperatures == (2.0,)
    moved = copy.deepcopy(teacher).to("meta")
    assert {moved.token_ids.device.type, moved.log_tail.device.type, moved.log_tail_at.device.type} == {"meta"}


def test_cat_fills_narrow_supports():
    full = full_logprobs(4, 9)
    joined = TeacherTopK.cat([topk_from_logprobs(full[:1], 2), topk_from_logprobs(full[1:], 5)])
    assert joined.logprobs.shape == (4, 5)
    assert bool(joined.logprobs[0, 2:].isneginf().all())
    assert torch.equal(joined.logprobs[1:], topk_from_logprobs(full[1:], 5).logprobs)


def test_cat_refuses_other_temperatures():
    full = full_logprobs(2, 9)
    with pytest.raises(ValueError, match="tail_temperatures"):
        TeacherTopK.cat([topk_from_logprobs(full, 2), topk_from_logprobs(full, 2, (2.0,))])
    with pytest.raises(ValueError, match="empty"):
        TeacherTopK.cat([])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"logprobs": torch.zeros(2, 4)}, "token_ids"),
        ({"log_tail": torch.zeros(3)}, "log_tail"),
        ({"log_tail_at": torch.zeros(2, 1)}, "log_tail_at"),
        ({"tail_temperatures": (2.0,)}, "log_tail_at"),
    ],
)
def test_shapes_must_agree(changes, word):
    ids = torch.zeros(2, 3, dtype=torch.int64)
    values = {"token_ids": ids, "logprobs": torch.zeros(2, 3), "log_tail": torch.zeros(2)}
    with pytest.raises(ValueError, match=f"`{word}`"):
        TeacherTopK(**{**values, **changes})
