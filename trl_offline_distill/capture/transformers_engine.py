"""The teacher as a transformers model in this process: backbone once, head in chunks over the wanted positions."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..loss.head import module_head
from ..teacher_cache.codecs import SampledLayout, select_support
from ..teacher_cache.topk import TeacherTopK
from .engine import (
    GenerationOptions,
    RowTooLongError,
    ScoreRequest,
    TeacherDescription,
    TeacherUnavailableError,
    TokenRow,
    length_sorted_batches,
)
from .processes import process_state
from .shards import file_sha256


_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".py")
# Tile of fp32 logits that one chunk may take: large enough for full GEMM speed, small beside any teacher.
_TILE_BYTES = {"cpu": 96 * 2**20, "cuda": 512 * 2**20}
# Rows of the tile that the passes after the product take at a time: on a CPU, what its caches hold.
_REDUCED_ROWS = {"cpu": 64}
# Columns of the tables whose sums are the fingerprint of a tensor.
_TABLE_COLUMNS = 4096
# Columns of a block in the top-k search; see `chunk_topk`.
_BLOCK = 32


class TransformersTeacher:
    """Scores rows with a causal language model of transformers.

    Args:
        model (`str`, `PreTrainedModel` or PEFT model):
            Model id, path, or a model already in memory. A model in memory is switched to eval mode while it works;
            its modes and `requires_grad` flags are restored by `close`.
        batch_tokens (`int`, *optional*, defaults to `8192`):
            Padded tokens of one forward pass.
        chunk_size (`int`, *optional*):
            Positions of one pass over the head. Default: as many as fit a 96 MiB (CPU) or 512 MiB (GPU) fp32 tile.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Fills short rows on the right; masked, so that any id gives the same signal.
        model_init_kwargs (`dict`, *optional*):
            Passed to `from_pretrained` (`dtype`, `device_map`, `quantization_config`, `attn_implementation`,
            `revision`, ...). Without a `device_map` the model goes to this process's device.
    """

    full_distribution = True
    max_top_k = None

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        batch_tokens: int = 8192,
        chunk_size: int | None = None,
        pad_token_id: int = 0,
        model_init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (("batch_tokens", batch_tokens), ("chunk_size", chunk_size)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1.")
        if model_init_kwargs and not isinstance(model, str):
            raise ValueError(
                f"`model_init_kwargs` is {model_init_kwargs} but the teacher is already a model in memory; give its "
                "id or path to load it with these options, or leave them out."
            )
        self.batch_tokens = batch_tokens
        self.chunk_size = chunk_size
        self.pad_token_id = pad_token_id
        self.model_init_kwargs = dict(model_init_kwargs or {})
        self.model = None if isinstance(model, str) else model
        self.model_id = model if isinstance(model, str) else None
        self._head: Callable[[Tensor], Tensor] | None = None
        self._restore: list[Callable[[], None]] = []
        if self.model is not None:
            _refuse_prompt_learning(self.model)
            self.config = self.model.config
        else:
            names = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "gguf_file")
            options = {name: self.model_init_kwargs[name] for name in names if name in self.model_init_kwargs}
            self.config = AutoConfig.from_pretrained(self.model_id, **options)
        self.max_length = _max_length(self.config)

    @property
    def head_rows(self) -> int:
        """Rows of the head, which may be more than the tokenizer has tokens."""
        embedding = None if self.model is None else self.model.get_output_embeddings()
        rows = self.config.get_text_config().vocab_size
        return rows if embedding is None or not hasattr(embedding, "out_features") else embedding.out_features

    def describe(self) -> TeacherDescription:
        if self.model is not None:
            return TeacherDescription(
                teacher=_model_name(self.config),
                revision=getattr(self.config, "_commit_hash", None),
                fingerprint=_parameter_fingerprint(self.model),
                engine=f"transformers {transformers.__version__}",
                dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
                attn_implementation=getattr(self.config, "_attn_implementation", None),
            )
        path = Path(self.model_id)
        dtype = self.model_init_kwargs.get("dtype") or getattr(self.config, "dtype", None) or "auto"
        options = {
            name: str(value)
            for name, value in sorted(self.model_init_kwargs.items())
            if name in ("quantization_config", "load_in_4bit", "load_in_8bit", "subfolder", "gguf_file")
        }
        return TeacherDescription(
            # The folder's name, not its place: a cache moves between machines, and so do its settings.
            teacher=path.resolve().name if path.is_dir() else self.model_id,
            revision=None if path.is_dir() else getattr(self.config, "_commit_hash", None),
            fingerprint=(
                _folder_fingerprint(path / self.model_init_kwargs.get("subfolder", ""))
                if path.is_dir()
                else getattr(self.config, "_commit_hash", None)
            ),
            engine=f"transformers {transformers.__version__}",
            dtype=str(dtype).removeprefix("torch."),
            attn_implementation=self.model_init_kwargs.get("attn_implementation"),
            options=options,
        )

    def load(self) -> None:
        if self.model is None:
            options = dict(self.model_init_kwargs)
            options.setdefault("dtype", "auto")
            self.model = AutoModelForCausalLM.from_pretrained(self.model_id, **options)
            if getattr(self.model, "hf_device_map", None) is None and not getattr(self.model, "is_quantized", False):
                self.model.to(process_state().device)
            self._restore.append(self._unload)
        modes = [(module, module.training) for module in self.model.modules() if module.training]
        flags = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._restore.append(lambda: _restore_modes(modes, flags))
        self.model.eval()
        for parameter in flags:
            parameter.requires_grad_(False)
        self._causal_lm = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        broken = next((name for name, value in self.model.named_parameters() if _has_nan(value)), None)
        if broken is not None:
            raise ValueError(f"The teacher's parameter {broken!r} holds NaN or infinity; load intact weights.")
        with torch.no_grad():
            self._head = module_head(self._causal_lm)

    def close(self) -> None:
        while self._restore:
            self._restore.pop()()
        self._head = None

    def _unload(self) -> None:
        self.model = None

    def score(self, rows: Sequence[TokenRow], request: ScoreRequest) -> Iterator[tuple[int, TeacherTopK]]:
        for batch in length_sorted_batches([len(row.input_ids) for row in rows], self.batch_tokens):
            try:
                yield from zip(batch, self._score_batch([rows[index] for index in batch], request), strict=True)
            except torch.OutOfMemoryError as error:
                first = rows[batch[0]]
                message = (
                    f"The teacher ran out of memory on a batch of {len(batch)} row(s) of up to {len(first.input_ids)} "
                    f"tokens (first: row {first.source_row}). Lower `batch_tokens` (now {self.batch_tokens})"
                )
                if len(batch) == 1:
                    raise RowTooLongError(f"{message}, or lower `max_length`.", first.source_row) from error
                raise TeacherUnavailableError(
                    f"{message} and run the build again: finished shards are kept."
                ) from error

    @torch.no_grad()
    def _score_batch(self, rows: Sequence[TokenRow], request: ScoreRequest) -> list[TeacherTopK]:
        device = self._input_device()
        longest = max(len(row.input_ids) for row in rows)
        input_ids = torch.full((len(rows), longest), self.pad_token_id)
        attention_mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for index, row in enumerate(rows):
            ids = torch.as_tensor(row.input_ids)
            input_ids[index, : len(ids)] = ids
            attention_mask[index, : len(ids)] = 1
        # Right padding leaves every position the context it has alone, for absolute, rotary and recurrent models.
        hidden = self._causal_lm.base_model(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False
        ).last_hidden_state
        counts = [len(row.positions) for row in rows]
        where = torch.cat([torch.as_tensor(row.positions, dtype=torch.long) for row in rows])
        batch_index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        hidden = hidden[batch_index.to(hidden.device), where.to(hidden.device)]  # [N, H]
        keys = (
            torch.repeat_interleave(torch.tensor([row.source_row for row in rows]), torch.tensor(counts)) << 32 | where
        )
        signal = self._score_hidden(hidden, request, keys)
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [signal[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _score_hidden(self, hidden: Tensor, request: ScoreRequest, row_keys: Tensor) -> TeacherTopK:
        """`hidden` `[N, H]` -> the signal of N positions, on CPU."""
        if not len(hidden):
            return _empty_signal(request)
        size = self.chunk_size or self._default_chunk_size(hidden.device.type)
        parts = []
        for start in range(0, len(hidden), size):
            # [n, V] exists for one chunk only.
            logits = self._head(hidden[start : start + size])
            vocab_size = logits.shape[-1] if request.token_mask_size is None else request.token_mask_size
            # Head rows that are no tokens are cut before normalising: the teacher's distribution is over the ids its
            # tokenizer has.
            logits = logits[:, :vocab_size].float()
            if request.missing_ids:
                logits[:, list(request.missing_ids)] = -torch.inf
            if isinstance(request.layout, SampledLayout):
                part = select_support(
                    torch.log_softmax(logits, -1),
                    layout=request.layout,
                    top_k=request.top_k,
                    tail_temperatures=request.tail_temperatures,
                    seed=request.seed,
                    row_keys=row_keys[start : start + size].to(logits.device),
                )
            else:
                rows = _REDUCED_ROWS.get(logits.device.type, len(logits))
                few = [chunk_topk(part, request.top_k, request.tail_temperatures) for part in logits.split(rows)]
                part = TeacherTopK.cat(few)
            parts.append(part.to("cpu"))
        return TeacherTopK.cat(parts)

    def _default_chunk_size(self, device_type: str) -> int:
        vocab_size = self.config.get_text_config().vocab_size
        return max(1, _TILE_BYTES.get(device_type, _TILE_BYTES["cuda"]) // (4 * vocab_size))

    def _input_device(self) -> torch.device:
        return self._causal_lm.get_input_embeddings().weight.device

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], source_rows: Sequence[int], options: GenerationOptions
    ) -> list[list[int]]:
        completions: list[list[int]] = [[] for _ in prompts]
        lengths = [len(prompt) + options.max_new_tokens for prompt in prompts]
        for length, row in zip(lengths, source_rows, strict=True):
            if self.max_length is not None and length > self.max_length:
                raise RowTooLongError(
                    f"Row {row}: {length - options.max_new_tokens} prompt tokens and max_new_tokens="
                    f"{options.max_new_tokens} exceed the teacher's {self.max_length} tokens; lower `max_new_tokens`.",
                    row,
                )
        device = self._input_device()
        for batch in length_sorted_batches(lengths, self.batch_tokens):
            longest = max(len(prompts[index]) for index in batch)
            input_ids = torch.full((len(batch), longest), self.pad_token_id)
            attention_mask = torch.zeros_like(input_ids)
            for place, index in enumerate(batch):
                ids = torch.as_tensor(prompts[index])
                input_ids[place, longest - len(ids) :] = ids
                attention_mask[place, longest - len(ids) :] = 1
            sampling = (
                {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
                if options.temperature > 0
                else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            )
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(options.seed * 1_000_003 + source_rows[batch[0]])
                output = self.model.generate(
                    input_ids=input_ids.to(device),
                    attention_mask=attention_mask.to(device),
                    max_new_tokens=options.max_new_tokens,
                    pad_token_id=self.pad_token_id,
                    **sampling,
                )
            ends = self.model.generation_config.eos_token_id
            ends = set(ends if isinstance(ends, list) else [ends])
            for place, index in enumerate(batch):
                completions[index] = cut_after_end(output[place, longest:].tolist(), ends)
        return completions


def chunk_topk(logits: Tensor, top_k: int, tail_temperatures: Sequence[float] = ()) -> TeacherTopK:
    """Top-K of one chunk of logits and the tail's own log-sums; overwrites `logits`.

    The K largest values lie in the K blocks with the largest maxima, so the search runs over K blocks instead of V
    columns. `log_tail` is reduced from the logits with the support taken out, never by subtraction.

    Args:
        logits (`Tensor`, `[n, V]`, fp32): logits; `-inf` for ids that must not be emitted.

    Returns:
        `TeacherTopK` of `[n, min(K, V)]`, descending.
    """
    rows, vocab_size = logits.shape
    top_k = min(top_k, vocab_size)
    blocks = vocab_size // _BLOCK
    if top_k < blocks // 2:
        whole = logits[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK)
        block_ids = whole.amax(-1).topk(top_k, sorted=False).indices  # [n, K]
        candidates = whole.gather(1, block_ids[..., None].expand(-1, -1, _BLOCK)).flatten(1)
        rest = logits[:, blocks * _BLOCK :]
        values, places = torch.cat([candidates, rest], 1).topk(top_k)
        in_block = places < candidates.shape[1]
        block_of_place = block_ids.gather(1, (places // _BLOCK).clamp(max=top_k - 1))
        token_ids = torch.where(
            in_block,
            block_of_place * _BLOCK + places % _BLOCK,
            places - candidates.shape[1] + blocks * _BLOCK,
        )
    else:
        values, token_ids = logits.topk(top_k)
    logits.scatter_(-1, token_ids, -torch.inf)
    # The least likely of the support bounds the tail from above, so its sums need no maximum of their own and are
    # formed in place: a third of the time of `logsumexp`.
    bound = values[:, -1:]
    bound = torch.where(bound.isinf(), 0, bound)
    logits.sub_(bound)
    sums_at = [(logits / temperature).exp_().sum(-1).log() for temperature in tail_temperatures]
    log_tail = bound[:, 0] + logits.exp_().sum(-1).log()
    log_normalizer = torch.logaddexp(log_tail, torch.logsumexp(values, -1))
    log_tail_at = [
        (bound[:, 0] - log_normalizer) / temperature + sums
        for temperature, sums in zip(tail_temperatures, sums_at, strict=True)
    ]
    return TeacherTopK(
        token_ids=token_ids.to(torch.int32),
        logprobs=values - log_normalizer[:, None],
        log_tail=log_tail - log_normalizer,
        log_tail_at=torch.stack(log_tail_at, -1) if log_tail_at else None,
        tail_temperatures=tuple(tail_temperatures),
        vocab_size=vocab_size,
    )


def cut_after_end(token_ids: list[int], end_ids: set[int | None]) -> list[int]:
    """Token ids up to and with the first end-of-sequence token."""
    for place, token_id in enumerate(token_ids):
        if token_id in end_ids:
            return token_ids[: place + 1]
    return token_ids


def _empty_signal(request: ScoreRequest) -> TeacherTopK:
    columns = len(request.tail_temperatures)
    return TeacherTopK(
        token_ids=torch.zeros((0, request.top_k), dtype=torch.int32),
        logprobs=torch.zeros((0, request.top_k)),
        log_tail=torch.zeros(0),
        log_tail_at=torch.zeros((0, columns)) if columns else None,
        tail_temperatures=request.tail_temperatures,
        vocab_size=request.token_mask_size,
    )


def _has_nan(parameter: Tensor) -> bool:
    if parameter.device.type == "meta" or not parameter.is_floating_point():
        return False
    # The sum of one NaN or infinity is one; a finite tensor that overflows its sum is looked at again.
    return not bool(torch.isfinite(parameter.sum())) and not bool(torch.isfinite(parameter).all())


def _restore_modes(modes: list[tuple[torch.nn.Module, bool]], flags: list[torch.nn.Parameter]) -> None:
    for module, training in modes:
        module.training = training
    for parameter in flags:
        parameter.requires_grad_(True)


def _refuse_prompt_learning(model: Any) -> None:
    config = getattr(model, "active_peft_config", None)
    if config is not None and getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"The teacher carries a {type(config).__name__}, which adds virtual tokens to every row; merge it or "
            "score with a LoRA or full model."
        )


def _max_length(config: Any) -> int | None:
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length and length > 0 else None


def _model_name(config: Any) -> str:
    name = getattr(config, "_name_or_path", None)
    if not name:
        return type(config).__name__.removesuffix("Config")
    return Path(name).resolve().name if Path(name).is_dir() else name


def _parameter_fingerprint(model: torch.nn.Module) -> str:
    """Changes when any parameter or buffer changes.

    The bits of a tensor, as a table of int32, are reduced to exact sums of its rows and of its columns where the
    tensor lies: one changed, moved or swapped entry changes one of them, at the speed of memory.
    """
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type == "meta":
            continue
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        whole = len(data) // (4 * _TABLE_COLUMNS) * 4 * _TABLE_COLUMNS
        table = data[:whole].view(torch.int32).view(-1, _TABLE_COLUMNS)
        for part in (table.sum(0), table.sum(1), data[whole:]):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


def _folder_fingerprint(path: Path) -> str:
    """Hash of the files a model is loaded from."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix in _WEIGHT_SUFFIXES and not file.name.startswith("."):
            digest.update(f"{file.name} {file_sha256(file)}".encode())
    return digest.hexdigest()
