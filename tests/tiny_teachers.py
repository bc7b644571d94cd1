"""Teachers and tokenizers small enough to make on the spot."""

from functools import lru_cache

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


WORDS = "hello world the sky is blue and the sun is far away what colour is it now tell me why"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<eos>", "<pad>", "<|im_start|>", "<|im_end|>"]


@lru_cache
def _trained(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, special_tokens=list(special))
    tokenizer.train_from_iterator([WORDS] * 5, trainer)
    return tokenizer.to_str()


def make_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, special: tuple[str, ...] = (), **kwargs
) -> tf.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of a few hundred tokens, ids without holes."""
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained((*SPECIAL, *special))),
        eos_token="<eos>",
        pad_token="<pad>",
        **kwargs,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # A default initialisation gives logits so small that a missing scale or soft-cap would not show.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def make_teacher(family: str = "llama", vocab_size: int = 310, seed: int = 0, **overrides) -> tf.PreTrainedModel:
    """A random causal language model in fp32."""
    torch.manual_seed(seed)
    size = {**_SIZE, "vocab_size": vocab_size}
    small = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    makers = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**size, **overrides})),
        "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**{**size, "sliding_window": 4, **overrides})),
        "gemma2": lambda: tf.Gemma2ForCausalLM(
            tf.Gemma2Config(
                **{**size, "head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0, **overrides}
            )
        ),
        "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**{**size, "logits_scaling": 3.0, **overrides})),
        "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**{**size, "logit_scale": 0.5, **overrides})),
        "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**{**size, **overrides})),
        "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(
                **{
                    **size,
                    "head_dim": 8,
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 16,
                    "output_router_logits": True,
                    **overrides,
                }
            )
        ),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(**{**small, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, **overrides})
        ),
        "opt": lambda: tf.OPTForCausalLM(
            tf.OPTConfig(
                **{
                    **small,
                    "hidden_size": 32,
                    "word_embed_proj_dim": 32,
                    "ffn_dim": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "init_std": 0.3,
                    **overrides,
                }
            )
        ),
        "mamba": lambda: tf.MambaForCausalLM(
            tf.MambaConfig(
                **{**small, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3, **overrides}
            )
        ),
    }
    return makers[family]().eval()


def reference_logprobs(model: tf.PreTrainedModel, input_ids: list[int], vocab_size: int | None = None) -> torch.Tensor:
    """`[len(input_ids), V]` log-probabilities from the model's ordinary forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([input_ids])).logits[0].float()
    return logits[:, :vocab_size].log_softmax(-1)
