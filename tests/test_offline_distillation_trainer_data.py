"""Every way the rows can reach the loss, and every way they are refused."""

import dataclasses
import struct

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from tiny_students import (
    FEATURES,
    VOCAB,
    assert_same_parameters,
    cached_dataset,
    config,
    dense_sums,
    losses_of,
    make_trainer,
    manifest_of,
    parameters_of,
    tiny_model,
    tiny_tokenizer,
    token_rows,
    trained,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_offline_distill import DataCollatorForOfflineDistillation, OfflineDistillationTrainer


@pytest.fixture(scope="module")
def teacher():
    return tiny_model(seed=1).eval()


@pytest.fixture(scope="module")
def cached(teacher):
    """Rows of 5, 3 and 7 tokens."""
    return cached_dataset(token_rows([5, 3, 7], prompt=1), teacher)


def with_rows(rows: list[dict]) -> Dataset:
    return Dataset.from_list(rows, features=FEATURES)


def student_after(tmp_path, dataset, **options):
    student = tiny_model()
    trainer = trained(tmp_path, student, dataset, **options)
    return parameters_of(student), trainer


# ---- One loss, many shapes ----


LAYOUTS = {
    "separate": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    "padded": {"per_device_train_batch_size": 3},
    "multiple": {"per_device_train_batch_size": 3, "pad_to_multiple_of": 8},
    "flattened": {"per_device_train_batch_size": 3, "padding_free": True},
    "flattened to a multiple": {"per_device_train_batch_size": 3, "padding_free": True, "pad_to_multiple_of": 8},
    "packed": {"packing": True, "max_length": 15},
    "packed twice": {"packing": True, "max_length": 8, "per_device_train_batch_size": 2},
    "packed and split": {"packing": True, "max_length": 15, "packing_strategy": "bfd_split"},
    "two workers": {"per_device_train_batch_size": 3, "dataloader_num_workers": 2},
    "grouped": {"per_device_train_batch_size": 3, "train_sampling_strategy": "group_by_length"},
    "all columns kept": {"per_device_train_batch_size": 3, "remove_unused_columns": False},
    "as it is": {"per_device_train_batch_size": 3, "dataset_kwargs": {"skip_prepare_dataset": True}},
    "nothing to cut": {"per_device_train_batch_size": 3, "max_length": 7},
}


@pytest.fixture(scope="module")
def expected(cached):
    """Parameters after one step of SGD on the dense loss."""
    student = tiny_model()
    total, count = dense_sums(student, cached, 1.0, 0.5)
    gradients = torch.autograd.grad(total / count, list(student.parameters()))
    stepped = {
        name: (p - 0.5 * g).detach() for (name, p), g in zip(student.named_parameters(), gradients, strict=True)
    }
    return stepped, (total / count).item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_the_same_step(tmp_path, cached, expected, layout):
    dataset = cached.add_column("comment", ["one", "two", "three"])
    stepped, loss = expected
    after, trainer = student_after(tmp_path, dataset, ce_weight=0.5, **LAYOUTS[layout])
    assert losses_of(trainer) == pytest.approx([loss], abs=2e-6)
    assert_same_parameters(after, stepped, atol=2e-6)


def test_grouping_by_length_batches_rows_of_one_length(tmp_path, teacher):
    cache = cached_dataset(token_rows([4, 9] * 6), teacher)
    mixed = {}
    for strategy in ("sequential", "group_by_length"):
        trainer = make_trainer(
            tmp_path, tiny_model(), cache, train_sampling_strategy=strategy, per_device_train_batch_size=2
        )
        lengths = [batch["attention_mask"].sum(-1).tolist() for batch in trainer.get_train_dataloader()]
        mixed[strategy] = sum(first != second for first, second in lengths)
    # The longest row comes first, whatever its partner
    assert mixed["sequential"] == 6
    assert mixed["group_by_length"] <= 2


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_is_that_of_sft(tmp_path, teacher, strategy):
    """Rows longer than `max_length` too: cut, split or wrapped as TRL does it."""
    rows = token_rows([5, 13, 7, 3, 9], prompt=1)
    options = {"packing": True, "packing_strategy": strategy, "max_length": 8, "per_device_train_batch_size": 2}
    ours, trainer = student_after(tmp_path, cached_dataset(rows, teacher), kd_weight=0.0, ce_weight=1.0, **options)
    arguments = config(tmp_path, **options)
    theirs = tiny_model()
    sft = SFTTrainer(
        theirs,
        SFTConfig(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(SFTConfig) if f.init}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    sft.train()
    assert trainer.train_dataset["input_ids"] == sft.train_dataset["input_ids"]
    assert losses_of(trainer) == pytest.approx(losses_of(sft), abs=1e-6)
    assert_same_parameters(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_keeps_each_blob_at_its_token(tmp_path, teacher, strategy):
    rows = list(cached_dataset(token_rows([5, 13, 7, 3, 9], prompt=1), teacher))
    # The token and its position decide the blob: every pair must come through together
    pairs = {(token, blob) for row in rows for token, blob in zip(row["input_ids"], row["teacher_topk"], strict=True)}
    trainer = make_trainer(
        tmp_path, tiny_model(), with_rows(rows), packing=True, packing_strategy=strategy, max_length=8
    )
    packed = [
        (token, blob)
        for row in trainer.train_dataset
        for token, blob in zip(row["input_ids"], row["teacher_topk"], strict=True)
    ]
    assert set(packed) <= pairs
    assert len(packed) == (sum(min(len(row["input_ids"]), 8) for row in rows) if strategy == "bfd" else 37)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_cuts_tokens_and_teacher_together(tmp_path, teacher, mode):
    rows = list(cached_dataset(token_rows([12, 20, 20], prompt=3), teacher))
    cut = slice(None, 16) if mode == "keep_start" else slice(-16, None)
    by_hand = [{key: value[cut] if isinstance(value, list) else value for key, value in row.items()} for row in rows]
    expected, _ = student_after(tmp_path, with_rows(by_hand))
    untouched = [list(range(20)) for _ in rows]
    dataset = with_rows(rows).add_column("twenty", untouched)
    after, trainer = student_after(tmp_path, dataset, max_length=16, truncation_mode=mode)
    assert_same_parameters(after, expected, atol=1e-6)
    assert trainer.train_dataset["twenty"] == untouched
    assert [len(ids) for ids in trainer.train_dataset["input_ids"]] == [12, 16, 16]


def test_prepared_rows_that_fit_are_not_written_again(tmp_path, cached):
    trainer = make_trainer(tmp_path, tiny_model(), cached, max_length=7)
    assert trainer.train_dataset.data.column("teacher_topk").equals(cached.data.column("teacher_topk"))
    assert trainer.train_dataset.data.nbytes == cached.data.nbytes


# ---- Streams ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 6},
        {"packing": True, "max_length": 15},
        {"dataloader_num_workers": 1},
        {"remove_unused_columns": False},
        {"padding_free": True},
    ],
    ids=str,
)
def test_streaming_is_map_style(tmp_path, teacher, options):
    cache = cached_dataset(token_rows([5, 3, 7, 9, 4, 8], prompt=1), teacher)
    options = {"max_steps": 3, "per_device_train_batch_size": 2, **options}
    map_style, first = student_after(tmp_path, cache, **options)
    streamed, second = student_after(tmp_path, cache.to_iterable_dataset(), **options)
    assert losses_of(second) == pytest.approx(losses_of(first), abs=1e-6)
    assert_same_parameters(streamed, map_style, atol=1e-6)


def test_a_stream_from_a_generator_without_features(tmp_path, cached):
    stream = IterableDataset.from_generator(lambda: iter(list(cached)))
    map_style, _ = student_after(tmp_path, cached, max_steps=1)
    streamed, _ = student_after(tmp_path, stream, max_steps=1, max_length=16)
    assert_same_parameters(streamed, map_style, atol=1e-6)


def test_evaluation_of_a_stream_and_packed_evaluation(tmp_path, cached):
    trainer = make_trainer(
        tmp_path,
        tiny_model(),
        cached,
        eval_dataset={"map": cached, "stream": cached.to_iterable_dataset()},
        max_length=15,
        eval_packing=True,
    )
    assert len(trainer.eval_dataset["map"]) == 1
    metrics = trainer.evaluate()
    total, count = dense_sums(tiny_model(), cached)
    assert metrics["eval_map_loss"] == pytest.approx((total / count).item(), abs=2e-6)
    assert metrics["eval_stream_loss"] == pytest.approx((total / count).item(), abs=2e-6)
    fresh = trainer.evaluate({"a": cached, "b": cached.select([0])}, metric_key_prefix="new")
    assert fresh["new_a_loss"] == pytest.approx((total / count).item(), abs=2e-6)
    assert "new_b_kd_loss" in fresh
    unpacked = make_trainer(
        tmp_path,
        tiny_model(),
        cached,
        eval_dataset=DatasetDict(a=cached),
        packing=True,
        max_length=15,
        eval_packing=False,
    )
    assert (len(unpacked.train_dataset), len(unpacked.eval_dataset["a"])) == (1, 3)
    assert unpacked.evaluate()["eval_a_loss"] == pytest.approx((total / count).item(), abs=2e-6)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: {**row, "teacher_topk": row["teacher_topk"][:-1]}, "Row 1 .* 2 entries for 3 tokens"),
        (lambda row: {**row, "labels": row["labels"][:-1]}, "Row 1 .*`labels` has 2 entries for 3 tokens"),
        (lambda row: {**row, "teacher_topk": [b"\xf0\x06ab"] * 3}, "Row 1 of the train dataset: "),
        (
            lambda row: {**row, "teacher_manifest": manifest_of(tiny_tokenizer(VOCAB - 1), name="org/foreign")},
            "Row 1 .*org/foreign",
        ),
    ],
)
def test_a_damaged_stream_stops_at_the_row(tmp_path, cached, damage, message):
    rows = list(cached)
    rows[1] = damage(rows[1])
    trainer = make_trainer(tmp_path, tiny_model(), with_rows(rows).to_iterable_dataset(), max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.train()


# ---- Several workers, shuffled: rows stay with their teacher ----


def test_each_row_keeps_its_own_teacher(tmp_path, teacher):
    """20 rows whose teacher encodes the row: shuffled, filtered, read by two workers."""
    rows = list(cached_dataset(token_rows([4] * 20), teacher))
    seen = []

    class Watching(OfflineDistillationTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            seen.extend(
                (tuple(ids), tuple(top.flatten().tolist()))
                for ids, top in zip(inputs["input_ids"].tolist(), inputs["teacher_token_ids"], strict=True)
            )
            return super().compute_loss(model, inputs, **kwargs)

    collator = DataCollatorForOfflineDistillation(pad_token_id=0)
    truth = {}
    for row in rows:
        batch = collator([row])
        truth[tuple(row["input_ids"])] = tuple(batch["teacher_token_ids"][0].flatten().tolist())
    dataset = with_rows(rows).shuffle(seed=3).filter(lambda row: row["input_ids"][0] % 3 != 0)
    trainer = Watching(
        tiny_model(),
        config(tmp_path, train_sampling_strategy="random", dataloader_num_workers=2, per_device_train_batch_size=3),
        train_dataset=dataset,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert len(seen) == len(dataset)
    assert all(truth[ids] == top for ids, top in seen)


# ---- Padded heads ----


def test_heads_of_other_widths(tmp_path):
    """A tokenizer of 50 ids; a cache with id 60 in it; students of 56 and 64 rows."""
    tokenizer, teacher = tiny_tokenizer(50), tiny_model(vocab=64, seed=1).eval()
    with torch.no_grad():
        teacher.lm_head.weight[60] = 30 * teacher.lm_head.weight[60].sign()
    rows = token_rows([6, 6], vocab=50)
    # What a capture stores: only the tokenizer's ids
    narrow = cached_dataset(rows, teacher, tokenizer, vocab=50)
    for width in (50, 56, 64):
        student = tiny_model(vocab=width)
        total, count = dense_sums(student, narrow)
        trainer = trained(tmp_path, student, narrow, tokenizer=tokenizer)
        assert losses_of(trainer) == pytest.approx([(total / count).item()], abs=2e-6)
    wide = cached_dataset(rows, teacher, tokenizer, vocab=64, top_k=40)
    with pytest.raises(ValueError, match=r"head has 56 rows.*org/teacher.*vocab_size=64"):
        make_trainer(tmp_path, tiny_model(vocab=56), wide, tokenizer)
    # A manifest that says less than the blobs hold
    lying = wide.remove_columns("teacher_manifest").add_column("teacher_manifest", [manifest_of(tokenizer, 50)] * 2)
    with pytest.raises(ValueError, match=r"Row 0 of the train dataset: `teacher_topk\[0\]` holds token id \d\d"):
        make_trainer(tmp_path, tiny_model(vocab=56), lying.cast(FEATURES), tokenizer)
    make_trainer(tmp_path, tiny_model(vocab=64), wide, tokenizer)


# ---- Bad input, each refused before the first step ----


def damaged(cached, index, **columns):
    rows = list(cached)
    rows[index] = {**rows[index], **columns}
    return with_rows(rows)


def with_value(blob: bytes, value: float) -> bytes:
    """The blob with another first log-probability (a header of 2 bytes, then the tail in fp16, then the values)."""
    return blob[:4] + struct.pack("<e", value) + blob[6:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: c.remove_columns("teacher_topk"), "train dataset has no column 'teacher_topk'.*build_distill"),
        (lambda c: c.remove_columns("labels"), "no column 'labels'"),
        (lambda c: c.remove_columns("teacher_manifest"), "no column 'teacher_manifest'"),
        (lambda c: c.rename_column("teacher_topk", "teacher_top_k"), "Rename .*'teacher_top_k', 'teacher_topk'"),
        (lambda c: c.remove_columns("input_ids"), "no column 'input_ids'"),
        (lambda c: Dataset.from_dict({"text": ["a"]}), "no column 'input_ids'"),
        (lambda c: c.select([]), "train dataset is empty"),
        (lambda c: c.to_iterable_dataset().filter(lambda row: False), "train dataset is empty"),
        (lambda c: c.add_column("image", ["x"] * 3), "vision column 'image'"),
        (
            lambda c: damaged(c, 1, teacher_topk=c[1]["teacher_topk"][:2]),
            "Row 1 of the train dataset: `teacher_topk` has 2 entries for 3 tokens",
        ),
        (lambda c: damaged(c, 2, labels=c[2]["labels"][:4]), "Row 2 .*`labels` has 4 entries for 7 tokens"),
        (lambda c: damaged(c, 2, teacher_topk=[b"\xf0\x06ab"] * 7), "Row 2 of the train dataset: .*0xf0|Row 2"),
        (
            lambda c: damaged(c, 1, teacher_topk=[c[1]["teacher_topk"][0], b"", b""]),
            r"Row 1 .*token 2 is trained .*`teacher_topk\[1\]` is empty",
        ),
        (
            lambda c: damaged(
                c,
                2,
                teacher_topk=[
                    *c[2]["teacher_topk"][:3],
                    with_value(c[2]["teacher_topk"][3], float("nan")),
                    *c[2]["teacher_topk"][4:],
                ],
            ),
            r"Row 2 .*`teacher_topk\[3\]` holds NaN or \+inf",
        ),
        (
            lambda c: damaged(
                c, 0, teacher_topk=[with_value(c[0]["teacher_topk"][0], float("inf")), *c[0]["teacher_topk"][1:]]
            ),
            r"Row 0 .*`teacher_topk\[0\]` holds NaN or \+inf",
        ),
        (lambda c: damaged(c, 1, teacher_manifest="{}"), "format_version"),
        (
            lambda c: damaged(c, 1, teacher_manifest=manifest_of(tiny_tokenizer(VOCAB - 1), name="org/foreign")),
            "org/teacher.*org/foreign|org/foreign.*org/teacher",
        ),
        (
            lambda c: with_rows(
                [{**row, "labels": [row["labels"][0]] + [-100] * (len(row["labels"]) - 1)} for row in c]
            ),
            "train dataset trains nothing",
        ),
        (lambda c: c.with_transform(lambda batch: batch), "has a transform"),
    ],
)
def test_bad_datasets(tmp_path, cached, make, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, tiny_model(), make(cached), max_steps=1)


def test_bad_evaluation_set(tmp_path, cached):
    plain = cached.remove_columns("teacher_topk")
    with pytest.raises(ValueError, match="The eval dataset has no column 'teacher_topk'"):
        make_trainer(tmp_path, tiny_model(), cached, eval_dataset=plain)
    with pytest.raises(ValueError, match="The b dataset has no column 'teacher_topk'"):
        make_trainer(tmp_path, tiny_model(), cached, eval_dataset={"a": cached, "b": plain})
    with pytest.raises(ValueError, match="The held_out dataset has no column 'teacher_topk'"):
        make_trainer(tmp_path, tiny_model(), cached).evaluate(plain, metric_key_prefix="held_out")


def test_nothing_within_max_length(tmp_path, teacher):
    cache = cached_dataset(token_rows([12], prompt=10), teacher)
    with pytest.raises(ValueError, match=r"trains nothing.*`max_length=8`"):
        make_trainer(tmp_path, tiny_model(), cache, max_length=8)


def test_foreign_tokenizer_names_both_sides(tmp_path, cached):
    with pytest.raises(ValueError, match=r"processing_class.*\d+ tokens.*org/teacher"):
        make_trainer(tmp_path, tiny_model(), cached, tokenizer=tiny_tokenizer(VOCAB - 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values_under_a_mask_are_no_matter(tmp_path, teacher, value):
    (row,) = cached_dataset(token_rows([6], prompt=1), teacher)
    blobs = list(row["teacher_topk"])
    blobs[1] = with_value(blobs[1], value)
    row = {**row, "teacher_topk": blobs, "labels": [*row["labels"][:2], -100, *row["labels"][3:]]}
    trainer = trained(tmp_path, tiny_model(), with_rows([row]))
    assert trainer.state.log_history[0]["loss"] > 0


def test_options_that_cannot_work(tmp_path, cached):
    for argument in ("compute_loss_func", "formatting_func"):
        with pytest.raises(ValueError, match=f"`{argument}` is not supported"):
            make_trainer(tmp_path, tiny_model(), cached, trainer_kwargs={argument: lambda *args: None})
    with pytest.raises(ValueError, match="`data_collator` is a `DataCollatorForLanguageModeling`"):
        make_trainer(
            tmp_path,
            tiny_model(),
            cached,
            trainer_kwargs={"data_collator": DataCollatorForLanguageModeling(pad_token_id=0)},
        )
    with pytest.raises(ValueError, match="`packing=True` needs the length"):
        make_trainer(tmp_path, tiny_model(), cached, packing=True)
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        make_trainer(tmp_path, tiny_model(), None)
    with pytest.raises(TypeError, match="must be a `Dataset` or `IterableDataset`"):
        make_trainer(tmp_path, tiny_model(), DatasetDict(train=cached))
    frozen = tiny_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        make_trainer(tmp_path, frozen, cached)


def test_a_collator_that_drops_the_teacher_is_named(tmp_path, cached):
    def forgetful(examples):
        batch = DataCollatorForOfflineDistillation(pad_token_id=0)(examples)
        return {key: value for key, value in batch.items() if key != "teacher_logprobs"}

    trainer = make_trainer(tmp_path, tiny_model(), cached, trainer_kwargs={"data_collator": forgetful})
    with pytest.raises(ValueError, match="The batch has no 'teacher_logprobs'"):
        trainer.train()


def test_own_collator_and_transformed_rows(tmp_path, cached):
    """`skip_prepare_dataset` with a transform: rows are made when they are read."""
    plain, _ = student_after(tmp_path, cached)
    after, _ = student_after(
        tmp_path,
        cached.with_transform(lambda batch: dict(batch)),
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    assert_same_parameters(after, plain, atol=0.0)
    student = tiny_model()
    trained(
        tmp_path,
        student,
        cached,
        trainer_kwargs={"data_collator": DataCollatorForOfflineDistillation(pad_token_id=0, pad_to_multiple_of=4)},
    )
    assert_same_parameters(student, plain, atol=1e-6)


def test_layouts_of_blobs_may_be_mixed(tmp_path, teacher):
    """Wider and narrower supports in one batch."""
    rows = token_rows([5, 6, 7])
    cache = concatenate_datasets(
        [cached_dataset([row], teacher, top_k=k) for row, k in zip(rows, (1, 4, 9), strict=True)]
    )
    student = tiny_model()
    total, count = dense_sums(student, cache)
    trainer = trained(tmp_path, student, cache)
    assert losses_of(trainer) == pytest.approx([(total / count).item()], abs=2e-6)


# ---- What users of SFTTrainer pass besides ----


@pytest.fixture
def folder(tmp_path):
    """A student and its tokenizer on disk."""
    tiny_model().save_pretrained(tmp_path / "student")
    tiny_tokenizer().save_pretrained(tmp_path / "student")
    return tmp_path / "student"


def test_a_student_by_its_name(tmp_path, cached, folder):
    expected, _ = student_after(tmp_path, cached)
    trainer = OfflineDistillationTrainer(str(folder), config(tmp_path), train_dataset=cached)
    trainer.train()
    assert_same_parameters(trainer.model, expected, atol=0.0)
    assert trainer.processing_class.get_vocab() == tiny_tokenizer().get_vocab()
    assert {"trl", "offline-distillation"} <= set(trainer.model.model_tags)
    small = OfflineDistillationTrainer(
        str(folder), config(tmp_path, model_init_kwargs={"dtype": "bfloat16"}), train_dataset=cached
    )
    assert small.model.dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_bf16(tmp_path, cached, how):
    student = tiny_model()
    total, count = dense_sums(student, cached)
    trainer = make_trainer(
        tmp_path, student.bfloat16() if how == "weights" else student, cached, bf16=how == "autocast"
    )
    trainer.train()
    assert losses_of(trainer) == pytest.approx([(total / count).item()], abs=0.05)
    assert student.lm_head.weight.dtype == (torch.bfloat16 if how == "weights" else torch.float32)


def test_tokens_of_padding_and_end(tmp_path, cached):
    """A student may pad with what it likes; the end of a sequence is only a name for an id."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    expected, _ = student_after(tmp_path, cached)
    student = tiny_model()
    trained(tmp_path, student, cached, tokenizer=tokenizer, eos_token="w5")
    assert tokenizer.pad_token == tokenizer.eos_token == "w5"
    assert_same_parameters(student, expected, atol=1e-6)


def test_optimizer_scheduler_and_callbacks_are_passed_on(tmp_path, cached):
    from transformers import TrainerCallback

    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            Count.steps += 1

    student = tiny_model()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trained(
        tmp_path,
        student,
        cached,
        trainer_kwargs={"optimizers": (optimizer, scheduler), "callbacks": [Count()]},
    )
    expected, _ = student_after(tmp_path, cached, learning_rate=0.25)
    assert_same_parameters(student, expected, atol=0.0)
    assert Count.steps == 1


def test_shuffled_preparation(tmp_path, teacher):
    cache = cached_dataset(token_rows([5] * 12), teacher)
    trainer = make_trainer(tmp_path, tiny_model(), cache, shuffle_dataset=True, seed=3)
    order = [row["input_ids"] for row in trainer.train_dataset]
    assert order != [row["input_ids"] for row in cache]
    blobs = {tuple(row["input_ids"]): row["teacher_topk"] for row in cache}
    assert all(blobs[tuple(row["input_ids"])] == row["teacher_topk"] for row in trainer.train_dataset)


def test_preparation_in_two_processes(tmp_path, teacher):
    cache = cached_dataset(token_rows([12, 20, 20, 9], prompt=3), teacher)
    one, _ = student_after(tmp_path, cache, max_length=16)
    two, _ = student_after(tmp_path, cache, max_length=16, dataset_num_proc=2)
    assert_same_parameters(two, one, atol=0.0)
