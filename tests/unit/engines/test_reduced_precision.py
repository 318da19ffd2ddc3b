"""In bfloat16, whatever is summed of gradients over ranks travels in float32, under every stage and axis."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.config import ParallelConfig
from megatfm.engines.native import fully_sharded
from megatfm.models import build
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

LAYOUTS = {
    **{f"zero {zero}": ParallelConfig(dp_shard=2, zero=zero) for zero in range(4)},
    "replicas": ParallelConfig(dp_shard=1, dp_replicate=2, zero=1),
    "hsdp": ParallelConfig(dp_shard=1, dp_replicate=2),
    "stages": ParallelConfig(pp=2, dp_shard=1),
    "tp": ParallelConfig(tp=2, dp_shard=1),
}
SUMS = ("allreduce_", "_reduce_scatter_base_", "reduce_scatter_tensor", "all_reduce")


class Summed(TorchDispatchMode):
    """Elements of each floating dtype that ranks have summed, but for float64's few scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._schema.name.partition("::")[2] in SUMS:
            inputs = args[1] if "scatter_base" in func._schema.name else args[0]
            for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
                if tensor.is_floating_point() and tensor.dtype != torch.float64:
                    self.elements[tensor.dtype] = self.elements.get(tensor.dtype, 0) + tensor.numel()
        return func(*args, **(kwargs or {}))


def summed(layout: str) -> dict[torch.dtype, int]:
    parallel = LAYOUTS[layout]
    engine = build_engine(TIED_MODEL, parallel, ADAMW, precision="bf16")
    with Summed() as sums:
        engine.forward_backward(microbatches(engine, global_batch(seed=1)), CAUSAL)
    assert all(g.dtype == torch.float32 for g in engine.gradients().values())
    return sums.elements


def every_layout() -> None:
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in build(TIED_MODEL).named_parameters()}
    for layout in LAYOUTS:
        actual = summed(layout)
        if layout == "tp":
            # Activations and their gradients are summed as they are; norms' shares of gradients in float32.
            assert actual[torch.float32] >= sum(n for name, n in sizes.items() if "norm" in name)
        elif layout == "stages":
            assert actual == {torch.float32: TIED_MODEL.vocab_size * TIED_MODEL.d_model}, "the tied table's"
        else:
            assert actual.keys() == {torch.float32}, layout
            assert actual[torch.float32] >= sum(sizes.values()), layout


def test_gradients_are_summed_in_float32(workers: Workers) -> None:
    workers.run(every_layout, 2)


def reduced_in_bfloat16() -> set[torch.dtype]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fully_sharded, "MixedPrecisionPolicy", lambda *_: MixedPrecisionPolicy(torch.bfloat16))
        return set(summed("zero 3"))


def test_a_reduction_in_bfloat16_is_seen(workers: Workers) -> None:
    assert all(result == {torch.bfloat16} for result in workers.run(reduced_in_bfloat16, 2))
