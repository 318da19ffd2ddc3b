"""Tensor-parallel styles: which dim of a module's weights is cut, and what ranks send around the module.

A style is laid over any module from outside; the plans of layers name styles by the strings registered here. With
sequence parallelism, activations between the styles are sharded by tokens; without, they are replicated.

With sequence parallelism the B·T tokens of a micro-batch are numbered row by row, and each rank holds a contiguous
1/ranks of them, shaped [B, T/ranks, …]. So gathers and scatters copy nothing. A rank's part may begin or end within a
row, so modules that run on it must treat tokens independently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.ops.cross_entropy import LogitOptions, cross_entropy
from megatfm.parallel.collectives import (
    TensorParallelGroup,
    all_gather_no_grad,
    all_gather_replicated,
    copy_to_group,
    reduce_from_group,
)
from megatfm.parallel.layout import TensorLayout, replace_forward
from megatfm.parallel.mesh import Mesh
from megatfm.registry import Registry

# M tokens, D model width, W rows of the vocabulary on this rank

Layouts = Mapping[str, TensorLayout]
"""A module's own tensors, by their names in it."""


Communication = Literal[
    "input gathered",  # residual stream to replicated input of cut weights
    "output gathered",
    "output gathered for tokens",  # residual stream to what every rank reads for its part of the tokens
    "output summed",  # partial output of cut weights to residual stream
    "input whole",  # for what every rank computes alike
    "output whole",
    "parts summed",  # numbers for each token, over cut channels; of their gradient, too
    "loss summed",  # a sum over tokens
    "loss over the vocabulary",  # in the module's `loss`; of logits, if it gives these, the parts are gathered
]
"""Communication of ranks at a module's call; that of its backward pass follows from it."""


Install = Callable[[nn.Module, TensorParallelGroup, Layouts], None]
InstallExpertParallel = Callable[[nn.Module, Mesh, Layouts], None]
ShardRule = Callable[[TensorLayout, Mesh], TensorLayout]


@dataclass(frozen=True)
class ParallelStyle:
    """dim: the dim of the module's own tensors that is cut; None: every rank has all of them.

    gradient: of tensors that are not cut. "replicated": every rank computes all of it; "partial_with_sp": from its
    part of the
    residual stream, so partial with sequence parallelism; "partial": always its own share, e.g. that of its heads.
    allows_uneven: the last part may be smaller. apply: adds the communication; called only where there is more than one
    rank. shard_experts: adds the shards of other axes than tensor parallelism's to a tensor's layout (experts).
    apply_expert_parallel: adds the communication over these axes, before `apply`; called whatever their sizes are.
    is_listed: in the table also where it has no tensors. fallback: the style for a module that this one does not fit.
    communication: in words of `Communication`, so that `megatfm verify` can say how much it should be; None: it can't.
    dims: the dim by a tensor's name, where it isn't the same for all; tensors without one are not cut.
    expert_tp_overrides: other styles in its place under some values of `parallel.expert_tp`.
    """

    name: str
    dim: int | None = None
    gradient: Literal["replicated", "partial_with_sp", "partial"] = "replicated"
    allows_uneven: bool = False
    apply: Install | None = None
    shard_experts: ShardRule | None = None
    apply_expert_parallel: InstallExpertParallel | None = None
    is_listed: bool = False
    fallback: "ParallelStyle | None" = None
    communication: tuple[Communication, ...] | None = None
    dims: Mapping[str, int] | None = field(default=None, hash=False)
    expert_tp_overrides: "Mapping[str, ParallelStyle] | None" = field(default=None, hash=False)

    def cut_dim(self, key: str, dims: int) -> int | None:
        """The dim that is cut of a tensor with `dims` dims; None where none is."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -dims <= dim < dims else dim % dims

    def resolve(self, module: nn.Module, parts: int, expert_tp: str = "by_expert") -> "ParallelStyle":
        """This style, or the one in its place: where the module's heads are fewer than the parts and divide them, or by
        `expert_tp`."""
        if self.expert_tp_overrides and parts > 1 and expert_tp in self.expert_tp_overrides:
            return self.expert_tp_overrides[expert_tp]
        heads = getattr(module, "heads", None)
        if self.fallback and heads and heads % parts and parts % heads == 0:
            return self.fallback
        return self


STYLES: Registry[ParallelStyle] = Registry("style of a plan")
"""Styles by the names that plans use. A package in `plugins` may add its own."""


def register_style(style: ParallelStyle) -> ParallelStyle:
    """Register a style under its name."""
    return STYLES.register(style.name)(style)


def gather_input(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    """Gather a module's first input for weights that are cut."""

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.gather_input(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(enter)


def gather_input_replicated(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    """Gather a module's first input for what every rank computes alike."""

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.gather_replicated(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(gather)


def _gather_output(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.gather_input(output))


def _gather_for_tokens(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    if ranks.sequence_parallel:
        _gather_output(module, ranks, layouts)


def _replicate_output(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.gather_replicated(output))


def _split_output(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.split_tokens(output))


def _sum_loss(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    if ranks.sequence_parallel:
        module.register_forward_hook(lambda _, __, output: reduce_from_group(output, ranks.group))


def _sum_over_shards(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(
        lambda _, __, output: copy_to_group(reduce_from_group(output, ranks.group), ranks.group)
    )


def _sum_rows(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    replace_forward(module, ranks.row_sums)


def _sum_real_tokens(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    all_real: Callable[..., Tensor] = module.real  # type: ignore[assignment]
    module.real = lambda layout: ranks.split_tokens(all_real(layout))  # type: ignore[assignment]
    _sum_loss(module, ranks, layouts)


def _sum_matmul(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    biased = "bias" in layouts

    def forward(x: Tensor) -> Tensor:
        y = ranks.reduce_output(getattr(module, "product", F.linear)(x, module.weight, None))  # type: ignore[arg-type]
        # Added once to the sum, not by every rank to its part of it.
        return y + module.bias if biased else y  # type: ignore[operator]

    replace_forward(module, forward)


def _slice_heads(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    heads = module.heads
    head = ranks.rank * heads // ranks.group.size()  # type: ignore[operator]

    def forward(x: Tensor) -> Tensor:
        parts = [module.get_parameter(key).unflatten(0, (heads, -1))[head] for key in layouts]
        return getattr(module, "product", F.linear)(x, parts[0], parts[1] if parts[1:] else None)

    replace_forward(module, forward)


def _vocabulary_embedding(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    first = layouts["weight"].region[0][0]

    def embed(tokens_BT: Tensor) -> Tensor:
        return ranks.reduce_output(vocab_parallel_embedding(tokens_BT, module.get_parameter("weight"), first))

    replace_forward(module, embed)


def _vocabulary_head(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    loss_module = module.get_submodule("loss")
    variant: LogitOptions = loss_module.variant  # type: ignore[assignment]
    (first, _), (vocabulary, _) = layouts["weight"].region[0], layouts["weight"].shape

    def loss(
        hidden_MD: Tensor,
        weight_WD: Tensor,
        targets_M: Tensor,
        bias_W: Tensor | None,
        losses_M: Tensor | None = None,
        weights_M: Tensor | None = None,
    ) -> Tensor:
        used = variant if loss_module.training else replace(variant, smoothing=0.0)
        return vocab_parallel_cross_entropy(
            hidden_MD, weight_WD, targets_M, bias_W, used, first, ranks.group, 1024, losses_M, weights_M
        )

    def whole_logits(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.dim() < 2:  # a loss, or several terms of one
            return output
        longest = -(-vocabulary // ranks.group.size())
        padded = F.pad(output, (0, longest - output.shape[-1]))
        return all_gather_replicated(padded, output.dim() - 1, ranks.group)[..., :vocabulary]

    gather_input(module, ranks, layouts)
    replace_forward(loss_module, loss)
    module.register_forward_hook(whole_logits)


def _reduce_output(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.reduce_output(output))


def _local_token_dropout(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    all_keys: Callable[..., Tensor] = module.token_rng_keys  # type: ignore[assignment]
    module.token_rng_keys = lambda layout: ranks.split_tokens(all_keys(layout))  # type: ignore[assignment]


def _local_shard_dropout(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.shard_index = ranks.rank  # type: ignore[assignment]


def _local_channels(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.shard_index, module.n_shards = ranks.rank, ranks.group.size()  # type: ignore[assignment]


def vocab_parallel_embedding(tokens: Tensor, weight_WD: Tensor, vocab_start: int) -> Tensor:
    """Rows of the tokens on this rank, from `vocab_start` on, and zeros for the others: a partial [..., D]
    (Shoeybi et al. 2019, section 3)."""
    local = tokens - vocab_start
    is_local = (local >= 0) & (local < weight_WD.shape[0])
    rows = F.embedding(local.where(is_local, 0), weight_WD)
    return rows * is_local[..., None].to(rows.dtype)


def vocab_parallel_cross_entropy(
    hidden_MD: Tensor,
    weight_WD: Tensor,
    targets_M: Tensor,
    bias_W: Tensor | None,
    variant: LogitOptions,
    vocab_start: int,
    group: ProcessGroup,
    chunk: int = 1024,
    losses_M: Tensor | None = None,
    weights_M: Tensor | None = None,
) -> Tensor:
    """Summed cross-entropy, alike on all ranks; hidden's gradient is partial. vocab_start: first row of this rank."""
    return cross_entropy(
        hidden_MD,
        weight_WD,
        targets_M,
        bias_W,
        variant,
        chunk=chunk,
        vocab_start=vocab_start,
        all_gather=lambda values: all_gather_no_grad(values, group),
        losses_M=losses_M,
        weights_M=weights_M,
    )


SLICED_HEADS = register_style(
    ParallelStyle("replicated_kv_heads", gradient="partial", apply=_slice_heads, communication=())
)
"""Key or value heads that are fewer than the ranks: all of them on every rank, which uses the one of its queries."""

COLUMN = register_style(ParallelStyle("colwise", dim=0, fallback=SLICED_HEADS, communication=()))
"""A matrix cut by output features; its input must be replicated (see "gather_input")."""

ROW = register_style(
    ParallelStyle(
        "rowwise", dim=1, gradient="partial_with_sp", apply=_sum_matmul, communication=("output summed",)
    )
)
"""A matrix cut by input features; its output is partial and goes back to the residual stream, where a bias is added."""

register_style(ParallelStyle("shard_last_dim", dim=-1, communication=()))
"""Numbers for each head, the heads last."""

register_style(ParallelStyle("replicated_partial_grad", gradient="partial", communication=()))
"""Weights that every rank has and uses for its own heads, or for its own part of the vocabulary."""

ENTER = register_style(
    ParallelStyle("gather_input", apply=gather_input, is_listed=True, communication=("input gathered",))
)
"""A module without parameters of its own whose input is gathered once for all the columns in it."""

register_style(replace(ENTER, name="gather_input_shard_heads", dim=-2))
"""Style "gather_input" of a module whose input has a vector for each head, with heads in dim -2."""

register_style(
    ParallelStyle("gather_output", apply=_gather_output, is_listed=True, communication=("output gathered",))
)
"""A module whose output is gathered once for all the columns that use it."""

register_style(
    ParallelStyle(
        "gather_output_for_tokens",
        apply=_gather_for_tokens,
        is_listed=True,
        communication=("output gathered for tokens",),
    )
)
"""A module whose output is gathered once, of which every rank then looks up what its part of the sequence needs."""

SEQUENCE = register_style(ParallelStyle("sequence_parallel", gradient="partial_with_sp", communication=()))
"""Weights on the residual stream that are not cut, e.g. a norm's."""

SPLIT_OUTPUT = register_style(
    ParallelStyle("split_output", gradient="partial_with_sp", apply=_split_output, communication=())
)
"""Weights that are not cut and make a replicated output, of which every rank keeps its part of the sequence."""

REPLICATED_OUTPUT = register_style(
    ParallelStyle(
        "gather_output_replicated",
        gradient="partial_with_sp",
        apply=_replicate_output,
        communication=("output whole",),
    )
)
"""Weights on the residual stream that are not cut, and whose output every rank needs whole."""

register_style(ParallelStyle("sum_output", apply=_sum_loss, is_listed=True, communication=("loss summed",)))
"""A module whose output is a sum over tokens, e.g. a block's term of the loss: over each rank's part, then over all."""

register_style(
    ParallelStyle("sum_over_shards", apply=_sum_over_shards, is_listed=True, communication=("parts summed",))
)
"""A module whose output is a sum over cut channels, which every rank then uses for its own."""

register_style(ParallelStyle("sum_tokens_by_row", apply=_sum_rows, is_listed=True, communication=()))
"""A module that sums numbers for each token over each row: over this rank's tokens, of rows that ranks share."""

register_style(
    ParallelStyle("sum_real_tokens", apply=_sum_real_tokens, is_listed=True, communication=("loss summed",))
)
"""A sum over tokens, given the layout that says which tokens are no padding."""

PARTIAL_OUTPUT = register_style(
    ParallelStyle("reduce_output", apply=_reduce_output, is_listed=True, communication=("output summed",))
)
"""A module whose output is partial and goes back to the residual stream."""

WHOLE = register_style(ParallelStyle("replicated", communication=()))
"""Weights that are not cut, and that every rank uses alike."""

WHOLE_INPUT = register_style(
    ParallelStyle("gather_input_replicated", apply=gather_input_replicated, communication=("input whole",))
)
"""A module that every rank runs alike, on the whole sequence."""

register_style(
    ParallelStyle(
        "vocab_parallel_embedding",
        dim=0,
        allows_uneven=True,
        apply=_vocabulary_embedding,
        communication=("output summed",),
    )
)
"""A token table cut by tokens."""

register_style(
    ParallelStyle(
        "vocab_parallel_head",
        dim=0,
        allows_uneven=True,
        apply=_vocabulary_head,
        communication=("input gathered", "loss over the vocabulary"),
    )
)
"""An output head cut by tokens, with its loss, which its sub-module `loss` computes."""

register_style(ParallelStyle("local_token_dropout", apply=_local_token_dropout, communication=()))
"""Keyed dropout on the residual stream."""

register_style(ParallelStyle("local_shard_dropout", apply=_local_shard_dropout, communication=()))
"""Keyed dropout of cut heads or channels."""

register_style(ParallelStyle("local_channels", apply=_local_channels, communication=()))
"""A module that passes on the channels which are the input of cut weights, of an input that every rank has whole."""
