import contextlib
import copy
import functools
import logging
import warnings

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from loss_utils import OBJECTIVES, problem, top_k_of
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_offline_distill.loss.fused import ModuleHead, run_fused_loss
from trl_offline_distill.loss.head import add_distillation_head, module_head
from trl_offline_distill.loss.reference import dense_loss


VOCAB = 97
# What makes a family tiny, under the names that families have for it. Heads and hidden states stay wide apart from
# zero, so that a forgotten scale or soft-cap shows.
TINY = {
    "initializer_range": 0.3,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "head_dim", "state_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "time_step_rank": 4,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    # Values of their own for what a head does after its projection
    "final_logit_softcapping": 5.0,
    "logits_soft_cap": 5.0,
    "output_logit_soft_cap": 5.0,
    "logits_scaling": 3.0,
    "logit_scale": 0.4,
    "lm_head_multiplier": 0.6,
    "output_multiplier": 0.7,
    "dim_model_base": 8,
}
# Reference scans in pure Python: seconds a forward pass, and heads like those of their relatives
SLOW = {"bailing_hybrid", "kimi_linear"}
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - SLOW)
BUCKETS = 8


def tiny_config(family, **changes):
    config = CONFIG_MAPPING[family]()
    text = config.get_text_config()
    for name, value in (TINY | changes).items():
        if hasattr(text, name) and (getattr(text, name) is not None or "cap" in name or name in changes):
            with contextlib.suppress(AttributeError, NotImplementedError):
                setattr(text, name, value)
    return config


def tiny_model(family, **changes):
    """A tiny random model of a family, or `None` where its config does not shrink to one."""
    building = (ArithmeticError, AssertionError, AttributeError, ImportError, KeyError, NotImplementedError)
    building += (IndexError, RuntimeError, TypeError, ValueError, OSError, StrictDataclassError)
    try:
        config = tiny_config(family, **changes)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > 2e7:
            return None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        batch = model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]), use_cache=False).logits
        return (
            model if batch.isfinite().all() and batch.shape[-1] == model.get_output_embeddings().out_features else None
        )
    except building:
        return None


def batch_of(model, rows=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 90, (2, 7), generator=generator)
    labels = input_ids.clone()
    labels[0, :3], labels[1, 5:] = -100, -100
    teacher = top_k_of(2 * torch.randn(14, rows, generator=generator), 5)
    tensors = {
        "teacher_token_ids": teacher.token_ids.view(2, 7, -1),
        "teacher_logprobs": teacher.logprobs.view(2, 7, -1),
        "teacher_log_tail": teacher.log_tail.view(2, 7),
    }
    return {"input_ids": input_ids, "labels": labels}, tensors, teacher


def dense(model, divergence="forward_kl", beta=None, tail="bucket", kd_weight=0.7, ce_weight=0.5):
    """The loss from `model(...).logits`, divided by the trained positions."""
    inputs, _, teacher = batch_of(model)
    logits = model(input_ids=inputs["input_ids"], use_cache=False).logits.float()
    target = torch.full_like(inputs["labels"], -100)
    target[:, :-1] = inputs["labels"][:, 1:]
    mask = (target != -100).view(-1)
    values = dense_loss(
        logits.view(14, -1)[mask],
        teacher[mask],
        target.view(-1)[mask],
        divergence=divergence,
        beta=beta,
        tail=tail,
        temperature=1.0,
    )
    return (kd_weight * values["kd"].sum() + ce_weight * values["ce"].sum()) / mask.sum(), values


def fused(model, kd_weight=0.7, ce_weight=0.5):
    inputs, tensors, _ = batch_of(model)
    return model(**inputs, **tensors, distillation={"kd_weight": kd_weight, "ce_weight": ce_weight})


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, **options):
    expected, _ = dense(model, **options)
    expected_gradients = gradients(model, expected)
    output = fused(model)
    found = gradients(model, output.loss)
    torch.testing.assert_close(output.loss, expected, rtol=2e-5, atol=2e-5)
    # The dense gradients leave out parameters that the loss does not depend on; zeros are the same
    for name in expected_gradients.keys() | found.keys():
        zero = torch.zeros_like(dict(model.named_parameters())[name])
        ours, theirs = found.get(name, zero), expected_gradients.get(name, zero)
        scale = theirs.abs().max().clamp(min=1e-3)
        assert ((ours - theirs).abs().max() / scale).item() < 2e-3, name
    return output


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_every_family_is_right_or_refused_by_name(bucket):
    logging.disable(logging.WARNING)
    built, refused = [], []
    try:
        for family in FAMILIES[bucket::BUCKETS]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = tiny_model(family)
                if model is None:
                    continue
                built.append(family)
                try:
                    add_distillation_head(model, chunk_size=4)
                except ValueError as error:
                    assert type(model).__name__ in str(error)  # noqa: PT017
                    refused.append(family)
                    continue
                assert_same(model)
    finally:
        logging.disable(logging.NOTSET)
    assert len(built) >= 12, built
    assert len(refused) <= 2, refused


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("cohere", {"logit_scale": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("hyperclovax", {"logits_scaling": 1.0}),
        ("falcon_h1", {"lm_head_multiplier": 1.0}),
        ("recurrent_gemma", {"logits_soft_cap": 1e9}),
    ],
)
def test_the_families_above_do_transform_their_logits(family, changed):
    # Otherwise the test above would prove nothing about scale and soft-cap
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    plain, model = tiny_model(family, **changed), tiny_model(family)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        difference = model(input_ids=ids, use_cache=False).logits - plain(input_ids=ids, use_cache=False).logits
    assert difference.abs().max() > 0.05


@functools.cache
def llama():
    return tiny_model("llama")


def a_model(family="llama"):
    return copy.deepcopy(llama()) if family == "llama" else tiny_model(family)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
@pytest.mark.parametrize("family", ["llama", "modernbert-decoder"])
def test_both_roads_for_every_divergence(family, divergence, beta, tail, backward):
    model = a_model(family)
    sentence = add_distillation_head(
        model, divergence=divergence, beta=beta, tail=tail, chunk_size=3, backward=backward
    )
    assert ("kernels on its linear head" if family == "llama" else "its own head code") in sentence
    assert_same(model, divergence=divergence, beta=beta, tail=tail)


@pytest.mark.parametrize("size", [1.0, 300.0], ids=["ordinary", "large"])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_the_module_road_does_not_overflow_in_fp16(backward, size):
    """A chunk of many rows that all pull one way: the head's gradient is a sum that fp16 rounds."""
    torch.manual_seed(0)
    module = torch.nn.Linear(16, 64)
    hidden = torch.randn(2048, 16) + 2.0
    hidden[:, 0] = size
    with torch.no_grad():
        module.weight[:, 0] /= size
        student = module(hidden).double()
    teacher = top_k_of(student + 12.0 * torch.nn.functional.one_hot(torch.tensor(5), 64), 8)
    results = []
    for backend in ("torch", "reference"):
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16, enabled=backend == "torch"):
            output = run_fused_loss(
                ModuleHead(module, 64),
                leaf,
                tuple(module.parameters()),
                teacher,
                None,
                divergence="forward_kl",
                beta=None,
                tail="bucket",
                temperature=1.0,
                kd_weight=1.0,
                ce_weight=0.0,
                num_items=None,
                chunk_size=2048,
                loss_memory_budget=None,
                backward=backward,
                backend=backend,
            )
        results.append(torch.autograd.grad(output.loss * 2.0**10, [leaf, *module.parameters()]))
    for found, exact in zip(*results, strict=True):
        assert found.isfinite().all()
        assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("divergence", "beta", "tail"), OBJECTIVES)
def test_gradcheck_of_the_module_road(divergence, beta, tail, temperature, backward):
    inputs = problem(n=4, hidden_size=3, vocab_size=7, top_k=3)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 7)).double()

    def loss(hidden, *parameters):  # which `gradcheck` moves in place, where the module finds them
        return run_fused_loss(
            ModuleHead(module, 7),
            hidden,
            parameters,
            inputs["teacher"],
            inputs["labels"],
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=temperature,
            kd_weight=0.6,
            ce_weight=0.4,
            num_items=None,
            chunk_size=3,
            loss_memory_budget=None,
            backward=backward,
            backend="torch",
        ).loss

    assert torch.autograd.gradcheck(loss, (inputs["hidden_states"], *module.parameters()))


def lora(model, **options):
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options))
    return adapted, adapted.get_base_model()


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(
    ("options", "road"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "kernels"),
        ({"target_modules": ["q_proj", "lm_head"]}, "own head code"),
        ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, "own head code"),
        ({"target_modules": ["q_proj", "lm_head"], "use_rslora": True, "lora_dropout": 0.0}, "own head code"),
        ({"target_modules": "all-linear"}, "kernels"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "own head code"),
    ],
)
def test_adapters_on_the_head_train(options, road, backward):
    adapted, base = lora(a_model(), **options)
    assert road in add_distillation_head(base, chunk_size=3, backward=backward)
    assert_same(adapted)
    found = gradients(adapted, fused(adapted).loss)
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert found.keys() == trainable
    assert all(gradient.abs().max() > 0 for gradient in found.values())


def test_dropout_in_a_head_adapter_is_the_same_in_both_passes():
    adapted, base = lora(a_model(), target_modules=["lm_head"], lora_dropout=0.5)
    results = {}
    for backward in ("in_forward", "recompute"):
        base.forward = functools.partial(type(base).forward, base)
        add_distillation_head(base, chunk_size=3, backward=backward)
        adapted.train()
        torch.manual_seed(3)
        results[backward] = gradients(adapted, fused(adapted).loss)
    for name, gradient in results["in_forward"].items():
        torch.testing.assert_close(results["recompute"][name], gradient)


@pytest.mark.parametrize(("options", "units"), [({"target_modules": ["q_proj"]}, 2), ({}, 3)])
def test_flops_of_the_linear_road(options, units):
    model = adapted = a_model()
    if options:
        adapted, model = lora(model, **options)
    add_distillation_head(model, chunk_size=4)
    assert_head_units(adapted, units)


@pytest.mark.skipif(tiny_model("dory") is None, reason="this transformers has no such family")
def test_flops_of_the_module_road():
    model = tiny_model("dory")
    assert "own head code" in add_distillation_head(model, chunk_size=4)
    assert_head_units(model, 3)
    for parameter in model.lm_head.parameters():
        parameter.requires_grad_(False)
    assert_head_units(copy.deepcopy(model), 2)
    model = tiny_model("dory")
    add_distillation_head(model, chunk_size=4, backward="recompute")
    assert_head_units(model, 4)
    inputs, _, _ = batch_of(model)
    with torch.no_grad(), FlopCounterMode(display=False) as whole:
        fused(model)
    with torch.no_grad(), FlopCounterMode(display=False) as backbone:
        model.base_model(input_ids=inputs["input_ids"], use_cache=False)
    trained = (inputs["labels"][:, 1:] != -100).sum().item()
    assert whole.get_total_flops() - backbone.get_total_flops() == 2 * trained * 32 * VOCAB


def assert_head_units(model, units):
    """FLOPs of a step with the loss, less those of the backbone alone, in GEMMs over the head."""
    inputs, _, _ = batch_of(model)
    with FlopCounterMode(display=False) as whole:
        fused(model).loss.backward()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with FlopCounterMode(display=False) as backbone:
        base.base_model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state.sum().backward()
    trained = (inputs["labels"][:, 1:] != -100).sum().item()
    head = whole.get_total_flops() - backbone.get_total_flops()
    assert head == units * 2 * trained * 32 * VOCAB


def test_output_sums():
    model = a_model()
    add_distillation_head(model, chunk_size=3)
    output = fused(model)
    _, values = dense(model)
    inputs, _, teacher = batch_of(model)
    kept = torch.zeros(2, 7, dtype=torch.bool)
    kept[:, :-1] = inputs["labels"][:, 1:] != -100
    rows = teacher[kept.view(-1)]
    for name in ("kd", "ce", "entropy", "label_agreement", "teacher_agreement", "support_mass"):
        torch.testing.assert_close(getattr(output, f"{name}_sum"), values[name].sum().detach())
        assert not getattr(output, f"{name}_sum").requires_grad
    torch.testing.assert_close(output.captured_mass_sum, rows.logprobs.exp().sum())
    p = torch.cat([rows.logprobs, rows.log_tail[:, None]], -1)
    torch.testing.assert_close(output.teacher_entropy_sum, -(p.exp() * p).sum())
    assert output.num_tokens == kept.sum()
    assert output.aux_loss is None


def test_num_items_divides_and_shifted_labels_are_not_shifted_again():
    model = a_model()
    add_distillation_head(model)
    inputs, tensors, _ = batch_of(model)
    weights = {"distillation": {"kd_weight": 1.0, "ce_weight": 0.3}}
    output = model(**inputs, **tensors, **weights)
    divided = model(**inputs, **tensors, **weights, num_items_in_batch=torch.tensor(4))
    torch.testing.assert_close(divided.loss * 4, output.loss * output.num_tokens)
    shifted = torch.full_like(inputs["labels"], -100)
    shifted[:, :-1] = inputs["labels"][:, 1:]
    again = model(input_ids=inputs["input_ids"], shift_labels=shifted, **tensors, **weights)
    torch.testing.assert_close(again.loss, output.loss)


@pytest.mark.parametrize("family", ["llama", "modernbert-decoder"])
def test_a_compiled_student(family):
    model = a_model(family)
    add_distillation_head(model, chunk_size=3)
    expected = gradients(model, fused(model).loss)
    found = gradients(model, fused(torch.compile(model, backend="eager")).loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_sharded_head_is_gathered_once(monkeypatch):
    model = a_model()
    add_distillation_head(model, chunk_size=3)
    expected = gradients(model, fused(model).loss)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        weight = torch.distributed.tensor.distribute_tensor(
            model.lm_head.weight.detach(), mesh, [torch.distributed.tensor.Shard(0)]
        )
        model.lm_head.weight = torch.nn.Parameter(weight)
        calls = []
        gather = torch.distributed.tensor.DTensor.full_tensor
        monkeypatch.setattr(
            torch.distributed.tensor.DTensor, "full_tensor", lambda self: calls.append(self.shape) or gather(self)
        )
        found = gradients(model, fused(model).loss)
        assert calls == [(VOCAB, 32)]  # for four chunks, forward and backward
        assert isinstance(found["lm_head.weight"], torch.distributed.tensor.DTensor)
        found["lm_head.weight"] = found["lm_head.weight"].full_tensor()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_trained_reaches_every_parameter_with_zero():
    model = a_model()
    add_distillation_head(model)
    inputs, tensors, _ = batch_of(model)
    inputs["labels"].fill_(-100)
    output = model(**inputs, **tensors, distillation={"ce_weight": 1.0})
    found = gradients(model, output.loss)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in found.values())


def test_without_the_argument_nothing_changes():
    model = a_model()
    inputs, _, _ = batch_of(model)
    before = model(**inputs)
    generated = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    add_distillation_head(model)
    after = model(**inputs)
    torch.testing.assert_close(after.logits, before.logits)
    torch.testing.assert_close(after.loss, before.loss)
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False), generated)


def test_the_check_leaves_the_model_as_it_was():
    model = a_model("modernbert-decoder")
    model.train()
    model.model.layers[0].eval()
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    add_distillation_head(model)
    module_head(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_a_transform_that_nobody_listed_goes_through_the_models_own_code():
    class Odd(type(a_model())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            # Invisible in logits near zero
            output.logits = torch.where(output.logits.abs() < 20, output.logits, 20 * output.logits.sign())
            return output

    model = a_model()
    model.__class__ = Odd
    for parameter in model.parameters():
        parameter.data.mul_(0.3)
    assert "own head code" in add_distillation_head(model)


def test_logits_that_do_not_come_from_the_backbone_are_refused():
    class Detour(type(a_model())):
        def forward(self, input_ids=None, **kwargs):
            output = super().forward(input_ids=input_ids, **kwargs)
            output.logits = output.logits + self.model.embed_tokens(input_ids).sum(-1, keepdim=True).cumsum(1).sin()
            output.logits = output.logits * (1 + input_ids[..., None] % 3)
            return output

    model = a_model()
    model.__class__ = Detour
    with pytest.raises(ValueError, match=r"Detour cannot be used.*`model\(...\).logits`"):
        add_distillation_head(model)
    with pytest.raises(ValueError, match="Detour cannot be used"):
        module_head(model)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match=r"LlamaModel cannot be used.*AutoModelForCausalLM"):
        add_distillation_head(a_model().model)


def test_padded_rows_of_the_head_are_live_logits():
    model = a_model()
    model.resize_token_embeddings(pad_to_multiple_of=64)
    add_distillation_head(model)
    assert_same(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "modernbert-decoder"])
def test_module_head_gives_the_models_logits(family):
    model = a_model(family)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(module_head(model)(hidden), model(input_ids=ids, use_cache=False).logits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_passes_its_check(dtype):
    for family in ("llama", "gemma2", "modernbert-decoder"):
        model = a_model(family).to(dtype)
        add_distillation_head(model, chunk_size=4)
        loss = fused(model).loss
        loss.backward()
        assert loss.isfinite()
        torch.testing.assert_close(loss.detach().float(), dense(model)[0].detach().float(), rtol=0.05, atol=0.05)


def test_bad_options_are_refused_before_anything_is_patched():
    model = a_model()
    for options, message in (
        ({"divergence": "kl"}, "`divergence`"),
        ({"chunk_size": 0}, "`chunk_size`"),
        ({"backward": "x"}, "`backward`"),
        ({"backend": "x"}, "`backend`"),
    ):
        with pytest.raises(ValueError, match=message):
            add_distillation_head(model, **options)
    assert "forward" not in vars(model)
