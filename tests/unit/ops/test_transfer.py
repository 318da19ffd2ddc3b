"""Memory as torch's own: the helper, and the tests' own means of planting other memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatfm.ops import transfer as module
from megatfm.ops.transfer import align, align_all, allocate_aligned, is_aligned
from tests.support.uninitialized_memory import MisalignedInputs, assert_aligned_inputs, is_misaligned, misalign

ROWS = torch.arange(15.0).view(5, 3)
WRONG = {
    "8 bytes on": misalign(ROWS),
    "a slice": ROWS[1:],
    "by columns": ROWS.T,
    "8 bytes on, by columns": misalign(ROWS.T),
}


@pytest.mark.parametrize("kind", WRONG)
def test_misaligned_tensors_are_copied(kind: str) -> None:
    wrong = WRONG[kind]
    assert is_misaligned(wrong)
    assert not is_aligned(wrong)
    right = align(wrong)
    assert torch.equal(right, wrong)
    assert not is_misaligned(right)


def test_aligned_tensors_are_not_copied() -> None:
    for tensor in (ROWS, torch.empty(0), torch.tensor(3.0), torch.zeros(0, 5)):
        assert align(tensor) is tensor


def test_a_buffer_is_left_by_all_or_by_none() -> None:
    def parts(sizes: list[int]) -> dict[str, Tensor]:
        return {str(i): part for i, part in enumerate(torch.arange(float(sum(sizes))).split(sizes))}

    joined, left = parts([16, 32, 5]), parts([16, 3, 32])
    aligned = align_all({**joined, **{f"left {name}": part for name, part in left.items()}})
    assert all(aligned[name] is part for name, part in joined.items())
    buffer = next(iter(left.values())).untyped_storage().data_ptr()
    for name, part in left.items():
        actual = aligned[f"left {name}"]
        assert torch.equal(actual, part)
        assert not is_misaligned(actual)
        assert actual.untyped_storage().data_ptr() != buffer


@pytest.mark.parametrize("line", [64, 4096])
def test_bytes_begin_at_a_line_wherever_numpy_begins(monkeypatch: pytest.MonkeyPatch, line: int) -> None:
    real = np.empty
    for off in (0, 8, 16, 40):

        def empty(size: int, dtype: type, off: int = off) -> np.ndarray:
            memory = real(size + 2 * line, dtype)
            return memory[-memory.ctypes.data % line + off :][:size]

        monkeypatch.setattr(module.np, "empty", empty)
        for size in (0, 1, 1000):
            memory = allocate_aligned(size, line)
            assert memory.size == size
            assert not size or memory.ctypes.data % line == 0


def test_kernels_on_other_memory_are_found() -> None:
    with assert_aligned_inputs():
        align(misalign(ROWS)).T @ ROWS[1:, :2].T.T[:4].repeat(2, 1)[:5]
    with MisalignedInputs() as kernels:
        misalign(ROWS) @ ROWS.T
    assert kernels.wrong == {"aten.mm.default [5, 3]"}


def on_device(host: Tensor) -> Tensor:
    """A device tensor that can't be read, with a copy on the host."""
    return module.remember_host_copy(torch.empty_like(host, device="meta"), host)


def test_the_host_computes_along_what_it_has_copies_of() -> None:
    def take(values: Tensor, index: Tensor) -> Tensor:
        return values[:, index]

    values, index = torch.arange(6).view(2, 3), torch.tensor([2, 0])
    on_devices = [on_device(values), on_device(index)]
    rows = module.keep_host_copy(take, *on_devices)
    assert rows.device.type == "meta"
    assert torch.equal(module.to_host(rows), torch.tensor([[2, 0], [5, 3]]))
    assert torch.equal(module.keep_host_copy(take, values, index), values[:, index])
    on_devices[0].add_(1)  # the copy is out of date
    with pytest.raises(NotImplementedError):
        module.to_host(module.keep_host_copy(take, *on_devices))
