"""How a module runs under tensor parallelism: which dim of its weights is cut, and what travels around it.

A style is laid over any module from outside. With sequence parallelism, activations between the styles are sharded
along the sequence (dim 1); without, they are replicated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.cross_entropy import LogitVariant
from megatfm.parallel.collectives import (
    copy_to_shards,
    gather_replicated,
    gather_shards,
    scatter_sum,
    sum_partial,
)
from megatfm.parallel.vocabulary import cross_entropy_shard, embed_shard

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel group that styles work in."""

    group: ProcessGroup
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Residual stream → replicated input of cut weights."""
        if self.sequence_parallel:
            return gather_shards(x, SEQUENCE_DIM, self.group)
        return copy_to_shards(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial output of cut weights → residual stream."""
        return (
            scatter_sum(x, SEQUENCE_DIM, self.group) if self.sequence_parallel else sum_partial(x, self.group)
        )


@dataclass(frozen=True)
class Style:
    """dim: the dim of the module's own parameters that is cut; None: they are whole on every rank.

    on_residual: the module works on the residual stream, so with sequence parallelism its gradients are partial.
    install: adds what travels; called only where there is more than one rank.
    """

    name: str
    dim: int | None = None
    on_residual: bool = False
    install: Callable[[nn.Module, Ranks], None] = lambda module, ranks: None


def _enter_hook(module: nn.Module, ranks: Ranks) -> None:
    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.enter(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(enter)


def _leave_hook(module: nn.Module, ranks: Ranks) -> None:
    if getattr(module, "bias", None) is not None:
        _not_cut(module, ranks)
    module.register_forward_hook(lambda _, __, output: ranks.leave(output))


def _vocabulary_embedding(module: nn.Module, ranks: Ranks) -> None:
    def embed(tokens_BT: Tensor) -> Tensor:
        return ranks.leave(embed_shard(tokens_BT, module.get_parameter("weight"), ranks.group))

    module.forward = embed


def _vocabulary_head(module: nn.Module, ranks: Ranks) -> None:
    seam = module.get_submodule("loss")
    variant: LogitVariant = seam.variant  # type: ignore[assignment]

    def loss(hidden_MD: Tensor, weight_WD: Tensor, targets_M: Tensor, bias_W: Tensor | None) -> Tensor:
        used = variant if seam.training else replace(variant, smoothing=0.0)
        return cross_entropy_shard(hidden_MD, weight_WD, targets_M, bias_W, used, ranks.group)

    def whole_logits(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        return gather_replicated(output, -1 % output.dim(), ranks.group) if output.dim() else output

    _enter_hook(module, ranks)
    seam.forward = loss
    module.register_forward_hook(whole_logits)


def _not_cut_if_it_owns(module: nn.Module, ranks: Ranks) -> None:
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        _not_cut(module, ranks)


def _not_cut(module: nn.Module, ranks: Ranks) -> None:
    raise UsageError(
        f"parallel.tp > 1 can't carry this model's {type(module).__name__}"
        f"{' with a bias' if getattr(module, 'bias', None) is not None else ''} yet: use parallel.tp = 1 with dp_shard"
    )


COLUMN = Style("column", dim=0)
"""A matrix cut by output features; its input must be replicated (see ENTER)."""

ROW = Style("row", dim=1, install=_leave_hook)
"""A matrix cut by input features; its output is partial and goes back to the residual stream."""

ENTER = Style("enter", install=_enter_hook)
"""A module without parameters of its own whose input is gathered once for all the columns in it."""

WHOLE_ONLY = Style("whole", install=_not_cut)
"""A part that tensor parallelism does not carry yet: refused where there is more than one rank."""

WHOLE_IF_ANY = Style("whole", install=_not_cut_if_it_owns)
"""The same for a part that may be there without weights of its own."""

SEQUENCE = Style("sequence", on_residual=True)
"""Whole weights on the residual stream, e.g. a norm."""

VOCABULARY_EMBEDDING = Style("vocabulary embedding", dim=0, install=_vocabulary_embedding)
"""A token table cut by tokens."""

VOCABULARY_HEAD = Style("vocabulary head", dim=0, install=_vocabulary_head)
"""An output head cut by tokens, with its loss; the head's sub-module `loss` is the seam."""
