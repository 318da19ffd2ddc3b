"""Applies tensor, expert, context and data parallelism to a model, from the plans that its modules declare.

**`tp_plan`**: a class declares how its submodules are sharded, in rows of (name pattern relative to the module, "" for
itself; name of a style): `tp_plan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))`. Plans are
strings, so layers know nothing of parallelism. Patterns match names segment by segment: `*` within one segment, `**`
any number of segments. Rows that match nothing are allowed, for submodules that only some models have.

**`cp_plan`**: a class declares how it computes on a shard of a row. A module without a declaration is refused.
`full_rows_reason`, where a class has one, completes the error's "needs full rows, because …".

| `cp_plan` | The module | Under context parallelism |
|---|---|---|
| local | treats tokens independently, or consists of modules with their own plans | runs unchanged |
| attention | attends with queries to keys and values | fetches keys, uses a ring, or Ulysses |
| latent_attention | computes keys and values from narrower latents | the same, sending latents |
| global_queries | attends with the few queries that see all keys | sends the queries to the keys |
| pooling_attention | attends with one query to the tokens of each image | adds numerators and denominators over ranks |
| gather_kv | passes keys and values to attention that needs the full row | gathers them |
| span_boundary | looks up the tokens beside masked spans | fetches them |
| token_gather | looks up tokens of another row | fetches them |
| all_reduce | sums over tokens, in its submodule `all_reduce` | adds the sums over ranks |
| moe | has capacity, expert choice or balance by full rows | gathers the values that these depend on |
| soft_moe | computes slots as means over all tokens | adds means up, and divides slots among ranks |

**`dp_plan = "ring"`**: the module compares all samples of a global batch; samples of other data ranks come block by
block around a ring.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.parallel.collectives import TensorParallelGroup, copy_to_group, reduce_from_group
from megatfm.parallel.context_attention import (
    make_attention_forward,
    make_gather_kv_forward,
    make_latent_forward,
)
from megatfm.parallel.context_global_attention import make_global_forward, make_pooling_forward
from megatfm.parallel.context_parallel import (
    ContextParallel,
    build_context_parallel,
    make_span_boundary_forward,
    make_token_gather_forward,
)
from megatfm.parallel.data_ring import install_data_ring
from megatfm.parallel.expert_parallel import install_moe, install_soft_moe
from megatfm.parallel.layout import ModelLayout, Shard, TensorLayout, iter_blocks, replace_forward
from megatfm.parallel.mesh import TENSOR, Mesh
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
MAX_DIMS = 8
"""Upper bound of a parameter's number of dims."""
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


def parallelize(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, cp_method: str = "auto") -> ModelLayout:
    """Shard the model's parameters (still on the meta device), install the communication, and return the layout.

    Raises UsageError if a module has two styles, if it has none under tensor parallelism, or if the ranks do not divide
    a dim.
    """
    tp_size = mesh.size(TENSOR)
    tp = TensorParallelGroup(mesh.group(TENSOR), sequence_parallel) if tp_size > 1 else None
    rows_by_module = _match_rows(model)
    styles = match_styles(model, rows_by_module, complete=tp_size > 1)
    shards = _LocalTensors()
    modules = dict(model.named_modules())
    for path, planned in styles.items():
        module = modules[path]
        style = styles[path] = planned.resolve(module, tp_size, mesh.expert_tp)
        layouts: dict[str, TensorLayout] = {}
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{path}.{key}".lstrip(".")
            layouts[key] = layout = _make_tensor_layout(name, tensor, style, mesh, sequence_parallel)
            shards.replace(module, key, layout)
        if style.apply_expert_parallel:
            style.apply_expert_parallel(module, mesh, layouts)
        if tp and style.apply:
            style.apply(module, tp, layouts)
    cp = build_context_parallel(model, mesh, sequence_parallel=sequence_parallel, method=cp_method)
    if cp:
        install_context_parallel(model, cp)
    install_data_ring(model, mesh)
    layout_by_name = {layout.name: layout for layout, _ in shards.parameters.values()}
    plan_rows = {path: rows_by_module.get(modules[path], []) for path in styles}
    table = _format_table(plan_rows, styles, layout_by_name, mesh)
    return ModelLayout(layout_by_name, table, shards.buffers, shards.stored_buffers, cp)


class _LocalTensors:
    """The rank's shards, which replace a model's parameters and buffers."""

    def __init__(self) -> None:
        self.parameters: dict[Tensor, tuple[TensorLayout, Tensor]] = {}
        """Full parameter → layout under its first name, and the shard, which tied parameters share."""
        self.buffers: dict[str, TensorLayout] = {}
        self.stored_buffers: list[str] = []

    def replace(self, module: nn.Module, key: str, layout: TensorLayout) -> None:
        """Replace a module's tensor by an empty shard. Raises UsageError for tied ones that are sharded differently."""
        tensor = getattr(module, key)
        shard = torch.empty(layout.region[1], dtype=tensor.dtype, device=tensor.device)
        if not isinstance(tensor, nn.Parameter):
            self.buffers[layout.name] = layout
            if is_stored := key not in module._non_persistent_buffers_set:
                self.stored_buffers.append(layout.name)
            module.register_buffer(key, shard, persistent=is_stored)
            return
        if tensor not in self.parameters:
            self.parameters[tensor] = layout, nn.Parameter(shard, requires_grad=tensor.requires_grad)
        first_layout, shard = self.parameters[tensor]
        if not first_layout.has_same_shards(layout):
            raise UsageError(
                f"{layout.name} is tied to {first_layout.name}, but their plan rows shard different dims: "
                "give both the same style, or untie them"
            )
        setattr(module, key, shard)


def _make_tensor_layout(
    name: str, tensor: Tensor, style: ParallelStyle, mesh: Mesh, sequence_parallel: bool
) -> TensorLayout:
    """Return the layout of a module's tensor; one with too few dims, e.g. the bias of a row-wise matrix, is replicated.

    Raises UsageError if its gradient would then be partial, and the style declares it replicated.
    """
    shape, tp_size, key = tuple(tensor.shape), mesh.size(TENSOR), name.rpartition(".")[2]
    shards: tuple[Shard, ...] = ()
    partial_axes: tuple[str, ...] = ()
    if tp_size > 1:
        dim = style.shard_dim(key, len(shape))
        if dim is not None:
            shards = (Shard(TENSOR, dim, mesh.rank(TENSOR), tp_size, style.allows_uneven),)
        elif style.gradient == "partial" or (style.gradient == "partial_with_sp" and sequence_parallel):
            partial_axes = (TENSOR,)
        elif style.gradient == "replicated" and style.shard_dim(key, MAX_DIMS) is not None:
            raise UsageError(
                f"{name} has {len(shape)} dims, too few for the plan's style {style.name!r} to shard over parallel.tp "
                f"= {tp_size}: its gradient would be partial on each rank. Move it to a module with a style such as "
                "'replicated_partial_grad', which sums partial gradients"
            )
    layout = TensorLayout(name, shape, shards, partial_axes)
    return style.shard_experts(layout, mesh) if style.shard_experts else layout


@dataclass(frozen=True)
class _PlanRow:
    """A row of a plan, and the module whose class declares it. owner_path: the module's path, with * for indices."""

    owner_path: str
    owner_class: str
    pattern: str
    style: str

    def __str__(self) -> str:
        return f"{self.style!r} of {self.owner_class}"

    @property
    def modules(self) -> str:
        return ".".join(filter(None, (self.owner_path, self.pattern)))


def match_styles(
    model: nn.Module, rows_by_module: Mapping[nn.Module, list[_PlanRow]] | None = None, *, complete: bool = True
) -> dict[str, ParallelStyle]:
    """Return module name → style, in the order of the model's modules.

    rows_by_module: the result of `_match_rows`. Raises UsageError for an unknown style, for two styles of one module
    and, if `complete`, for a module with parameters or buffers that has no style.
    """
    rows_by_module = _match_rows(model) if rows_by_module is None else rows_by_module
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


def _match_rows(model: nn.Module) -> dict[nn.Module, list[_PlanRow]]:
    """Collect the plan rows that match each module."""
    rows_by_module: dict[nn.Module, list[_PlanRow]] = {}
    for path, owner in model.named_modules():
        plan = getattr(type(owner), "tp_plan", ())
        inner_modules = [*owner.named_modules()] if plan else []
        for pattern, style in plan:
            row = _PlanRow(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), type(owner).__name__, pattern, style)
            for inner, module in inner_modules:
                if matches_pattern(inner, pattern):
                    rows_by_module.setdefault(module, []).append(row)
    for module, rows in list(rows_by_module.items()):
        adapter = getattr(module, "lora", None)
        for key, style in zip(("a", "b", "dropout"), ADAPTER_STYLES.get(rows[0].style, ()), strict=False):
            if (part := getattr(adapter, key, None)) is not None:
                pattern = f"{rows[0].pattern}.lora.{key}".lstrip(".")
                rows_by_module[part] = [replace(rows[0], pattern=pattern, style=style)]
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


def _format_table(
    plan_rows: Mapping[str, list[_PlanRow]],
    styles: dict[str, ParallelStyle],
    layouts: dict[str, TensorLayout],
    mesh: Mesh,
) -> str:
    """Return the plan as a text table with the shapes that this rank holds (`plan.txt`). plan_rows: by module name."""
    rows: dict[tuple[str, ParallelStyle], list[str]] = {}
    for path, style in styles.items():
        name = plan_rows[path][0].modules if plan_rows[path] else path
        rows.setdefault((name, style), []).append(path)
    width = 2 + max(len(name) for name, _ in rows)
    lines = [
        f"mesh  {mesh.describe()}",
        "",
        f"{'modules':<{width}}{'style':<26}{'parameters':<40}partial gradient",
    ]
    layouts_by_module: dict[str, list[TensorLayout]] = {}
    for layout in layouts.values():
        layouts_by_module.setdefault(layout.name.rpartition(".")[0], []).append(layout)
    for (name, style), paths in rows.items():
        tensors = [p for path in paths for p in layouts_by_module.get(path, [])]
        if not (tensors or style.is_listed):
            continue
        shapes = dict.fromkeys(
            f"{list(p.shape)} → {list(p.region[1])}" if p.shards else str(list(p.shape)) for p in tensors
        )
        partial = ", ".join(dict.fromkeys(axis for p in tensors for axis in p.partial_axes))
        shown_shapes = f"{f'{len(tensors)} × ' if tensors else ''}{', '.join(shapes):<36}"
        lines.append(f"{name:<{width}}{style.name:<26}{shown_shapes}{partial}".rstrip())
    return "\n".join(lines) + "\n"


CP_FORWARDS: dict[str, Callable[[nn.Module, ContextParallel], Callable[..., Any]]] = {
    "attention": make_attention_forward,
    "latent_attention": make_latent_forward,
    "global_queries": make_global_forward,
    "pooling_attention": make_pooling_forward,
    "gather_kv": make_gather_kv_forward,
    "span_boundary": make_span_boundary_forward,
    "token_gather": make_token_gather_forward,
}
"""`cp_plan` → function that makes a module's new `forward`."""


def install_context_parallel(model: nn.Module, cp: ContextParallel) -> None:
    """Install context parallelism by each module's `cp_plan`. Raises UsageError for a module without one."""
    check_context_plans(model)
    for module in model.modules():
        plan = getattr(module, "cp_plan", None)
        if plan in CP_FORWARDS:
            replace_forward(module, CP_FORWARDS[plan](module, cp))
        elif plan == "all_reduce":
            replace_forward(module.get_submodule("all_reduce"), partial(_all_reduce_both_passes, group=cp.group))
        elif plan == "moe":
            install_moe(module, cp)
        elif plan == "soft_moe":
            install_soft_moe(module, cp)


def disable_compile_of_attention(block: nn.Module) -> None:
    """Exclude attention from a compiled block, because its communication and its blocks of keys depend on the batch.

    Modules with `attends_in_chunks` are excluded, too.
    """
    for module in block.modules():
        if getattr(module, "cp_plan", None) in CP_FORWARDS or getattr(module, "attends_in_chunks", False):
            replace_forward(module, torch.compiler.disable(module.forward))


def _all_reduce_both_passes(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks in both passes: each rank uses the sum in a different way."""
    return copy_to_group(reduce_from_group(x, group), group)


def check_context_plans(model: nn.Module) -> None:
    """Raise a UsageError for the first module without a `cp_plan`, or without the submodule that its plan needs."""
    for path, module in model.named_modules():
        if getattr(module, "cp_plan", None) == "all_reduce" and not hasattr(module, "all_reduce"):
            raise UsageError(
                f"parallel.cp > 1: {type(module).__name__} ({path}) has cp_plan = 'all_reduce' and no submodule "
                "`all_reduce` that its sums over tokens go through: add `self.all_reduce = nn.Identity()`"
            )
    for path, module in _iter_modules_that_need_cp_plan(model):
        if getattr(module, "cp_plan", None) is None:
            name = f"{type(module).__name__}{f' ({path})' if path else ''}"
            reason = getattr(module, "full_rows_reason", None)
            problem = (
                f"needs full rows, because {reason}"
                if reason
                else "needs full rows, or does not declare how it computes on a shard of them (`cp_plan`)"
            )
            raise UsageError(
                f"parallel.cp > 1: {name} {problem}: use parallel.cp = 1 with dp_shard, tp or pp, or another part"
            )


def _iter_modules_that_need_cp_plan(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of those whose class must declare a `cp_plan`.

    These are the model, its direct submodules and, in each block, attention, its core and the feed-forward network.
    """
    yield "", model
    in_blocks = {module for block in iter_blocks(model) for module in block.modules()}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if module in in_blocks:
            if name in ("attn", "cross", "ffn", "core", "global_core"):
                yield path, module
        elif ("." not in path and path and not type(module).__module__.startswith("torch.")) or (
            path.startswith("future.") and path.count(".") == 1
        ):
            yield path, module
