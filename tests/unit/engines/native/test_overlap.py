"""Communication beside computation: buckets reduced in the backward pass, weights that arrive or are fetched ahead."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native import replicated
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.replicated import Replicated
from megatfm.engines.native.zero import ZeroOptions
from megatfm.layers.moe.experts import Experts
from megatfm.parallel.layout import iter_blocks
from megatfm.verify.traffic import CollectiveTraffic, TrafficCounter
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

LAYOUTS = {
    2: [
        ParallelConfig(dp_shard=2, zero=0),
        ParallelConfig(dp_shard=2, zero=1),
        ParallelConfig(dp_shard=1, dp_replicate=2, zero=1),
    ],
    4: [ParallelConfig(dp_shard=2, dp_replicate=2, zero=1)],
}
"""Ranks → layouts."""


def one_step(parallel: ParallelConfig) -> tuple[dict[str, Tensor], list[CollectiveTraffic], list[int]]:
    """Gradients, traffic, and how many buckets were on their way, and how many sums over replicas had begun, when the
    last backward pass was over."""
    engine = build_engine(TIED_MODEL, parallel, ADAMW)
    data = engine.data
    assert isinstance(data, Replicated)
    sent, sums, reduce = [0, 0], [0], data.reduce
    replicas, all_reduce = engine.mesh.group("dp_replicate"), torch.distributed.all_reduce

    def note() -> None:
        sent[:] = len(data._pending_gradients), sums[0]
        reduce()

    def count(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        sums[0] += group is replicas and bool(kwargs.get("async_op"))
        return all_reduce(*args, group=group, **kwargs)

    data.reduce = note  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch, TrafficCounter({}) as traffic:
        patch.setattr(torch.distributed, "all_reduce", count)
        engine.forward_backward(microbatches(engine, global_batch(seed=4)), CAUSAL)
    return engine.gradients(), traffic.list_traffic(), sent


def compare_overlapped(layouts: Sequence[ParallelConfig]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
        for parallel in layouts:
            early, flows, (sent, sums) = one_step(parallel)
            assert sent >= 3, "of the layers, while that of the embedding is not there yet"
            if parallel.dp_shard * parallel.dp_replicate == 4:
                assert sums == sent - 1, "of all buckets whose successor is on its way"
            with pytest.MonkeyPatch.context() as late:
                late.setattr(
                    Replicated, "start_microbatch", lambda self, is_last: self.start_pipeline_step(keep_unsharded=False)
                )
                afterwards, same_flows, none = one_step(parallel)
            assert (none, flows) == ([0, 0], same_flows)
            for name, gradient in early.items():
                assert torch.equal(gradient, afterwards[name]), (parallel, name)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_overlapping_leaves_gradients_equal_to_the_bit(workers: Workers, ranks: int) -> None:
    workers.run(compare_overlapped, ranks, LAYOUTS[ranks])


def two_backward_passes() -> None:
    engine = build_engine(TIED_MODEL, LAYOUTS[2][0], ADAMW)
    parameter = engine.model.get_parameter("decoder.norm.weight")
    engine.data.start_microbatch(is_last=True)
    for other in engine.model.parameters():
        other.square().sum().backward()
    with pytest.raises(RuntimeError, match="arrived after its bucket was reduced"):
        parameter.square().sum().backward()


def test_a_gradient_that_comes_too_late_is_not_dropped(workers: Workers) -> None:
    workers.run(two_backward_passes, 2)


def trained(engine: NativeEngine) -> list[dict[str, Tensor]]:
    """Gradients of three steps, each of which sees the weights that the one before has moved."""
    actual = []
    for step in range(3):
        engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
        actual.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
        engine.step(1e-2, clip=1.0)
    return actual


def compare_arrival() -> None:
    model, parallel = TIED_MODEL.with_changes({"n_layers": 4}), ParallelConfig(dp_shard=2, zero=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
        engine = build_engine(model, parallel, ADAMW, precision="fp32")
        data, backward_part = engine.data, []
        assert isinstance(data, Replicated)
        for block in iter_blocks(engine.model):
            block.register_forward_pre_hook(lambda *_: backward_part.append(len(data._pending_parameters)))
        arriving = trained(engine)
        # The last step's micro-batches, before each of four blocks.
        first, second = backward_part[-8:-4], backward_part[-4:]
        assert first[0] > first[1] > first[2] > first[3] == 0, first
        assert not any(second)
        assert len(data._pending_parameters) == len(data._buckets)
        evaluated = engine.evaluate(microbatches(engine, global_batch(seed=9)), CAUSAL).loss
        patch.setattr(Replicated, "_register_parameter_waits", lambda *_: None)
        arrive = Replicated._finish_parameter_sync
        changed = Replicated.sync_weights

        def at_once(self: Replicated, frozen: bool = False) -> None:
            changed(self, frozen)
            arrive(self, range(len(self._buckets)))

        patch.setattr(Replicated, "sync_weights", at_once)
        other = build_engine(model, parallel, ADAMW, precision="fp32")
        for actual_gradients, expected in zip(arriving, trained(other), strict=True):
            assert all(torch.equal(actual_gradients[name], gradient) for name, gradient in expected.items())
        assert evaluated == other.evaluate(microbatches(other, global_batch(seed=9)), CAUSAL).loss


def read_by_hand() -> None:
    """Between steps, as objectives or notebooks do: a part runs alone, or weights are read."""
    model = TIED_MODEL.with_changes({"n_layers": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
        engine = build_engine(model, ParallelConfig(dp_shard=2, zero=1), ADAMW, precision="fp32")
        data, module = engine.data, engine.model
        assert isinstance(data, Replicated)
        engine.forward_backward(microbatches(engine, global_batch(seed=1)), CAUSAL)
        engine.step(1e-2, clip=1.0)
        assert len(data._pending_parameters) == len(data._buckets) > 4
        attention = list(iter_blocks(module))[3].attn
        names = [
            name for name, p in module.named_parameters() if any(p is parameter for parameter in attention.parameters())
        ]
        with torch.no_grad():
            for part in attention.children():
                weight = getattr(part, "weight", None)
                if isinstance(weight, Tensor):
                    part(torch.zeros(1, weight.shape[1]))
        early = {name: module.get_parameter(name).clone() for name in names}
        moved = dict(engine.model.named_parameters())
        assert not data._pending_parameters
        assert names
        for name in names:
            assert torch.equal(early[name], moved[name]), name


def test_parts_that_run_alone_have_the_weights_of_the_last_step(workers: Workers) -> None:
    workers.run(read_by_hand, 2)


def test_blocks_wait_for_their_own_weights_alone(workers: Workers) -> None:
    workers.run(compare_arrival, 2)


LAYERS = 5
DEEP = UNTIED_MODEL.with_changes({"n_layers": LAYERS})


def order(
    parallel: ParallelConfig, recomputed: str, config: ModelConfig = DEEP
) -> tuple[list[str], dict[str, Tensor], float]:
    """Gathers and passes of a micro-batch, in order: g2 gathers block 2, e2 its experts, f2 runs it forward, b2
    backward; the step's gradients, and an evaluation after it."""
    engine = build_engine(config, parallel, ADAMW, recomputed=recomputed)
    actual: list[str] = []
    gather = _fsdp_param_group.foreach_all_gather

    def noted(params: Any, *remaining: Any) -> Any:
        module = params[0]._module_info.module
        kind = "e" if isinstance(module, Experts) else "g"
        actual.extend(f"{kind}{n}" for n, block in enumerate(iter_blocks(engine.model)) if module in block.modules())
        return gather(params, *remaining)

    def runs(event: str) -> Any:
        return lambda *_: actual.append(event)

    for n, block in enumerate(iter_blocks(engine.model)):
        block.register_forward_pre_hook(runs(f"f{n}"))
        # Of a part of it, as nothing says which comes first of several hooks that wait for one gradient.
        block.get_submodule("attn").register_full_backward_pre_hook(runs(f"b{n}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, "foreach_all_gather", noted)
        engine.forward_backward(microbatches(engine, global_batch(seed=4))[:1], CAUSAL)
    output = list(actual)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    engine.step(1e-2, clip=1.0)
    return output, gradients, engine.evaluate(microbatches(engine, global_batch(seed=9)), CAUSAL).loss


def list_expected_gathers(ahead: int, by_itself: int) -> Iterator[str]:
    """The order that is wanted: all that lies up to so many blocks ahead is asked for when a block's turn has come."""
    for word, way in (("f", range(LAYERS)), ("b", range(LAYERS)[::-1])):
        requested = 0
        for place, block in enumerate(way):
            to = max(min(place + 1 + (by_itself if word == "b" else ahead), LAYERS), requested)
            yield from (f"g{way[n]}" for n in range(requested, to))
            requested = to
            yield f"{word}{block}"


def compare_prefetched(recomputed: str) -> None:
    expected: tuple[dict[str, Tensor], float] | None = None
    assert ParallelConfig().fsdp_prefetch is None
    assert [ZeroOptions().get_prefetch_depth(device) for device in ("cpu", "cuda")] == [0, 1]
    for ahead in (0, 1, 2):
        parallel = ParallelConfig(dp_shard=2, fsdp_prefetch=ahead, grad_accumulation="sharded")
        actual, gradients, evaluated = order(parallel, recomputed)
        assert actual == list(list_expected_gathers(ahead, max(ahead, 1))), (ahead, actual)
        expected = expected or (gradients, evaluated)
        assert evaluated == expected[1]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[0][name]), (ahead, name)


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_blocks_are_asked_for_ahead_of_their_turn(workers: Workers, recomputed: str) -> None:
    workers.run(compare_prefetched, 2, recomputed)


EXPERTS = DEEP.with_changes({"ffn": {"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 48}})


def compare_prefetched_experts() -> None:
    """Each gather of a block brings that of its experts (e)."""
    parallel = ParallelConfig(dp_shard=4, ep=2, fsdp_prefetch=1)
    actual, *_ = order(parallel, "none", EXPERTS)
    pairs = ((event, event.replace("g", "e")) for event in list_expected_gathers(1, 1))
    assert actual == [event for pair in pairs for event in dict.fromkeys(pair)], actual


def test_experts_are_asked_for_with_their_blocks(workers: Workers) -> None:
    workers.run(compare_prefetched_experts, 4)


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
        engine: NativeEngine = build_engine(DEEP, ParallelConfig(dp_shard=2, comm_buffers="process_group"), ADAMW)
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
    return {type(item).__name__ for g in groups for item in (g._all_gather_comm, g._reduce_scatter_comm)}, output


def test_a_group_allocates_what_it_sends_where_it_can(workers: Workers) -> None:
    for kinds, result in workers.run(allocated, 2, True):
        assert kinds == {
            _fsdp_collectives.ProcessGroupAllocAllGather.__name__,
            _fsdp_collectives.ProcessGroupAllocReduceScatter.__name__,
        }
        assert result == []


def test_an_unsupported_group_is_reported(workers: Workers) -> None:
    for kinds, result in workers.run(allocated, 2, False):
        assert not any("ProcessGroup" in kind for kind in kinds)
        assert result == [
            "parallel.comm_buffers = 'process_group': gloo can't allocate memory for cpu: torch allocates the buffers"
        ]
