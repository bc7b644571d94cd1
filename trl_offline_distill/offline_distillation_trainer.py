import contextlib
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalPrediction
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from . import __version__
from ._compat import (
    count_next_token_labels,
    keep_4bit_weights_differentiable,
    sft_trainer_without_head_adapter_check,
)
from .cached_dataset import StudentLimits, check_columns, check_rows, prepare_cached_dataset
from .data_collator import DataCollatorForOfflineDistillation
from .loss.head import SUMS, add_distillation_head
from .loss.outcomes import check_temperature
from .offline_distillation_config import OfflineDistillationConfig
from .teacher_cache.manifest import TeacherManifest


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


TEACHER_FLOATS = ("teacher_logprobs", "teacher_log_tail", "teacher_log_tail_at")
TEACHER_INPUTS = ("teacher_token_ids", *TEACHER_FLOATS)

# Sums over positions that the head returns, and the count each is divided by when it is logged
_HEAD_SUMS = {
    "kd_sum": ("kd_loss", "kd_tokens"),
    "ce_sum": ("ce_loss", "num_tokens"),
    "entropy_sum": ("entropy", "num_tokens"),
    "teacher_entropy_sum": ("teacher_entropy", "kd_tokens"),
    "label_agreement_sum": ("mean_token_accuracy", "num_tokens"),
    "teacher_agreement_sum": ("teacher_agreement", "kd_tokens"),
    "captured_mass_sum": ("captured_mass", "kd_tokens"),
    "support_mass_sum": ("student_mass", "kd_tokens"),
}
_SUMS = (*_HEAD_SUMS, "num_tokens", "kd_tokens", "loss_sum", "loss_items", "aux_sum", "micro_batches", "wait_s")


class TokenCountCallback(TrainerCallback, ExportableState):
    """
    Keeps the number of tokens trained on in the checkpoints, so that `num_tokens` goes on after a resume.

    Args:
        num_tokens (`int`, *optional*, defaults to `0`):
            Tokens of all ranks so far.
    """

    def __init__(self, num_tokens: int = 0):
        self.num_tokens = num_tokens

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"num_tokens": self.num_tokens}}

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.get(type(self).__name__)  # none in a checkpoint of another trainer
        self.num_tokens = 0 if saved is None else saved["attributes"]["num_tokens"]


class OfflineDistillationTrainer(SFTTrainer):
    """
    Trainer that distils a cached teacher into a student.

    It is [`~trl.SFTTrainer`] with another loss: everything that trainer does (data paths, PEFT, many ranks, saving,
    resuming, logging) it does too. The teacher is not needed: its signal travels in the dataset.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl_offline_distill import OfflineDistillationTrainer

    >>> dataset = load_dataset("user/cached-teacher", split="train")

    >>> trainer = OfflineDistillationTrainer(model="user/student", train_dataset=dataset)
    >>> trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Student. See [`~trl.SFTTrainer`].
        args ([`OfflineDistillationConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        data_collator ([`~transformers.DataCollator`], *optional*):
            Function that forms a batch. Defaults to [`DataCollatorForOfflineDistillation`]. Another one must return
            the keys that one returns.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Cached dataset, as built by [`build_distillation_dataset`]: columns `input_ids`, `labels`, `teacher_topk`
            and `teacher_manifest`. Others are ignored. Rows may come from several teachers that share a tokenizer.
        eval_dataset (like `train_dataset`, or a `dict` of such, *optional*):
            Cached dataset or datasets to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], [`~transformers.ProcessorMixin`], *optional*):
            The student's tokenizer, which must be the teacher's. If `None`, it is loaded from the model's name.
        compute_loss_func (`Callable`, *optional*):
            Refused: the loss is set by the configuration.
        compute_metrics (`Callable[[EvalPrediction], dict]`, *optional*):
            See [`~trl.SFTTrainer`]. The logits it receives take an extra forward pass.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks added to the default ones.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler. See [`~trl.SFTTrainer`].
        optimizer_cls_and_kwargs (`tuple[Type[torch.optim.Optimizer], Dict[str, Any]]`, *optional*):
            Optimizer class and its arguments. See [`~trl.SFTTrainer`].
        preprocess_logits_for_metrics (`Callable[[torch.Tensor, torch.Tensor], torch.Tensor]`, *optional*):
            See [`~trl.SFTTrainer`].
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            See [`~trl.SFTTrainer`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration that wraps the student. Adapters on the output head are trained too. Experts that are
            one fused parameter (gpt-oss, Qwen3-MoE) are no modules: name them in `target_parameters`, as
            `["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]`. A target that matches nothing is an error. Prompt
            learning is refused.
        formatting_func (`Callable`, *optional*):
            Refused: the rows were formatted and tokenised when the teacher was captured.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "offline-distillation"]
    _name = "Offline distillation"

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        args: OfflineDistillationConfig | TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        formatting_func: Callable[[dict], str] | None = None,
    ):
        args = self._as_config(args, model)

        for name, value in (("compute_loss_func", compute_loss_func), ("formatting_func", formatting_func)):
            if value is not None:
                raise ValueError(
                    f"`{name}` is not supported: the loss is set by `OfflineDistillationConfig`, and the rows were "
                    f"formatted at capture. Leave `{name}` unset."
                )
        if type(data_collator) is DataCollatorForLanguageModeling:
            raise ValueError(
                "`data_collator` is a `DataCollatorForLanguageModeling`, which drops the teacher: pass a "
                "`DataCollatorForOfflineDistillation`, or leave it unset."
            )
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: pass a cached dataset.")
        if hasattr(model, "_orig_mod"):
            raise ValueError(
                "`model` was compiled already, and the loss has to reach inside it: pass the model as it was before "
                "`torch.compile`, and set `torch_compile=True`."
            )
        self._check_peft_config(model, peft_config)
        eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
        datasets = {
            "train": train_dataset,
            **{name: dataset for name, dataset in eval_datasets.items() if dataset is not None},
        }
        first_rows = {
            name: check_columns(dataset, name)
            for name, dataset in datasets.items()
            if isinstance(dataset, (Dataset, IterableDataset))  # anything else is refused by SFTTrainer
        }

        self._limits = StudentLimits(args)
        self._sums: dict[str, dict[str, Tensor | float]] = {"train": {}, "eval": {}}
        self._last_log: tuple[float, int] | None = None  # time, tokens
        with sft_trainer_without_head_adapter_check():
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                quantization_config=quantization_config,
                peft_config=peft_config,
            )
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                f"`cp_size={parallelism.cp_size}` and `sp_size={parallelism.sp_size}` shard a sequence over ranks, "
                "and the teacher's rows would not follow it. Set both to 1."
            )
        count_next_token_labels(self)
        self.add_callback(TokenCountCallback())

        # Everything the cache says is compared with the student before the first step
        self._limits.tokenizer = self.processing_class
        self._limits.head_rows = self._head_rows()
        for name, dataset in datasets.items():
            self._check_cached_dataset(dataset, name, first_rows[name])

        widest = max((manifest.top_k for manifest in self.teacher_manifests), default=0)
        if args.kd_top_k is not None and args.kd_top_k > widest:
            raise ValueError(
                f"`kd_top_k={args.kd_top_k}` is more than the {widest} candidates that the cache holds for a token. "
                f"Leave it out to use all, or build a cache with a larger `top_k`."
            )

        # The temperatures whose tails the batches carry: all that every teacher has, where the loss needs any
        self._tail_temperatures: tuple[float, ...] = ()
        if args.temperature != 1.0 and args.tail != "renormalize":
            common = set.intersection(*(set(manifest.tail_temperatures) for manifest in self.teacher_manifests))
            self._tail_temperatures = tuple(sorted(common))
            if not common:
                cached = ", ".join(f"{m.teacher!r}: {m.tail_temperatures}" for m in self.teacher_manifests)
                raise ValueError(
                    f"`temperature={args.temperature}` needs the teacher's tail at some temperature other than 1, "
                    f"the same in every cache; there is none ({cached}). Capture with `tail_temperatures`, set "
                    "`tail='renormalize'`, or leave `temperature` at 1."
                )
            vocab_size = max(manifest.vocab_size for manifest in self.teacher_manifests)
            check_temperature(args.temperature, args.tail, self._tail_temperatures, vocab_size)
        if data_collator is None:
            # SFTTrainer refuses a collator of ours together with padding-free batches, so it made its own
            sft_collator = self.data_collator
            self.data_collator = DataCollatorForOfflineDistillation(
                pad_token_id=sft_collator.pad_token_id,
                padding_free=sft_collator.padding_free,
                pad_to_multiple_of=sft_collator.pad_to_multiple_of,
                top_k=args.kd_top_k,
                tail_temperatures=self._tail_temperatures,
            )
        # SFTTrainer flattens packed rows, so that their samples do not attend to each other, only if training packs
        self._eval_collator = self.data_collator
        packed_evaluation = args.packing if args.eval_packing is None else args.eval_packing
        if data_collator is None and packed_evaluation and args.packing_strategy != "wrapped":
            self._eval_collator = replace(self.data_collator, padding_free=True)
        if self.accelerator.num_processes > 1 and isinstance(self._eval_collator, DataCollatorForOfflineDistillation):
            self._eval_collator = replace(self._eval_collator, return_example_ids=True)

        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self._check_sharded_head(base_model)
        keep_4bit_weights_differentiable(base_model)
        self.head_description = add_distillation_head(
            base_model,
            divergence=args.divergence,
            beta=args.beta,
            tail=args.tail,
            chunk_size=args.loss_chunk_size,
            loss_memory_budget=args.loss_memory_budget,
            backward=args.loss_backward,
            backend=args.loss_backend,
            logits_dtype=None if args.loss_logits_dtype is None else torch.float32,
        )
        self.accelerator.print(self.head_description)
        self._report_trained_parameters()

    @staticmethod
    def _as_config(args: TrainingArguments | None, model) -> OfflineDistillationConfig:
        if isinstance(args, OfflineDistillationConfig):
            return args
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "student"
            return OfflineDistillationConfig(f"{name.rstrip('/').split('/')[-1]}-Offline-Distillation")
        # Not `to_dict`, which hides every token: `hub_token`, but `eos_token` and `pad_token` too
        return OfflineDistillationConfig(**{f.name: getattr(args, f.name) for f in fields(args) if f.init})

    # ---- PEFT ----

    @staticmethod
    def _check_peft_config(model, peft_config) -> None:
        configs = [] if peft_config is None else [("`peft_config`", peft_config)]
        if not isinstance(model, str) and is_peft_model(model):
            configs += [(f"adapter {name!r} of `model`", config) for name, config in model.peft_config.items()]
        for what, config in configs:
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"{what} is a {type(config).__name__}: prompt learning adds virtual tokens that the teacher never "
                    "saw, so its rows would describe other positions. Use an adapter such as `LoraConfig`."
                )

    def _report_trained_parameters(self) -> None:
        """Says once what trains, and refuses targets that match nothing."""
        if is_peft_model(self.model):
            self._check_peft_targets()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError(
                "`model` has no trainable parameter: every `requires_grad` is False. Unfreeze some, pass "
                "`peft_config`, or load the adapter with `is_trainable=True`."
            )
        total = {name: getattr(p, "ds_numel", p.numel()) for name, p in self.model.named_parameters()}
        share = sum(total[name] for name in trained) / sum(total.values())
        # A quantised student that was unpacked on loading shows here
        stored = defaultdict(int)
        for name, p in self.model.named_parameters():
            stored[str(p.dtype).removeprefix("torch.")] += total[name] * p.element_size()
        weights = " + ".join(f"{size / 1e9:.3g} GB {dtype}" for dtype, size in sorted(stored.items()))
        what = "everything"
        if len(trained) < len(total):
            modules = defaultdict(set)
            for name in trained:
                # PEFT's own names (`lora_A.default.weight`, `modules_to_save.default.weight`) follow the module's
                path = re.split(r"\.(?:lora_\w+|modules_to_save|original_module)\.", name)[0]
                # Two adapters on the parameters of one module: the inner one sits in `base_layer`
                path = path.replace(".base_layer", "")
                path = path if path != name else name.rpartition(".")[0]
                modules[path.rpartition(".")[2]].add(path)
            what = ", ".join(f"{module} x {len(paths)}" for module, paths in sorted(modules.items()))
        self.accelerator.print(
            f"Training {sum(total[name] for name in trained):,} of {sum(total.values()):,} parameters "
            f"({share:.3%}; weights {weights}): {what}"
        )

    def _check_peft_targets(self) -> None:
        names = [name for name, _ in self.model.get_base_model().named_modules()]
        # PEFT nests the wrapped layer below the name the user gave
        names = {name.replace(".base_layer", "").replace(".original_module", "") for name in names}
        parameters = {name for name, _ in self.model.get_base_model().named_parameters()}
        parameters = {name.replace("base_layer.", "").replace("original_module.", "") for name in parameters}
        for adapter, config in self.model.peft_config.items():
            for option, existing in (
                ("target_modules", names),
                ("modules_to_save", names),
                ("target_parameters", parameters),
            ):
                targets = getattr(config, option, None)
                if not targets or targets == "all-linear":
                    continue
                if isinstance(targets, str):  # a pattern, of which PEFT accepts any beside `target_parameters`
                    missing = [] if any(re.fullmatch(targets, name) for name in existing) else [targets]
                else:
                    missing = sorted(t for t in targets if not any(n == t or n.endswith(f".{t}") for n in existing))
                if missing:
                    raise ValueError(
                        f"`{option}` of adapter {adapter!r} names {', '.join(map(repr, missing))}, which matches no "
                        f"{'parameter' if option == 'target_parameters' else 'module'} of "
                        f"{type(self.model.get_base_model()).__name__}, so it would not train. Experts that are one "
                        "fused parameter are named in `target_parameters`; a single string is a pattern for the whole "
                        "path. Correct the name or remove it."
                    )

    def _check_sharded_head(self, base_model: PreTrainedModel) -> None:
        shards = "FSDP" if self.is_fsdp_enabled else "ZeRO-3" if is_deepspeed_zero3_enabled() else None
        head = base_model.get_output_embeddings()
        if shards and type(head) is not torch.nn.Linear and any(p.requires_grad for p in head.parameters()):
            raise ValueError(
                f"The output head of {type(base_model).__name__} is a trained {type(head).__name__}, which {shards} "
                "cuts into pieces that the loss cannot gather. Leave adapters off the head (`target_modules`, "
                "`modules_to_save`), or use DDP or ZeRO-2."
            )

    # ---- Data ----

    @property
    def teacher_manifests(self) -> list[TeacherManifest]:
        """What made the rows seen so far: those of stored datasets, and those that streams brought to this process."""
        return list(self._limits.accepted.values())

    def _head_rows(self) -> int:
        base_model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        # `out_features` holds where the weight itself is sharded, packed or wrapped
        rows = getattr(base_model.get_output_embeddings(), "out_features", None)
        return base_model.config.get_text_config().vocab_size if rows is None else rows

    def _check_cached_dataset(self, dataset: Dataset | IterableDataset, name: str, first: dict[str, Any]) -> None:
        """Compares every manifest and every row with the student; of what cannot be read at once, the `first` row."""
        stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
        if stored:
            # Alone: `unique` writes out every column of a dataset that was shuffled or filtered
            texts = dataset.select_columns(["teacher_manifest"]).unique("teacher_manifest")
        else:
            texts = [first["teacher_manifest"]]  # of a stream, the others are compared as they come
        try:
            self._limits.check_manifests(texts)
        except ValueError as error:
            raise ValueError(f"The {name} dataset does not fit the student. {error}") from error
        if not stored:
            return
        message, trained = None, False
        try:
            trained = check_rows(
                dataset, name, self._limits.head_rows, self.accelerator.process_index, self.accelerator.num_processes
            )
        except ValueError as error:
            message = str(error)
        # Every rank stops for a row that one of them found
        found = gather_object([(message, trained)])
        messages = [text for text, _ in found if text is not None]
        if messages:
            raise ValueError(messages[0])
        if not any(trained for _, trained in found):
            raise ValueError(
                f"The {name} dataset trains nothing: every label after the first is -100. Pass rows with a trained "
                "token, or capture with another `completion_only_loss` or `assistant_only_loss`."
            )

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
            raise ValueError(
                f"The {dataset_name} dataset has a transform (`Dataset.with_transform`), which preparation would bake "
                "into the stored rows. Remove it, or set `dataset_kwargs={'skip_prepare_dataset': True}`."
            )
        if self._limits.tokenizer is None:
            self._limits.tokenizer = processing_class
        prepared = prepare_cached_dataset(dataset, args, packing, dataset_name, self._limits)
        if isinstance(prepared, Dataset) and len(prepared) == 0:
            raise ValueError(
                f"The {dataset_name} dataset trains nothing: no row keeps a trained token within "
                f"`max_length={args.max_length}` (`truncation_mode={args.truncation_mode!r}`). Raise `max_length`, or "
                "pass rows with a trained token."
            )
        return prepared

    def _set_signature_columns_if_needed(self):
        if self._signature_columns is None:
            self._signature_columns = ["input_ids", "labels", "seq_lengths", "teacher_topk"]

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        if isinstance(eval_dataset, dict):
            # One by one here: `Trainer.evaluate` would come back for each after it was prepared
            metrics = {}
            for name, dataset in eval_dataset.items():
                metrics.update(self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            self._check_cached_dataset(eval_dataset, metric_key_prefix, check_columns(eval_dataset, metric_key_prefix))
        return super().evaluate(
            eval_dataset=eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )

    # ---- Loss ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        start = time.perf_counter()
        if self._last_log is None:
            self._last_log = (start, self._token_count.num_tokens)
        batch_samples, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._add("train", wait_s=time.perf_counter() - start)
        # Without `average_tokens_across_devices` each rank would divide by its own count, and DDP would average means
        # over ranks, where a token counts more the fewer its rank has
        if (
            num_items_in_batch is not None
            and self.accelerator.num_processes > 1
            and not self.args.average_tokens_across_devices
        ):
            num_items_in_batch = torch.as_tensor(num_items_in_batch, device=device)
            num_items_in_batch = self.accelerator.reduce(num_items_in_batch, reduction="sum")
        return batch_samples, num_items_in_batch

    def _prepare_inputs(self, inputs):
        # Under DeepSpeed, `Trainer` rounds every float to the engine's dtype; bf16 log-probabilities are too coarse
        teacher = {name: inputs[name].to(self.args.device) for name in TEACHER_INPUTS if name in inputs}
        others = {name: value for name, value in inputs.items() if name not in teacher}
        return {**super()._prepare_inputs(others), **teacher}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mode = "train" if self.model.training else "eval"
        missing = [name for name in TEACHER_INPUTS[:3] if name not in inputs]
        if missing:
            raise ValueError(
                f"The batch has no {missing[0]!r} (keys: {', '.join(inputs)}): the data collator dropped the teacher. "
                "Use `DataCollatorForOfflineDistillation`."
            )
        inputs = {**inputs, "use_cache": False}
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True

        kd_weight, ce_weight = self.args.weights_at(self.state.global_step / max(1, self.state.max_steps))
        kd_tokens = trained = None
        if self.args.kd_position_fraction < 1.0:
            inputs, kd_tokens, trained = self._select_positions(inputs, ce_weight)
        # The denominator is the number of trained positions, selected or not
        divisor = trained if num_items_in_batch is None else num_items_in_batch
        # As bits: FSDP rounds every float it is given to its compute dtype, and bf16 log-probabilities are too coarse
        bits = {name: inputs[name].view(torch.int32) for name in TEACHER_FLOATS if name in inputs}
        outputs = model(
            **{**inputs, **bits},
            distillation={
                "kd_weight": kd_weight,
                "ce_weight": ce_weight,
                "temperature": self.args.temperature,
                "tail_temperatures": self._tail_temperatures,
                "vocab_size": max(manifest.vocab_size for manifest in self.teacher_manifests),
            },
            num_items_in_batch=divisor,
        )
        sums = dict(zip(SUMS, outputs.sum_bits.view(torch.float32), strict=True))
        loss_sum = kd_weight * sums["kd_sum"] + ce_weight * sums["ce_sum"]
        # FSDP rounds what a model returns as well: the gradient is the returned loss's, the value the sums'
        exact = loss_sum / torch.as_tensor(outputs.num_tokens if divisor is None else divisor).clamp(min=1)
        loss = outputs.loss + (exact - outputs.loss).detach()
        # Like `Trainer.compute_loss`: `num_items_in_batch` counts the tokens of every rank, and DDP averages the
        # gradients across ranks
        if num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        # Like `SFTTrainer.compute_loss`: a mean over the micro-batch, averaged over accumulation steps and ranks
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps

        self._add(
            mode,
            **sums,
            num_tokens=outputs.num_tokens,
            kd_tokens=outputs.num_tokens if kd_tokens is None else kd_tokens,
            loss_sum=loss_sum,
            loss_items=outputs.num_tokens if trained is None else trained,
            input_tokens=inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel(),
            aux_sum=outputs.aux_loss.detach() if self.aux_loss_enabled else 0.0,
            micro_batches=1.0,
        )
        if return_outputs:
            # The logits were never formed; `compute_metrics` wants them
            skipped = ("labels", *TEACHER_INPUTS)
            with torch.no_grad():
                outputs = model(**{name: value for name, value in inputs.items() if name not in skipped})
        return (loss, outputs) if return_outputs else loss

    def _select_positions(self, inputs: dict[str, Any], ce_weight: float) -> tuple[dict[str, Any], Tensor, Tensor]:
        """
        Leaves the teacher only at the positions of highest entropy of each sequence.

        Returns:
            `tuple`: inputs, number of positions with a teacher, number of trained positions (0-dim tensors).
        """
        labels = inputs["labels"]  # [B, S]
        trained = torch.zeros_like(labels, dtype=torch.bool)
        trained[:, :-1] = labels[:, 1:] != -100
        if "position_ids" in inputs:
            sequence = (inputs["position_ids"] == 0).cumsum(-1)  # several sequences in a row
        else:
            sequence = torch.zeros_like(labels)
        sequence = sequence + labels.size(1) * torch.arange(labels.size(0), device=labels.device)[:, None]
        selected = highest_entropy_positions(
            inputs["teacher_logprobs"],
            inputs["teacher_log_tail"],
            trained,
            sequence,
            self.args.kd_position_fraction,
        )
        if ce_weight == 0:  # the others need not reach the head at all
            kept = torch.zeros_like(trained)
            kept[:, 1:] = selected[:, :-1]
            inputs = {**inputs, "labels": labels.masked_fill(~kept, -100)}
        else:
            # An absent support with all mass in the tail: zero divergence, zero gradient
            inputs = {
                **inputs,
                "teacher_logprobs": inputs["teacher_logprobs"].masked_fill(~selected[..., None], -torch.inf),
                "teacher_log_tail": inputs["teacher_log_tail"].masked_fill(~selected, 0.0),
            }
        return inputs, selected.sum(), trained.sum()

    # ---- Evaluation ----

    def get_eval_dataloader(self, eval_dataset=None):
        train_collator, self.data_collator = self.data_collator, self._eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = train_collator

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(self._without_repeated_rows(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            if prediction_loss_only:  # `Trainer` would ask for the logits all the same, which take another forward
                return self.compute_loss(model, inputs), None, None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["labels"]

    def _without_repeated_rows(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """
        On several ranks the last evaluation batch is filled up with rows from the beginning. They count for nothing:
        their labels become -100.
        """
        inputs, labels = dict(inputs), inputs["labels"]
        # A collator of the user's own need not tell rows of the data set apart, if it does not flatten them
        rows = inputs.pop("example_ids", torch.arange(labels.size(0), device=labels.device)[:, None])
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes > 1 and state.end_of_dataloader and state.remainder > 0:
            real = state.remainder - self.accelerator.process_index * self.args.eval_batch_size  # rows of this rank
            inputs["labels"] = labels.masked_fill(rows >= real, -100)
        return inputs

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self._sums["eval"].clear()
        with self._off_the_clock():
            output = super().evaluation_loop(
                dataloader,
                description,
                prediction_loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        sums = self._reduced_sums("eval")
        # `Trainer` averages the means of batches; the loss here is the mean over all trained tokens
        if sums["loss_items"] > 0:
            loss = sums["loss_sum"] / sums["loss_items"]
            if self.aux_loss_enabled:
                loss += self.router_aux_loss_coef * sums["aux_sum"] / sums["micro_batches"]
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        for name, value in self._metrics_of(sums).items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    # ---- Metrics: sums and counts, divided once, reduced over ranks once ----

    def _add(self, mode: str, **values: Tensor | float) -> None:
        sums = self._sums[mode]
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + (value.detach().double() if self._has_double(value) else value)

    @staticmethod
    def _has_double(value) -> bool:
        return isinstance(value, Tensor) and value.device.type != "mps"

    def _reduced_sums(self, mode: str) -> dict[str, float]:
        """Sums over all ranks since the last call. A collective: every rank calls it."""
        sums = self._sums[mode]
        device = self.accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        vector = torch.stack([torch.as_tensor(sums.get(name, 0.0), dtype=dtype, device=device) for name in _SUMS])
        vector = self.accelerator.reduce(vector, reduction="sum")
        sums.clear()
        return dict(zip(_SUMS, vector.tolist(), strict=True))

    def _metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = {metric: sums[name] / sums[count] for name, (metric, count) in _HEAD_SUMS.items() if sums[count] > 0}
        if self.aux_loss_enabled and sums["micro_batches"] > 0:
            metrics["aux_loss"] = sums["aux_sum"] / sums["micro_batches"]
        metrics["num_tokens"] = self._token_count.num_tokens
        return metrics

    @property
    def _token_count(self) -> TokenCountCallback:
        # Looked up each time: `restore_callback_states_from_checkpoint` replaces callbacks
        return next(c for c in self.callback_handler.callbacks if isinstance(c, TokenCountCallback))

    def _count_tokens(self) -> None:
        """Brings the number of tokens up to date. A collective: every rank calls it."""
        tokens = torch.as_tensor(self._sums["train"].pop("input_tokens", 0), device=self.accelerator.device)
        tokens = self.accelerator.reduce(tokens.float(), reduction="sum").item()
        self._token_count.num_tokens += round(tokens) // self.get_tp_size()

    def _train_metrics(self) -> dict[str, float]:
        self._count_tokens()
        sums = self._reduced_sums("train")
        metrics = self._metrics_of(sums)
        now, tokens = time.perf_counter(), self._token_count.num_tokens
        if self._last_log is not None and tokens > self._last_log[1]:
            elapsed = now - self._last_log[0]
            metrics["tokens_per_second"] = (tokens - self._last_log[1]) / elapsed
            metrics["data_wait"] = sums["wait_s"] / self.accelerator.num_processes / elapsed
        self._last_log = (now, tokens)
        peak = peak_memory_bytes(self.accelerator.device)
        if peak is not None:
            metrics["peak_memory_gb"] = peak / 1e9
        if self.args.kd_weight_schedule != "constant" or self.args.ce_weight_schedule != "constant":
            kd_weight, ce_weight = self.args.weights_at(self.state.global_step / max(1, self.state.max_steps))
            metrics.update(kd_weight=kd_weight, ce_weight=ce_weight)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Only what `Trainer` itself logs on every rank: a user may log on one rank alone, and this is a collective
        if "loss" in logs or "train_runtime" in logs:
            logs.update(self._train_metrics())
        super().log(logs, start_time)

    def train(self, *args, **kwargs):
        self._sums["train"].clear()
        self._last_log = None
        return super().train(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        self._count_tokens()
        with self._off_the_clock():
            super()._save_checkpoint(model, trial)

    @contextlib.contextmanager
    def _off_the_clock(self):
        """What is not training (evaluation, saving) counts for neither `tokens_per_second` nor `data_wait`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._last_log is not None:
                logged, tokens = self._last_log
                self._last_log = (logged + time.perf_counter() - start, tokens)

    # ---- Model card ----

    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        names = sorted({manifest.dataset for manifest in self.teacher_manifests if manifest.dataset})
        super().create_model_card(
            model_name=model_name,
            dataset_name=dataset_name if dataset_name is not None or len(names) != 1 else names[0],
            tags=tags,
        )
        if not self.is_world_process_zero():
            return
        path = os.path.join(self.args.output_dir, "README.md")
        card = ModelCard.load(path)
        section = "\n".join(["## Offline distillation", "", *self._card_lines(), ""])
        marker = "### Framework versions"
        card.text = (
            card.text.replace(marker, f"{section}\n{marker}", 1) if marker in card.text else f"{card.text}\n{section}"
        )
        card.save(path)

    def _card_lines(self) -> list[str]:
        args = self.args
        lines = []
        for manifest in self.teacher_manifests:
            revision = f" at `{manifest.teacher_revision}`" if manifest.teacher_revision else ""
            lines.append(f"- Teacher: [{manifest.teacher}](https://huggingface.co/{manifest.teacher}){revision}")
            facts = [f"top {manifest.top_k} of {manifest.vocab_size:,} tokens", f"layout `{manifest.layout}`"]
            facts += [
                f"{what} `{value}`"
                for what, value in (("dtype", manifest.dtype), ("engine", manifest.engine))
                if value
            ]
            lines.append(f"- Cache: {', '.join(facts)}")
        beta = "" if args.beta is None else f", beta {args.beta:g}"
        top_k = "" if args.kd_top_k is None else f", top {args.kd_top_k}"
        lines.append(f"- Loss: `{args.divergence}`{beta}, tail `{args.tail}`, temperature {args.temperature:g}{top_k}")
        kd_end, ce_end = args.weights_at(1.0)
        for term, start, end, schedule in (
            ("kd_weight", args.kd_weight, kd_end, args.kd_weight_schedule),
            ("ce_weight", args.ce_weight, ce_end, args.ce_weight_schedule),
        ):
            lines.append(f"- `{term}`: {start:g}" + ("" if schedule == "constant" else f" to {end:g} ({schedule})"))
        if args.kd_position_fraction < 1.0:
            lines.append(f"- Positions: the {args.kd_position_fraction:.0%} of highest teacher entropy")
        lines.append(f"- trl-offline-distill: {__version__}")
        return lines


def highest_entropy_positions(
    logprobs: Tensor, log_tail: Tensor, trained: Tensor, sequence: Tensor, fraction: float
) -> Tensor:
    """
    The `ceil(fraction * n)` trained positions of each sequence at which the teacher, as far as it was cached, has the
    highest entropy. Ties go to the earlier position.

    Args:
        logprobs (`Tensor`): `[B, S, K]`, `-inf` where absent.
        log_tail (`Tensor`): `[B, S]`.
        trained (`Tensor`): `[B, S]` bool.
        sequence (`Tensor`): `[B, S]` integer, the same for positions of one sequence.
        fraction (`float`): In `(0, 1]`.

    Returns:
        `Tensor`: `[B, S]` bool.
    """
    outcomes = torch.cat([logprobs, log_tail[..., None]], -1)
    entropy = -torch.special.xlogy(outcomes.exp(), outcomes.exp()).sum(-1)
    index = trained.flatten().nonzero().squeeze(-1)  # [N]
    entropy, sequence = entropy.flatten()[index], sequence.flatten()[index]
    order = entropy.argsort(descending=True, stable=True)
    order = order[sequence[order].argsort(stable=True)]
    _, counts = sequence.unique(return_counts=True)  # sorted, as `order` is
    rank = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    quota = (counts * fraction).ceil().repeat_interleave(counts)
    selected = torch.zeros_like(trained).flatten()
    selected[index[order[rank < quota]]] = True
    return selected.view_as(trained)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Highest memory of this process so far: allocated on the accelerator, or resident on a CPU. `None` if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`, which on Linux starts from the peak of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
