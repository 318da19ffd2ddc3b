"""Signals that ask to stop: remembered, agreed on by all ranks, and given back."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megatfm.train.signals import ASK_TO_STOP, StopSignals
from tests.workers import Workers

CPU = torch.device("cpu")


def one_rank_is_asked(who: int, number: int) -> list[str | None]:
    before = [signal.getsignal(name) for name in ASK_TO_STOP]
    with StopSignals(CPU) as signals:
        answers = [signals.agreed()]
        if dist.get_rank() == who:
            os.kill(os.getpid(), number)
        answers += [signals.agreed(), signals.agreed()]
    assert [signal.getsignal(name) for name in ASK_TO_STOP] == before
    return answers


@pytest.mark.parametrize("name", ASK_TO_STOP)
def test_all_ranks_agree_when_one_gets_the_signal(workers: Workers, name: signal.Signals) -> None:
    assert workers.run(one_rank_is_asked, 2, 1, name) == [[None, name.name, name.name]] * 2


def different_signals() -> str | None:
    with StopSignals(CPU) as signals:
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1)[dist.get_rank()])
        return signals.agreed()


def test_ranks_that_got_different_ones_name_the_same(workers: Workers) -> None:
    (name,) = set(workers.run(different_signals, 2))
    assert name in {"SIGTERM", "SIGUSR1"}


def test_only_a_second_interrupt_interrupts() -> None:
    with StopSignals(CPU):
        for first in ASK_TO_STOP:
            signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def fail_inside() -> None:
    with StopSignals(CPU):
        raise ZeroDivisionError


def test_handlers_are_given_back_after_an_error() -> None:
    before = [signal.getsignal(name) for name in ASK_TO_STOP]
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [signal.getsignal(name) for name in ASK_TO_STOP] == before
