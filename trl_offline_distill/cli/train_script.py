"""One process of a training, as `trl-offline-distill train` launches it through `accelerate launch`."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    from trl_offline_distill import OfflineDistillationConfig


def make_parser() -> "TrlParser":
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    from trl_offline_distill import OfflineDistillationConfig
    from trl_offline_distill.cli.arguments import make_parser

    return make_parser(
        [ScriptArguments, OfflineDistillationConfig, ModelConfig, DatasetMixtureConfig],
        "train",
        "Train a student on a cached dataset. What `accelerate launch` takes is passed on to it (--num_processes 2, "
        "--accelerate_config fsdp2 ...).",
    )


def load_cached(
    script: "ScriptArguments", mixture: "DatasetMixtureConfig"
) -> "DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]":
    """The cached dataset, by split: a Hub name, a folder of Parquet files, or a folder written by `save_to_disk`."""
    from datasets import Dataset, DatasetDict, get_dataset_split_names, load_from_disk
    from trl import get_dataset

    from trl_offline_distill.teacher_cache.hub import load_cache

    if mixture.datasets:
        return get_dataset(mixture)
    folder = Path(script.dataset_name)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        loaded = load_from_disk(script.dataset_name)
        return DatasetDict({script.dataset_train_split: loaded}) if isinstance(loaded, Dataset) else loaded
    return {
        split: load_cache(script.dataset_name, script.dataset_config, split=split, streaming=script.dataset_streaming)
        for split in get_dataset_split_names(script.dataset_name, script.dataset_config)
    }


def dequantisation(model: "ModelConfig", trust_remote_code: bool) -> object | None:
    """
    Configuration that loads an MXFP4 student as bf16, which is the only way to train one; `None` for other students.

    Returns:
        `transformers.Mxfp4Config`, or what the arguments ask for themselves.
    """
    from transformers import AutoConfig, Mxfp4Config
    from trl import get_quantization_config

    asked = get_quantization_config(model)
    config = AutoConfig.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=trust_remote_code
    )
    stored = getattr(config, "quantization_config", None) or {}
    if asked is not None or stored.get("quant_method") != "mxfp4":
        return asked
    return Mxfp4Config(dequantize=True)


def check(script: "ScriptArguments", model: "ModelConfig", mixture: "DatasetMixtureConfig") -> None:
    """
    What can be said before anything is loaded.

    Raises:
        UsageError: names the option, its value and the fix.
    """
    from trl import ModelConfig

    from trl_offline_distill.cli import UsageError

    if model.model_name_or_path is None:
        raise UsageError("`model_name_or_path` is required: the student, by Hub name or path.")
    if bool(script.dataset_name) == bool(mixture.datasets):
        raise UsageError("Name the cached dataset by `dataset_name` or by `datasets`: exactly one of them.")
    if not model.use_peft:
        plain = ModelConfig()
        unused = [
            item.name
            for item in dataclasses.fields(model)
            if item.name.startswith("lora_") and getattr(model, item.name) != getattr(plain, item.name)
        ]
        if unused:
            raise UsageError(
                f"`{unused[0]}={getattr(model, unused[0])}` has no effect without `use_peft`, and every parameter "
                "would be trained. Set `use_peft: true`, or leave it out."
            )


def adapter(model: "ModelConfig") -> object | None:
    """
    `peft.LoraConfig` of the arguments, or `None` without `use_peft`. TRL makes a pattern of a single target module,
    and a pattern must match a module's whole path; a plain name stays a name here.
    """
    from trl import get_peft_config

    config = get_peft_config(model)
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets):
        config.target_modules = {targets}
    return config


def main(
    script: "ScriptArguments",
    training: "OfflineDistillationConfig",
    model: "ModelConfig",
    mixture: "DatasetMixtureConfig",
) -> None:
    from trl_offline_distill import OfflineDistillationTrainer

    check(script, model, mixture)
    quantization = dequantisation(model, training.trust_remote_code)
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    dataset = load_cached(script, mixture)
    wanted = [script.dataset_train_split] + [script.dataset_test_split] * (training.eval_strategy != "no")
    for split in wanted:
        if split not in dataset:
            raise ValueError(
                f"The cached dataset has no split {split!r}, it has {', '.join(map(repr, dataset))}: set "
                "`dataset_train_split` or `dataset_test_split`, or `eval_strategy: no`."
            )
    trainer = OfflineDistillationTrainer(
        model=model.model_name_or_path,
        args=training,
        train_dataset=dataset[wanted[0]],
        eval_dataset=dataset[wanted[1]] if wanted[1:] else None,
        quantization_config=quantization,
        peft_config=adapter(model),
    )
    if type(quantization).__name__ == "Mxfp4Config":
        trainer.accelerator.print("The MXFP4 student was dequantised (see the sizes above): MXFP4 cannot be trained.")
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.save_state()
    trainer.accelerator.print(f"Student saved to {training.output_dir}")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
        trainer.accelerator.print(f"Student pushed to {trainer.hub_model_id}")
    # Closes trackers and the process group; a trainer before transformers 5.18 did both on exit.
    if hasattr(trainer, "end"):
        trainer.end()


def run() -> int:
    """Parses the options again in the launched process, and prints an error as one line."""
    import os
    import sys
    import warnings

    from trl_offline_distill.cli import report
    from trl_offline_distill.cli.arguments import parse

    # TRL's default of an option that transformers is renaming.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    try:
        *parsed, _ = parse(make_parser(), sys.argv[1:])
        main(*parsed)
    except Exception as error:
        if os.environ.get("TRL_OFFLINE_DISTILL_TRACEBACK"):
            raise
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
