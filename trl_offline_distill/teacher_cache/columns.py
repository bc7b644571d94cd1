"""The columns of a cached dataset."""

from datasets import Features, List, Value


FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "teacher_topk": List(Value("large_binary")),
        "teacher_manifest": Value("string"),
    }
)
