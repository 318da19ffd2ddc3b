"""The Triton kernel of the cross-entropy, interpreted on a CPU, and compiled for a GPU that is not there."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from megatfm.ops import cross_entropy as module
from tests.support.benchmark_scripts import script

with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"
)


@with_triton
def test_interpreted_it_is_the_reference() -> None:
    command = [sys.executable, "-m", "tests.unit.ops.interpreted"]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.stdout.endswith("all alike\n"), ran.stderr[-2000:]


@with_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_a_gpu_without_spills() -> None:
    softmax = script("kernels").softmax
    for options in ({}, {"capped": True, "smoothed": True}):
        actual = softmax("bf16", **options)
        assert actual.registers <= 96
        assert actual.spilled == 0


def test_chunks_follow_memory_on_a_gpu() -> None:
    on_gpu = type("On", (), {"device": torch.device("cuda"), "element_size": lambda self: 2})()
    tokens = module.default_chunk(on_gpu, 50257)
    assert tokens % module.ROW_ALIGNMENT == 0
    held = tokens * module.padded(50257) * 2
    assert module.LOGITS_BYTES - module.ROW_ALIGNMENT * module.padded(50257) * 2 < held <= module.LOGITS_BYTES
    assert module.default_chunk(on_gpu, 2**30) == module.ROW_ALIGNMENT
    assert module.padded(50257) == 50304
