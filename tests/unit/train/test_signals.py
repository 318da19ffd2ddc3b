"""Signals that ask to stop: remembered, agreed on by all ranks, and given back."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from megatfm.train.signals import INTERRUPTED, STOP_SIGNALS, StopSignals
from tests.support.workers import Workers

CPU = torch.device("cpu")


def one_rank_is_asked(who: int, number: int) -> list[tuple[str | None, bool]]:
    before = [signal.getsignal(name) for name in STOP_SIGNALS]
    with StopSignals(CPU) as signals:
        answers = [signals.agree(busy=dist.get_rank() != who)]
        if dist.get_rank() == who:
            os.kill(os.getpid(), number)
        answers += [signals.agree(), signals.agree()]
    assert [signal.getsignal(name) for name in STOP_SIGNALS] == before
    return answers


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_all_ranks_agree_when_one_gets_the_signal(workers: Workers, name: signal.Signals) -> None:
    assert (
        workers.run(one_rank_is_asked, 2, 1, name)
        == [[(None, True), (name.name, False), (name.name, False)]] * 2
    )


def agreed_a_step_later(number: int) -> list[tuple[str | None, bool]]:
    with StopSignals(CPU) as signals:
        answers = [signals.agree_deferred(busy=dist.get_rank() == 2)]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        answers += [signals.agree_deferred() for _ in range(3)]
    return answers


def test_what_was_agreed_a_step_before_is_the_same_on_all_ranks(workers: Workers) -> None:
    """As on a GPU, where the host waits for nothing newer; before the first, all count as busy."""
    expected = [(None, True), (None, True), ("SIGTERM", False), ("SIGTERM", False)]
    assert workers.run(agreed_a_step_later, 3, signal.SIGTERM) == [expected] * 3


def different_signals() -> str | None:
    with StopSignals(CPU) as signals:
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1)[dist.get_rank()])
        return signals.agree()[0]


def test_ranks_that_got_different_ones_name_the_same(workers: Workers) -> None:
    (name,) = set(workers.run(different_signals, 2))
    assert name in {"SIGTERM", "SIGUSR1"}


def test_only_a_second_interrupt_interrupts() -> None:
    with StopSignals(CPU):
        for first in (*STOP_SIGNALS, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


STUCK = """
import ctypes
import torch
from megatfm.train import signals
signals.GRACE_SECONDS = 0.2
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with signals.StopSignals(torch.device("cpu")):
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # in C, which no signal interrupts, as in a collective
"""


def test_a_second_interrupt_ends_a_main_thread_that_is_stuck_in_c() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == INTERRUPTED
    finally:
        process.kill()
        output = process.communicate()[1].decode()
    assert output == "error: interrupted while stuck, so nothing is saved\n"


def fail_inside() -> None:
    with StopSignals(CPU):
        raise ZeroDivisionError


def test_handlers_are_given_back_after_an_error() -> None:
    before = [signal.getsignal(name) for name in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [signal.getsignal(name) for name in STOP_SIGNALS] == before


def test_outside_the_main_thread_a_run_goes_without_signals_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`megatfm.fit` in a thread of a notebook or a service."""
    before = [signal.getsignal(name) for name in STOP_SIGNALS]
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with StopSignals(CPU):
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not failed
    assert "doesn't run in the main thread" in caplog.text
    assert [signal.getsignal(name) for name in STOP_SIGNALS] == before
