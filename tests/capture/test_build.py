"""The dataset builder: what it stores, what it refuses, resume, shards, and work split over processes and jobs."""

import errno
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset, load_from_disk
from tiny_teachers import CHAT_TEMPLATE, make_teacher, make_tokenizer, reference_logprobs

from trl_offline_distill import build_distillation_dataset, decode_topk
from trl_offline_distill.capture import build, shards
from trl_offline_distill.capture.engine import RowTooLongError, ScoreRequest, TeacherDescription
from trl_offline_distill.capture.shards import CachedRow, plan_shards, row_groups, write_parquet
from trl_offline_distill.capture.transformers_engine import TransformersTeacher
from trl_offline_distill.teacher_cache import TeacherManifest, TeacherTopK
from trl_offline_distill.teacher_cache.codecs import LAYOUTS, MinMassLayout
from trl_offline_distill.teacher_cache.columns import FEATURES


# A few rows.
SHARD_BYTES = 700
TEXTS = [
    "hello world",
    "the sky is blue and the sun is far away",
    "why",
    "what colour is it now tell me",
    "the sun is far",
    "hello hello hello hello",
    "now tell me why the sky is blue",
]
DATASET = Dataset.from_dict({"text": TEXTS})
PROMPTS = Dataset.from_dict({"prompt": ["why"]})
PAIRS = Dataset.from_dict({"prompt": ["the sky is", "why"], "completion": [" blue and far", " the sun is far away"]})


class CountingTeacher(TransformersTeacher):
    """Counts the rows it is asked to score."""

    rows_scored = 0

    def score(self, rows, request):
        CountingTeacher.rows_scored += len(rows)
        return super().score(rows, request)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    # Builds without an `output_dir` are found again by any later call; each test starts without any.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def count():
    CountingTeacher.rows_scored = 0
    return lambda: CountingTeacher.rows_scored


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setitem(build.ENGINES, "transformers", CountingTeacher)
    monkeypatch.setattr(build, "TransformersTeacher", CountingTeacher)


def run(dataset=DATASET, teacher=None, tokenizer=None, **options):
    teacher = make_teacher() if teacher is None else teacher
    options = {"top_k": 5, "progress": False, **options}
    return build_distillation_dataset(dataset, teacher, tokenizer or make_tokenizer(), **options)


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted((Path(folder) / "data").iterdir())}


def same_rows(one, other):
    return one.with_format("arrow")[:].equals(other.with_format("arrow")[:])


# --- what is stored


def test_rows_hold_the_teachers_distribution():
    model, tokenizer = make_teacher(), make_tokenizer()
    vocab_size = len(tokenizer)
    cached = run(PAIRS, model)
    assert cached.features == FEATURES
    for row, source in zip(cached, PAIRS):
        prompt = tokenizer(source["prompt"])["input_ids"]
        assert row["input_ids"] == tokenizer(source["prompt"] + source["completion"] + "<eos>")["input_ids"]
        assert row["labels"] == [-100] * len(prompt) + row["input_ids"][len(prompt) :]
        wanted = reference_logprobs(model, row["input_ids"], vocab_size)
        for position, blob in enumerate(row["teacher_topk"]):
            trained = position + 1 < len(row["labels"]) and row["labels"][position + 1] != -100
            assert (blob != b"") == trained
            if trained:
                signal_ = decode_topk([blob])
                values, ids = wanted[position].topk(5)
                torch.testing.assert_close(signal_.logprobs[0], values, atol=4e-3, rtol=1e-3)
                assert set(signal_.token_ids[0].tolist()) == set(ids.tolist())
                rest = wanted[position].scatter(0, ids, -torch.inf).logsumexp(0)
                torch.testing.assert_close(signal_.log_tail[0], rest, atol=4e-3, rtol=1e-3)


def test_the_first_token_is_never_trained():
    for row in run():
        assert row["labels"][0] == -100
        assert row["labels"][1:] == row["input_ids"][1:]
        assert [blob == b"" for blob in row["teacher_topk"]] == [False] * (len(row["labels"]) - 1) + [True]


def test_manifest_says_what_made_the_rows():
    cached = run(DATASET, tail_temperatures=(2.0,), dataset_name="a/b", dataset_revision="1234567", top_k=6)
    (text,) = set(cached["teacher_manifest"])
    manifest = TeacherManifest.from_json(text)
    assert (manifest.top_k, manifest.layout, manifest.tail_temperatures) == (6, "default", (2.0,))
    assert (manifest.dataset, manifest.dataset_revision) == ("a/b", "1234567")
    assert manifest.vocab_size == len(make_tokenizer())
    assert manifest.engine.startswith("transformers ")
    assert manifest.dtype == "float32"
    assert decode_topk(cached[0]["teacher_topk"][:1]).tail_temperatures == (2.0,)


def test_source_revision_is_read_from_the_dataset(hub, tmp_path, monkeypatch):
    DATASET.push_to_hub("tester/text")
    manifest = TeacherManifest.from_json(run(load_dataset("tester/text", split="train"))[0]["teacher_manifest"])
    head = hub.dataset("tester/text").branches["main"]
    assert (manifest.dataset, manifest.dataset_revision, manifest.dataset_split) == ("tester/text", head, "train")
    hub.reset()


@pytest.mark.parametrize("layout", ["default", "compact", "min_mass", "sampled", MinMassLayout(mass=0.5, min_k=2)])
def test_layouts(layout):
    cached = run(DATASET, layout=layout, top_k=40, seed=3)
    manifest = TeacherManifest.from_json(cached[0]["teacher_manifest"])
    assert manifest.layout == (layout if isinstance(layout, str) else "min_mass")
    assert manifest.min_mass == {"min_mass": 0.999}.get(layout, 0.5 if not isinstance(layout, str) else None)
    blobs = [blob for row in cached["teacher_topk"] for blob in row if blob]
    if layout == "sampled":
        assert (manifest.draws, manifest.seed) == (LAYOUTS[layout].draws, 3)
        again = run(DATASET, layout=layout, top_k=40, seed=3, batch_tokens=16, chunk_size=2)
        assert same_rows(cached, again)
    if not isinstance(layout, str):
        signal_ = decode_topk(blobs)
        entries = (signal_.logprobs > -torch.inf).sum(-1)
        assert int(entries.min()) >= 2
        assert len(set(entries.tolist())) > 1


def test_rows_do_not_depend_on_their_batch():
    model = make_teacher("mistral")
    wanted = run(DATASET, model, batch_tokens=10_000)
    alone = run(DATASET, model, batch_tokens=1)
    for one, other in zip(wanted["teacher_topk"], alone["teacher_topk"]):
        one, other = decode_topk(one), decode_topk(other)
        assert torch.equal(one.token_ids, other.token_ids)
        # fp16 steps of the stored values; the engine's own test holds fp32 to 5e-6.
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-2, rtol=0)


def test_right_padding_and_order_leave_every_row_with_its_own_signal():
    # The teacher's first candidate is made to be the token just seen, so each row's signal tells whose it is.
    model = make_teacher(num_hidden_layers=0, tie_word_embeddings=True)
    cached = run(DATASET, model, batch_tokens=64, shard_bytes=SHARD_BYTES)
    shuffled = cached.shuffle(seed=1).filter(lambda row: len(row["input_ids"]) > 2, num_proc=2)
    assert 0 < len(shuffled) < len(cached) + 1
    for row in shuffled:
        best = decode_topk(row["teacher_topk"][:-1]).token_ids[:, 0].tolist()
        assert best == row["input_ids"][:-1]


def test_round_trips_give_the_same_rows(tmp_path):
    cached = run(DATASET, output_dir=str(tmp_path / "build"))
    cached.save_to_disk(tmp_path / "saved")
    assert same_rows(cached, load_from_disk(tmp_path / "saved"))
    assert same_rows(cached, load_dataset(str(tmp_path / "build"), split="train"))
    stream = load_dataset(str(tmp_path / "build"), split="train", streaming=True)
    assert stream.features == FEATURES
    assert list(stream) == list(cached)


@pytest.mark.parametrize(
    "convert",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.double(),
        lambda tensor: (tensor - 0.01).to(torch.bfloat16),
        lambda tensor: (tensor - 0.01).half(),
    ],
)
def test_one_schema_whatever_the_engine_returns(convert):
    class Converting(TransformersTeacher):
        def score(self, rows, request):
            for index, signal_ in super().score(rows, request):
                yield (
                    index,
                    TeacherTopK(signal_.token_ids.long(), convert(signal_.logprobs), convert(signal_.log_tail)),
                )

    cached = run(DATASET, Converting(make_teacher()))
    assert cached.features == FEATURES
    assert decode_topk(cached[1]["teacher_topk"]).logprobs.dtype == torch.float32


def test_an_empty_shard_has_the_same_schema(tmp_path):
    path = tmp_path / "empty.parquet"
    with open(path, "wb") as handle:
        write_parquet(handle, [], "{}")
    table = pq.read_table(path)
    assert datasets.Features.from_arrow_schema(table.schema) == FEATURES
    assert len(table) == 0


def test_teacher_in_memory_is_left_as_it_was():
    model = make_teacher()
    model.train()
    run(DATASET, model)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    broken = make_teacher().train()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*NaN"):
        run(DATASET, broken)
    assert broken.training


def test_a_signal_that_is_no_number_is_refused_by_row_and_token():
    class Overflowing(TransformersTeacher):
        def score(self, rows, request):
            for index, signal_ in super().score(rows, request):
                if rows[index].source_row == 3:
                    signal_.logprobs[2, 1] = torch.nan
                yield index, signal_

    with pytest.raises(ValueError, match=r"Row 3, token 2: the teacher gave NaN.*bfloat16"):
        run(DATASET, Overflowing(make_teacher()))


def test_teacher_by_path_brings_its_tokenizer(tmp_path):
    make_teacher().save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    cached = build_distillation_dataset(
        DATASET, str(tmp_path / "teacher"), top_k=5, progress=False, model_init_kwargs={"dtype": "float32"}
    )
    assert same_rows(
        cached.remove_columns("teacher_manifest"), run(DATASET, make_teacher()).remove_columns("teacher_manifest")
    )
    assert TeacherManifest.from_json(cached[0]["teacher_manifest"]).teacher == "teacher"


def test_progress_bar_counts_tokens(capsys):
    run(DATASET, progress=True)
    shown = capsys.readouterr().err
    assert "tok/s" in shown
    assert "100%" in shown


def test_padded_head_rows_are_never_emitted():
    # 64 head rows, a tokenizer of fewer ids, and row 60 made the most likely everywhere.
    tokenizer = make_tokenizer()
    rows = len(tokenizer) + 14
    model = make_teacher(vocab_size=rows)
    biased = rows - 4
    with torch.no_grad():
        model.lm_head.weight[biased] = 0
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight[biased, 0] = 0
    bias = torch.zeros(rows)
    bias[biased] = 50.0
    model.lm_head.bias = torch.nn.Parameter(bias)
    assert reference_logprobs(model, [5, 6])[-1].argmax() == biased
    signal_ = decode_topk([blob for row in run(DATASET, model)["teacher_topk"] for blob in row if blob])
    assert int(signal_.token_ids.max()) < len(tokenizer)
    torch.testing.assert_close(
        signal_.logprobs.exp().sum(-1) + signal_.log_tail.exp(), torch.ones(len(signal_.log_tail)), atol=2e-2, rtol=0
    )


# --- prompts only


def test_the_teacher_writes_missing_completions(tmp_path):
    model, tokenizer = make_teacher(), make_tokenizer()
    prompts = Dataset.from_dict({"prompt": ["the sky is", "why", "hello world"]})
    options = {"generation": {"max_new_tokens": 6, "temperature": 0.0}}
    cached = run(prompts, model, output_dir=str(tmp_path), **options)
    for row, source in zip(cached, prompts):
        prompt = tokenizer(source["prompt"])["input_ids"]
        assert row["input_ids"][: len(prompt)] == prompt
        completion = row["input_ids"][len(prompt) :]
        assert 1 <= len(completion) <= 6
        assert row["labels"] == [-100] * len(prompt) + completion
        signal_ = decode_topk(row["teacher_topk"][len(prompt) - 1 : -1])
        assert signal_.token_ids[:, 0].tolist() == completion  # greedy: the most likely token was written
    assert same_rows(cached, run(prompts, model, output_dir=str(tmp_path), **options))
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": "why"}]]})
    row = run(chats, model, generation={"max_new_tokens": 3, "seed": 1})[0]
    rendered = tokenizer.apply_chat_template(chats[0]["prompt"], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(row["input_ids"]).startswith(rendered)


def test_sampled_completions_are_seeded():
    prompts = Dataset.from_dict({"prompt": ["the sky is", "why"] * 3})
    first, again, other = (
        run(prompts, make_teacher(), generation={"max_new_tokens": 5, "seed": seed}) for seed in (1, 1, 2)
    )
    assert same_rows(first, again)
    assert list(first["input_ids"]) != list(other["input_ids"])
    assert TeacherManifest.from_json(first[0]["teacher_manifest"]).seed == 1


# --- bad input

BAD = {
    "top_k_zero": (DATASET, {"top_k": 0}, "`top_k` is 0"),
    "top_k_negative": (DATASET, {"top_k": -3}, "`top_k` is -3"),
    "top_k_float": (DATASET, {"top_k": 2.5}, "`top_k` is 2.5"),
    "top_k_large": (DATASET, {"top_k": 5000}, "`top_k` is 5000, more than"),
    "batch_tokens": (DATASET, {"batch_tokens": 0}, "`batch_tokens` is 0"),
    "chunk_size": (DATASET, {"chunk_size": 0}, "`chunk_size` is 0"),
    "shard_index": (DATASET, {"num_shards": 2, "shard_index": 2}, r"`shard_index` is 2; it must lie in 0\.\.1"),
    "layout": (DATASET, {"layout": "round"}, "`layout` is 'round'"),
    "temperature": (DATASET, {"tail_temperatures": (1.0,)}, "holds 1.0"),
    "long_rows": (DATASET, {"long_rows": "cut"}, "`long_rows` is 'cut'"),
    "no_rows": (Dataset.from_dict({"text": []}), {}, "no rows"),
    "missing_column": (Dataset.from_dict({"body": ["hello"]}), {}, r"columns \['body'\]"),
    "vision": (Dataset.from_dict({"text": ["hello"], "image": ["x"]}), {}, "vision column 'image'"),
    "nothing_trained": (
        Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[-100, -100, -100]]}),
        {},
        "Nothing in `dataset` is trained",
    ),
    "only_first_trained": (
        Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[5, -100, -100]]}),
        {},
        "Nothing in `dataset` is trained",
    ),
    "all_truncated": (PAIRS, {"max_length": 2}, "No row of `dataset` is left"),
    "foreign_ids": (Dataset.from_dict({"input_ids": [[5], [6, 9999]]}), {}, "row 1 holds the id 9999"),
    "negative_ids": (Dataset.from_dict({"input_ids": [[5, -1]]}), {}, "row 0 holds the id -1"),
    "prompts": (PROMPTS, {}, "pass `generation`"),
    "completions": (PAIRS, {"generation": {}}, "remove the 'completion' column"),
    "generation": (PROMPTS, {"generation": {"length": 3}}, r"unknown options \['length'\]"),
    "generation_value": (PROMPTS, {"generation": {"top_p": 0}}, "top_p=0; it must be"),
    "long_prompt": (
        Dataset.from_dict({"prompt": ["why why why why why"]}),
        {"generation": {}, "max_length": 3},
        "the prompt alone has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_teacher_runs(name, counted, count, tmp_path):
    dataset, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        run(dataset, output_dir=str(tmp_path / "out"), **options)
    assert count() == 0
    assert not (tmp_path / "out").exists()


def test_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match="`processing_class` is not given"):
        build_distillation_dataset(DATASET, make_teacher())


def test_rows_too_long_for_the_teacher(counted, count, caplog):
    model = make_teacher(max_position_embeddings=8)
    with pytest.raises(RowTooLongError, match=r"longer than the 8 tokens.*`long_rows='skip'`"):
        run(DATASET, model)
    assert count() == 0
    lengths = [len(ids) for ids in run(DATASET)["input_ids"]]
    fitting = [row for row, length in enumerate(lengths) if length <= 8]
    assert 0 < len(fitting) < len(lengths)
    with caplog.at_level(logging.WARNING):
        cached = run(DATASET, model, long_rows="skip")
    assert list(cached["input_ids"]) == list(run(DATASET.select(fitting))["input_ids"])
    assert f"{len(lengths) - len(fitting)} row(s) are too long" in caplog.text


class NarrowTeacher(TransformersTeacher):
    """Does not know how long a row may be until it meets one that is too long."""

    max_length = None

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.max_length = None

    def score(self, rows, request):
        for row in rows:
            if len(row.input_ids) > 8:
                raise RowTooLongError(f"Row {row.source_row} is too long for me.", row.source_row)
            ((_, signal),) = super().score([row], request)
            yield rows.index(row), signal

    def generate(self, prompts, source_rows, options):
        for prompt, row in zip(prompts, source_rows, strict=True):
            if len(prompt) > 8:
                raise RowTooLongError(f"Row {row} is too long for me.", row)
        return super().generate(prompts, source_rows, options)


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 2**20], ids=["shards", "one_shard"])
def test_rows_that_only_the_engine_finds_too_long(caplog, tmp_path, shard_bytes):
    teacher = NarrowTeacher(make_teacher())
    with pytest.raises(RowTooLongError, match=r"^Row 1 is too long for me\.$"):
        run(DATASET, teacher)
    fitting = [row for row, ids in enumerate(run(DATASET)["input_ids"]) if len(ids) <= 8]
    with caplog.at_level(logging.WARNING):
        cached = run(DATASET, teacher, long_rows="skip", output_dir=str(tmp_path), shard_bytes=shard_bytes)
    wanted = run(DATASET.select(fitting))
    assert cached["input_ids"] == wanted["input_ids"]
    assert cached["teacher_topk"] == wanted["teacher_topk"]
    assert "too long for the teacher and are left out" in caplog.text
    records = [json.loads(path.read_text()) for path in (tmp_path / ".build").glob("[0-9]*.json")]
    skipped = sorted(row for record in records for row in record["skipped_rows"])
    assert skipped == sorted(set(range(len(DATASET))) - set(fitting))
    assert sum(record["rows"] for record in records) == len(fitting)


def test_an_engine_that_names_a_row_nobody_asked_for_stops_the_build():
    class Confused(NarrowTeacher):
        def score(self, rows, request):
            raise RowTooLongError("Row 99 is too long for me.", 99)
            yield

    with pytest.raises(RowTooLongError, match="Row 99"):
        run(DATASET, Confused(make_teacher()), long_rows="skip")


def test_prompts_that_only_the_engine_finds_too_long():
    prompts = Dataset.from_dict({"prompt": ["why", "the sky is blue and the sun is far away now", "hello"]})
    options = {"generation": {"max_new_tokens": 2, "temperature": 0.0}}
    teacher = NarrowTeacher(make_teacher())
    with pytest.raises(RowTooLongError, match="Row 1"):
        run(prompts, teacher, **options)
    cached = run(prompts, teacher, long_rows="skip", **options)
    assert same_rows(
        cached.remove_columns("teacher_manifest"),
        run(prompts.select([0, 2]), **options).remove_columns("teacher_manifest"),
    )


def test_dropped_and_diverging_rows_are_reported(caplog):
    pairs = Dataset.from_dict({"prompt": ["hello wor", "why is the sun so far away"], "completion": ["ld", " why"]})
    with caplog.at_level(logging.WARNING):
        cached = run(pairs, max_length=5)
    assert len(cached) == 1
    assert "1 of 2 rows have no trained token left" in caplog.text
    assert "In 1 of 2 rows the prompt alone is tokenised differently" in caplog.text


# --- shards


def test_shards_are_cut_by_bytes_and_hold_all_rows_in_order(tmp_path):
    whole = run(DATASET)
    cached = run(DATASET, output_dir=str(tmp_path), shard_bytes=SHARD_BYTES)
    files = sorted((tmp_path / "data").iterdir())
    assert len(files) > 2
    assert files[0].name == f"train-00000-of-{len(files):05d}.parquet"
    assert same_rows(whole, cached)
    assert sum(pq.read_metadata(file).num_rows for file in files) == len(DATASET)


def test_plans():
    assert plan_shards([5, 5, 5, 20, 1, 1], 10, "train").bounds == (0, 2, 3, 4, 6)
    plan = plan_shards([1] * 10, 1, "test")
    assert len(plan) == 10
    assert plan.file_name(3) == "test-00003-of-00010.parquet"
    parts = [plan.of_worker(index, 3) for index in range(3)]
    assert sorted(shard for part in parts for shard in part) == list(range(10))


def test_row_groups_are_bounded_by_bytes(tmp_path):
    # 300 rows x 512 tokens x K=100, and one row 50 times longer.
    rows = [cached_row(512, row) for row in range(300)] + [cached_row(512 * 50, 300)]
    path = tmp_path / "x.parquet"
    with open(path, "wb") as handle:
        write_parquet(handle, rows, "{}")
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    assert len(sizes) > 1
    assert max(sizes) < 100e6
    assert metadata.num_rows == 301
    assert metadata.row_group(0).column(0).has_offset_index


def cached_row(length, source_row):
    ids = np.zeros(length, np.int32)
    return CachedRow(ids, ids, [bytes([source_row % 256]) * 429] * length, source_row)


def test_list_offsets_never_overflow():
    # 1000 rows x 32,768 tokens x K=100 as declared lengths.
    groups = list(row_groups([32_768 * 440] * 1000, [32_768] * 1000))
    assert sum(len(group) for group in groups) == 1000
    assert all(len(group) * 32_768 <= shards.MAX_LIST_ELEMENTS for group in groups)
    assert all(len(group) * 32_768 * 440 <= shards.ROW_GROUP_BYTES or len(group) == 1 for group in groups)


def test_a_single_long_row_works_or_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(shards, "MAX_LIST_ELEMENTS", 10_000)
    rows = [cached_row(6_000, row) for row in range(3)]
    with open(tmp_path / "x.parquet", "wb") as handle:
        write_parquet(handle, rows, "{}")
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups == 3
    with open(tmp_path / "y.parquet", "wb") as handle, pytest.raises(ValueError, match="Row 77 has 12000 tokens"):
        write_parquet(handle, [cached_row(12_000, 77)], "{}")


def test_two_builds_are_byte_equal(tmp_path):
    for name in ("one", "two"):
        run(DATASET, output_dir=str(tmp_path / name), shard_bytes=SHARD_BYTES)
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")
    records = [(tmp_path / name / ".build" / "00000.json").read_bytes() for name in ("one", "two")]
    assert records[0] == records[1]
    record = json.loads(records[0])
    data = (tmp_path / "one" / "data" / sorted(folder_bytes(tmp_path / "one"))[0]).read_bytes()
    assert record["sha256"] == hashlib.sha256(data).hexdigest()


# --- reuse


def test_nothing_changed_means_no_teacher(counted, count, tmp_path):
    for options in ({"output_dir": str(tmp_path / "out")}, {}):
        model = make_teacher(seed=5)
        first = run(DATASET, model, **options)
        calls = count()
        assert calls == len(TEXTS) * (1 + bool(not options))
        assert same_rows(first, run(DATASET, make_teacher(seed=5), **options))
        assert count() == calls


CHANGES = {
    "top_k": ({"top_k": 6}, r"top_k: 5 -> 6"),
    "layout": ({"layout": "compact"}, "layout"),
    "temperatures": ({"tail_temperatures": (2.0,)}, "tail_temperatures"),
    "length": ({"max_length": 4}, "max_length: None -> 4"),
    "rows": ({"dataset": DATASET.select(range(4))}, "rows: 7 -> 4"),
    "text": ({"dataset": Dataset.from_dict({"text": ["changed", *TEXTS[1:]]})}, "tokens"),
    "eos": ({"eos_token": "<|im_end|>"}, "tokens"),
    "split": ({"split": "test"}, "split: 'train' -> 'test'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_settings_are_refused_and_listed(name, counted, count, tmp_path):
    run(DATASET, output_dir=str(tmp_path))
    before, calls = folder_bytes(tmp_path), count()
    options, message = CHANGES[name]
    with pytest.raises(ValueError, match=f"other settings; changed: .*{message}"):
        run(**{"dataset": DATASET, "output_dir": str(tmp_path), **options})
    assert count() == calls
    assert folder_bytes(tmp_path) == before
    run(**{"dataset": DATASET, "output_dir": str(tmp_path), "overwrite": True, **options})
    assert count() > calls


def test_changed_weights_behind_the_same_path_are_refused(tmp_path):
    teacher, tokenizer = tmp_path / "teacher", make_tokenizer()
    make_teacher(seed=1).save_pretrained(teacher)
    options = {"tokenizer": tokenizer, "output_dir": str(tmp_path / "out")}
    run(DATASET, str(teacher), **options)
    make_teacher(seed=2).save_pretrained(teacher)
    with pytest.raises(ValueError, match="teacher_fingerprint"):
        run(DATASET, str(teacher), **options)
    # In a folder below the path that was given
    make_teacher(seed=1).save_pretrained(teacher / "below")
    options |= {"output_dir": str(tmp_path / "below"), "model_init_kwargs": {"subfolder": "below"}}
    run(DATASET, str(teacher), **options)
    make_teacher(seed=2).save_pretrained(teacher / "below")
    with pytest.raises(ValueError, match="teacher_fingerprint"):
        run(DATASET, str(teacher), **options)


def test_sampled_completions_are_bound_to_their_batches(tmp_path):
    generation = {"max_new_tokens": 3, "temperature": 1.0}
    options = {"output_dir": str(tmp_path / "sampled"), "generation": generation}
    run(PROMPTS, batch_tokens=64, **options)
    with pytest.raises(ValueError, match="generation_batch_tokens: 64 -> 8"):
        run(PROMPTS, batch_tokens=8, **options)
    # Greedy ones, and rows that are only scored, are the same in any batch
    generation["temperature"] = 0.0
    options["output_dir"] = str(tmp_path / "greedy")
    assert same_rows(run(PROMPTS, batch_tokens=64, **options), run(PROMPTS, batch_tokens=8, **options))


def test_a_changed_template_is_refused(tmp_path):
    chats = Dataset.from_dict({"messages": [[{"role": "user", "content": "why"}]]})
    run(chats, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="chat_template"):
        run(chats, tokenizer=make_tokenizer(CHAT_TEMPLATE + "{# changed #}"), output_dir=str(tmp_path))


def test_a_resumed_build_keeps_the_date_it_started_with(tmp_path):
    template = "{{ strftime_now('%Y-%m-%d') }} " + CHAT_TEMPLATE
    chats = Dataset.from_dict({"messages": [[{"role": "user", "content": "why"}]]})
    options = {"tokenizer": make_tokenizer(template), "output_dir": str(tmp_path)}
    first = run(chats, template_date="2020-02-02", **options)
    assert same_rows(first, run(chats, **options))


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"already holds data/mine.parquet"):
        run(DATASET, output_dir=str(tmp_path))


# --- kills


def build_until_step(output_dir, kill_at, model, after):
    """Runs a build in a child that kills itself with SIGKILL at its `kill_at`-th write step; returns its exit status.

    A step is every call that changes the folder: creating, writing, syncing, naming and removing files. `after` kills
    when the call has been done instead of before it.
    """
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    # OpenMP's other threads do not survive a fork; a child that waits for them ends as a failure.
    torch.set_num_threads(1)
    signal.alarm(60)
    left = kill_at

    def counted_call(call):
        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            chosen = left == 0
            if chosen and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if chosen:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    for module, name in ((os, "link"), (os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir")):
        setattr(module, name, counted_call(getattr(module, name)))
    pq.ParquetWriter.write_table = counted_call(pq.ParquetWriter.write_table)
    pq.ParquetWriter.close = counted_call(pq.ParquetWriter.close)
    shards.open = counted_call(open)
    try:
        run(DATASET, model, output_dir=output_dir, shard_bytes=2 * SHARD_BYTES)
    except BaseException:  # the child must not run the parent's tests
        os._exit(3)
    os._exit(0)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_write_step_is_resumed_without_repeat_or_gap(after, counted, count, tmp_path):
    model = make_teacher()
    wanted = run(DATASET, model, output_dir=str(tmp_path / "whole"), shard_bytes=2 * SHARD_BYTES)
    total = len(list((tmp_path / "whole" / "data").iterdir()))
    assert total >= 2
    kills, step, finished_seen = 0, 0, set()
    while True:
        step += 1
        folder = tmp_path / f"killed-{step}"
        status = build_until_step(str(folder), step, model, after)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
        recorded = list((folder / ".build").glob("[0-9]*.json")) if folder.exists() else []
        finished_seen.add(len(recorded))
        done = sum(json.loads(path.read_text())["rows"] for path in recorded)
        for path in (folder / "data").glob("*.parquet"):
            assert pq.read_metadata(path).num_rows > 0  # a name never holds half a file
        before = count()
        resumed = run(DATASET, model, output_dir=str(folder), shard_bytes=2 * SHARD_BYTES)
        assert count() - before == len(DATASET) - done
        assert same_rows(resumed, wanted)
        assert folder_bytes(folder) == folder_bytes(tmp_path / "whole")
        assert not list((folder / ".build").glob("*.tmp"))
    assert kills > 10 * total
    assert finished_seen == set(range(total + 1))


def test_a_kill_while_the_teacher_works_is_resumed(counted, count, tmp_path):
    class Failing(CountingTeacher):
        left = 4

        def _score_batch(self, rows, request):
            Failing.left -= 1
            if Failing.left == 0:
                raise KeyboardInterrupt
            return super()._score_batch(rows, request)

    options = {"output_dir": str(tmp_path), "shard_bytes": SHARD_BYTES}
    with pytest.raises(KeyboardInterrupt):
        run(DATASET, Failing(make_teacher(), batch_tokens=12), **options)
    finished = sum(json.loads(path.read_text())["rows"] for path in (tmp_path / ".build").glob("[0-9]*.json"))
    assert finished > 0
    before = count()
    resumed = run(DATASET, CountingTeacher(make_teacher(), batch_tokens=12), **options)
    assert count() - before == len(DATASET) - finished
    assert same_rows(resumed, run(DATASET))


def test_a_full_disk_is_explained_and_keeps_finished_work(monkeypatch, tmp_path):
    options = {"output_dir": str(tmp_path), "shard_bytes": SHARD_BYTES}
    written = []

    def fill(target, rows, manifest_json):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(len(rows))
        write_parquet(target, rows, manifest_json)

    monkeypatch.setattr(shards, "write_parquet", fill)
    with pytest.raises(OSError, match=r"2 finished shard.s. are kept.*Free some space"):
        run(DATASET, **options)
    monkeypatch.undo()
    assert same_rows(run(DATASET, **options), run(DATASET))


def test_a_damaged_shard_is_built_again(counted, count, tmp_path):
    options = {"output_dir": str(tmp_path), "shard_bytes": SHARD_BYTES}
    wanted = run(DATASET, **options)
    victim = sorted((tmp_path / "data").iterdir())[1]
    rows = pq.read_metadata(victim).num_rows
    content = victim.read_bytes()
    victim.write_bytes(content[:-10])
    before = count()
    assert same_rows(run(DATASET, **options), wanted)
    assert count() - before == rows
    assert victim.read_bytes() == content


# --- several jobs and processes


def test_jobs_that_share_only_a_folder_give_the_single_run(counted, count, tmp_path):
    whole = run(DATASET, output_dir=str(tmp_path / "whole"), shard_bytes=SHARD_BYTES)
    options = {"output_dir": str(tmp_path / "parts"), "shard_bytes": SHARD_BYTES, "num_shards": 3}
    before = count()
    parts = [run(DATASET, shard_index=index, **options) for index in (2, 0, 1)]
    assert count() - before == len(DATASET)
    assert sum(map(len, parts)) == len(DATASET)
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")
    before = count()
    assert same_rows(run(DATASET, output_dir=str(tmp_path / "parts"), shard_bytes=SHARD_BYTES), whole)
    assert count() == before


LAUNCHED = """
import sys
sys.path.insert(0, sys.argv[2])
from test_build import DATASET, SHARD_BYTES, run
cached = run(DATASET, output_dir=sys.argv[1], shard_bytes=SHARD_BYTES)
from accelerate import PartialState
assert PartialState().num_processes == 2, PartialState()
assert len(cached) == len(DATASET)
PartialState().destroy_process_group()
"""


def test_launched_processes_split_the_work(tmp_path):
    run(DATASET, output_dir=str(tmp_path / "whole"), shard_bytes=SHARD_BYTES)
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here.parent)]),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
         str(script), str(tmp_path / "parts"), str(here)],
        check=True, env=environment, timeout=240,
    )  # fmt: skip
    assert folder_bytes(tmp_path / "parts") == folder_bytes(tmp_path / "whole")


def test_engines_must_answer_every_row_once():
    class Forgetful(TransformersTeacher):
        def score(self, rows, request):
            yield from list(super().score(rows, request))[1:]

    class Repeating(TransformersTeacher):
        def score(self, rows, request):
            yield from list(super().score(rows, request)) * 2

    with pytest.raises(RuntimeError, match="left out the rows"):
        run(DATASET, Forgetful(make_teacher()))
    with pytest.raises(RuntimeError, match="twice"):
        run(DATASET, Repeating(make_teacher()))


def test_memory_of_a_build_is_bounded_by_a_shard(monkeypatch, tmp_path):
    held = []
    original = shards.ShardStore.finish

    def watch(self, plan, shard, rows, *args):
        held.append(sum(row.nbytes for row in rows))
        return original(self, plan, shard, rows, *args)

    monkeypatch.setattr(shards.ShardStore, "finish", watch)
    run(Dataset.from_dict({"text": TEXTS * 20}), output_dir=str(tmp_path), shard_bytes=5000)
    assert len(held) > 5
    assert max(held) <= 5000


def test_description_is_a_plain_value():
    description = TransformersTeacher(make_teacher()).describe()
    assert isinstance(description, TeacherDescription)
    assert ScoreRequest(top_k=3).tail_temperatures == ()
    assert datasets.Features(FEATURES) == FEATURES
