"""Adapters: what trains, what it computes, and that it is the same after saving, reloading and merging."""

import re
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from tiny_students import (
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
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


BODY = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": {"target_modules": BODY},
    "rslora": {"target_modules": BODY, "use_rslora": True},
    "dora": {"target_modules": BODY, "use_dora": True},
    "pissa": {"target_modules": BODY, "init_lora_weights": "pissa"},
    "all-linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "dora head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved head": {"target_modules": BODY, "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": BODY, "modules_to_save": ["embed_tokens"]},
}


@pytest.fixture(scope="module")
def teacher():
    return tiny_model(seed=1).eval()


@pytest.fixture(scope="module")
def cached(teacher):
    return cached_dataset(token_rows([6, 9, 4], prompt=2), teacher)


def lora(**options) -> LoraConfig:
    return LoraConfig(task_type=TaskType.CAUSAL_LM, **{"r": 2, "lora_alpha": 4, **options})


@torch.no_grad()
def shake(model, seed: int = 0):
    """Random adapters, so that they matter before the first step (B starts at 0)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def dense_loss(model, rows, ce_weight=0.5) -> torch.Tensor:
    total, count = dense_sums(model, rows, 1.0, ce_weight)
    return total / count


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_has_the_dense_loss_and_gradient(tmp_path, cached, kind):
    """Every trainable parameter gets the gradient of the dense logits, also where the adapter is on the head."""
    trainer = make_trainer(
        tmp_path, tiny_model(), cached, trainer_kwargs={"peft_config": lora(**ADAPTERS[kind])}, ce_weight=0.5
    )
    model = trainer.model
    shake(model)
    model.train()
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = dense_loss(model, cached)
    gradients = torch.autograd.grad(expected, list(wanted.values()))
    loss = trainer.compute_loss(model, trainer.data_collator(list(cached)))
    torch.testing.assert_close(loss, expected, atol=2e-6, rtol=0)
    loss.backward()
    for (name, parameter), gradient in zip(wanted.items(), gradients, strict=True):
        assert parameter.grad is not None, name
        assert gradient.count_nonzero() > 0, name
        torch.testing.assert_close(parameter.grad, gradient, atol=5e-6, rtol=1e-4, msg=lambda t, n=name: f"{n}: {t}")
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_trains_alone_and_survives_saving_and_merging(tmp_path, cached, kind):
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    before = parameters_of(base)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = trained(
        tmp_path / "run",
        student,
        cached,
        trainer_kwargs={"peft_config": lora(**ADAPTERS[kind])},
        ce_weight=0.5,
        num_train_epochs=2,
    )
    model = trainer.model.eval()
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if plain in before and kind != "pissa":  # PiSSA takes its part out of the frozen weight at the start
            assert not parameter.requires_grad
            assert torch.equal(parameter, before[plain]), name
    live = dense_loss(model, cached).item()
    assert live < dense_loss(tiny_model(), cached).item()
    trainer.save_model()
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    reloaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    assert dense_loss(reloaded, cached).item() == pytest.approx(live, abs=1e-6)
    merged = reloaded.merge_and_unload()
    assert dense_loss(merged, cached).item() == pytest.approx(live, abs=1e-5)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["body", "head"])
def test_tied_heads(tmp_path, cached, targets):
    trainer = make_trainer(
        tmp_path, tiny_model("tied"), cached, trainer_kwargs={"peft_config": lora(target_modules=targets)}
    )
    shake(trainer.model)
    total, count = dense_sums(trainer.model, cached)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(cached)))
    torch.testing.assert_close(loss, total / count, atol=2e-6, rtol=0)


def test_lora_that_starts_at_zero_has_the_loss_of_the_bare_student(tmp_path):
    """A uniform teacher: cross-entropy in its place would give another number."""
    uniform = tiny_model()
    with torch.no_grad():
        uniform.lm_head.weight.zero_()
    cache = cached_dataset(token_rows([6, 9]), uniform.eval())
    bare = trained(tmp_path, tiny_model(), cache, learning_rate=0.0)
    adapted = trained(
        tmp_path, tiny_model(), cache, learning_rate=0.0, trainer_kwargs={"peft_config": lora(target_modules=BODY)}
    )
    assert losses_of(adapted) == pytest.approx(losses_of(bare), abs=1e-6)
    assert losses_of(adapted) == pytest.approx(
        [(lambda x: (x[0] / x[1]).item())(dense_sums(tiny_model(), cache))], abs=1e-6
    )


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
@pytest.mark.parametrize("targets", [BODY, ["q_proj", "lm_head"]], ids=["body", "head"])
def test_gradient_checkpointing_changes_nothing(tmp_path, cached, targets, checkpointing):
    def run(**options):
        trainer = trained(
            tmp_path,
            tiny_model(),
            cached,
            num_train_epochs=2,
            trainer_kwargs={"peft_config": lora(target_modules=targets)},
            **options,
        )
        return trainer.model

    plain = run()
    checkpointed = run(gradient_checkpointing=True, gradient_checkpointing_kwargs=checkpointing)

    def nonzero(model):
        return sum(1 for name, p in model.named_parameters() if "lora_B" in name and p.count_nonzero() > 0)

    assert nonzero(checkpointed) == nonzero(plain) > 0
    assert_same_parameters(checkpointed, plain, atol=1e-5)


def test_full_training_with_gradient_checkpointing(tmp_path, cached):
    plain = trained(tmp_path, tiny_model(), cached, num_train_epochs=2).model
    for reentrant in (True, False):
        checkpointed = trained(
            tmp_path,
            tiny_model(),
            cached,
            num_train_epochs=2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        ).model
        assert_same_parameters(checkpointed, plain, atol=1e-5)


def test_a_model_that_is_wrapped_already_and_its_second_adapter(tmp_path, cached):
    model = get_peft_model(tiny_model(), lora(target_modules=BODY), adapter_name="first")
    model.add_adapter("second", lora(target_modules=["q_proj"]))
    model.set_adapter("second")
    first = {name: p.clone() for name, p in model.named_parameters() if ".first." in name}
    trainer = trained(tmp_path, model, cached)
    total, count = dense_sums(tiny_model(), cached)
    assert losses_of(trainer) == pytest.approx([(total / count).item()], abs=2e-6)
    moved = {name for name, p in model.named_parameters() if ".second." in name and "lora_B" in name and p.any()}
    assert len(moved) == 2
    for name, p in model.named_parameters():
        if ".first." in name:
            assert torch.equal(p, first[name])


def test_resume_an_adapter(tmp_path, cached):
    options = {
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "trainer_kwargs": {"peft_config": lora(target_modules=["q_proj", "lm_head"])},
    }
    whole = trained(tmp_path, tiny_model(), cached, **options)
    resumed = make_trainer(tmp_path, tiny_model(), cached, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_parameters(resumed.model, whole.model, atol=0.0)


def test_continue_with_a_saved_adapter(tmp_path, cached):
    tiny_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = trained(tmp_path / "one", base, cached, trainer_kwargs={"peft_config": lora(target_modules=BODY)})
    trainer.save_model()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"no trainable parameter.*is_trainable=True"):
        make_trainer(tmp_path / "two", PeftModel.from_pretrained(base, tmp_path / "one"), cached)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = trained(tmp_path / "two", PeftModel.from_pretrained(base, tmp_path / "one", is_trainable=True), cached)
    assert losses_of(again)[0] < losses_of(trainer)[0]


# ---- What is said, and what is refused ----


def test_what_trains_is_printed_once(tmp_path, cached, capsys):
    trainer = make_trainer(
        tmp_path, tiny_model(), cached, trainer_kwargs={"peft_config": lora(target_modules=["q_proj", "lm_head"])}
    )
    printed = re.findall(r"Training .*", capsys.readouterr().out)
    count = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    assert len(printed) == 1
    assert (
        f"Training {count:,} of {total:,} parameters ({count / total:.3%}; weights 2.8e-05 GB float32)" in printed[0]
    )
    assert printed[0].endswith(": lm_head x 1, q_proj x 2")
    assert "its own head code" in trainer.head_description
    trainer = make_trainer(tmp_path, tiny_model(), cached)
    count = sum(p.numel() for p in trainer.model.parameters())
    assert f"Training {count:,} of {count:,} parameters (100.000%; weights " in (out := capsys.readouterr().out)
    assert out.rstrip().endswith("GB float32): everything")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_proj", "qkv_proj"]}, "`target_modules` .*'qkv_proj', which matches no module"),
        ({"target_modules": BODY, "modules_to_save": ["lm_head", "score"]}, "`modules_to_save` .*'score'"),
        ({"target_modules": BODY, "target_parameters": ["experts.w1"]}, "`target_parameters` .*'experts.w1'"),
        # PEFT matches a string against the whole path, and is content if the parameters match
        ({"target_modules": "q_proj", "target_parameters": ["v_proj.weight"]}, "`target_modules` .*'q_proj', which"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(tmp_path, cached, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, tiny_model(), cached, trainer_kwargs={"peft_config": lora(**options)})


def test_prompt_learning_is_refused(tmp_path, cached):
    prompt = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(ValueError, match="`peft_config` is a PromptTuningConfig: prompt learning"):
        make_trainer(tmp_path, tiny_model(), cached, trainer_kwargs={"peft_config": prompt})
    with pytest.raises(ValueError, match="adapter 'default' of `model` is a PromptTuningConfig"):
        make_trainer(tmp_path, get_peft_model(tiny_model(), prompt), cached)


def test_sft_still_refuses_an_adapter_on_the_head_afterwards(tmp_path, cached):
    from trl.trainer import sft_trainer

    before = vars(sft_trainer).copy()
    make_trainer(tmp_path, tiny_model(), cached, trainer_kwargs={"peft_config": lora(target_modules=["lm_head"])})
    assert vars(sft_trainer) == before


# ---- Quantised students ----


@pytest.mark.parametrize("quantised_head", [False, True])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["body", "head"])
def test_qlora(tmp_path, cached, targets, quantised_head):
    """4-bit weights by bitsandbytes, which runs on a CPU too."""
    pytest.importorskip("bitsandbytes")
    # Its kernels for CPUs with AVX-512 want multiples of 32
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    tiny_model(vocab=64, **wide).save_pretrained(tmp_path / "base")
    student = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base",
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=["nothing"] if quantised_head else ["lm_head"],
        ),
    )
    assert (student.lm_head.weight.dtype == torch.uint8) == quantised_head
    trainer = make_trainer(
        tmp_path, student, cached, ce_weight=0.5, trainer_kwargs={"peft_config": lora(target_modules=targets)}
    )
    shake(trainer.model)
    expected = dense_loss(trainer.model, cached)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(cached)))
    torch.testing.assert_close(loss, expected, atol=2e-3, rtol=0)  # SFTTrainer makes these adapters bf16
    trainer.evaluate(cached)  # which may not change what is trained
    model = trainer.model.train()

    def gradients(loss) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.requires_grad}

    found = gradients(trainer.compute_loss(model, trainer.data_collator(list(cached))))
    unpack_4bit_layers(model)
    for name, exact in gradients(dense_loss(model, cached)).items():
        assert exact.norm() > 0, name
        assert (found[name] - exact).norm() <= 0.03 * exact.norm(), name


def unpack_4bit_layers(model) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, layer in list(model.named_modules()):
        if type(layer) is Linear4bit:
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False).requires_grad_(False)
            plain.weight.copy_(dequantize_4bit(layer.weight, layer.weight.quant_state))
            model.set_submodule(name, plain)


def test_a_4bit_student_that_was_evaluated_on_this_cpu_is_refused(tmp_path, cached):
    class Packed(torch.nn.Linear):
        support_avx512bf16_for_cpu = True

    student = tiny_model()
    student.model.layers[0].mlp.up_proj = Packed(16, 32, bias=False)
    student.model.layers[0].mlp.up_proj.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
    with pytest.raises(ValueError, match="was packed for inference when `model` was evaluated"):
        make_trainer(tmp_path, student, cached)


# Without bitsandbytes: a layer with packed weights that computes its own product.


class PackedLinear(torch.nn.Linear):
    """Like a 4-bit layer: the weight is packed integers of another shape, and only `forward` knows the numbers."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.scale = layer.weight.detach().abs().max() / 7
        levels = (layer.weight.detach() / self.scale).round().to(torch.int8) + 8
        packed = (levels[:, ::2] * 16 + levels[:, 1::2]).to(torch.uint8).reshape(-1, 1)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def numbers(self) -> torch.Tensor:
        packed = self.weight.reshape(self.out_features, -1).to(torch.int16)
        return (torch.stack([packed // 16, packed % 16], -1).reshape(self.out_features, -1) - 8) * self.scale

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.numbers().to(hidden.dtype))


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["body", "head"])
def test_quantised_student(tmp_path, cached, targets):
    student = tiny_model()
    for layer in student.model.layers:
        layer.mlp.down_proj = PackedLinear(layer.mlp.down_proj)
    student.lm_head = PackedLinear(student.lm_head)
    if "lm_head" in targets:  # an adapter beside the packed weight, as PEFT's own 4-bit layer has
        student.lm_head = AdaptedPackedLinear(student.lm_head)
        targets = ["q_proj"]
    trainer = make_trainer(
        tmp_path, student, cached, trainer_kwargs={"peft_config": lora(target_modules=targets)}, ce_weight=0.5
    )
    assert "its own head code" in trainer.head_description
    if isinstance(student.lm_head, AdaptedPackedLinear):
        student.lm_head.down.requires_grad_(True)
    shake(trainer.model)
    expected = dense_loss(trainer.model, cached)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(cached)))
    torch.testing.assert_close(loss, expected, atol=2e-6, rtol=0)
    loss.backward()
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name:
            assert parameter.grad.count_nonzero() > 0, name


class AdaptedPackedLinear(torch.nn.Module):
    def __init__(self, layer: PackedLinear):
        super().__init__()
        self.layer, self.out_features = layer, layer.out_features
        self.down = torch.nn.Parameter(torch.randn(layer.out_features, layer.in_features) * 0.1)

    def forward(self, hidden):
        return self.layer(hidden) + torch.nn.functional.linear(hidden, self.down)
