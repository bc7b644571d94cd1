"""Tokens and labels equal those of a real SFTTrainer, and bad input is refused by name."""

import datetime
from pathlib import Path

import pytest
import trl
from datasets import Dataset, IterableDataset
from tiny_teachers import CHAT_TEMPLATE, MARKED_TEMPLATE, make_teacher, make_tokenizer
from trl import SFTConfig, SFTTrainer

from trl_offline_distill.capture.tokenize import SOURCE_ROW, tokenize_dataset


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEXT = [{"text": "hello world the sky is blue"}, {"text": "why"}, {"text": "the sun is far away <eos>"}]
TURNS = [
    [
        {"role": "user", "content": "what colour is the sky"},
        {"role": "assistant", "content": "blue"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "the sun is far away"},
    ],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello world"}],
]
MESSAGES = [{"messages": turns} for turns in TURNS]
CONVERSATIONS = [
    {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in turns]} for turns in TURNS
]
PLAIN_PAIRS = [
    {"prompt": "the sky is", "completion": " blue and far away"},
    {"prompt": "hello wor", "completion": "ld"},
    {"prompt": "why is the sun so far away now tell me", "completion": " why"},
]
CHAT_PAIRS = [{"prompt": turns[:-1], "completion": turns[-1:]} for turns in TURNS]
TOOLS = [
    {
        "messages": TURNS[1],
        "tools": '[{"type": "function", "function": {"name": "look", "description": "look up"}}]',
    }
]
TOOL_TEMPLATE = "{% if tools %}{{ tools | length }} {{ tools[0]['function']['name'] }}{% endif %}" + CHAT_TEMPLATE
TOKENS = [{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [10, 11, 12]}]
LABELLED = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]}]
MASKED = [{"input_ids": [5, 6, 7, 8, 9], "completion_mask": [0, 0, 1, 1, 1]}]
ASSISTANT_MASKED = [{"input_ids": [5, 6, 7, 8, 9], "assistant_masks": [0, 1, 1, 0, 1]}]

CASES = {
    "text": (TEXT, {}, None),
    "text_short": (TEXT, {"max_length": 4}, None),
    "text_keep_end": (TEXT, {"max_length": 4, "truncation_mode": "keep_end"}, None),
    "other_field": ([{"body": row["text"]} for row in TEXT], {"dataset_text_field": "body"}, None),
    "eos": (TEXT, {"eos_token": "<|im_end|>"}, None),
    "messages": (MESSAGES, {}, None),
    "messages_short": (MESSAGES, {"max_length": 9}, None),
    "conversations": (CONVERSATIONS, {}, None),
    "assistant_only": (MESSAGES, {"assistant_only_loss": True}, MARKED_TEMPLATE),
    "assistant_only_pairs": (CHAT_PAIRS, {"assistant_only_loss": True}, MARKED_TEMPLATE),
    "plain_pairs": (PLAIN_PAIRS, {}, None),
    "plain_pairs_whole": (PLAIN_PAIRS, {"completion_only_loss": False}, None),
    "plain_pairs_short": (PLAIN_PAIRS, {"max_length": 6}, None),
    "plain_pairs_keep_end": (PLAIN_PAIRS, {"max_length": 3, "truncation_mode": "keep_end"}, None),
    "chat_pairs": (CHAT_PAIRS, {}, None),
    "tools": (TOOLS, {}, TOOL_TEMPLATE),
    "template_kwargs": (
        [{"messages": TURNS[1], "chat_template_kwargs": {"add_generation_prompt": True}}],
        {},
        None,
    ),
    "tokens": (TOKENS, {}, None),
    "tokens_short": (TOKENS, {"max_length": 2}, None),
    "labelled": (LABELLED, {}, None),
    "labelled_keep_end": (LABELLED, {"max_length": 4, "truncation_mode": "keep_end"}, None),
    "masked": (MASKED, {"completion_only_loss": True}, None),
    "masked_ignored": (MASKED, {}, None),
    "assistant_masked": (ASSISTANT_MASKED, {}, None),
}


def prepared_by_sft(rows, tokenizer, tmp_path, **options):
    options = {"max_length": None, **options}
    trainer = SFTTrainer(
        model=make_teacher(vocab_size=340),
        args=SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    return trainer.train_dataset


@pytest.mark.parametrize("name", CASES)
def test_equals_sft_trainer(name, tmp_path):
    rows, options, template = CASES[name]
    template = template or CHAT_TEMPLATE
    wanted = prepared_by_sft(rows, make_tokenizer(template), tmp_path, **options)
    found = tokenize_dataset(Dataset.from_list(rows), make_tokenizer(template), **options).dataset
    assert list(found["input_ids"]) == list(wanted["input_ids"])
    assert list(found["labels"]) == list(wanted["labels"])
    assert any(label != -100 for labels in found["labels"] for label in labels)


@pytest.mark.parametrize("template", ["qwen3", "llama3", "gptoss", "gemma3", "deepseekv3"])
def test_training_templates_known_to_trl_are_used(template, tmp_path):
    tokenizer = make_tokenizer((TEMPLATES / f"{template}.jinja").read_text(), bos_token="<eos>")
    options = {"assistant_only_loss": True}
    date = {"template_date": datetime.date.today().isoformat()}
    wanted = prepared_by_sft(MESSAGES, make_tokenizer(tokenizer.chat_template, bos_token="<eos>"), tmp_path, **options)
    found = tokenize_dataset(Dataset.from_list(MESSAGES), tokenizer, **options, **date).dataset
    assert list(found["input_ids"]) == list(wanted["input_ids"])
    assert list(found["labels"]) == list(wanted["labels"])


def test_conversations_train_what_messages_train():
    # SFTTrainer refuses `assistant_only_loss` here, because it looks for messages before it converts to them.
    messages, conversations = (
        tokenize_dataset(Dataset.from_list(rows), make_tokenizer(MARKED_TEMPLATE), assistant_only_loss=True).dataset
        for rows in (MESSAGES, CONVERSATIONS)
    )
    assert list(messages["labels"]) == list(conversations["labels"])


def test_streams_and_formats_are_taken():
    tokenizer = make_tokenizer()
    plain = tokenize_dataset(Dataset.from_list(TEXT), tokenizer).dataset
    stream = IterableDataset.from_generator(lambda: iter(TEXT))
    assert list(tokenize_dataset(stream, tokenizer).dataset["input_ids"]) == list(plain["input_ids"])
    formatted = Dataset.from_list(TOKENS).with_format("torch")
    assert list(tokenize_dataset(formatted, tokenizer).dataset["input_ids"]) == [row["input_ids"] for row in TOKENS]


def test_formatting_func():
    found = tokenize_dataset(
        Dataset.from_list([{"a": "hello", "b": "world"}]),
        make_tokenizer(),
        formatting_func=lambda row: row["a"] + row["b"],
    ).dataset
    assert list(found["input_ids"]) == list(
        tokenize_dataset(Dataset.from_list([{"text": "helloworld"}]), make_tokenizer()).dataset["input_ids"]
    )


def test_rows_keep_their_source_number_when_truncation_drops_some():
    # Row 2: the prompt alone fills the row, so nothing in it is trained.
    result = tokenize_dataset(Dataset.from_list(PLAIN_PAIRS[::-1]), make_tokenizer(), max_length=7)
    assert result.dropped_rows == [0]
    assert list(result.dataset[SOURCE_ROW]) == [1, 2]
    assert result.source_rows == 3


def test_rows_whose_prompt_is_no_prefix_are_counted():
    result = tokenize_dataset(Dataset.from_list(PLAIN_PAIRS), make_tokenizer())
    assert result.prompt_not_prefix_rows == [1]


def test_qwen3_think_blocks_are_reported_as_no_prefix():
    # Qwen3's generation prompt without thinking holds an empty think block that the conversation does not have.
    template = (TEMPLATES / "qwen3.jinja").read_text()
    rows = [{**CHAT_PAIRS[1], "chat_template_kwargs": {"enable_thinking": False}}, {**CHAT_PAIRS[1]}]
    rows[1]["chat_template_kwargs"] = {"enable_thinking": True}
    # A thought of the prompt's last turn, which is dropped once another turn follows it.
    thinking = [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "<think>\nthe sky\n</think>\n\nblue"},
    ]
    answer = [{"role": "user", "content": "now"}, {"role": "assistant", "content": "far"}]
    rows.append({"prompt": thinking, "completion": answer, "chat_template_kwargs": {"enable_thinking": True}})
    result = tokenize_dataset(Dataset.from_list(rows), make_tokenizer(template))
    assert result.prompt_not_prefix_rows == [2]
    by_row = {0, 1}
    tokenizer = make_tokenizer(template)
    for row in range(2):
        prompt = tokenizer.apply_chat_template(
            rows[row]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True,
            **rows[row]["chat_template_kwargs"],
        )["input_ids"]  # fmt: skip
        ids = result.dataset[row]["input_ids"]
        assert (ids[: len(prompt)] == prompt) == (row in by_row)


def test_the_date_of_a_template_is_pinned():
    template = "Today is {{ strftime_now('%d %b %Y') }}. " + CHAT_TEMPLATE
    tokenizer = make_tokenizer(template)
    result = tokenize_dataset(Dataset.from_list(MESSAGES), tokenizer, template_date="2031-02-03")
    assert result.template_date == "2031-02-03"
    assert tokenizer.decode(result.dataset[0]["input_ids"]).startswith("Today is 03 Feb 2031. ")
    assert tokenizer.chat_template == template  # the caller's tokenizer is left as it was
    today = tokenize_dataset(Dataset.from_list(MESSAGES), tokenizer)
    assert today.template_date == datetime.date.today().isoformat()
    assert tokenize_dataset(Dataset.from_list(MESSAGES), make_tokenizer()).template_date is None


GPT_OSS_SPECIAL = ("<|start|>", "<|end|>", "<|return|>", "<|message|>", "<|channel|>", "<|call|>")
GPT_OSS_CHATS = {
    "plain": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "blue"}],
    "thinking": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "blue", "thinking": "sky"}],
    "two_turns": [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "blue", "thinking": "sky"},
        {"role": "user", "content": "now"},
        {"role": "assistant", "content": "far", "thinking": "sun"},
    ],
}


@pytest.mark.parametrize("chat", GPT_OSS_CHATS)
def test_gpt_oss_trains_thinking_and_the_stop_token(chat):
    # Decision: thinking of the last turn is trained with its answer; the template drops the thinking of earlier turns,
    # so it is neither seen nor trained. The last turn ends in <|return|>, trained; earlier ones in <|end|>, trained.
    tokenizer = make_tokenizer((TEMPLATES / "gptoss.jinja").read_text(), special=GPT_OSS_SPECIAL)
    turns = GPT_OSS_CHATS[chat]
    result = tokenize_dataset(Dataset.from_list([{"messages": turns}]), tokenizer, assistant_only_loss=True)
    row = result.dataset[0]
    trained = tokenizer.decode([label for label in row["labels"] if label != -100])
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    assert row["labels"][-1] == tokenizer.convert_tokens_to_ids("<|return|>")
    assert answers[-1]["content"] in trained
    assert all(turn["content"] not in trained for turn in turns if turn["role"] == "user")
    if "thinking" in answers[-1]:
        assert answers[-1]["thinking"] in trained
    if len(answers) > 1:
        assert "sky" not in tokenizer.decode(row["input_ids"])
        assert trained.count("<|end|>") >= 2


def test_gpt_oss_refuses_raw_channel_tags():
    tokenizer = make_tokenizer((TEMPLATES / "gptoss.jinja").read_text(), special=GPT_OSS_SPECIAL)
    turns = [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "<|channel|>analysis<|message|>sky<|end|>blue"},
    ]
    with pytest.raises(Exception, match="channel"):
        tokenize_dataset(Dataset.from_list([{"messages": turns}]), tokenizer)


def test_tool_results_are_not_trained_and_the_stop_token_is():
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    turns = [
        {"role": "user", "content": "what colour"},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "the sky is far"},
        {"role": "assistant", "content": "blue"},
    ]
    row = tokenize_dataset(Dataset.from_list([{"messages": turns}]), tokenizer, assistant_only_loss=True).dataset[0]
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "look<|im_end|>blue<|im_end|>"


def test_a_template_that_leaves_the_stop_token_out_is_reported(caplog):
    template = MARKED_TEMPLATE.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenize_dataset(Dataset.from_list(MESSAGES), make_tokenizer(template), assistant_only_loss=True)
    assert "end-of-turn" in caplog.text


BAD = {
    "no_rows": ([], {}, "no rows"),
    "no_text": ([{"body": "hello"}], {}, r"columns \['body'\].*'text'"),
    "vision": ([{"text": "hello", "images": ["x"]}], {}, "vision column 'images'"),
    "preference": ([{"chosen": "a", "rejected": "b"}], {}, "Preference data"),
    "none": ([{"text": "hello"}, {"text": None}], {}, "row 1: column 'text' is empty"),
    "empty_messages": ([{"messages": TURNS[0]}, {"messages": []}], {}, "row 1: column 'messages' is empty"),
    "no_tokens": ([{"input_ids": [1, 2]}, {"input_ids": []}], {}, "row 1: column 'input_ids' is empty"),
    "lengths": ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], {}, "row 0 has `labels` and `input_ids` of different"),
    "shifted": ([{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}], {}, "already shifted"),
    "max_length": (TEXT, {"max_length": 1}, "`max_length` is 1"),
    "mode": (TEXT, {"truncation_mode": "middle"}, "'middle'"),
    "eos": (TEXT, {"eos_token": "<nothing>"}, "'<nothing>'"),
    "template_path": (TEXT, {"chat_template_path": "nowhere.txt"}, "'nowhere.txt'"),
    "date": (TEXT, {"template_date": "tomorrow"}, "'tomorrow'"),
    "assistant_text": (TEXT, {"assistant_only_loss": True}, "conversational"),
    "assistant_unmarked": (MESSAGES, {"assistant_only_loss": True}, "generation %} markers.*chat_template_path"),
    "two_kinds": ([{"prompt": "a", "text": "b"}], {}, "Remove 'prompt'"),
    "formatting": (
        PLAIN_PAIRS,
        {"formatting_func": lambda row: row["prompt"], "completion_only_loss": True},
        "`formatting_func`",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    rows, options, message = BAD[name]
    dataset = Dataset.from_list(rows) if rows else Dataset.from_dict({"text": []})
    with pytest.raises(ValueError, match=message):
        tokenize_dataset(dataset, make_tokenizer(), **options)


def test_a_row_without_an_assistant_turn_is_named():
    rows = [*MESSAGES, {"messages": TURNS[0][:1]}]
    with pytest.raises(ValueError, match="row 2 has no assistant turn"):
        tokenize_dataset(Dataset.from_list(rows), make_tokenizer(MARKED_TEMPLATE), assistant_only_loss=True)


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match="splits"):
        from datasets import DatasetDict

        tokenize_dataset(DatasetDict(train=Dataset.from_list(TEXT)), make_tokenizer())
    with pytest.raises(TypeError, match="list"):
        tokenize_dataset(TEXT, make_tokenizer())
    with pytest.raises(ValueError, match="with_transform"):
        tokenize_dataset(Dataset.from_list(TEXT).with_transform(lambda rows: rows), make_tokenizer())
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_dataset(Dataset.from_list(MESSAGES), make_tokenizer(None))
    with pytest.raises(TypeError, match="object"):
        tokenize_dataset(Dataset.from_list(TEXT), object())
