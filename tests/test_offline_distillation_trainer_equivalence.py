"""
Choices that may change how fast, but not what is learnt: final parameters after some steps of SGD in fp32 are equal.

Batch and accumulation splits, and the layouts of a batch, are in `test_offline_distillation_trainer.py` and
`test_offline_distillation_trainer_data.py`; one and two ranks in `distributed/`.
"""

import pytest
import torch
from tiny_students import (
    VOCAB,
    assert_same_parameters,
    cached_dataset,
    dense_sums,
    losses_of,
    make_trainer,
    parameters_of,
    tiny_model,
    token_rows,
    trained,
)
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig, set_seed


STEPS = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "ce_weight": 0.5, "learning_rate": 0.2}


@pytest.fixture(scope="module")
def teacher():
    return tiny_model(seed=1).eval()


@pytest.fixture(scope="module")
def cached(teacher):
    return cached_dataset(token_rows([5, 9, 7, 4], prompt=2), teacher)


def after(tmp_path, dataset, family="llama", **options):
    student = tiny_model(family)
    trained(tmp_path, student, dataset, **{**STEPS, **options})
    return parameters_of(student)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cached):
    return after(tmp_path_factory.mktemp("plain"), cached)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_chunk_size": 1},
        {"loss_chunk_size": 3},
        {"loss_chunk_size": 4096},
        {"loss_memory_budget": 2_000.0},
        {"loss_logits_dtype": "float32"},
        {"loss_backward": "recompute"},
        {"loss_backward": "recompute", "loss_chunk_size": 3},
        {"loss_backend": "torch"},
        {"loss_backend": "reference"},
        {"torch_empty_cache_steps": 1},
        {"auto_find_batch_size": True},
    ],
    ids=str,
)
def test_how_it_is_computed_changes_nothing(tmp_path, cached, plain, options):
    assert_same_parameters(after(tmp_path, cached, **options), plain, atol=1e-5)


@pytest.mark.parametrize(
    "objective",
    [
        {"divergence": "reverse_kl"},
        {"divergence": "generalized_jsd", "beta": 0.3},
        {"tail": "none"},
        {"tail": "renormalize"},
        {"kd_weight": 0.3, "ce_weight": 0.9},
    ],
    ids=str,
)
def test_every_objective_is_the_same_on_every_backend(tmp_path, cached, objective):
    reference = after(tmp_path, cached, loss_backend="reference", **objective)
    for options in ({"loss_backend": "torch", "loss_chunk_size": 3}, {"loss_backward": "recompute"}):
        assert_same_parameters(after(tmp_path, cached, **objective, **options), reference, atol=1e-5)


def test_a_cache_of_the_whole_vocabulary_is_online_distillation(tmp_path, teacher):
    """K = V against the full KL of resident teacher and student, in the same loop of SGD."""
    rows = token_rows([6, 8, 5, 7], prompt=1)
    cached = cached_dataset(rows, teacher, top_k=VOCAB)
    offline = after(tmp_path, cached, ce_weight=0.0)
    online = tiny_model()
    optimizer = torch.optim.SGD(online.parameters(), lr=STEPS["learning_rate"])
    for _ in range(STEPS["num_train_epochs"]):
        for batch in (rows[:2], rows[2:]):
            kl, count = torch.zeros(()), 0
            for row in batch:
                ids = torch.tensor([row["input_ids"]])
                log_q = online(ids).logits[0, :-1].log_softmax(-1)
                with torch.no_grad():
                    log_p = teacher(ids).logits[0, :-1].log_softmax(-1)
                kl = kl + (log_p.exp() * (log_p - log_q)).sum()
                count += len(log_q)
            optimizer.zero_grad()
            (kl / count).backward()
            optimizer.step()
    assert_same_parameters(offline, online, atol=5e-4)  # the cache holds fp16 log-probabilities


# ---- Mixture of experts ----


def moe(family: str, coefficient: float, vocab: int = VOCAB):
    set_seed(0)
    shape = {
        "vocab_size": vocab,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
        "router_aux_loss_coef": coefficient,
        "output_router_logits": coefficient > 0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    if family == "gpt_oss":
        return AutoModelForCausalLM.from_config(GptOssConfig(num_local_experts=4, **shape))
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, **shape))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_router_loss_has_the_scale_of_sft(tmp_path, cached, family, accumulation):
    """Coefficient 0 against 0.1: the difference is 0.1 times the mean of the router losses of the micro-batches."""
    options = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    without, with_router = (
        trained(tmp_path, moe(family, coefficient), cached, **options) for coefficient in (0.0, 0.1)
    )
    total, count = dense_sums(moe(family, 0.0), cached)
    assert losses_of(without) == pytest.approx([(total / count).item()], abs=2e-6)
    router = []
    model = moe(family, 0.1)
    for start in range(0, 4, 4 // accumulation):
        batch = with_router.data_collator([cached[i] for i in range(start, start + 4 // accumulation)])
        output = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
        router.append(output.aux_loss.item())
    difference = losses_of(with_router)[0] - losses_of(without)[0]
    assert difference == pytest.approx(0.1 * sum(router) / len(router), abs=1e-5)
    logged = with_router.state.log_history[0]
    assert logged["aux_loss"] == pytest.approx(sum(router) / len(router), abs=1e-5)
    assert "aux_loss" not in without.state.log_history[0]
    gates = {name: p for name, p in with_router.model.named_parameters() if "router" in name or ".gate." in name}
    start = parameters_of(moe(family, 0.1))
    assert gates
    assert all(not torch.equal(p, start[name]) for name, p in gates.items())


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_router_loss_in_evaluation(tmp_path, cached, family):
    trainer = make_trainer(
        tmp_path, moe(family, 0.1), cached, eval_dataset=cached, learning_rate=0.0, eval_strategy="epoch"
    )
    trainer.train()
    assert trainer.state.log_history[1]["eval_loss"] == pytest.approx(losses_of(trainer)[0], abs=1e-6)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_are_named_as_parameters(tmp_path, cached, family):
    """Experts are one fused 3-D parameter: a module name misses them, `target_parameters` trains them."""
    from peft import LoraConfig, TaskType

    def lora(**options):
        return {"peft_config": LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, **options)}

    with pytest.raises(ValueError, match=r"'gate_up_proj', which matches no module.*`target_parameters`"):
        make_trainer(
            tmp_path,
            moe(family, 0.1),
            cached,
            trainer_kwargs=lora(target_modules=["q_proj", "gate_up_proj"]),
        )
    trainer = trained(
        tmp_path,
        moe(family, 0.1),
        cached,
        trainer_kwargs=lora(
            target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        ),
    )
    experts = {n: p for n, p in trainer.model.named_parameters() if "experts" in n and "lora_B" in n}
    assert len(experts) == 4  # two parameters in each of two layers
    assert all(p.count_nonzero() > 0 for p in experts.values())
