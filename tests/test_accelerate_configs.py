from importlib.resources import files

import pytest
from accelerate.commands.config.config_args import load_config_from_file


CONFIGS = files("trl_offline_distill") / "accelerate_configs"
EXPECTED = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def test_all_are_shipped():
    assert sorted(path.name for path in CONFIGS.iterdir()) == sorted(f"{name}.yaml" for name in EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))  # refuses unknown keys
    assert config.distributed_type == EXPECTED[name]
    assert (config.mixed_precision, config.num_machines) == ("bf16", 1)
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
