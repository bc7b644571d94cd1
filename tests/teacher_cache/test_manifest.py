import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_offline_distill.teacher_cache import TeacherManifest, chat_template_hash, check_student, tokenizer_fingerprint


def word_tokenizer(words: list[str], **kwargs) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **kwargs)


MANIFEST = TeacherManifest(
    teacher="org/teacher",
    tokenizer_fingerprint=tokenizer_fingerprint(word_tokenizer(["a", "b", "c"])),
    vocab_size=3,
    top_k=2,
    tail_temperatures=(2.0, 4.0),
    dtype="bfloat16",
)


def test_json_is_canonical_and_comes_back():
    text = MANIFEST.to_json()
    assert TeacherManifest.from_json(text) == MANIFEST
    assert TeacherManifest.from_json(text).to_json() == text
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert "dataset" not in json.loads(text)
    assert json.loads(text)["format_version"] == 1


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", None])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(ValueError, match="`teacher_manifest`"):
        TeacherManifest.from_json(text)


def test_other_versions_and_fields_are_refused_by_name():
    fields = json.loads(MANIFEST.to_json())
    with pytest.raises(ValueError, match="format_version 7"):
        TeacherManifest.from_json(json.dumps({**fields, "format_version": 7}))
    with pytest.raises(ValueError, match="speed"):
        TeacherManifest.from_json(json.dumps({**fields, "speed": 1}))
    del fields["top_k"]
    with pytest.raises(ValueError, match=r"lacks.*top_k"):
        TeacherManifest.from_json(json.dumps(fields))


def test_differences_name_both_sides():
    other = replace(MANIFEST, top_k=5, dtype=None)
    assert MANIFEST.differences(other) == {"top_k": (2, 5), "dtype": ("bfloat16", None)}
    assert MANIFEST.differences(MANIFEST) == {}


def test_fingerprint_sees_ids_and_special_tokens_and_not_roles():
    base = tokenizer_fingerprint(word_tokenizer(["a", "b", "c", "</s>"]))
    assert tokenizer_fingerprint(word_tokenizer(["a", "b", "c", "</s>"])) == base
    assert tokenizer_fingerprint(word_tokenizer(["a", "c", "b", "</s>"])) != base
    assert tokenizer_fingerprint(word_tokenizer(["a", "b", "c", "</s>", "d"])) != base
    special = word_tokenizer(["a", "b", "c", "</s>"], eos_token="</s>")
    assert tokenizer_fingerprint(special) != base
    padded = word_tokenizer(["a", "b", "c", "</s>"], eos_token="</s>", pad_token="</s>")
    assert tokenizer_fingerprint(padded) == tokenizer_fingerprint(special)
    padded.add_tokens(AddedToken("<new>", special=True))
    assert tokenizer_fingerprint(padded) != tokenizer_fingerprint(special)


def test_fingerprint_of_a_processor_is_its_tokenizer():
    tokenizer = word_tokenizer(["a", "b"])
    processor = type("Processor", (), {"tokenizer": tokenizer})()
    assert tokenizer_fingerprint(processor) == tokenizer_fingerprint(tokenizer)


def test_chat_template_hash():
    assert chat_template_hash(None) is None
    assert chat_template_hash("{{ a }}") == chat_template_hash("{{ a }}") != chat_template_hash("{{ b }}")


def test_check_student_accepts_its_own_tokenizer_and_wider_heads():
    check_student(MANIFEST, tokenizer=word_tokenizer(["a", "b", "c"]), head_rows=3)
    check_student(
        [MANIFEST, replace(MANIFEST, teacher="other")], tokenizer=word_tokenizer(["a", "b", "c"]), head_rows=64
    )


def test_check_student_names_both_sides():
    with pytest.raises(ValueError, match=rf"(?s)org/teacher.*{MANIFEST.tokenizer_fingerprint}"):
        check_student(MANIFEST, tokenizer=word_tokenizer(["a", "c", "b"]))
    with pytest.raises(ValueError, match=r"head has 2 rows.*org/teacher.*vocab_size=3"):
        check_student(MANIFEST, head_rows=2)
    with pytest.raises(ValueError, match=r"org/teacher.*org/stranger.*different tokenizers"):
        check_student([MANIFEST, replace(MANIFEST, teacher="org/stranger", tokenizer_fingerprint="0" * 32)])
    with pytest.raises(ValueError, match="no manifest"):
        check_student([])
