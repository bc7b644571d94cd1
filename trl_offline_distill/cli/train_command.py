"""`trl-offline-distill train`: reads the options, then hands the run to `accelerate launch`."""

import importlib.resources
import logging
import os
import subprocess
from pathlib import Path

from . import UsageError, check_output, nearest, reading


SCRIPT = "trl_offline_distill.cli.train_script"


def run(argv: list[str]) -> int:
    from .arguments import expand, parse
    from .train_script import make_parser

    if {"-h", "--help", "--help_all"} & set(argv):
        print(_help("--help_all" in argv))
        return 0
    from accelerate.commands.launch import launch_command, launch_command_parser

    argv = _take_token(expand(argv, "train.yaml"))
    launch_parser = launch_command_parser()
    launch_names = {
        option.lstrip("-").replace("-", "_") for action in launch_parser._actions for option in action.option_strings
    }
    script, training, model, mixture, launch_arguments = parse(
        make_parser(), argv, extra=launch_names | {"accelerate_config"}
    )
    _check(script, training, model, mixture)
    own_arguments = _without(argv, launch_arguments)
    launch = launch_parser.parse_args([*_with_config_file(launch_arguments), "--module", SCRIPT, *own_arguments])
    # It lists the options that it was not given; its defaults are what a plain `train` means.
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    try:
        launch_command(launch)
    except subprocess.CalledProcessError as error:
        # The launched process has said what was wrong.
        if os.environ.get("TRL_OFFLINE_DISTILL_TRACEBACK"):
            raise
        return error.returncode
    return 0


def _check(script, training, model, mixture) -> None:
    """What is wrong is said at once, not by every launched process."""
    from transformers import AutoConfig

    from .train_script import check

    check(script, model, mixture)
    check_output("output_dir", training.output_dir)
    hint = "See the first lines of `recipes show NAME` for the steps before, if it is a recipe's."
    with reading("model_name_or_path", model.model_name_or_path, hint):
        AutoConfig.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            trust_remote_code=training.trust_remote_code,
        )
    if script.dataset_name is not None:
        with reading("dataset_name", script.dataset_name, hint):
            pass


def _help(everything: bool) -> str:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    from ..offline_distillation_config import OfflineDistillationConfig
    from .arguments import field_names, help_text
    from .train_script import make_parser

    groups = {
        "student and cached dataset": ("model_name_or_path", *field_names(ScriptArguments), "output_dir"),
        "objective": field_names(OfflineDistillationConfig, without=SFTConfig),
        "run": (
            *("max_length", "packing", "padding_free", "per_device_train_batch_size", "gradient_accumulation_steps"),
            *("learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps", "optim", "bf16"),
            *("gradient_checkpointing", "eval_strategy", "eval_steps", "logging_steps", "save_steps", "seed"),
            *("report_to", "resume_from_checkpoint", "push_to_hub", "hub_model_id"),
        ),
        "model and LoRA": field_names(ModelConfig),
    }
    if everything:
        groups["a mixture of cached datasets (in YAML)"] = field_names(DatasetMixtureConfig)
        return help_text(make_parser(), groups, rest="everything else that SFTConfig takes")
    return help_text(make_parser(), groups) + "\n\n--help_all lists every option of SFTConfig as well."


def _take_token(argv: list[str]) -> list[str]:
    """Moves `--hub_token` into the environment: the arguments of a process are listed and printed when it fails."""
    kept = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--hub_token", "--hub-token"):
            os.environ["HF_TOKEN"] = value if equals else next(words, "")
        else:
            kept.append(word)
    return kept


def _without(words: list[str], taken: list[str]) -> list[str]:
    """`words` less the ordered subsequence of them that `taken` holds."""
    rest = list(taken)
    kept = []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            kept.append(word)
    return kept


def _with_config_file(words: list[str]) -> list[str]:
    """Turns `--accelerate_config NAME_OR_FILE` into accelerate's `--config_file`."""
    if "--accelerate_config" not in words:
        return words
    at = words.index("--accelerate_config")
    if at + 1 == len(words):
        raise UsageError("`--accelerate_config` takes a file or a name.")
    name = words[at + 1]
    shipped = {}
    # TRL's are found too; one of ours with the same name comes first.
    for package in ("trl", "trl_offline_distill"):
        folder = importlib.resources.files(package) / "accelerate_configs"
        if folder.is_dir():
            shipped |= {Path(file.name).stem: file for file in folder.iterdir() if file.name.endswith(".yaml")}
    if not Path(name).is_file() and name not in shipped:
        raise UsageError(
            f"`--accelerate_config {name}` is neither a file nor a shipped configuration{nearest(name, shipped)} "
            f"({', '.join(sorted(shipped))})."
        )
    return ["--config_file", name if Path(name).is_file() else str(shipped[name]), *words[:at], *words[at + 2 :]]
