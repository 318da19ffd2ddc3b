"""Saves in the background: what is copied stays as it was, one at a time, and failures reach every rank."""

import errno
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.checkpoint import (
    Saver,
    ShardedTensor,
    check_all_bytes,
    file_format,
    find_latest,
    read_state,
    read_tensors,
    saver,
    staging,
)
from megatfm.checkpoint.directory import list_checkpoints
from megatfm.errors import MegatfmError
from tests.support.workers import Workers

HOST = socket.gethostname()


@contextmanager
def delay_writes(release: threading.Event) -> Iterator[None]:
    """Files are written only once the event is set."""
    genuine = file_format.write_safetensors

    def wait(*args: Any) -> Any:
        assert release.wait(30)
        return genuine(*args)

    file_format.write_safetensors = wait
    try:
        yield
    finally:
        release.set()
        file_format.write_safetensors = genuine


def list_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(folder)]


def make_tensors(step: int) -> dict[str, ShardedTensor | torch.Tensor]:
    """Sharded, replicated and full tensors whose every value is their step."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {
        "rows": ShardedTensor(torch.full((3, 4), float(step)), (3 * world, 4), (3 * rank, 0)),
        "turned": torch.full((5, 2), step).T,
        "half": torch.full((7,), step, dtype=torch.bfloat16),
        "count": torch.tensor(step),
        "empty": torch.empty(0, 4),
    }


def change_tensors(tensors: Mapping[str, ShardedTensor | torch.Tensor]) -> None:
    for tensor in tensors.values():
        ShardedTensor.from_tensor(tensor).tensor.add_(100)


def check_values(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Assert that every value of a checkpoint is its step; returns the tensors."""
    stored = read_tensors(folder / f"step-{step:08d}")
    assert all(bool((tensor == step).all()) for tensor in stored.values())
    return stored


def change_after_save(folder: Path) -> None:
    weights = make_tensors(1)
    state = {"step": 1, "list": [1]}
    release = threading.Event()
    with delay_writes(release), Saver(folder) as saving:
        saving.save(1, weights, state)
        change_tensors(weights)
        state["list"].append(2)  # type: ignore[attr-defined]
        assert saving.step_in_progress == 1
        assert find_latest(folder) is None
        dist.barrier()
        release.set()
        assert saving.wait_for_save() == folder / "step-00000001"
        assert saving.step_in_progress is None
        assert saving.wait_for_save() is None


@pytest.mark.parametrize("world", [1, 2])
def test_changes_after_a_save_returned_are_not_in_it(workers: Workers, tmp_path: Path, world: int) -> None:
    workers.run(change_after_save, world, tmp_path)
    path = tmp_path / "step-00000001"
    check_all_bytes(path)
    assert read_state(path) == {"step": 1, "list": [1]}
    stored = check_values(tmp_path, 1)
    assert stored["rows"].shape == (3 * world, 4)
    assert stored["half"].dtype == torch.bfloat16


def test_what_one_save_keeps_is_kept_until_the_next_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed in between resumes with the best checkpoint that its newest one names."""
    genuine, allowed = file_format.write_safetensors, threading.Semaphore(1)
    monkeypatch.setattr(file_format, "write_safetensors", lambda *args: allowed.acquire(timeout=30) and genuine(*args))
    with Saver(tmp_path, keep=1) as saving:
        best, newer = tmp_path / "step-00000001", tmp_path / "step-00000003"
        saving.save(1, make_tensors(1), {}, pinned=best)
        saving.wait_for_save()
        saving.save(2, make_tensors(2), {}, pinned=best)
        threading.Timer(0.1, allowed.release).start()
        saving.save(3, make_tensors(3), {}, pinned=newer)
        assert list_steps(tmp_path) == [1, 2]
        allowed.release()
    assert list_steps(tmp_path) == [3]


def test_a_save_returns_before_its_copy_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, weights = threading.Event(), make_tensors(1)
    with Saver(tmp_path) as saving:
        copy = saving._staging.copy
        monkeypatch.setattr(saving._staging, "copy", lambda pieces: release.wait(30) and copy(pieces))
        saving.save(1, weights, {}, wait_for_staging=False)
        threading.Timer(0.1, release.set).start()
        saving.wait_for_staging()
        assert release.is_set()
        change_tensors(weights)
        saving.wait_for_save()
        saving.wait_for_staging()
    check_values(tmp_path, 1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread that copies each of 200 parts; the background's first copy waits until all have begun."""
    threads: list[str] = []
    copy, have_begun = staging._copy, threading.Event()

    def record(*part: Any) -> None:
        threads.append(threading.current_thread().name)
        if threads[-1] == "megatfm-save" and threads.count("megatfm-save") == 1:
            assert have_begun.wait(30)
        copy(*part)
        if len(threads) >= 200:
            have_begun.set()

    monkeypatch.setattr(staging, "CHUNK_BYTES", 40)
    monkeypatch.setattr(staging, "_copy", record)
    return threads


def make_halves(step: int) -> dict[str, ShardedTensor | torch.Tensor]:
    return {name: torch.full((1000,), float(step)) for name in "ab"}


def test_a_thread_that_waits_for_the_copy_helps_with_it(tmp_path: Path, copied: list[str]) -> None:
    weights = make_halves(1)
    with Saver(tmp_path) as saving:
        saving.save(1, weights, {})
        assert len(copied) == 200, "each part once"
        assert copied.count("megatfm-save") == 1
        change_tensors(weights)
    check_values(tmp_path, 1)


def test_an_interrupted_helper_leaves_nothing_uncopied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, interrupted = staging._copy, threading.Event()

    def interrupt(*part: Any) -> None:
        if threading.current_thread().name == "megatfm-save":
            assert interrupted.wait(30)
        elif not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        copy(*part)

    monkeypatch.setattr(staging, "CHUNK_BYTES", 40)
    monkeypatch.setattr(staging, "_copy", interrupt)
    with Saver(tmp_path) as saving:
        saving.save(1, make_halves(1), {}, wait_for_staging=False)
        with pytest.raises(KeyboardInterrupt):
            saving.wait_for_staging()
        saving.wait_for_save()
    check_values(tmp_path, 1)


def test_the_copy_is_one_buffer_used_again(tmp_path: Path) -> None:
    with Saver(tmp_path) as saving:
        saving.save(1, make_tensors(1), {})
        address, size = saving._staging._buffer.data_ptr(), len(saving._staging._buffer)
        for step in (2, 3):
            saving.save(step, make_tensors(step), {})
            assert saving._staging._buffer.data_ptr() == address
    assert size <= sum(ShardedTensor.from_tensor(tensor).tensor.nbytes + 64 for tensor in make_tensors(1).values())
    for step in list_steps(tmp_path):
        check_values(tmp_path, step)


def test_a_save_waits_for_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    release = threading.Event()
    with delay_writes(release), Saver(tmp_path) as saving:
        saving.save(1, make_tensors(1), {})
        threading.Timer(0.2, release.set).start()
        saving.save(2, make_tensors(2), {})
        assert release.is_set()
        assert list_steps(tmp_path)[0] == 1
    assert list_steps(tmp_path) == [1, 2]
    assert "step 2  waits for the checkpoint of step 1 to be written" in caplog.text
    assert "step 1  saved step-00000001" in caplog.text


def fill_disk(folder: Path, rank: int, mode: Any) -> tuple[str, list[str]]:
    """Fail the second save on one rank; returns its outcome, and the checkpoints after a third save."""
    genuine = os.write

    def refuse(*args: Any) -> int:
        if dist.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return genuine(*args)

    with Saver(folder, mode=mode) as saving:
        saving.save(1, make_tensors(1), {})
        saving.wait_for_save()
        os.write = refuse
        try:
            saving.save(2, make_tensors(2), {})
            saving.wait_for_save()
            output = "saved"
        except MegatfmError as error:
            output = str(error)
        finally:
            os.write = genuine
        saving.save(3, make_tensors(3), {})
    return output, [path.name for path in list_checkpoints(folder)]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_failure_in_the_background_is_raised_on_all_ranks(workers: Workers, tmp_path: Path, mode: str) -> None:
    (output, saved), (second_output, _) = workers.run(fill_disk, 2, tmp_path, 1, mode)
    assert output == second_output
    named = rf"rank 1 on {HOST}: can't write .*/rank-00001-000\.safetensors: No space left on device"
    assert re.fullmatch(f"checkpoint of step 2 not saved: {named}", output)
    assert saved == ["step-00000001", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == saved


def save_changed_boxes_on_one_rank(folder: Path) -> None:
    with Saver(folder) as saving:
        for step in (1, 2):
            weights = make_tensors(step)
            if step == 2 and dist.get_rank() == 1:
                weights["more"] = torch.full((2,), step)
            saving.save(step, weights, {})


def test_boxes_that_change_on_one_rank_are_shared_out_anew(workers: Workers, tmp_path: Path) -> None:
    workers.run(save_changed_boxes_on_one_rank, 2, tmp_path)
    assert "more" not in read_tensors(tmp_path / "step-00000001")
    assert "more" in check_values(tmp_path, 2)


def train_while_saving(folder: Path) -> list[float]:
    """Collectives of the default group, in another order in time on each rank than those of the save."""
    release, totals = threading.Event(), []
    with delay_writes(release), Saver(folder) as saving:
        for step in (1, 2, 3):
            saving.save(step, make_tensors(step), {})
            if dist.get_rank() == step % 2:
                release.set()
            for _ in range(30):
                total = torch.tensor([float(dist.get_rank() + step)])
                dist.all_reduce(total)
                totals.append(float(total))
            release.set()
            saving.wait_for_save()
            release.clear()
    return totals


def test_a_save_does_not_mix_with_training_s_collectives(workers: Workers, tmp_path: Path) -> None:
    expected = [1.0 + 2 * step for step in (1, 2, 3) for _ in range(30)]
    assert workers.run(train_while_saving, 2, tmp_path) == [expected] * 2
    assert list_steps(tmp_path) == [1, 2, 3]


def test_an_error_elsewhere_lets_a_running_save_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save_and_fail(saving: Saver, step: int) -> None:
        with saving:
            saving.save(step, make_tensors(step), {})
            raise ZeroDivisionError

    def refuse(*_: object, **__: object) -> Path:
        raise MegatfmError("checkpoint of step 2 not saved: No space left on device")

    with pytest.raises(ZeroDivisionError):
        save_and_fail(Saver(tmp_path), 1)
    assert list_steps(tmp_path) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_checkpoint", refuse)
        with pytest.raises(ZeroDivisionError):
            save_and_fail(Saver(tmp_path), 2)
    assert caplog.messages[-1] == "checkpoint of step 2 not saved: No space left on device"
    monkeypatch.setattr(saver, "ABORT_WAIT_SECONDS", 0.05)
    release = threading.Event()
    with delay_writes(release):
        saving = Saver(tmp_path)
        with pytest.raises(ZeroDivisionError):
            save_and_fail(saving, 2)
        assert "the checkpoint of step 2 was abandoned" in caplog.text
        thread = saving._thread
        release.set()
        assert thread is not None
        thread.join()


def test_flipped_bits_of_a_disk_are_found_by_reading_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Saver(tmp_path, verify_after_write=True, keep=1) as saving:
        saving.save(1, make_tensors(1), {})
        assert saving.wait_for_save() == saving.verified
        with monkeypatch.context() as patch:
            write = os.write
            patch.setattr(os, "write", lambda fd, data: write(fd, bytes([data[0] ^ 1]) + bytes(data[1:])))
            saving.save(2, make_tensors(2), {})
            named = r"step 2 not saved: cannot|step 2 not saved: .*rank-00000-000\.safetensors is damaged"
            with pytest.raises(MegatfmError, match=named):
                saving.wait_for_save()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_last_verified_one_and_every_nth_are_kept(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=1, keep_every=4) as saving:
        for step in range(1, 7):
            saving.save(step, make_tensors(step), {})
            saving.wait_for_save()
            if step == 3:
                saving.verified = tmp_path / "step-00000003"
        assert list_steps(tmp_path) == [3, 4, 6]
    with Saver(tmp_path, keep=2, verify_after_write=True) as saving:
        for step in (7, 8):
            saving.save(step, make_tensors(step), {})
            saving.wait_for_save()
    assert list_steps(tmp_path) == [7, 8]


def test_a_copy_without_memory_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise MemoryError

    with Saver(tmp_path) as saving:
        monkeypatch.setattr("megatfm.checkpoint.staging.np.empty", refuse)
        saving.save(1, make_tensors(1), {})
        with pytest.raises(MegatfmError, match=r"step 1 not saved: .*set checkpoint\.mode = \"sync\""):
            saving.wait_for_save()
    assert not tmp_path.joinpath("step-00000001").exists()


def test_an_error_in_listing_old_checkpoints_does_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MegatfmError("can't list checkpoints: Input/output error")

    caplog.set_level(logging.WARNING, "megatfm")  # whatever level a test before it has set
    monkeypatch.setattr(saver, "purge_old_checkpoints", fail)
    with Saver(tmp_path, keep=1) as saver_of_one:
        saver_of_one.save(3, make_tensors(3), {})
    saver.save(tmp_path, 4, make_tensors(4), {}, keep=1)
    assert list_steps(tmp_path) == [3, 4]
    assert caplog.messages == ["old checkpoints could not be removed: can't list checkpoints: Input/output error"] * 2
