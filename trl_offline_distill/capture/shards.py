"""The output folder of a build: a plan of shards, each written atomically and recorded, so that any kill can be
resumed.

    OUTPUT/data/train-00003-of-00012.parquet   finished shards, nothing else
    OUTPUT/.build/settings.json                what is being built; written once, before the first shard
    OUTPUT/.build/00003.json                   the record of a finished shard: written after the shard itself

A file reaches its name by rename after fsync, so a name never holds half a file. A shard counts as finished when its
record is there and the shard has the recorded size; everything else is built again, to the same bytes.
"""

import errno
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..teacher_cache.columns import FEATURES


# Readers load whole row groups; the Hub's viewer and streaming stop working well above 100 MB.
ROW_GROUP_BYTES = 64 * 2**20
# List columns have 32-bit offsets.
MAX_LIST_ELEMENTS = 2**31 - 1


@dataclass
class CachedRow:
    """A finished row: token ids, labels (-100 where untrained) and one blob a token."""

    input_ids: np.ndarray
    labels: np.ndarray
    blobs: list[bytes]
    source_row: int

    @property
    def nbytes(self) -> int:
        return self.input_ids.nbytes + self.labels.nbytes + sum(map(len, self.blobs)) + 8 * len(self.blobs)


@dataclass(frozen=True)
class ShardPlan:
    """Which rows go into which shard; the same whoever builds it and however many share the work.

    Attributes:
        bounds: `[shards + 1]` row numbers; shard `i` holds rows `bounds[i]` to `bounds[i + 1]`.
        split: name of the split, the first part of the file names.
    """

    bounds: tuple[int, ...]
    split: str

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, shard: int) -> range:
        return range(self.bounds[shard], self.bounds[shard + 1])

    def file_name(self, shard: int) -> str:
        return f"{self.split}-{shard:05d}-of-{len(self):05d}.parquet"

    def of_worker(self, index: int, count: int) -> list[int]:
        """Shards of worker `index` of `count`, spread evenly."""
        return list(range(index, len(self), count))


def plan_shards(row_bytes: Sequence[int] | np.ndarray, shard_bytes: int, split: str) -> ShardPlan:
    """Cuts rows into shards of about `shard_bytes`; a larger row gets a shard of its own."""
    bounds, held = [0], 0
    for row, size in enumerate(np.asarray(row_bytes).tolist()):
        if held and held + size > shard_bytes:
            bounds.append(row)
            held = 0
        held += size
    return ShardPlan((*bounds, len(row_bytes)), split)


def row_groups(sizes: Sequence[int], elements: Sequence[int], names: Sequence[Any] | None = None) -> Iterator[range]:
    """Consecutive rows whose bytes stay below `ROW_GROUP_BYTES` and whose list elements fit 32-bit offsets.

    Raises:
        ValueError: naming the row, if one row alone has more list elements than a list column can address.
    """
    start, held_bytes, held_elements = 0, 0, 0
    for row, (size, count) in enumerate(zip(sizes, elements, strict=True)):
        if count > MAX_LIST_ELEMENTS:
            raise ValueError(
                f"Row {row if names is None else names[row]} has {count} tokens; a list column holds at most "
                f"{MAX_LIST_ELEMENTS}. Truncate it with `max_length`."
            )
        if row > start and (held_bytes + size > ROW_GROUP_BYTES or held_elements + count > MAX_LIST_ELEMENTS):
            yield range(start, row)
            start, held_bytes, held_elements = row, 0, 0
        held_bytes += size
        held_elements += count
    if start < len(sizes):
        yield range(start, len(sizes))


def write_parquet(target: BinaryIO, rows: Sequence[CachedRow], manifest_json: str) -> None:
    """Writes rows with the one schema every shard has, in row groups bounded by bytes. Equal rows give equal bytes."""
    schema = FEATURES.arrow_schema
    writer = pq.ParquetWriter(
        target,
        schema,
        compression="zstd",
        use_dictionary=["teacher_manifest"],
        write_page_index=True,
    )
    with writer:
        sizes = [row.nbytes + len(manifest_json) for row in rows]
        for group in row_groups(sizes, [len(row.blobs) for row in rows], [row.source_row for row in rows]):
            chosen = rows[group.start : group.stop]
            offsets = np.cumsum([0, *(len(row.blobs) for row in chosen)]).astype(np.int32)
            columns = [
                pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in chosen]).astype(np.int32)),
                pa.ListArray.from_arrays(offsets, np.concatenate([row.labels for row in chosen]).astype(np.int32)),
                pa.ListArray.from_arrays(
                    offsets, pa.array([blob for row in chosen for blob in row.blobs], type=pa.large_binary())
                ),
                pa.array([manifest_json] * len(chosen), type=pa.string()),
            ]
            table = pa.Table.from_arrays(
                [column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
            )
            writer.write_table(table, row_group_size=max(1, len(chosen)))


class ShardStore:
    """Reads and writes the output folder of one build.

    Args:
        folder (`Path`): the output folder.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.state = self.folder / ".build"
        self.data = self.folder / "data"

    @property
    def settings_path(self) -> Path:
        return self.state / "settings.json"

    def saved(self) -> dict[str, Any] | None:
        """What the folder is building, or `None` for a fresh one."""
        if not self.settings_path.exists():
            return None
        return json.loads(self.settings_path.read_text(encoding="utf-8"))

    def open(self, settings: dict[str, Any], manifest_json: str, plan: ShardPlan) -> str:
        """Starts or resumes a build; returns the manifest that all its rows carry.

        Raises:
            ValueError: if the folder holds a build with other settings (lists each difference), or other files.
        """
        with self._explaining_disk_errors():
            self.state.mkdir(parents=True, exist_ok=True)
            self.data.mkdir(exist_ok=True)
            self._remove_leftovers()
            saved = self.saved()
            if saved is None:
                strangers = sorted(path.name for path in self.data.iterdir())
                if strangers:
                    raise ValueError(
                        f"`output_dir` {str(self.folder)!r} already holds data/{strangers[0]} but no build record; "
                        "choose an empty folder."
                    )
                content = {"settings": settings, "manifest": manifest_json, "bounds": plan.bounds, "split": plan.split}
                self._write_once(self.settings_path, canonical_json(content).encode())
                # Another job may have been first; its settings are the ones that count.
                saved = self.saved()
        changes = _differences(saved["settings"], json.loads(canonical_json(settings)))
        if changes:
            raise ValueError(
                f"`output_dir` {str(self.folder)!r} holds a build with other settings; changed: "
                + "; ".join(changes)
                + ". "
                "Use the old settings to resume it, another `output_dir`, or `overwrite=True` to discard it."
            )
        return saved["manifest"]

    def clear(self) -> None:
        """Removes what a build left here, and nothing else."""
        names = [*self.state.glob("*"), *self.data.glob("*.parquet")]
        # The settings go last: without them, leftover shards would look like a stranger's files.
        for path in sorted(names, key=lambda path: path == self.settings_path):
            path.unlink()

    def record(self, plan: ShardPlan, shard: int) -> dict[str, Any] | None:
        """The record of a finished shard, or `None`."""
        path, data = self._record_path(shard), self.data / plan.file_name(shard)
        if not path.exists() or not data.exists():
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if data.stat().st_size == record["bytes"] else None

    def finish(self, plan: ShardPlan, shard: int, rows: Sequence[CachedRow], manifest_json: str, stats: dict) -> Path:
        """Writes one shard and then its record."""
        target = self.data / plan.file_name(shard)
        with self._explaining_disk_errors():
            temporary = self.state / f"{target.name}.{socket.gethostname()}-{os.getpid()}.tmp"
            with open(temporary, "wb") as handle:
                write_parquet(handle, rows, manifest_json)
                handle.flush()
                os.fsync(handle.fileno())
            record = {
                "bytes": temporary.stat().st_size,
                "sha256": file_sha256(temporary),
                "shard": shard,
                "source_rows": [row.source_row for row in rows[:1]] + [row.source_row for row in rows[-1:]],
                **stats,
            }
            os.replace(temporary, target)
            _sync_folder(self.data)
            self._write(self._record_path(shard), canonical_json(record).encode())
        return target

    def _remove_leftovers(self) -> None:
        """Removes half-written files of this machine's killed processes; a live one may still be writing."""
        for leftover in self.state.glob(f"*.{socket.gethostname()}-*.tmp"):
            pid = int(leftover.name.removesuffix(".tmp").rpartition("-")[2])
            if pid == os.getpid() or not _is_running(pid):
                leftover.unlink(missing_ok=True)

    def _record_path(self, shard: int) -> Path:
        return self.state / f"{shard:05d}.json"

    def _write(self, target: Path, content: bytes) -> None:
        temporary = self._temporary(target, content)
        os.replace(temporary, target)
        _sync_folder(target.parent)

    def _write_once(self, target: Path, content: bytes) -> None:
        """Like `_write`, but the first of several jobs wins."""
        temporary = self._temporary(target, content)
        try:
            os.link(temporary, target)
        except FileExistsError:
            pass
        except OSError as error:
            # File systems without hard links.
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            if not target.exists():
                os.replace(temporary, target)
        temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def _temporary(self, target: Path, content: bytes) -> Path:
        temporary = self.state / f"{target.name}.{socket.gethostname()}-{os.getpid()}.tmp"
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        return temporary

    @contextmanager
    def _explaining_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            finished = len(list(self.state.glob("[0-9]*.json")))
            raise OSError(
                error.errno,
                f"no space left while writing to `output_dir` {str(self.folder)!r}; {finished} finished shard(s) are "
                "kept. Free some space and run the same build again to resume",
            ) from error


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
