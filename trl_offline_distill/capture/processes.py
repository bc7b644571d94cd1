"""Which of the launched processes this one is."""

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def process_state() -> PartialState:
    """Accelerate's state, joined to its process group if a launcher started several processes, on CPU too.

    `PartialState()` alone takes processes on CPU for single ones.
    """
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=on_cpu)
