"""The benchmarks of the cache run, on a size that says nothing about speed."""

import csv
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from trl_offline_distill.teacher_cache import select_support


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
VOCAB = 300
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the benchmarks are not part of an installed package")


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A tiny teacher with its tokenizer, and a text, in one folder."""
    folder = tmp_path_factory.mktemp("teacher")
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    words = np.random.default_rng(0).integers(0, VOCAB, 2000)
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in words))
    return folder


def test_cache_layouts(teacher, tmp_path, capsys):
    arguments = ["--model", str(teacher), "--text_file", str(teacher / "text.txt"), "--output_dir", str(tmp_path)]
    assert (
        load("cache_layouts").main([*arguments, "--rows", "2", "--length", "40", "--top_k", "50", "--drop", "1"]) == 0
    )
    with (tmp_path / "cache_layouts.csv").open() as file:
        rows = {row["name"]: {key: float(row[key]) for key in row if key != "name"} for row in csv.DictReader(file)}
    assert rows["compact"]["arrow_bytes"] < rows["default"]["arrow_bytes"]
    assert rows["sampled"]["arrow_bytes"] < rows["default, K=25"]["arrow_bytes"]
    assert rows["default"]["value_error"] < rows["compact"]["value_error"] < 1e-4
    angles = [rows[name]["token_angle"] for name in ("default", "default, K=25", "default, K=10", "default, K=5")]
    assert angles == sorted(angles)
    assert rows["default"]["token_angle"] < rows["K=50, tail=none"]["token_angle"]
    assert math.isnan(rows["sampled"]["value_error"])
    assert (tmp_path / "cache_layouts.png").stat().st_size > 1000
    assert "sampled" in capsys.readouterr().out


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalize"])
def test_the_gradient_of_the_layouts_is_that_of_the_objective(tail):
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(5, 20, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(5, 20, generator=generator, dtype=torch.float64, requires_grad=True)
    stored = select_support(teacher, top_k=6)
    log_q = logits.log_softmax(-1)
    support, p = log_q.gather(1, stored.token_ids), stored.logprobs.exp()
    if tail == "bucket":
        outside = torch.log1p(-support.exp().sum(-1))
        loss = -(p * support).sum() - (stored.log_tail.exp() * outside).sum()
    else:
        loss = -((p / p.sum(-1, keepdim=True) if tail == "renormalize" else p) * support).sum()
    (expected,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(
        load("cache_layouts").logit_gradient(stored, logits.detach().softmax(-1), tail), expected
    )


def test_data_loading(tmp_path):
    sizes = ["--rows", "8", "--length", "16", "--top_k", "10", "--repeats", "1", "--epoch_mib", "0"]
    assert (
        load("data_loading").main([*sizes, "--scratch", str(tmp_path), "--output_dir", str(tmp_path / "results")]) == 0
    )
    with (tmp_path / "results" / "data_loading.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["storage"] for row in rows} == {"default", "compact", "min_mass", "typed lists"}
    assert all(math.isfinite(float(row["decode_us"])) for row in rows)
    assert (tmp_path / "results" / "data_loading.png").stat().st_size > 1000
