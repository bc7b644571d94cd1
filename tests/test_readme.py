"""Every code block of the README and of `docs/` runs as it stands, or says above it why it does not."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from huggingface_hub import HfApi
from tiny_teachers import MARKED_TEMPLATE, make_teacher, make_tokenizer

from trl_offline_distill.cli import main
from trl_offline_distill.estimate import LOSSES, loss_bytes


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md", "benchmarks/README.md")]
PAGES += sorted(ROOT.glob("docs/**/*.md"))
BLOCK = re.compile(
    r"^(?:<!--(?P<comment>[^>]*?)-->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
QUESTIONS = ["what is the sky", "why is the sun far away", "what colour is it", "tell me why"]


def blocks(page: Path) -> list[tuple[int, str, str, str]]:
    """(line, comment, language, code) of each code block."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 1, (found["comment"] or "").strip(), found["language"], found["code"])
        for found in BLOCK.finditer(text)
    ]


@pytest.fixture
def names_of_the_readme(hub, tmp_path, monkeypatch):
    """Tiny models and a tiny dataset on the loopback Hub, under the names that the README uses."""
    monkeypatch.chdir(tmp_path)
    # TRL trains in bf16 by default and refuses to on a CPU unless it is told that a CPU is meant.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)

    def launch_here(arguments):
        monkeypatch.setattr("sys.argv", ["train", *arguments.training_script_args])
        assert runpy.run_module(arguments.training_script, run_name="launched")["run"]() == 0

    # `tests/test_cli.py` launches a process for real; here the launched module runs in this one, with the patch above.
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launch_here)
    api = HfApi()
    for number, name in enumerate(["Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"]):
        folder = tmp_path / "models" / name
        make_teacher(seed=number, max_position_embeddings=64).save_pretrained(folder)
        make_tokenizer(MARKED_TEMPLATE).save_pretrained(folder)
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "hello world"}]}
        for q in QUESTIONS
    ]
    Dataset.from_list(rows).push_to_hub("trl-lib/Capybara", split="train")


def run_block(language: str, code: str, where: str) -> None:
    if language == "python":
        exec(compile(code, where, "exec"), {"__name__": "readme"})
    elif language == "bash":
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                assert words[0] == "trl-offline-distill", f"{where}: {line} is run by nobody; say why above the block"
                assert main(words[1:]) == 0, f"{where}: {line}"
    elif language == "yaml":
        assert yaml.safe_load(code)
    else:
        raise AssertionError(f"{where}: a block in {language or 'no language'} is run by nobody; say why above it")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, names_of_the_readme, capsys):
    found = blocks(page)
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(found), "a code block is not recognised"
    for line, comment, language, code in found:
        if comment.startswith("not run: "):
            assert len(comment) > len("not run: ") + 10, f"{page.name}:{line}: the reason is missing"
            continue
        run_block(language, code, f"{page.name}:{line}")
    if page.name == "README.md" and page.parent == ROOT:
        assert Path("student", "distillation.png").exists()
        assert Path("student-lora").is_dir()
        assert "longest row" in capsys.readouterr().out


def test_the_first_example_is_short_and_on_the_first_screen():
    line, _, language, code = blocks(ROOT / "README.md")[0]
    assert language == "python"
    assert line < 15
    assert len(code.splitlines()) <= 15


def test_the_computed_costs_are_what_estimate_computes():
    rows = re.findall(
        r"^\| (dense|forward_chunked|fused) \|(.*)\|$", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [name for name, _ in rows] == list(LOSSES)
    models = {"Qwen3-1.7B": (151_936, 2_048, True), "gpt-oss-20b": (201_088, 2_880, False)}
    for name, cells in rows:
        expected = [
            f"{loss_bytes(name, tokens, vocab, hidden, trained_head=trained) / 1e9:.1f}"
            for vocab, hidden, trained in models.values()
            for tokens in (8_192, 32_768)
        ]
        assert [cell.strip() for cell in cells.split("|")] == expected


def test_links_and_commands_of_the_pages_exist():
    targets = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+?)\)", text):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
        for target in re.findall(r"`make ([\w-]+)", text):
            assert re.search(rf"^{target}:", targets, re.MULTILINE), f"{page.name}: make {target}"
