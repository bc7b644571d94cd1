"""
What a model family does to its head's output before it calls the result logits: `softcap * tanh(scale * u / softcap)`
with `u = hidden @ weight.T + bias`. `read_logit_transform` is the one table of families; a family that is missing here
still works, through its own head code (`head.py`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """
    Elementwise map from the head's raw output to the model's logits.

    Args:
        scale (`float`, *optional*, defaults to `1.0`):
            Factor of the raw output, before the soft-cap.
        softcap (`float`, *optional*):
            `softcap * tanh(x / softcap)` bounds the logits. `None` for no bound.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self):
        if not abs(self.scale) < float("inf"):
            raise ValueError(f"`logit_scale` must be a finite number, got {self.scale}.")
        if self.softcap is not None and not 0.0 < self.softcap < float("inf"):
            raise ValueError(
                f"`final_logit_softcapping` must be a positive finite number or `None`, got {self.softcap}."
            )

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and self.softcap is None

    def __call__(self, raw: Tensor) -> Tensor:
        """Logits of the head's raw output, any shape, differentiable."""
        logits = raw * self.scale if self.scale != 1.0 else raw
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """`d logits / d raw`, from the logits."""
        return self.scale if self.softcap is None else self.scale * (1 - (logits / self.softcap).square())


def _softcap(config: Any) -> float | None:
    # Gemma 2/3/3n/4, VaultGemma, NanoChat; RecurrentGemma; xLSTM
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if (value := getattr(config, name, None)) is not None:
            return float(value)
    return None


def _scale(config: Any) -> float:
    # HyperCLOVA X multiplies by the name that the Granite family divides by
    if (value := getattr(config, "logits_scaling", None)) is not None:
        return float(value) if config.model_type == "hyperclovax" else 1.0 / float(value)
    # MiniCPM3 divides the hidden states, which for a linear head is the same
    if (value := getattr(config, "dim_model_base", None)) is not None:
        return float(value) / float(config.hidden_size)
    # Cohere; Falcon-H1; Muse. MPT has a `logit_scale` of None
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        if isinstance(value := getattr(config, name, None), (int, float)):
            return float(value)
    return 1.0


def read_logit_transform(config: Any) -> LogitTransform:
    """The transform that a model's (text) config stands for."""
    return LogitTransform(scale=_scale(config), softcap=_softcap(config))
