"""
What each rank of `test_ranks.py` runs: every scenario of a group in one process, results saved by rank 0.

Usage: `python ranks.py GROUP FOLDER`, with the environment that `torchrun` sets. With `WORLD_SIZE` 1 the same
scenarios run on the union of the ranks' batches.
"""

import contextlib
import functools
import os
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from tiny_students import FEATURES, cached_dataset, make_trainer, tiny_model, token_rows
from transformers import AutoModelForCausalLM


WORLD = int(os.environ.get("WORLD_SIZE", "1"))
# Rows come in pairs, one for each rank: 2 and 20 trained tokens, then 5 and none, then 9 and 3
LENGTHS, PROMPTS = [6, 24, 8, 7, 12, 10], [4, 4, 3, 7, 3, 7]


# Filled in by the group: what shards the student, and the folder that students are loaded from
SHARDING, STUDENTS = {}, Path()


@functools.cache
def cache() -> Dataset:
    return cached_dataset(token_rows(LENGTHS, prompt=PROMPTS), tiny_model(seed=1).eval())


def student(family):
    """Loaded, as users load theirs: under ZeRO-3 that gives parameters in pieces."""
    return AutoModelForCausalLM.from_pretrained(STUDENTS / family, dtype=torch.float32)


def options(**overrides):
    """One row a rank, or all of them on one."""
    return {
        "per_device_train_batch_size": 2 // WORLD,
        "per_device_eval_batch_size": 2 // WORLD,
        "ddp_backend": "gloo" if WORLD > 1 else None,
        "ce_weight": 0.5,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        **SHARDING,
        **overrides,
    }


def whole(model) -> dict[str, torch.Tensor]:
    """Parameters, gathered if they are sharded."""
    gathered = {}
    for name, parameter in model.named_parameters():
        with gather_context(parameter):
            parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            gathered[name] = parameter.detach().clone()
    return gathered


def gather_context(parameter):
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def outcome(trainer) -> dict:
    return {"parameters": whole(trainer.model), "log": trainer.state.log_history}


def run(folder, dataset=None, family="llama", eval_dataset=None, resume=None, trainer_kwargs=None, **overrides):
    trainer = make_trainer(
        folder,
        student(family),
        cache() if dataset is None else dataset,
        eval_dataset=eval_dataset,
        trainer_kwargs=trainer_kwargs,
        **options(**overrides),
    )
    trainer.train(resume_from_checkpoint=resume)
    return {**outcome(trainer), "wrapper": type(trainer.model_wrapped).__name__}


def lora(*targets):
    from peft import LoraConfig, TaskType

    return {"peft_config": LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=list(targets))}


# Before, torch could not load what a process that calls its CPU `cpu:0` had saved
RESUMES_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def interrupted(folder, **overrides):
    """Three steps at once, and two steps, then the third after a resume."""
    if not RESUMES_ON_CPU:
        return None
    saving = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-2, **overrides}
    at_once = run(folder, **saving)
    resumed = run(folder, resume=str(Path(folder) / "checkpoint-2"), **saving)
    return {"parameters": at_once["parameters"], "log": at_once["log"], "resumed": resumed}


def refused(scenario) -> dict:
    try:
        scenario()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


def damaged(folder):
    """A row that only one rank checks: every rank stops, with the same words."""
    bad = cache().to_list()
    bad[5]["teacher_topk"] = [b"\xf0\x06ab"] * 10
    return refused(lambda: run(folder, Dataset.from_list(bad, features=FEATURES)))


def evaluated(folder, **overrides):
    """Five rows on two ranks: the last batch is filled up."""
    trainer = make_trainer(
        folder, student("llama"), cache(), eval_dataset=cache().select([0, 1, 2, 4, 5]), **options(**overrides)
    )
    return {"metrics": trainer.evaluate(), "rows": len(trainer.eval_dataset)}


def evaluated_packed(folder):
    """Three packs of one or two rows, two a rank: the last batch repeats the first pack."""
    return evaluated(
        folder,
        eval_packing=True,
        max_length=24,
        per_device_eval_batch_size=4 // WORLD,
        dataset_kwargs={"skip_prepare_dataset": False},
    )


DDP = {
    "plain": lambda f: run(f),
    "means of ranks": lambda f: run(f, average_tokens_across_devices=False),
    "accumulated": lambda f: run(f, gradient_accumulation_steps=3),
    "streamed": lambda f: run(f, cache().to_iterable_dataset(), max_steps=3),
    "flattened": lambda f: run(f, padding_free=True),
    "adapter on the head": lambda f: run(f, trainer_kwargs=lora("q_proj", "lm_head")),
    "tied": lambda f: run(f, family="tied"),
    "positions": lambda f: run(f, kd_position_fraction=0.5),
    "interrupted": interrupted,
    "evaluated": evaluated,
    "evaluated flat": lambda f: evaluated(f, padding_free=True),
    "evaluated packed": evaluated_packed,
    "damaged": damaged,
}
SHARDED = {
    "plain": lambda f: run(f),
    "accumulated": lambda f: run(f, gradient_accumulation_steps=3),
    "tied": lambda f: run(f, family="tied"),
    "recompute": lambda f: run(f, loss_backward="recompute", loss_chunk_size=3),
    "bf16": lambda f: run(f, bf16=True),
    "adapter": lambda f: run(f, trainer_kwargs=lora("q_proj")),
    "adapter on the head": lambda f: refused(lambda: run(f, trainer_kwargs=lora("q_proj", "lm_head"))),
    "interrupted": interrupted,
    # Accelerate shards a model only together with its optimizer, so evaluation comes within training
    "evaluated in training": lambda f: run(f, eval_dataset=cache().select([0, 1, 2, 4, 5]), eval_strategy="epoch"),
}


def use_fsdp2_on_cpu():
    """Accelerate shards only on accelerators it knows; the code that shards runs on a CPU too."""
    initialise = PartialState.__init__

    def initialise_as_accelerator(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialise_as_accelerator
    SHARDING["fsdp"] = True
    SHARDING["fsdp_config"] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
    }


def use_zero(stage: int):
    SHARDING["deepspeed"] = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,  # plain SGD
        "zero_force_ds_cpu_optimizer": False,
    }


def main():
    global STUDENTS
    group, folder = sys.argv[1], Path(sys.argv[2])
    rank = os.environ.get("RANK", "0")
    STUDENTS = folder / f"students-{group}-{WORLD}-{rank}"
    for family in ("llama", "tied"):
        tiny_model(family).save_pretrained(STUDENTS / family)
    cache()
    if WORLD > 1 and group == "fsdp2":
        use_fsdp2_on_cpu()
    elif WORLD > 1 and group.startswith("zero"):
        use_zero(int(group[-1]))
    results = {
        name: scenario(folder / f"{group}-{WORLD}-{name.replace(' ', '-')}")
        for name, scenario in (DDP if group == "ddp" else SHARDED).items()
    }
    if rank == "0":
        torch.save(results, folder / f"{group}-{WORLD}.pt")
    elif group == "ddp":
        torch.save(results["damaged"], folder / "damaged-1.pt")


if __name__ == "__main__":
    main()
