"""Students made from their teacher: drop decoder layers, then distil to heal what is left."""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# Configuration lists that hold layer numbers; every other list as long as the model is deep holds one entry a layer.
_LAYER_NUMBER_LISTS = ("mlp_only_layers",)


def drop_layers(model: "PreTrainedModel", layers: Iterable[int]) -> "PreTrainedModel":
    """
    Copy of a causal language model without some of its decoder layers.

    What is left is renumbered (the cache is addressed by layer number), the per-layer lists of the configuration
    (`layer_types` and the like) are cut with it, and a model built from the new configuration alone is compared with
    the copy, so that the student loads again from what `save_pretrained` writes.

    Args:
        model (`PreTrainedModel`): Left as it was.
        layers (`Iterable[int]`): Numbers of the layers to drop, from 0.

    Returns:
        `PreTrainedModel`: The student, of the same class, dtype and device; in training mode if `model` is.

    Raises:
        ValueError: `layers` names a layer twice, one that does not exist, none or all; the model is quantised; or its
            family decides by layer number what a layer is, so that no configuration describes the student.
    """
    layers = [int(layer) for layer in layers]
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"`model` ({type(model).__name__}) is quantised and a student is trained in full precision: load it "
            "dequantised first."
        )
    owner, name = _find_layers(model)
    stack = getattr(owner, name)
    depth = len(stack)
    unknown = [layer for layer in layers if not 0 <= layer < depth]
    if unknown or len(set(layers)) != len(layers) or not 0 < len(layers) < depth:
        raise ValueError(
            f"`layers={layers}` must name at least one and not all of the layers 0 to {depth - 1} of "
            f"{type(model).__name__}, each once."
        )

    kept = [layer for layer in range(depth) if layer not in set(layers)]
    # The copy is taken of the shortened model: the dropped layers are never held twice.
    try:
        setattr(owner, name, nn.ModuleList(stack[layer] for layer in kept))
        student = copy.deepcopy(model)
    finally:
        setattr(owner, name, stack)

    student.config = model.config.__class__.from_dict(copy.deepcopy(model.config.to_dict()))
    student.config._attn_implementation = model.config._attn_implementation
    cut_config(student.config.get_text_config(), kept)
    student_owner, student_name = _find_layers(student)
    for number, layer in enumerate(getattr(student_owner, student_name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    _share_config(student, model.config)
    _check_config_describes(student)
    return student


def cut_config(config: "PretrainedConfig", kept: list[int]) -> None:
    """Cuts the layer count and the per-layer lists of a text configuration to the `kept` layers, in place."""
    depth = config.num_hidden_layers
    renumbered = {old: new for new, old in enumerate(kept)}
    for key, value in list(config.__dict__.items()):
        if key in _LAYER_NUMBER_LISTS and value:
            setattr(config, key, [renumbered[layer] for layer in value if layer in renumbered])
        elif isinstance(value, list | tuple) and len(value) == depth:
            setattr(config, key, type(value)(value[layer] for layer in kept))
    config.num_hidden_layers = len(kept)
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = sum(layer < config.max_window_layers for layer in kept)


def _find_layers(model: "PreTrainedModel") -> tuple[nn.Module, str]:
    """(module, attribute) of the decoder's stack of layers."""
    depth = model.config.get_text_config().num_hidden_layers
    found = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == depth
    ]
    if len(found) != 1:
        raise ValueError(
            f"`model`: {type(model).__name__} has {len(found)} lists of {depth} modules; `drop_layers` needs exactly "
            "one, the decoder's layers."
        )
    return found[0]


def _share_config(student: "PreTrainedModel", old: "PretrainedConfig") -> None:
    """Points every submodule that held (a part of) the old configuration to the student's."""
    old_text = old.get_text_config()
    for module in student.modules():
        config = module.__dict__.get("config")
        if config is None or config is student.config:
            continue
        same_text = type(config) is type(old_text)
        module.config = student.config.get_text_config() if same_text else student.config


def _check_config_describes(student: "PreTrainedModel") -> None:
    with torch.device("meta"):
        rebuilt = type(student)(copy.deepcopy(student.config))
    expected = {name: tuple(p.shape) for name, p in rebuilt.state_dict().items()}
    actual = {name: tuple(p.shape) for name, p in student.state_dict().items()}
    differing = sorted(set(expected.items()) ^ set(actual.items()))
    if differing:
        raise ValueError(
            f"`layers`: without them {type(student).__name__} no longer matches any configuration of its family "
            f"(first difference: {differing[0][0]}), because the family decides by layer number what a layer is. Drop "
            "whole periods of its pattern, or other layers."
        )
