"""Tiny data sets in the forms found in the wild, made from one known teacher, and what becomes of them."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_offline_distill.teacher_cache import (
    TeacherManifest,
    decode_topk,
    encode_topk,
    select_support,
    tokenizer_fingerprint,
)
from trl_offline_distill.teacher_cache.columns import FEATURES
from trl_offline_distill.teacher_cache.exporters import to_typed_columns
from trl_offline_distill.teacher_cache.importers import detect_format, import_teacher, join_sidecar


VOCAB = 50
TOP_K = 5
ROWS = [(21, 0), (34, 6), (15, 3)]  # tokens, prompt


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def teacher_rows() -> list[dict]:
    """Text drawn from a bigram teacher, with the teacher's logits for the token after each position."""
    generator = torch.Generator().manual_seed(0)
    table = 3 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    rows = []
    for length, prompt in ROWS:
        ids = [int(torch.randint(VOCAB, (1,), generator=generator))]
        while len(ids) < length:
            ids.append(int(torch.multinomial(table[ids[-1]].softmax(-1), 1, generator=generator)))
        logits = table[ids]
        support = select_support(logits.log_softmax(-1), top_k=TOP_K)
        rows.append({"ids": ids, "prompt": prompt, "logits": logits, "support": support})
    return rows


def expected(prompt: bool = True) -> list[list[dict[int, float] | None]]:
    """For each row and position, {id: log-probability} where the next token is trained."""
    result = []
    for row in teacher_rows():
        first = row["prompt"] if prompt else 0
        support = [
            dict(zip(ids, values))
            for ids, values in zip(row["support"].token_ids.tolist(), row["support"].logprobs.tolist())
        ]
        trained = [token + 1 < len(row["ids"]) and token + 1 >= max(first, 1) for token in range(len(row["ids"]))]
        result.append([entry if keep else None for entry, keep in zip(support, trained)])
    return result


def labels_of(row: dict) -> list[int]:
    return [-100] * row["prompt"] + row["ids"][row["prompt"] :]


def assert_imported(dataset: Dataset, prompt: bool = True, tolerance: float = 2e-3, tail: bool = True) -> None:
    assert dataset.features == FEATURES
    for row, source, wanted in zip(dataset, teacher_rows(), expected(prompt), strict=True):
        assert row["input_ids"] == source["ids"]
        assert len(row["labels"]) == len(row["teacher_topk"]) == len(row["input_ids"])
        teacher = decode_topk(row["teacher_topk"])
        for token, entry in enumerate(wanted):
            label = row["labels"][token + 1] if token + 1 < len(row["labels"]) else -100
            if entry is None:
                assert row["teacher_topk"][token] == b""
                assert label == -100
                continue
            assert label == row["input_ids"][token + 1]
            found = {
                i: p
                for i, p in zip(teacher.token_ids[token].tolist(), teacher.logprobs[token].tolist())
                if p > -math.inf
            }
            assert found == pytest.approx(entry, rel=2e-3, abs=tolerance)
            mass = sum(map(math.exp, entry.values()))
            if tail:
                assert float(teacher.log_tail[token].exp()) == pytest.approx(1 - mass, abs=2 * tolerance)


def axolotl_rows(shift: int = 0, **changes) -> Dataset:
    rows = []
    for row in teacher_rows():
        ids, values = row["support"].token_ids.tolist(), row["support"].logprobs.tolist()
        if shift:
            ids, values = [[0] * TOP_K, *ids[:-1]], [[-1e9] * TOP_K, *values[:-1]]
        entry = {"input_ids": row["ids"], "labels": labels_of(row), "target_token_ids": ids, "target_logprobs": values}
        rows.append(entry | {name: change(entry) for name, change in changes.items()})
    return Dataset.from_list(rows)


# axolotl


@pytest.mark.parametrize("shift", [0, 1])
def test_axolotl_kind_and_shift_are_read_off_the_data(tokenizer, shift):
    assert_imported(import_teacher(axolotl_rows(shift), tokenizer=tokenizer, teacher="org/teacher"))


@pytest.mark.parametrize("padding", [-math.inf, -1e9])
def test_axolotl_padding_and_masks(tokenizer, padding):
    """One candidate fewer everywhere, by padding or by the mask."""
    reference = expected()
    padded = axolotl_rows(target_logprobs=lambda row: [[*values[:-1], padding] for values in row["target_logprobs"]])
    masked = axolotl_rows(target_mask=lambda row: [[1] * (TOP_K - 1) + [0] for _ in row["input_ids"]])
    for dataset in (padded, masked):
        for row, wanted in zip(import_teacher(dataset, tokenizer=tokenizer, teacher="t"), reference):
            teacher = decode_topk(row["teacher_topk"])
            for token, entry in enumerate(wanted):
                if entry is not None:
                    kept = sorted(entry.values(), reverse=True)[:-1]
                    assert (teacher.logprobs[token] > -torch.inf).sum() == TOP_K - 1
                    assert float(teacher.log_tail[token].exp()) == pytest.approx(
                        1 - sum(map(math.exp, kept)), abs=2e-3
                    )


def test_axolotl_token_id_strings_of_the_response_alone(tokenizer):
    """Entries belong to the last tokens of the row and describe their own token."""
    rows = []
    for row in teacher_rows():
        ids, values = row["support"].token_ids.tolist(), row["support"].logprobs.tolist()
        start = max(row["prompt"], 1)
        rows.append(
            {
                "input_ids": row["ids"],
                "labels": labels_of(row),
                "target_token_ids": [[f"token_id:{i}" for i in entry] for entry in ids[start - 1 : -1]],
                "target_logprobs": values[start - 1 : -1],
            }
        )
    assert_imported(import_teacher(Dataset.from_list(rows), tokenizer=tokenizer, teacher="t"))
    rows[0]["target_token_ids"][0][0] = " hello"
    with pytest.raises(ValueError, match=r"row 0 of `dataset`.*' hello'.*token_id:N"):
        import_teacher(rows_of(rows), tokenizer=tokenizer, teacher="t")


def rows_of(rows: list[dict]) -> Dataset:
    return Dataset.from_list(rows)


def test_chat_logprobs_of_a_server(tokenizer):
    rows = []
    for row in teacher_rows():
        start = max(row["prompt"], 1)
        content = [
            {
                "token": f"token_id:{row['ids'][token]}",
                "logprob": -1.0,
                "top_logprobs": [
                    {"token": f"token_id:{i}", "logprob": p}
                    for i, p in zip(
                        row["support"].token_ids[token - 1].tolist(), row["support"].logprobs[token - 1].tolist()
                    )
                ],
            }
            for token in range(start, len(row["ids"]))
        ]
        rows.append({"input_ids": row["ids"], "labels": labels_of(row), "logprobs": {"content": content}})
    assert_imported(import_teacher(rows_of(rows), tokenizer=tokenizer, teacher="t"))


# Llama 405B logits


def llama_405b_rows(over_support: bool) -> Dataset:
    rows = []
    for row in teacher_rows():
        values = row["logits"].gather(1, row["support"].token_ids)
        probabilities = values.softmax(-1) if over_support else row["support"].logprobs.exp()
        rows.append(
            {
                "input_ids": row["ids"],
                "attention_mask": [1] * len(row["ids"]),
                "token_ids": row["support"].token_ids.tolist(),
                "top_values": values.tolist(),
                "normalized_logits": probabilities.tolist(),
            }
        )
    return rows_of(rows)


def test_llama_405b_probabilities_over_the_vocabulary(tokenizer):
    assert_imported(import_teacher(llama_405b_rows(False), tokenizer=tokenizer, teacher="t"), prompt=False)


def test_llama_405b_probabilities_over_the_support_need_consent(tokenizer):
    dataset = llama_405b_rows(True)
    with pytest.raises(ValueError, match=r"`normalizer`.*sum to 1.*normalizer='support'"):
        import_teacher(dataset, tokenizer=tokenizer, teacher="t")
    imported = import_teacher(dataset, tokenizer=tokenizer, teacher="t", normalizer="support")
    teacher = decode_topk(imported[0]["teacher_topk"][:-1])
    torch.testing.assert_close(teacher.logprobs.exp().sum(-1), torch.ones(len(teacher.log_tail)), rtol=0, atol=3e-3)
    assert bool(teacher.log_tail.isneginf().all())
    manifest = TeacherManifest.from_json(imported[0]["teacher_manifest"])
    assert manifest.value_kind == "probability, normalised over the support"
    assert manifest.source_format == "llama_405b_logits"


def test_a_doubled_first_token_can_be_dropped(tokenizer):
    dataset = llama_405b_rows(False).map(
        lambda row: {name: [row[name][0], *row[name]] for name in row}, new_fingerprint="doubled"
    )
    plain = import_teacher(llama_405b_rows(False), tokenizer=tokenizer, teacher="t")
    dropped = import_teacher(dataset, tokenizer=tokenizer, teacher="t", drop_leading=1)
    assert dropped[:] == plain[:]


# NeMo-Aligner


def nemo_rows(normalizer: bool) -> list[dict]:
    rows = []
    for row in teacher_rows():
        ids = row["ids"]
        entry = {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": [int(token + 1 >= row["prompt"]) for token in range(len(ids) - 1)],
            "topk_logits": row["logits"].gather(1, row["support"].token_ids)[:-1].tolist(),
            "topk_token_ids": row["support"].token_ids[:-1].tolist(),
        }
        if normalizer:
            entry["log_sum_exp_logits"] = row["logits"].logsumexp(-1)[:-1].tolist()
        rows.append(entry)
    return rows


def test_nemo_aligner_jsonl(tokenizer, tmp_path):
    path = tmp_path / "teacher.jsonl"
    rows_of(nemo_rows(True)).to_json(path)
    assert_imported(
        import_teacher(Dataset.from_json(str(path), cache_dir=str(tmp_path)), tokenizer=tokenizer, teacher="t")
    )


def test_logits_without_their_normaliser_need_consent(tokenizer):
    dataset = rows_of(nemo_rows(False))
    for declared in (None, "vocabulary"):
        with pytest.raises(ValueError, match="`normalizer`"):
            import_teacher(dataset, tokenizer=tokenizer, teacher="t", normalizer=declared)
    imported = import_teacher(dataset, tokenizer=tokenizer, teacher="t", normalizer="support")
    row, source = imported[1], teacher_rows()[1]
    teacher = decode_topk(row["teacher_topk"][10:11])
    exact = source["support"].logprobs[10].log_softmax(-1)
    torch.testing.assert_close(teacher.logprobs[0].double(), exact, rtol=0, atol=5e-3)


def test_nemo_labels_that_are_not_shifted_are_refused(tokenizer):
    rows = nemo_rows(True)
    rows[2]["labels"] = rows[2]["tokens"]
    with pytest.raises(ValueError, match=r"row 2 of `dataset`.*already shifted"):
        import_teacher(rows_of(rows), tokenizer=tokenizer, teacher="t")


# A sidecar


def sidecar_pair() -> tuple[Dataset, Dataset]:
    tokens, teacher = [], []
    for name, row in zip("abc", teacher_rows()):
        support = select_support(row["logits"].log_softmax(-1), top_k=TOP_K)
        ids, values = support.token_ids.tolist(), support.logprobs.tolist()
        for token, true in enumerate([*row["ids"][1:], 0]):
            # The true token is forced in, the next best one where it is there already.
            full = row["logits"][token].log_softmax(-1)
            extra = true if true not in ids[token] else int(full.argsort(descending=True)[TOP_K])
            ids[token], values[token] = [extra, *ids[token]], [float(full[extra]), *values[token]]
        tokens.append({"id": name, "input_ids": row["ids"], "labels": labels_of(row)})
        teacher.append({"id": name, "token_ids": ids, "logprobs": values})
    return rows_of(tokens), rows_of(teacher[::-1])


def test_sidecar_is_joined_by_id_and_the_forced_token_dropped(tokenizer):
    tokens, teacher = sidecar_pair()
    assert_imported(import_teacher(join_sidecar(tokens, teacher, key="id"), tokenizer=tokenizer, teacher="t"))


def test_sidecar_refusals():
    tokens, teacher = sidecar_pair()
    with pytest.raises(ValueError, match=r"lacks 1 of the 3 rows, id='c' first"):
        join_sidecar(tokens, teacher.select([1, 2]), key="id")
    with pytest.raises(ValueError, match=r"holds id='c' twice \(rows 0 and 1\)"):
        join_sidecar(tokens, teacher.select([0, 0, 1, 2]), key="id")
    with pytest.raises(ValueError, match=r"`sidecar` lacks the columns \['scores'\]"):
        join_sidecar(tokens, teacher, key="id", values="scores")


# Typed columns


def cached(layout: str = "default", temperatures: tuple[float, ...] = ()) -> Dataset:
    rows = []
    for number, row in enumerate(teacher_rows()):
        full = row["logits"].log_softmax(-1)
        keys = torch.arange(len(full)) + 1000 * number
        support = select_support(full, layout=layout, top_k=TOP_K, tail_temperatures=temperatures, row_keys=keys)
        blobs = encode_topk(support, vocab_size=VOCAB, layout=layout)
        labels = [-100, *labels_of(row)[1:]]
        manifest = TeacherManifest(
            "org/teacher",
            "f" * 32,
            VOCAB,
            TOP_K,
            layout=layout,
            tail_temperatures=temperatures,
            draws=24 if layout == "sampled" else None,
        )
        rows.append(
            {
                "input_ids": row["ids"],
                "labels": labels,
                "teacher_topk": [blob if label != -100 else b"" for blob, label in zip(blobs, [*labels[1:], -100])],
                "teacher_manifest": manifest.to_json(),
            }
        )
    return Dataset.from_list(rows, features=FEATURES)


@pytest.mark.parametrize(
    ("layout", "temperatures"),
    [("default", ()), ("default", (2.0, 4.0)), ("compact", ()), ("min_mass", ()), ("sampled", ())],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_typed_columns_round_trip(tokenizer, layout, temperatures, streaming):
    dataset = cached(layout, temperatures)
    typed = to_typed_columns(dataset.to_iterable_dataset() if streaming else dataset)
    assert "teacher_topk" not in next(iter(typed))
    back = import_teacher(typed, tokenizer=tokenizer)
    assert list(back) == list(dataset)


def test_typed_columns_hold_plain_numbers():
    row = to_typed_columns(cached())[1]
    wanted = expected()[1]
    for token, entry in enumerate(wanted):
        ids, values = row["teacher_token_ids"][token], row["teacher_logprobs"][token]
        if entry is None:
            assert ids == values == []
            assert row["teacher_log_tail"][token] is None
        else:
            assert dict(zip(ids, values)) == pytest.approx(entry, abs=2e-3, rel=2e-3)
            assert values == sorted(values, reverse=True)


def test_typed_columns_of_people_need_neither_tail_nor_manifest(tokenizer):
    typed = to_typed_columns(cached()).remove_columns(["teacher_log_tail", "teacher_log_tail_at", "teacher_manifest"])
    imported = import_teacher(typed, tokenizer=tokenizer, teacher="org/teacher")
    assert_imported(imported, tolerance=4e-3)
    manifest = TeacherManifest.from_json(imported[0]["teacher_manifest"])
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    assert (manifest.vocab_size, manifest.top_k, manifest.source_format) == (VOCAB, TOP_K, "typed")
    with pytest.raises(ValueError, match="`teacher` is missing"):
        import_teacher(typed, tokenizer=tokenizer)


def test_export_needs_a_cached_dataset():
    with pytest.raises(ValueError, match="input_ids"):
        to_typed_columns(Dataset.from_list([{"input_ids": [1]}]))


# Fewer candidates, other layouts


def test_top_k_and_layout_of_the_import(tokenizer):
    imported = import_teacher(axolotl_rows(), tokenizer=tokenizer, teacher="t", top_k=2, layout="compact")
    teacher = decode_topk(imported[0]["teacher_topk"])
    assert teacher.top_k == 2
    total = teacher.logprobs[:-1].exp().sum(-1) + teacher.log_tail[:-1].exp()
    torch.testing.assert_close(total, torch.ones(len(total)), rtol=0, atol=3e-3)
    assert imported[0]["teacher_topk"][0][0] >> 4 == 2
    assert TeacherManifest.from_json(imported[0]["teacher_manifest"]).top_k == 2
    with pytest.raises(ValueError, match="sampled"):
        import_teacher(axolotl_rows(), tokenizer=tokenizer, teacher="t", layout="sampled")


def test_equal_repeats_are_merged_and_others_refused(tokenizer):
    def doubled(change: float):
        return axolotl_rows(
            target_token_ids=lambda row: [[*ids, ids[0]] for ids in row["target_token_ids"]],
            target_logprobs=lambda row: [[*values, values[0] - change] for values in row["target_logprobs"]],
        )

    # A repeat that counted twice would make a mass above 1.
    declared = {"tokenizer": tokenizer, "teacher": "t", "value_kind": "logprob", "normalizer": "vocabulary"}
    assert_imported(import_teacher(doubled(0.0), **declared))
    with pytest.raises(ValueError, match=r"row 0 of `dataset`.*listed twice"):
        import_teacher(doubled(1.0), **declared)


# Refusals: nothing to learn from, or two readings


def test_distillkit_is_refused_with_the_reason(tokenizer):
    row = {"input_ids": [1, 2], "compressed_logprobs": [[1, 2], [3, 4]], "bytepacked_indices": [[9], [8]]}
    with pytest.raises(ValueError, match=r"DistillKit.*YAML"):
        import_teacher(rows_of([row]), tokenizer=tokenizer, teacher="t")


@pytest.mark.parametrize("column", ["logprobs", "token_logprobs", "completion_logprobs"])
def test_sampled_token_logprobs_are_refused_with_the_reason(tokenizer, column):
    with pytest.raises(ValueError, match=rf"`{column}`.*sampled token alone"):
        import_teacher(rows_of([{"input_ids": [1, 2], column: [-0.5, -1.0]}]), tokenizer=tokenizer, teacher="t")


def test_masked_language_models_are_refused_with_the_reason(tokenizer):
    dataset = axolotl_rows(
        labels=lambda row: [-100] * 5 + [(row["input_ids"][5] + 1) % VOCAB] + [-100] * (len(row["input_ids"]) - 6)
    )
    with pytest.raises(ValueError, match=r"row 0 of `dataset`.*labels\[5\].*masked language model"):
        import_teacher(dataset, tokenizer=tokenizer, teacher="t")


def test_unknown_columns_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"\['answer', 'input_ids'\] fit no format.*axolotl"):
        detect_format({"input_ids": [1], "answer": "x"})


def test_a_shift_the_data_does_not_show_is_refused(tokenizer):
    """A teacher whose best guess is never the text, under either reading."""
    dataset = axolotl_rows(
        target_token_ids=lambda row: [[(i + 25) % VOCAB for i in range(TOP_K)] for _ in row["input_ids"]]
    )
    shuffled = dataset.map(
        lambda row: {"input_ids": [i % 20 for i in row["input_ids"]], "labels": [i % 20 for i in row["input_ids"]]},
        new_fingerprint="low",
    )
    with pytest.raises(ValueError, match=r"`describes` cannot be told.*next.*same"):
        import_teacher(shuffled, tokenizer=tokenizer, teacher="t")
    assert len(import_teacher(shuffled, tokenizer=tokenizer, teacher="t", describes="next")) == 3


def test_a_declared_shift_that_the_data_contradicts_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"`describes` is 'same', but.*Declare 'next'"):
        import_teacher(axolotl_rows(), tokenizer=tokenizer, teacher="t", describes="same")


def test_values_with_two_readings_are_refused(tokenizer):
    low = axolotl_rows(
        target_logprobs=lambda row: [[value - 8 for value in values] for values in row["target_logprobs"]]
    )
    with pytest.raises(ValueError, match=r"`value_kind` cannot be told.*logits"):
        import_teacher(low, tokenizer=tokenizer, teacher="t")
    single = axolotl_rows(
        target_token_ids=lambda row: [ids[:1] for ids in row["target_token_ids"]],
        target_logprobs=lambda row: [[math.exp(values[0])] for values in row["target_logprobs"]],
    )
    with pytest.raises(ValueError, match=r"`value_kind` cannot be told.*single numbers"):
        import_teacher(single, tokenizer=tokenizer, teacher="t")


def test_logits_in_a_column_of_logprobs_are_seen(tokenizer):
    dataset = axolotl_rows(
        target_logprobs=lambda row: [[value + 9 for value in values] for values in row["target_logprobs"]]
    )
    with pytest.raises(ValueError, match="`normalizer`: logits"):
        import_teacher(dataset, tokenizer=tokenizer, teacher="t")
    with pytest.raises(ValueError, match=r"row 0 of `dataset`.*positive value"):
        import_teacher(dataset, tokenizer=tokenizer, teacher="t", value_kind="logprob", normalizer="vocabulary")
    with pytest.raises(ValueError, match=r"row 0 of `dataset`.*a probability is -"):
        import_teacher(
            axolotl_rows(), tokenizer=tokenizer, teacher="t", value_kind="probability", normalizer="vocabulary"
        )


def test_ids_beyond_the_tokenizer_are_refused_by_row(tokenizer):
    dataset = axolotl_rows(target_token_ids=lambda row: [[*ids[:-1], VOCAB + 3] for ids in row["target_token_ids"]])
    with pytest.raises(ValueError, match=r"row 0 of `dataset`.*outside 0..49"):
        import_teacher(dataset, tokenizer=tokenizer, teacher="t")


def test_nan_is_refused_by_row(tokenizer):
    rows = list(axolotl_rows())
    rows[1]["target_logprobs"][12][2] = math.nan
    with pytest.raises(ValueError, match=r"row 1 of `dataset`.*NaN"):
        import_teacher(
            rows_of(rows),
            tokenizer=tokenizer,
            teacher="t",
            value_kind="logprob",
            describes="next",
            normalizer="vocabulary",
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": lambda row: row["labels"][:-1]}, r"row 0 of `dataset`.*`labels` has 20 entries"),
        (
            {"target_logprobs": lambda row: row["target_logprobs"][:-3]},
            r"row 0 of `dataset`.*5 candidates and 0 values",
        ),
        ({"target_logprobs": lambda row: [v[:-1] for v in row["target_logprobs"]]}, r"5 candidates and 4 values"),
        ({"target_token_ids": lambda row: row["target_token_ids"] * 2}, r"42 entries for 21 tokens"),
    ],
)
def test_unequal_lengths_are_refused_by_row(tokenizer, changes, words):
    with pytest.raises(ValueError, match=words):
        import_teacher(axolotl_rows(**changes), tokenizer=tokenizer, teacher="t")


@pytest.mark.parametrize("name", ["source", "value_kind", "describes", "normalizer", "layout"])
def test_unknown_choices_are_refused(tokenizer, name):
    with pytest.raises(ValueError, match=rf"`{name}` is 'other'"):
        import_teacher(axolotl_rows(), tokenizer=tokenizer, teacher="t", **{name: "other"})


def test_empty_and_incomplete_datasets(tokenizer):
    with pytest.raises(ValueError, match="`dataset` is empty"):
        import_teacher(axolotl_rows().select([]), tokenizer=tokenizer, teacher="t")
    with pytest.raises(ValueError, match=r"lacks the columns.*topk_logits"):
        import_teacher(axolotl_rows(), tokenizer=tokenizer, teacher="t", source="nemo_aligner")


def test_numbers_may_be_of_any_type(tokenizer):
    """Half precision in the source: the mass outside the support is what its numbers leave."""
    dataset = axolotl_rows(
        target_logprobs=lambda row: [
            np.asarray(v, np.float16).astype(np.float32).tolist() for v in row["target_logprobs"]
        ]
    )
    assert_imported(import_teacher(dataset, tokenizer=tokenizer, teacher="t"), tolerance=4e-3)
