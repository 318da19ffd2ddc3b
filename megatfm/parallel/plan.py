"""A plan is a table, pattern over module names → style. This file collects it from a model's parts, and lays it.

A module's class says in `tp_plan` how it and the modules in it are cut: rows of (pattern relative to the module, "" for
itself; name of a style), such as `tp_plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"))`. They are strings, so
that layers know nothing of parallelism. A row that matches nothing is for a part that not every model has.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.parallel.context import build_context_parallel, install
from megatfm.parallel.layout import ModelLayout, Shard, TensorLayout
from megatfm.parallel.mesh import TENSOR, Mesh
from megatfm.parallel.style import ParallelStyle, TensorParallelGroup
from megatfm.parallel.styles import STYLES

UNPLANNED = ParallelStyle("no row")
"""Of a module that nobody speaks of, where nothing is cut."""
GENERIC_PACKAGES = (
    "torch.",
    "megatfm.layers.linear",
    "megatfm.layers.table",
    "megatfm.layers.norm",
    "megatfm.layers.dropout",
)
"""Packages whose modules are used in many roles: how they are cut is said by what is around them."""


def parallelize(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, context: str = "auto"
) -> ModelLayout:
    """Cut the model's parameters (still on the meta device) and install what travels. Returns the layout table.

    Raises UsageError when a module has two styles, when one has none and there are several tensor-parallel ranks, or
    when these do not divide a dim.
    """
    parts = mesh.size(TENSOR)
    ranks = TensorParallelGroup(mesh.group(TENSOR), sequence_parallel) if parts > 1 else None
    rows_by_module = _rows_by_module(model)
    styles = _match(model, rows_by_module, complete=parts > 1)
    local: dict[Tensor, tuple[TensorLayout, Tensor]] = {}
    buffers: dict[str, TensorLayout] = {}
    state: list[str] = []
    for path, planned in styles.items():
        module = model.get_submodule(path)
        style = styles[path] = planned.resolve(module, parts, mesh.expert_tp)
        own: dict[str, TensorLayout] = {}
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            own[key] = placement = _place(f"{path}.{key}".lstrip("."), tensor, style, mesh, sequence_parallel)
            shard = torch.empty(placement.region[1], dtype=tensor.dtype, device=tensor.device)
            if not isinstance(tensor, nn.Parameter):
                buffers[placement.name] = placement
                if is_stored := key not in module._non_persistent_buffers_set:
                    state.append(placement.name)
                module.register_buffer(key, shard, persistent=is_stored)
                continue
            if tensor not in local:
                local[tensor] = placement, nn.Parameter(shard, requires_grad=tensor.requires_grad)
            elif not local[tensor][0].has_same_shards(placement):
                raise UsageError(
                    f"{placement.name} is tied to {local[tensor][0].name}, but their plan rows cut different dims: "
                    "give both the same cut, or untie them"
                )
            setattr(module, key, local[tensor][1])
        style.apply_expert_parallel(module, mesh, own)
        if ranks:
            style.apply(module, ranks, own)
    contexts = build_context_parallel(model, mesh, sequence_parallel=sequence_parallel, way=context)
    if contexts:
        install(model, contexts)
    placements = {placement.name: placement for placement, _ in local.values()}
    return ModelLayout(
        placements, _table(model, rows_by_module, styles, placements, mesh), buffers, state, contexts
    )


def _place(
    name: str, tensor: Tensor, style: ParallelStyle, mesh: Mesh, sequence_parallel: bool
) -> TensorLayout:
    """A tensor with fewer dims than the style cuts, e.g. the bias of a row-cut matrix, stays whole.

    Raises UsageError where its gradient would then be each rank's own share and the style takes it for complete.
    """
    shape, parts = tuple(tensor.shape), mesh.size(TENSOR)
    if parts == 1:
        return style.shard_experts(TensorLayout(name, shape), mesh)
    dim = style.cut_dim(name.rpartition(".")[2], len(shape))
    if dim is not None:
        cut = Shard(TENSOR, dim, mesh.rank(TENSOR), parts, style.allows_uneven)
        return style.shard_experts(TensorLayout(name, shape, (cut,)), mesh)
    if style.cut_dim(name.rpartition(".")[2], MOST_DIMS) is not None and style.gradient == "whole":
        raise UsageError(
            f"{name} has {len(shape)} dims, too few for the plan's style {style.name!r} to cut over parallel.tp = "
            f"{parts}: its gradient would be each rank's own share. Move it to a module with a style such as "
            "'shared by heads', which adds these shares up"
        )
    partial = style.gradient == "partial" or (style.gradient == "sequence" and sequence_parallel)
    return style.shard_experts(TensorLayout(name, shape, partial_axes=(TENSOR,) if partial else ()), mesh)


MOST_DIMS = 8
"""More than any parameter has."""


@dataclass(frozen=True)
class _Row:
    """A row of a plan where it was found. owner_path: of the module that brought it; its numbers are *."""

    owner_path: str
    owner_class: str
    pattern: str
    style: str

    def __str__(self) -> str:
        return f"{self.style!r} of {self.owner_class}"

    @property
    def modules(self) -> str:
        return ".".join(filter(None, (self.owner_path, self.pattern)))


def match(model: nn.Module, *, complete: bool = True) -> dict[str, ParallelStyle]:
    """Module name → style, in the order of the model's modules, from the rows that their classes bring.

    Raises UsageError for a style that there is not, for two styles of one module and, where `complete`, for a module
    that owns parameters or buffers and has none.
    """
    return _match(model, _rows_by_module(model), complete)


def _match(
    model: nn.Module, rows_by_module: Mapping[nn.Module, list[_Row]], complete: bool
) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        rows = rows_by_module.get(module, [])
        for row in rows[1:]:
            if row.style != rows[0].style:
                raise UsageError(
                    f"{path} has two styles in plans, {rows[0]} and {row}: keep one of these rows"
                )
        if rows:
            styles[path] = STYLES.get(rows[0].style)
        elif owned := [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if complete:
                raise UsageError(_missing(model, path, owned[0][0]))
            styles[path] = UNPLANNED
    return styles


def _rows_by_module(model: nn.Module) -> dict[nn.Module, list[_Row]]:
    """What the plans of a model's modules say of each of them."""
    rows_by_module: dict[nn.Module, list[_Row]] = {}
    for path, owner in model.named_modules():
        for pattern, style in getattr(type(owner), "tp_plan", ()):
            row = _Row(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), type(owner).__name__, pattern, style)
            for inner, module in owner.named_modules():
                if bool(inner) == bool(pattern) and fnmatchcase(inner, pattern):
                    rows_by_module.setdefault(module, []).append(row)
    return rows_by_module


def _missing(model: nn.Module, path: str, key: str) -> str:
    """How to give a module a style: a row in its class, or in that of the first around it that is not a mere layer."""
    owner, inner = path, ""
    while owner and type(model.get_submodule(owner)).__module__.startswith(GENERIC_PACKAGES):
        owner, _, last = owner.rpartition(".")
        inner = f"{last}.{inner}" if inner else last
    name = type(model.get_submodule(owner)).__name__
    return (
        f"{f'{path}.{key}'.lstrip('.')} has no style, and several tensor-parallel ranks need one: give the class "
        f'{name} a row for it, plan = (("{inner}", STYLE),), with one of: {", ".join(STYLES.names())}'
    )


def _table(
    model: nn.Module,
    rows_by_module: Mapping[nn.Module, list[_Row]],
    styles: dict[str, ParallelStyle],
    placements: dict[str, TensorLayout],
    mesh: Mesh,
) -> str:
    rows: dict[tuple[str, ParallelStyle], list[str]] = {}
    for path, style in styles.items():
        brought = rows_by_module.get(model.get_submodule(path))
        rows.setdefault((brought[0].modules if brought else path, style), []).append(path)
    width = 2 + max(len(shown) for shown, _ in rows)
    lines = [
        f"mesh  {mesh.describe()}",
        "",
        f"{'modules':<{width}}{'style':<24}{'parameters':<40}partial gradient",
    ]
    for (shown, style), paths in rows.items():
        own = [p for p in placements.values() if p.name.rpartition(".")[0] in paths]
        if not (own or style.is_listed):
            continue
        shapes = dict.fromkeys(
            f"{list(p.shape)} → {list(p.region[1])}" if p.shards else str(list(p.shape)) for p in own
        )
        partial = ", ".join(dict.fromkeys(axis for p in own for axis in p.partial_axes))
        held = f"{f'{len(own)} × ' if own else ''}{', '.join(shapes):<36}"
        lines.append(f"{shown:<{width}}{style.name:<24}{held}{partial}".rstrip())
    return "\n".join(lines) + "\n"
