"""A plan is a table: module-name pattern → style. This file lays it over a model."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.parallel.layout import Cut, Layout, Placement
from megatfm.parallel.mesh import TENSOR, Mesh
from megatfm.parallel.styles import Ranks, Style
from megatfm.registry import Registry

Plan = Sequence[tuple[str, Style]]
"""Rows of (pattern over module names, style); exactly one row for each module that owns parameters or buffers. A
pattern that begins with "?" may match nothing."""

PLANS: Registry[Plan] = Registry("parallel plan")


def lay(model: nn.Module, plan: Plan, mesh: Mesh, *, sequence_parallel: bool) -> Layout:
    """Cut the model's parameters (still on the meta device) and install what travels. Returns the layout table.

    Raises UsageError when a parameter or buffer matches no row or two, when a row matches nothing, or when the axis
    does not divide a dim.
    """
    styles = match(model, plan)
    parts = mesh.size(TENSOR)
    ranks = Ranks(mesh.group(TENSOR), sequence_parallel) if parts > 1 else None
    local: dict[Tensor, tuple[Placement, Tensor]] = {}
    buffers: dict[str, Placement] = {}
    state: list[str] = []
    for path, planned in styles.items():
        module = model.get_submodule(path)
        style = planned.fitted(module, parts)
        own: dict[str, Placement] = {}
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            own[key] = placement = _place(f"{path}.{key}", tensor, style, mesh, sequence_parallel)
            shard = torch.empty(placement.box[1], dtype=tensor.dtype, device=tensor.device)
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
        if ranks:
            style.install(module, ranks, own)
    placements = {placement.name: placement for placement, _ in local.values()}
    return Layout(placements, _table(plan, styles, placements, mesh), buffers, state)


def _place(name: str, tensor: Tensor, style: Style, mesh: Mesh, sequence_parallel: bool) -> Placement:
    """A tensor with fewer dims than the style cuts, e.g. the bias of a row-cut matrix, stays whole."""
    shape, parts = tuple(tensor.shape), mesh.size(TENSOR)
    if parts == 1:
        return style.place(Placement(name, shape), mesh)
    if style.dim is not None and -len(shape) <= style.dim < len(shape):
        cut = Cut(TENSOR, style.dim % len(shape), mesh.rank(TENSOR), parts, style.uneven)
        return style.place(Placement(name, shape, (cut,)), mesh)
    partial = style.gradient == "partial" or (style.gradient == "sequence" and sequence_parallel)
    return style.place(Placement(name, shape, sum_over=(TENSOR,) if partial else ()), mesh)


def match(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Module name → style, in the order of the model's modules. Raises UsageError as `lay` does."""
    from megatfm.parallel import styles as _styles

    known = {v.name: v for v in vars(_styles).values() if isinstance(v, Style)}
    plan = [
        *plan,
        *(
            (f"?{path}.{pattern}" if pattern else f"?{path}", known[style])
            for path, module in model.named_modules()
            for pattern, style in getattr(type(module), "plan", ())
        ),
    ]
    styles: dict[str, Style] = {}
    unused = {pattern for pattern, _ in plan if not pattern.startswith("?")}
    for path, module in model.named_modules():
        rows = [row for row in plan if path and fnmatchcase(path, row[0].removeprefix("?"))]
        owned = [
            name
            for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        ]
        if len(rows) > 1:
            raise UsageError(f"{path} matches {len(rows)} rows of the plan, {[p for p, _ in rows]}: keep one")
        if owned and not rows:
            raise UsageError(f"{path}.{owned[0]} matches no row of the plan: add a row for {path!r}")
        unused -= {pattern for pattern, _ in rows}
        if rows:
            styles[path] = rows[0][1]
    if unused:
        raise UsageError(
            f"rows of the plan match no module: {sorted(unused)}: remove them or mend the pattern"
        )
    return styles


def _table(plan: Plan, styles: dict[str, Style], placements: dict[str, Placement], mesh: Mesh) -> str:
    lines = [
        f"mesh  {mesh.describe()}",
        "",
        f"{'modules':<28}{'style':<24}{'parameters':<40}partial gradient",
    ]
    for pattern, style in plan:
        shown = pattern.removeprefix("?")
        paths = [path for path in styles if fnmatchcase(path, shown)]
        own = [p for p in placements.values() if p.name.rpartition(".")[0] in paths]
        if not paths or not (own or style.shown):
            continue
        shapes = dict.fromkeys(
            f"{list(p.shape)} → {list(p.box[1])}" if p.cuts else str(list(p.shape)) for p in own
        )
        partial = ", ".join(dict.fromkeys(axis for p in own for axis in p.sum_over))
        lines.append(
            f"{shown:<28}{style.name:<24}{f'{len(own)} × ' if own else ''}{', '.join(shapes):<36}{partial}".rstrip()
        )
    return "\n".join(lines) + "\n"
