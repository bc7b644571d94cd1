import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from trl_offline_distill.cli import main
from trl_offline_distill.estimate import (
    LOSSES,
    EstimateArguments,
    article_example,
    cache_bytes,
    largest_context,
    loss_bytes,
    model_shape,
    training_memory,
)
from trl_offline_distill.teacher_cache.codecs import encode_topk
from trl_offline_distill.teacher_cache.topk import TeacherTopK


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FAMILIES = {
    "llama": lambda layers: LlamaConfig(**SIZES, num_hidden_layers=layers),
    "qwen3": lambda layers: Qwen3Config(**SIZES, num_hidden_layers=layers),
    "qwen3_moe": lambda layers: Qwen3MoeConfig(
        **SIZES, num_hidden_layers=layers, moe_intermediate_size=96, num_experts=8, num_experts_per_tok=2
    ),
    "gpt_oss": lambda layers: GptOssConfig(
        **SIZES, num_hidden_layers=layers, num_local_experts=8, num_experts_per_tok=2
    ),
}

# Each scheme as a user would write it, on fp32 hidden states; prints the growth of the process's peak memory.
MEASURE = """
import sys, torch
import torch.nn.functional as F
from trl_offline_distill.loss.fused import fused_distillation_loss
from trl_offline_distill.teacher_cache.topk import TeacherTopK
scheme, n, v, h, k, chunk = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
torch.set_num_threads(1)

def run(n, v, chunk):
    hidden = torch.randn(n, h, requires_grad=True)
    weight = torch.randn(v, h, requires_grad=True)
    teacher = TeacherTopK(torch.arange(k).repeat(n, 1), torch.full((n, k), -8.0), torch.full((n,), -0.01))
    if scheme == "fused":
        fused_distillation_loss(hidden, weight, teacher, chunk_size=chunk).loss.backward()
        return
    def dense(hidden, rows):
        logits = (hidden @ weight.T).float()
        log_q = F.log_softmax(logits, -1)
        p = teacher.logprobs[rows].exp()
        loss = -(p * log_q.gather(-1, teacher.token_ids[rows])).sum()
        return (loss, logits) if scheme == "dense" else (loss, None)
    step = n if scheme == "dense" else chunk
    parts = [dense(hidden[i : i + step], slice(i, i + step)) for i in range(0, n, step)]
    sum(loss for loss, _ in parts).backward()

def peak():
    # Not `ru_maxrss`, which starts from the peak of the process that started this one.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

run(8, 16 * k, 4)
before = peak()
run(n, v, chunk)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_estimated_within_a_tenth_of_what_it_takes(loss):
    n, v, h, k, chunk = 4096, 20_000, 256, 20, 2048
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, loss, *map(str, (n, v, h, k, chunk))],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    measured = int(done.stdout)
    # The measurement also holds what the estimate counts elsewhere: hidden states, weight, the teacher's rows, and for
    # the schemes without an accumulator of their own the head's gradient.
    around = 4 * (n * h + v * h) + n * k * 12 + (0 if loss == "fused" else 4 * v * h)
    expected = loss_bytes(loss, n, v, h, dtype_bytes=4, chunk_size=chunk) + around
    assert measured == pytest.approx(expected, rel=0.1)


def saved_bytes_of_a_layer(make) -> float:
    """What autograd keeps for one token in one layer of the family, by counting it."""

    def saved(config) -> float:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model.model(input_ids=torch.arange(2 * 48).reshape(2, 48) % 60, use_cache=False)
        assert out is not None
        return sum(size for size, _ in kept.values()) / (2 * 48)

    return saved(make(3)) - saved(make(2))


@pytest.mark.parametrize(
    ("family", "tolerance"), [("llama", 0.1), ("qwen3", 0.1), ("qwen3_moe", 0.15), ("gpt_oss", 0.15)]
)
def test_activations_are_what_autograd_keeps(family, tolerance):
    estimated = model_shape(FAMILIES[family](2)).activation_bytes[4]
    assert estimated == pytest.approx(saved_bytes_of_a_layer(FAMILIES[family]), rel=tolerance)


def test_parameters_are_counted_without_weights():
    for family, make in FAMILIES.items():
        config = make(2)
        model, shape = AutoModelForCausalLM.from_config(config), model_shape(config)
        assert shape.parameters == model.num_parameters(), family
        assert (shape.head_rows, shape.hidden_size, shape.layers) == (64, 64, 2)
    # gpt-oss-20b and 120b, from their published shapes: 20.9 B and 116.8 B parameters.
    assert model_shape(GptOssConfig(num_hidden_layers=24, num_local_experts=32)).parameters == 20_914_757_184
    assert model_shape(GptOssConfig(num_hidden_layers=36, num_local_experts=128)).parameters == 116_829_156_672


def test_memory_adds_up():
    shape = model_shape(FAMILIES["llama"](2))
    args = EstimateArguments("m", max_length=100, dtype="float32", gradient_checkpointing=False)
    full = training_memory(shape, args)
    assert (full.weights, full.gradients, full.optimizer) == tuple(shape.parameters * n for n in (4, 4, 8))
    assert full.activations == 100 * 2 * shape.activation_bytes[2]
    assert full.batch == 100 * 804
    assert full.total("dense") - full.total("fused") == full.loss["dense"] - full.loss["fused"]

    sharded = training_memory(shape, EstimateArguments("m", max_length=100, dtype="float32", ranks=4))
    assert sharded.weights == full.weights // 4
    lora = training_memory(shape, EstimateArguments("m", max_length=100, use_peft=True, lora_r=2))
    assert lora.gradients == lora.optimizer == 0
    # q, o: 64 -> 64; k, v: 64 -> 32; gate, up: 64 -> 160; down: 160 -> 64; two layers; 16 bytes a parameter
    assert lora.adapter == 2 * 2 * (2 * 128 + 2 * 96 + 3 * 224) * 16
    # A frozen head has no accumulator.
    assert full.loss["fused"] - lora.loss["fused"] == 4 * 64 * 64


def test_the_largest_context_is_the_last_that_fits():
    shape = model_shape(Qwen3Config(hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64))
    args = EstimateArguments("m", memory_gb=40, reserve_gb=4)
    contexts = [largest_context(shape, args, loss) for loss in LOSSES]
    assert contexts == sorted(contexts)
    for loss, context in zip(LOSSES, contexts):
        assert context > 0
        assert training_memory(shape, args, context).total(loss) <= 36e9
        assert training_memory(shape, args, context + 256).total(loss) > 36e9
    assert largest_context(shape, EstimateArguments("m", memory_gb=4.01, reserve_gb=4), "dense") == 0


def test_the_articles_example():
    example = article_example()
    assert example["fused"] <= 128
    # The article says 250 GB; 18 bytes for each of 32,768 x 201,088 logits is 118.6 GB more than no logits at all.
    assert example["dense"] == pytest.approx(250, rel=0.03)
    assert example["dense"] - example["rest"] == pytest.approx(18 * 32_768 * 201_088 / 1e9, rel=0.01)


@pytest.mark.parametrize(("layout", "vocab"), [("default", 151_936), ("compact", 201_088), ("default", 262_208)])
def test_the_cache_takes_what_the_codec_writes(layout, vocab):
    logprobs = torch.log_softmax(torch.randn(1, 100).double() * 3 - 9, -1).sort(descending=True).values - 0.1
    blob = encode_topk(
        TeacherTopK(torch.arange(100)[None] * 7, logprobs, torch.log1p(-logprobs.exp().sum(-1))),
        vocab_size=vocab,
        layout=layout,
    )[0]
    assert cache_bytes(vocab, 100, layout) == len(blob) + 16
    assert cache_bytes(vocab, 100, "min_mass") is None
    assert cache_bytes(vocab, 100, "sampled") < 150


def test_the_command_shows_its_arithmetic(tmp_path, capsys):
    GptOssConfig(num_hidden_layers=24, num_local_experts=32).save_pretrained(tmp_path)
    arguments = ["--max_length", "32768", "--use_peft", "--teacher_name_or_path", str(tmp_path)]
    arguments += ["--capture_tokens_per_second", "10000", "--train_tokens_per_second", "5000"]
    assert main(["estimate", str(tmp_path), *arguments]) == 0
    out = capsys.readouterr().out
    assert "GptOssForCausalLM, 20.91 B parameters" in out
    assert "32,768 x 201,088 = 6.59 G logits" in out
    assert "20,914,757,184 x 2 B" in out
    assert "dense" in out
    assert "does not fit 141 GB" in out
    assert "fits 141 GB" in out
    assert "fused experts" in out
    assert "would add 41.8 GB" in out
    assert "capture: 2.8 h at 10,000 tokens/s" in out
    assert "training: 5.6 h" in out
    # A config.json is enough, and weights are never looked for.
    assert main(["estimate", str(tmp_path / "config.json")]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "`dtype='int8'` must be one of bfloat16"),
        ({"optim": "adam"}, "`optim='adam'` must be one of"),
        ({"max_length": 0}, "`max_length=0` must be above 0"),
        ({"trained_share": 1.5}, "`trained_share=1.5`"),
    ],
)
def test_impossible_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EstimateArguments("m", **changes)
    with pytest.raises(ValueError, match="must be one of dense"):
        loss_bytes("sparse", 1, 1, 1)
