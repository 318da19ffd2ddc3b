"""A plan is a table, pattern over module names → style. This file collects it from a model's parts, and lays it.

A module's class says in `plan` how it and the modules in it are cut: rows of (pattern relative to the module, "" for
itself; name of a style), such as `plan = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"))`. They are strings, so
that layers know nothing of parallelism. A row that matches nothing is for a part that not every model has.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.parallel.context import contexts_of, install
from megatfm.parallel.layout import Cut, ParameterLayout, Placement
from megatfm.parallel.mesh import TENSOR, Mesh
from megatfm.parallel.style import Ranks, Style
from megatfm.parallel.styles import STYLES

NO_ROW = Style("no row")
"""Of a module that nobody speaks of, where nothing is cut."""
GENERAL = (
    "torch.",
    "megatfm.layers.linear",
    "megatfm.layers.table",
    "megatfm.layers.norm",
    "megatfm.layers.dropout",
)
"""Packages whose modules are used in many roles: how they are cut is said by what is around them."""


def lay(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, context: str = "auto") -> ParameterLayout:
    """Cut the model's parameters (still on the meta device) and install what travels. Returns the layout table.

    Raises UsageError when a module has two styles, when one has none and there are several tensor-parallel ranks, or
    when these do not divide a dim.
    """
    parts = mesh.size(TENSOR)
    ranks = Ranks(mesh.group(TENSOR), sequence_parallel) if parts > 1 else None
    said = _said(model)
    styles = _match(model, said, complete=parts > 1)
    local: dict[Tensor, tuple[Placement, Tensor]] = {}
    buffers: dict[str, Placement] = {}
    state: list[str] = []
    for path, planned in styles.items():
        module = model.get_submodule(path)
        style = styles[path] = planned.fitted(module, parts, mesh.expert_tp)
        own: dict[str, Placement] = {}
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
            elif not local[tensor][0].is_cut_like(placement):
                raise UsageError(
                    f"{placement.name} is tied to {local[tensor][0].name}, but their plan rows cut different dims: "
                    "give both the same cut, or untie them"
                )
            setattr(module, key, local[tensor][1])
        style.beside(module, mesh, own)
        if ranks:
            style.install(module, ranks, own)
    contexts = contexts_of(model, mesh, sequence_parallel=sequence_parallel, way=context)
    if contexts:
        install(model, contexts)
    placements = {placement.name: placement for placement, _ in local.values()}
    return ParameterLayout(
        placements, _table(model, said, styles, placements, mesh), buffers, state, contexts
    )


def _place(name: str, tensor: Tensor, style: Style, mesh: Mesh, sequence_parallel: bool) -> Placement:
    """A tensor with fewer dims than the style cuts, e.g. the bias of a row-cut matrix, stays whole.

    Raises UsageError where its gradient would then be each rank's own share and the style takes it for complete.
    """
    shape, parts = tuple(tensor.shape), mesh.size(TENSOR)
    if parts == 1:
        return style.place(Placement(name, shape), mesh)
    dim = style.cut_dim(name.rpartition(".")[2], len(shape))
    if dim is not None:
        cut = Cut(TENSOR, dim, mesh.rank(TENSOR), parts, style.uneven)
        return style.place(Placement(name, shape, (cut,)), mesh)
    if style.cut_dim(name.rpartition(".")[2], MOST_DIMS) is not None and style.gradient == "whole":
        raise UsageError(
            f"{name} has {len(shape)} dims, too few for the plan's style {style.name!r} to cut over parallel.tp = "
            f"{parts}: its gradient would be each rank's own share. Move it to a module with a style such as "
            "'shared by heads', which adds these shares up"
        )
    partial = style.gradient == "partial" or (style.gradient == "sequence" and sequence_parallel)
    return style.place(Placement(name, shape, sum_over=(TENSOR,) if partial else ()), mesh)


MOST_DIMS = 8
"""More than any parameter has."""


@dataclass(frozen=True)
class _Row:
    """A row of a plan where it was found. place: of the module that brought it; its numbers are *."""

    place: str
    brought_by: str
    pattern: str
    style: str

    def __str__(self) -> str:
        return f"{self.style!r} of {self.brought_by}"

    @property
    def modules(self) -> str:
        return ".".join(filter(None, (self.place, self.pattern)))


def match(model: nn.Module, *, complete: bool = True) -> dict[str, Style]:
    """Module name → style, in the order of the model's modules, from the rows that their classes bring.

    Raises UsageError for a style that there is not, for two styles of one module and, where `complete`, for a module
    that owns parameters or buffers and has none.
    """
    return _match(model, _said(model), complete)


def _match(model: nn.Module, said: Mapping[nn.Module, list[_Row]], complete: bool) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    for path, module in model.named_modules():
        rows = said.get(module, [])
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
            styles[path] = NO_ROW
    return styles


def _said(model: nn.Module) -> dict[nn.Module, list[_Row]]:
    """What the plans of a model's modules say of each of them."""
    said: dict[nn.Module, list[_Row]] = {}
    for path, owner in model.named_modules():
        for pattern, style in getattr(type(owner), "plan", ()):
            row = _Row(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), type(owner).__name__, pattern, style)
            for inner, module in owner.named_modules():
                if bool(inner) == bool(pattern) and fnmatchcase(inner, pattern):
                    said.setdefault(module, []).append(row)
    return said


def _missing(model: nn.Module, path: str, key: str) -> str:
    """How to give a module a style: a row in its class, or in that of the first around it that is not a mere layer."""
    owner, inner = path, ""
    while owner and type(model.get_submodule(owner)).__module__.startswith(GENERAL):
        owner, _, last = owner.rpartition(".")
        inner = f"{last}.{inner}" if inner else last
    name = type(model.get_submodule(owner)).__name__
    return (
        f"{f'{path}.{key}'.lstrip('.')} has no style, and several tensor-parallel ranks need one: give the class "
        f'{name} a row for it, plan = (("{inner}", STYLE),), with one of: {", ".join(STYLES.names())}'
    )


def _table(
    model: nn.Module,
    said: Mapping[nn.Module, list[_Row]],
    styles: dict[str, Style],
    placements: dict[str, Placement],
    mesh: Mesh,
) -> str:
    rows: dict[tuple[str, Style], list[str]] = {}
    for path, style in styles.items():
        brought = said.get(model.get_submodule(path))
        rows.setdefault((brought[0].modules if brought else path, style), []).append(path)
    width = 2 + max(len(shown) for shown, _ in rows)
    lines = [
        f"mesh  {mesh.describe()}",
        "",
        f"{'modules':<{width}}{'style':<24}{'parameters':<40}partial gradient",
    ]
    for (shown, style), paths in rows.items():
        own = [p for p in placements.values() if p.name.rpartition(".")[0] in paths]
        if not (own or style.shown):
            continue
        shapes = dict.fromkeys(
            f"{list(p.shape)} → {list(p.region[1])}" if p.cuts else str(list(p.shape)) for p in own
        )
        partial = ", ".join(dict.fromkeys(axis for p in own for axis in p.sum_over))
        held = f"{f'{len(own)} × ' if own else ''}{', '.join(shapes):<36}"
        lines.append(f"{shown:<{width}}{style.name:<24}{held}{partial}".rstrip())
    return "\n".join(lines) + "\n"
