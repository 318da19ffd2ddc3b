"""A plan is a table: module-name pattern → style. This file lays it over a model."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatfm.errors import UsageError
from megatfm.parallel.layout import Layout, Placement
from megatfm.parallel.mesh import Mesh
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
    parts, part = mesh.size("tp"), mesh.rank("tp")
    ranks = Ranks(mesh.group("tp"), sequence_parallel) if parts > 1 else None
    local: dict[nn.Parameter, tuple[Placement, nn.Parameter]] = {}
    for path, style in styles.items():
        module = model.get_submodule(path)
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = Placement(
                name=f"{path}.{key}",
                shape=tuple(parameter.shape),
                dim=style.dim if ranks else None,
                part=part if ranks and style.dim is not None else 0,
                parts=parts if ranks and style.dim is not None else 1,
                partial_gradient=bool(ranks and style.on_residual and sequence_parallel),
            )
            if parameter not in local:
                shard = torch.empty(placement.box[1], dtype=parameter.dtype, device=parameter.device)
                local[parameter] = placement, nn.Parameter(shard)
            elif local[parameter][0].dim != placement.dim:
                raise UsageError(
                    f"{placement.name} is tied to {local[parameter][0].name}, but their plan rows cut different dims: "
                    "give both the same cut, or untie them"
                )
            setattr(module, key, local[parameter][1])
        if ranks:
            style.install(module, ranks)
    placements = {placement.name: placement for placement, _ in local.values()}
    return Layout(placements, _table(plan, styles, placements, mesh))


def match(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """Module name → style, in the order of the model's modules. Raises UsageError as `lay` does."""
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
        if not paths or (style.name == "whole" and not own):
            continue
        shapes = dict.fromkeys(
            f"{list(p.shape)} → {list(p.box[1])}" if p.dim is not None else str(list(p.shape)) for p in own
        )
        partial = "tp" if any(p.partial_gradient for p in own) else ""
        lines.append(
            f"{shown:<28}{style.name:<24}{f'{len(own)} × ' if own else ''}{', '.join(shapes):<36}{partial}".rstrip()
        )
    return "\n".join(lines) + "\n"
