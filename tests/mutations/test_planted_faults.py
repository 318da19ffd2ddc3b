"""The comparison of layouts finds what it is there to find: each fault planted here must turn it red.

A fault is put in on every rank while one comparison runs. The forward pass of most of them is right, so that only
gradients tell.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines import base
from megatfm.engines.losses import LossAccumulator
from megatfm.engines.native.engine import NativeEngine
from megatfm.models import build
from megatfm.ops.cross_entropy import _ChunkedCrossEntropy
from megatfm.parallel import collectives, styles
from megatfm.parallel.layout import Region, TensorLayout
from megatfm.parallel.mesh import Mesh
from tests.support import parity
from tests.support.batches import CAUSAL, global_batch
from tests.support.layouts import DATA_AND_TENSOR_LAYOUTS, RANKS_OF_LAYOUT
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    EVERYTHING,
    build_engine,
    gradient_errors,
    microbatches,
    one_device,
    one_device_gradients,
)
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch

NORMS = {"decoder.norm.weight", "*.layers.*_residual.norm.weight"}


def forget_partial_gradients(patch: Patch) -> None:
    patch.setattr(base, "all_reduce_partial_gradients", lambda *_: None)


def sum_what_is_whole_already(patch: Patch) -> None:
    real = Mesh.all_reduce_
    summed = NativeEngine.forward_backward

    def forward_backward(self: NativeEngine, *args: Any) -> Any:
        stats = summed(self, *args)
        for name, gradient in self.gradients().items():
            if not self.layout[name].shards:
                real(self.mesh, gradient, ("tp",))
        return stats

    patch.setattr(NativeEngine, "forward_backward", forward_backward)


def scatter_sum_keeps_its_shard(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return torch.cat([gradient] * dist.get_world_size(ctx.group), ctx.dim), None, None

    patch.setattr(collectives._ReduceScatter, "backward", staticmethod(backward))


def gather_shards_takes_its_own(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None

    patch.setattr(collectives._AllGather, "backward", staticmethod(backward))


def copy_to_shards_forgets_its_sum(patch: Patch) -> None:
    patch.setattr(collectives._CopyToGroup, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def sum_partial_sums_twice(patch: Patch) -> None:
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return collectives.all_reduce_no_grad(x, group)

    patch.setattr(collectives._ReduceFromGroup, "forward", staticmethod(forward))
    patch.setattr(
        collectives._ReduceFromGroup,
        "backward",
        staticmethod(lambda ctx, g: (collectives.all_reduce_no_grad(g, ctx.group), None)),
    )


def count_only_own_targets(patch: Patch) -> None:
    real = LossAccumulator.count

    def count(self: LossAccumulator, batches: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Mesh, "all_reduce_", lambda *_: None)
            real(self, batches)

    patch.setattr(LossAccumulator, "count", count)


def count_one_replica(patch: Patch) -> None:
    real = Mesh.all_reduce_
    patch.setattr(Mesh, "all_reduce_", lambda self, t, axes: real(self, t, [a for a in axes if a != "dp_replicate"]))


def average_over_ranks(patch: Patch) -> None:
    real = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: real(self, 2.0))


def take_the_other_rank_s_kv_heads(patch: Patch) -> None:
    real = TensorLayout.region.fget
    assert real is not None

    def region(self: TensorLayout) -> Region:
        if not self.shards or ".wk." not in self.name:
            return real(self)
        offsets, sizes = real(self)
        return ((offsets[0] + sizes[0]) % self.shape[0], *offsets[1:]), sizes

    patch.setattr(TensorLayout, "region", property(region))


def forget_the_tie_s_second_use(patch: Patch) -> None:
    real = _ChunkedCrossEntropy.backward

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, _, *remaining = real(ctx, gradient)
        return hidden, None, *remaining

    patch.setattr(_ChunkedCrossEntropy, "backward", staticmethod(backward))


def keep_all_tokens_of_an_embedding_shard(patch: Patch) -> None:
    def embed(tokens: Tensor, weight_WD: Tensor, first: int) -> Tensor:
        return nn.functional.embedding(tokens % weight_WD.shape[0], weight_WD)

    patch.setattr(styles, "vocab_parallel_embedding", embed)


def normalise_over_own_tokens(patch: Patch) -> None:
    patch.setattr(styles, "all_gather_no_grad", lambda x, group: x[None])


FAULTS: dict[Callable[[Patch], None], tuple[str, ModelConfig, set[str]]] = {
    forget_partial_gradients: ("tp2", UNTIED_MODEL, NORMS),
    sum_what_is_whole_already: ("tp2 without sequence parallel", UNTIED_MODEL, NORMS),
    scatter_sum_keeps_its_shard: ("tp2", UNTIED_MODEL, {"*.embedding.tokens.weight", "*.layers.*"}),
    gather_shards_takes_its_own: (
        "tp2", UNTIED_MODEL, {"*.embedding.tokens.weight", "*.layers.*", "decoder.norm.weight"},
    ),
    copy_to_shards_forgets_its_sum: (
        "tp2 without sequence parallel", UNTIED_MODEL,
        {"*.embedding.tokens.weight", "*.layers.*", "decoder.norm.weight"},
    ),
    sum_partial_sums_twice: (
        "tp2 without sequence parallel", UNTIED_MODEL, {"*.embedding.tokens.weight", "*.layers.*"},
    ),
    count_only_own_targets: ("zero3 on 2", UNTIED_MODEL, EVERYTHING),
    count_one_replica: ("replicas on 2", UNTIED_MODEL, EVERYTHING),
    average_over_ranks: ("zero3 on 2", UNTIED_MODEL, EVERYTHING),
    take_the_other_rank_s_kv_heads: ("tp2", UNTIED_MODEL, EVERYTHING),
    forget_the_tie_s_second_use: ("tp2", TIED_MODEL, {"decoder.embedding.tokens.weight"}),
    keep_all_tokens_of_an_embedding_shard: ("tp2", UNTIED_MODEL, EVERYTHING),
    normalise_over_own_tokens: ("tp2", UNTIED_MODEL, EVERYTHING),
}  # fmt: skip
"""Fault → the layout and model that show it, and the parameters whose gradients must be found wrong."""


def wrong_gradients(fault: str | None, config: ModelConfig, parallel: ParallelConfig) -> set[str]:
    """The comparison of tests/parity/test_layouts.py, with a fault in the code."""
    batch = global_batch(seed=3)
    _, expected = one_device_gradients(one_device(config), batch)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            globals()[fault](patch)
        engine = build_engine(config, parallel, ADAMW)
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
        return set(gradient_errors(engine, expected))


def find(workers: Workers, fault: str | None, config: ModelConfig, layout: str) -> set[str]:
    ranks = RANKS_OF_LAYOUT.get(layout, 2)
    return set().union(*workers.run(wrong_gradients, ranks, fault, config, DATA_AND_TENSOR_LAYOUTS[layout]))


def parameters(config: ModelConfig, patterns: set[str]) -> set[str]:
    with torch.device("meta"):
        names = [name for name, _ in build(config).named_parameters()]
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    layout, config, patterns = FAULTS[fault]
    assert find(workers, fault.__name__, config, layout) == parameters(config, patterns)


def test_without_a_fault_nothing_is_found(workers: Workers) -> None:
    """In the same processes, so that no fault has stayed behind."""
    assert find(workers, None, UNTIED_MODEL, "tp2") == find(workers, None, TIED_MODEL, "zero3 on 2") == set()


def break_the_tie(patch: Patch) -> None:
    real = parity.parallelize

    def lay(model: Any, *args: Any, **options: Any) -> Any:
        layout = real(model, *args, **options)
        model.head.weight = nn.Parameter(torch.empty_like(model.head.weight))
        return layout

    patch.setattr(parity, "parallelize", lay)


def test_a_tie_that_is_cut_twice_is_no_tie(workers: Workers) -> None:
    """Loud: the head's own weight is a parameter that the layout table does not have."""
    with pytest.raises(Exception, match=r"KeyError: 'head.weight'"):
        find(workers, "break_the_tie", TIED_MODEL, "tp2")
