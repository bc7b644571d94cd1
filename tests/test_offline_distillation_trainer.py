"""The loss the trainer trains on, from batch to logged number, against the dense logits."""

import dataclasses
import math
import re

import pytest
import torch
from datasets import Dataset, interleave_datasets
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
    teacher_blobs,
    tiny_model,
    tiny_tokenizer,
    token_rows,
    trained,
)
from trl import SFTConfig, SFTTrainer

from trl_offline_distill import OfflineDistillationTrainer, TeacherTopK, encode_topk


@pytest.fixture(scope="module")
def teacher():
    return tiny_model(seed=1).eval()


@pytest.fixture(scope="module")
def rows():
    return token_rows([2, 4, 7, 7], prompt=1)  # 1, 3, 6 and 6 trained tokens


@pytest.fixture(scope="module")
def cached(teacher, rows):
    return cached_dataset(rows, teacher)


# ---- The value ----


@pytest.mark.parametrize("loss_type", [None, "nll", "chunked_nll"])
@pytest.mark.parametrize("family", ["llama", "tied", "qwen3", "gpt2", "mamba"])
def test_loss_of_every_family_is_the_dense_one(tmp_path, cached, family, loss_type):
    student = tiny_model(family)
    total, count = dense_sums(student, cached, kd_weight=1.0, ce_weight=0.5)
    start = parameters_of(student)
    expected = torch.autograd.grad(total / count, list(student.parameters()))
    expected = {name: p - 0.5 * g for (name, p), g in zip(start.items(), expected, strict=True)}
    student.zero_grad()
    options = {} if loss_type is None else {"loss_type": loss_type}
    trainer = trained(tmp_path, student, cached, ce_weight=0.5, **options)
    assert losses_of(trainer) == pytest.approx([(total / count).item()], abs=2e-6)
    assert_same_parameters(student, expected, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mamba"])
@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (1, 4), (2, 2), (3, 2), (1, 3)])
def test_accumulation_is_one_mean_over_all_tokens(tmp_path, cached, family, batch, accumulation):
    rows = cached.select(range(3)) if accumulation == 3 else cached

    def run(batch, accumulation):
        student = tiny_model(family)
        return student, losses_of(
            trained(
                tmp_path,
                student,
                rows,
                learning_rate=1.0,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation,
            )
        )

    whole, whole_losses = run(4, 1)
    split, split_losses = run(batch, accumulation)
    assert split_losses == pytest.approx(whole_losses, abs=1e-6)
    assert_same_parameters(split, whole, atol=1e-6)


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 1), (1, 2)])
def test_worked_mean(tmp_path, batch, accumulation):
    """KL 0.5 on each of 2 tokens and 2.0 on each of 6: the mean over tokens is 1.625, over rows 1.25."""
    student = tiny_model()
    student.lm_head.weight.data.zero_()  # uniform over 48 tokens

    def sure_by(kl: float) -> TeacherTopK:
        """One candidate whose KL to the uniform student, the rest as one outcome, is `kl`."""
        low, high = 1 / VOCAB, 1 - 1e-9
        for _ in range(60):
            p = (low + high) / 2
            found = p * math.log(p * VOCAB) + (1 - p) * math.log((1 - p) * VOCAB / (VOCAB - 1))
            low, high = (p, high) if found < kl else (low, p)
        return TeacherTopK(torch.tensor([[7]]), torch.tensor([[math.log(p)]]), torch.tensor([math.log1p(-p)]))

    rows = []
    for row, kl in zip(token_rows([3, 7]), (0.5, 2.0), strict=True):
        (blob,) = encode_topk(sure_by(kl), vocab_size=VOCAB)
        row["teacher_topk"] = [blob] * (len(row["labels"]) - 1) + [b""]
        rows.append({**row, "teacher_manifest": manifest_of(tiny_tokenizer())})
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    trainer = trained(tmp_path, student, Dataset.from_list(rows, features=FEATURES), **options)
    assert losses_of(trainer) == pytest.approx([1.625], abs=2e-3)  # fp16 in the cache


def test_off_by_one(tmp_path):
    """ids [5,6,7,8,9], labels on 7, 8, 9; the teacher is sure of them at rows 1, 2, 3; rows 0 and 4 hold garbage."""
    ids = [5, 6, 7, 8, 9]
    sure = encode_topk(
        TeacherTopK(torch.tensor([[7], [8], [9]]), torch.zeros(3, 1), torch.full((3,), -torch.inf)), vocab_size=VOCAB
    )
    garbage = sure[0][:2] + b"\xff" * (len(sure[0]) - 2)  # NaN everywhere
    row = {
        "input_ids": ids,
        "labels": [-100, -100, 7, 8, 9],
        "teacher_topk": [garbage, *sure, garbage],
        "teacher_manifest": manifest_of(tiny_tokenizer()),
    }
    student = tiny_model("gpt2")
    with torch.no_grad():  # the student says what follows the token it is at: 6 -> 7 -> 8 -> 9, with certainty
        for block in student.transformer.h:
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
        student.transformer.wpe.weight.zero_()
        embedding = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(0)) * 4
        student.transformer.wte.weight.copy_(embedding)
        student.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 16))
        hidden = student.transformer(torch.tensor([[6, 7, 8]])).last_hidden_state[0]
        student.lm_head.weight[7:10] = torch.linalg.lstsq(hidden, 200 * torch.eye(3)).solution.T
    before = parameters_of(student)
    trainer = trained(tmp_path, student, Dataset.from_list([row], features=FEATURES))
    assert losses_of(trainer) == pytest.approx([0.0], abs=1e-6)
    assert trainer.state.log_history[0]["mean_token_accuracy"] == 1.0
    assert_same_parameters(student, before, atol=1e-6)


def test_student_that_is_its_own_teacher_has_nothing_to_learn(tmp_path):
    student = tiny_model()
    cache = cached_dataset(token_rows([9, 6], prompt=2), student.eval(), top_k=VOCAB)
    before = parameters_of(student)
    trainer = trained(tmp_path, student, cache)
    assert losses_of(trainer) == pytest.approx([0.0], abs=1e-4)  # fp16 log-probabilities
    assert trainer.state.log_history[0]["teacher_agreement"] == 1.0
    assert_same_parameters(student, before, atol=1e-3)


def test_learns_a_memorisable_set(tmp_path, teacher):
    cache = cached_dataset(token_rows([8] * 6, prompt=2), teacher)
    trainer = trained(
        tmp_path, tiny_model(), cache, optim="adamw_torch", learning_rate=2e-2, num_train_epochs=60, logging_steps=5
    )
    losses = losses_of(trainer)
    assert losses[-1] < 0.1 * losses[0]
    assert trainer.state.log_history[-2]["teacher_agreement"] > 0.9


def test_without_a_teacher_term_it_is_sft(tmp_path, rows, cached):
    ours, theirs = tiny_model(), tiny_model()
    options = {"kd_weight": 0.0, "ce_weight": 1.0, "num_train_epochs": 3, "per_device_train_batch_size": 2}
    trainer = trained(tmp_path, ours, cached, **options)
    arguments = config(tmp_path, num_train_epochs=3, per_device_train_batch_size=2)
    sft = SFTTrainer(
        theirs,
        SFTConfig(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(SFTConfig) if f.init}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    sft.train()
    assert losses_of(trainer) == pytest.approx(losses_of(sft), abs=2e-6)
    assert_same_parameters(ours, theirs, atol=5e-5)
    for ours_logged, theirs_logged in zip(trainer.state.log_history, sft.state.log_history, strict=True):
        for name in ("entropy", "mean_token_accuracy", "num_tokens"):
            if name in theirs_logged:
                assert ours_logged[name] == pytest.approx(theirs_logged[name], abs=1e-5)


# ---- Masks ----


def test_a_masked_micro_batch_gives_every_parameter_a_zero_gradient(tmp_path, teacher):
    masked = {"input_ids": [5, 6, 7, 8], "labels": [-100] * 4}
    mixed = [masked, *token_rows([6], prompt=2)]
    cache = cached_dataset(mixed, teacher)
    trainer = make_trainer(tmp_path, tiny_model(), cache, dataset_kwargs={"skip_prepare_dataset": True})
    collate = trainer.data_collator
    trainer.model.train()
    # {A}
    loss = trainer.compute_loss(trainer.model, collate([cache[0]]))
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name
    # {A, B} equals {B}
    both = trainer.compute_loss(trainer.model, collate([cache[0], cache[1]]))
    alone = trainer.compute_loss(trainer.model, collate([cache[1]]))
    torch.testing.assert_close(both, alone)


def test_masked_rows_change_nothing(tmp_path, teacher):
    """Row A is masked within `max_length`: SFTTrainer drops it, and so does this. Kept, it still changes nothing."""
    a, b = token_rows([34, 9], prompt=[30, 5])
    cut = [{key: value[:16] for key, value in row.items()} for row in (a, b)]
    alone = tiny_model()
    trained(tmp_path, alone, cached_dataset([b], teacher))
    together = tiny_model()
    trained(tmp_path, together, cached_dataset([a, b], teacher), max_length=16)
    assert_same_parameters(together, alone)
    kept = tiny_model()
    trainer = trained(
        tmp_path,
        kept,
        cached_dataset([cut[0], cut[0], cut[0], cut[1]], teacher),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    assert len(losses_of(trainer)) == 2  # {A, A}: loss 0, then {A, B}
    assert losses_of(trainer)[0] == 0.0
    assert_same_parameters(kept, alone)


def test_what_lies_under_a_mask_never_matters(tmp_path, teacher):
    (row,) = cached_dataset(token_rows([8], prompt=4), teacher)
    blob = row["teacher_topk"][4]
    poisoned = {**row, "teacher_topk": [blob[:2] + b"\xff" * (len(blob) - 2)] * 3 + row["teacher_topk"][3:]}
    results = []
    for kind in (row, poisoned):
        student = tiny_model()
        trained(tmp_path, student, Dataset.from_list([kind], features=FEATURES))
        results.append(student)
    assert_same_parameters(*results, atol=0.0)


# ---- Evaluation ----


@pytest.mark.parametrize("batch", [1, 4])
def test_train_and_eval_loss_agree(tmp_path, cached, batch):
    student = tiny_model()
    total, count = dense_sums(student, cached)
    trainer = make_trainer(
        tmp_path,
        student,
        cached,
        eval_dataset=cached,
        learning_rate=0.0,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=4 // batch,
        eval_strategy="epoch",
    )
    trainer.train()
    (train_loss,) = losses_of(trainer)
    evaluated = trainer.state.log_history[1]
    assert evaluated["eval_loss"] == pytest.approx(train_loss, abs=1e-6)
    assert evaluated["eval_loss"] == pytest.approx((total / count).item(), abs=2e-6)
    for name in ("kd_loss", "ce_loss", "entropy", "captured_mass", "teacher_agreement"):
        assert evaluated[f"eval_{name}"] == pytest.approx(trainer.state.log_history[0][name], abs=1e-6)


def test_evaluate_several_sets_and_a_fresh_one(tmp_path, teacher, cached):
    other = cached_dataset(token_rows([6, 6], seed=5), teacher)
    trainer = make_trainer(tmp_path, tiny_model(), cached, eval_dataset={"a": cached, "b": other})
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss", "eval_a_kd_loss", "eval_b_captured_mass"} <= metrics.keys()
    fresh = trainer.evaluate(other, metric_key_prefix="test")
    assert fresh["test_loss"] == pytest.approx(metrics["eval_b_loss"], abs=1e-6)
    assert fresh["test_kd_loss"] == pytest.approx(metrics["eval_b_kd_loss"], abs=1e-6)


def test_metrics_choose_the_best_checkpoint(tmp_path, cached):
    trainer = make_trainer(
        tmp_path,
        tiny_model(),
        cached,
        eval_dataset=cached,
        eval_strategy="epoch",
        save_strategy="epoch",
        num_train_epochs=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_kd_loss",
        greater_is_better=False,
    )
    trainer.train()
    evaluated = [entry["eval_kd_loss"] for entry in trainer.state.log_history if "eval_kd_loss" in entry]
    assert trainer.state.best_metric == min(evaluated)


def test_predict_and_compute_metrics_see_the_logits(tmp_path, cached):
    student = tiny_model()
    seen = {}

    def metrics(prediction):
        seen["shape"] = prediction.predictions.shape
        return {"rows": len(prediction.predictions)}

    trainer = make_trainer(tmp_path, student, cached, eval_dataset=cached, trainer_kwargs={"compute_metrics": metrics})
    result = trainer.evaluate()
    assert result["eval_rows"] == 4
    assert seen["shape"] == (4, 7, VOCAB)
    predicted = trainer.predict(cached)
    expected = student(torch.tensor([cached[3]["input_ids"]])).logits[0]
    torch.testing.assert_close(torch.tensor(predicted.predictions[3]), expected.detach(), atol=1e-5, rtol=0)
    assert predicted.metrics["test_loss"] == pytest.approx(result["eval_loss"], abs=1e-6)


# ---- Metrics ----


def test_logged_metrics_are_the_dense_ones(tmp_path, teacher, rows, cached):
    student = tiny_model()
    kd, count = dense_sums(student, cached)
    ce, _ = dense_sums(student, cached, kd_weight=0.0, ce_weight=1.0)
    entropy = accuracy = agreement = captured = support = teacher_entropy = 0.0
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        student_logprobs = student(ids).logits[0].log_softmax(-1)
        teacher_probs, teacher_ids = teacher(ids).logits[0].softmax(-1).topk(5)
        for t, label in enumerate(row["labels"][1:]):
            if label == -100:
                continue
            q, p = student_logprobs[t].exp(), teacher_probs[t]
            entropy += -(q * q.log()).sum().item()
            accuracy += float(q.argmax() == label)
            agreement += float(q.argmax() == teacher_ids[t, 0])
            captured += p.sum().item()
            support += q[teacher_ids[t]].sum().item()
            outcomes = torch.cat([p, 1 - p.sum()[None]])
            teacher_entropy += -(outcomes * outcomes.log()).sum().item()
    trainer = trained(
        tmp_path, student, cached, per_device_train_batch_size=1, gradient_accumulation_steps=4, learning_rate=0.0
    )
    logged = trainer.state.log_history[0]
    expected = {
        "kd_loss": kd.item(),
        "ce_loss": ce.item(),
        "entropy": entropy,
        "teacher_entropy": teacher_entropy,
        "mean_token_accuracy": accuracy,
        "teacher_agreement": agreement,
        "captured_mass": captured,
        "student_mass": support,
    }
    for name, total in expected.items():
        assert logged[name] == pytest.approx(
            total / count, abs=1e-3 if "teacher" in name or "captured" in name else 1e-5
        )
    assert logged["num_tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert logged["tokens_per_second"] > 0
    assert 0 <= logged["data_wait"] < 1
    assert logged["peak_memory_gb"] > 0.01


def test_metrics_of_several_steps_are_weighted_by_tokens(tmp_path, cached):
    one_log = trained(
        tmp_path, tiny_model(), cached, per_device_train_batch_size=1, logging_steps=4, learning_rate=0.0
    )
    one_step = trained(tmp_path, tiny_model(), cached, learning_rate=0.0)
    for name in ("kd_loss", "entropy", "student_mass"):
        assert one_log.state.log_history[0][name] == pytest.approx(one_step.state.log_history[0][name], abs=1e-6)


def test_a_user_may_log_without_touching_the_sums(tmp_path, cached):
    trainer = make_trainer(tmp_path, tiny_model(), cached)
    trainer.log({"mine": 1.0})
    assert trainer.state.log_history[-1].keys() <= {"mine", "epoch", "step"}


# ---- Objectives over a run ----


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_scheduled_weights(tmp_path, cached, kind):
    student = tiny_model()
    trainer = trained(
        tmp_path,
        student,
        cached,
        learning_rate=0.0,
        num_train_epochs=4,
        kd_weight_schedule=kind,
        kd_weight_end=0.0,
        ce_weight=0.0,
        ce_weight_schedule=kind,
        ce_weight_end=1.0,
    )
    kd, count = dense_sums(student, cached)
    ce, _ = dense_sums(student, cached, 0.0, 1.0)
    shares = [i / 4 if kind == "linear" else (1 - math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    expected = [((1 - share) * kd + share * ce).item() / count for share in shares]
    assert losses_of(trainer) == pytest.approx(expected, abs=1e-5)
    assert [round(entry["ce_weight"], 6) for entry in trainer.state.log_history if "loss" in entry][:1] == [
        round(0.25 if kind == "linear" else (1 - math.cos(math.pi / 4)) / 2, 6)
    ]
    assert trainer.state.log_history[0]["kd_loss"] == pytest.approx((kd / count).item(), abs=1e-5)


def test_kd_top_k_moves_the_rest_into_the_tail(tmp_path, teacher, rows):
    narrow, wide = tiny_model(), tiny_model()
    trained(tmp_path, narrow, cached_dataset(rows, teacher, top_k=3))
    trained(tmp_path, wide, cached_dataset(rows, teacher, top_k=9), kd_top_k=3)
    assert_same_parameters(narrow, wide, atol=2e-4)  # the tail was rounded to fp16 once more


@pytest.mark.parametrize("ce_weight", [0.0, 0.5])
@pytest.mark.parametrize("padding_free", [False, True])
def test_position_fraction_keeps_the_uncertain_ones(tmp_path, teacher, ce_weight, padding_free):
    rows = list(cached_dataset(token_rows([6, 11, 4], prompt=1), teacher, top_k=VOCAB))
    student = tiny_model()
    kd = torch.zeros(())
    selected = 0
    for row in rows:  # 5, 10 and 3 trained tokens: 3, 5 and 2 are kept
        log_p = teacher(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)[:-1]
        entropy = -(log_p.exp() * log_p).sum(-1)
        for t in entropy.topk(math.ceil(len(entropy) / 2)).indices.tolist():
            labels = [-100] * len(row["labels"])
            labels[t + 1] = row["labels"][t + 1]
            kd = kd + dense_sums(student, [{**row, "labels": labels}])[0]
            selected += 1
    ce, count = dense_sums(student, rows, 0.0, 1.0)
    dataset = Dataset.from_list(rows, features=FEATURES)
    trainer = make_trainer(
        tmp_path,
        student,
        dataset,
        kd_position_fraction=0.5,
        ce_weight=ce_weight,
        eval_dataset=dataset,
        padding_free=padding_free,
    )
    expected = (kd + ce_weight * ce).item() / count
    if not padding_free:  # attention over a flattened batch needs FlashAttention
        metrics = trainer.evaluate()
        assert metrics["eval_kd_loss"] == pytest.approx(kd.item() / selected, abs=1e-4)
        assert metrics["eval_loss"] == pytest.approx(expected, abs=1e-4)
        trainer.train()
        assert losses_of(trainer) == pytest.approx([expected], abs=1e-4)
        return
    inputs, kd_tokens, trained_tokens = trainer._select_positions(trainer.data_collator(rows), ce_weight)
    assert (kd_tokens, trained_tokens) == (10, 18)
    kept = (inputs["labels"][0, 1:] != -100) if ce_weight == 0 else (inputs["teacher_log_tail"][0, :-1] != 0)
    assert kept.sum() == 10
    assert [kept[:5].sum(), kept[6:16].sum(), kept[17:].sum()] == [3, 5, 2]


# ---- Options that need the cache ----


def test_a_temperature_needs_cached_tails(tmp_path, cached):
    with pytest.raises(
        ValueError, match=r"`temperature=2.0` needs the teacher's tail .*org/teacher.*tail_temperatures"
    ):
        make_trainer(tmp_path, tiny_model(), cached, temperature=2.0)
    trainer = make_trainer(tmp_path, tiny_model(), cached, temperature=2.0, tail="renormalize")
    assert math.isfinite(trainer.train().training_loss)


def test_temperature_with_cached_tails_is_the_dense_one(tmp_path, teacher):
    (row,) = token_rows([7])
    student = tiny_model()
    ids = torch.tensor([row["input_ids"]])
    with torch.no_grad():
        logits, own = teacher(ids).logits[0].double(), student(ids).logits[0].double()
        logprobs = logits.log_softmax(-1)
        top, top_ids = logprobs.topk(6)
        rest = logprobs.scatter(-1, top_ids, -torch.inf)
        signal = TeacherTopK(
            top_ids, top, rest.logsumexp(-1), torch.stack([(rest / 2).logsumexp(-1)], -1), (2.0,), VOCAB
        )
        blobs = encode_topk(signal, vocab_size=VOCAB)
        # K+1 outcomes of the teacher and the student at T = 2
        p, q = (logits / 2).softmax(-1), (own / 2).softmax(-1)

        def outcomes(x):
            inside = x.gather(-1, top_ids)
            return torch.cat([inside, 1 - inside.sum(-1, keepdim=True)], -1)

        p, q = outcomes(p), outcomes(q)
        expected = 4 * (p * (p / q).log()).sum(-1)[:-1].mean()
    cache = Dataset.from_list(
        [
            {
                **row,
                "teacher_topk": [*blobs[:-1], b""],
                "teacher_manifest": manifest_of(tiny_tokenizer(), tail_temperatures=(2.0,)),
            }
        ],
        features=FEATURES,
    )
    trainer = trained(tmp_path, student, cache, temperature=2.0)
    assert losses_of(trainer) == pytest.approx([expected.item()], abs=2e-2)


def test_a_temperature_beyond_what_is_cached_is_refused(tmp_path, teacher):
    cache = cached_dataset(token_rows([6, 6]), teacher, tail_temperatures=(2.0,))
    with pytest.raises(ValueError, match=r"`temperature=0.5` needs the tail's normaliser.*2.0"):
        make_trainer(tmp_path, tiny_model(), cache, temperature=0.5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"divergence": "reverse_kl"}, "divergence='reverse_kl'"),
        ({"divergence": "generalized_jsd", "beta": 0.5}, "divergence='generalized_jsd'"),
        ({"temperature": 2.0, "tail": "renormalize"}, "temperature=2.0"),
        ({"kd_top_k": 3}, "kd_top_k=3"),
    ],
)
def test_a_sampled_cache_serves_the_forward_kl_only(tmp_path, teacher, options, name):
    cache = cached_dataset(token_rows([6, 6]), teacher, layout="sampled")
    make_trainer(tmp_path, tiny_model(), cache)
    with pytest.raises(ValueError, match=rf"`{name}` cannot be used with the cache of 'org/teacher'"):
        make_trainer(tmp_path, tiny_model(), cache, **options)


def test_a_sampled_cache_is_refused_wherever_it_comes_from(tmp_path, cached, teacher):
    sampled = cached_dataset(token_rows([6, 6]), teacher, layout="sampled", name="org/sampled")
    trainer = make_trainer(tmp_path, tiny_model(), cached, divergence="reverse_kl")
    with pytest.raises(ValueError, match="`divergence='reverse_kl'` cannot be used with the cache of 'org/sampled'"):
        trainer.evaluate(sampled)
    stream = interleave_datasets([cached.to_iterable_dataset(), sampled.to_iterable_dataset()])
    trainer = make_trainer(tmp_path, tiny_model(), stream, divergence="reverse_kl", max_steps=2)
    with pytest.raises(ValueError, match="cannot be used with the cache of 'org/sampled'"):
        trainer.train()


def test_interleaved_streams_of_two_teachers(tmp_path, cached, rows):
    other = cached_dataset(rows, tiny_model(seed=7).eval(), top_k=7, name="org/other")
    both = interleave_datasets([cached, other])
    student, streamed = tiny_model(), tiny_model()
    trained(tmp_path, student, both, max_steps=1)
    stream = interleave_datasets([cached.to_iterable_dataset(), other.to_iterable_dataset()])
    trainer = trained(tmp_path, streamed, stream, max_steps=1)
    assert_same_parameters(streamed, student, atol=1e-6)
    assert [manifest.teacher for manifest in trainer.teacher_manifests] == ["org/teacher", "org/other"]
    trainer.create_model_card()
    assert "org/other" in (tmp_path / "README.md").read_text()


# ---- Saving ----


def test_resume_is_as_if_never_interrupted(tmp_path, teacher):
    cache = cached_dataset(token_rows([6] * 10, prompt=2), teacher)
    options = {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 2,  # in the middle of the first epoch of 3 steps
        "kd_weight_schedule": "linear",
        "kd_weight_end": 0.5,
        "dataloader_num_workers": 1,
    }
    whole = tiny_model()
    first = trained(tmp_path / "whole", whole, cache, **options)
    again = tiny_model(seed=9)  # overwritten by the checkpoint
    resumed = make_trainer(tmp_path / "whole", again, cache, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_parameters(again, whole, atol=0.0)
    assert losses_of(resumed) == losses_of(first)
    assert resumed.state.log_history[-2]["num_tokens"] == first.state.log_history[-2]["num_tokens"]


@pytest.mark.parametrize("source", ["stream", "packed"])
def test_resume_of_a_stream_and_of_packed_rows(tmp_path, teacher, source):
    cache = cached_dataset(token_rows([6, 4, 8, 5, 7, 6, 4, 8], prompt=2), teacher)
    options = {
        "per_device_train_batch_size": 1,
        "max_steps": 5,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 2,
        **({} if source == "stream" else {"packing": True, "max_length": 12, "packing_strategy": "wrapped"}),
    }
    dataset = cache.to_iterable_dataset() if source == "stream" else cache
    whole, again = tiny_model(), tiny_model(seed=9)
    first = trained(tmp_path, whole, dataset, **options)
    resumed = make_trainer(tmp_path, again, dataset, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_parameters(again, whole, atol=0.0)
    assert losses_of(resumed) == losses_of(first)


def test_saved_student_loads_without_this_package(tmp_path, cached):
    student = tiny_model()
    trainer = trained(tmp_path, student, cached)
    trainer.save_model()
    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_parameters(reloaded, student, atol=0.0)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(reloaded(ids).logits, student(ids).logits)
    assert student.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_model_card_names_teacher_cache_loss_and_versions(tmp_path, teacher, rows):
    cache = cached_dataset(rows, teacher, teacher_revision="abc123", dataset="org/text", dtype="bfloat16")
    trainer = make_trainer(
        tmp_path, tiny_model(), cache, ce_weight=0.5, ce_weight_schedule="cosine", ce_weight_end=0.1
    )
    trainer.create_model_card(model_name="student")
    card = (tmp_path / "README.md").read_text()
    for text in (
        "## Offline distillation",
        "[org/teacher](https://huggingface.co/org/teacher) at `abc123`",
        "top 5 of 48 tokens",
        "dtype `bfloat16`",
        "`forward_kl`, tail `bucket`",
        "`ce_weight`: 0.5 to 0.1 (cosine)",
        "trl-offline-distill: ",
        "datasets: org/text",
        "offline-distillation",
    ):
        assert text in card
    trainer.create_model_card(model_name="student")
    assert (tmp_path / "README.md").read_text().count("## Offline distillation") == 1


def test_head_is_described(tmp_path, cached):
    trainer = make_trainer(tmp_path, tiny_model(), cached)
    assert re.search(r"LlamaForCausalLM: .*linear head.*backend torch", trainer.head_description)


def test_default_arguments_and_plain_training_arguments(tmp_path, cached, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.125)
    trainer = OfflineDistillationTrainer(
        tiny_model(), arguments, train_dataset=cached, processing_class=tiny_tokenizer()
    )
    assert trainer.args.learning_rate == 0.125
    assert trainer.args.divergence == "forward_kl"


def test_what_was_chosen_is_said_once(tmp_path, cached, capsys):
    trainer = make_trainer(tmp_path, tiny_model(), cached, loss_chunk_size=5)
    assert capsys.readouterr().out.count(trainer.head_description) == 1
    assert "backend torch, backward in_forward, chunks of 5 positions" in trainer.head_description


def test_a_compiled_student(tmp_path, cached):
    plain, compiled = tiny_model(), tiny_model()
    trained(tmp_path, plain, cached)
    trained(tmp_path, compiled, cached, torch_compile=True, torch_compile_backend="eager")
    assert_same_parameters(compiled, plain, atol=1e-6)
    with pytest.raises(ValueError, match="`torch_compile=True`"):
        make_trainer(tmp_path, torch.compile(tiny_model(), backend="eager"), cached)


def test_two_teachers_in_one_dataset(tmp_path, teacher):
    from datasets import concatenate_datasets

    other = tiny_model(seed=7).eval()
    rows = token_rows([5, 7, 4, 6])
    cache = concatenate_datasets(
        [cached_dataset(rows[:2], teacher), cached_dataset(rows[2:], other, top_k=7, name="org/other")]
    )
    student = tiny_model()
    total, count = dense_sums(student, cache)
    trainer = trained(tmp_path, student, cache)
    assert losses_of(trainer) == pytest.approx([(total / count).item()], abs=2e-6)
    assert [manifest.teacher for manifest in trainer.teacher_manifests] == ["org/teacher", "org/other"]


def test_teacher_blobs_helper_fills_trained_positions_only(teacher):
    (row,) = token_rows([6], prompt=3)
    assert [bool(blob) for blob in teacher_blobs(row, teacher, 4)] == [False, False, True, True, True, False]


@pytest.mark.parametrize("adapter", [False, True], ids=["student", "adapter"])
def test_push_to_hub(tmp_path, cached, hub, adapter):
    from huggingface_hub import hf_hub_download, list_repo_files
    from peft import LoraConfig

    name = f"user/pushed-{'adapter' if adapter else 'student'}"
    peft_config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if adapter else None
    trainer = make_trainer(
        tmp_path,
        tiny_model(),
        cached,
        push_to_hub=True,
        hub_model_id=name,
        hub_strategy="end",
        trainer_kwargs={"peft_config": peft_config},
    )
    trainer.train()
    trainer.push_to_hub()
    files = list_repo_files(name)
    assert {"README.md", "adapter_model.safetensors" if adapter else "model.safetensors"} <= set(files)
    with open(hf_hub_download(name, "README.md")) as file:
        card = file.read()
    assert "[org/teacher](https://huggingface.co/org/teacher)" in card
    assert f"# Model Card for {name.split('/')[1]}" in card or name in card


def test_reporting_integrations_get_every_metric_as_a_number(tmp_path, cached):
    """trackio, wandb and TensorBoard are callbacks that read `logs`."""
    from transformers import TrainerCallback

    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(dict(logs))

    make_trainer(
        tmp_path,
        tiny_model(),
        cached,
        eval_dataset=cached,
        eval_strategy="epoch",
        trainer_kwargs={"callbacks": [Reporter()]},
    ).train()
    for prefix, logs in (("", seen[0]), ("eval_", seen[1])):
        for name in ("loss", "kd_loss", "ce_loss", "entropy", "teacher_entropy", "mean_token_accuracy", "num_tokens"):
            assert isinstance(logs[prefix + name], (int, float)), prefix + name
        for name in ("teacher_agreement", "captured_mass", "student_mass"):
            assert 0.0 <= logs[prefix + name] <= 1.0
    assert {"tokens_per_second", "data_wait", "peak_memory_gb"} <= seen[0].keys()


def test_resume_from_a_checkpoint_of_sft(tmp_path, rows, cached):
    """A student that was fine-tuned halfway is distilled from there."""
    arguments = config(tmp_path, save_strategy="steps", save_steps=1, per_device_train_batch_size=1)
    SFTTrainer(
        tiny_model(),
        SFTConfig(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(SFTConfig) if f.init}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    ).train()
    trainer = make_trainer(tmp_path, tiny_model(), cached, per_device_train_batch_size=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert "kd_loss" in trainer.state.log_history[-2]
