"""`trl-offline-distill drop-layers`."""

from dataclasses import dataclass, field
from pathlib import Path

from . import UsageError, check_new_folder, reading


@dataclass
class DropLayersArguments:
    """Arguments of [`drop_layers`], and where the student goes."""

    model_name_or_path: str = field(metadata={"help": "Model whose layers are dropped."})
    layers: str = field(metadata={"help": "Layers to drop, from 0: numbers and ranges, as in 4,7,16-25."})
    output_dir: str = field(metadata={"help": "Folder of the student."})
    dtype: str = field(default="auto", metadata={"help": "dtype the model is loaded and saved in."})
    overwrite: bool = field(default=False, metadata={"help": "Replace what `output_dir` holds."})


def parse_layers(text: str) -> list[int]:
    """`"4,7,16-18"` is `[4, 7, 16, 17, 18]`."""
    numbers = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"`layers={text}`: {part!r} is neither a number nor a range such as 16-25.")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def run(argv: list[str]) -> int:
    from .arguments import expand, help_text, make_parser, parse

    parser = make_parser([DropLayersArguments], "drop-layers", "Make a student by dropping layers of a model.")
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(argv, "drop_layers.yaml"))
    layers = parse_layers(args.layers)
    if Path(args.output_dir).resolve() == Path(args.model_name_or_path).resolve():
        raise UsageError(
            f"`output_dir={args.output_dir}` is the model itself, which stays as it is. Name another one."
        )
    check_new_folder("output_dir", args.output_dir, args.overwrite)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..healing import drop_layers

    with reading("model_name_or_path", args.model_name_or_path):
        config = AutoConfig.from_pretrained(args.model_name_or_path)
    stored = getattr(config, "quantization_config", None) or {}
    options = {}
    if stored.get("quant_method") == "mxfp4":
        from transformers import Mxfp4Config

        options["quantization_config"] = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype, **options)
    if options:
        # The weights are bf16 from here on; the mark would make `drop_layers` and `save_pretrained` refuse them.
        del model.config.quantization_config
        model.hf_quantizer = None
    student = drop_layers(model, layers)
    student.save_pretrained(args.output_dir)
    AutoTokenizer.from_pretrained(args.model_name_or_path).save_pretrained(args.output_dir)
    print(
        f"{args.output_dir}: {student.config.get_text_config().num_hidden_layers} of "
        f"{model.config.get_text_config().num_hidden_layers} layers, {student.num_parameters() / 1e6:,.1f} M of "
        f"{model.num_parameters() / 1e6:,.1f} M parameters"
    )
    return 0
