"""Every private or version-dependent TRL and transformers name this package uses, with what retires it."""

import contextlib


# `SFTTrainer._prepare_dataset` and `trl.data_utils._tokenize` (seen in TRL 1.16). Retired by a public function of TRL
# that prepares a dataset without a trainer. The method reads three attributes of the trainer: `_tokenizer`,
# `chat_template`, `completion_only_loss`; `tests/capture/test_tokenize.py` compares with a real trainer's preparation.


def prepare_sft_dataset(
    dataset,
    processing_class,
    *,
    chat_template,
    completion_only_loss,
    assistant_only_loss,
    dataset_text_field,
    max_length,
    truncation_mode,
    num_proc,
    formatting_func,
):
    """SFTTrainer's preparation without a trainer: a `Dataset` with `input_ids` and `labels`, other columns kept."""
    from types import SimpleNamespace

    from trl import SFTTrainer

    trainer = SimpleNamespace(
        _tokenizer=getattr(processing_class, "tokenizer", processing_class),
        chat_template=chat_template,
        completion_only_loss=completion_only_loss,
    )
    args = SimpleNamespace(
        dataset_num_proc=num_proc,
        dataset_text_field=dataset_text_field,
        assistant_only_loss=assistant_only_loss,
        max_length=max_length,
        truncation_mode=truncation_mode,
        shuffle_dataset=False,
        use_liger_kernel=False,  # read by TRL 1.14
    )
    return SFTTrainer._prepare_dataset(
        trainer, dataset, processing_class, args, packing=False, formatting_func=formatting_func, dataset_name="source"
    )


def tokenize_like_sft(processing_class, text_or_messages, **chat_template_kwargs):
    """Tokenises one example as SFTTrainer does: a dict with a flat `input_ids` list."""
    from trl.data_utils import _tokenize

    return _tokenize(processing_class, text_or_messages, **chat_template_kwargs)


# `trl.trainer.sft_trainer.BaseTunerLayer` (seen in TRL 1.16), used there for one check alone: SFTTrainer refuses an
# adapter on `lm_head`, because its own fused head reads the bare weight. Ours runs such a head through the model's own
# code. Retired by a hook in SFTTrainer that lets a subclass bring its own head.


@contextlib.contextmanager
def sft_trainer_without_head_adapter_check():
    """While inside, `SFTTrainer.__init__` accepts a PEFT adapter on the output head."""
    from trl.trainer import sft_trainer

    original = getattr(sft_trainer, "BaseTunerLayer", None)  # absent without peft
    sft_trainer.BaseTunerLayer = type("NoTunerLayer", (), {})
    try:
        yield
    finally:
        if original is None:
            del sft_trainer.BaseTunerLayer
        else:
            sft_trainer.BaseTunerLayer = original


# `Trainer.model_accepts_loss_kwargs` and `Trainer._loss_shifts_labels` (seen in transformers 5.24) decide whether and
# how the trained tokens of an accumulated batch are counted, from the signature and the loss of the model's own
# forward, which computes no loss here. Retired by a Trainer that asks its subclass.


def count_next_token_labels(trainer):
    """Makes `trainer` count the labels that a next-token head trains, whatever the model's own loss would do."""
    trainer.model_accepts_loss_kwargs = True
    trainer._loss_shifts_labels = True


def keep_4bit_weights_differentiable(model):
    """
    On CPUs with AVX-512 BF16, bitsandbytes (seen in 0.50) packs a 4-bit weight anew at its first evaluation, for a
    kernel without a gradient, and trains through it from then on with the gradient lost. This keeps `model` from it.

    `Linear4bit.support_avx512bf16_for_cpu` and `QuantState.packing_format_for_cpu`. Retired by a kernel that is
    differentiable, or by a layer that unpacks its weight when it is trained.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"The 4-bit weight of {name!r} was packed for inference when `model` was evaluated on this CPU; "
                "bitsandbytes gives no gradient through it. Load the model again and pass it before evaluating it."
            )
        module.support_avx512bf16_for_cpu = False


def hub_request_errors() -> tuple[type[BaseException], ...]:
    """What a failed request to the Hub raises, connection errors included.

    `huggingface_hub` moved from requests to httpx and then to httpx2; its own error derives from the client's base
    class, which covers timeouts and broken connections. Retired by a public base class of `huggingface_hub` for both.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (HfHubHTTPError, HfHubHTTPError.__base__, ConnectionError, TimeoutError)


def hub_source(dataset) -> tuple[str, str] | None:
    """Repository and commit a `Dataset` was loaded from, or `None` where it did not come from the Hub.

    datasets (seen in 5.2) keeps a loaded repository under `owner___name/config/version/COMMIT/`. Retired by a public
    attribute of `DatasetInfo` that names the commit.
    """
    import re
    from pathlib import Path

    for file in getattr(dataset, "cache_files", None) or []:
        parts = Path(file["filename"]).parts
        if len(parts) > 5 and "___" in parts[-5] and re.fullmatch(r"[0-9a-f]{40}", parts[-2]):
            return parts[-5].replace("___", "/", 1), parts[-2]
    return None


# `OfflineDistillationTrainer` overrides, under their names in TRL 1.14 to 1.16 and transformers 5.16 to 5.24:
# `SFTTrainer._prepare_dataset` and `._set_signature_columns_if_needed` (retired by a preparation that carries side
# columns through truncation and packing), `Trainer._prepare_inputs` (retired when it no longer rounds inputs under
# DeepSpeed), `SFTTrainer._save_checkpoint` (retired by a hook before the state is written). It reads
# `SFTTrainer.aux_loss_enabled`, `.router_aux_loss_coef` and `Trainer.current_gradient_accumulation_steps`, which
# `SFTTrainer.compute_loss` scales the router's loss with.
