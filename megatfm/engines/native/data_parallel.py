"""How the data ranks share weights, gradients and optimizer state among themselves: ZeRO (Rajbhandari et al. 2020).

| Stage | Cut over dp_shard | File |
|---|---|---|
| 0 | nothing | replicated.py |
| 1 | optimizer state and the weights that it moves | replicated.py |
| 2 | + gradients | fully_sharded.py |
| 3 | + the weights that the model computes with | fully_sharded.py |

One data rank has nobody to share with, and takes stage 0 whatever was asked for. dp_replicate always replicates what
dp_shard leaves. A cut is along dim 0, in equal parts of ⌈rows / ranks⌉ but for the last ones; stages 2 and 3 cut
experts along dim 1 where their number can't be divided. A checkpoint of any stage opens in any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from megatfm.config import ParallelConfig
from megatfm.engines.passes import GradientSync
from megatfm.parallel.layout import Chunk

Stages = Sequence[nn.Module]
"""The parts of the model that this rank computes, each called by itself; their parameters have global names."""


@dataclass(frozen=True)
class ZeroOptions:
    """What a layout asks for.

    zero: the stage. accumulate: gradients of a step's micro-batches, "whole": each rank adds up whole ones, reduced
    once; "shards": they are reduced after each micro-batch, so that only shards are kept (stages 2 and 3).
    reduce_dtype: the dtype in which gradients are sent and summed over ranks; None: the stored one. prefetch: of
    stages 2 and 3, blocks whose weights are asked for before the one ahead of them runs; 0: as FSDP2 does by itself;
    None: as `ahead` says.
    use_group_allocator: what they send is allocated by the process group.
    """

    zero: Literal[0, 1, 2, 3] = 3
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    reduce_dtype: torch.dtype | None = None
    prefetch: int | None = None
    use_group_allocator: bool = False

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """As a config says."""
        reduced = torch.bfloat16 if parallel.reduce_dtype == "bf16" else None
        return cls(
            parallel.zero,
            parallel.grad_accumulation,
            reduced,
            parallel.fsdp_prefetch,
            parallel.comm_buffers == "process_group",
        )

    def prefetch_depth(self, device_type: str) -> int:
        """`prefetch` on a device. On CPUs asking early is no faster, since gathering takes the cores of what runs."""
        return int(device_type != "cpu") if self.prefetch is None else self.prefetch


class DataParallel(GradientSync, Protocol):
    """One way to share. Every method is called by all data ranks together, in the same order."""

    local: dict[str, Tensor]
    """The blocks of the weights that the optimizer moves here, in the stored precision."""
    boxes: dict[str, Chunk]
    """Where they are in the global tensors."""
    sharded: bool
    """Whether the blocks on the ranks of a parameter's shard axis are different ones, or copies."""

    def reduce(self) -> None:
        """After the last backward pass: sum gradients over the data axes, as far as it has not been done in it."""

    def gradients(self) -> dict[str, Tensor]:
        """The blocks of the gradients that go with `local`; after `reduce`, complete over the data axes."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def weights_changed(self, frozen: bool = False) -> None:
        """`local` was changed: the weights that the model computes with follow; with `frozen` those too that
        no step moves."""

    def wait_for_weights(self) -> None:
        """Have all weights in their places that the model's own modules would wait for when they run."""


def named_parameters(stages: Stages) -> Iterator[tuple[str, nn.Parameter]]:
    """Of all stages, one that is tied or shared once, under its first name."""
    seen: set[nn.Parameter] = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter
