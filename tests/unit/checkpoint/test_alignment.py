"""Alignment of tensors that were read from files, and of those that wait to be written."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatfm import checkpoint
from megatfm.checkpoint import file_format
from megatfm.checkpoint.planner import WriteItem
from megatfm.checkpoint.staging import Staging
from megatfm.ops import transfer
from tests.support.tensors import OFF, is_misaligned

TENSORS = {
    name: torch.arange(float(size), dtype=dtype).to(dtype)
    for name, (size, dtype) in {
        "odd": (3, torch.uint8), "b": (5, torch.bfloat16), "f": (7, torch.float32), "d": (9, torch.float64),
        "wide": (70_001, torch.float32), "none": (0, torch.float32), "last": (11, torch.float32),
    }.items()
}  # fmt: skip
"""In a file, each begins where the one before ends."""


@pytest.fixture(autouse=True)
def numpy_begins_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.empty

    def empty(size: int, dtype: type) -> np.ndarray:
        memory = real(size + 2 * 4096, dtype)
        return memory[-memory.ctypes.data % 4096 + OFF :][:size]

    monkeypatch.setattr(transfer.np, "empty", empty)


@pytest.mark.parametrize("direct", [False, True])
def test_tensors_of_a_checkpoint_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if direct:
        monkeypatch.setattr(file_format, "DIRECT_BYTES", 1)
    path = checkpoint.write_checkpoint_from_iterator(tmp_path, 1, TENSORS.items(), {})
    read = checkpoint.read_tensors(path)
    assert [name for name, tensor in read.items() if is_misaligned(tensor)] == []
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_the_staging_copy() -> None:
    pieces = {WriteItem(name, ((), ()), ("F32", ()), 0, 0): tensor for name, tensor in TENSORS.items()}
    staging = Staging()
    for _ in range(2):
        copies = staging.copy(pieces)
        assert [str(index) for index, copy in copies.items() if copy.numel() and is_misaligned(copy)] == []
        assert all(torch.equal(copies[index], piece) for index, piece in pieces.items())
