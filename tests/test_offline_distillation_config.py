import dataclasses

import pytest
from tiny_students import config
from transformers import HfArgumentParser
from trl import SFTConfig

from trl_offline_distill import OfflineDistillationConfig


OWN_FIELDS = {field.name for field in dataclasses.fields(OfflineDistillationConfig)} - {
    field.name for field in dataclasses.fields(SFTConfig)
}


def test_every_own_option_has_help_and_a_line_in_the_docstring():
    for field in dataclasses.fields(OfflineDistillationConfig):
        if field.name in OWN_FIELDS:
            assert field.metadata["help"]
            assert f"        {field.name} (`" in OfflineDistillationConfig.__doc__


def test_differs_from_sft_config_only_where_it_says_so(tmp_path):
    ours, theirs = config(tmp_path), SFTConfig(str(tmp_path), use_cpu=True)
    changed = {
        field.name
        for field in dataclasses.fields(SFTConfig)
        if type(ours).__dataclass_fields__[field.name].default != type(theirs).__dataclass_fields__[field.name].default
    }
    assert changed == {"max_length"}
    assert "`max_length`: Defaults to `None`" in OfflineDistillationConfig.__doc__


def test_parses_from_the_command_line(tmp_path):
    parser = HfArgumentParser(OfflineDistillationConfig)
    options = "--use_cpu --divergence generalized_jsd --beta 0.5 --kd_top_k 8 --ce_weight 0.25"
    options += " --ce_weight_schedule cosine --ce_weight_end 1.0"
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *options.split()])
    assert (parsed.divergence, parsed.beta, parsed.kd_top_k, parsed.ce_weight_end) == ("generalized_jsd", 0.5, 8, 1.0)
    assert parser.format_help()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "`divergence` must be one of .*'forward_kl'.* got 'kl'"),
        ({"divergence": "generalized_jsd"}, "`beta` is required"),
        ({"divergence": "generalized_jsd", "beta": 1.5}, "`beta` must be from 0.0 .* got 1.5"),
        ({"beta": 0.5}, "`beta` is only used"),
        ({"tail": "drop"}, "`tail` must be one of .* got 'drop'"),
        ({"tail": "none", "divergence": "reverse_kl"}, "`tail='none'` cannot be used"),
        ({"temperature": 0.0}, "`temperature` must be a positive finite number, got 0.0"),
        ({"temperature": float("nan")}, "`temperature`"),
        ({"kd_weight": -1.0}, "`kd_weight=-1.0` must be"),
        ({"ce_weight": -0.5}, "`ce_weight=-0.5` must be"),
        ({"ce_weight": float("inf")}, "`ce_weight=inf` must be"),
        ({"kd_weight": 0.0}, "both 0"),
        ({"kd_weight_schedule": "linear", "kd_weight_end": 0.0}, "both 0 at one end"),
        ({"kd_weight_schedule": "linear"}, "set `kd_weight_end`"),
        ({"kd_weight_end": 0.5}, "`kd_weight_end=0.5` has no effect"),
        ({"ce_weight_schedule": "step", "ce_weight_end": 1.0}, "`ce_weight_schedule` must be one of .* got 'step'"),
        ({"ce_weight_schedule": "linear", "ce_weight_end": -1.0}, "`ce_weight_end=-1.0` must be"),
        ({"kd_top_k": 0}, "`kd_top_k=0` must be a whole number above 0"),
        ({"kd_top_k": 2.5}, "`kd_top_k=2.5`"),
        ({"loss_chunk_size": -1}, "`loss_chunk_size=-1`"),
        ({"loss_memory_budget": 0}, "`loss_memory_budget=0`"),
        ({"loss_logits_dtype": "bfloat16"}, "`loss_logits_dtype='bfloat16'`"),
        ({"completion_only_loss": True}, "`completion_only_loss=True` has no effect"),
        ({"kd_position_fraction": 0.0}, "`kd_position_fraction=0.0`"),
        ({"kd_position_fraction": 1.1}, "`kd_position_fraction=1.1`"),
        ({"loss_backward": "later"}, "`loss_backward` must be one of 'in_forward', 'recompute', got 'later'"),
        ({"loss_type": "dft"}, "`loss_type='dft'` is not used"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor=0.1` is not supported"),
        ({"assistant_only_loss": True}, "decided at capture"),
    ],
)
def test_bad_options_name_argument_value_and_rule(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_weights_over_the_run(tmp_path):
    constant = config(tmp_path, kd_weight=0.7, ce_weight=0.1)
    assert [constant.weights_at(x) for x in (0.0, 0.5, 1.0)] == [(0.7, 0.1)] * 3
    moving = config(
        tmp_path,
        kd_weight=1.0,
        kd_weight_schedule="linear",
        kd_weight_end=0.2,
        ce_weight=0.0,
        ce_weight_schedule="cosine",
        ce_weight_end=1.0,
    )
    assert moving.weights_at(0.0) == (1.0, 0.0)
    assert moving.weights_at(0.25) == pytest.approx((0.8, 0.14644660940672624))  # (1 - cos(pi / 4)) / 2
    assert moving.weights_at(0.5) == pytest.approx((0.6, 0.5))
    assert moving.weights_at(1.0) == pytest.approx((0.2, 1.0))
    assert moving.weights_at(1.5) == moving.weights_at(1.0)
