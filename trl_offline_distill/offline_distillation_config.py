import math
from dataclasses import dataclass, field

from trl import SFTConfig

from .loss.divergences import DIVERGENCES, TAILS, check_objective


SCHEDULES = ("constant", "linear", "cosine")
BACKWARDS = ("in_forward", "recompute")


@dataclass
class OfflineDistillationConfig(SFTConfig):
    r"""
    Configuration class for the [`OfflineDistillationTrainer`].

    This class includes only the parameters that are specific to offline distillation. For the others see
    [`~trl.SFTConfig`] and [`~transformers.TrainingArguments`].

    Using [`~transformers.HfArgumentParser`] we can turn this class into
    [argparse](https://docs.python.org/3/library/argparse#module-argparse) arguments that can be specified on the
    command line.

    Parameters:
        > Parameters that control the objective

        divergence (`str`, *optional*, defaults to `"forward_kl"`):
            Divergence between teacher and student at one position: `"forward_kl"`, `"reverse_kl"` or
            `"generalized_jsd"`.
        beta (`float`, *optional*):
            Interpolation of `"generalized_jsd"`, in `[0, 1]`: 0 is the forward KL, 1 the reverse KL, in between the
            mixture is `(1 - beta) * student + beta * teacher`. Required by `"generalized_jsd"`, refused by the others.
        tail (`str`, *optional*, defaults to `"bucket"`):
            What stands for the vocabulary outside the teacher's support. `"bucket"`: one "everything else" outcome.
            `"none"`: nothing (only `"forward_kl"`). `"renormalize"`: the teacher's support is scaled up to mass 1.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of teacher and student. Other than 1, the cache must hold the tail at some temperatures, unless
            `tail="renormalize"`.
        kd_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the divergence. Loss = `kd_weight * divergence + ce_weight * cross-entropy`, per trained token.
        ce_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the cross-entropy on the labels.
        kd_weight_schedule (`str`, *optional*, defaults to `"constant"`):
            How `kd_weight` moves to `kd_weight_end` over the run: `"constant"` (it does not), `"linear"` or
            `"cosine"`.
        kd_weight_end (`float`, *optional*):
            Value of `kd_weight` at the last step. Required by a schedule other than `"constant"`.
        ce_weight_schedule (`str`, *optional*, defaults to `"constant"`):
            How `ce_weight` moves to `ce_weight_end` over the run.
        ce_weight_end (`float`, *optional*):
            Value of `ce_weight` at the last step. Required by a schedule other than `"constant"`.
        kd_top_k (`int`, *optional*):
            Use only the `kd_top_k` most likely candidates of each cached position; the mass of the others moves into
            the tail. `None` uses all that were cached.
        kd_position_fraction (`float`, *optional*, defaults to `1.0`):
            Share of the trained positions of each sequence that learn from the teacher: those of highest teacher
            entropy, as far as the cache shows it. The loss is still divided by the number of all trained positions,
            so the weight of one position does not depend on it.

        > Parameters that control the loss kernel

        loss_chunk_size (`int`, *optional*):
            Positions projected through the head at a time. `None` derives it from `loss_memory_budget`.
        loss_memory_budget (`float`, *optional*):
            Bytes that one chunk of logits may take. `None` uses the default of the kernel.
        loss_backward (`str`, *optional*, defaults to `"in_forward"`):
            When the gradient of the head is formed: `"in_forward"`, while the chunk is at hand (3 GEMMs over the head,
            2 if it is frozen), or `"recompute"`, in the backward (4 GEMMs).
        loss_backend (`str`, *optional*, defaults to `"auto"`):
            Kernel: `"auto"`, `"torch"`, `"triton"` or `"reference"` (dense, for tests). What was taken is printed.
        loss_logits_dtype (`str`, *optional*):
            What a chunk's logits are kept in: `None` for the dtype of the student's projection, as in its own forward,
            or `"float32"`, which costs twice the memory of a bf16 chunk. Acts on linear heads.

    > [!NOTE]
    > These parameters have default values different from [`~trl.SFTConfig`]:
    > - `max_length`: Defaults to `None` instead of `1024`. The rows were tokenised, and truncated, when the teacher
    >   was captured.
    """

    _VALID_DICT_FIELDS = SFTConfig._VALID_DICT_FIELDS

    # Parameters whose default values are overridden from SFTConfig
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Maximum length of a sequence. Longer cached rows are truncated, tokens and teacher together, "
            "from the left or right depending on the `truncation_mode`. If `None`, no truncation is applied. When "
            "packing is enabled, this value sets the sequence length."
        },
    )

    # Parameters that control the objective
    divergence: str = field(
        default="forward_kl",
        metadata={"help": "Divergence between teacher and student at one position.", "choices": list(DIVERGENCES)},
    )
    beta: float | None = field(
        default=None,
        metadata={
            "help": "Interpolation of `generalized_jsd`, in [0, 1]: 0 is the forward KL, 1 the reverse KL. Required "
            "by `generalized_jsd`, refused by the others."
        },
    )
    tail: str = field(
        default="bucket",
        metadata={
            "help": "What stands for the vocabulary outside the teacher's support: `bucket` (one 'everything else' "
            "outcome), `none` (nothing) or `renormalize` (the support is scaled up to mass 1).",
            "choices": list(TAILS),
        },
    )
    temperature: float = field(
        default=1.0,
        metadata={
            "help": "Temperature of teacher and student. Other than 1, the cache must hold the tail at some "
            "temperatures, unless `tail` is `renormalize`."
        },
    )
    kd_weight: float = field(default=1.0, metadata={"help": "Weight of the divergence."})
    ce_weight: float = field(default=0.0, metadata={"help": "Weight of the cross-entropy on the labels."})
    kd_weight_schedule: str = field(
        default="constant",
        metadata={
            "help": "How `kd_weight` moves to `kd_weight_end` over the run.",
            "choices": list(SCHEDULES),
        },
    )
    kd_weight_end: float | None = field(
        default=None,
        metadata={"help": "Value of `kd_weight` at the last step, for a schedule other than `constant`."},
    )
    ce_weight_schedule: str = field(
        default="constant",
        metadata={
            "help": "How `ce_weight` moves to `ce_weight_end` over the run.",
            "choices": list(SCHEDULES),
        },
    )
    ce_weight_end: float | None = field(
        default=None,
        metadata={"help": "Value of `ce_weight` at the last step, for a schedule other than `constant`."},
    )
    kd_top_k: int | None = field(
        default=None,
        metadata={
            "help": "Use only this many of the most likely cached candidates of each position; the mass of the others "
            "moves into the tail. If `None`, all that were cached."
        },
    )
    kd_position_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Share of the trained positions of each sequence that learn from the teacher: those of highest "
            "teacher entropy. The loss is still divided by the number of all trained positions."
        },
    )

    # Parameters that control the loss kernel
    loss_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Positions projected through the head at a time. If `None`, it is derived from "
            "`loss_memory_budget`."
        },
    )
    loss_memory_budget: float | None = field(
        default=None,
        metadata={"help": "Bytes that one chunk of logits may take. If `None`, the default of the kernel."},
    )
    loss_backward: str = field(
        default="in_forward",
        metadata={
            "help": "When the gradient of the head is formed: `in_forward` (while the chunk is at hand) or "
            "`recompute` (in the backward).",
            "choices": list(BACKWARDS),
        },
    )
    loss_backend: str = field(
        default="auto",
        metadata={"help": "Kernel: `auto`, `torch`, `triton` or `reference` (dense, for tests)."},
    )
    loss_logits_dtype: str | None = field(
        default=None,
        metadata={
            "help": "What a chunk's logits are kept in: the dtype of the student's projection (unset), or `float32`.",
            "choices": ["float32"],
        },
    )

    def __post_init__(self):
        super().__post_init__()

        check_objective(self.divergence, self.beta, self.tail, self.temperature)
        for name, choices in (
            ("kd_weight_schedule", SCHEDULES),
            ("ce_weight_schedule", SCHEDULES),
            ("loss_backward", BACKWARDS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}."
                )

        for term in ("kd_weight", "ce_weight"):
            schedule, end = getattr(self, f"{term}_schedule"), getattr(self, f"{term}_end")
            if schedule == "constant" and end is not None:
                raise ValueError(
                    f"`{term}_end={end}` has no effect with `{term}_schedule='constant'`: choose 'linear' or "
                    f"'cosine', or leave `{term}_end` unset."
                )
            if schedule != "constant" and end is None:
                raise ValueError(f"`{term}_schedule={schedule!r}` needs the last value: set `{term}_end`.")
            for name in (term, f"{term}_end"):
                value = getattr(self, name)
                if value is not None and not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"`{name}={value}` must be a finite number, 0 or above.")
        kd_end, ce_end = self.weights_at(1.0)
        if (self.kd_weight == 0 and self.ce_weight == 0) or (kd_end == 0 and ce_end == 0):
            raise ValueError(
                f"`kd_weight` ({self.kd_weight:g} to {kd_end:g}) and `ce_weight` ({self.ce_weight:g} to {ce_end:g}) "
                "are both 0 at one end of the run, so nothing is learned there: raise one of them."
            )

        for name in ("kd_top_k", "loss_chunk_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value != int(value) or value <= 0):
                raise ValueError(f"`{name}={value}` must be a whole number above 0, or unset.")
        if self.loss_memory_budget is not None and not self.loss_memory_budget > 0:
            raise ValueError(f"`loss_memory_budget={self.loss_memory_budget}` must be above 0 bytes, or unset.")
        if self.loss_logits_dtype not in (None, "float32"):
            raise ValueError(
                f"`loss_logits_dtype={self.loss_logits_dtype!r}` must be 'float32', or unset for the dtype of the "
                "student's projection."
            )
        if not 0.0 < self.kd_position_fraction <= 1.0:
            raise ValueError(f"`kd_position_fraction={self.kd_position_fraction}` must be above 0 and at most 1.")

        # What SFTTrainer would do with these decides the loss there, and would be silently without effect here
        if self.loss_type not in ("nll", "chunked_nll"):
            raise ValueError(
                f"`loss_type={self.loss_type!r}` is not used: the loss is set by `divergence`, `kd_weight` and "
                "`ce_weight`. Leave `loss_type` unset."
            )
        # Until TRL 1.15 the other name, the default then, makes SFTTrainer patch the model and refuse adapted heads
        self.loss_type = "nll"
        if self.label_smoothing_factor > 0:
            raise ValueError(
                f"`label_smoothing_factor={self.label_smoothing_factor}` is not supported: the teacher's "
                "distribution already smooths the labels. Leave it at 0."
            )
        for name in ("assistant_only_loss", "completion_only_loss"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}=True` has no effect on a cached dataset: the `labels` column was decided at capture. "
                    f"Pass `{name}=True` to `build_distillation_dataset` instead."
                )

    def weights_at(self, progress: float) -> tuple[float, float]:
        """
        `kd_weight` and `ce_weight` at a point of the run.

        Args:
            progress (`float`):
                Share of the run that is over, in `[0, 1]`.

        Returns:
            `tuple[float, float]`: `kd_weight`, `ce_weight`.
        """
        progress = min(max(progress, 0.0), 1.0)
        weights = []
        for term in ("kd_weight", "ce_weight"):
            start, schedule = getattr(self, term), getattr(self, f"{term}_schedule")
            if schedule == "constant":
                weights.append(start)
                continue
            end = getattr(self, f"{term}_end")
            share = progress if schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
            weights.append(start + (end - start) * share)
        return weights[0], weights[1]
