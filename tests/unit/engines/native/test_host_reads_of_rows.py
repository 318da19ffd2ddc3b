"""How often the host waits for the device where rows are cut over ranks: it plans what is sent by values of a batch,
of which it has its own copies. On a CPU all tensors are the host's, so some are said to lie on a device."""

import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatfm.config import ParallelConfig
from megatfm.engines import base
from megatfm.layers import sequence
from megatfm.layers.attention.patterns import bigbird
from megatfm.ops import transfer
from megatfm.ops.deferred_reads import DeferredReads
from tests.support.context_parity import context_case, context_microbatches
from tests.support.host_reads import BLOCKING_METHODS, HostWaits
from tests.support.models import ADAMW
from tests.support.parity import build_engine, model_gradient_errors
from tests.support.workers import Workers


class Device(HostWaits):
    """What was moved to a device, and what operators make of it, lies there; only reads of that are noted.

    What they make of nothing that lies there counts as the host's (`torch.arange`, though on a device it would not be).
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory: dict[int, Tensor] = {}
        """By address; held, so that nothing else comes to lie there."""
        self.put(there)
        self.moves = True

    def put(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if isinstance(x, Tensor) and x.numel():
                self._memory[x.untyped_storage().data_ptr()] = x

    def holds(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._memory

    def moved(self, values: Tensor, device: torch.device) -> Tensor:
        """In the place of `moved`."""
        if not self.moves or not values.numel() or self.holds(values):
            return values
        there = values.clone()
        self.put([there])
        return transfer.remember_host_copy(there, values)

    def here(self, *inputs: Any) -> dict[str, Tensor]:
        """In the place of `here`: what comes before the move is the host's."""
        self.moves = False
        batch = HERE(*inputs)
        self.moves = True
        return {name: self.moved(values, values.device) for name, values in batch.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = any(self.holds(x) for x in tree_leaves((args, kwargs)))
        result = (
            super().__torch_dispatch__(func, types, args, kwargs) if there else func(*args, **(kwargs or {}))
        )
        if there:
            self.put(tree_leaves(result))
        return result


HERE, MOVED, READ = base.local_batch, transfer.moved, DeferredReads.read


def waits_of_rows(name: str, parallel: ParallelConfig, known: bool) -> list[str]:
    """What waits in the passes of two micro-batches, beside the one read of the losses. known: the host has copies."""
    config, batch, model, objective, loss = context_case(name)
    engine = build_engine(config, parallel, ADAMW)
    engine.forward_backward(context_microbatches(engine, batch), objective)  # makes what is made once
    engine.zero_grad()
    requested: list[str] = []
    device = Device([*engine.model.parameters(), *engine.model.buffers()])

    def noted(name: str) -> Any:
        method = getattr(Tensor, name)
        return lambda self, *inputs: (device.holds(self) and requested.append(name), method(self, *inputs))[1]

    with pytest.MonkeyPatch.context() as patch, device:
        for method in BLOCKING_METHODS:
            patch.setattr(Tensor, method, noted(method))
        for module in [*sys.modules.values()]:
            if (
                getattr(module, "moved", None) is MOVED and module is not bigbird
            ):  # it moves to where the queries are
                patch.setattr(module, "moved", device.moved)
        for module in (transfer, sequence):
            patch.setattr(module, "is_on_host", lambda x: not device.holds(x))
        patch.setattr(base, "local_batch", device.here)
        if not known:
            patch.setattr(transfer, "remember_host_copy", lambda there, _: there)
        sums = engine.forward_backward(context_microbatches(engine, batch), objective)
        actual = [*device.found, *requested]
    assert sums.loss == pytest.approx(loss, rel=1e-12)
    assert model_gradient_errors(engine, model) == {}
    return actual


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama", ParallelConfig(cp=2, cp_method="ring")),
        ("llama", ParallelConfig(cp=2, cp_method="ulysses")),
        ("prefix language model", ParallelConfig(cp=2, cp_method="ring")),
        ("window, prefixes", ParallelConfig(cp=2)),
        ("patterns of decoders", ParallelConfig(cp=2)),
        ("patterns of encoders", ParallelConfig(cp=2)),
        ("patterns of encoders, rows of 11 tokens", ParallelConfig(cp=2)),
    ],
)
def test_the_host_waits_for_nothing_that_it_knows(
    workers: Workers, name: str, parallel: ParallelConfig
) -> None:
    assert workers.run(waits_of_rows, 2, name, parallel, True) == [[], []]


def test_without_copies_of_its_own_the_host_reads(workers: Workers) -> None:
    assert all(workers.run(waits_of_rows, 2, "window", ParallelConfig(cp=2), False))
