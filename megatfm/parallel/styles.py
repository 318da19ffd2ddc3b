"""Tensor-parallel styles: which dim of a module's weights is sharded, and what is communicated around the module.

A style is applied to any module from outside; plans name styles by the strings registered here. With sequence
parallelism, activations between styles are sharded by tokens; without, they are replicated.

With sequence parallelism the B·T tokens of a micro-batch are numbered row by row, and each rank holds a contiguous
1/tp of them, shaped [B, T/tp, …], so gathers and scatters need no copy. A shard may begin or end within a row, so
modules that run on it must treat tokens independently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.cross_entropy import LogitOptions, VocabularyShard, choose_chunk, cross_entropy
from megatfm.parallel.collectives import (
    TensorParallelGroup,
    all_gather_no_grad,
    all_gather_replicated,
    copy_to_group,
    multiply_partial,
    reduce_from_group,
)
from megatfm.parallel.layout import TensorLayout, replace_forward
from megatfm.parallel.mesh import Mesh
from megatfm.registry import Registry

# M tokens, D model width, W rows of the vocabulary on this rank

Layouts = Mapping[str, TensorLayout]
"""Layouts of a module's own parameters and buffers, by name."""


Communication = Literal[
    "input gathered",  # residual stream → replicated input of sharded weights
    "output gathered",
    "output gathered for tokens",  # residual stream → tensor in which each rank looks up what its tokens need
    "output summed",  # partial output of sharded weights → residual stream
    "input replicated",  # residual stream → replicated, for modules that every rank runs alike
    "output replicated",
    "shards summed",  # values per token, over sharded channels, and their gradient
    "loss summed",  # a sum over tokens
    "loss over the vocabulary",  # in the module's `loss`; logits are gathered
]
"""Communication at a module's forward; that of its backward pass follows from it."""


Install = Callable[[nn.Module, TensorParallelGroup, Layouts], None]
InstallExpertParallel = Callable[[nn.Module, Mesh, Layouts], None]
ShardRule = Callable[[TensorLayout, Mesh], TensorLayout]


@dataclass(frozen=True)
class ParallelStyle:
    """How to shard and connect a module under tensor parallelism.

    dim: sharded dim of the module's own tensors; None: replicated. dims: the same by a tensor's name, if it differs.
    gradient: of replicated tensors: "replicated" (complete on every rank), "partial_with_sp" (from a rank's tokens, so
    partial with sequence parallelism) or "partial" (always, e.g. from a rank's heads). allows_uneven: the last shard
    may be smaller. apply: installs the communication; called if there is more than one rank. shard_experts: adds shards
    of the expert axis to a layout. apply_expert_parallel: installs the communication over that axis, before `apply`;
    always called. is_listed: whether plan.txt shows it even without tensors. fallback: style for a module with fewer
    heads than ranks. communication: for `megatfm verify`, which computes the expected traffic from it; None: unknown.
    expert_tp_overrides: styles that replace it under some values of `parallel.expert_tp`.
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

    def shard_dim(self, key: str, n_dims: int) -> int | None:
        """Return the sharded dim of the module's tensor `key`, which has `n_dims` dims; None if it is replicated."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -n_dims <= dim < n_dims else dim % n_dims

    def resolve(self, module: nn.Module, tp_size: int, expert_tp: str = "by_expert") -> "ParallelStyle":
        """Return the style to use: an override for `expert_tp`, or the fallback if there are fewer heads than ranks."""
        if self.expert_tp_overrides and tp_size > 1 and expert_tp in self.expert_tp_overrides:
            return self.expert_tp_overrides[expert_tp]
        heads = getattr(module, "heads", None)
        if self.fallback and heads and heads % tp_size and tp_size % heads == 0:
            return self.fallback
        return self


STYLES: Registry[ParallelStyle] = Registry("style of a plan")
"""Styles by name. A package in `plugins` may add more."""


def register_style(style: ParallelStyle) -> ParallelStyle:
    """Register a style under its name."""
    return STYLES.register(style.name)(style)


def gather_input(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    """Gather a module's first input for sharded weights."""
    module.register_forward_pre_hook(lambda _, inputs: (tp.gather_input(inputs[0]), *inputs[1:]))


def gather_input_replicated(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    """Gather the first input of a module that every rank runs alike."""
    module.register_forward_pre_hook(lambda _, inputs: (tp.gather_replicated(inputs[0]), *inputs[1:]))


def _gather_output(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: tp.gather_input(output))


def _gather_for_tokens(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    if tp.sequence_parallel:
        _gather_output(module, tp, layouts)


def _replicate_output(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: tp.gather_replicated(output))


def _split_output(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: tp.split_tokens(output))


def _sum_loss(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    if tp.sequence_parallel:
        module.register_forward_hook(lambda _, __, output: reduce_from_group(output, tp.group))


def _sum_over_shards(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: copy_to_group(reduce_from_group(output, tp.group), tp.group))


def _sum_rows(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    replace_forward(module, tp.sum_rows)


def _sum_non_padding_tokens(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    full_mask: Callable[..., Tensor] = module.non_padding_mask  # type: ignore[assignment]
    module.non_padding_mask = lambda sequence: tp.split_tokens(full_mask(sequence))  # type: ignore[assignment]
    _sum_loss(module, tp, layouts)


def get_multiply(module: nn.Module, layouts: Layouts, default: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function (x, W, b) → x Wᵀ + b by which a style computes with a shard of W: the method `multiply`.

    default: that of torch's own Linear. Raises UsageError for a forward without a `multiply` beside it: the style
    replaces the forward, so all else that it computes, such as an adapter's output, would be lost.
    """
    definitions = (vars(base) for base in type(module).__mro__)
    owner = next(names for names in definitions if "forward" in names or "multiply" in names)
    if "multiply" in owner:
        return module.multiply  # type: ignore[return-value]
    if owner["forward"] is nn.Linear.forward:
        return default
    weight = next(layout.name for layout in layouts.values())
    raise UsageError(
        f"{weight}: its style replaces the forward of {type(module).__name__}, which has no method `multiply(x, "
        "weight, bias)` beside it: add one that uses the given shard, or use `megatfm.layers.linear.Linear`"
    )


def _sum_matmul(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    has_bias = "bias" in layouts

    if getattr(module, "matmul", None) is F.linear:  # FP8 has a matmul of its own
        module.matmul = multiply_partial  # type: ignore[assignment]
    multiply = get_multiply(module, layouts, multiply_partial)

    def forward(x: Tensor) -> Tensor:
        y = tp.reduce_output(multiply(x, module.weight, None))
        # The bias is added once, after the sum over ranks.
        return y + module.bias if has_bias else y  # type: ignore[operator]

    replace_forward(module, forward)


def _slice_heads(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    heads = module.heads
    head = tp.rank * heads // tp.group.size()  # type: ignore[operator]
    multiply = get_multiply(module, layouts, F.linear)

    def forward(x: Tensor) -> Tensor:
        weight, *bias = (module.get_parameter(key).unflatten(0, (heads, -1))[head] for key in layouts)
        return multiply(x, weight, bias[0] if bias else None)

    replace_forward(module, forward)


def _shard_vocabulary_embedding(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    first = layouts["weight"].region[0][0]

    def embed(tokens_BT: Tensor) -> Tensor:
        return tp.reduce_output(vocab_parallel_embedding(tokens_BT, module.get_parameter("weight"), first))

    replace_forward(module, embed)


def _shard_vocabulary_head(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    loss_module = module.get_submodule("loss")
    variant: LogitOptions = loss_module.options  # type: ignore[assignment]
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
        return cross_entropy(
            hidden_MD,
            weight_WD,
            targets_M,
            bias_W,
            options,
            # Of the largest shard, so that all ranks have the same chunks.
            chunk=choose_chunk(hidden_MD, -(-vocabulary // tp.group.size())),
            shard=make_vocabulary_shard(first, vocabulary, tp.group),
            losses_M=losses_M,
            weights_M=weights_M,
        )

    def gather_logits(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.dim() < 2:  # a loss, or several terms of one
            return output
        longest = -(-vocabulary // tp.group.size())
        padded = F.pad(output, (0, longest - output.shape[-1]))
        return all_gather_replicated(padded, output.dim() - 1, tp.group)[..., :vocabulary]

    gather_input(module, tp, layouts)
    replace_forward(loss_module, loss)
    module.register_forward_hook(gather_logits)


def _reduce_output(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.register_forward_hook(lambda _, __, output: tp.reduce_output(output))


def _localize_token_dropout(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    all_keys: Callable[..., Tensor] = module.token_rng_keys  # type: ignore[assignment]
    module.token_rng_keys = lambda sequence: tp.split_tokens(all_keys(sequence))  # type: ignore[assignment]


def _localize_shard_dropout(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.shard_index = tp.rank  # type: ignore[assignment]


def _localize_channels(module: nn.Module, tp: TensorParallelGroup, layouts: Layouts) -> None:
    module.shard_index, module.n_shards = tp.rank, tp.group.size()  # type: ignore[assignment]


def vocab_parallel_embedding(tokens: Tensor, weight_WD: Tensor, vocab_start: int) -> Tensor:
    """Look up tokens in this rank's rows, from `vocab_start` on; zeros for others (Shoeybi et al. 2019, section 3)."""
    local = tokens - vocab_start
    is_local = (local >= 0) & (local < weight_WD.shape[0])
    return F.embedding(local.where(is_local, 0), weight_WD) * is_local[..., None].to(weight_WD.dtype)


def make_vocabulary_shard(vocab_start: int, vocabulary: int, group: ProcessGroup) -> VocabularyShard:
    """Return what `cross_entropy` needs of a rank's rows of the vocabulary. vocab_start: the first of them."""
    return VocabularyShard(vocab_start, vocabulary, lambda values: all_gather_no_grad(values, group))


REPLICATED_KV_HEADS = register_style(
    ParallelStyle("replicated_kv_heads", gradient="partial", apply=_slice_heads, communication=())
)
"""Fewer key or value heads than ranks: all are on every rank, which uses the head of its queries."""

COLWISE = register_style(ParallelStyle("colwise", dim=0, fallback=REPLICATED_KV_HEADS, communication=()))
"""A matrix sharded by output features; its input must be replicated (see "gather_input")."""

ROWWISE = register_style(
    ParallelStyle("rowwise", dim=1, gradient="partial_with_sp", apply=_sum_matmul, communication=("output summed",))
)
"""A matrix sharded by input features; its partial output is summed into the residual stream, and a bias added once."""

register_style(ParallelStyle("shard_input_features", dim=1, communication=()))
"""An adapter's matrix A, sharded by input features; its partial output is summed with that of the adapted matrix."""

register_style(ParallelStyle("shard_last_dim", dim=-1, communication=()))
"""A tensor with one value per head in its last dim."""

register_style(ParallelStyle("replicated_partial_grad", gradient="partial", communication=()))
"""Replicated weights that each rank uses for its own heads or its shard of the vocabulary."""

GATHER_INPUT = register_style(
    ParallelStyle("gather_input", apply=gather_input, is_listed=True, communication=("input gathered",))
)
"""A module whose input is gathered once for all column-wise matrices in it."""

register_style(replace(GATHER_INPUT, name="gather_input_shard_heads", dim=-2))
"""Style "gather_input" of a module with vectors per head, with heads in dim -2."""

register_style(ParallelStyle("gather_output", apply=_gather_output, is_listed=True, communication=("output gathered",)))
"""A module whose output is gathered once for all column-wise matrices that use it."""

register_style(
    ParallelStyle(
        "gather_output_for_tokens",
        apply=_gather_for_tokens,
        is_listed=True,
        communication=("output gathered for tokens",),
    )
)
"""A module whose output is gathered once; each rank then looks up what its tokens need."""

SEQUENCE_PARALLEL = register_style(ParallelStyle("sequence_parallel", gradient="partial_with_sp", communication=()))
"""Replicated weights on the residual stream, e.g. a norm's."""

SPLIT_OUTPUT = register_style(
    ParallelStyle("split_output", gradient="partial_with_sp", apply=_split_output, communication=())
)
"""Replicated weights with a replicated output, of which each rank keeps its tokens."""

GATHER_OUTPUT_REPLICATED = register_style(
    ParallelStyle(
        "gather_output_replicated",
        gradient="partial_with_sp",
        apply=_replicate_output,
        communication=("output replicated",),
    )
)
"""Replicated weights on the residual stream whose full output every rank needs."""

register_style(ParallelStyle("sum_output", apply=_sum_loss, is_listed=True, communication=("loss summed",)))
"""A module whose output is a sum over tokens, e.g. an auxiliary loss: over local tokens, then over ranks."""

register_style(
    ParallelStyle("sum_over_shards", apply=_sum_over_shards, is_listed=True, communication=("shards summed",))
)
"""A module whose output is a sum over sharded channels, which each rank then uses for its own channels."""

register_style(ParallelStyle("sum_tokens_by_row", apply=_sum_rows, is_listed=True, communication=()))
"""A module that sums values per token over each row, here over local tokens."""

register_style(
    ParallelStyle(
        "sum_non_padding_tokens", apply=_sum_non_padding_tokens, is_listed=True, communication=("loss summed",)
    )
)
"""A sum over tokens, padding left out."""

REDUCE_OUTPUT = register_style(
    ParallelStyle("reduce_output", apply=_reduce_output, is_listed=True, communication=("output summed",))
)
"""A module whose partial output is summed into the residual stream."""

REPLICATED = register_style(ParallelStyle("replicated", communication=()))
"""Replicated weights that every rank uses alike."""

GATHER_INPUT_REPLICATED = register_style(
    ParallelStyle("gather_input_replicated", apply=gather_input_replicated, communication=("input replicated",))
)
"""A module that every rank runs alike on the full sequence."""

register_style(
    ParallelStyle(
        "vocab_parallel_embedding",
        dim=0,
        allows_uneven=True,
        apply=_shard_vocabulary_embedding,
        communication=("output summed",),
    )
)
"""A token embedding sharded by vocabulary."""

register_style(
    ParallelStyle(
        "vocab_parallel_head",
        dim=0,
        allows_uneven=True,
        apply=_shard_vocabulary_head,
        communication=("input gathered", "loss over the vocabulary"),
    )
)
"""An output head sharded by vocabulary, with the loss of its submodule `loss`."""

register_style(ParallelStyle("local_token_dropout", apply=_localize_token_dropout, communication=()))
"""Keyed dropout on the residual stream."""

register_style(ParallelStyle("local_shard_dropout", apply=_localize_shard_dropout, communication=()))
"""Keyed dropout of sharded heads or channels."""

register_style(ParallelStyle("local_channels", apply=_localize_channels, communication=()))
"""A module that passes on this rank's channels of a replicated input."""
