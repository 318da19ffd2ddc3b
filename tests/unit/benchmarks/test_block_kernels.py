"""Kernels of compiled blocks: their number has a budget, and they compile for a GPU without one."""

import importlib.util
import itertools
import re

import pytest

from tests.support.documentation import load_script
from tests.support.layouts import EXTENDED, SLOW

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"),
    # Dynamo looks at the gradient of whatever it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.mark.parametrize(("preset", "dtype", "ways"), [
    ("gpt2-124m", "bf16", ["forward"]),
        pytest.param("gpt2-124m", "bf16", ["forward", "backward"], marks=EXTENDED),
    *(
        pytest.param(preset, dtype, ["forward", "backward"], marks=SLOW)
        for preset in ("bert-base", "llama3-8b")
        for dtype in ("bf16", "fp32")
    ),
])  # fmt: skip
def test_block_kernels_compile_for_a_gpu_without_spills(preset: str, dtype: str, ways: list[str]) -> None:
    """Kernels include dropout: Triton takes no constant of 64 bits beside an index of 32."""
    compiled = load_script("compiled_kernels").compile_preset(preset, dtype)
    checked_kernels = list(itertools.takewhile(lambda row: row[0] in ways, compiled))
    assert list(dict.fromkeys(way for way, _, _ in checked_kernels)) == ways
    for _, kernel, resources in checked_kernels:
        assert resources.registers <= 128, kernel.name
        assert resources.spilled == 0, kernel.name


BUDGETS = {"GPT-2 (LayerNorm, GELU)": (4, 11), "Llama (RMSNorm, SwiGLU, RoPE)": (8, 9)}
"""Kernels forward and backward. Where a change makes them fewer, lower them here."""
NORM, ACTIVATION = re.compile("native_layer_norm|rsqrt"), re.compile("gelu|silu")
ADDITION = re.compile(r"triton_poi_fused_(_unsafe_view_)?add(_view)?_\d+")


@pytest.mark.parametrize("case", BUDGETS)
def test_neighbouring_operations_fuse_into_one_kernel(case: str) -> None:
    module = load_script("compiled_kernels")
    forward, backward = ([kernel.name for kernel in written] for written in module.list_kernels(module.load_case(case)))
    assert len(forward) <= BUDGETS[case][0], forward
    assert len(backward) <= BUDGETS[case][1], backward
    norms = [name for name in forward if NORM.search(name)]
    assert len(norms) == 2, "the second with the residual that it is of"
    assert "add" in norms[1]
    assert len([name for name in forward if ACTIVATION.search(name)]) == 1
    assert len([name for name in forward if ADDITION.fullmatch(name)]) == 1, "the residual that a block ends with"
