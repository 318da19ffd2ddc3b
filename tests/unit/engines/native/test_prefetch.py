"""ZeRO 3 asks for a block's weights before the blocks ahead of it run, and lets a group allocate what it sends."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from megatfm.config import ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.zero import ZeroOptions
from megatfm.parallel.layout import transformer_blocks
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

LAYERS = 5
DEEP = UNTIED_MODEL.with_changes({"n_layers": LAYERS})


def order(prefetch: int, recomputed: str) -> tuple[list[str], dict[str, Tensor], float]:
    """What a micro-batch asks for and runs, in order: g2 gathers block 2, f2 runs it forward, b2 backward; the step's
    gradients, and an evaluation after it."""
    parallel = ParallelConfig(dp_shard=2, fsdp_prefetch=prefetch, grad_accumulation="sharded")
    engine = build_engine(DEEP, parallel, ADAMW, recomputed=recomputed)
    actual: list[str] = []
    gather = _fsdp_param_group.foreach_all_gather

    def noted(params: Any, *remaining: Any) -> Any:
        module = params[0]._module_info.module
        actual.extend(
            f"g{n}" for n, block in enumerate(transformer_blocks(engine.model)) if module in block.modules()
        )
        return gather(params, *remaining)

    def runs(what: str) -> Any:
        return lambda *_: actual.append(what)

    for n, block in enumerate(transformer_blocks(engine.model)):
        block.register_forward_pre_hook(runs(f"f{n}"))
        # Of a part of it, as nothing says which comes first of several hooks that wait for one gradient.
        block.get_submodule("ffn").register_full_backward_pre_hook(runs(f"b{n}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", noted)
        engine.forward_backward(microbatches(engine, global_batch(seed=4))[:1], CAUSAL)
    output = list(actual)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    engine.step(1e-2, clip=1.0)
    return output, gradients, engine.evaluate(microbatches(engine, global_batch(seed=9)), CAUSAL).loss


def both_ways(ahead: int, by_itself: int) -> Iterator[str]:
    """The order that is wanted: all that lies up to so many blocks ahead is asked for when a block's turn has come."""
    for word, way in (("f", range(LAYERS)), ("b", range(LAYERS)[::-1])):
        requested = 0
        for place, block in enumerate(way):
            to = max(min(place + 1 + (by_itself if word == "b" else ahead), LAYERS), requested)
            yield from (f"g{way[n]}" for n in range(requested, to))
            requested = to
            yield f"{word}{block}"


def compare(recomputed: str) -> None:
    expected: tuple[dict[str, Tensor], float] | None = None
    assert ParallelConfig().fsdp_prefetch is None
    assert [ZeroOptions().prefetch_depth(device) for device in ("cpu", "cuda")] == [0, 1]
    for ahead in (0, 1, 2):
        actual, gradients, evaluated = order(ahead, recomputed)
        assert actual == list(both_ways(ahead, max(ahead, 1))), (ahead, actual)
        expected = expected or (gradients, evaluated)
        assert evaluated == expected[1]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[0][name]), (ahead, name)


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_blocks_are_asked_for_ahead_of_their_turn(workers: Workers, recomputed: str) -> None:
    workers.run(compare, 2, recomputed)


def allocated(able: bool) -> tuple[set[str], list[str]]:
    """Kinds of what gathers and scatters, and warnings."""
    output: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: output.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatfm").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        if able:
            backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
            patch.setattr(type(backend), "supports_tensor_alloc", lambda *_: True)
            unset = lambda _, size, **kind: torch.full((size,), torch.nan, **kind)  # noqa: E731
            patch.setattr(type(backend), "allocate_tensor", unset)
        engine: NativeEngine = build_engine(
            DEEP, ParallelConfig(dp_shard=2, comm_buffers="process_group"), ADAMW
        )
        engine.forward_backward(microbatches(engine, global_batch(seed=4)), CAUSAL)
        assert all(gradient.isfinite().all() for gradient in engine.gradients().values())
    logging.getLogger("megatfm").removeHandler(handler)
    groups = [
        group
        for module in engine.model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    assert len(groups) == LAYERS + 1
    return {
        type(item).__name__ for g in groups for item in (g._all_gather_comm, g._reduce_scatter_comm)
    }, output


def test_a_group_allocates_what_it_sends_where_it_can(workers: Workers) -> None:
    for kinds, result in workers.run(allocated, 2, True):
        assert kinds == {
            _fsdp_collectives.ProcessGroupAllocAllGather.__name__,
            _fsdp_collectives.ProcessGroupAllocReduceScatter.__name__,
        }
        assert result == []


def test_a_group_that_cannot_says_so(workers: Workers) -> None:
    for kinds, result in workers.run(allocated, 2, False):
        assert not any("ProcessGroup" in kind for kind in kinds)
        assert result == [
            "parallel.comm_buffers = 'process_group': gloo can't allocate memory for cpu: torch allocates "
            "the buffers"
        ]
