import runpy
from pathlib import Path

import pytest
import yaml

from trl_offline_distill.cli import main
from trl_offline_distill.cli.arguments import parse
from trl_offline_distill.cli.recipe_run import run_tiny_recipe
from trl_offline_distill.recipes import find_recipe, list_recipes, recipes_folder


RECIPES = list(list_recipes())
NAMES = {
    "gpt_oss_120b_to_gpt_oss_20b_lora",
    "gpt_oss_20b_healing",
    "qwen3_32b_to_qwen3_0.6b_lora",
    "qwen3_8b_to_qwen3_0.6b_ptbr",
    "qwen3_8b_to_qwen3_1.7b",
    "served_teacher_to_qwen3",
    "smollm2_healing",
}


def test_the_recipes_are_these_and_the_table_names_them_all():
    assert set(RECIPES) == NAMES
    table = (recipes_folder() / "README.md").read_text()
    for name in NAMES:
        assert f"`{name}`" in table
    for title in list_recipes().values():
        assert len(title) > 20


@pytest.mark.parametrize("name", RECIPES)
def test_every_file_parses_into_the_real_dataclasses(name, monkeypatch):
    from trl_offline_distill.cli import build_command, drop_layers_command
    from trl_offline_distill.cli.arguments import make_parser
    from trl_offline_distill.cli.train_script import make_parser as train_parser

    # bf16 is refused where no device has it.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    folder = find_recipe(name, "train.yaml").parent
    script, training, model, _, rest = parse(train_parser(), ["--config", str(folder / "train.yaml")])
    assert rest == []
    from trl import DatasetMixtureConfig

    parser = make_parser([build_command.BuildArguments, DatasetMixtureConfig], "build", "")
    build, _, _ = parse(parser, ["--config", str(folder / "build.yaml")])
    assert script.dataset_name == build.output_dir
    assert training.max_length is None or training.max_length == build.max_length
    if build.student is not None:
        assert build.student == model.model_name_or_path
    if (folder / "drop_layers.yaml").exists():
        parser = make_parser([drop_layers_command.DropLayersArguments], "drop-layers", "")
        drop, _ = parse(parser, ["--config", str(folder / "drop_layers.yaml")])
        assert drop.output_dir == model.model_name_or_path
        assert drop.model_name_or_path == build.teacher
        assert drop_layers_command.parse_layers(drop.layers)


@pytest.mark.parametrize("name", RECIPES)
def test_every_file_starts_with_its_command_and_gives_reasons(name):
    for file in find_recipe(name, "train.yaml").parent.glob("*.yaml"):
        text = file.read_text()
        step = file.stem.replace("_", "-")
        head = [line for line in text.splitlines()[:6] if line.startswith("#")]
        assert any(f"trl-offline-distill {step} --recipe {name}" in line for line in head), file
        assert yaml.safe_load(text)


@pytest.mark.parametrize("name", RECIPES)
def test_the_tiny_run_builds_trains_saves_reloads_and_learns(name, capsys):
    kl = run_tiny_recipe(name)
    assert 0 < kl["after"] < kl["before"]
    out = capsys.readouterr().out
    if "lora" in name or name == "gpt_oss_20b_healing":
        trained = next(line for line in out.splitlines() if line.startswith("Training "))
        assert "q_proj" in trained
        assert ("experts" in trained) == name.startswith("gpt_oss")


def test_list_show_and_copy(tmp_path, capsys):
    assert main(["recipes", "list"]) == 0
    out = capsys.readouterr().out
    for name in NAMES:
        assert name in out
    assert main(["recipes", "show", "smollm2_healing"]) == 0
    assert "--- drop_layers.yaml" in capsys.readouterr().out
    assert main(["recipes", "copy", "smollm2_healing", str(tmp_path / "mine")]) == 0
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["build.yaml", "drop_layers.yaml", "train.yaml"]
    assert main(["recipes", "copy", "smollm2_healing", str(tmp_path / "mine")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["recipes", "shuffle"]) == 2


def test_the_script_with_inline_metadata_runs_a_recipe(monkeypatch, capsys):
    script = recipes_folder() / "run_recipe.py"
    assert 'dependencies = ["trl-offline-distill"]' in script.read_text()
    monkeypatch.setattr("sys.argv", [str(script), "served_teacher_to_qwen3", "--tiny"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(script), run_name="__main__")
    assert done.value.code == 0
    assert "served_teacher_to_qwen3, tiny: KL to the teacher" in capsys.readouterr().out


def test_an_unknown_recipe_names_the_nearest(capsys):
    assert main(["train", "--recipe", "smolm2_healing"]) == 1
    assert "Did you mean 'smollm2_healing'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"has no drop_layers\.yaml; it has build\.yaml, train\.yaml"):
        find_recipe("qwen3_8b_to_qwen3_1.7b", "drop_layers.yaml")


def test_a_missing_model_and_a_missing_cache_say_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["build", "--recipe", "smollm2_healing"]) == 2
    assert "demo_output/teacher" in capsys.readouterr().err
    assert not Path("cache").exists()
