"""Pushing to the Hub and loading from it, against the project's own Hub server and the real clients."""

import json
import shutil
import threading
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from datasets import Dataset, load_dataset
from huggingface_hub import DatasetCard, HfApi
from huggingface_hub.errors import HfHubHTTPError
from tiny_teachers import make_teacher, make_tokenizer

from trl_offline_distill import build_distillation_dataset
from trl_offline_distill.capture import build
from trl_offline_distill.capture.transformers_engine import TransformersTeacher
from trl_offline_distill.teacher_cache import hub as hub_module
from trl_offline_distill.teacher_cache.hub import load_cache, mass_picture, write_card
from trl_offline_distill.teacher_cache.manifest import TeacherManifest
from trl_offline_distill.teacher_cache.statistics import CacheStatistics


TEXTS = ["hello world", "the sky is blue and the sun is far away", "why", "what colour is it now tell me"]
REPO = "tester/cache"


@pytest.fixture(autouse=True)
def clean(hub, monkeypatch, tmp_path_factory):
    hub.reset()
    caches = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", caches / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(caches / "hub"))
    monkeypatch.setattr(hub_module.time, "sleep", lambda seconds: None)
    yield
    hub.reset()


def push(texts=TEXTS, repo=REPO, **options):
    options = {"top_k": 5, "progress": False, "shard_bytes": 300, **options}
    return build_distillation_dataset(
        Dataset.from_dict({"text": list(texts)}), make_teacher(), make_tokenizer(), push_to_hub=repo, **options
    )


def parquet_names(repository, revision="main", folder="data"):
    return sorted(name for name in repository.files(revision) if name.startswith(folder + "/"))


def same_rows(one, other):
    return one.with_format("arrow")[:].equals(other.with_format("arrow")[:])


def test_a_build_is_pushed_in_one_commit_and_comes_back(hub):
    cached = push()
    repository = hub.dataset(REPO)
    assert len(repository.commits) == 2  # creation, and everything else
    assert len(parquet_names(repository)) >= 3
    assert same_rows(load_dataset(REPO, split="train"), cached)
    assert same_rows(load_cache(REPO), cached)
    assert list(load_cache(REPO, streaming=True)) == list(cached)
    shards = [path for method, path, status in hub.requests if method == "PUT"]
    commits = [index for index, (method, path, _) in enumerate(hub.requests) if "/commit/" in path]
    uploads = [index for index, (method, path, _) in enumerate(hub.requests) if method == "PUT"]
    assert len(shards) >= 3
    assert max(uploads) < min(commits)


def test_shards_are_uploaded_while_the_teacher_works(hub, tmp_path):
    uploaded_at_score = []

    class Watching(TransformersTeacher):
        def score(self, rows, request):
            uploaded_at_score.append(sum(method == "PUT" for method, _, _ in hub.requests))
            yield from super().score(rows, request)
            for future in uploads:
                future._uploads and [waiting.result() for waiting in future._uploads.values()]

    uploads = []
    original = build.HubUpload.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        uploads.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.HubUpload, "__init__", remember)
        build_distillation_dataset(
            Dataset.from_dict({"text": TEXTS}), Watching(make_teacher()), make_tokenizer(),
            top_k=5, progress=False, shard_bytes=300, push_to_hub=REPO, output_dir=str(tmp_path),
        )  # fmt: skip
    assert uploaded_at_score[0] == 0
    assert uploaded_at_score[-1] > 0


def test_pushing_again_sends_nothing_twice(hub, tmp_path):
    push(output_dir=str(tmp_path))
    before = len(hub.requests)
    push(output_dir=str(tmp_path))
    assert not [path for method, path, _ in hub.requests[before:] if method == "PUT"]


def test_an_interrupted_push_leaves_nothing_half_and_is_resumed(hub, tmp_path):
    push(TEXTS[:2], output_dir=str(tmp_path / "first"))
    repository = hub.dataset(REPO)
    before = repository.branches["main"]
    # The fourth object fails for good: more often than anything tries.
    hub.objects.clear()
    hub.fail("PUT", "/lfs/", 500, times=10_000, after=3)
    texts = [f"{text} {number}" for number in range(4) for text in TEXTS]
    with pytest.raises(ConnectionError, match="All finished shards are kept on disk"):
        push(texts, output_dir=str(tmp_path / "second"))
    assert repository.branches["main"] == before
    assert len(load_cache(REPO)) == 2
    hub.faults.clear()
    already = len(hub.objects)
    assert already == 3
    hub.requests.clear()
    cached = push(texts, output_dir=str(tmp_path / "second"))
    sent = sum(method == "PUT" for method, _, _ in hub.requests)
    assert sent == len(parquet_names(repository)) + 1 - already  # and the picture
    assert same_rows(load_cache(REPO), cached)


@pytest.mark.parametrize(
    ("method", "pattern", "status"),
    [
        ("PUT", "/lfs/", 500),
        ("POST", "/commit/", 412),
        ("POST", "/commit/", 429),
        ("POST", "/commit/", 503),
        ("POST", "/preupload/", 429),
        ("POST", "objects/batch", 502),
        ("POST", "/repos/create", 429),
        ("GET", "/api/datasets/.*/revision/", 500),
    ],
)
def test_passing_faults_are_waited_out(hub, method, pattern, status):
    hub.fail(method, pattern, status, times=2)
    cached = push()
    assert all(fault.times == 0 for fault in hub.faults)
    assert same_rows(load_cache(REPO), cached)


def test_faults_that_stay_are_told(hub):
    hub.fail("POST", "/commit/", 403, times=1)
    with pytest.raises(HfHubHTTPError, match="403"):
        push()
    hub.reset()
    hub.fail("POST", "/commit/", 412, times=1000)
    with pytest.raises(ConnectionError, match="did not commit after 7 tries"):
        push()


def test_a_commit_in_between_is_built_upon(hub, tmp_path):
    push(TEXTS[:2], output_dir=str(tmp_path / "first"))
    repository = hub.dataset(REPO)
    raced = []

    def somebody_else_commits(method, path):
        if "/commit/" in path and not raced:
            raced.append(path)
            head = repository.branches["main"]
            files = dict(repository.commits[head].files)
            files["data/train-00009-of-00010.parquet"] = files[parquet_names(repository)[0]]
            files["notes.txt"] = files["README.md"]
            repository.branches["main"] = repository.commit(files, head, "somebody else")

    hub.on_request = somebody_else_commits
    cached = push(output_dir=str(tmp_path / "second"))
    names = list(repository.files())
    assert "data/train-00009-of-00010.parquet" not in names  # stale, though it came in between
    assert "notes.txt" in names
    assert same_rows(load_cache(REPO), cached)


def test_a_smaller_version_leaves_no_stale_shards_and_a_reader_never_meets_a_mix(hub, tmp_path):
    large = push(TEXTS * 3, output_dir=str(tmp_path / "large"))
    repository = hub.dataset(REPO)
    first = repository.branches["main"]
    seen = set()

    def look(method, path):
        head = repository.branches["main"]
        seen.add((head, tuple(parquet_names(repository))))

    hub.on_request = look
    small = push(TEXTS[:2], output_dir=str(tmp_path / "small"))
    hub.on_request = lambda method, path: None
    assert {head for head, _ in seen} == {first}
    assert len({names for _, names in seen}) == 1
    assert same_rows(load_cache(REPO), small)
    assert same_rows(load_cache(REPO, revision=first), large)
    (total,) = {name.rpartition("-of-")[2] for name in parquet_names(repository)}
    assert int(total.removesuffix(".parquet")) == len(parquet_names(repository))


def test_private_revision_and_configurations(hub):
    push(private=True)
    repository = hub.dataset(REPO)
    assert repository.private
    first = repository.branches["main"]
    wider = push(top_k=7, config_name="wide", private=True)
    other_split = push(TEXTS[:2], split="test", private=True)
    assert set(datasets.get_dataset_config_names(REPO)) == {"default", "wide"}
    assert same_rows(load_cache(REPO, "wide"), wider)
    assert same_rows(load_cache(REPO, "default", split="test"), other_split)
    assert len(load_cache(REPO, "default")) == len(TEXTS)
    head = repository.branches["main"]
    drafted = push(TEXTS[:1], hub_revision="draft")
    assert repository.branches["main"] == head != first
    assert same_rows(load_cache(REPO, "default", revision="draft"), drafted)
    assert len(load_cache(REPO, "default")) == len(TEXTS)


def test_an_existing_public_repository_is_not_filled_in_private(hub):
    push()
    head = hub.dataset(REPO).branches["main"]
    with pytest.raises(ValueError, match="exists and is public"):
        push(TEXTS[:1], private=True)
    assert hub.dataset(REPO).branches["main"] == head
    with pytest.raises(ValueError, match="`config_name` is 'a/b'"):
        push(config_name="a/b")


def test_the_card(hub):
    push(license="cc-by-4.0", dataset_name="some/text")
    files = hub.dataset(REPO).files()
    card = DatasetCard(files["README.md"].decode())
    assert card.data.license == "cc-by-4.0"
    assert "trl-offline-distill" in card.data.tags
    assert card.data.to_dict()["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}
    ]
    text = card.text
    manifest = TeacherManifest.from_json(load_cache(REPO)[0]["teacher_manifest"])
    wanted = [
        *(manifest.teacher, manifest.tokenizer_fingerprint, manifest.package_version, "some/text", "cc-by-4.0"),
        *("| candidates a token (K) | 5 |", f"| rows | {len(TEXTS)} |", "5th percentile"),
        *("OfflineDistillationTrainer", "captured_mass_default_train.png"),
    ]
    assert [part for part in wanted if part not in text] == []
    assert files["captured_mass_default_train.png"].startswith(b"\x89PNG")
    # The facts of the card are those of the rows.
    tokens = sum(map(len, load_cache(REPO)["input_ids"]))
    assert f"| tokens | {tokens}, of which {tokens - len(TEXTS)} trained |" in text
    shown = text.partition("```json\n")[2].partition("\n```")[0]
    assert json.loads(shown)["top_k"] == 5


def test_what_people_wrote_on_the_card_stays(hub):
    push()
    api = HfApi()
    path = api.hf_hub_download(REPO, "README.md", repo_type="dataset")
    text = Path(path).read_text().replace("# Cached teacher signal", "# Our cache\n\nAsk Ana about it.")
    api.upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=REPO, repo_type="dataset")
    push(TEXTS[:2])
    push(TEXTS[:1], config_name="small")
    card = hub.dataset(REPO).files()["README.md"].decode()
    assert card.count("Ask Ana about it.") == 1
    assert card.count("<!-- default/train -->") == 1
    assert "| rows | 2 |" in card
    assert "## small / train" in card


def test_two_cards_of_the_same_build_are_equal():
    statistics = CacheStatistics(rows=3, tokens=9, trained_tokens=6, mass_sum=5.4, mass_min=0.8)
    statistics.mass_histogram[899] = 6
    manifest = TeacherManifest("t", "f" * 32, 310, 5)
    options = {
        "repo_id": REPO, "config_name": "default", "split": "train", "folder": "data", "manifest": manifest,
        "statistics": statistics, "picture": "x.png", "license": None,
    }  # fmt: skip
    card = write_card(None, **options)
    assert write_card(card, **options) == card
    assert mass_picture(statistics) == mass_picture(statistics)
    assert "mean 0.9000, 5th percentile 0.900, minimum 0.8000" in card
    assert "not stated" in card


def test_statistics_add_up():
    import numpy as np

    masses = np.array([0.0, 0.5, 0.75, 1.0, 1 + 2.0**-20])
    whole = CacheStatistics.of(rows=2, tokens=7, blob_bytes=50, masses=masses, entropies=masses)
    parts = [
        CacheStatistics.of(rows=1, tokens=3, blob_bytes=20, masses=masses[:2], entropies=masses[:2]),
        CacheStatistics.of(rows=1, tokens=4, blob_bytes=30, masses=masses[2:], entropies=masses[2:]),
        CacheStatistics.of(rows=0, tokens=0, blob_bytes=0, masses=masses[:0], entropies=masses[:0]),
    ]
    assert CacheStatistics.merged(part.to_dict() for part in parts) == whole
    assert whole.bytes_per_token == 10
    assert sum(whole.mass_histogram) == 5
    assert whole.mass_min == 0.0
    assert whole.mass_quantile(0.5) == pytest.approx(0.751)
    assert whole.mass_quantile(1.0) == 1.0


def test_no_picture_without_matplotlib(monkeypatch, caplog, hub):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    push()
    assert "matplotlib is not installed" in caplog.text
    assert not [name for name in hub.dataset(REPO).files() if name.endswith(".png")]


def test_the_hub_going_down_is_told_and_the_work_is_kept(hub, tmp_path):
    calls = []

    class Counting(TransformersTeacher):
        def score(self, rows, request):
            calls.extend(rows)
            return super().score(rows, request)

    options = {"top_k": 5, "progress": False, "shard_bytes": 300, "push_to_hub": REPO, "output_dir": str(tmp_path)}
    dataset = Dataset.from_dict({"text": TEXTS})
    hub.fail("POST", "/(preupload|commit)/", 503, times=10_000)
    with pytest.raises(ConnectionError, match="without calling the teacher"):
        build_distillation_dataset(dataset, Counting(make_teacher()), make_tokenizer(), **options)
    assert len(calls) == len(TEXTS)
    hub.faults.clear()
    cached = build_distillation_dataset(dataset, Counting(make_teacher()), make_tokenizer(), **options)
    assert len(calls) == len(TEXTS)
    assert same_rows(load_cache(REPO), cached)


# --- loading


def test_a_copy_of_another_revision_is_not_served_quietly(hub):
    push()
    load_cache(REPO)
    push(TEXTS[:2])
    hub.fail("GET", "/api/datasets/tester/cache/revision", 500, times=1000)
    hub.fail("GET", "/api/datasets/tester/cache$", 500, times=1000)
    with pytest.raises(ConnectionError, match="did not say which commit 'main'"):
        load_cache(REPO)


def test_a_wrong_copy_is_named(hub, monkeypatch):
    push()
    old = load_dataset(REPO, split="train")
    push(TEXTS[:2])
    monkeypatch.setattr(hub_module, "load_dataset", lambda *args, **kwargs: old)
    head = hub.dataset(REPO).branches["main"]
    with pytest.raises(ValueError, match=f"asked for the commit {head}, and a copy of"):
        load_cache(REPO)


def test_a_wrong_token_is_told(hub):
    push(private=True)
    with pytest.raises(ConnectionError, match="check the token"):
        load_cache(REPO, token="hf_wrong")


def test_another_signal_is_refused(hub):
    push()
    assert len(load_cache(REPO, top_k=5, tokenizer=make_tokenizer())) == len(TEXTS)
    with pytest.raises(ValueError, match="top_k: asked for 8, found 5"):
        load_cache(REPO, top_k=8)
    with pytest.raises(ValueError, match="teacher: asked for 'big/teacher'"):
        load_cache(REPO, teacher="big/teacher")
    with pytest.raises(ValueError, match="tokenizer: asked for"):
        load_cache(REPO, tokenizer=make_tokenizer(special=("<more>",)), streaming=True)
    Dataset.from_dict({"text": TEXTS}).push_to_hub("tester/text")
    with pytest.raises(ValueError, match="no 'teacher_manifest'"):
        load_cache("tester/text")


def test_a_folder_is_loaded_and_checked(tmp_path):
    cached = build_distillation_dataset(
        Dataset.from_dict({"text": TEXTS}), make_teacher(), make_tokenizer(), top_k=5, progress=False,
        output_dir=str(tmp_path / "out"),
    )  # fmt: skip
    assert same_rows(load_cache(str(tmp_path / "out"), top_k=5), cached)
    shutil.copytree(tmp_path / "out", tmp_path / "moved")
    assert same_rows(load_cache(str(tmp_path / "moved")), cached)


def test_plain_push_to_hub_gives_the_same_rows(hub):
    cached = push()
    cached.push_to_hub("tester/plain", private=True, max_shard_size="2KB")
    assert same_rows(load_cache("tester/plain"), cached)
    assert load_dataset("tester/plain", split="train", streaming=True).features == cached.features
    assert threading.active_count() < 60
