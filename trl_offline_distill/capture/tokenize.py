"""Turns a text dataset into `input_ids` and `labels`, once, exactly as [`~trl.SFTTrainer`] would.

The work is done by SFTTrainer's own preparation (see `_compat.prepare_sft_dataset`), so a template, a mask or a
truncation rule that changes in TRL changes here too. This file adds what a cache needs and a trainer does not: checks
that name the row, the source row of every output row, a pinned date, and counts of what was dropped.
"""

import datetime
import json
import logging
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)
from trl.data_utils import is_conversational, is_conversational_from_value

from .._compat import prepare_sft_dataset, tokenize_like_sft
from .processes import process_state


logger = logging.getLogger(__name__)

SOURCE_ROW = "__source_row__"
_PROMPT_KEPT = "__prompt_kept__"
_VISION_COLUMNS = ("image", "images")
_PREFERENCE_COLUMNS = ("chosen", "rejected")
_TOKEN_COLUMNS = ("input_ids", "labels", "completion_mask", "assistant_masks")
# `strftime_now("%d %b %Y")` as chat templates write it (Llama 3, gpt-oss, Muse).
_TEMPLATE_DATE = re.compile(r"strftime_now\(\s*([\"'])(?P<format>[^\"']*)\1\s*\)")


@dataclass
class TokenizedDataset:
    """A tokenised dataset and what happened on the way.

    Attributes:
        dataset: columns `input_ids`, `labels` (absent for prompts only) and `__source_row__`, in source order.
        tokenizer: the tokenizer, a copy of the caller's.
        chat_template: the template that rendered the conversations, with the date pinned, or `None`.
        template_date: ISO date printed by the template, or `None` where it prints none.
        prompts_only: rows are prompts that still need a completion.
        source_rows: rows of the source dataset.
        dropped_rows: source rows that truncation left without a trained token; dropped, as SFTTrainer drops them.
        prompt_not_prefix_rows: source rows whose prompt alone renders differently than inside prompt + completion, so
            that the student will meet another context at inference than the one it learns from.
    """

    dataset: Dataset
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None
    template_date: str | None
    prompts_only: bool
    source_rows: int
    dropped_rows: list[int] = field(default_factory=list)
    prompt_not_prefix_rows: list[int] = field(default_factory=list)


def tokenize_dataset(
    dataset: Dataset | IterableDataset,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    dataset_text_field: str = "text",
    formatting_func: Callable[[dict], str] | None = None,
    eos_token: str | None = None,
    chat_template_path: str | None = None,
    template_date: str | None = None,
    num_proc: int | None = None,
) -> TokenizedDataset:
    """Tokenises every dataset type SFTTrainer takes, with the meaning its arguments have in [`~trl.SFTConfig`].

    Args:
        dataset: text, messages, conversations, prompt/completion, conversational prompt/completion, already tokenised
            (`input_ids` with or without `labels` or masks), or prompts only (`prompt` without `completion`).
        processing_class: tokenizer, or processor whose tokenizer is used. It is copied, never changed.
        max_length: longest row in tokens; `None` truncates nothing. Prompts only: longer prompts are refused.
        truncation_mode: `"keep_start"` or `"keep_end"`.
        completion_only_loss: `None` trains the completion of prompt/completion rows and everything elsewhere.
        assistant_only_loss: train what lies between the template's generation markers.
        chat_template_path: a `.jinja` or `.j2` file used instead of the tokenizer's template.
        template_date: ISO date (`"2026-01-31"`) a template that prints today's date prints instead. Default: today.

    Raises:
        ValueError: for every input that would train something else than what was asked; names column, row and fix.
    """
    dataset = _as_dataset(dataset)
    _check_columns(dataset, dataset_text_field, formatting_func)
    if truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(f"`truncation_mode` is {truncation_mode!r}; choose 'keep_start' or 'keep_end'.")
    if max_length is not None and max_length < 2:
        raise ValueError(f"`max_length` is {max_length}; a row needs at least 2 tokens: one to see, one to predict.")

    processing_class = deepcopy(processing_class)
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"`processing_class` is a {type(processing_class).__name__}; pass a tokenizer or a processor with one."
        )
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(
                f"`eos_token` {eos_token!r} is not in the tokenizer's vocabulary; add it or choose another."
            )
        tokenizer.eos_token = eos_token
    if chat_template_path is not None:
        path = Path(chat_template_path)
        if path.suffix not in (".jinja", ".j2") or not path.is_file():
            raise ValueError(f"`chat_template_path` {chat_template_path!r} is not a .jinja or .j2 file on disk.")
        processing_class.chat_template = path.read_text(encoding="utf-8")

    first = _first_row(dataset)
    conversational = _is_conversational(first)
    if conversational and processing_class.chat_template is None:
        raise ValueError(
            "The dataset is conversational but the tokenizer has no chat template; set `tokenizer.chat_template`, "
            "pass `chat_template_path`, or render the conversations to a text column first."
        )
    chat_template = None
    if assistant_only_loss:
        chat_template = _assistant_template(processing_class, conversational)
    template_date = _pin_template_date(processing_class, chat_template, conversational, template_date)
    if chat_template is not None and template_date is not None:
        chat_template = _with_date(chat_template, datetime.date.fromisoformat(template_date))
    if assistant_only_loss and not is_chat_template_stop_token_trained(processing_class, chat_template=chat_template):
        logger.warning(
            "The chat template leaves the assistant's end-of-turn token out of the trained span; a student trained on "
            "this cache may not learn to stop. Move the token inside {%% generation %%}...{%% endgeneration %%}."
        )
    used_template = (chat_template or processing_class.chat_template) if conversational else None

    # Needed before TRL logs or lets the main process fill the cache first.
    process_state()
    dataset = dataset.add_column(SOURCE_ROW, np.arange(len(dataset), dtype=np.int64))
    result = TokenizedDataset(
        dataset=dataset,
        tokenizer=tokenizer,
        chat_template=used_template,
        template_date=template_date,
        prompts_only=_is_prompts_only(dataset.column_names) and formatting_func is None,
        source_rows=len(dataset),
    )
    if result.prompts_only:
        result.dataset = _tokenize_prompts(dataset, processing_class, chat_template, max_length, num_proc)
        return result

    if completion_only_loss is None:
        completion_only_loss = "prompt" in first and "completion" in first
    if completion_only_loss and formatting_func is not None:
        raise ValueError(
            "`formatting_func` turns rows into plain text, so `completion_only_loss=True` has no completion to train; "
            "drop one of them."
        )
    if "completion_mask" in dataset.column_names and "labels" not in dataset.column_names and not completion_only_loss:
        logger.warning(
            "The dataset has a `completion_mask` column, which SFTTrainer applies only with "
            "`completion_only_loss=True`; every token will be trained."
        )

    def prepare(data, max_length):
        return prepare_sft_dataset(
            data,
            processing_class,
            chat_template=chat_template,
            completion_only_loss=completion_only_loss,
            assistant_only_loss=assistant_only_loss,
            dataset_text_field=dataset_text_field,
            max_length=max_length,
            truncation_mode=truncation_mode,
            num_proc=num_proc,
            formatting_func=formatting_func,
        )

    # Two calls of the same preparation: the prompt check needs the rows before truncation, and a dataset that is
    # already tokenised goes straight to it.
    try:
        prepared = prepare(dataset, None)
    except RuntimeError as error:
        # Raised by TRL for a row whose assistant mask is empty, without its number.
        row = _first_row_without_assistant(dataset) if assistant_only_loss else None
        if row is None:
            raise
        raise ValueError(
            f"`assistant_only_loss=True`, but `dataset` row {row} has no assistant turn, so nothing of it is trained; "
            "remove the row."
        ) from error
    if "prompt" in prepared.column_names and "input_ids" not in dataset.column_names:
        prepared = prepared.map(
            _prompt_is_kept,
            fn_kwargs={"processing_class": processing_class, "chat_template": chat_template},
            num_proc=num_proc,
            desc="Comparing prompts",
        )
        rows = np.asarray(prepared.with_format("numpy")[SOURCE_ROW])
        kept = np.asarray(prepared.with_format("numpy")[_PROMPT_KEPT])
        result.prompt_not_prefix_rows = rows[~kept].tolist()
    prepared = prepared.select_columns([SOURCE_ROW, "input_ids", "labels"])
    _check_token_columns(prepared)
    if max_length is not None:
        before = np.asarray(prepared.with_format("numpy")[SOURCE_ROW])
        prepared = prepare(prepared, max_length)
        kept_rows = np.asarray(prepared.with_format("numpy")[SOURCE_ROW]) if len(prepared) else np.empty(0, np.int64)
        result.dropped_rows = np.setdiff1d(before, kept_rows).tolist()
    result.dataset = prepared
    return result


def _as_dataset(dataset: Any) -> Dataset:
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        raise ValueError(
            f"`dataset` holds the splits {sorted(dataset)}; pass one of them, for example "
            f"dataset[{sorted(dataset)[0]!r}]."
        )
    if isinstance(dataset, IterableDataset):
        stream = dataset
        # A cache is built from known lengths, so a stream is written to disk once (as Arrow, not held in memory).
        dataset = Dataset.from_generator(lambda: (dict(row) for row in stream), features=stream.features)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` is a {type(dataset).__name__}; pass a datasets.Dataset or IterableDataset.")
    if len(dataset) == 0:
        raise ValueError("`dataset` has no rows; nothing to build.")
    if dataset.format["type"] == "custom":
        raise ValueError(
            "`dataset` uses `with_transform()`, which may give other rows on each read; materialise it with "
            "`dataset.map()` first."
        )
    return dataset.with_format(None)


def _is_prompts_only(columns: list[str]) -> bool:
    return "prompt" in columns and "completion" not in columns and "input_ids" not in columns


def _check_columns(dataset: Dataset, text_field: str, formatting_func: Callable | None) -> None:
    columns = dataset.column_names
    for column in _VISION_COLUMNS:
        if column in columns:
            raise ValueError(
                f"`dataset` has the vision column {column!r}; only text is cached. Remove the column to train on the "
                "text."
            )
    if SOURCE_ROW in columns or _PROMPT_KEPT in columns:
        raise ValueError(
            f"`dataset` has a column named {SOURCE_ROW!r} or {_PROMPT_KEPT!r}, which the builder uses itself."
        )
    if "input_ids" in columns:
        _check_nulls(dataset, [column for column in _TOKEN_COLUMNS if column in columns])
        return
    if formatting_func is not None:
        return
    if (
        "prompt" in columns
        and "completion" not in columns
        and ({"messages", "conversations", text_field} & set(columns))
    ):
        raise ValueError(
            "`dataset` has a 'prompt' column, no 'completion' column, and another text column beside it: "
            f"{columns}. Remove 'prompt' to train on the text, or the others to let the teacher write completions."
        )
    used = next(
        (
            group
            for group in (("prompt", "completion"), ("prompt",), ("messages",), ("conversations",), (text_field,))
            if all(column in columns for column in group)
        ),
        None,
    )
    if used is None:
        hint = (
            " Preference data: rename 'chosen' to 'completion' and drop 'rejected'."
            if all(column in columns for column in _PREFERENCE_COLUMNS)
            else ""
        )
        raise ValueError(
            f"`dataset` has the columns {columns}; expected 'input_ids', 'messages', 'conversations', 'prompt' and "
            f"'completion', 'prompt', or the text column {text_field!r} (`dataset_text_field`)." + hint
        )
    _check_nulls(dataset, list(used))


def _check_nulls(dataset: Dataset, columns: list[str]) -> None:
    """Refuses missing values and empty lists, which fail deep inside tokenisation without naming a row."""
    start = 0
    for batch in dataset.select_columns(columns).with_format("arrow").iter(batch_size=10_000):
        for column in columns:
            values = batch[column].combine_chunks()
            bad = pc.is_null(values)
            if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
                bad = pc.or_(bad, pc.fill_null(pc.equal(pc.list_value_length(values), 0), True))
            index = pc.index(bad, True).as_py()
            if index >= 0:
                raise ValueError(f"`dataset` row {start + index}: column {column!r} is empty; remove or fill the row.")
        start += len(batch)


def _first_row(dataset: Dataset) -> dict[str, Any]:
    return next(iter(dataset))


def _is_conversational(row: dict[str, Any]) -> bool:
    if "input_ids" in row:
        return False
    return is_conversational(row) or is_conversational_from_value(row)


def _assistant_template(processing_class: Any, conversational: bool) -> str | None:
    if not conversational:
        raise ValueError(
            "`assistant_only_loss=True` needs a conversational dataset ('messages', or 'prompt' and 'completion' as "
            "messages); this one is not."
        )
    if has_generation_markers(processing_class.chat_template):
        return None
    try:
        return get_training_chat_template(processing_class)
    except ValueError as error:
        raise ValueError(
            "`assistant_only_loss=True`, but the chat template has no {% generation %} markers and TRL knows no "
            "training version of it. Put {% generation %}...{% endgeneration %} around the assistant's turn in the "
            "template (with its end-of-turn token inside) and pass it as `chat_template_path`, or use 'prompt' and "
            "'completion' columns."
        ) from error


def _first_row_without_assistant(dataset: Dataset) -> int | None:
    for number, row in enumerate(dataset):
        turns = row.get("messages") or row.get("conversations") or [*row.get("prompt", []), *row.get("completion", [])]
        if not any("assistant" in (turn.get("role"), turn.get("from")) for turn in turns):
            return number
    return None


def _templates(chat_template: str | dict[str, str] | None) -> list[str]:
    if chat_template is None:
        return []
    return list(chat_template.values()) if isinstance(chat_template, dict) else [chat_template]


def _with_date(template: str, date: datetime.date) -> str:
    return _TEMPLATE_DATE.sub(lambda match: f'"{date.strftime(match["format"])}"', template)


def _pin_template_date(
    processing_class: Any, training_template: str | None, conversational: bool, template_date: str | None
) -> str | None:
    """Freezes the date a template prints, so that a build resumed tomorrow gives the tokens of today."""
    if template_date is not None:
        try:
            date = datetime.date.fromisoformat(template_date)
        except ValueError as error:
            raise ValueError(f"`template_date` {template_date!r} is not an ISO date such as '2026-01-31'.") from error
    else:
        date = datetime.date.today()
    template = processing_class.chat_template
    if not conversational or not any(
        _TEMPLATE_DATE.search(text) for text in (*_templates(template), *_templates(training_template))
    ):
        return None
    if isinstance(template, dict):
        processing_class.chat_template = {name: _with_date(text, date) for name, text in template.items()}
    else:
        processing_class.chat_template = _with_date(template, date)
    return date.isoformat()


def _chat_kwargs(example: dict[str, Any], chat_template: str | None) -> dict[str, Any]:
    tools = example.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"chat_template": chat_template, "tools": tools, **(example.get("chat_template_kwargs") or {})}


def _prompt_is_kept(example: dict[str, Any], processing_class: Any, chat_template: str | None) -> dict[str, bool]:
    kwargs = {"chat_template": chat_template}
    if is_conversational(example):
        kwargs = {"add_generation_prompt": True, **_chat_kwargs(example, chat_template)}
    prompt_ids = tokenize_like_sft(processing_class, example["prompt"], **kwargs)["input_ids"]
    return {_PROMPT_KEPT: list(example["input_ids"][: len(prompt_ids)]) == list(prompt_ids)}


def _tokenize_prompts(
    dataset: Dataset, processing_class: Any, chat_template: str | None, max_length: int | None, num_proc: int | None
) -> Dataset:
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class

    def tokenize(example: dict[str, Any], source_row: int) -> dict[str, list[int]]:
        prompt = example["prompt"]
        if isinstance(prompt, list):
            # A prompt that ends in the assistant's words is continued, any other starts a new assistant turn.
            opens_turn = prompt[-1]["role"] != "assistant"
            kwargs = {
                "add_generation_prompt": opens_turn,
                "continue_final_message": not opens_turn,
                **_chat_kwargs(example, chat_template),
            }
            ids = tokenize_like_sft(processing_class, prompt, **kwargs)["input_ids"]
        else:
            ids = tokenize_like_sft(processing_class, prompt)["input_ids"]
            # A tokenizer that ends every text would ask the teacher to continue a finished one.
            if ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
                ids = ids[:-1]
        if not ids:
            raise ValueError(f"`dataset` row {source_row}: the prompt has no tokens; remove the row.")
        if max_length is not None and len(ids) >= max_length:
            raise ValueError(
                f"`dataset` row {source_row}: the prompt alone has {len(ids)} tokens and `max_length` is "
                f"{max_length}; a completion needs room. Shorten or remove the row, or raise `max_length`."
            )
        return {"input_ids": ids}

    columns = [column for column in dataset.column_names if column != SOURCE_ROW]
    return dataset.map(tokenize, with_indices=True, remove_columns=columns, num_proc=num_proc, desc="Tokenizing")


def _check_token_columns(dataset: Dataset) -> None:
    """Holds the contract of `input_ids` and `labels` that everything after this file relies on."""
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        source_rows = batch[SOURCE_ROW].to_pylist()
        input_ids, labels = (batch[column].combine_chunks() for column in ("input_ids", "labels"))
        lengths = pc.list_value_length(input_ids)
        _refuse(source_rows, pc.equal(lengths, 0), "has no tokens; remove the row")
        _refuse(
            source_rows,
            pc.not_equal(lengths, pc.list_value_length(labels)),
            "has `labels` and `input_ids` of different lengths; give one label for each token",
        )
        ids, wanted = (pc.list_flatten(column).to_numpy(zero_copy_only=False) for column in (input_ids, labels))
        parents = pc.list_parent_indices(input_ids).to_numpy()
        wrong = (wanted != -100) & (wanted != ids)
        if wrong.any():
            raise ValueError(
                f"`dataset` row {source_rows[parents[wrong.argmax()]]} has labels that are neither -100 nor the token "
                "at the same place (labels already shifted?). Labels must be unshifted: the trainer shifts them."
            )


def _refuse(source_rows: list[int], bad: pa.Array, reason: str) -> None:
    index = pc.index(bad, True).as_py()
    if index >= 0:
        raise ValueError(f"`dataset` row {source_rows[index]} {reason}.")
