"""
What a run will cost, from a model's configuration alone: no weights are loaded, no accelerator is needed.

Legend: `N` trained positions of a micro-batch, `H` hidden size, `V` head rows, `K` candidates. 1 GB is 1e9 bytes.
The parts that are arithmetic (weights, gradients, optimizer, loss) are exact up to allocator rounding; activations are
a count of what autograd keeps in a decoder layer, and within about a tenth of it for the dense families.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PretrainedConfig


DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes of optimizer state for a parameter stored in `b` bytes. AdamW keeps two moments in the parameter's own dtype.
OPTIMIZER_BYTES = {
    "adamw_torch": lambda b: 2 * b,
    "adamw_torch_fused": lambda b: 2 * b,
    "adamw_8bit": lambda b: 2,
    "paged_adamw_8bit": lambda b: 0,
    "adafactor": lambda b: 0,
    "sgd": lambda b: 0,
}
# Default budget of the fused loss for one chunk of logits on a GPU, and its largest chunk (`loss/fused.py`).
CHUNK_BUDGET = 2**30
MAX_CHUNK = 4096
# What a gated feed-forward keeps for backward, in multiples of its width: the input of the activation, its output, the
# other branch and their product. gpt-oss also keeps clamped copies and the pieces of its own activation.
FEED_FORWARD_COPIES = {"gpt_oss": 8}
LOSSES = ("dense", "forward_chunked", "fused")


@dataclass
class EstimateArguments:
    """
    A run to estimate. Names are those of the training options where there is one.

    Parameters:
        model_name_or_path (`str`):
            Student: Hub name, folder, or `config.json`. Only the configuration is read.
    """

    model_name_or_path: str = field(
        metadata={"help": "Student: Hub name, folder or config.json; only the configuration is read."}
    )
    max_length: int = field(default=8192, metadata={"help": "Tokens a row."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows of a micro-batch."})
    trained_share: float = field(default=1.0, metadata={"help": "Share of the tokens that are trained."})
    top_k: int = field(default=100, metadata={"help": "Candidates a token."})
    dtype: str = field(
        default="bfloat16",
        metadata={"help": "Of the weights: bfloat16, float16 or float32 (with bf16 autocast)."},
    )
    optim: str = field(default="adamw_torch", metadata={"help": f"Optimizer: {', '.join(OPTIMIZER_BYTES)}."})
    use_peft: bool = field(default=False, metadata={"help": "LoRA on every linear layer instead of full training."})
    lora_r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    gradient_checkpointing: bool = field(default=True, metadata={"help": "Recompute activations in the backward."})
    ranks: int = field(
        default=1, metadata={"help": "GPUs that share weights, gradients and optimizer (FSDP2 or ZeRO-3)."}
    )
    loss_chunk_size: int | None = field(default=None, metadata={"help": "Positions of a chunk of the fused loss."})
    memory_gb: float = field(default=141.0, metadata={"help": "Memory of one GPU, in GB (H200: 141)."})
    reserve_gb: float = field(default=4.0, metadata={"help": "Left to the CUDA context and to fragmentation."})
    teacher_name_or_path: str | None = field(
        default=None, metadata={"help": "Teacher: adds what it would cost to keep it in memory while training."}
    )
    tokens: float = field(default=1e8, metadata={"help": "Trained tokens of the dataset."})
    capture_tokens_per_second: float | None = field(
        default=None, metadata={"help": "Measured speed of the teacher, for the time of the capture."}
    )
    train_tokens_per_second: float | None = field(
        default=None, metadata={"help": "Measured speed of the training, for its time (all ranks together)."}
    )
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the dataset."})

    def __post_init__(self):
        for name in ("max_length", "per_device_train_batch_size", "top_k", "lora_r", "ranks", "memory_gb", "tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}={getattr(self, name)}` must be above 0.")
        if not 0 < self.trained_share <= 1:
            raise ValueError(f"`trained_share={self.trained_share}` must be above 0 and at most 1.")
        for name, choices in (("dtype", DTYPE_BYTES), ("optim", OPTIMIZER_BYTES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be one of {', '.join(choices)}.")


@dataclass
class ModelShape:
    """
    What the estimate needs of a model.

    Args:
        name (`str`): Class of the model.
        parameters (`int`): All parameters, a tied head counted once.
        head_rows (`int`): `V`.
        hidden_size (`int`): `H`.
        layers (`int`): Decoder layers.
        activation_bytes (`dict[int, int]`): Bytes autograd keeps for one token in one layer, by the bytes of the
            compute dtype.
        linear_sizes (`list[tuple[int, int]]`): `(in, out)` of every linear layer but the head: LoRA's targets.
        uncovered_parameters (`int`): Parameters of fused experts, which LoRA on linear layers does not reach.
    """

    name: str
    parameters: int
    head_rows: int
    hidden_size: int
    layers: int
    activation_bytes: dict[int, int]
    linear_sizes: list[tuple[int, int]]
    uncovered_parameters: int


def read_config(name_or_path: str) -> "PretrainedConfig":
    """Configuration of a model on the Hub, in a folder, or in a `config.json`."""
    from transformers import AutoConfig

    path = Path(name_or_path)
    return AutoConfig.from_pretrained(path.parent if path.is_file() else name_or_path)


def model_shape(config: "PretrainedConfig") -> ModelShape:
    """Counts a model that is built on the meta device, where parameters have shapes and no storage."""
    import copy

    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        # A quantised checkpoint is trained dequantised.
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    fused = sum(p.numel() for name, p in model.named_parameters() if "experts" in name and p.ndim == 3)
    return ModelShape(
        name=type(model).__name__,
        parameters=model.num_parameters(),
        head_rows=head.weight.shape[0],
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        activation_bytes={size: _activation_bytes(text, size) for size in (2, 4)},
        linear_sizes=[(m.in_features, m.out_features) for m in linears],
        uncovered_parameters=fused,
    )


def _activation_bytes(config: "PretrainedConfig", size: int) -> int:
    """
    Bytes a token that autograd keeps in one decoder layer with fused attention.

    Per norm an fp32 copy of its input, the normalised values and its output; queries, keys, values and the attention's
    output; and the feed-forward's branches.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head_size
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    norms = 2 * hidden * (4 + 2 * size)
    attention = size * (3 * queries + 2 * keys)
    if config.model_type.startswith(("qwen3", "gemma3", "olmo2")):
        # Queries and keys pass through norms of their own.
        attention += (queries + keys) * (4 + size)
    copies = FEED_FORWARD_COPIES.get(config.model_type, 4)
    active = getattr(config, "num_experts_per_tok", None)
    if active:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        feed_forward = size * active * (copies * width + 2 * hidden)
    else:
        width = getattr(config, "intermediate_size", None) or 4 * hidden
        feed_forward = size * copies * width
    return norms + attention + feed_forward


def loss_bytes(
    loss: str,
    positions: int,
    head_rows: int,
    hidden_size: int,
    *,
    dtype_bytes: int = 2,
    trained_head: bool = True,
    chunk_size: int | None = None,
) -> int:
    """
    Peak bytes of the loss on top of the hidden states and of the head's weight, its gradient included.

    * `"dense"`: logits in the model's dtype and their fp32 copy, the log-softmax, and in the backward its gradient
      twice (from the gather, and through the log-softmax): `[N, V]` each.
    * `"forward_chunked"`: the projection runs chunk by chunk, but autograd keeps every chunk's log-softmax; in the
      backward one chunk's two gradients come on top.
    * `"fused"`: one chunk of logits, the gradient of the hidden states, and for a trained head its fp32 accumulator.

    Args:
        loss (`str`): One of `LOSSES`.
        positions (`int`): `N`.
        head_rows (`int`): `V`.
        hidden_size (`int`): `H`.
        dtype_bytes (`int`): Bytes of a hidden state's number.
        trained_head (`bool`): Whether the head's weight gets a gradient.
        chunk_size (`int`, *optional*): Positions of a chunk; by default the budget's.

    Returns:
        `int`: Bytes.
    """
    upcast = 4 if dtype_bytes < 4 else 0
    chunk = min(positions, chunk_size or min(MAX_CHUNK, max(1, CHUNK_BUDGET // (head_rows * dtype_bytes))))
    hidden_gradient = positions * hidden_size * dtype_bytes
    if loss == "dense":
        return positions * head_rows * (dtype_bytes + upcast + 12) + hidden_gradient
    if loss == "forward_chunked":
        return positions * head_rows * 4 + chunk * head_rows * 8 + hidden_gradient
    if loss == "fused":
        return chunk * head_rows * dtype_bytes + hidden_gradient + 4 * head_rows * hidden_size * trained_head
    raise ValueError(f"`loss={loss!r}` must be one of {', '.join(LOSSES)}.")


@dataclass
class MemoryEstimate:
    """
    Peak bytes of one rank by what takes them.

    Args:
        weights, gradients, optimizer, adapter, activations, batch (`int`): Everything but the loss.
        loss (`dict[str, int]`): The loss, by scheme.
    """

    weights: int
    gradients: int
    optimizer: int
    adapter: int
    activations: int
    batch: int
    loss: dict[str, int]

    @property
    def rest(self) -> int:
        """Everything but the loss."""
        return self.weights + self.gradients + self.optimizer + self.adapter + self.activations + self.batch

    def total(self, loss: str) -> int:
        return self.rest + self.loss[loss]


def training_memory(shape: ModelShape, args: EstimateArguments, max_length: int | None = None) -> MemoryEstimate:
    """Peak memory of one rank for `max_length` tokens a row (that of `args` by default)."""
    size = DTYPE_BYTES[args.dtype]
    compute = 2
    tokens = args.per_device_train_batch_size * (max_length or args.max_length)
    positions = max(1, round(tokens * args.trained_share))
    adapter = 0
    if args.use_peft:
        # PEFT keeps adapters of a half precision model in fp32.
        trained = sum(args.lora_r * (inputs + outputs) for inputs, outputs in shape.linear_sizes)
        adapter = trained * (4 + 4 + OPTIMIZER_BYTES[args.optim](4))
        gradients = optimizer = 0
    else:
        gradients = shape.parameters * size // args.ranks
        optimizer = shape.parameters * OPTIMIZER_BYTES[args.optim](size) // args.ranks
    layer = tokens * shape.activation_bytes[compute]
    if args.gradient_checkpointing:
        activations = tokens * shape.hidden_size * compute * shape.layers + layer
    else:
        activations = layer * shape.layers
    chunk_options = {
        "dtype_bytes": compute,
        "trained_head": not args.use_peft,
        "chunk_size": args.loss_chunk_size,
    }
    return MemoryEstimate(
        weights=shape.parameters * size // args.ranks,
        gradients=gradients,
        optimizer=optimizer,
        adapter=adapter // args.ranks,
        activations=activations,
        # Ids (int32) and log-probabilities (fp32) of K candidates and the tail, on the device.
        batch=tokens * (8 * args.top_k + 4),
        loss={
            name: loss_bytes(name, positions, shape.head_rows, shape.hidden_size, **chunk_options) for name in LOSSES
        },
    )


def largest_context(shape: ModelShape, args: EstimateArguments, loss: str) -> int:
    """Most tokens a row that fit the memory, in steps of 256; 0 if not even 256 fit."""
    room = (args.memory_gb - args.reserve_gb) * 1e9
    low, high = 0, 2**24 // 256
    while low < high:
        middle = (low + high + 1) // 2
        if training_memory(shape, args, 256 * middle).total(loss) <= room:
            low = middle
        else:
            high = middle - 1
    return 256 * low


def cache_bytes(head_rows: int, top_k: int, layout: str) -> int | None:
    """
    Largest bytes a trained token in memory and before compression: its blob, offset, id and label.

    `None` where the layout's size depends on the text (`min_mass`).
    """
    from .teacher_cache.codecs import get_layout, id_bits

    if layout == "min_mass":
        return None
    form = get_layout(layout)
    if layout == "sampled":
        # Every draw may hit another token, once.
        return form.blob_bytes(form.draws.bit_length(), id_bits(head_rows), form.draws) + 16
    return form.blob_bytes(0, id_bits(head_rows), top_k) + 16


def format_estimate(args: EstimateArguments) -> str:
    """The estimate of a run as text, its arithmetic shown."""
    config = read_config(args.model_name_or_path)
    shape = model_shape(config)
    memory = training_memory(shape, args)
    room = args.memory_gb - args.reserve_gb
    tokens = args.per_device_train_batch_size * args.max_length
    positions = round(tokens * args.trained_share)
    kind = f"LoRA r={args.lora_r}" if args.use_peft else "full training"
    sharded = f", {args.ranks} ranks" if args.ranks > 1 else ""
    lines = [
        f"{args.model_name_or_path}: {shape.name}, {shape.parameters / 1e9:.2f} B parameters, {shape.layers} layers, "
        f"H={shape.hidden_size:,}, V={shape.head_rows:,}",
        f"{kind}, {args.dtype}, {args.optim}, {args.per_device_train_batch_size} x {args.max_length:,} tokens"
        f"{', checkpointing' if args.gradient_checkpointing else ''}{sharded}",
        "",
        f"weights      {_gb(memory.weights)}  {shape.parameters:,} x {DTYPE_BYTES[args.dtype]} B"
        + (f" / {args.ranks}" if args.ranks > 1 else ""),
        f"gradients    {_gb(memory.gradients)}",
        f"optimizer    {_gb(memory.optimizer)}",
        f"adapter      {_gb(memory.adapter)}",
        f"activations  {_gb(memory.activations)}  {tokens:,} tokens x "
        + (
            f"({shape.layers} layers x {shape.hidden_size:,} x 2 B + one layer's {shape.activation_bytes[2]:,} B)"
            if args.gradient_checkpointing
            else f"{shape.layers} layers x {shape.activation_bytes[2]:,} B"
        ),
        f"teacher rows {_gb(memory.batch)}  {tokens:,} tokens x (8 x {args.top_k} + 4) B",
        "",
        f"loss on {positions:,} x {shape.head_rows:,} = {positions * shape.head_rows / 1e9:.2f} G logits",
    ]
    for name, formula in (
        ("dense", "18 B a logit (bf16 logits, fp32 copy, log-softmax, two gradients)"),
        ("forward_chunked", "4 B a logit (every chunk's log-softmax stays) + one chunk"),
        ("fused", "one chunk, the hidden states' gradient" + ("" if args.use_peft else ", the head's accumulator")),
    ):
        total = memory.total(name) / 1e9
        verdict = "fits" if total <= room else "does not fit"
        lines.append(
            f"{name:<15} {_gb(memory.loss[name])}  total {total:7.1f} GB: {verdict} {args.memory_gb:g} GB "
            f"({args.reserve_gb:g} reserved); longest row {largest_context(shape, args, name):,}   [{formula}]"
        )
    if args.use_peft and shape.uncovered_parameters:
        lines.append(
            f"note: {shape.uncovered_parameters / 1e9:.1f} B parameters are fused experts, which LoRA on linear "
            "layers leaves frozen; `lora_target_parameters` reaches them."
        )
    if args.teacher_name_or_path is not None:
        teacher = model_shape(read_config(args.teacher_name_or_path))
        weights = teacher.parameters * 2 / 1e9
        lines += ["", f"A teacher in memory instead of the cache would add {weights:.1f} GB of bf16 weights."]
    lines += ["", f"cache for {args.tokens:,.0f} trained tokens, before compression:"]
    for layout in ("default", "compact", "sampled"):
        size = cache_bytes(shape.head_rows, args.top_k, layout)
        lines.append(f"{layout:<15} {args.tokens * size / 1e9:8.1f} GB  at most {size} B a token")
    for title, speed, passes in (
        ("capture", args.capture_tokens_per_second, 1.0),
        ("training", args.train_tokens_per_second, args.num_train_epochs),
    ):
        if speed is not None:
            lines.append(f"{title}: {args.tokens * passes / speed / 3600:.1f} h at {speed:,.0f} tokens/s")
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:8.2f} GB"


def article_example(
    positions: int = 32_768, head_rows: int = 201_088, hidden_size: int = 2_880, fused_total_gb: float = 128.0
) -> dict[str, float]:
    """
    The headline of the article behind the method, recomputed: at 32K tokens on one H200 the dense loss peaks at 250 GB
    (its authors' estimate), the fused one stays under 128 GB.

    What is not the loss is the same on both sides: the fused total less the fused loss. Adding the dense loss to it
    gives the dense total.

    Returns:
        `dict[str, float]`: `rest`, `fused`, `dense` in GB.
    """
    fused = loss_bytes("fused", positions, head_rows, hidden_size, trained_head=False) / 1e9
    rest = fused_total_gb - fused
    dense = loss_bytes("dense", positions, head_rows, hidden_size, trained_head=False) / 1e9
    return {"rest": rest, "fused": fused_total_gb, "dense": rest + dense}
