"""A save from a GPU copies beside what is trained, and the next update waits for the copy: on streams that stand in for
CUDA's, each a thread that carries out what it is asked for, in order."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatfm.checkpoint import Saver, file_format, read_tensors, staging
from megatfm.checkpoint.staging import Staging

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""
SOON = 30.0
A_WHILE = 0.1


class Stream:
    """Carries out what it is asked for, later, and in order."""

    def __init__(self, device: object = None) -> None:
        self._asked: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._asked.get()()

    def ask(self, task: Callable[[], object]) -> None:
        self._asked.put(task)

    def wait_event(self, event: "Event") -> None:
        self.ask(lambda: event.reached.wait(SOON))

    def finish(self) -> None:
        reached = threading.Event()
        self.ask(reached.set)
        assert reached.wait(SOON)


class Event:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.ask(self.reached.set)

    def synchronize(self) -> None:
        assert self.reached.wait(SOON)


class Later(TorchFunctionMode):
    """Changes of tensors are asked of a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, Tensor.add_):
            self.stream.ask(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeCuda:
    """The part of torch.cuda that is used. made: every stream but training's.

    As in CUDA's runtime, each thread has a current device, and a last error, which the next kernel launch raises.
    """

    def __init__(self) -> None:
        self.training, self.made = Stream(), list[Stream]()
        self.registered: list[int] = []
        self.registration_devices: list[object] = []
        self.can_pin = True
        self.Event = Event
        self._thread = threading.local()

    def Stream(self, device: object) -> Stream:
        self.made.append(Stream())
        return self.made[-1]

    def current_stream(self, device: object) -> Stream:
        return self.training

    def stream(self, stream: Stream) -> Later:
        assert not getattr(self._thread, "last_error", 0), "a launch raises the error of an earlier call"
        return Later(stream)

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        self._thread.device = device
        yield
        self._thread.device = 0

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registration_devices.append(getattr(self._thread, "device", 0))
        if not self.can_pin:
            self._thread.last_error = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        self.registered.append(size)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.pop()


@contextmanager
def on_a_gpu(saver: Saver, names: set[int]) -> Iterator[FakeCuda]:
    """Tensors with this storage are taken for a GPU's."""
    cuda = FakeCuda()
    saver._staging = Staging(cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "is_cuda", lambda x: x.untyped_storage().data_ptr() in names)
        yield cuda


def test_an_update_waits_for_the_copy_and_the_host_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, turned, local = torch.zeros(4, 3), torch.zeros(3, 5).T, torch.zeros(2)
    on_device = {x.untyped_storage().data_ptr() for x in (moved, turned)}
    trains, copies, wrote = threading.Event(), threading.Event(), threading.Event()
    write = file_format.write_safetensors

    def noted(*args: Any) -> Any:
        wrote.set()
        return write(*args)

    monkeypatch.setattr(file_format, "write_safetensors", noted)
    with Saver(tmp_path) as saver, on_a_gpu(saver, on_device) as cuda:
        for step in (1, 2, 3):  # the second finds a stream and memory from the first
            for event in (trains, copies, wrote):
                event.clear()
            if cuda.made:
                cuda.made[0].ask(lambda: copies.wait(SOON))
            cuda.training.ask(lambda: trains.wait(SOON))  # the host is far ahead of the device
            with cuda.stream(cuda.training):
                moved.add_(1)
                turned.add_(1)
            local.add_(1)
            saver.save(step, {"moved": moved, "turned": turned, "here": local}, {}, wait_for_staging=False)
            saver.wait_for_staging()
            with cuda.stream(cuda.training):  # the next update
                moved.add_(100)
                turned.add_(100)
            local.add_(100)
            assert float(moved.sum()) == 101 * 12 * (step - 1), "nothing of this step was done yet"
            assert not wrote.wait(A_WHILE), "what writes waits for the copies"
            trains.set()
            if step > 1:  # the step is done, and its copies are held up
                assert not wrote.wait(A_WHILE)
                assert float(local[0]) == 101 * step
            copies.set()
            saver.wait_for_save()
            cuda.training.finish()
            assert bool((moved == 101 * step).all()), "the update came, too"
            for name, read in read_tensors(tmp_path / f"step-{step:08}").items():
                assert bool((read == 101 * step - 100).all()), name
        assert len(cuda.made) == len(cuda.registered) == 1
        assert cuda.registration_devices == [moved.device]
    saver._staging._release()
    assert cuda.registered == []


def test_tensors_of_the_host_need_no_stream(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver, on_a_gpu(saver, set()) as cuda:
        saver.save(1, {"here": torch.ones(2)}, {})
        saver.wait_for_save()
    assert cuda.made == cuda.registered == []


def test_memory_that_cannot_be_pinned_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the copies are made all the same: no launch raises the error of the failed registration."""
    moved = torch.ones(4)
    with Saver(tmp_path) as saver, on_a_gpu(saver, {moved.untyped_storage().data_ptr()}) as cuda:
        cuda.can_pin = False
        saver.save(1, {"moved": moved}, {})
        saver.wait_for_save()
    assert "staging copies of checkpoints will be slower" in caplog.text
    assert bool((read_tensors(tmp_path / "step-00000001")["moved"] == 1).all())
