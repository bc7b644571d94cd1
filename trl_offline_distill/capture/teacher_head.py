"""Logits of a chunk of hidden states, by the model's own head code."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..loss.logit_transform import read_logit_transform


_CHECK_TOKENS = 5
# Relative to the largest logit: the two ways may pick different GEMM kernels.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 2e-2


class _BackboneOutput(OrderedDict):
    """Stands for any backbone output: the chunk as `last_hidden_state` and first entry, `None` for all else."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__(last_hidden_state=hidden_states)
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key == 0 else None if isinstance(key, int) else super().__getitem__(key)


class _StubBackbone(nn.Module):
    """Returns a given chunk instead of running the backbone; everything else is answered by the real one."""

    def __init__(self, backbone: nn.Module, hidden_states: Tensor) -> None:
        super().__init__()
        self.__dict__["_backbone"] = backbone
        self.__dict__["_hidden_states"] = hidden_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_backbone"], name)

    def forward(self, *args: Any, **kwargs: Any) -> _BackboneOutput:
        return _BackboneOutput(self.__dict__["_hidden_states"])


def teacher_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The map from hidden states `[n, H]` to logits `[n, V]`, compared once with `model(...).logits`.

    The model's own causal forward runs with its backbone replaced by a stub that returns the chunk, so every scale,
    soft-cap, bias, adapter and quantised weight of the head is applied as the model applies it. A model that does not
    go through its backbone attribute (OPT) is asked for its output embedding instead, if its family has no transform.

    Raises:
        ValueError: if neither way gives the model's logits; names the class.
    """
    prefix = model.base_model_prefix
    if not isinstance(getattr(model, prefix, None), nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no backbone under {prefix!r}, so its hidden states cannot be taken apart from its "
            "head. Use a causal language model of transformers."
        )

    def own_code(hidden_states: Tensor) -> Tensor:
        backbone = getattr(model, prefix)
        input_ids = torch.zeros((1, len(hidden_states)), dtype=torch.long, device=hidden_states.device)
        setattr(model, prefix, _StubBackbone(backbone, hidden_states[None]))
        try:
            return model(input_ids=input_ids, use_cache=False).logits[0]
        finally:
            setattr(model, prefix, backbone)

    def output_embedding(hidden_states: Tensor) -> Tensor:
        return model.get_output_embeddings()(hidden_states)

    roads = [own_code]
    if model.get_output_embeddings() is not None and read_logit_transform(model.config.get_text_config()).is_identity:
        roads.append(output_embedding)
    wanted, hidden_states = _sample(model)
    tolerance = _TOLERANCE.get(wanted.dtype, _LOW_PRECISION_TOLERANCE) * float(wanted.abs().max())
    differences = []
    for road in roads:
        found = road(hidden_states)
        if found.shape == wanted.shape:
            differences.append(float((found - wanted).abs().max()))
            if differences[-1] <= tolerance:
                return road
    raise ValueError(
        f"The logits of {type(model).__name__} cannot be formed from its last hidden state (largest difference to "
        f"model(...).logits: {min(differences, default=float('inf')):.3g}, allowed {tolerance:.3g}); this teacher is not "
        "supported by the transformers engine. Serve it and use `ServerTeacher`."
    )


@torch.no_grad()
def _sample(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """`model(...).logits` `[n, V]` and the hidden states `[n, H]` behind them, for a few fixed tokens."""
    embeddings = model.get_input_embeddings().weight
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = (torch.arange(1, _CHECK_TOKENS + 1, device=embeddings.device) * 7919 % vocab_size)[None]
    wanted = model(input_ids=input_ids, use_cache=False).logits[0]
    hidden_states = getattr(model, model.base_model_prefix)(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    return wanted, hidden_states
