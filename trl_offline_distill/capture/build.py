"""`build_distillation_dataset`: from a text dataset and a teacher to a cached dataset."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset, load_dataset
from tqdm.auto import tqdm
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from .. import __version__
from .._compat import hub_source
from ..teacher_cache.codecs import (
    LAYOUTS,
    Layout,
    MinMassLayout,
    SampledLayout,
    encode_topk,
    get_layout,
    id_bits,
    select_support,
)
from ..teacher_cache.columns import FEATURES
from ..teacher_cache.hub import HubUpload
from ..teacher_cache.manifest import TeacherManifest, chat_template_hash, tokenizer_fingerprint
from ..teacher_cache.statistics import CacheStatistics
from ..teacher_cache.topk import TeacherTopK
from .engine import GenerationOptions, RowTooLongError, ScoreRequest, TeacherEngine, TokenRow
from .processes import process_state
from .server_engine import ServerTeacher
from .shards import CachedRow, ShardPlan, ShardStore, canonical_json, plan_shards
from .tokenize import SOURCE_ROW, TokenizedDataset, tokenize_dataset
from .transformers_engine import TransformersTeacher
from .vllm_engine import VLLMTeacher


logger = logging.getLogger(__name__)

ENGINES: dict[str, Callable[..., TeacherEngine]] = {
    "transformers": TransformersTeacher,
    "vllm": VLLMTeacher,
    "server": ServerTeacher,
}
# Positions of one call of the codec; short rows are encoded together.
_ENCODE_POSITIONS = 2048
# Rows listed in a message.
_LISTED = 10


def build_distillation_dataset(
    dataset: Dataset | IterableDataset,
    teacher: "str | PreTrainedModel | TeacherEngine",
    processing_class: "str | PreTrainedTokenizerBase | ProcessorMixin | None" = None,
    *,
    top_k: int = 100,
    layout: "str | Layout" = "default",
    tail_temperatures: Sequence[float] = (),
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    dataset_text_field: str = "text",
    formatting_func: Callable[[dict], str] | None = None,
    eos_token: str | None = None,
    chat_template_path: str | None = None,
    template_date: str | None = None,
    dataset_num_proc: int | None = None,
    engine: str = "auto",
    model_init_kwargs: dict[str, Any] | None = None,
    batch_tokens: int = 8192,
    chunk_size: int | None = None,
    generation: "GenerationOptions | dict[str, Any] | None" = None,
    seed: int = 0,
    output_dir: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = 256 * 2**20,
    num_shards: int = 1,
    shard_index: int = 0,
    long_rows: str = "error",
    split: str = "train",
    dataset_name: str | None = None,
    dataset_revision: str | None = None,
    push_to_hub: str | None = None,
    private: bool | None = None,
    hub_revision: str | None = None,
    config_name: str = "default",
    hub_token: str | None = None,
    license: str | None = None,
    progress: bool = True,
) -> Dataset:
    """Caches a teacher's top-K log-probabilities and tail for every trained token of a dataset.

    The rows are tokenised as [`~trl.SFTTrainer`] would tokenise them and scored once. A build is cut into shards that
    are written atomically: run the same call again after any interruption and it goes on after the last finished
    shard; run it after the end and the teacher is not called at all.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Any text dataset SFTTrainer takes: text, messages, prompt/completion (plain or conversational), already
            tokenised; or prompts only, with `generation`.
        teacher (`str`, [`~transformers.PreTrainedModel`] or engine):
            Model id or path, a model in memory, the URL of an OpenAI-compatible server, or an engine such as
            [`ServerTeacher`].
        processing_class (`str`, tokenizer or processor, *optional*):
            The teacher's tokenizer. Default: the one beside the teacher's weights.
        top_k (`int`, *optional*, defaults to `100`):
            Tokens kept at each position.
        layout (`str` or layout object, *optional*, defaults to `"default"`):
            How a position is stored: a name of `teacher_cache.codecs.LAYOUTS` or a configured layout.
        tail_temperatures (`Sequence[float]`, *optional*):
            Temperatures other than 1 at which the tail's log-sum is stored too; needed to train at `temperature != 1`.
        max_length, truncation_mode, completion_only_loss, assistant_only_loss, dataset_text_field, formatting_func, \
eos_token, chat_template_path, dataset_num_proc:
            As in [`~trl.SFTConfig`] and [`~trl.SFTTrainer`].
        template_date (`str`, *optional*):
            ISO date printed by chat templates that print today's. Default: the day the build was started.
        engine (`str`, *optional*, defaults to `"auto"`):
            What runs the teacher: `"transformers"`, `"vllm"`, `"server"`, or `"auto"` (a server for a URL, else
            transformers).
        model_init_kwargs (`dict`, *optional*):
            Options of the engine: of `from_pretrained`, of `vllm.LLM`, or of [`ServerTeacher`].
        batch_tokens (`int`, *optional*, defaults to `8192`):
            Padded tokens of one forward pass. Does not change what is stored beyond rounding, but for completions that
            transformers samples, which are seeded a batch at a time.
        chunk_size (`int`, *optional*):
            Positions of one pass over the head. Default: by memory.
        generation (`dict` or [`GenerationOptions`], *optional*):
            How the teacher writes completions for rows that have a `prompt` and no `completion`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the `"sampled"` layout.
        output_dir (`str`, *optional*):
            Folder of the build, a dataset that `load_dataset` reads. Default: a folder in the datasets cache, found
            again by the next call with the same input.
        overwrite (`bool`, *optional*, defaults to `False`):
            Discard a build in `output_dir` that was made with other settings.
        shard_bytes (`int`, *optional*, defaults to 256 MiB):
            Size of a shard before compression; also what a process holds in memory.
        num_shards, shard_index (`int`, *optional*):
            Build only the part `shard_index` of `num_shards` jobs that share nothing but `output_dir`. Each job
            returns its part; the whole is what any later call without them returns. Under `accelerate launch` the
            processes share the work by themselves.
        long_rows (`str`, *optional*, defaults to `"error"`):
            Rows longer than the teacher takes: `"error"` refuses them, before the teacher runs where its limit is
            known, `"skip"` leaves them out and lists them.
        split (`str`, *optional*, defaults to `"train"`):
            Split name of the result.
        dataset_name, dataset_revision (`str`, *optional*):
            Source named in the manifest. Default: what `load_dataset` recorded.
        push_to_hub (`str`, *optional*):
            Repository to push to. Shards are uploaded while the build goes on, one commit at the end shows them.
        private (`bool`, *optional*), hub_revision (`str`, *optional*), config_name (`str`), hub_token (`str`,
        *optional*):
            Of the repository; `hub_revision` is the branch.
        license (`str`, *optional*):
            Licence named in the dataset card.
        progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar with tokens/s.

    Returns:
        [`~datasets.Dataset`] with the columns `input_ids`, `labels`, `teacher_topk` and `teacher_manifest`, in source
        order without the rows that truncation left untrained.

    Raises:
        ValueError: for input that cannot give the signal asked for; before the teacher runs.
    """
    _check_arguments(top_k, batch_tokens, chunk_size, shard_bytes, num_shards, shard_index, long_rows)
    layout_name, layout = _named_layout(layout)
    sampled = isinstance(layout, SampledLayout)
    state = process_state()
    engine_object = _as_engine(teacher, engine, batch_tokens, chunk_size, model_init_kwargs)
    processing_class = _as_processing_class(processing_class, teacher, engine_object, model_init_kwargs)
    store = None if output_dir is None else ShardStore(output_dir)
    saved = store.saved() if store is not None else None
    if template_date is None and saved is not None:
        # A build resumed tomorrow prints the date of the day it was started.
        template_date = saved["settings"].get("template_date")

    source_name, source_revision, source_split = _source(dataset, dataset_name, dataset_revision)
    tokenized = tokenize_dataset(
        dataset,
        processing_class,
        max_length=max_length,
        truncation_mode=truncation_mode,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
        dataset_text_field=dataset_text_field,
        formatting_func=formatting_func,
        eos_token=eos_token,
        chat_template_path=chat_template_path,
        template_date=template_date,
        num_proc=dataset_num_proc,
    )
    generation = _generation(generation, tokenized)
    vocabulary = Vocabulary.of(tokenized.tokenizer, getattr(engine_object, "head_rows", None))
    tail_temperatures = tuple(float(temperature) for temperature in tail_temperatures)
    request = ScoreRequest(
        top_k=top_k,
        tail_temperatures=tail_temperatures,
        layout=layout,
        seed=seed,
        token_mask_size=vocabulary.size,
        missing_ids=vocabulary.missing,
    )
    _check_request(request, engine_object, vocabulary)
    rows = _measure_rows(tokenized, vocabulary)
    keep, skipped = _fitting_rows(rows, engine_object, generation, long_rows)
    if not len(keep):
        raise ValueError("No row of `dataset` is left: truncation or `long_rows='skip'` dropped all of them.")
    if not tokenized.prompts_only and not rows.trained[keep].any():
        raise ValueError(
            "Nothing in `dataset` is trained: every label is -100 (after truncation and masks). Check "
            "`completion_only_loss`, `assistant_only_loss`, `max_length` and the labels."
        )
    _report(tokenized, skipped, state)

    description = engine_object.describe()
    settings = {
        "teacher": description.teacher,
        "teacher_revision": description.revision,
        "teacher_fingerprint": description.fingerprint,
        "engine": description.engine,
        "dtype": description.dtype,
        "attn_implementation": description.attn_implementation,
        "engine_options": description.options,
        "top_k": top_k,
        "layout": {"name": layout_name, **vars(layout)},
        "seed": seed if sampled else None,
        "tail_temperatures": list(tail_temperatures),
        "tokenizer": tokenizer_fingerprint(tokenized.tokenizer),
        "vocab_size": vocabulary.size,
        "chat_template": chat_template_hash(tokenized.chat_template),
        "template_date": tokenized.template_date,
        "max_length": max_length,
        "truncation_mode": truncation_mode,
        "completion_only_loss": completion_only_loss,
        "assistant_only_loss": assistant_only_loss,
        "generation": None if generation is None else generation.to_dict(),
        "generation_batch_tokens": batch_tokens if generation is not None and generation.temperature > 0 else None,
        "dataset": source_name,
        "dataset_revision": source_revision,
        "rows": len(keep),
        "tokens": rows.digest,
        "skipped_rows": skipped,
        "shard_bytes": shard_bytes,
        "split": split,
    }
    manifest = TeacherManifest(
        teacher=description.teacher,
        tokenizer_fingerprint=settings["tokenizer"],
        vocab_size=vocabulary.size,
        top_k=top_k,
        layout=layout_name,
        tail_temperatures=tail_temperatures,
        teacher_revision=description.revision,
        chat_template_hash=settings["chat_template"],
        engine=description.engine,
        dtype=description.dtype,
        attn_implementation=description.attn_implementation,
        dataset=source_name,
        dataset_revision=source_revision,
        dataset_split=source_split,
        package_version=__version__,
        template_date=tokenized.template_date,
        seed=seed if sampled else None if generation is None else generation.seed,
        min_mass=layout.mass if isinstance(layout, MinMassLayout) else None,
        draws=layout.draws if sampled else None,
    )
    if store is None:
        key = hashlib.sha256(canonical_json(settings).encode()).hexdigest()[:24]
        store = ShardStore(Path(datasets.config.HF_DATASETS_CACHE) / "trl-offline-distill" / key)
    row_bytes = rows.stored_bytes(keep, request, generation)
    plan = plan_shards(row_bytes, shard_bytes, split)
    is_other = saved is not None and saved["settings"] != _plain(settings)
    if overwrite and is_other and state.is_main_process and shard_index == 0:
        store.clear()
    if overwrite:
        state.wait_for_everyone()
    manifest_json = store.open(settings, manifest.to_json(), plan)

    job = _Job(
        tokenized=tokenized,
        keep=keep,
        plan=plan,
        store=store,
        manifest_json=manifest_json,
        engine=engine_object,
        request=request,
        vocab_size=vocabulary.size,
        generation=generation,
        long_rows=long_rows,
        lengths=rows.lengths[keep],
    )
    workers = num_shards * state.num_processes
    worker = shard_index * state.num_processes + state.process_index
    upload = None
    if push_to_hub is not None:
        upload = HubUpload(
            push_to_hub, private=private, revision=hub_revision, token=hub_token, config_name=config_name
        )
    try:
        job.run(plan.of_worker(worker, workers), show=progress and state.is_local_main_process, upload=upload)
        if state.num_processes > 1:
            _wait_for(job, _shards_of_job(plan, shard_index, num_shards, state.num_processes))
        complete = job.is_complete()
        if complete and state.is_main_process and upload is not None:
            upload.commit(
                job.files(range(len(plan))),
                split=split,
                manifest=TeacherManifest.from_json(manifest_json),
                statistics=CacheStatistics.merged(store.record(plan, shard) for shard in range(len(plan))),
                license=license,
            )
    finally:
        if upload is not None:
            upload.close()
    own = range(len(plan)) if num_shards == 1 else _shards_of_job(plan, shard_index, num_shards, state.num_processes)
    return _load(job.files(own), split)


@dataclass(frozen=True)
class Vocabulary:
    """Ids the tokenizer has: below `size`, without `missing`."""

    size: int
    missing: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, head_rows: int | None) -> "Vocabulary":
        ids = set(tokenizer.get_vocab().values())
        size = max(ids) + 1
        if head_rows is not None:
            size = min(size, head_rows)
        return cls(size, tuple(sorted(set(range(size)) - ids)))


@dataclass
class _RowMeasures:
    """Lengths `[R]`, trained tokens `[R]` and source rows `[R]` of the tokenised rows, and a hash of their tokens."""

    lengths: np.ndarray
    trained: np.ndarray
    source_rows: np.ndarray
    digest: str

    def stored_bytes(
        self, keep: np.ndarray, request: ScoreRequest, generation: GenerationOptions | None
    ) -> np.ndarray:
        """Upper bound of the bytes of each kept row before compression, known before the teacher runs."""
        bits = id_bits(request.token_mask_size)
        if isinstance(request.layout, SampledLayout):
            per_token = request.layout.blob_bytes(8, bits, request.layout.draws)
        else:
            per_token = request.layout.blob_bytes(len(request.tail_temperatures), bits, request.top_k)
        lengths, trained = self.lengths[keep], self.trained[keep]
        if generation is not None:
            lengths, trained = lengths + generation.max_new_tokens, trained + generation.max_new_tokens
        return trained * per_token + lengths * 16


@dataclass
class _Job:
    """One process's part of a build."""

    tokenized: TokenizedDataset
    keep: np.ndarray
    plan: ShardPlan
    store: ShardStore
    manifest_json: str
    engine: TeacherEngine
    request: ScoreRequest
    vocab_size: int
    generation: GenerationOptions | None
    long_rows: str
    lengths: np.ndarray

    def run(self, shards: Sequence[int], *, show: bool, upload: HubUpload | None = None) -> None:
        """Builds the shards that are not finished yet."""
        open_shards = [shard for shard in shards if self.store.record(self.plan, shard) is None]
        if upload is not None:
            for shard in sorted(set(shards) - set(open_shards)):
                upload.add(self.store.data / self.plan.file_name(shard))
        if not open_shards:
            return
        tokens = {shard: int(self.lengths[self.plan.rows(shard)].sum()) for shard in shards}
        finished = sum(tokens[shard] for shard in shards) - sum(tokens[shard] for shard in open_shards)
        bar = tqdm(
            total=sum(tokens.values()),
            initial=finished,
            unit="tok",
            unit_scale=True,
            desc="Scoring with the teacher",
            disable=not show,
        )
        try:
            self.engine.load()
            with bar, ThreadPoolExecutor(1, thread_name_prefix="encode") as encoder:
                for shard in open_shards:
                    rows, record = self._build_rows(self.plan.rows(shard), encoder, bar)
                    path = self.store.finish(self.plan, shard, rows, self.manifest_json, record)
                    if upload is not None:
                        upload.add(path)
        finally:
            self.engine.close()

    def _build_rows(
        self, chosen: range, encoder: ThreadPoolExecutor, bar: tqdm
    ) -> tuple[list[CachedRow], dict[str, Any]]:
        """The rows of a shard, and its record: the statistics and the source rows that the engine did not take."""
        table = self.tokenized.dataset.with_format("arrow")[self.keep[chosen.start : chosen.stop].tolist()]
        source_rows = table[SOURCE_ROW].to_pylist()
        input_ids = _row_arrays(table["input_ids"])
        skipped: list[int] = []
        if self.generation is not None:
            labels = []
            while True:
                try:
                    completions = self.engine.generate(
                        [ids.tolist() for ids in input_ids], source_rows, self.generation
                    )
                    break
                except RowTooLongError as error:
                    skipped.append(self._skipped(error, source_rows))
                    kept = [row for row, source_row in enumerate(source_rows) if source_row != error.source_row]
                    source_rows, input_ids = [source_rows[row] for row in kept], [input_ids[row] for row in kept]
            for row, (prompt, completion) in enumerate(zip(input_ids, completions, strict=True)):
                input_ids[row] = np.concatenate([prompt, np.asarray(completion, np.int32)])
                labels.append(np.concatenate([np.full(len(prompt), -100, np.int32), np.asarray(completion, np.int32)]))
        else:
            labels = _row_arrays(table["labels"])
        rows = []
        for ids, row_labels, source_row in zip(input_ids, labels, source_rows, strict=True):
            # Nothing predicts the first token.
            row_labels = np.concatenate([np.full(min(1, len(row_labels)), -100, np.int32), row_labels[1:]])
            rows.append(CachedRow(ids, row_labels, [b""] * len(ids), source_row))
        too_long, statistics = self._score(rows, encoder, bar)
        rows = [row for row in rows if row.source_row not in too_long]
        skipped += too_long
        if skipped:
            logger.warning("%d row(s) were too long for the teacher and are left out: %s.", len(skipped), skipped)
        return rows, {**statistics.to_dict(), "skipped_rows": skipped}

    def _skipped(self, error: RowTooLongError, asked: Sequence[int]) -> int:
        """The source row, of those `asked`, that only the engine found too long, where such rows are left out."""
        if self.long_rows == "error" or error.source_row not in asked:
            raise error
        return error.source_row

    def _score(
        self, rows: list[CachedRow], encoder: ThreadPoolExecutor, bar: tqdm
    ) -> tuple[list[int], CacheStatistics]:
        """Fills the blobs of `rows`; returns the source rows left out as too long, and the statistics of the rest."""
        positions = [np.flatnonzero(row.labels[1:] != -100) for row in rows]
        wanted = [index for index, row_positions in enumerate(positions) if len(row_positions)]
        bar.update(sum(len(row.input_ids) for index, row in enumerate(rows) if not len(positions[index])))
        token_rows = [
            TokenRow(rows[index].input_ids.tolist(), positions[index].tolist(), rows[index].source_row)
            for index in wanted
        ]
        masses: list[np.ndarray] = [np.empty(0)] * len(rows)
        entropies: list[np.ndarray] = [np.empty(0)] * len(rows)

        def encode(group: list[tuple[int, TeacherTopK]]) -> None:
            """Blobs and statistics of some rows; runs beside the teacher."""
            for index, signal in group:
                _check_signal(signal, rows[index].source_row, positions[index])
            signal = self.request.layout.keep(TeacherTopK.cat([signal for _, signal in group]))
            blobs = encode_topk(signal, vocab_size=self.vocab_size, layout=self.request.layout)
            mass, entropy = _mass_and_entropy(signal)
            start = 0
            for index, _ in group:
                row, stop = rows[index], start + len(positions[index])
                for position, blob in zip(positions[index].tolist(), blobs[start:stop], strict=True):
                    row.blobs[position] = blob
                masses[index], entropies[index] = mass[start:stop], entropy[start:stop]
                start = stop

        waiting: list[Future] = []
        group: list[tuple[int, TeacherTopK]] = []
        seen, too_long = set(), set()
        pending = list(range(len(token_rows)))
        while pending:
            try:
                for place, signal in self.engine.score([token_rows[number] for number in pending], self.request):
                    index = wanted[pending[place]]
                    if index in seen:
                        raise RuntimeError(
                            f"The engine {type(self.engine).__name__} gave row {rows[index].source_row} twice."
                        )
                    seen.add(index)
                    group.append((index, signal))
                    bar.update(len(rows[index].input_ids))
                    if sum(len(positions[index]) for index, _ in group) >= _ENCODE_POSITIONS:
                        waiting.append(encoder.submit(encode, group))
                        group = []
                        # Keeps memory flat when the codec is slower than the teacher.
                        if len(waiting) > 4:
                            waiting.pop(0).result()
                break
            except RowTooLongError as error:
                # The others of the shard are asked for again, without it.
                too_long.add(self._skipped(error, [token_rows[number].source_row for number in pending]))
                pending = [
                    number
                    for number in pending
                    if wanted[number] not in seen and token_rows[number].source_row != error.source_row
                ]
        if group:
            waiting.append(encoder.submit(encode, group))
        for future in waiting:
            future.result()
        lost = [rows[index].source_row for index in wanted if index not in seen]
        lost = [source_row for source_row in lost if source_row not in too_long]
        if lost:
            raise RuntimeError(f"The engine {type(self.engine).__name__} left out the rows {lost[:_LISTED]}.")
        kept = [row for row in rows if row.source_row not in too_long]
        return sorted(too_long), CacheStatistics.of(
            rows=len(kept),
            tokens=sum(len(row.input_ids) for row in kept),
            blob_bytes=sum(len(blob) for row in kept for blob in row.blobs),
            masses=np.concatenate([np.empty(0), *masses]),
            entropies=np.concatenate([np.empty(0), *entropies]),
        )

    def is_complete(self) -> bool:
        return all(self.store.record(self.plan, shard) is not None for shard in range(len(self.plan)))

    def files(self, shards: Sequence[int]) -> list[Path]:
        return [self.store.data / self.plan.file_name(shard) for shard in shards]


def _check_arguments(
    top_k: int,
    batch_tokens: int,
    chunk_size: int | None,
    shard_bytes: int,
    num_shards: int,
    shard_index: int,
    long_rows: str,
) -> None:
    for name, value in (
        ("top_k", top_k),
        ("batch_tokens", batch_tokens),
        ("chunk_size", chunk_size),
        ("shard_bytes", shard_bytes),
        ("num_shards", num_shards),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least 1.")
    if not 0 <= shard_index < num_shards:
        raise ValueError(f"`shard_index` is {shard_index}; it must lie in 0..{num_shards - 1} (`num_shards` - 1).")
    if long_rows not in ("error", "skip"):
        raise ValueError(f"`long_rows` is {long_rows!r}; choose 'error' or 'skip'.")


def _as_engine(
    teacher: Any, engine: str, batch_tokens: int, chunk_size: int | None, model_init_kwargs: dict[str, Any] | None
) -> TeacherEngine:
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"`engine` is {engine!r}; choose 'auto' or one of {sorted(ENGINES)}.")
    if isinstance(teacher, str):
        is_url = teacher.startswith(("http://", "https://"))
        if engine == "auto":
            engine = "server" if is_url else "transformers"
        if (engine == "server") != is_url:
            raise ValueError(
                f"`teacher` is {teacher!r} and `engine` is {engine!r}; a server is given by its URL "
                "(http://host:port), any other engine by a model id or path."
            )
        options = dict(model_init_kwargs or {})
        if engine == "transformers":
            return TransformersTeacher(
                teacher, batch_tokens=batch_tokens, chunk_size=chunk_size, model_init_kwargs=options
            )
        return ENGINES[engine](teacher, **options)
    if isinstance(teacher, PreTrainedModel) or hasattr(teacher, "get_base_model"):
        if engine not in ("auto", "transformers"):
            raise ValueError(
                f"`teacher` is a model in memory, which `engine={engine!r}` cannot run; give its id or path."
            )
        return TransformersTeacher(
            teacher, batch_tokens=batch_tokens, chunk_size=chunk_size, model_init_kwargs=model_init_kwargs
        )
    if isinstance(teacher, TeacherEngine):
        if engine != "auto" or model_init_kwargs:
            raise ValueError("`teacher` is an engine already; leave out `engine` and `model_init_kwargs`.")
        return teacher
    raise TypeError(
        f"`teacher` is a {type(teacher).__name__}; pass a model id, a path, a URL, a PreTrainedModel or an engine."
    )


def _as_processing_class(
    processing_class: Any, teacher: Any, engine: TeacherEngine, model_init_kwargs: dict[str, Any] | None
) -> Any:
    if processing_class is not None and not isinstance(processing_class, str):
        return processing_class
    source = processing_class
    if source is None and isinstance(teacher, str) and not teacher.startswith(("http://", "https://")):
        source = teacher
    if source is None and isinstance(engine, TransformersTeacher):
        source = getattr(engine.config, "_name_or_path", None)
    if not source:
        raise ValueError(
            "`processing_class` is not given and the teacher names none; pass the teacher's tokenizer or its id."
        )
    options = {
        name: value
        for name, value in (model_init_kwargs or {}).items()
        if source == teacher and name in ("revision", "trust_remote_code", "token", "cache_dir", "gguf_file")
    }
    return AutoProcessor.from_pretrained(source, **options)


def _source(dataset: Any, name: str | None, revision: str | None) -> tuple[str | None, str | None, str | None]:
    """Id, revision and split of the source, as far as `load_dataset` recorded them."""
    source = hub_source(dataset)
    if name is None and source is not None:
        name, revision = source[0], revision or source[1]
    if name is None:
        name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    split = getattr(dataset, "split", None)
    return name, revision, None if split is None else str(split)


def _generation(generation: Any, tokenized: TokenizedDataset) -> GenerationOptions | None:
    if not tokenized.prompts_only:
        if generation is not None:
            raise ValueError(
                "`generation` is given but the rows already have what follows the prompt; drop it, or remove the "
                "'completion' column to let the teacher write completions."
            )
        return None
    if generation is None:
        raise ValueError(
            "`dataset` has prompts but no completions; add a 'completion' column, or pass `generation`, for example "
            "{'max_new_tokens': 512, 'temperature': 1.0}, to let the teacher write them."
        )
    if isinstance(generation, dict):
        known = set(GenerationOptions.__dataclass_fields__)
        unknown = sorted(set(generation) - known)
        if unknown:
            raise ValueError(f"`generation` has the unknown options {unknown}; known: {sorted(known)}.")
        return GenerationOptions(**generation)
    return generation


def _check_request(request: ScoreRequest, engine: TeacherEngine, vocabulary: Vocabulary) -> None:
    # The codec's own check of the temperatures, before the teacher runs rather than after its first batch.
    select_support(torch.zeros(1, 2), top_k=1, tail_temperatures=request.tail_temperatures)
    ids = vocabulary.size - len(vocabulary.missing)
    if request.top_k > ids:
        raise ValueError(f"`top_k` is {request.top_k}, more than the {ids} tokens of the vocabulary; lower it.")
    if engine.max_top_k is not None and request.top_k > engine.max_top_k:
        raise ValueError(
            f"`top_k` is {request.top_k}, but the teacher's engine gives at most {engine.max_top_k} log-probabilities "
            "a token; lower `top_k` or raise the engine's limit (vLLM: `max_logprobs`)."
        )
    if not engine.full_distribution:
        for name, used in (
            ("tail_temperatures", request.tail_temperatures),
            ("layout", isinstance(request.layout, SampledLayout)),
        ):
            if used:
                raise ValueError(
                    f"`{name}` needs the teacher's whole distribution, but {type(engine).__name__} only sees its most "
                    "likely tokens; use the transformers engine."
                )


def _measure_rows(tokenized: TokenizedDataset, vocabulary: Vocabulary) -> _RowMeasures:
    digest = hashlib.sha256()
    lengths, trained, source_rows = [], [], []
    for batch in tokenized.dataset.with_format("arrow").iter(batch_size=1000):
        column = batch["input_ids"].combine_chunks()
        sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        ids = pc.list_flatten(column).to_numpy(zero_copy_only=False)
        rows = batch[SOURCE_ROW].to_numpy()
        outside = (ids < 0) | (ids >= vocabulary.size)
        if outside.any():
            place = int(outside.argmax())
            row = rows[np.searchsorted(sizes.cumsum(), place, side="right")]
            raise ValueError(
                f"`dataset` row {row} holds the id {ids[place]}, outside the teacher's vocabulary "
                f"0..{vocabulary.size - 1}; tokenise it with the teacher's tokenizer."
            )
        digest.update(sizes.tobytes() + ids.astype(np.int32).tobytes())
        starts = np.concatenate([[0], sizes.cumsum()[:-1]])
        if "labels" in batch.column_names:
            labels = pc.list_flatten(batch["labels"].combine_chunks()).to_numpy(zero_copy_only=False).astype(np.int32)
            labels[starts] = -100
            digest.update(labels.tobytes())
            trained.append(np.add.reduceat(labels != -100, starts, dtype=np.int64))
        else:
            trained.append(np.zeros(len(sizes), np.int64))
        lengths.append(sizes)
        source_rows.append(rows)
    if not lengths:
        return _RowMeasures(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), digest.hexdigest())
    return _RowMeasures(
        np.concatenate(lengths), np.concatenate(trained), np.concatenate(source_rows), digest.hexdigest()
    )


def _fitting_rows(
    rows: _RowMeasures, engine: TeacherEngine, generation: GenerationOptions | None, long_rows: str
) -> tuple[np.ndarray, list[int]]:
    """Numbers of the rows the engine takes, and the source rows it does not."""
    if engine.max_length is None:
        return np.arange(len(rows.lengths)), []
    added = 0 if generation is None else generation.max_new_tokens
    long = rows.lengths + added > engine.max_length
    found = rows.source_rows[long].tolist()
    if found and long_rows == "error":
        raise RowTooLongError(
            f"{len(found)} row(s) are longer than the {engine.max_length} tokens the teacher takes, with {added} "
            f"tokens to write; first: row {found[0]} with {int(rows.lengths[long][0])}. Set `max_length` to truncate "
            "them or `long_rows='skip'` to leave them out.",
            found[0],
        )
    return np.flatnonzero(~long), found


def _report(tokenized: TokenizedDataset, skipped: list[int], state: PartialState) -> None:
    if not state.is_main_process:
        return

    def listed(rows: list[int]) -> str:
        more = f" and {len(rows) - _LISTED} more" if len(rows) > _LISTED else ""
        return f"{', '.join(map(str, rows[:_LISTED]))}{more}"

    if tokenized.dropped_rows:
        logger.warning(
            "%d of %d rows have no trained token left after truncation and are dropped: %s.",
            len(tokenized.dropped_rows), tokenized.source_rows, listed(tokenized.dropped_rows),
        )  # fmt: skip
    if tokenized.prompt_not_prefix_rows:
        logger.warning(
            "In %d of %d rows the prompt alone is tokenised differently than with its completion, so the student will "
            "meet another context at inference than in training: %s. The cache keeps prompt and completion as they "
            "stand together.",
            len(tokenized.prompt_not_prefix_rows), tokenized.source_rows, listed(tokenized.prompt_not_prefix_rows),
        )  # fmt: skip
    if skipped:
        logger.warning("%d row(s) are too long for the teacher and are left out: %s.", len(skipped), listed(skipped))


def _check_signal(signal: TeacherTopK, source_row: int, positions: np.ndarray) -> None:
    if len(signal.logprobs) != len(positions):
        raise RuntimeError(
            f"Row {source_row}: the teacher described {len(signal.logprobs)} positions, {len(positions)} were asked "
            "for."
        )
    broken = torch.isnan(signal.logprobs).any(-1) | torch.isnan(signal.log_tail) | (signal.log_tail == torch.inf)
    if bool(broken.any()):
        raise ValueError(
            f"Row {source_row}, token {int(positions[int(broken.int().argmax())])}: the teacher gave NaN or infinity. "
            "fp16 weights of a bf16 model overflow so; load the teacher with dtype bfloat16 or float32."
        )


def _mass_and_entropy(signal: TeacherTopK) -> tuple[np.ndarray, np.ndarray]:
    """Captured mass and entropy (tail as one outcome, nats) of each position."""
    logprobs = torch.cat([signal.logprobs, signal.log_tail[:, None]], -1).double()
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs.clamp(min=-1e4)).sum(-1)
    return probabilities[:, :-1].sum(-1).numpy(), entropy.numpy()


def _row_arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    column = column.combine_chunks()
    values = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.int32)
    ends = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64).cumsum()
    return np.split(values, ends[:-1])


def _named_layout(layout: str | Layout) -> tuple[str, Layout]:
    """A layout and the name it has in `LAYOUTS`, whatever its options."""
    if isinstance(layout, str):
        return layout, get_layout(layout)
    for name, known in LAYOUTS.items():
        if type(known) is type(layout):
            return name, layout
    raise TypeError(f"`layout` is a {type(layout).__name__}; pass a name or a configured layout of {sorted(LAYOUTS)}.")


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(canonical_json(settings))


def _shards_of_job(plan: ShardPlan, shard_index: int, num_shards: int, processes: int) -> list[int]:
    return [shard for shard in range(len(plan)) if shard % (num_shards * processes) // processes == shard_index]


def _wait_for(job: _Job, shards: Sequence[int]) -> None:
    """Waits for the other processes of this job; a process that dies takes its launcher and so this one along."""
    while any(job.store.record(job.plan, shard) is None for shard in shards):
        time.sleep(0.2)


def _load(files: list[Path], split: str) -> Dataset:
    if not files:
        # A job that got no shard.
        return Dataset.from_dict({name: [] for name in FEATURES}, features=FEATURES)
    return load_dataset("parquet", data_files={split: [str(file) for file in files]}, split=split)
