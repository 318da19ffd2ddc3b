"""The styles that are built in, by the names that parts' plans call them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.ops.cross_entropy import LogitVariant
from megatfm.parallel.collectives import (
    copy_to_shards,
    gather_replicated,
    sum_partial,
)
from megatfm.parallel.experts import travelling
from megatfm.parallel.forward import replace_forward
from megatfm.parallel.layout import Cut, Placement
from megatfm.parallel.mesh import EXPERT, EXPERTS, Mesh
from megatfm.parallel.style import Own, Ranks, Style
from megatfm.parallel.vocabulary import cross_entropy_shard, embed_shard
from megatfm.registry import Registry


def _enter_hook(module: nn.Module, ranks: Ranks, own: Own) -> None:
    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.enter(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(enter)


def _whole_hook(module: nn.Module, ranks: Ranks, own: Own) -> None:
    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (ranks.whole(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(gather)


def _enter_output(module: nn.Module, ranks: Ranks, own: Own) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.enter(output))


def _whole_output(module: nn.Module, ranks: Ranks, own: Own) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.whole(output))


def _own_output(module: nn.Module, ranks: Ranks, own: Own) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.own(output))


def _summed_output(module: nn.Module, ranks: Ranks, own: Own) -> None:
    if ranks.sequence_parallel:
        module.register_forward_hook(lambda _, __, output: sum_partial(output, ranks.group))


def _summed_over_parts(module: nn.Module, ranks: Ranks, own: Own) -> None:
    module.register_forward_hook(
        lambda _, __, output: copy_to_shards(sum_partial(output, ranks.group), ranks.group)
    )


def _row_sums(module: nn.Module, ranks: Ranks, own: Own) -> None:
    replace_forward(module, ranks.row_sums)


def _token_sum(module: nn.Module, ranks: Ranks, own: Own) -> None:
    all_real: Callable[..., Tensor] = module.real  # type: ignore[assignment]
    module.real = lambda layout: ranks.own(all_real(layout))  # type: ignore[assignment]
    _summed_output(module, ranks, own)


def _row(module: nn.Module, ranks: Ranks, own: Own) -> None:
    biased = "bias" in own

    def forward(x: Tensor) -> Tensor:
        y = ranks.leave(getattr(module, "product", F.linear)(x, module.weight, None))  # type: ignore[arg-type]
        # Added to the sum, and not by every rank to its part of it.
        return y + module.bias if biased else y  # type: ignore[operator]

    replace_forward(module, forward)


def _sliced_heads(module: nn.Module, ranks: Ranks, own: Own) -> None:
    heads = module.heads
    head = ranks.rank * heads // ranks.group.size()  # type: ignore[operator]

    def forward(x: Tensor) -> Tensor:
        parts = [module.get_parameter(key).unflatten(0, (heads, -1))[head] for key in own]
        return F.linear(x, *parts)

    replace_forward(module, forward)


def _vocabulary_embedding(module: nn.Module, ranks: Ranks, own: Own) -> None:
    first = own["weight"].region[0][0]

    def embed(tokens_BT: Tensor) -> Tensor:
        return ranks.leave(embed_shard(tokens_BT, module.get_parameter("weight"), first))

    replace_forward(module, embed)


def _vocabulary_head(module: nn.Module, ranks: Ranks, own: Own) -> None:
    seam = module.get_submodule("loss")
    variant: LogitVariant = seam.variant  # type: ignore[assignment]
    (first, _), (vocabulary, _) = own["weight"].region[0], own["weight"].shape

    def loss(hidden_MD: Tensor, weight_WD: Tensor, targets_M: Tensor, bias_W: Tensor | None) -> Tensor:
        used = variant if seam.training else replace(variant, smoothing=0.0)
        return cross_entropy_shard(hidden_MD, weight_WD, targets_M, bias_W, used, first, ranks.group)

    def whole_logits(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        if not output.dim():  # a loss
            return output
        longest = -(-vocabulary // ranks.group.size())
        padded = F.pad(output, (0, longest - output.shape[-1]))
        return gather_replicated(padded, output.dim() - 1, ranks.group)[..., :vocabulary]

    _enter_hook(module, ranks, own)
    replace_forward(seam, loss)
    module.register_forward_hook(whole_logits)


def _place_experts(placement: Placement, mesh: Mesh) -> Placement:
    """Cut by experts over their own axis first; tensor parallelism cuts what is left. Where the data ranks don't divide
    that, ZeRO cuts within each expert: of 2 experts on 8 ranks it would fill 6 ranks up with nothing."""
    if (parts := mesh.size(EXPERT)) > 1:
        cut = Cut(EXPERT, 0, mesh.rank(EXPERT), parts)
        placement = replace(placement, cuts=(cut, *placement.cuts), data=EXPERTS)
    (_, (experts, *inner)), ranks = placement.region, mesh.size(placement.data.shard)
    within = experts % ranks and inner and inner[0] % ranks == 0
    return replace(placement, data_dim=1) if within else placement


def _experts_elsewhere(module: nn.Module, mesh: Mesh, own: Own) -> None:
    if (parts := mesh.size(EXPERT)) > 1:
        each: Callable[[Tensor, Tensor], Tensor] = module.each  # type: ignore[assignment]
        module.groups, module.each = parts, travelling(each, mesh.group(EXPERT))  # type: ignore[assignment]
        # FSDP2, which takes experts by themselves, puts its hooks on what a module returns, and warns of a view.
        module.register_forward_hook(lambda _, __, output: (output[0].clone(), *output[1:]))


def _experts(module: nn.Module, ranks: Ranks, own: Own) -> None:
    (first, *_), (experts, *_) = own["w_up"].region[0], own["w_up"].shape
    module.first = first % (experts // module.groups)  # type: ignore[assignment, operator]


def _experts_by_channels(module: nn.Module, ranks: Ranks, own: Own) -> None:
    """Every rank meets all rows, and adds the last bias, which is whole, once."""
    _experts(module, ranks, own)
    module.bias_share = float(ranks.rank == 0)  # type: ignore[assignment]


def _partial_output(module: nn.Module, ranks: Ranks, own: Own) -> None:
    module.register_forward_hook(lambda _, __, output: ranks.leave(output))


def _own_tokens_dropout(module: nn.Module, ranks: Ranks, own: Own) -> None:
    all_keys: Callable[..., Tensor] = module.token_rng_keys  # type: ignore[assignment]
    module.token_rng_keys = lambda layout: ranks.own(all_keys(layout))  # type: ignore[assignment]


def _own_channels_dropout(module: nn.Module, ranks: Ranks, own: Own) -> None:
    module.part = ranks.rank  # type: ignore[assignment]


SLICED_HEADS = Style("sliced heads", gradient="partial", install=_sliced_heads, sends=())
"""Key or value heads that are fewer than the ranks: whole on every rank, which uses the one that its queries need."""

COLUMN = Style("column", dim=0, instead=SLICED_HEADS, sends=())
"""A matrix cut by output features; its input must be replicated (see ENTER)."""

ROW = Style("row", dim=1, gradient="sequence", install=_row, sends=("output summed",))
"""A matrix cut by input features; its output is partial and goes back to the residual stream, where a bias is added."""

LAST_DIM = Style("last dim", dim=-1, sends=())
"""Numbers for each head, the heads last."""

SHARED_BY_HEADS = Style("shared by heads", gradient="partial", sends=())
"""Whole weights that every rank uses for its own heads, or for its own part of the vocabulary."""

ENTER = Style("enter", install=_enter_hook, shown=True, sends=("input gathered",))
"""A module without parameters of its own whose input is gathered once for all the columns in it."""

ENTER_HEADS = Style("enter, heads", dim=-2, install=_enter_hook, shown=True, sends=("input gathered",))
"""The same, with vectors for each head, the heads last but one."""

ENTER_OUTPUT = Style("enter output", install=_enter_output, shown=True, sends=("output gathered",))
"""A module whose output is gathered once for all the columns that use it."""

SEQUENCE = Style("sequence", gradient="sequence", sends=())
"""Whole weights on the residual stream, e.g. a norm."""

OWN_OUTPUT = Style("sequence output", gradient="sequence", install=_own_output, sends=())
"""Whole weights that make a replicated output, of which every rank keeps its part of the sequence."""

WHOLE_OUTPUT = Style(
    "sequence, gathered", gradient="sequence", install=_whole_output, sends=("output whole",)
)
"""Whole weights on the residual stream whose output every rank needs whole."""

SEQUENCE_SUM = Style("sequence sum", install=_summed_output, shown=True, sends=("loss summed",))
"""A module whose output is a sum over tokens, e.g. a block's term of the loss: over each rank's part, then over all."""

SUMMED_OVER_PARTS = Style(
    "summed over parts", install=_summed_over_parts, shown=True, sends=("parts summed",)
)
"""A module whose output is a sum over cut channels, which every rank then uses for its own."""

ROW_SUMS = Style("sums of rows", install=_row_sums, shown=True, sends=())
"""A module that sums numbers for each token over each row: over the tokens that are here, whose rows others share."""

TOKEN_SUM = Style("token sum", install=_token_sum, shown=True, sends=("loss summed",))
"""The same, of numbers for each token, given the layout that says which tokens are no padding."""

PARTIAL_OUTPUT = Style("partial output", install=_partial_output, shown=True, sends=("output summed",))
"""A module whose output is partial and goes back to the residual stream."""

EXPERTS_FOLDED = Style("experts", install=_experts, place=_place_experts, beside=_experts_elsewhere, sends=())
EXPERTS_BY_CHANNELS = replace(
    EXPERTS_FOLDED,
    dims={"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2},
    gradient="partial",
    install=_experts_by_channels,
)
STACKED_EXPERTS = replace(
    EXPERTS_FOLDED, dim=0, by_expert_tp={"channels": EXPERTS_BY_CHANNELS, "folded": EXPERTS_FOLDED}
)
"""Matrices of experts in a module that has seams for what travels: cut by experts, by the inner channels of each, or
not at all by tensor-parallel ranks, which then keep their own tokens."""

AT_HOME = Style("own tokens", sends=())
ENTER_EXPERTS = replace(ENTER, name="enter experts", by_expert_tp={"folded": AT_HOME})
"""As `enter`, where experts are cut."""

LEAVE_EXPERTS = replace(PARTIAL_OUTPUT, name="leave experts", by_expert_tp={"folded": AT_HOME})
"""As `partial output`, where experts are cut."""

TAKEN = replace(OWN_OUTPUT, name="taken choices", by_expert_tp={"folded": AT_HOME})
"""As `sequence output`, where experts are cut."""

WHOLE_CHOICES = replace(
    AT_HOME, name="whole choices", by_expert_tp={"folded": replace(WHOLE_OUTPUT, install=_whole_hook)}
)
OWN_CHOICES = replace(AT_HOME, name="own choices", by_expert_tp={"folded": OWN_OUTPUT})
"""A module that is given a row's choices and whose output every rank needs whole; and one whose output is whole, and
every rank keeps its part. Where experts are cut, all ranks have the whole row anyway."""

WHOLE = Style("whole", sends=())
"""Whole weights that every rank uses alike."""

WHOLE_INPUT = Style("whole input", install=_whole_hook, sends=("input whole",))
"""A module that every rank runs alike, on the whole sequence."""

VOCABULARY_EMBEDDING = Style(
    "vocabulary embedding", dim=0, uneven=True, install=_vocabulary_embedding, sends=("output summed",)
)
"""A token table cut by tokens."""

VOCABULARY_HEAD = Style(
    "vocabulary head",
    dim=0,
    uneven=True,
    install=_vocabulary_head,
    sends=("input gathered", "loss over the vocabulary"),
)
"""An output head cut by tokens, with its loss; the head's sub-module `loss` is the seam."""

TOKEN_DROPOUT = Style("keys of own tokens", install=_own_tokens_dropout, sends=())
"""Keyed dropout on the residual stream."""

PART_DROPOUT = Style("keys of own part", install=_own_channels_dropout, sends=())
"""Keyed dropout of cut heads or channels."""

STYLES: Registry[Style] = Registry("style of a plan")
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
