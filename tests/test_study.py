"""The study's measures and its report; the study itself takes hours (`make study`)."""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_students
import torch
from tiny_students import cached_dataset, make_trainer, parameters_of, tiny_model, token_rows


FILE = Path(__file__).parent.parent / "benchmarks" / "study.py"
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="the benchmarks are not part of an installed package")


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("benchmarks_study", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_held_out(study, tmp_path):
    teacher, model = tiny_model(seed=1).eval(), tiny_model(seed=0).eval()
    expected = {}
    for number, language in enumerate(study.LANGUAGES):
        ids = torch.randint(2, 48, (3, 9), generator=torch.Generator().manual_seed(number))
        np.save(tmp_path / f"{language}.npy", ids.numpy())
        study.write_full_logprobs(teacher, ids.tolist(), tmp_path / f"{language}_logprobs.npy")
        with torch.no_grad():
            p, q = (m(ids[:2]).logits[:, :-1].log_softmax(-1).flatten(0, 1) for m in (teacher, model))
        labels = ids[:2, 1:].flatten()
        confidence, best = q.exp().max(-1)
        right = (best == labels).float()
        error = sum(
            abs(float((confidence - right)[(confidence * 15).long() == b].sum())) / len(labels) for b in range(15)
        )
        expected[language] = {
            "kl": float(torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)),
            "perplexity": math.exp(float(torch.nn.functional.nll_loss(q, labels))),
            "calibration_error": error,
            "overconfidence": float((confidence - right).mean()),
        }
    found = study.held_out(model, tmp_path, rows=2)
    for language in study.LANGUAGES:
        assert found[language] == pytest.approx(expected[language], rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("top_k", [5, None])
def test_the_online_arm_trains_what_a_cache_of_the_teacher_trains(study, tmp_path, top_k, monkeypatch):
    teacher = tiny_model(seed=1).eval()
    rows = token_rows([7, 7, 7, 7])
    dataset = cached_dataset(rows, teacher, top_k=top_k or 48)
    offline = make_trainer(tmp_path / "a", tiny_model(), dataset, max_steps=2)
    offline.train()
    monkeypatch.setattr(tiny_students, "OfflineDistillationTrainer", study.OnlineTrainer)
    online = make_trainer(tmp_path / "b", tiny_model(), dataset, max_steps=2)
    online.teacher, online.top_k = teacher, top_k
    online.train()
    for name, value in parameters_of(online.model).items():
        torch.testing.assert_close(value, parameters_of(offline.model)[name], rtol=2e-3, atol=2e-4)


def test_steps_to_a_level(study):
    points = [{"step": step, "english": {"kl": kl}} for step, kl in ((0, 4.0), (10, 2.0), (20, 1.0))]
    assert study.steps_to(points, "english", 3.0) == 5
    assert study.steps_to(points, "english", 1.0) == 20
    assert study.steps_to(points, "english", 0.5) is None


def test_the_prose_of_a_manual(study, tmp_path):
    lines = ["A paragraph of prose that goes on for long enough to be kept,", *["word " * 10] * 3, "and then it ends."]
    prose = "\n".join(line.strip() for line in lines)
    page = ["1. Heading", prose, "| a | table |\n|---|---|", "$ a command", prose]
    (tmp_path / "manual.txt").write_text("\n\n".join(page))
    assert study.paragraphs_of(tmp_path / "manual.txt") == "\n\n".join([prose.replace("\n", " ")] * 2)


def test_report(study, tmp_path):
    (tmp_path / "runs").mkdir()
    settings = dict.fromkeys(study.SETTINGS, 2) | {"learning_rate": 1e-3}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    for arm, kl in (("cross_entropy", 2.0), ("bucket", 1.0), ("online_top_k", 1.0)):
        for seed in range(1 if arm == "online_top_k" else 2):
            figures = {"kl": kl + seed, "perplexity": 9.0, "calibration_error": 0.1, "overconfidence": 0.05}
            both = dict.fromkeys(study.LANGUAGES, figures)
            start = dict.fromkeys(study.LANGUAGES, figures | {"kl": 4.0})
            run = {"layers": 15, "arm": arm, "seed": seed, "losses": [3.0, kl], "final": both, "date": "2026-01-01"}
            run |= {"curve": [{"step": 0, **start}, {"step": 2, **both}], "versions": {"torch": "2"}}
            (tmp_path / "runs" / f"15-{arm}-{seed}.json").write_text(json.dumps(run))
    study.report(argparse.Namespace(work_dir=tmp_path, output_dir=tmp_path / "out"))
    table = (tmp_path / "out" / "study.md").read_text()
    # Mean and spread of two seeds; both runs of an arm are compared with the run of the same seed
    assert "| cross-entropy alone | 2 | 2.500 ± 0.707 | 1.000 ± 0.000 |" in table
    assert "| bucket, K = 100 | 2 | 1.500 ± 0.707 | 0.000 ± 0.000 |" in table
    assert "differ by at most 0.0e+00 nats" in table
    assert len((tmp_path / "out" / "study.csv").read_text().splitlines()) == 1 + 5 * 2
    for name in ("arms", "curves", "online"):
        assert (tmp_path / "out" / f"study_{name}.png").read_bytes().startswith(b"\x89PNG")
