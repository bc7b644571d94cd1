"""What is stored of a teacher: the signal, its codec, and the manifest that says what made it."""

from .codecs import LAYOUTS, decode_topk, encode_topk, select_support, topk_from_logprobs
from .manifest import TeacherManifest, chat_template_hash, check_student, tokenizer_fingerprint
from .topk import TeacherTopK


__all__ = [
    "LAYOUTS",
    "TeacherManifest",
    "TeacherTopK",
    "chat_template_hash",
    "check_student",
    "decode_topk",
    "encode_topk",
    "select_support",
    "tokenizer_fingerprint",
    "topk_from_logprobs",
]
