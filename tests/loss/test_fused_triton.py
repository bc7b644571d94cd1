"""The Triton backend: its choice and its refusals. Its kernels: `triton_cases.py`, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loss_utils import problem

from trl_offline_distill import fused_distillation_loss
from trl_offline_distill.loss import fused_triton
from trl_offline_distill.loss.fused import resolve_backend
from trl_offline_distill.loss.fused_triton import _splits, why_not


CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(**environment: str) -> None:
    """Triton decides whether a kernel is interpreted when the kernel is defined: once a process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", str(CASES)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=CASES.parents[2], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 200
    assert "skipped" not in done.stdout


@pytest.mark.skipif(fused_triton.triton is None, reason="the triton package is not installed")
def test_kernels_under_the_interpreter():
    run_cases(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_kernels_on_the_gpu():
    run_cases(TRITON_INTERPRET="0")


@pytest.mark.skipif(fused_triton.INTERPRETED, reason="TRITON_INTERPRET is set")
def test_an_explicit_choice_never_falls_back():
    inputs = problem(dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"`backend='triton'` cannot run here: .*'cpu'.* Use `backend='torch'`"):
        fused_distillation_loss(**inputs, backend="triton")
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "torch"


def test_fp64_is_refused():
    if fused_triton.triton is not None:
        assert "too little for torch.float64" in why_not(torch.device("cuda"), torch.float64)
    with pytest.raises(RuntimeError, match="cannot run here"):
        resolve_backend("triton", torch.device("cuda"), torch.float64)
    assert resolve_backend("auto", torch.device("cuda"), torch.float64) == "torch"


def test_without_triton():
    """The module imports, `auto` takes torch even on CUDA, and an explicit choice says what is missing."""
    code = (
        "import sys, torch\n"
        "sys.modules['triton'] = None\n"
        "from trl_offline_distill.loss.fused import resolve_backend\n"
        "assert resolve_backend('auto', torch.device('cuda'), torch.bfloat16) == 'torch'\n"
        "try: resolve_backend('triton', torch.device('cuda'), torch.bfloat16)\n"
        "except RuntimeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("`backend='triton'` cannot run here: the `triton` package is not installed.")


def test_an_old_gpu_is_named(monkeypatch):
    monkeypatch.setattr(fused_triton, "triton", object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))
    assert "Tesla P100 is older" in why_not(torch.device("cuda"), torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not(torch.device("cuda"), torch.float16) is None
    assert resolve_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"


@pytest.mark.parametrize(
    ("rows", "blocks", "splits"), [(4096, 38, 1), (512, 38, 1), (264, 38, 2), (100, 38, 4), (1, 38, 32), (1, 1, 1)]
)
def test_few_rows_are_cut_along_the_vocabulary(rows, blocks, splits):
    assert _splits(rows, blocks, processors=132) == splits


def nvidia_compiler():
    if fused_triton.triton is None or fused_triton.INTERPRETED:
        return None
    from triton.backends import backends

    return backends.get("nvidia")


@pytest.mark.skipif(nvidia_compiler() is None, reason="no Triton compiler for NVIDIA GPUs in this process")
@pytest.mark.parametrize(("softcap", "tempered"), [(False, False), (True, True)])
@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
def test_compiles_for_a_gpu_into_wide_loads(element, softcap, tempered, tmp_path, monkeypatch):
    """Without a GPU: Hopper code of both passes, which moves 16 bytes of the tile an instruction."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"HAS_SOFTCAP": softcap, "TEMPERED": tempered, "BLOCK": fused_triton.BLOCK, "LOG_ZERO": -1e30}

    def ptx(kernel, whole_row: bool = True) -> str:
        ones = {"column_stride", "splits" if whole_row else "column_stride"}
        signature, constants, attributes = {}, {}, {}
        for i, name in enumerate(kernel.arg_names):
            if name.isupper() or name in ones:
                signature[name] = "constexpr"
                constants[name] = 1 if name in ones else {**options, "WHOLE_ROW": whole_row, "SPLITS": 32}[name]
            elif name.endswith("_ptr"):
                signature[name] = f"*{element}" if name == "tile_ptr" else "*fp32"
            else:
                signature[name] = "fp32" if name in ("threshold", "scale", "softcap", "inverse_temperature") else "i32"
            if name in ("tile_ptr", "row_stride", "n_columns", "split_columns"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        warps = 1 if kernel is fused_triton._combine_kernel else fused_triton.WARPS
        launch = {"num_warps": warps, **fused_triton.FUSE_MULTIPLY_ADD}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch).asm["ptx"]

    # 16 entries a thread, read once
    wide = 16 * (4 if element == "fp32" else 2) // 16
    for whole_row in (True, False):
        assert ptx(fused_triton._reduce_kernel, whole_row).count("ld.global.v4.b32") == wide
    gradient = ptx(fused_triton._gradient_kernel)
    assert gradient.count("ld.global.v4.b32") == gradient.count("st.global.v4.b32") == wide
    assert "st.global" in ptx(fused_triton._combine_kernel)


@pytest.mark.skipif(fused_triton.triton is None, reason="the triton package is not installed")
def test_trl_trains_on_cpu_beside_triton(tmp_path):
    """TRL has Triton kernels of its own: their presence may not change what CPU tensors meet."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
    arguments = SFTConfig(
        output_dir=tmp_path, max_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no", max_length=8
    )
    trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    assert trainer.train().training_loss > 0


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(32)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t1"
    )
