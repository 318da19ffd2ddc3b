"""Context parallelism: rows are cut over ranks, and where tokens look at one another, keys and values travel.

A part of a model says in `context` how it computes on some tokens of rows: "alone", each by itself (or by parts that
say it themselves); "core", attention of queries, keys and values; "latents", attention of queries and what keys and
values are made of; "wide", attention of queries that see all; "keys", what makes keys and values of whole rows of those
it is given; "around", what looks up the tokens around spans; "sums", of which the part `summed` is given some that are
over the tokens here; "experts", of which numbers of rows follow from whole ones; "slots", means of all tokens that go
to experts. What says nothing, nobody knows to be right, and is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.moved import moved
from megatfm.parallel import context_slots
from megatfm.parallel.blocks import transformer_blocks
from megatfm.parallel.collectives import copy_to_group, reduce_from_group
from megatfm.parallel.context_attention import (
    make_attention_forward,
    make_gather_kv_forward,
    make_latent_forward,
)
from megatfm.parallel.context_exchange import LENGTHS, ContextParallel
from megatfm.parallel.context_experts import of_whole_rows
from megatfm.parallel.context_tokens import make_span_boundary_forward
from megatfm.parallel.context_wide import make_global_forward
from megatfm.parallel.forward import replace_forward
from megatfm.parallel.mesh import CONTEXT, TENSOR, Mesh

SIDES = ("", "encoder_")
"""Prefixes of the fields of a row."""

OF_ROWS = ("positions", "documents", "prefix", "targets", "order", "segments", "span_left", "span_right")
"""Fields that are known of whole rows: what tokens here look at, and what others look at here, follows from them."""

FORWARDS: dict[str, Callable[[nn.Module, ContextParallel], Callable[..., Any]]] = {
    "core": make_attention_forward,
    "latents": make_latent_forward,
    "wide": make_global_forward,
    "keys": make_gather_kv_forward,
    "around": make_span_boundary_forward,
}
"""What runs instead of a module's `forward`, by what it says in `context`."""

Batch = dict[str, Tensor]


def build_context_parallel(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, way: str
) -> ContextParallel | None:
    """How the rows of a model are cut; None where each rank has them whole."""
    if mesh.size(CONTEXT) == 1:
        return None
    unit = mesh.size(TENSOR) if sequence_parallel else 1
    return ContextParallel(mesh.group(CONTEXT), folding(model), unit, way)


def folding(model: nn.Module) -> Callable[[int], bool]:
    """`is_folded` by the length of rows, once for each."""
    patterns = dict.fromkeys(
        pattern for module in model.modules() if (pattern := getattr(module, "pattern", None)) is not None
    )
    return lru_cache(LENGTHS)(partial(_grow, [*patterns]))


def is_folded(model: nn.Module, length: int) -> bool:
    """Whether later tokens of rows of this length have more to look at than earlier ones, so that runs alone would be
    unequal work: also in windows that are as wide as the row."""
    return folding(model)(length)


def _grow(patterns: Sequence[Any], length: int) -> bool:
    """Patterns of plugins may say nothing of that."""
    within = (
        getattr(pattern, "simplify", lambda _, pattern=pattern: pattern)(length) for pattern in patterns
    )
    return any(getattr(pattern, "has_uneven_work", False) for pattern in within)


def install(model: nn.Module, contexts: ContextParallel) -> None:
    """Have keys and values travel wherever tokens look at one another. Raises UsageError where nobody knows how."""
    refuse(model)
    for module in model.modules():
        context = getattr(module, "cp_plan", None)
        if context in FORWARDS:
            replace_forward(module, FORWARDS[context](module, contexts))
        elif context == "sums":
            replace_forward(module.get_submodule("summed"), partial(_summed, group=contexts.group))
        elif context == "experts":
            of_whole_rows(module, contexts)
        elif context == "slots":
            context_slots.of_whole_rows(module, contexts)


def disable_compile_of_attention(block: nn.Module) -> None:
    """Have what lets keys travel run as it is in a block that is compiled: what a rank sends, and which blocks of keys
    are visited, depends on the batch; and what says `eager_when_long`, since it looks at long rows in pieces."""
    for module in block.modules():
        if getattr(module, "cp_plan", None) in FORWARDS or getattr(module, "eager_when_long", False):
            replace_forward(module, torch.compiler.disable(module.forward))


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sums over the tokens here → over all, of which each rank makes something else. Adjoint: the same."""
    return copy_to_group(reduce_from_group(x, group), group)


def refuse(model: nn.Module) -> None:
    """Raises UsageError that names the first part which does not say how it computes on some tokens of rows."""
    for path, module in _seams(model):
        if getattr(module, "cp_plan", None) is None:
            said = f"{type(module).__name__}{f' ({path})' if path else ''}"
            raise UsageError(
                f"parallel.cp > 1: {said} needs whole rows, or does not say how it computes on parts of them "
                "(`context`): use parallel.cp = 1 with dp_shard, tp or pp, or another part"
            )


def _seams(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model, what lies beside its stacks, and of each block attention, its core, and the feed-forward network."""
    yield "", model
    inside = {block: [*block.modules()] for block in transformer_blocks(model)}
    within = {module for modules in inside.values() for module in modules}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if module in within:
            if name in ("attn", "cross", "ffn", "core", "wide"):
                yield path, module
        elif ("." not in path and path and not type(module).__module__.startswith("torch.")) or (
            path.startswith("future.") and path.count(".") == 1
        ):
            yield path, module


def split_batch(batch: Mapping[str, Tensor], contexts: ContextParallel) -> Batch:
    """The fields of a micro-batch at the tokens that are here, and of the whole rows what attention needs of them.

    Raises UsageError for a field that is neither one number a row nor one a token.
    """
    found = dict(batch)
    for side in SIDES:
        positions = batch.get(f"{side}positions")
        if positions is None:
            continue
        length = positions.shape[1]
        here = moved(contexts.token_indices(length)[contexts.rank], positions.device)
        for name, field in batch.items():
            if field.dim() < 2 or name.startswith("encoder_") != bool(side):
                continue
            if field.shape[1] != length:
                raise UsageError(
                    f"parallel.cp > 1: the objective's field {name!r} {list(field.shape)} has not one place for each "
                    f"of {length} tokens, and can't be cut with them: use parallel.cp = 1"
                )
            found[name] = field[:, here]
        found[f"{side}places"] = here
        for name in OF_ROWS:
            if side + name in batch:
                found[f"{side}row_{name}"] = batch[side + name]
    return found
