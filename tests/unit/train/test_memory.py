"""Running out of memory ends in one line that says what to do; any other error passes as it is."""

from pathlib import Path

import pytest
import torch

from megatfm.errors import MegatfmError
from megatfm.train.profiling import explain_out_of_memory, should_record_allocations

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_what_torch_could_not_allocate_is_named(tmp_path: Path) -> None:
    """The allocator's own error, for an exabyte."""
    with (
        pytest.raises(
            MegatfmError,
            match=r"^rank 3 is out of memory: it held .* GiB and asked for 9\.31e\+08 GiB more\. Lower ",
        ),
        explain_out_of_memory(tmp_path, 3, CPU),
    ):
        torch.empty(10**18, dtype=torch.uint8)


def test_python_s_and_cuda_s_errors_count_too(tmp_path: Path) -> None:
    with (
        pytest.raises(MegatfmError, match="rank 0 is out of memory: it held"),
        explain_out_of_memory(tmp_path, 0, CPU),
    ):
        raise MemoryError
    output = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB."
    with (
        pytest.raises(MegatfmError, match=r"and asked for 2\.50 GiB more"),
        explain_out_of_memory(tmp_path, 0, CPU),
    ):
        raise torch.OutOfMemoryError(output)


def test_a_gpu_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    place = tmp_path / "memory" / "rank-2.pickle"
    with (
        pytest.raises(MegatfmError, match=f"it held 3 GiB.*; memory snapshot: {place}"),
        explain_out_of_memory(tmp_path, 2, GPU),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert place.read_bytes() == b"snapshot"
    (tmp_path / "memory").rename(tmp_path / "elsewhere")
    (tmp_path / "memory").write_text("a file where the folder should be")
    with (
        pytest.raises(MegatfmError, match="could not be written to"),
        explain_out_of_memory(tmp_path, 2, GPU),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


def test_stacks_are_recorded_on_request_and_once_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert should_record_allocations(tmp_path, requested=True)
    assert not should_record_allocations(tmp_path, requested=False)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    with pytest.raises(MegatfmError), explain_out_of_memory(tmp_path, 0, GPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    assert should_record_allocations(tmp_path, requested=False)


def test_errors_that_are_not_of_memory_pass(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes don't match"), explain_out_of_memory(tmp_path, 0, CPU):
        raise RuntimeError("shapes don't match")


def test_a_run_on_cpus_asks_no_gpu_of_its_host_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that it held 0 GiB, and leave a snapshot of a GPU that it doesn't use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    with (
        pytest.raises(MegatfmError, match=r"it held 0\.[0-9]+ GiB\. Lower|it held [1-9][0-9.]* GiB\. Lower"),
        explain_out_of_memory(tmp_path, 0, CPU),
    ):
        raise MemoryError
    assert not list(tmp_path.iterdir())
