"""The styles that are built in, by the names that parts' plans call them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.cross_entropy import LogitOptions
from megatfm.parallel.collectives import (
    all_gather_replicated,
    copy_to_group,
    reduce_from_group,
)
from megatfm.parallel.experts import travelling
from megatfm.parallel.forward import replace_forward
from megatfm.parallel.layout import Shard, TensorLayout
from megatfm.parallel.mesh import EXPERT, EXPERT_DATA_AXES, Mesh
from megatfm.parallel.style import ParallelStyle, TensorParallelGroup, layouts
from megatfm.parallel.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding
from megatfm.registry import Registry


def _enter_hook(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.gather_input(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(enter)


def _whole_hook(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.gather_replicated(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(gather)


def _enter_output(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.gather_input(output))


def _whole_output(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.gather_replicated(output))


def _own_output(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.split_tokens(output))


def _summed_output(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    if ranks.sequence_parallel:
        module.register_forward_hook(lambda _, __, output: reduce_from_group(output, ranks.group))


def _summed_over_parts(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    module.register_forward_hook(
        lambda _, __, output: copy_to_group(reduce_from_group(output, ranks.group), ranks.group)
    )


def _row_sums(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    replace_forward(module, ranks.row_sums)


def _token_sum(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    all_real: Callable[..., Tensor] = module.real  # type: ignore[assignment]
    module.real = lambda layout: ranks.split_tokens(all_real(layout))  # type: ignore[assignment]
    _summed_output(module, ranks, own)


def _row(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    biased = "bias" in own

    def forward(x: Tensor) -> Tensor:
        y = ranks.reduce_output(getattr(module, "matmul", F.linear)(x, module.weight, None))  # type: ignore[arg-type]
        # Added to the sum, and not by every rank to its part of it.
        return y + module.bias if biased else y  # type: ignore[operator]

    replace_forward(module, forward)


def _sliced_heads(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    heads = module.heads
    head = ranks.rank * heads // ranks.group.size()  # type: ignore[operator]

    def forward(x: Tensor) -> Tensor:
        parts = [module.get_parameter(key).unflatten(0, (heads, -1))[head] for key in own]
        return F.linear(x, *parts)

    replace_forward(module, forward)


def _vocabulary_embedding(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    first = own["weight"].region[0][0]

    def embed(tokens_BT: Tensor) -> Tensor:
        return ranks.reduce_output(vocab_parallel_embedding(tokens_BT, module.get_parameter("weight"), first))

    replace_forward(module, embed)


def _vocabulary_head(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    seam = module.get_submodule("loss")
    variant: LogitOptions = seam.variant  # type: ignore[assignment]
    (first, _), (vocabulary, _) = own["weight"].region[0], own["weight"].shape

    def loss(hidden_MD: Tensor, weight_WD: Tensor, targets_M: Tensor, bias_W: Tensor | None) -> Tensor:
        used = variant if seam.training else replace(variant, smoothing=0.0)
        return vocab_parallel_cross_entropy(hidden_MD, weight_WD, targets_M, bias_W, used, first, ranks.group)

    def whole_logits(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if not output.dim():  # a loss
            return output
        longest = -(-vocabulary // ranks.group.size())
        padded = F.pad(output, (0, longest - output.shape[-1]))
        return all_gather_replicated(padded, output.dim() - 1, ranks.group)[..., :vocabulary]

    _enter_hook(module, ranks, own)
    replace_forward(seam, loss)
    module.register_forward_hook(whole_logits)


def _place_experts(placement: TensorLayout, mesh: Mesh) -> TensorLayout:
    """Cut by experts over their own axis first; tensor parallelism cuts what is left. Where the data ranks don't divide
    that, ZeRO cuts within each expert: of 2 experts on 8 ranks it would fill 6 ranks up with nothing."""
    if (parts := mesh.size(EXPERT)) > 1:
        cut = Shard(EXPERT, 0, mesh.rank(EXPERT), parts)
        placement = replace(placement, shards=(cut, *placement.shards), data_axes=EXPERT_DATA_AXES)
    (_, (experts, *inner)), ranks = placement.region, mesh.size(placement.data_axes.shard)
    within = experts % ranks and inner and inner[0] % ranks == 0
    return replace(placement, fsdp_dim=1) if within else placement


def _experts_elsewhere(module: nn.Module, mesh: Mesh, own: layouts) -> None:
    if (parts := mesh.size(EXPERT)) > 1:
        each: Callable[[Tensor, Tensor], Tensor] = module.run_experts  # type: ignore[assignment]
        module.ep_size, module.run_experts = parts, travelling(each, mesh.group(EXPERT))  # type: ignore[assignment]
        # FSDP2, which takes experts by themselves, puts its hooks on what a module returns, and warns of a view.
        module.register_forward_hook(lambda _, __, output: (output[0].clone(), *output[1:]))


def _experts(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    (first, *_), (experts, *_) = own["w_up"].region[0], own["w_up"].shape
    module.first = first % (experts // module.ep_size)  # type: ignore[assignment, operator]


def _experts_by_channels(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    """Every rank meets all rows, and adds the last bias, which is whole, once."""
    _experts(module, ranks, own)
    module.down_bias_scale = float(ranks.rank == 0)  # type: ignore[assignment]


def _partial_output(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.reduce_output(output))


def _own_tokens_dropout(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    all_keys: Callable[..., Tensor] = module.token_rng_keys  # type: ignore[assignment]
    module.token_rng_keys = lambda layout: ranks.split_tokens(all_keys(layout))  # type: ignore[assignment]


def _own_channels_dropout(module: nn.Module, ranks: TensorParallelGroup, own: layouts) -> None:
    module.part = ranks.rank  # type: ignore[assignment]


SLICED_HEADS = ParallelStyle("sliced heads", gradient="partial", apply=_sliced_heads, communication=())
"""Key or value heads that are fewer than the ranks: whole on every rank, which uses the one that its queries need."""

COLUMN = ParallelStyle("column", dim=0, fallback=SLICED_HEADS, communication=())
"""A matrix cut by output features; its input must be replicated (see ENTER)."""

ROW = ParallelStyle("row", dim=1, gradient="sequence", apply=_row, communication=("output summed",))
"""A matrix cut by input features; its output is partial and goes back to the residual stream, where a bias is added."""

LAST_DIM = ParallelStyle("last dim", dim=-1, communication=())
"""Numbers for each head, the heads last."""

SHARED_BY_HEADS = ParallelStyle("shared by heads", gradient="partial", communication=())
"""Whole weights that every rank uses for its own heads, or for its own part of the vocabulary."""

ENTER = ParallelStyle("enter", apply=_enter_hook, is_listed=True, communication=("input gathered",))
"""A module without parameters of its own whose input is gathered once for all the columns in it."""

ENTER_HEADS = ParallelStyle(
    "enter, heads", dim=-2, apply=_enter_hook, is_listed=True, communication=("input gathered",)
)
"""The same, with vectors for each head, the heads last but one."""

ENTER_OUTPUT = ParallelStyle(
    "enter output", apply=_enter_output, is_listed=True, communication=("output gathered",)
)
"""A module whose output is gathered once for all the columns that use it."""

SEQUENCE = ParallelStyle("sequence", gradient="sequence", communication=())
"""Whole weights on the residual stream, e.g. a norm."""

OWN_OUTPUT = ParallelStyle("sequence output", gradient="sequence", apply=_own_output, communication=())
"""Whole weights that make a replicated output, of which every rank keeps its part of the sequence."""

WHOLE_OUTPUT = ParallelStyle(
    "sequence, gathered", gradient="sequence", apply=_whole_output, communication=("output whole",)
)
"""Whole weights on the residual stream whose output every rank needs whole."""

SEQUENCE_SUM = ParallelStyle(
    "sequence sum", apply=_summed_output, is_listed=True, communication=("loss summed",)
)
"""A module whose output is a sum over tokens, e.g. a block's term of the loss: over each rank's part, then over all."""

SUMMED_OVER_PARTS = ParallelStyle(
    "summed over parts", apply=_summed_over_parts, is_listed=True, communication=("parts summed",)
)
"""A module whose output is a sum over cut channels, which every rank then uses for its own."""

ROW_SUMS = ParallelStyle("sums of rows", apply=_row_sums, is_listed=True, communication=())
"""A module that sums numbers for each token over each row: over the tokens that are here, whose rows others share."""

TOKEN_SUM = ParallelStyle("token sum", apply=_token_sum, is_listed=True, communication=("loss summed",))
"""The same, of numbers for each token, given the layout that says which tokens are no padding."""

PARTIAL_OUTPUT = ParallelStyle(
    "partial output", apply=_partial_output, is_listed=True, communication=("output summed",)
)
"""A module whose output is partial and goes back to the residual stream."""

EXPERTS_FOLDED = ParallelStyle(
    "experts",
    apply=_experts,
    shard_experts=_place_experts,
    apply_expert_parallel=_experts_elsewhere,
    communication=(),
)
EXPERTS_BY_CHANNELS = replace(
    EXPERTS_FOLDED,
    dims={"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2},
    gradient="partial",
    apply=_experts_by_channels,
)
STACKED_EXPERTS = replace(
    EXPERTS_FOLDED, dim=0, expert_tp_overrides={"by_channel": EXPERTS_BY_CHANNELS, "folded": EXPERTS_FOLDED}
)
"""Matrices of experts in a module that has seams for what travels: cut by experts, by the inner channels of each, or
not at all by tensor-parallel ranks, which then keep their own tokens."""

AT_HOME = ParallelStyle("own tokens", communication=())
ENTER_EXPERTS = replace(ENTER, name="enter experts", expert_tp_overrides={"folded": AT_HOME})
"""As `enter`, where experts are cut."""

LEAVE_EXPERTS = replace(PARTIAL_OUTPUT, name="leave experts", expert_tp_overrides={"folded": AT_HOME})
"""As `partial output`, where experts are cut."""

TAKEN = replace(OWN_OUTPUT, name="taken choices", expert_tp_overrides={"folded": AT_HOME})
"""As `sequence output`, where experts are cut."""

WHOLE_CHOICES = replace(
    AT_HOME, name="whole choices", expert_tp_overrides={"folded": replace(WHOLE_OUTPUT, apply=_whole_hook)}
)
OWN_CHOICES = replace(AT_HOME, name="own choices", expert_tp_overrides={"folded": OWN_OUTPUT})
"""A module that is given a row's choices and whose output every rank needs whole; and one whose output is whole, and
every rank keeps its part. Where experts are cut, all ranks have the whole row anyway."""

WHOLE = ParallelStyle("whole", communication=())
"""Whole weights that every rank uses alike."""

WHOLE_INPUT = ParallelStyle("whole input", apply=_whole_hook, communication=("input whole",))
"""A module that every rank runs alike, on the whole sequence."""

VOCABULARY_EMBEDDING = ParallelStyle(
    "vocabulary embedding",
    dim=0,
    allows_uneven=True,
    apply=_vocabulary_embedding,
    communication=("output summed",),
)
"""A token table cut by tokens."""

VOCABULARY_HEAD = ParallelStyle(
    "vocabulary head",
    dim=0,
    allows_uneven=True,
    apply=_vocabulary_head,
    communication=("input gathered", "loss over the vocabulary"),
)
"""An output head cut by tokens, with its loss; the head's sub-module `loss` is the seam."""

TOKEN_DROPOUT = ParallelStyle("keys of own tokens", apply=_own_tokens_dropout, communication=())
"""Keyed dropout on the residual stream."""

PART_DROPOUT = ParallelStyle("keys of own part", apply=_own_channels_dropout, communication=())
"""Keyed dropout of cut heads or channels."""

STYLES: Registry[ParallelStyle] = Registry("style of a plan")
"""Styles by the names that plans use. A package in `plugins` may add its own."""

for _style in (
    SLICED_HEADS,
    COLUMN,
    ROW,
    LAST_DIM,
    SHARED_BY_HEADS,
    ENTER,
    ENTER_HEADS,
    ENTER_OUTPUT,
    SEQUENCE,
    OWN_OUTPUT,
    WHOLE_OUTPUT,
    WHOLE,
    WHOLE_INPUT,
    VOCABULARY_EMBEDDING,
    VOCABULARY_HEAD,
    TOKEN_DROPOUT,
    PART_DROPOUT,
    SEQUENCE_SUM,
    SUMMED_OVER_PARTS,
    ROW_SUMS,
    TOKEN_SUM,
    STACKED_EXPERTS,
    ENTER_EXPERTS,
    LEAVE_EXPERTS,
    TAKEN,
    WHOLE_CHOICES,
    OWN_CHOICES,
    PARTIAL_OUTPUT,
):
    STYLES.register(_style.name)(_style)
