"""Runs every step of a recipe, for real or on a tiny random model of the same family."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


STEPS = ("drop_layers", "build", "train")
TINY_TEXTS = [
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "A teacher is asked once; what it said is kept, and many students learn from it.",
    "O rato roeu a roupa do rei de Roma, e a rainha, com raiva, resolveu remendar.",
    "Two and two are four, four and four are eight, and eight and eight are sixteen.",
]
# Chat in the manner of ChatML, the assistant's turns marked for `assistant_only_loss`.
TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What a GPU run needs and a tiny one on a CPU cannot have, or need not.
_NOT_TINY = ("attn_implementation", "packing", "padding_free", "num_train_epochs", "warmup_steps")


def run_recipe(name: str) -> None:
    """Every step of a recipe that it has a file for, as its own command would run it."""
    from importlib import import_module

    from ..recipes import find_recipe

    folder = find_recipe(name, "train.yaml").parent
    for step in STEPS:
        if (folder / f"{step}.yaml").is_file():
            print(f"== {step}", flush=True)
            code = import_module(f".{step}_command", __package__).run(["--recipe", name])
            if code:
                raise RuntimeError(f"The step {step} of the recipe {name!r} ended with exit code {code}.")


def run_tiny_recipe(name: str) -> dict[str, float]:
    """
    The whole recipe on tiny random models: drop layers, build, train, save, reload, evaluate. Minutes become seconds,
    and every option of the recipe that does not need a GPU is the recipe's own.

    Returns:
        `dict[str, float]`: KL to the teacher `before` and `after` training, in nats a token.
    """
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    from ..demo import held_out_metrics
    from ..recipes import find_recipe
    from . import build_command, drop_layers_command, train_script
    from .arguments import parse

    folder = find_recipe(name, "train.yaml").parent
    steps = {step: _read(folder / f"{step}.yaml") for step in STEPS if (folder / f"{step}.yaml").is_file()}
    build, train, drop = steps["build"], steps["train"], steps.get("drop_layers")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        served = build["teacher"].startswith("http")
        teacher_name = build["processing_class"] if served else build["teacher"]
        tokenizer = _tiny_tokenizer()

        def save(model_name: str, place: str, seed: int) -> str:
            set_seed(seed)
            model = AutoModelForCausalLM.from_config(_tiny_config(model_name, len(tokenizer)))
            model.save_pretrained(scratch / place)
            tokenizer.save_pretrained(scratch / place)
            return str(scratch / place)

        teacher = save(teacher_name, "teacher", 0)
        if drop is not None:
            student = str(scratch / "student")
            drop |= {"model_name_or_path": teacher, "output_dir": student, "dtype": "float32"}
            drop_layers_command.run(["--config", _write(scratch / "drop_layers.yaml", drop)])
        else:
            student = save(train["model_name_or_path"], "student", 1)

        build |= {
            "teacher": teacher,
            "processing_class": teacher,
            "student": student,
            "model_init_kwargs": {"dtype": "float32"},
            "dataset_name": "json",
            "dataset_data_files": [_tiny_data(scratch / "data.jsonl", build.get("assistant_only_loss", False))],
            "max_length": 96,
            "top_k": min(build["top_k"], 20),
            "output_dir": str(scratch / "cache"),
        }
        build.pop("dataset_config", None)
        if served:
            print("tiny: the transformers engine stands in for the server")
        build_command.run(["--config", _write(scratch / "build.yaml", build)])

        train = {key: value for key, value in train.items() if key not in _NOT_TINY} | {
            "model_name_or_path": student,
            "dataset_name": str(scratch / "cache"),
            "output_dir": str(scratch / "trained"),
            "dtype": "float32",
            "bf16": False,
            "use_cpu": True,
            "max_length": 96,
            "max_steps": 8,
            "learning_rate": 1e-2,
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": 4,
            "save_strategy": "no",
        }
        parsed = parse(train_script.make_parser(), ["--config", _write(scratch / "train.yaml", train)])
        train_script.main(*parsed[:-1])

        script = parsed[0]
        rows = train_script.load_cached(script, parsed[3])[script.dataset_train_split]
        models = {
            key: AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
            for key, place in (("before", student), ("after", str(scratch / "trained")))
        }
        reference = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
        measured = held_out_metrics(reference, models, rows)
    return {key: measured[key]["kl"] for key in models}


def _read(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _write(path: Path, options: dict[str, Any]) -> str:
    import yaml

    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return str(path)


def _tiny_tokenizer() -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TINY_TEXTS,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TINY_TEMPLATE
    return tokenizer


def _tiny_config(name: str, vocab_size: int) -> "PretrainedConfig":
    """
    A configuration of the named model's family with few parameters, and as many layers as the recipe's options name.

    Raises:
        ValueError: No family is known for the name.
    """
    from transformers import GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    size = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 1,
    }
    experts = {"num_experts_per_tok": 2}
    families = {
        "Qwen/Qwen3-235B-A22B": lambda: Qwen3MoeConfig(
            **size, **experts, num_hidden_layers=2, num_experts=4, moe_intermediate_size=16
        ),
        "Qwen/Qwen3-": lambda: Qwen3Config(**size, num_hidden_layers=2, tie_word_embeddings=True),
        # The recipes name experts and layers up to the 24th.
        "openai/gpt-oss-": lambda: GptOssConfig(**size, **experts, num_hidden_layers=24, num_local_experts=4),
        "demo_output/teacher": lambda: LlamaConfig(**size, num_hidden_layers=30, tie_word_embeddings=True),
    }
    for prefix, make in families.items():
        if name.startswith(prefix):
            return make()
    raise ValueError(f"No tiny model stands in for {name!r}; known: {', '.join(families)}.")


def _tiny_data(path: Path, chat: bool) -> str:
    import json

    def row(text: str) -> dict[str, Any]:
        if not chat:
            return {"text": text}
        first, _, rest = text.partition(" ")
        return {"messages": [{"role": "user", "content": first}, {"role": "assistant", "content": rest}]}

    path.write_text("".join(json.dumps(row(text)) + "\n" for text in TINY_TEXTS), encoding="utf-8")
    return str(path)
