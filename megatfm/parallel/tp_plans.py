"""`tp_plan`: how a class's submodules are sharded over tensor-parallel ranks, and which module gets which style.

A class declares how its submodules are sharded, in rows of (name pattern relative to the module, "" for itself; name of
a style): `tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))`. Plans are strings, so layers
know nothing of parallelism. Patterns match names segment by segment: `*` within one segment, `**` any number of
segments. Rows that match nothing are allowed, for submodules that only some models have.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from megatfm.errors import UsageError
from megatfm.parallel import expert_parallel  # noqa: F401  registers the styles of experts
from megatfm.parallel.styles import STYLES, ParallelStyle

ADAPTER_STYLES: dict[str, tuple[str, str, str]] = {
    "colwise": ("replicated_partial_grad", "colwise", "replicated"),
    "rowwise": ("shard_input_features", "replicated_partial_grad", "local_shard_dropout"),
    "replicated": ("replicated", "replicated", "replicated"),
    "replicated_partial_grad": ("replicated_partial_grad", "replicated_partial_grad", "replicated"),
    "sequence_parallel": ("sequence_parallel", "sequence_parallel", "local_token_dropout"),
    "gather_output_replicated": ("sequence_parallel", "sequence_parallel", "local_token_dropout"),
}
"""Style of a linear layer → styles of its low-rank adapter (LoRA): of A, of B, and of the dropout before A. Other
styles allow no adapter.

Beside a column-wise matrix, B is sharded by the same output features. Beside a row-wise one, A is sharded by the same
input features: its partial output goes through B, and is summed together with the matrix's output. So adapters add no
communication.
"""
UNPLANNED = ParallelStyle("no row")
"""Style of a module without a plan row, in a model without tensor parallelism."""
GENERIC_PACKAGES = (
    "torch.",
    "megatfm.layers.linear",
    "megatfm.layers.lora",
    "megatfm.layers.norm",
    "megatfm.layers.dropout",
)
"""Packages of general-purpose modules: the plan of the enclosing module says how they are sharded."""


@dataclass(frozen=True)
class PlanRow:
    """A row of a plan, and the module whose class declares it. owner_path: the module's path, with * for indices."""

    owner_path: str
    owner_class: str
    pattern: str
    style: str

    def __str__(self) -> str:
        return f"{self.style!r} of {self.owner_class}"

    @property
    def modules(self) -> str:
        """Path of the modules that the row is for."""
        return ".".join(filter(None, (self.owner_path, self.pattern)))


def match_styles(
    model: nn.Module, rows_by_module: Mapping[nn.Module, list[PlanRow]] | None = None, *, complete: bool = True
) -> dict[str, ParallelStyle]:
    """Return module name → style, in the order of the model's modules.

    rows_by_module: the result of `match_rows`. Raises UsageError for an unknown style, for two styles of one module
    and, if `complete`, for a module with parameters or buffers that has no style.
    """
    rows_by_module = match_rows(model) if rows_by_module is None else rows_by_module
    styles: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        rows = rows_by_module.get(module, [])
        for row in rows[1:]:
            if row.style != rows[0].style:
                raise UsageError(f"{path} has two styles in plans, {rows[0]} and {row}: keep one of these rows")
        if rows:
            styles[path] = STYLES.get(rows[0].style)
        elif tensors := [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if complete and ".lora." in path:
                linear = path.partition(".lora.")[0]
                raise UsageError(
                    f"model.lora.targets: {linear} has the plan style {styles[linear].name!r}, which does not say how "
                    "to shard an adapter of it: leave it out of the targets, or set parallel.tp = 1"
                )
            if complete:
                raise UsageError(_explain_missing_row(model, path, tensors[0][0]))
            styles[path] = UNPLANNED
    return styles


def match_rows(model: nn.Module) -> dict[nn.Module, list[PlanRow]]:
    """Collect the plan rows that match each module."""
    rows_by_module: dict[nn.Module, list[PlanRow]] = {}
    for path, owner in model.named_modules():
        plan = getattr(type(owner), "tp_plan", ())
        inner_modules = [*owner.named_modules()] if plan else []
        for pattern, style in plan:
            row = PlanRow(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), type(owner).__name__, pattern, style)
            for inner, module in inner_modules:
                if matches_pattern(inner, pattern):
                    rows_by_module.setdefault(module, []).append(row)
    for module, rows in list(rows_by_module.items()):
        adapter = getattr(module, "lora", None)
        for key, style in zip(("a", "b", "dropout"), ADAPTER_STYLES.get(rows[0].style, ()), strict=False):
            if (submodule := getattr(adapter, key, None)) is not None:
                pattern = f"{rows[0].pattern}.lora.{key}".lstrip(".")
                rows_by_module[submodule] = [replace(rows[0], pattern=pattern, style=style)]
    return rows_by_module


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern, segment by segment.

    `*`, `?` and `[…]` match within a segment, `**` matches any number of segments, including none.
    """
    return _matches_segments(name.split(".") if name else [], pattern.split(".") if pattern else [])


def _matches_segments(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    first, *later_patterns = patterns
    if first == "**":
        return any(_matches_segments(names[i:], later_patterns) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _matches_segments(names[1:], later_patterns)


def _explain_missing_row(model: nn.Module, path: str, key: str) -> str:
    """Return an error message that shows the missing plan row.

    The row belongs to the module's class, or to the nearest enclosing class that is not general-purpose.
    """
    owner, inner = path, ""
    while owner and type(model.get_submodule(owner)).__module__.startswith(GENERIC_PACKAGES):
        owner, _, last = owner.rpartition(".")
        inner = f"{last}.{inner}" if inner else last
    name = type(model.get_submodule(owner)).__name__
    return (
        f"{f'{path}.{key}'.lstrip('.')} has no style, and several tensor-parallel ranks need one: give the class "
        f'{name} a row for it, tp_plan = (("{inner}", STYLE),), with one of: {", ".join(STYLES.names())}'
    )
