"""What the watch sees of a main thread: a rank that waits for its device waits, too."""

import os
import sys
import threading
import time
from functools import partial
from types import FunctionType, SimpleNamespace

import pytest

from megatfm.train.watching.watch import _where


def waits(value: SimpleNamespace) -> None:
    value.item()


def works(value: SimpleNamespace) -> None:
    value.read()


@pytest.mark.parametrize(("run", "waiting"), [(waits, True), (works, False)])
def test_who_asks_for_a_number_of_the_device_waits(run: FunctionType, waiting: bool) -> None:
    ours, theirs = os.pipe()
    blocking = partial(os.read, ours, 1)  # as a tensor's method: no frame of Python's
    thread = threading.Thread(target=run, args=[SimpleNamespace(item=blocking, read=blocking)])
    thread.start()
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame and frame.f_code is run.__code__ and frame.f_lineno > frame.f_code.co_firstlineno:
            break
        time.sleep(0.001)
    seen = _where(frame)
    os.write(theirs, b"!")
    thread.join()
    assert seen == (waiting, "")


def test_a_thread_between_two_lines_is_no_trouble() -> None:
    """Python says None for its line then (seen in 3.11); the watch must live on."""
    code = SimpleNamespace(co_filename=__file__, co_name="run")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_globals={"__name__": "megatfm.run"}, f_back=None)
    assert _where(frame) == (False, "megatfm/run.py:?, in run")  # type: ignore[arg-type]
