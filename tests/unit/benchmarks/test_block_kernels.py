"""What inductor writes for blocks on a GPU compiles for one, without one."""

import importlib.util

import pytest

from tests.support.benchmark_scripts import script

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"),
    # Dynamo looks at the gradient of whatever it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("gpt2-124m", "bf16"),
        *(
            pytest.param(preset, dtype, marks=SLOW)
            for preset in ("bert-base", "llama3-8b")
            for dtype in ("bf16", "fp32")
        ),
    ],
)
def test_block_kernels_compile_for_a_gpu_without_spills(preset: str, dtype: str) -> None:
    """With their dropout: Triton takes no constant of 64 bits beside an index of 32."""
    compiled = list(script("block_kernels").kernels_of_preset(preset, dtype))
    assert {way for way, _, _ in compiled} == {"forward", "backward"}
    for _, kernel, resources in compiled:
        assert resources.registers <= 128, kernel.name
        assert resources.spilled == 0, kernel.name
