"""What the watch sees of a main thread: a rank that waits for its device waits, too."""

import os
import sys
import threading
import time
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatfm.parallel.distributed import ProcessInfo
from megatfm.train.rank_monitor_client import RankMonitor, _describe_thread, is_peer_loss


def waits(value: SimpleNamespace) -> None:
    value.item()


def works(value: SimpleNamespace) -> None:
    value.read()


@pytest.mark.parametrize(("run", "waiting"), [(waits, True), (works, False)])
def test_who_asks_for_a_number_of_the_device_waits(run: FunctionType, waiting: bool) -> None:
    actual, expected = os.pipe()
    blocking = partial(os.read, actual, 1)  # as a tensor's method: no frame of Python's
    thread = threading.Thread(target=run, args=[SimpleNamespace(item=blocking, read=blocking)])
    thread.start()
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame and frame.f_code is run.__code__ and frame.f_lineno > frame.f_code.co_firstlineno:
            break
        time.sleep(0.001)
    seen = _describe_thread(frame)
    os.write(expected, b"!")
    thread.join()
    assert seen == (waiting, "")


def test_a_thread_between_two_lines_is_no_trouble() -> None:
    """Python says None for its line then (seen in 3.11); the watch must live on."""
    code = SimpleNamespace(co_filename=__file__, co_name="run")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_globals={"__name__": "megatfm.run"}, f_back=None)
    assert _describe_thread(frame) == (False, "megatfm/run.py:?, in run")  # type: ignore[arg-type]


def chained(error: BaseException) -> BaseException:
    above = ValueError("a plugin's, on the way up")
    above.__cause__ = error
    return above


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer"
            ),
            True,
        ),
        (
            RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv"),
            True,
        ),
        (dist.DistNetworkError("recvValue failed"), True),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:1, remote process exited or there was a network error"
            ),
            True,
        ),
        (dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.27"), False),
        (dist.DistBackendError("NCCL error in: x.cpp:1, unhandled system error"), False),
        (RuntimeError("Connection refused by http://metrics.example"), False),
        (RuntimeError("Timed out: the tokenizer service"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
    ids=range(9),
)
def test_whose_failure_an_error_is(error: BaseException, lost: bool) -> None:
    assert is_peer_loss(error) is lost
    assert is_peer_loss(chained(error)) is lost


def test_what_gets_done_between_ticks_is_a_sign_of_life() -> None:
    watch = RankMonitor(ProcessInfo(0, 1, 0, "none", torch.device("cpu")), 60.0)
    done = 0
    watch.progress = lambda: done
    watch._last_progress = 0.0
    assert watch._heartbeat(50.0).age == 50.0
    done = 1
    assert watch._heartbeat(55.0).age == 0.0
    assert watch._heartbeat(58.0).age == 3.0
