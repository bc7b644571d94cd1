"""The cache on the Hub: uploads shown in one commit, the dataset card, and loading that checks what came."""

import io
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset, IterableDataset, load_dataset
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, DatasetCard, DatasetCardData, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from .._compat import hub_request_errors, hub_source
from .manifest import TeacherManifest, tokenizer_fingerprint
from .statistics import CacheStatistics


logger = logging.getLogger(__name__)

T = TypeVar("T")
_RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_CONFLICT = 412
_TRIES = 7
_LONGEST_PAUSE = 60.0


class HubUpload:
    """Uploads the shards of one build and shows them in one commit.

    Shards given to [`~HubUpload.add`] are uploaded in the background; nothing of them is visible before
    [`~HubUpload.commit`]. An upload that fails does not stop the build: it is tried again at the end.

    Args:
        repo_id (`str`): dataset repository, made if it does not exist.
        private (`bool`, *optional*): make it private. An existing public repository is refused, not changed.
        revision (`str`, *optional*): branch, made from the default one if it does not exist.
        token (`str`, *optional*): default is the stored login.
        config_name (`str`): configuration the rows belong to; others in the repository are left as they are.
        pause (`float`): seconds before the first further try; doubled each time, at most a minute.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        config_name: str = "default",
        pause: float = 1.0,
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", config_name):
            raise ValueError(f"`config_name` is {config_name!r}; use letters, digits, '.', '_' and '-' only.")
        self.api = HfApi(token=token)
        self.revision = revision or "main"
        self.config_name = config_name
        self.folder = "data" if config_name == "default" else config_name
        self.pause = pause
        made = self._retrying(
            lambda: self.api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True), "create it"
        )
        self.repo_id = made.repo_id
        if private and not self._retrying(lambda: self.api.dataset_info(self.repo_id), "read it").private:
            raise ValueError(
                f"`private=True`, but the repository {self.repo_id!r} exists and is public; make it private in its "
                "settings or choose another."
            )
        if revision is not None:
            self._retrying(
                lambda: self.api.create_branch(self.repo_id, repo_type="dataset", branch=revision, exist_ok=True),
                f"make the branch {revision!r}",
            )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._uploads: dict[Path, Future] = {}

    def add(self, path: Path) -> None:
        """Starts the upload of a finished shard."""
        if path not in self._uploads:
            self._uploads[path] = self._pool.submit(self._preupload, path)

    def _preupload(self, path: Path) -> CommitOperationAdd:
        operation = CommitOperationAdd(f"{self.folder}/{path.name}", str(path))
        self._retrying(
            lambda: self.api.preupload_lfs_files(
                self.repo_id, [operation], repo_type="dataset", revision=self.revision, free_memory=False
            ),
            f"upload {path.name}",
        )
        return operation

    def commit(
        self,
        files: Sequence[Path],
        *,
        split: str,
        manifest: TeacherManifest,
        statistics: CacheStatistics,
        license: str | None = None,
    ) -> str:
        """Replaces the split by `files`, with its card, in one commit; returns the commit's sha.

        Raises:
            ConnectionError: if the Hub stays away; the shards are kept on disk, and another try skips what it has.
        """
        additions = []
        for path in files:
            self.add(path)
            try:
                additions.append(self._uploads[path].result())
            except hub_request_errors():
                # Failed while the teacher was at work; the Hub may be back by now.
                additions.append(self._preupload(path))
        picture = mass_picture(statistics)
        own = re.compile(rf"{re.escape(self.folder)}/{re.escape(split)}-\d{{5}}-of-\d{{5}}\.parquet")
        kept = {operation.path_in_repo for operation in additions}

        def attempt() -> str:
            # Read again on each try: what is stale, and what the card says, depend on the commit built upon.
            info = self.api.dataset_info(self.repo_id, revision=self.revision)
            present = {sibling.rfilename for sibling in info.siblings}
            operations: list[Any] = [
                *additions,
                *(CommitOperationDelete(name) for name in sorted(present - kept) if own.fullmatch(name)),
            ]
            picture_name = f"captured_mass_{self.config_name}_{split}.png" if picture is not None else None
            if picture is not None:
                operations.append(CommitOperationAdd(picture_name, io.BytesIO(picture)))
            card = write_card(
                self._card(info.sha) if "README.md" in present else None,
                repo_id=self.repo_id,
                config_name=self.config_name,
                split=split,
                folder=self.folder,
                manifest=manifest,
                statistics=statistics,
                picture=picture_name,
                license=license,
            )
            operations.append(CommitOperationAdd("README.md", io.BytesIO(card.encode())))
            commit = self.api.create_commit(
                self.repo_id,
                operations,
                repo_type="dataset",
                revision=self.revision,
                parent_commit=info.sha,
                commit_message=f"Cached teacher: {statistics.rows} rows, {self.config_name}/{split}",
            )
            return commit.oid

        return self._retrying(attempt, "commit", also={_CONFLICT})

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _card(self, sha: str) -> str | None:
        try:
            path = self.api.hf_hub_download(self.repo_id, "README.md", repo_type="dataset", revision=sha)
        except EntryNotFoundError:
            return None
        return Path(path).read_text(encoding="utf-8")

    def _retrying(self, call: Callable[[], T], what: str, also: frozenset[int] | set[int] = frozenset()) -> T:
        for attempt in range(_TRIES):
            try:
                return call()
            except (RuntimeError, *hub_request_errors()) as error:
                # An upload that failed arrives wrapped in a RuntimeError.
                cause = error.__cause__ if type(error) is RuntimeError else error
                if not isinstance(cause, hub_request_errors()):
                    raise
                status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
                if status is not None and status not in _RETRIED_STATUS | also:
                    raise
                if attempt == _TRIES - 1:
                    raise ConnectionError(
                        f"The Hub did not {what} after {_TRIES} tries (last: {cause}). All finished shards are kept "
                        "on disk; run the same build again to push them, without calling the teacher."
                    ) from error
                pause = min(self.pause * 2**attempt, _LONGEST_PAUSE)
                logger.warning("The Hub did not %s (%s); trying again in %.1f s.", what, cause, pause)
                time.sleep(pause)
        raise AssertionError("unreachable")


def mass_picture(statistics: CacheStatistics) -> bytes | None:
    """PNG of the captured-mass distribution; `None` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        logger.warning("The card gets no picture of the captured mass: matplotlib is not installed.")
        return None
    figure = Figure(figsize=(6, 3), dpi=120, layout="constrained")
    axes = figure.subplots()
    groups = 50
    counts = [
        sum(part) for part in zip(*[iter(statistics.mass_histogram)] * (len(statistics.mass_histogram) // groups))
    ]
    share = [100 * count / max(statistics.trained_tokens, 1) for count in counts]
    axes.bar([(place + 0.5) / groups for place in range(groups)], share, width=1 / groups)
    axes.axvline(
        statistics.mean_mass, color="black", linestyle="--", linewidth=1, label=f"mean {statistics.mean_mass:.3f}"
    )
    axes.set(xlim=(0, 1), xlabel="teacher's mass on the cached tokens", ylabel="% of trained tokens")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def write_card(
    previous: str | None,
    *,
    repo_id: str,
    config_name: str,
    split: str,
    folder: str,
    manifest: TeacherManifest,
    statistics: CacheStatistics,
    picture: str | None,
    license: str | None,
) -> str:
    """The dataset card: this split's section and metadata are replaced, everything else of `previous` is kept."""
    card = DatasetCard(previous, ignore_metadata_errors=True) if previous else DatasetCard("---\n{}\n---\n")
    data = card.data.to_dict() if previous else {}
    if license is not None:
        data["license"] = license
    data["tags"] = sorted({*(data.get("tags") or []), "distillation", "knowledge-distillation", "trl-offline-distill"})
    data["configs"] = _configs(data.get("configs") or [], config_name, split, folder)
    section = _section(repo_id, config_name, split, manifest, statistics, picture, license or data.get("license"))
    start, end = f"<!-- {config_name}/{split} -->", f"<!-- end of {config_name}/{split} -->"
    text = (card.text if previous else "").strip()
    block = f"{start}\n{section}\n{end}"
    if start in text and end in text:
        before, _, rest = text.partition(start)
        text = before + block + rest.partition(end)[2]
    else:
        text = "\n\n".join(part for part in (text or "# Cached teacher signal", block) if part)
    return f"---\n{DatasetCardData(**data).to_yaml()}\n---\n\n{text}\n"


def _configs(configs: list[dict[str, Any]], config_name: str, split: str, folder: str) -> list[dict[str, Any]]:
    configs = [dict(config) for config in configs]
    entry = next((config for config in configs if config.get("config_name") == config_name), None)
    if entry is None:
        entry = {"config_name": config_name, "data_files": []}
        configs.append(entry)
    files = entry.get("data_files") or []
    files = [file for file in files if isinstance(file, dict) and file.get("split") != split]
    entry["data_files"] = [*files, {"split": split, "path": f"{folder}/{split}-*"}]
    return configs


def _section(
    repo_id: str,
    config_name: str,
    split: str,
    manifest: TeacherManifest,
    statistics: CacheStatistics,
    picture: str | None,
    license: str | None,
) -> str:
    config = "" if config_name == "default" else f', "{config_name}"'
    revision = f" at `{manifest.teacher_revision}`" if manifest.teacher_revision else ""
    source = f"`{manifest.dataset}`" if manifest.dataset else "not recorded"
    facts = [
        ("teacher", f"`{manifest.teacher}`{revision}"),
        ("text", source + (f" at `{manifest.dataset_revision}`" if manifest.dataset_revision else "")),
        ("tokenizer fingerprint", f"`{manifest.tokenizer_fingerprint}`"),
        ("candidates a token (K)", str(manifest.top_k)),
        ("vocabulary", f"{manifest.vocab_size:,} ids"),
        ("layout", f"`{manifest.layout}`"),
        ("rows", f"{statistics.rows:,}"),
        ("tokens", f"{statistics.tokens:,}, of which {statistics.trained_tokens:,} trained"),
        ("bytes a trained token", f"{statistics.bytes_per_token:.1f}"),
        (
            "teacher's mass on the K tokens",
            f"mean {statistics.mean_mass:.4f}, 5th percentile {statistics.mass_quantile(0.05):.3f}, "
            f"minimum {statistics.mass_min:.4f}",
        ),
        ("teacher's entropy", f"{statistics.mean_entropy:.3f} nats (the tail counted as one outcome)"),
    ]
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)])
    image = f"\n![Distribution of the captured mass]({picture})\n" if picture else ""
    known = {name: value for name, value in asdict(manifest).items() if value not in (None, ())}
    return f"""## {config_name} / {split}

For every trained token, the {manifest.top_k} most likely tokens of the teacher with their log-probabilities, and the
log of the mass of all others. Row `t` describes token `t + 1`.

{table}
{image}
Train a student on it with [trl-offline-distill](https://pypi.org/project/trl-offline-distill/), without the teacher
(made with version {manifest.package_version or "unknown"}):

```python
from datasets import load_dataset
from trl_offline_distill import OfflineDistillationConfig, OfflineDistillationTrainer

trainer = OfflineDistillationTrainer(
    model="...",  # a student with the teacher's tokenizer
    args=OfflineDistillationConfig(output_dir="student"),
    train_dataset=load_dataset("{repo_id}"{config}, split="{split}"),
)
trainer.train()
```

Licence: {license or "not stated"}. The licences of the teacher and of the text apply as well.

<details><summary>Manifest</summary>

```json
{json.dumps(known, indent=2, sort_keys=True, default=list)}
```

</details>"""


def load_cache(
    path: str,
    config_name: str | None = None,
    *,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    token: str | None = None,
    teacher: str | None = None,
    top_k: int | None = None,
    tokenizer: Any = None,
) -> Dataset | IterableDataset:
    """Loads a cached dataset from the Hub or a folder, and checks that it is the one asked for.

    With the Hub away, `load_dataset` quietly serves the newest copy it has, perhaps of another revision. Here the
    revision is resolved first, and the loaded copy has to be of that commit.

    Args:
        path, config_name, split, revision, streaming, token: as in [`~datasets.load_dataset`].
        teacher, top_k, tokenizer (*optional*): what the manifest must say; the teacher by its id.

    Raises:
        ConnectionError: if the Hub cannot say which commit `revision` is. Set `HF_HUB_OFFLINE=1` to take the local
        copy. ValueError: if another revision or another signal came back; names both.
    """
    wanted = None
    if not Path(path).exists():
        wanted = _resolve(path, revision, token)
    dataset = load_dataset(
        path, config_name, split=split, revision=wanted or revision, streaming=streaming, token=token
    )
    if wanted is not None and isinstance(dataset, Dataset):
        source = hub_source(dataset)
        if source is not None and source[1] != wanted:
            raise ValueError(
                f"`load_cache({path!r}, revision={revision!r})` asked for the commit {wanted}, and a copy of "
                f"{source[1]} came back from the local cache. Remove that copy or load it by its own revision."
            )
    for text in _manifests(dataset):
        _check_manifest(TeacherManifest.from_json(text), path, teacher, top_k, tokenizer)
    return dataset


def _resolve(path: str, revision: str | None, token: str | None) -> str | None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi(token=token).dataset_info(path, revision=revision).sha
    except hub_request_errors() as error:
        raise ConnectionError(
            f"The Hub did not say which commit {revision or 'main'!r} of {path!r} is ({error}); a local copy might be "
            "another one. Try again, check the token, or set HF_HUB_OFFLINE=1 to take the local copy as it is."
        ) from error


def _manifests(dataset: Dataset | IterableDataset) -> list[str]:
    """Different manifests: all of a table's, the first of a stream's."""
    names = dataset.column_names
    if names is not None and "teacher_manifest" not in names:
        raise ValueError(
            f"The dataset has the columns {names} and no 'teacher_manifest'; it is no cached teacher. Build one with "
            "`build_distillation_dataset`."
        )
    if isinstance(dataset, Dataset):
        return dataset.unique("teacher_manifest") if len(dataset) else []
    return [row["teacher_manifest"] for row in dataset.select_columns(["teacher_manifest"]).take(1)]


def _check_manifest(
    manifest: TeacherManifest, path: str, teacher: str | None, top_k: int | None, tokenizer: Any
) -> None:
    asked = {
        "teacher": (teacher, manifest.teacher),
        "top_k": (top_k, manifest.top_k),
        "tokenizer": (
            None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            manifest.tokenizer_fingerprint,
        ),
    }
    wrong = [
        f"{name}: asked for {want!r}, found {got!r}" for name, (want, got) in asked.items() if want not in (None, got)
    ]
    if wrong:
        raise ValueError(f"{path!r} holds another signal; " + "; ".join(wrong) + ".")
