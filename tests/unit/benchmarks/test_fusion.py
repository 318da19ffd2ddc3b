"""Norms are written together with the residual before them, activations with what they multiply: what torch.compile
makes of a block has a budget that may only fall."""

import importlib.util
import re

import pytest

from tests.support.benchmark_scripts import script

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"),
    # Dynamo looks at the gradient of whatever it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

BUDGETS = {"GPT-2 (LayerNorm, GELU)": (4, 11), "Llama (RMSNorm, SwiGLU, RoPE)": (8, 9)}
"""Kernels forward and backward. Where a change makes them fewer, lower them here."""
NORM, ACTIVATION = re.compile("native_layer_norm|rsqrt"), re.compile("gelu|silu")
ADDITION = re.compile(r"triton_poi_fused_(_unsafe_view_)?add(_view)?_\d+")


@pytest.mark.parametrize("case", BUDGETS)
def test_what_stands_side_by_side_is_one_kernel(case: str) -> None:
    module = script("fusion")
    forward, backward = (
        [kernel.name for kernel in written] for written in module.kernels(module.config_of(case))
    )
    assert len(forward) <= BUDGETS[case][0], forward
    assert len(backward) <= BUDGETS[case][1], backward
    norms = [name for name in forward if NORM.search(name)]
    assert len(norms) == 2, "the second with the residual that it is of"
    assert "add" in norms[1]
    assert len([name for name in forward if ACTIVATION.search(name)]) == 1
    assert len([name for name in forward if ADDITION.fullmatch(name)]) == 1, (
        "the residual that a block ends with"
    )
