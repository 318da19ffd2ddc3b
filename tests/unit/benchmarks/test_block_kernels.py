"""Kernels of compiled blocks: their number has a budget, and they compile for a GPU without one."""

import importlib.util
import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.documentation import load_script
from tests.support.layouts import EXTENDED, SLOW
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")


@contextmanager
def ignore_torch_s_warnings() -> Iterator[None]:
    """Dynamo looks at the gradient of whatever it meets, and inductor at what is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compile_for_a_gpu(preset: str, dtype: str, ways: list[str]) -> list[tuple[str, str, int, int]]:
    """Way, name, registers and spilled bytes of each kernel; in a rank, which has imported inductor."""
    with ignore_torch_s_warnings():
        compiled = itertools.takewhile(
            lambda row: row[0] in ways, load_script("compiled_kernels").compile_preset(preset, dtype)
        )
        return [(way, kernel.name, use.registers, use.spilled) for way, kernel, use in compiled]


def list_kernel_names(case: str) -> list[list[str]]:
    with ignore_torch_s_warnings():
        module = load_script("compiled_kernels")
        return [[kernel.name for kernel in written] for written in module.list_kernels(module.load_case(case))]


@pytest.mark.parametrize(("preset", "dtype", "ways"), [
    ("gpt2-124m", "bf16", ["forward"]),
        pytest.param("gpt2-124m", "bf16", ["forward", "backward"], marks=EXTENDED),
    *(
        pytest.param(preset, dtype, ["forward", "backward"], marks=SLOW)
        for preset in ("bert-base", "llama3-8b")
        for dtype in ("bf16", "fp32")
    ),
])  # fmt: skip
def test_block_kernels_compile_for_a_gpu_without_spills(
    workers: Workers, preset: str, dtype: str, ways: list[str]
) -> None:
    """Kernels include dropout: Triton takes no constant of 64 bits beside an index of 32."""
    (kernels,) = workers.run(compile_for_a_gpu, 1, preset, dtype, ways, timeout=250.0)
    assert list(dict.fromkeys(way for way, *_ in kernels)) == ways
    for _, name, registers, spilled in kernels:
        assert registers <= 128, name
        assert spilled == 0, name


BUDGETS = {"GPT-2 (LayerNorm, GELU)": (4, 11), "Llama (RMSNorm, SwiGLU, RoPE)": (8, 9)}
"""Kernels forward and backward. Where a change makes them fewer, lower them here."""
NORM, ACTIVATION = re.compile("native_layer_norm|rsqrt"), re.compile("gelu|silu")
ADDITION = re.compile(r"triton_poi_fused_(_unsafe_view_)?add(_view)?_\d+")


@pytest.mark.parametrize("case", BUDGETS)
def test_neighbouring_operations_fuse_into_one_kernel(workers: Workers, case: str) -> None:
    ((forward, backward),) = workers.run(list_kernel_names, 1, case, timeout=250.0)
    assert len(forward) <= BUDGETS[case][0], forward
    assert len(backward) <= BUDGETS[case][1], backward
    norms = [name for name in forward if NORM.search(name)]
    assert len(norms) == 2, "the second with the residual that it is of"
    assert "add" in norms[1]
    assert len([name for name in forward if ACTIVATION.search(name)]) == 1
    assert len([name for name in forward if ADDITION.fullmatch(name)]) == 1, "the residual that a block ends with"
