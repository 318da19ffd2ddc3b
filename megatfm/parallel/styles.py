"""Tensor-parallel styles: which dim of a module's weights is sharded, and which collectives run at its call.

A style is applied to a module from outside; the plans of layers name styles by the strings registered here. Between
styles, activations are sharded by tokens with sequence parallelism, else replicated.

Sequence parallelism numbers the B·T tokens of a micro-batch row by row, and each rank holds a contiguous 1/ranks of
them, shaped [B, T/ranks, …]. So gathers and scatters copy nothing. A shard may begin or end within a row, so modules
that run on it must treat tokens independently.
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
"""Layouts of a module's own parameters and buffers, by name."""


Communication = Literal[
    "input gathered",  # residual stream to replicated input of sharded weights
    "output gathered",
    "output gathered for tokens",  # residual stream to replicated; each rank then reads what its own tokens need
    "output summed",  # partial output of sharded weights to residual stream
    "input whole",  # residual stream to replicated, for computations that all ranks repeat
    "output whole",
    "parts summed",  # a sum over sharded channels for each token; also of its gradient
    "loss summed",  # a sum over tokens
    "loss over the vocabulary",  # in the module's `loss`; if it returns logits, their shards are gathered
]
"""Communication in a module's forward pass, from which that of the backward pass follows."""


Install = Callable[[nn.Module, TensorParallelGroup, Layouts], None]
InstallExpertParallel = Callable[[nn.Module, Mesh, Layouts], None]
ShardRule = Callable[[TensorLayout, Mesh], TensorLayout]


@dataclass(frozen=True)
class ParallelStyle:
    """How tensor parallelism shards a module's tensors and communicates at its call.

    dim: the sharded dim of the module's own tensors; None: replicated. dims: the dim by tensor name, if it differs;
    tensors without an entry are replicated. allows_uneven: the last shard may be smaller.
    gradient: kind of the gradient of tensors that are not sharded. "replicated": every rank computes all of it;
    "partial_with_sp": computed from the residual stream, so partial with sequence parallelism; "partial": always
    partial, e.g. from a rank's own heads.
    apply: installs the communication; called only for several ranks. shard_experts: adds shards over expert-parallel
    axes to a tensor's layout. apply_expert_parallel: installs communication over these axes, before `apply`; always
    called. expert_tp_overrides: value of `parallel.expert_tp` → the style to use instead.
    fallback: the style for a module with fewer heads than ranks. is_listed: plan.txt lists the module even if it has
    no tensors. communication: the collectives, from which `megatfm verify` predicts traffic; None: it can't.
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
        """The sharded dim of tensor `key` with `dims` dims; None if it is replicated."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -dims <= dim < dims else dim % dims

    def resolve(self, module: nn.Module, parts: int, expert_tp: str = "by_expert") -> "ParallelStyle":
        """This style, or its replacement: by `expert_tp`, or the fallback if the module has fewer heads than there are
        shards (`parts`) and their number divides that of the shards."""
        if self.expert_tp_overrides and parts > 1 and expert_tp in self.expert_tp_overrides:
            return self.expert_tp_overrides[expert_tp]
        heads = getattr(module, "heads", None)
        if self.fallback and heads and heads % parts and parts % heads == 0:
            return self.fallback
        return self


STYLES: Registry[ParallelStyle] = Registry("style of a plan")
"""Styles by the names that plans use. Plugins may register more."""


def register_style(style: ParallelStyle) -> ParallelStyle:
    """Register a style under its name."""
    return STYLES.register(style.name)(style)


def gather_input(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    """All-gather a module's first input, for sharded weights."""

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.gather_input(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(enter)


def gather_input_replicated(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    """All-gather a module's first input, for a computation that all ranks repeat."""

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
        # Added once to the sum; adding it to each rank's partial output would count it several times.
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
        options = variant if loss_module.training else replace(variant, smoothing=0.0)
        return vocab_parallel_cross_entropy(
            hidden_MD, weight_WD, targets_M, bias_W, options, first, ranks.group, 1024, losses_M, weights_M
        )

    def gather_logits(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.dim() < 2:  # a loss, or several terms of one
            return output
        max_shard_size = -(-vocabulary // ranks.group.size())
        padded = F.pad(output, (0, max_shard_size - output.shape[-1]))
        return all_gather_replicated(padded, output.dim() - 1, ranks.group)[..., :vocabulary]

    gather_input(module, ranks, layouts)
    replace_forward(loss_module, loss)
    module.register_forward_hook(gather_logits)


def _reduce_output(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.reduce_output(output))


def _local_token_dropout(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    all_keys: Callable[..., Tensor] = module.token_rng_keys  # type: ignore[assignment]
    module.token_rng_keys = lambda layout: ranks.split_tokens(all_keys(layout))  # type: ignore[assignment]


def _local_shard_dropout(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.part = ranks.rank  # type: ignore[assignment]


def _local_channels(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    module.part, module.parts = ranks.rank, ranks.group.size()  # type: ignore[assignment]


def vocab_parallel_embedding(tokens: Tensor, weight_WD: Tensor, vocab_start: int) -> Tensor:
    """Look up the tokens whose rows are on this rank, zeros for the others: a partial [..., D].

    vocab_start: vocabulary index of this rank's first row. Source: Shoeybi et al. 2019, section 3.
    """
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
    """Summed cross-entropy over a vocabulary sharded by rows, replicated on all ranks.

    The gradient of `hidden_MD` is partial. vocab_start: vocabulary index of this rank's first row.
    """
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
"""Key or value heads, fewer than ranks: replicated; each rank uses the head of its queries."""

COLUMN = register_style(ParallelStyle("colwise", dim=0, fallback=SLICED_HEADS, communication=()))
"""A matrix sharded by output features; its input must be replicated (see "gather_input")."""

ROW = register_style(
    ParallelStyle(
        "rowwise", dim=1, gradient="partial_with_sp", apply=_sum_matmul, communication=("output summed",)
    )
)
"""A matrix sharded by input features; its partial output is reduced to the residual stream, then a bias is added."""

register_style(ParallelStyle("shard_last_dim", dim=-1, communication=()))
"""A tensor with heads in its last dim."""

register_style(ParallelStyle("replicated_partial_grad", gradient="partial", communication=()))
"""Replicated weights that each rank uses for its own heads, or its own shard of the vocabulary."""

ENTER = register_style(
    ParallelStyle("gather_input", apply=gather_input, is_listed=True, communication=("input gathered",))
)
"""A module whose input is gathered once for all column-parallel matrices in it."""

register_style(replace(ENTER, name="gather_input_shard_heads", dim=-2))
"""Style "gather_input" for a module with a tensor of one vector per head, heads in dim -2."""

register_style(
    ParallelStyle("gather_output", apply=_gather_output, is_listed=True, communication=("output gathered",))
)
"""A module whose output is gathered once for all column-parallel matrices that use it."""

register_style(
    ParallelStyle(
        "gather_output_for_tokens",
        apply=_gather_for_tokens,
        is_listed=True,
        communication=("output gathered for tokens",),
    )
)
"""A module whose output is gathered once; each rank then looks up what its tokens need."""

SEQUENCE = register_style(ParallelStyle("sequence_parallel", gradient="partial_with_sp", communication=()))
"""Replicated weights on the residual stream, e.g. a norm's."""

SPLIT_OUTPUT = register_style(
    ParallelStyle("split_output", gradient="partial_with_sp", apply=_split_output, communication=())
)
"""Replicated weights with a replicated output, of which each rank keeps its shard of the tokens."""

REPLICATED_OUTPUT = register_style(
    ParallelStyle(
        "gather_output_replicated",
        gradient="partial_with_sp",
        apply=_replicate_output,
        communication=("output whole",),
    )
)
"""Replicated weights on the residual stream, whose output is gathered on every rank."""

register_style(ParallelStyle("sum_output", apply=_sum_loss, is_listed=True, communication=("loss summed",)))
"""A module that returns a sum over its tokens, e.g. a block's loss term; it is all-reduced over the ranks."""

register_style(
    ParallelStyle("sum_over_shards", apply=_sum_over_shards, is_listed=True, communication=("parts summed",))
)
"""A module that returns a sum over sharded channels; it is all-reduced, and each rank uses it for its own channels."""

register_style(ParallelStyle("sum_tokens_by_row", apply=_sum_rows, is_listed=True, communication=()))
"""A module that sums over the tokens of each row: over this rank's tokens, as a shard may end within a row."""

register_style(
    ParallelStyle("sum_real_tokens", apply=_sum_real_tokens, is_listed=True, communication=("loss summed",))
)
"""A sum over the tokens that aren't padding."""

PARTIAL_OUTPUT = register_style(
    ParallelStyle("reduce_output", apply=_reduce_output, is_listed=True, communication=("output summed",))
)
"""A module whose partial output is reduced to the residual stream."""

WHOLE = register_style(ParallelStyle("replicated", communication=()))
"""Replicated weights whose computation all ranks repeat."""

WHOLE_INPUT = register_style(
    ParallelStyle("gather_input_replicated", apply=gather_input_replicated, communication=("input whole",))
)
"""A module that all ranks run on the full sequence."""

register_style(
    ParallelStyle(
        "vocab_parallel_embedding",
        dim=0,
        allows_uneven=True,
        apply=_vocabulary_embedding,
        communication=("output summed",),
    )
)
"""An embedding table sharded by vocabulary."""

register_style(
    ParallelStyle(
        "vocab_parallel_head",
        dim=0,
        allows_uneven=True,
        apply=_vocabulary_head,
        communication=("input gathered", "loss over the vocabulary"),
    )
)
"""An output head sharded by vocabulary, with its loss, which its submodule `loss` computes."""

register_style(ParallelStyle("local_token_dropout", apply=_local_token_dropout, communication=()))
"""Keyed dropout on the residual stream."""

register_style(ParallelStyle("local_shard_dropout", apply=_local_shard_dropout, communication=()))
"""Keyed dropout of sharded heads or channels."""

register_style(ParallelStyle("local_channels", apply=_local_channels, communication=()))
"""A module that selects, from a replicated input, the channels that this rank's sharded weights read."""
