"""
Joins the fused loss to a causal language model: the backbone runs as usual, and the hidden states of the trained
positions go into the loss instead of into the head.

The logits of a chunk come by one of two roads, chosen once and checked against the model's own logits:

* the linear road: `lm_head` is a plain `nn.Linear`, followed by a transform that `logit_transform.py` reads from the
  config. The kernels work on its weight.
* the module road: any other head (an adapter or a quantised weight on it, an MLP, a transform nobody listed). The
  model's own forward runs on the chunk, with its backbone replaced by a stub that returns the chunk as last hidden
  state.
"""

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .divergences import check_objective
from .fused import IGNORE_INDEX, LinearHead, ModuleHead, check_options, resolve_backend, run_fused_loss
from .logit_transform import read_logit_transform


# Largest difference between a road's logits and the model's own that rounding explains, relative to the largest logit
ROAD_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}


SUMS = (
    "kd_sum",
    "ce_sum",
    "entropy_sum",
    "teacher_entropy_sum",
    "label_agreement_sum",
    "teacher_agreement_sum",
    "support_mass_sum",
    "captured_mass_sum",
)


@dataclass
class DistillationCausalLMOutput(ModelOutput):
    """
    What a model with a distillation head returns. Sums run over the trained positions of the batch, and are detached.

    Args:
        loss (`Tensor`):
            Scalar, differentiable: the weighted sums over `num_items_in_batch`, or over `num_tokens` without it. The
            router's auxiliary loss is not part of it.
        kd_sum, ce_sum (`Tensor`):
            Divergence (with its factor `temperature ** 2`) and cross-entropy, unweighted, in nats.
        entropy_sum, teacher_entropy_sum (`Tensor`):
            Entropy in nats of the student's distribution, and of the teacher's over its support and one tail outcome.
        label_agreement_sum, teacher_agreement_sum (`Tensor`):
            Positions at which the student's most likely token is the label, and the teacher's most likely token.
        support_mass_sum, captured_mass_sum (`Tensor`):
            The student's and the teacher's probability of the teacher's support.
        num_tokens (`Tensor`):
            Trained positions.
        sum_bits (`Tensor`):
            The sums in the order of `SUMS` once more, float32 as the int32 of the same bits: FSDP rounds the floats
            that a model returns.
        aux_loss (`Tensor`, *optional*):
            The router's load-balancing loss, unweighted, for a mixture of experts that reports it.
    """

    loss: Tensor | None = None
    kd_sum: Tensor | None = None
    ce_sum: Tensor | None = None
    entropy_sum: Tensor | None = None
    teacher_entropy_sum: Tensor | None = None
    label_agreement_sum: Tensor | None = None
    teacher_agreement_sum: Tensor | None = None
    support_mass_sum: Tensor | None = None
    captured_mass_sum: Tensor | None = None
    num_tokens: Tensor | None = None
    sum_bits: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass
class _TeacherRows:
    """The fields of a `TeacherTopK` that the loss reads, indexed together."""

    token_ids: Tensor
    logprobs: Tensor
    log_tail: Tensor
    log_tail_at: Tensor | None
    tail_temperatures: tuple[float, ...]
    vocab_size: int | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "_TeacherRows":
        return _TeacherRows(
            function(self.token_ids),
            function(self.logprobs),
            function(self.log_tail),
            None if self.log_tail_at is None else function(self.log_tail_at),
            self.tail_temperatures,
            self.vocab_size,
        )

    def to(self, device: torch.device) -> "_TeacherRows":
        return self.map(lambda tensor: tensor.to(device))

    def __getitem__(self, index: Any) -> "_TeacherRows":
        return self.map(lambda tensor: tensor[index])


def _as_float32(values: Tensor | None) -> Tensor | None:
    """Float32 values whose bits came as int32: mixed-precision wrappers (FSDP, DeepSpeed) round what is a float."""
    return values.view(torch.float32) if values is not None and values.dtype == torch.int32 else values


@dataclass
class _StubOutput(ModelOutput):
    """A backbone's output that has a last hidden state, and `None` under every other name it is asked for."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Stub(nn.Module):
    """Stands in for a backbone: returns given hidden states, and is the backbone for everything but a call."""

    def __init__(self, backbone: nn.Module, hidden: Tensor):
        super().__init__()
        object.__setattr__(self, "backbone", backbone)
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "called", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "backbone"), name)

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        object.__setattr__(self, "called", True)
        return _StubOutput(last_hidden_state=self.hidden)


def _stubbed_logits(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, bool]:
    """Logits `[n, V]` of hidden states `[n, H]` by the model's own forward, and whether it asked its backbone."""
    name = model.base_model_prefix
    backbone = model._modules[name]
    stub = _Stub(backbone, hidden[None])
    input_ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    model._modules[name] = stub
    try:
        # The class's own forward: the instance's may be patched or hooked for whole batches
        logits = type(model).forward(model, input_ids=input_ids, use_cache=False, return_dict=True).logits[0]
    finally:
        model._modules[name] = backbone
    return logits, stub.called


def _linear_head(model: PreTrainedModel) -> nn.Linear | None:
    """The output layer if it is a plain floating point `nn.Linear` with its weight in memory."""
    head = model.get_output_embeddings()
    # A subclass may do anything: an adapter, a quantised weight, a scale of its own
    if type(head) is not nn.Linear or not head.weight.is_floating_point() or head.weight.is_meta:
        return None
    return head


def _head_rows(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    rows = getattr(head, "out_features", None)
    return rows if rows is not None else model.config.get_text_config().vocab_size


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode comes back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _is_partitioned(parameter: Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 holds this parameter in pieces, empty outside its gather context."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def _gathered(*parameters: Tensor | None) -> contextlib.AbstractContextManager:
    """Whole parameters under DeepSpeed ZeRO-3, each listed once; nothing to do elsewhere."""
    pieces = {id(p): p for p in parameters if p is not None and _is_partitioned(p)}
    if not pieces:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(pieces.values()))


class _GatheredLinearHead(LinearHead):
    """The linear head, whole for as long as it is used, in the forward pass and again in a recomputing backward
    pass."""

    def rows(self, tensors: tuple[Tensor | None, ...]) -> int:
        # A partitioned weight is empty outside `running`; DeepSpeed keeps its shape beside it
        return getattr(tensors[0], "ds_shape", tensors[0].shape)[0]

    @contextlib.contextmanager
    def running(self, hidden: Tensor, tensors: tuple[Tensor | None, ...], chunk_size: int) -> Iterator[None]:
        with _gathered(*tensors), super().running(hidden, tensors, chunk_size):
            yield


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """`max |ours - theirs| / max |theirs|` and the tolerance for their dtype; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf, 0.0
    difference = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-6)
    return difference.nan_to_num(nan=math.inf).item(), ROAD_TOLERANCE.get(theirs.dtype, ROAD_TOLERANCE[torch.float32])


class _Probe:
    """A few real tokens through the model: hidden states of the backbone, and the logits the model makes of them."""

    def __init__(self, model: PreTrainedModel):
        embedding = model.get_input_embeddings().weight
        rows = min(len(embedding), _head_rows(model))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, rows, (1, 6), generator=generator).to(embedding.device)
        self.model, self.ids = model, ids
        self.hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        self.logits = type(model).forward(model, input_ids=ids, use_cache=False, return_dict=True).logits[0]

    def logits_at(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        """The logits the model makes where its head is given `hidden` `[6, H]`: large ones show a soft-cap."""
        hook = head.register_forward_pre_hook(lambda module, args: (hidden[None],))
        try:
            return (
                type(self.model).forward(self.model, input_ids=self.ids, use_cache=False, return_dict=True).logits[0]
            )
        finally:
            hook.remove()


def _large_hidden(head: nn.Linear) -> Tensor:
    """Hidden states `[6, H]` with logits of about 30, whatever the head's scale: no unlisted soft-cap can hide."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, head.in_features, generator=generator).to(head.weight)
    return hidden * (30.0 / nn.functional.linear(hidden, head.weight).float().std().clamp(min=1e-6)).to(hidden.dtype)


def _linear_road_error(model: PreTrainedModel, head: nn.Linear, probe: _Probe) -> str | None:
    """Why the linear road gives other logits than the model, or `None`."""
    transform = read_logit_transform(model.config.get_text_config())

    def road(hidden: Tensor) -> Tensor:
        return transform(nn.functional.linear(hidden, head.weight, head.bias))

    if head.in_features != probe.hidden.shape[-1]:
        return f"it takes {head.in_features} features and the last hidden states have {probe.hidden.shape[-1]}"
    device = head.weight.device
    difference, tolerance = _difference(road(probe.hidden.to(device)), probe.logits.to(device))
    if difference > tolerance:
        return f"its logits differ by {difference:.1e} of the largest (tolerance {tolerance:.0e})"
    hidden = _large_hidden(head)
    difference, tolerance = _difference(road(hidden), probe.logits_at(head, hidden).to(device))
    if difference > tolerance:
        return f"its logits differ by {difference:.1e} of the largest where they are large (tolerance {tolerance:.0e})"
    return None


def _module_road_error(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> str | None:
    """Why the module road gives other logits than the model, or `None`."""
    try:
        ours, asked = _stubbed_logits(model, hidden)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        return f"its forward does not run on hidden states alone ({type(error).__name__}: {error})"
    if not asked:
        return f"its forward does not go through `{model.base_model_prefix}`"
    difference, tolerance = _difference(ours, logits.to(ours.device))
    if difference > tolerance:
        return f"its logits differ by {difference:.1e} of the largest (tolerance {tolerance:.0e})"
    return None


def _refuse(model: PreTrainedModel, reasons: list[str]) -> ValueError:
    return ValueError(
        f"{type(model).__name__} cannot be used: no way from its last hidden states to its logits reproduces "
        f"`model(...).logits` ({'; '.join(reasons)}). Use a causal language model whose logits are computed from "
        "`base_model(...).last_hidden_state`."
    )


def _check_causal(model: PreTrainedModel) -> None:
    name = getattr(model, "base_model_prefix", "")
    if name not in getattr(model, "_modules", {}) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} cannot be used: it needs a backbone (`base_model`) and output embeddings, as "
            "causal language models have. Load it with `AutoModelForCausalLM`."
        )


def module_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """
    The model's own way from last hidden states to logits, as a function, checked once.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model. If its forward does not go through its backbone, but the logits are a known
            transform of a plain linear head, that is used.

    Returns:
        `Callable[[Tensor], Tensor]`: hidden states `[n, H]` -> logits `[n, V]`.

    Raises:
        ValueError: names the model class if neither reproduces `model(...).logits`.
    """
    _check_causal(model)
    head = _linear_head(model)
    with _inference(model):
        probe = _Probe(model)
        reasons = []
        if head is not None:
            reason = _linear_road_error(model, head, probe)
            if reason is None:
                transform = read_logit_transform(model.config.get_text_config())
                return lambda hidden: transform(
                    nn.functional.linear(hidden.to(head.weight.device), head.weight, head.bias)
                )
            reasons.append(f"as a linear head, {reason}")
        reason = _module_road_error(model, probe.hidden, probe.logits)
        if reason is None:
            return lambda hidden: _stubbed_logits(model, hidden)[0]
    raise _refuse(model, [*reasons, f"through its own code, {reason}"])


def _head_parameters(model: PreTrainedModel, hidden: Tensor) -> list[str]:
    """Names of the trainable parameters that the logits of given hidden states depend on."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        return []
    with torch.enable_grad():
        logits, _ = _stubbed_logits(model, hidden.detach().requires_grad_())
        found = torch.autograd.grad(logits.float().sum(), list(named.values()), allow_unused=True)
    return [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


def add_distillation_head(
    model: PreTrainedModel,
    *,
    divergence: str = "forward_kl",
    beta: float | None = None,
    tail: str = "bucket",
    chunk_size: int | None = None,
    loss_memory_budget: int | None = None,
    backward: str = "in_forward",
    backend: str = "auto",
    logits_dtype: torch.dtype | None = None,
) -> str:
    """
    Adds a distillation head to `model`: `model(input_ids, labels=..., teacher_token_ids=..., teacher_logprobs=...,
    teacher_log_tail=..., distillation={"kd_weight": ..., ...})` returns a [`DistillationCausalLMOutput`]. Without
    `distillation` the forward is the one it was, so generation and everything else are unchanged.

    Row `t` of the teacher's tensors `[B, S, K]`, `[B, S]` describes token `t + 1`. `labels` `[B, S]` are those of the
    batch, not shifted, -100 where nothing is trained; `shift_labels` `[B, S]` are shifted already. The teacher's
    float32 values may come as the int32 of the same bits, which no mixed-precision wrapper rounds. `distillation`
    holds `kd_weight`, `ce_weight`, `temperature`, and, where tail normalisers are cached (`teacher_log_tail_at` `[B,
    S, M]`), their `tail_temperatures` and the teacher's `vocab_size`.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model, adapters already injected; the base model of a `PeftModel`, not the wrapper.
        divergence, beta, tail, chunk_size, loss_memory_budget, backward, backend, logits_dtype:
            As in [`fused_distillation_loss`]. `logits_dtype` acts on the linear road only.

    Returns:
        `str`: one sentence that says which road, backend and chunk size were chosen.

    Raises:
        ValueError: names the model class if no road reproduces `model(...).logits`.
        RuntimeError: for a backend that cannot run here.
    """
    check_objective(divergence, beta, tail, 1.0)
    check_options(chunk_size, loss_memory_budget, backward)
    _check_causal(model)
    text_config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    backend_name = resolve_backend(backend, embedding.device, embedding.dtype)
    linear = _linear_head(model)
    parameter_names: list[str] = []
    reasons: list[str] = []
    with _inference(model):
        head_parameters = [] if linear is None else [linear.weight, linear.bias]
        if any(p is not None and _is_partitioned(p) for p in head_parameters):
            # The backbone is in pieces as well, and cannot run before DeepSpeed's engine exists: the head alone is
            # asked
            with _gathered(*head_parameters):
                hidden = _large_hidden(linear)
                logits = read_logit_transform(text_config)(linear(hidden))
                reason = _module_road_error(model, hidden, logits)
        else:
            probe = _Probe(model)
            reason = "it is no plain `nn.Linear`" if linear is None else _linear_road_error(model, linear, probe)
            if reason is not None:
                reasons.append(f"as a linear head, {reason}")
                linear = None
                reason = _module_road_error(model, probe.hidden, probe.logits)
                if reason is None:
                    parameter_names = _head_parameters(model, probe.hidden)
    if reason is not None:
        raise _refuse(model, [*reasons, f"through its own code, {reason}"])
    transform = read_logit_transform(text_config)
    original_forward = model.forward

    # Keep the original signature: `generate` validates its model kwargs against it
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        distillation: dict[str, Any] | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        teacher_token_ids: Tensor | None = None,
        teacher_logprobs: Tensor | None = None,
        teacher_log_tail: Tensor | None = None,
        teacher_log_tail_at: Tensor | None = None,
        **kwargs: Any,
    ):
        if distillation is None:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return original_forward(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        kwargs["use_cache"] = False
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        # Backbone and head are looked up on each call, since FSDP and PEFT replace them after the patch
        outputs = self.base_model(*args, **kwargs)
        hidden = outputs.last_hidden_state
        teacher = _TeacherRows(
            teacher_token_ids,
            _as_float32(teacher_logprobs),
            _as_float32(teacher_log_tail),
            _as_float32(teacher_log_tail_at),
            tuple(distillation.get("tail_temperatures", ())),
            distillation.get("vocab_size"),
        )
        if shift_labels is None:
            hidden, labels, teacher = hidden[:, :-1], labels[:, 1:], teacher[:, :-1]
        else:
            labels = shift_labels
        if linear is not None:
            layer = self.get_output_embeddings()
            tensors = tuple(p.full_tensor() if isinstance(p, DTensor) else p for p in (layer.weight, layer.bias))
            head: LinearHead | ModuleHead = _GatheredLinearHead(transform, logits_dtype)
            hidden = hidden.to(layer.weight.device)
        else:
            named = dict(self.named_parameters())
            tensors = tuple(named[name] for name in parameter_names)
            if any(isinstance(p, DTensor) for p in tensors):
                raise RuntimeError(
                    f"The head of {type(self).__name__} runs through its own code, and its parameters "
                    f"({', '.join(parameter_names)}) are sharded (FSDP2 or tensor parallelism), which is not "
                    "supported. Use DDP or ZeRO, or leave adapters off the head."
                )
            head = ModuleHead(lambda chunk: _stubbed_logits(self, chunk)[0], _head_rows(self))
        mask = (labels != IGNORE_INDEX).to(hidden.device)
        rows = teacher.to(hidden.device)[mask]
        result = run_fused_loss(
            head,
            hidden[mask],
            tensors,
            rows,
            labels.to(hidden.device)[mask],
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=distillation.get("temperature", 1.0),
            kd_weight=distillation.get("kd_weight", 1.0),
            ce_weight=distillation.get("ce_weight", 0.0),
            num_items=num_items_in_batch,
            chunk_size=chunk_size,
            loss_memory_budget=loss_memory_budget,
            backward=backward,
            backend=backend,
        )
        log_p = torch.cat([rows.logprobs, rows.log_tail[:, None]], -1).to(result.kd.dtype)
        p = log_p.exp()
        sums = {
            "kd_sum": result.kd_sum,
            "ce_sum": result.ce_sum,
            "entropy_sum": result.entropy.sum(),
            "teacher_entropy_sum": -torch.xlogy(p, p).sum(),
            "label_agreement_sum": result.label_agreement.sum(),
            "teacher_agreement_sum": result.teacher_agreement.sum(),
            "support_mass_sum": result.support_mass.sum(),
            "captured_mass_sum": p[:, :-1].sum(),
        }
        return DistillationCausalLMOutput(
            loss=result.loss,
            **sums,
            sum_bits=torch.stack([sums[name].float() for name in SUMS]).view(torch.int32),
            num_tokens=mask.sum(),
            aux_loss=_router_loss(text_config, outputs, kwargs),
        )

    model.forward = types.MethodType(forward, model)
    road = (
        "the kernels on its linear head"
        if linear is not None
        else f"its own head code (trained: {', '.join(parameter_names) or 'nothing'})"
    )
    size = "automatic chunk size" if chunk_size is None else f"chunks of {chunk_size} positions"
    return f"Distillation loss of {type(model).__name__}: {road}, backend {backend_name}, backward {backward}, {size}."


def _router_loss(text_config: Any, outputs: ModelOutput, kwargs: dict[str, Any]) -> Tensor | None:
    """The load-balancing loss of a mixture of experts whose backbone returned its router logits."""
    if not kwargs.get("output_router_logits"):
        return None
    # Mixtral's is the one that every family with a load-balancing loss uses
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = next(
        value
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
        if (value := getattr(text_config, name, None)) is not None
    )
    return load_balancing_loss_func(
        outputs.router_logits, experts, text_config.num_experts_per_tok, kwargs.get("attention_mask")
    )
