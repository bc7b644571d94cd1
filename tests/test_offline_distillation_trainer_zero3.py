"""
ZeRO-3 by its gather context: a head that is empty outside of it. `distributed/test_ranks.py` runs DeepSpeed itself
where it is installed.
"""

import contextlib
import importlib.machinery
import sys
import types
from enum import Enum

import pytest
import torch
from peft import LoraConfig
from tiny_students import assert_same_parameters, cached_dataset, losses_of, make_trainer, tiny_model, token_rows


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


@pytest.fixture
def deepspeed(monkeypatch):
    """`deepspeed.zero.GatheredParameters`, and how often it was entered."""
    module = types.ModuleType("deepspeed")
    module.__spec__ = importlib.machinery.ModuleSpec("deepspeed", None)  # accelerate asks; it finds no distribution
    module.entered = 0

    @contextlib.contextmanager
    def gathered(parameters):
        module.entered += 1
        for parameter in parameters:
            assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
            parameter.data, parameter.ds_status = parameter.ds_whole, ZeroParamStatus.AVAILABLE
        try:
            yield
        finally:
            for parameter in parameters:
                partition(parameter)

    module.zero = types.SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    return module


def partition(parameter):
    parameter.ds_id, parameter.ds_status = 0, ZeroParamStatus.NOT_AVAILABLE
    parameter.ds_whole, parameter.ds_numel, parameter.ds_shape = parameter.data, parameter.numel(), parameter.shape
    parameter.data = torch.empty(0)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_head_that_is_empty_outside_the_gather_context(tmp_path, deepspeed, backward):
    cache = cached_dataset(token_rows([6, 9, 4], prompt=2), tiny_model(seed=1).eval())
    options = {
        "trainer_kwargs": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")},
        "eval_dataset": cache,
        "ce_weight": 0.5,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "loss_backward": backward,
    }
    plain = make_trainer(tmp_path, tiny_model(), cache, **options)
    plain.train()
    student = tiny_model()
    partition(student.lm_head.weight)
    trainer = make_trainer(tmp_path, student, cache, **options)
    assert "linear head" in trainer.head_description
    assert (deepspeed.entered, student.lm_head.weight.numel()) == (1, 0)  # the check of the head
    trainer.train()
    # Each of two steps, twice where the backward projects again, and each of two evaluations
    assert deepspeed.entered == 1 + (2 if backward == "in_forward" else 4) + 2
    assert student.lm_head.weight.numel() == 0
    assert losses_of(trainer) == losses_of(plain)
    evaluated = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (trainer, plain)]
    assert evaluated[0] == evaluated[1]
    student.lm_head.weight.data = student.lm_head.weight.ds_whole
    assert_same_parameters(trainer.model, plain.model, atol=0.0)
