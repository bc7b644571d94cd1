"""Tiny students, cached datasets made from dense teachers, and the loss computed from `model(...).logits`."""

import torch
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    set_seed,
)

from trl_offline_distill import OfflineDistillationConfig, OfflineDistillationTrainer
from trl_offline_distill.teacher_cache.codecs import decode_topk, encode_topk
from trl_offline_distill.teacher_cache.manifest import TeacherManifest, tokenizer_fingerprint
from trl_offline_distill.teacher_cache.topk import TeacherTopK


VOCAB = 48
FEATURES = Features(
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
    teacher_topk=List(Value("large_binary")),
    teacher_manifest=Value("string"),
)
_DENSE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# `initializer_range=0.3`: with the default 0.02 every tiny model is almost uniform, and wrong losses look right
FAMILIES = {
    "llama": lambda vocab: LlamaConfig(vocab_size=vocab, num_key_value_heads=2, initializer_range=0.3, **_DENSE),
    "tied": lambda vocab: LlamaConfig(
        vocab_size=vocab, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True, **_DENSE
    ),
    "qwen3": lambda vocab: Qwen3Config(
        vocab_size=vocab, num_key_value_heads=1, head_dim=8, initializer_range=0.3, **_DENSE
    ),
    "gpt2": lambda vocab: GPT2Config(
        vocab_size=vocab,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "mamba": lambda vocab: MambaConfig(
        vocab_size=vocab, hidden_size=16, num_hidden_layers=2, state_size=4, expand=2, initializer_range=0.3
    ),
}


def tiny_tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", *(f"w{i}" for i in range(size - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def tiny_model(family: str = "llama", vocab: int = VOCAB, seed: int = 0, **config):
    set_seed(seed)
    made = FAMILIES[family](vocab)
    made.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **config})
    return AutoModelForCausalLM.from_config(made)


def token_rows(lengths, prompt=1, vocab: int = VOCAB, seed: int = 0) -> list[dict]:
    """Random rows; the first `prompt` labels of each (a number, or one for each row) are masked."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [prompt] * len(lengths) if isinstance(prompt, int) else prompt
    rows = []
    for length, masked in zip(lengths, prompts, strict=True):
        ids = torch.randint(2, vocab, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return rows


def manifest_of(tokenizer, vocab: int = VOCAB, name: str = "org/teacher", **fields) -> str:
    return TeacherManifest(
        teacher=name,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocab_size=vocab,
        **{"top_k": 5, **fields},
    ).to_json()


@torch.no_grad()
def teacher_blobs(row: dict, teacher, top_k: int, vocab: int = VOCAB) -> list[bytes]:
    """The dense teacher's top K of every trained position, as stored."""
    logprobs = teacher(torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)[:, :vocab]
    top, ids = logprobs.topk(top_k)
    log_tail = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)
    blobs = encode_topk(TeacherTopK(ids, top, log_tail), vocab_size=vocab)
    trained = [label != -100 for label in row["labels"][1:]] + [False]
    return [blob if kept else b"" for blob, kept in zip(blobs, trained, strict=True)]


def cached_dataset(rows: list[dict], teacher, tokenizer=None, top_k: int = 5, vocab: int = VOCAB, **fields) -> Dataset:
    tokenizer = tokenizer or tiny_tokenizer(vocab)
    manifest = manifest_of(tokenizer, vocab, **{"top_k": top_k, **fields})
    return Dataset.from_list(
        [
            {**row, "teacher_topk": teacher_blobs(row, teacher, top_k, vocab), "teacher_manifest": manifest}
            for row in rows
        ],
        features=FEATURES,
    )


def dense_sums(model, rows, kd_weight: float = 1.0, ce_weight: float = 0.0) -> tuple[torch.Tensor, int]:
    """
    Sum over the trained tokens of `kd_weight * KL + ce_weight * cross-entropy`, and their number, one row at a time,
    from the full logits: KL over the K tokens of the support and one outcome for all the others.
    """
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(torch.tensor([row["input_ids"]])).logits[0].float()
        for t, label in enumerate(row["labels"][1:]):
            if label == -100:
                continue
            teacher = decode_topk([row["teacher_topk"][t]])
            student = logits[t].log_softmax(-1)
            support = teacher.token_ids[0].long()
            outside = torch.ones_like(student, dtype=torch.bool)
            outside[support] = False
            p = torch.cat([teacher.logprobs[0], teacher.log_tail]).exp()
            q = torch.cat([student[support].exp(), student[outside].exp().sum()[None]])
            present = p > 0
            total = total + kd_weight * (p[present] * (p[present].log() - q[present].log())).sum()
            total = total - ce_weight * student[label]
            count += 1
    return total, count


def config(tmp_path, **options) -> OfflineDistillationConfig:
    """Plain SGD over the rows in their order, one log a step: what parameters become is easy to say."""
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return OfflineDistillationConfig(str(tmp_path), **{**defaults, **options})


def make_trainer(tmp_path, model, dataset, tokenizer=None, eval_dataset=None, trainer_kwargs=None, **options):
    return OfflineDistillationTrainer(
        model=model,
        args=config(tmp_path, **options),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or tiny_tokenizer(),
        **(trainer_kwargs or {}),
    )


def trained(tmp_path, model, dataset, **options):
    """The trainer after training."""
    trainer = make_trainer(tmp_path, model, dataset, **options)
    trainer.train()
    return trainer


def parameters_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_parameters(one, other, atol: float = 1e-6) -> None:
    one = one if isinstance(one, dict) else parameters_of(one)
    other = other if isinstance(other, dict) else parameters_of(other)
    assert one.keys() == other.keys()
    for name, parameter in one.items():
        torch.testing.assert_close(parameter, other[name], atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
