import math
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value

from trl_offline_distill.cache_report import SignalDifference, compare_with_teacher, describe_row, inspect_cache
from trl_offline_distill.teacher_cache import TeacherManifest, TeacherTopK, decode_topk, encode_topk, select_support


VOCAB = 60
FEATURES = Features(
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
    teacher_topk=List(Value("large_binary")),
    teacher_manifest=Value("string"),
)
MANIFEST = TeacherManifest("org/teacher", tokenizer_fingerprint="f" * 32, vocab_size=VOCAB, top_k=10)


def full_logprobs(tokens: int, seed: int) -> torch.Tensor:
    return (
        2 * torch.randn(tokens, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).log_softmax(-1)


def cached_rows(lengths: list[int], prompt: int = 2, top_k: int = 10, manifest: str | None = None) -> list[dict]:
    rows = []
    for index, length in enumerate(lengths):
        ids = np.random.default_rng(index).integers(0, VOCAB, length).tolist()
        blobs = encode_topk(select_support(full_logprobs(length, index), top_k=top_k), vocab_size=VOCAB)
        labels = [-100] * prompt + ids[prompt:]
        kept = [blob if label != -100 else b"" for blob, label in zip(blobs, [*labels[1:], -100])]
        rows.append(
            {
                "input_ids": ids,
                "labels": labels,
                "teacher_topk": kept,
                "teacher_manifest": manifest or MANIFEST.to_json(),
            }
        )
    return rows


class Words:
    """A tokenizer of the words w0, w1, ..."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize("streaming", [False, True])
def test_numbers_equal_those_of_the_full_distribution(streaming):
    lengths = [12, 30, 7]
    rows = cached_rows(lengths)
    dataset = Dataset.from_list(rows, features=FEATURES)
    report = inspect_cache(dataset.to_iterable_dataset() if streaming else dataset)
    assert (report.rows, report.tokens, report.trained_tokens) == (3, 49, 49 - 3 * 2)
    masses, entropies, best, inside = [], [], [], []
    for index, row in enumerate(rows):
        full = full_logprobs(lengths[index], index)
        for token in range(1, lengths[index] - 1):
            ranked = full[token].exp().sort(descending=True)
            kept = ranked.values[:10]
            masses.append(float(kept.sum()))
            outcomes = torch.cat([kept, 1 - kept.sum(0, keepdim=True)])
            entropies.append(-float((outcomes * outcomes.log()).sum()))
            best.append(int(ranked.indices[0]) == row["labels"][token + 1])
            inside.append(row["labels"][token + 1] in ranked.indices[:10])
    assert report.taught_tokens == len(masses)
    assert report.mean_mass == pytest.approx(np.mean(masses), abs=1e-3)
    assert report.smallest_mass == pytest.approx(min(masses), abs=1e-3)
    assert report.mass_quantile(0.05) == pytest.approx(np.quantile(masses, 0.05, method="inverted_cdf"), abs=2e-3)
    assert report.mean_entropy == pytest.approx(np.mean(entropies), abs=2e-3)
    assert report.effective_support == pytest.approx(np.mean(np.exp(entropies)), rel=2e-3)
    assert report.label_agreement == pytest.approx(np.mean(best))
    assert report.label_in_support == pytest.approx(np.mean(inside))
    assert report.rank_counts.sum() == len(masses)
    assert report.mean_support == 10
    assert report.longest_rows == [(30, 1), (12, 0), (7, 2)]
    # 2 bytes of header, 2 of tail, 10 values of 2, 10 ids of 6 bits
    assert report.bytes_per_trained_token == report.smallest_blob == report.largest_blob == 2 + 2 + 20 + 8


def test_the_rank_of_the_label():
    support = list(range(1, 13))
    logprobs = torch.log_softmax(-torch.arange(13.0), 0)
    teacher = TeacherTopK(torch.tensor([support]), logprobs[None, :12], logprobs[12:])
    blob = encode_topk(teacher, vocab_size=VOCAB)[0]
    labels = [1, 2, 3, 5, 6, 10, 11, 12, 13]
    row = {
        "input_ids": [0, *labels],
        "labels": [-100, *labels],
        "teacher_topk": [*([blob] * len(labels)), b""],
        "teacher_manifest": MANIFEST.to_json(),
    }
    assert inspect_cache([row]).rank_counts.tolist() == [1, 1, 2, 2, 2, 1]


def test_batches_add_up(monkeypatch):
    rows = cached_rows([9, 11, 5, 30, 8])
    whole = inspect_cache(rows)
    monkeypatch.setattr("trl_offline_distill.cache_report.BATCH_TOKENS", 10)
    parts = inspect_cache(rows)
    assert parts.to_text() == whole.to_text()
    assert np.array_equal(parts.mass_counts, whole.mass_counts)


def test_text_shows_manifests_and_problems():
    other = TeacherManifest("org/other", tokenizer_fingerprint="f" * 32, vocab_size=VOCAB, top_k=10, layout="sampled")
    rows = [*cached_rows([8, 9]), *cached_rows([7], manifest=other.to_json())]
    text = inspect_cache(rows).to_text()
    assert "org/teacher" in text
    assert "org/other" in text
    assert "Sampled supports" in text
    assert "PROBLEM" not in text
    rows[1]["teacher_topk"][3] = b""
    damaged = bytearray(rows[0]["teacher_topk"][2])
    damaged[2:4] = np.array(np.nan, "<f2").tobytes()
    rows[0]["teacher_topk"][2] = bytes(damaged)
    report = inspect_cache(rows)
    assert report.untaught_rows == [(1, 1)]
    assert report.unsound_rows == [(0, 1)]
    assert report.to_text().count("PROBLEM: 1 trained tokens in 1 rows") == 2
    assert math.isfinite(report.mean_mass)


def test_max_rows_reads_no_further():
    def rows():
        yield from cached_rows([6, 6])
        raise AssertionError("read too far")

    assert inspect_cache(rows(), max_rows=2).rows == 2


def test_nothing_trained_and_nothing_at_all():
    row = cached_rows([5])[0]
    row["labels"] = [-100] * 5
    row["teacher_topk"] = [b""] * 5
    for dataset in ([row], []):
        report = inspect_cache(dataset)
        assert report.trained_tokens == 0
        assert math.isnan(report.mean_mass)
        assert "captured mass" in report.to_text()


def test_foreign_datasets_are_refused_by_name():
    with pytest.raises(ValueError, match=r"lacks the columns \['teacher_topk', 'teacher_manifest'\]"):
        inspect_cache([{"input_ids": [1], "labels": [1]}])
    row = cached_rows([5])[0]
    row["teacher_topk"] = row["teacher_topk"][:3]
    with pytest.raises(ValueError, match=r"'teacher_topk': 3"):
        inspect_cache([row])


def test_the_picture_is_a_png(tmp_path):
    path = inspect_cache(cached_rows([12, 30])).draw(tmp_path / "deep" / "report.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert inspect_cache([]).draw(tmp_path / "empty.png").stat().st_size > 1000


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"trl-offline-distill\[plot\]"):
        inspect_cache([]).draw(tmp_path / "report.png")


# The cache against the teacher


def scorer(noise: float = 0.0, shift: float = 0.0):
    """A teacher that knows the rows of `cached_rows` by their ids; `noise` differs between calls, `shift` does not."""
    known = {tuple(row["input_ids"]): index for index, row in enumerate(cached_rows([12, 30, 7]))}
    generator = torch.Generator().manual_seed(9)

    def score(rows):
        signals = []
        for ids, positions in rows:
            full = full_logprobs(len(ids), known[tuple(ids)])[positions]
            full = full + noise * torch.randn(full.shape, generator=generator, dtype=torch.float64)
            full[:, 0] += shift
            signals.append(select_support(full.log_softmax(-1), top_k=15))
        return signals

    return score


def test_an_exact_teacher_differs_by_the_rounding_of_fp16():
    comparison = compare_with_teacher(cached_rows([12, 30, 7]), scorer(), rows=8)
    assert comparison.rows == 3
    assert comparison.cached.tokens == 43
    assert comparison.live.largest_logprob_error == comparison.live.divergence == 0
    assert 0 < comparison.cached.largest_logprob_error < 2**-9
    assert comparison.cached.divergence < 1e-6
    assert comparison.cached.same_ids == comparison.cached.same_best == 1


def test_noise_shows_in_both_columns_and_another_teacher_in_one():
    noisy = compare_with_teacher(cached_rows([12, 30, 7]), scorer(noise=0.05))
    assert 0.2 < noisy.cached.mean_logprob_error / noisy.live.mean_logprob_error < 1.5
    other = compare_with_teacher(cached_rows([12, 30, 7]), scorer(shift=3.0))
    assert other.live.divergence == 0
    assert other.cached.divergence > 0.05
    text = other.to_text()
    assert "KL (nats)" in text
    assert "live - live" in text


def test_difference_is_the_kl_on_the_common_outcomes():
    full_p, full_q = full_logprobs(20, 1), full_logprobs(20, 2)
    p, q = select_support(full_p, top_k=VOCAB), select_support(full_q, top_k=VOCAB)
    found = SignalDifference.between(p, q)
    expected = (full_p.exp() * (full_p - full_q)).sum(1).mean()
    assert found.divergence == pytest.approx(float(expected))
    assert found.mean_logprob_error == pytest.approx(float((full_p - full_q).abs().mean()))
    assert found.same_ids == 1


def test_comparison_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="`rows` is 0"):
        compare_with_teacher(cached_rows([5]), scorer(), rows=0)
    with pytest.raises(ValueError, match="no trained token"):
        compare_with_teacher(cached_rows([5], prompt=5), scorer())


# One row as text


def test_describe_row():
    row = cached_rows([8], prompt=3)[0]
    lines = describe_row(row, Words(), candidates=3).splitlines()
    assert len(lines) == 9
    assert "trained" not in "".join(lines[1:4])
    signal = decode_topk([row["teacher_topk"][2]])
    best, probability = int(signal.token_ids[0, 0]), float(signal.logprobs[0, 0].exp())
    assert f"w{row['input_ids'][3]}" in lines[4]
    assert f"'w{best}' {probability:.3f}" in lines[4]
    shown = float(signal.logprobs[0, :3].exp().sum())
    assert lines[4].endswith(f"rest {1 - shown:.3f}")


def test_describe_row_marks_the_label_wherever_it_stands():
    support = torch.tensor([[4, 5, 6, 7]])
    blob = encode_topk(
        TeacherTopK(support, torch.tensor([[0.4, 0.3, 0.2, 0.05]]).log(), torch.tensor([0.05]).log()), vocab_size=VOCAB
    )
    for label, mark in ((4, "*'w4' 0.400"), (7, "... *'w7' 0.050 (rank 4)"), (9, None)):
        row = {"input_ids": [1, label], "labels": [-100, label], "teacher_topk": [*blob, b""], "teacher_manifest": ""}
        line = describe_row(row, Words(), candidates=2).splitlines()[2]
        assert (mark in line) if mark else ("*" not in line)
    row["teacher_topk"] = [b"", b""]
    assert "no teacher" in describe_row(row, Words())
