import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset, load_dataset, load_from_disk
from mxfp4 import save_tiny_gpt_oss
from safetensors.torch import load_file
from tiny_teachers import make_teacher, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config, set_seed

from trl_offline_distill import build_distillation_dataset
from trl_offline_distill.cli import COMMANDS, main, redact
from trl_offline_distill.cli.build_command import BuildArguments, builder_arguments
from trl_offline_distill.cli.drop_layers_command import parse_layers


TEXTS = [
    "hello world the sky is blue",
    "why is the sun far away",
    "what colour is it now",
    "tell me why the sky is blue",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Teacher, student and texts on disk."""
    folder = tmp_path_factory.mktemp("cli")
    make_teacher().save_pretrained(folder / "teacher")
    make_teacher(seed=1).save_pretrained(folder / "student")
    for name in ("teacher", "student"):
        make_tokenizer().save_pretrained(folder / name)
    (folder / "texts").mkdir()
    Dataset.from_dict({"text": TEXTS}).to_parquet(folder / "texts" / "train.parquet")
    return folder


@pytest.fixture(scope="module")
def cache(folder):
    """What `build` leaves, from a YAML file whose values the command line overrides."""
    config = {"teacher": str(folder / "teacher"), "dataset_name": str(folder / "texts"), "top_k": 3, "max_length": 12}
    (folder / "build.yaml").write_text(yaml.safe_dump(config))
    out = folder / "cache"
    assert main(["build", "--config", str(folder / "build.yaml"), "--top_k", "5", "--output_dir", str(out)]) == 0
    return out


def test_help_and_version(capsys):
    assert main([]) == main(["--help"]) == main(["-h"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "trl-offline-distill 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: trl-offline-distill {command}")
    assert len(out.splitlines()) > 3


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["biuld"]) == 2
    assert "unknown command 'biuld': did you mean 'build'?" in capsys.readouterr().err


def test_build_options_are_the_builders_arguments():
    ours = builder_arguments(BuildArguments(teacher="t"))
    theirs = inspect.signature(build_distillation_dataset).parameters
    # `formatting_func` is code; source name and revision are recorded by `load_dataset`.
    assert set(theirs) - set(ours) == {
        "dataset", "dataset_name", "dataset_revision", "formatting_func", "progress"
    }  # fmt: skip
    assert set(ours) <= set(theirs)
    for name, value in ours.items():
        if name not in ("teacher", "tail_temperatures"):
            assert value == theirs[name].default, name


def test_build_gives_what_the_function_gives(folder, cache):
    built = load_dataset(str(cache), split="train")
    expected = build_distillation_dataset(
        Dataset.from_dict({"text": TEXTS}), make_teacher(), make_tokenizer(), top_k=5, max_length=12, progress=False
    )
    assert built["input_ids"] == expected["input_ids"]
    assert built["labels"] == expected["labels"]
    assert built["teacher_topk"] == expected["teacher_topk"]
    assert max(map(len, built["input_ids"])) <= 12


def train_config(folder, cache, output_dir, **changes) -> dict:
    return {
        "model_name_or_path": str(folder / "student"),
        "dataset_name": str(cache),
        "output_dir": str(output_dir),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        **changes,
    }


def test_train_goes_through_accelerate(folder, cache, tmp_path):
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(train_config(folder, cache, tmp_path / "out")))
    arguments = ["train", "--config", str(tmp_path / "train.yaml"), "--num_processes", "1", "--cpu", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "trl_offline_distill.cli", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "'kd_loss'" in done.stdout
    assert f"Student saved to {tmp_path / 'out'}" in done.stdout
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(folder / "student")
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)


def test_inspect_export_import_and_plot(folder, cache, tmp_path, monkeypatch, capsys):
    assert main(["inspect", str(cache), "--plot", str(tmp_path / "report.png")]) == 0
    out = capsys.readouterr().out
    assert "captured" in out
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", str(cache), "--teacher", str(folder / "teacher"), "--rows", "2"]) == 0
    assert "cache - live" in capsys.readouterr().out
    assert main(["inspect", str(cache), "--decode", "1", "--processing_class", str(folder / "teacher")]) == 0
    assert "trained" in capsys.readouterr().out
    assert main(["inspect", str(cache), "--decode", "99", "--processing_class", str(folder / "teacher")]) == 2
    assert "no such row" in capsys.readouterr().err

    assert main(["export", str(cache), "--output_file", str(tmp_path / "typed.parquet")]) == 0
    typed = load_dataset("parquet", data_files=str(tmp_path / "typed.parquet"), split="train")
    assert "teacher_logprobs" in typed.column_names
    arguments = ["--dataset_data_files", str(tmp_path / "typed.parquet"), "--tokenizer", str(folder / "teacher")]
    assert main(["import", "parquet", *arguments, "--output_dir", str(tmp_path / "back")]) == 0
    again = load_from_disk(str(tmp_path / "back"))
    assert again["teacher_topk"] == load_dataset(str(cache), split="train")["teacher_topk"]

    assert run_script(monkeypatch, tmp_path, train_config(folder, cache, tmp_path / "out", logging_steps=1)) == 0
    assert main(["plot", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "distillation.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(cache)]) == 2
    assert "trainer_state.json" in capsys.readouterr().err


def test_a_mixture_of_datasets_is_built(folder, tmp_path, capsys):
    part = {"path": str(folder / "texts")}
    config = {
        "teacher": str(folder / "teacher"),
        "datasets": [part, part],
        "top_k": 3,
        "output_dir": str(tmp_path / "c"),
    }
    (tmp_path / "build.yaml").write_text(yaml.safe_dump(config))
    assert main(["build", "--config", str(tmp_path / "build.yaml")]) == 0
    assert len(load_dataset(str(tmp_path / "c"), split="train")) == 2 * len(TEXTS)
    assert main(["build", "--config", str(tmp_path / "build.yaml"), "--dataset_split", "test"]) == 1
    assert "the mixture has the splits train" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mxfp4(folder):
    save_tiny_gpt_oss(folder / "mxfp4", vocab_size=len(make_tokenizer()))
    make_tokenizer().save_pretrained(folder / "mxfp4")
    return folder / "mxfp4"


def test_the_mxfp4_checkpoint_of_these_tests_holds_what_it_should(mxfp4):
    packed = load_file(mxfp4 / "model.safetensors")
    assert packed["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (4, 64, 1, 16)
    set_seed(0)
    config = AutoConfig.from_pretrained(mxfp4)
    del config.quantization_config
    exact = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model.layers[0].mlp.experts
    found = AutoModelForCausalLM.from_pretrained(mxfp4, quantization_config=Mxfp4Config(dequantize=True))
    for name in ("gate_up_proj", "down_proj"):
        weight, stored = getattr(exact, name).float(), getattr(found.model.layers[0].mlp.experts, name).float()
        assert 0 < (stored - weight).norm() / weight.norm() < 0.15  # as four bits can


def test_only_an_mxfp4_student_is_dequantised(folder, mxfp4):
    from trl import ModelConfig

    from trl_offline_distill.cli.train_script import dequantisation

    assert dequantisation(ModelConfig(model_name_or_path=str(folder / "student")), False) is None
    found = dequantisation(ModelConfig(model_name_or_path=str(mxfp4)), False)
    assert (type(found).__name__, found.dequantize) == ("Mxfp4Config", True)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"dtype": "bfloat16"}, "(100.000%; weights 0.000104 GB bfloat16): everything"),
        (
            {
                "use_peft": True,
                "lora_r": 2,
                "lora_dropout": 0.0,
                "lora_target_modules": ["q_proj"],
                "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
            "experts x 2, q_proj x 2",
        ),
    ],
    ids=["full", "lora"],
)
def test_mxfp4_teacher_and_student(mxfp4, folder, tmp_path, monkeypatch, capsys, options, printed):
    assert main(["build", "--teacher", str(mxfp4), "--dataset_name", str(folder / "texts"), "--top_k", "5",
                 "--output_dir", str(tmp_path / "cache")]) == 0  # fmt: skip
    config = train_config(mxfp4.parent, tmp_path / "cache", tmp_path / "out", model_name_or_path=str(mxfp4), **options)
    assert run_script(monkeypatch, tmp_path, config) == 0
    out = capsys.readouterr().out
    assert printed in next(line for line in out.splitlines() if line.startswith("Training "))
    assert "The MXFP4 student was dequantised" in out
    lora = "use_peft" in options
    assert (tmp_path / "out" / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()
    # A name that matches no parameter stops the run before its first step.
    if lora:
        config["lora_target_parameters"] = ["mlp.experts.up_proj"]
        assert run_script(monkeypatch, tmp_path, config) == 1
        assert "up_proj" in capsys.readouterr().err


def run_script(monkeypatch, tmp_path, config: dict) -> int:
    from trl_offline_distill.cli.train_script import run

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(tmp_path / "train.yaml")])
    return run()


def test_train_with_lora_saves_an_adapter(folder, cache, tmp_path, monkeypatch, capsys):
    config = train_config(
        folder, cache, tmp_path / "out", use_peft=True, lora_r=2, lora_target_modules=["q_proj", "v_proj"]
    )
    assert run_script(monkeypatch, tmp_path, config) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert "Training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": None}, "`model_name_or_path` is required"),
        ({"dataset_name": None}, "exactly one of them"),
        ({"dataset_train_split": "tra"}, "no split 'tra', it has 'train'"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "no split 'test', it has 'train'"),
        ({"kd_weight": 0.0}, "both 0"),
        ({"kd_top_k": 50}, "`kd_top_k=50` is more than the 5 candidates"),
        ({"lora_r": 4}, "`lora_r=4` has no effect without `use_peft`"),
        ({"use_peft": True, "lora_target_modules": ["q_proj", "no_such_proj"]}, "no_such_proj"),
    ],
)
def test_bad_training_options_are_one_line(folder, cache, tmp_path, monkeypatch, capsys, changes, message):
    config = {k: v for k, v in train_config(folder, cache, tmp_path / "out", **changes).items() if v is not None}
    assert run_script(monkeypatch, tmp_path, config) in (1, 2)
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert message in error


@pytest.mark.parametrize("command", ["build", "train", "demo"])
def test_unknown_keys_and_options_name_the_nearest(command, tmp_path, capsys):
    valid, wrong = {"build": ("top_k", "topk"), "train": ("kd_weight", "kd_weigth"), "demo": ("top_k", "topk")}[
        command
    ]
    (tmp_path / "c.yaml").write_text(f"{wrong}: 3\n")
    assert main([command, "--config", str(tmp_path / "c.yaml")]) == 2
    assert f"unknown key in {tmp_path / 'c.yaml'}: `{wrong}`: did you mean '{valid}'?" in capsys.readouterr().err
    assert main([command, f"--{wrong}", "3"]) == 2
    assert f"unknown option `--{wrong}`: did you mean '{valid}'?" in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path, capsys):
    assert main(["build", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    assert main(["build", "--config", str(tmp_path / "bad.yaml")]) == 2
    assert "is not valid YAML" in capsys.readouterr().err
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert main(["build", "--config", str(tmp_path / "list.yaml")]) == 2
    assert "`key: value` lines" in capsys.readouterr().err
    assert main(["build", "--config"]) == 2
    assert "takes one value" in capsys.readouterr().err
    assert main(["build", "--recipe", "r", "--config", "c"]) == 2
    assert "give one" in capsys.readouterr().err


def test_a_value_of_the_wrong_type_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["build", "--teacher", "t", "--top_k", "many"])
    assert stopped.value.code == 2
    assert "invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top_k", "0"], "`top_k"),
        (["--top_k", "5000"], "top_k"),
        (["--layout", "compct"], "layout"),
        (["--model_init_kwargs", "[1]"], "must be a JSON object"),
        (["--dataset_text_field", "words"], "words"),
        (["--dataset_split", "trian"], "trian"),
    ],
)
def test_bad_build_options_fail_before_the_teacher_runs(folder, tmp_path, capsys, arguments, message):
    base = ["build", "--teacher", str(folder / "teacher"), "--dataset_name", str(folder / "texts")]
    assert main([*base, "--output_dir", str(tmp_path / "c"), *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert "error: " in error
    assert message in error
    assert not list((tmp_path / "c").rglob("*.parquet"))


def test_build_needs_exactly_one_source(folder, capsys):
    base = ["build", "--teacher", str(folder / "teacher")]
    assert main([*base, "--output_dir", "somewhere"]) == 2
    assert "exactly one" in capsys.readouterr().err
    assert main([*base, "--dataset_name", str(folder / "texts")]) == 2
    assert "say where the cache goes: `output_dir`" in capsys.readouterr().err


def test_a_student_that_does_not_fit_is_refused_before_the_teacher_runs(folder, tmp_path, capsys):
    make_tokenizer(special=("<|extra|>",)).save_pretrained(tmp_path / "student")
    make_teacher().save_pretrained(tmp_path / "student")
    base = ["build", "--teacher", str(folder / "teacher"), "--dataset_name", str(folder / "texts")]
    assert main([*base, "--student", str(tmp_path / "student"), "--output_dir", str(tmp_path / "c")]) == 1
    assert "the student's tokenizer" in capsys.readouterr().err
    assert main([*base, "--student", str(folder / "student"), "--output_dir", str(tmp_path / "c")]) == 0
    assert "has the teacher's tokenizer" in capsys.readouterr().out


def test_secrets_are_never_printed(folder, tmp_path, monkeypatch, capsys):
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    assert secret not in redact(f"request with {secret} failed")
    monkeypatch.setenv("HF_TOKEN", "plain-secret")
    assert "plain-secret" not in redact("token plain-secret refused")

    from trl_offline_distill.cli.train_command import _take_token

    assert _take_token(["--hub_token", secret, "--seed", "1"]) == ["--seed", "1"]
    assert os.environ["HF_TOKEN"] == secret
    assert _take_token([f"--hub_token={secret}"]) == []
    words = ["build", "--teacher", str(tmp_path / secret), "--dataset_name", str(folder / "texts")]
    main([*words, "--output_dir", str(tmp_path / "out"), "--hub_token", secret])
    captured = capsys.readouterr()
    assert secret not in captured.out + captured.err
    assert "<hidden>" in captured.err


def test_a_repository_that_cannot_be_had_says_what_to_do(folder, capsys):
    words = ["--dataset_name", str(folder / "texts"), "--output_dir", "unused"]
    assert main(["build", "--teacher", "no/such-model", *words]) == 2
    error = capsys.readouterr().err
    assert "`teacher=no/such-model` cannot be read. It is no folder here, so it was looked for on the Hub." in error
    assert "Traceback" not in error
    assert not Path("unused").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "--teacher", "./missing"], "`teacher=./missing`: there is no such folder or file"),
        (["build", "--teacher", "{teacher}", "--student", "./missing"], "`student=./missing`: there is no such"),
        (["inspect", "./missing"], "`dataset_name=./missing`: there is no such folder or file"),
        (["train", "--model_name_or_path", "./missing"], "`model_name_or_path=./missing`: there is no such"),
        (["train", "--model_name_or_path", "{teacher}", "--dataset_name", "./gone"], "`dataset_name=./gone`"),
        (["train", "--dataset_name", "x"], "`model_name_or_path` is required"),
        (["drop-layers", "--model_name_or_path", "./missing", "--layers", "1"], "`model_name_or_path=./missing`"),
        (["build", "--teacher", "{teacher}", "--dataset_name", "json", "--dataset_data_files", "no.jsonl"],
         "`dataset_data_files`: there is no file 'no.jsonl'"),
    ],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_named_with_its_option(folder, tmp_path, capsys, words, message):
    words = [str(folder / "teacher") if word == "{teacher}" else word for word in words]
    if words[0] == "build" and "--dataset_name" not in words:
        words += ["--dataset_name", str(folder / "texts")]
    if words[0] == "train" and "--dataset_name" not in words:
        words += ["--dataset_name", "some/cache"]
    words += [] if words[0] == "inspect" else ["--output_dir", str(tmp_path / "out")]
    words += ["--use_cpu"] if words[0] == "train" else []
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unasked(folder, cache, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    teacher = str(folder / "teacher")
    base = ["drop-layers", "--model_name_or_path", teacher, "--layers", "1", "--output_dir"]
    assert main([*base, str(tmp_path / "full")]) == 2
    assert "is not empty: name another folder, or pass `--overwrite`" in capsys.readouterr().err
    assert main([*base, teacher, "--overwrite"]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert main(["export", str(cache), "--output_file", str(tmp_path / "typed.parquet")]) == 0
    words = ["import", "parquet", "--dataset_data_files", str(tmp_path / "typed.parquet"), "--tokenizer", teacher]
    assert main([*words, "--output_dir", str(tmp_path / "full")]) == 2
    assert (tmp_path / "full" / "thesis.txt").read_text() == "years of work"
    assert main([*words, "--output_dir", str(tmp_path / "full"), "--overwrite"]) == 0
    (tmp_path / "file").write_text("x")
    assert main([*words, "--output_dir", str(tmp_path / "file" / "below")]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err


def test_a_failed_export_leaves_nothing_behind(cache, tmp_path, monkeypatch, capsys):
    def full(self, path, **options):
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Dataset, "to_json", full)
    assert main(["export", str(cache), "--output_file", str(tmp_path / "typed.jsonl")]) == 1
    assert "The disk is full: free some space" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_shows_the_true_defaults(capsys):
    from trl_offline_distill import OfflineDistillationConfig

    assert main(["train", "--help_all"]) == 0
    shown = dict(re.findall(r"^  --(\w+)(?:\n)?((?:\s{4,}.*\n)+|.*\n(?:\s{6,}.*\n)*)", capsys.readouterr().out, re.M))
    for item in dataclasses.fields(OfflineDistillationConfig):
        if item.init and isinstance(item.default, bool) and item.name in shown:
            assert f"[{item.default}]" in shown[item.name], item.name
    assert "[True]" in shown["gradient_checkpointing"]


def test_a_reader_that_has_seen_enough_is_no_error(cache):
    command = f"{sys.executable} -m trl_offline_distill.cli inspect {cache} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert "error" not in done.stderr.lower()
    assert "Broken" not in done.stderr


def test_decode_asks_for_the_tokenizer_of_a_local_teacher(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(cache), "--decode", "0"]) == 2
    assert "the teacher 'teacher' of this cache was a local folder. Give `processing_class`" in capsys.readouterr().err
    assert main(["inspect", str(cache), "--decode", "99"]) == 2
    assert f"no such row, it has {len(TEXTS)}" in capsys.readouterr().err


def test_drop_layers(folder, tmp_path, capsys):
    base = ["drop-layers", "--model_name_or_path", str(folder / "teacher"), "--output_dir", str(tmp_path / "s")]
    assert main([*base, "--layers", "1"]) == 0
    assert "1 of 2 layers" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "s").config.num_hidden_layers == 1
    assert (tmp_path / "s" / "tokenizer.json").exists()
    assert main([*base, "--layers", "7", "--overwrite"]) == 1
    assert "layers 0 to 1" in capsys.readouterr().err
    assert main([*base, "--layers", "1-x"]) == 2
    assert parse_layers("4,7,16-18") == [4, 7, 16, 17, 18]


def test_every_option_has_a_help():
    from trl_offline_distill.demo import DemoArguments

    for kind in (BuildArguments, DemoArguments):
        for item in dataclasses.fields(kind):
            assert item.metadata["help"].strip().endswith((".", ")")), item.name


def test_the_console_script_is_installed():
    script = Path(sys.executable).parent / "trl-offline-distill"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "trl-offline-distill 0.1.0\n"
