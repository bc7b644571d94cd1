"""Offline top-K distillation for TRL: cache the teacher once, train students without it."""

import importlib
from typing import TYPE_CHECKING


__version__ = "0.1.0"

# Public name -> module that defines it. Nothing heavy is imported until a name is asked for.
_PUBLIC = {
    "DataCollatorForOfflineDistillation": "data_collator",
    "OfflineDistillationConfig": "offline_distillation_config",
    "OfflineDistillationTrainer": "offline_distillation_trainer",
    "TeacherTopK": "teacher_cache.topk",
    "build_distillation_dataset": "capture.build",
    "decode_topk": "teacher_cache.codecs",
    "drop_layers": "healing",
    "encode_topk": "teacher_cache.codecs",
    "fused_distillation_loss": "loss.fused",
}

__all__ = sorted([*_PUBLIC, "__version__"])

if TYPE_CHECKING:
    from .capture.build import build_distillation_dataset
    from .data_collator import DataCollatorForOfflineDistillation
    from .healing import drop_layers
    from .loss.fused import fused_distillation_loss
    from .offline_distillation_config import OfflineDistillationConfig
    from .offline_distillation_trainer import OfflineDistillationTrainer
    from .teacher_cache.codecs import decode_topk, encode_topk
    from .teacher_cache.topk import TeacherTopK


def __getattr__(name: str):
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
