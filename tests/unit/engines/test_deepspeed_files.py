"""What reads and writes DeepSpeed's files: to the bit, at any address, and loud where it fails."""

from pathlib import Path

import pytest
import torch

from megatfm.engines.deepspeed.nvme_offload import SyncIOHandle
from megatfm.errors import MegatfmError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_of_a_buffer_that_begins_anywhere_goes_out_and_in_to_the_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """DeepSpeed's operator reads past the system's cache, which wants addresses of its own, and reports no failure."""
    handle, path = SyncIOHandle(block_size=1, queue_depth=1), str(tmp_path / "a" / "b" / "c" / "weights.swp")
    Path(path).parent.mkdir(parents=True)
    buffer = handle.new_cpu_locked_tensor(5000, torch.zeros(1, dtype=dtype))
    values = torch.randn(4001).to(dtype)
    buffer.zero_()[17 : 17 + 4001] = values
    assert handle.async_pwrite(buffer.narrow(0, 17, 4001), path, 0) == 0
    buffer.zero_()
    assert handle.async_pread(buffer.narrow(0, 31, 4001), path, 0) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    assert torch.equal(buffer[31 : 31 + 4001], values)
    assert not buffer[:31].any()
    assert not buffer[31 + 4001 :].any()


def test_what_is_looked_at_as_memory_is_the_same_file(tmp_path: Path) -> None:
    handle, path = SyncIOHandle(), str(tmp_path / "weights.swp")
    buffer = handle.new_cpu_locked_tensor(3000, torch.zeros(1)).fill_(1.0)
    handle.async_pwrite(buffer, path, 0)
    seen = torch.from_file(path, shared=True, size=3000)
    assert torch.equal(seen, buffer)
    seen.fill_(2.0)
    handle.async_pread(buffer, path, 0)
    assert torch.equal(seen, buffer)
    handle.async_pwrite(buffer.fill_(3.0), path, 0)
    assert torch.equal(seen, buffer)


def test_its_buffers_are_known_whichever_part_of_them_it_is() -> None:
    handle = SyncIOHandle()
    buffer, other = (
        handle.new_cpu_locked_tensor(100, torch.zeros(1)),
        SyncIOHandle().new_cpu_locked_tensor(9, torch.zeros(1)),
    )
    assert handle.is_pinned(buffer)
    assert handle.is_pinned(buffer[40:].detach())
    assert not any(map(handle.is_pinned, (other, torch.zeros(100), torch.Tensor())))
    assert handle.free_cpu_locked_tensor(buffer)
    assert not handle.is_pinned(buffer)


def test_a_file_that_ends_early_and_a_disk_that_is_full_are_errors(tmp_path: Path) -> None:
    handle, path = SyncIOHandle(), tmp_path / "rank0" / "zero" / "optimizer" / "weights.swp"
    path.parent.mkdir(parents=True)
    buffer = handle.new_cpu_locked_tensor(100, torch.zeros(1)).zero_()
    handle.async_pwrite(buffer[:90], str(path), 0)
    with pytest.raises(
        MegatfmError, match=r"weights.swp, where DeepSpeed keeps .*: it ends 40 bytes early: make room"
    ):
        handle.async_pread(buffer, str(path), 0)
    with pytest.raises(
        MegatfmError, match=r"/dev/full, where .*: No space left on device: .*deepspeed.nvme_path"
    ):
        handle.async_pwrite(buffer, "/dev/full", 0)
