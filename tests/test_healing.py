import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trl_offline_distill import drop_layers


SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, num_hidden_layers=6),
    "qwen2": Qwen2Config(**SIZES, num_hidden_layers=6, use_sliding_window=True, sliding_window=4, max_window_layers=3),
    "qwen3": Qwen3Config(**SIZES, num_hidden_layers=6, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        num_hidden_layers=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=[0, 4],
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, num_hidden_layers=6, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "gemma3": Gemma3TextConfig(**SIZES, num_hidden_layers=6, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=64, n_embd=16, n_layer=6, n_head=4, n_positions=64),
}


def build(family: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family])).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_student_computes_what_the_kept_layers_compute_and_loads_again(family, tmp_path):
    teacher = build(family)
    ids = torch.arange(3, 27)[None]
    before = teacher(ids).logits
    student = drop_layers(teacher, [1, 3])

    # The dropped layers replaced by the identity in the teacher itself.
    stack = teacher.transformer.h if family == "gpt2" else teacher.model.layers
    hooks = [
        stack[number].register_forward_hook(
            lambda _, args, out: (args[0], *out[1:]) if isinstance(out, tuple) else args[0]
        )
        for number in (1, 3)
    ]
    expected = teacher(ids).logits
    for hook in hooks:
        hook.remove()

    torch.testing.assert_close(student(ids).logits, expected)
    torch.testing.assert_close(teacher(ids).logits, before)
    assert student.config.num_hidden_layers == 4
    assert teacher.config.num_hidden_layers == 6
    assert student.num_parameters() < teacher.num_parameters()

    student.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reloaded(ids).logits, expected)
    assert reloaded.config.num_hidden_layers == 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_layers_are_renumbered_for_the_cache(family):
    student = drop_layers(build(family), [0, 2])
    ids = torch.arange(3, 15)[None]
    full = student(ids, use_cache=False).logits[:, -1]
    cached = student(ids[:, :-1], use_cache=True)
    torch.testing.assert_close(
        student(ids[:, -1:], past_key_values=cached.past_key_values).logits[:, -1], full, atol=1e-5, rtol=1e-5
    )
    generated = student.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, ids.shape[1] + 3)


def test_weights_are_copied_and_the_tie_stays():
    teacher = build("qwen3")
    student = drop_layers(teacher, [5])
    assert student.lm_head.weight is student.model.embed_tokens.weight
    with torch.no_grad():
        student.model.layers[0].self_attn.q_proj.weight.zero_()
        student.lm_head.weight.zero_()
    assert teacher.model.layers[0].self_attn.q_proj.weight.abs().sum() > 0
    assert teacher.lm_head.weight.abs().sum() > 0


def test_per_layer_lists_are_cut_with_the_layers():
    assert drop_layers(build("gpt_oss"), [1]).config.layer_types == [
        kind for number, kind in enumerate(FAMILIES["gpt_oss"].layer_types) if number != 1
    ]
    assert drop_layers(build("qwen3_moe"), [0, 2]).config.mlp_only_layers == [2]


@pytest.mark.parametrize("layers", [[], [0, 1, 2, 3, 4, 5], [6], [-1], [2, 2]])
def test_impossible_selections_are_refused(layers):
    with pytest.raises(ValueError, match=r"`layers=.*layers 0 to 5 of LlamaForCausalLM"):
        drop_layers(build("llama"), layers)


def test_a_pattern_that_no_configuration_describes_is_refused():
    # Every second layer of this model is sparse by its number: without layer 0 the pattern shifts.
    config = Qwen3MoeConfig(
        **SIZES,
        num_hidden_layers=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        decoder_sparse_step=2,
    )
    teacher = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="decides by layer number what a layer is"):
        drop_layers(teacher, [0])
    assert drop_layers(teacher, [0, 1]).config.num_hidden_layers == 4


def test_a_quantised_model_is_refused():
    teacher = build("llama")
    teacher.config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(ValueError, match="quantised"):
        drop_layers(teacher, [1])
