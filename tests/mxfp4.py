"""A tiny gpt-oss checkpoint whose experts are stored in MXFP4, as openai/gpt-oss-20b stores its own."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, set_seed


# The sixteen values of a 4-bit float with 2 bits of exponent and 1 of mantissa (OCP MX specification 1.0)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])
BLOCK = 32


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[E, in, out]` -> blocks `[E, out, in / 32, 16]`, two values a byte, and scales `[E, out, in / 32]` + 127."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, BLOCK)).float()  # [E, out, in / 32, 32]
    exponents = (groups.abs().amax(-1).clamp(min=1e-20) / FP4.max()).log2().ceil().clamp(-126, 127)
    codes = (groups / exponents.exp2()[..., None])[..., None].sub(FP4).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def save_tiny_gpt_oss(folder: Path, vocab_size: int) -> None:
    set_seed(0)
    config = GptOssConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = pack(weights.pop(name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(stored))
