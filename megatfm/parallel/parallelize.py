"""Applies tensor, expert, context and data parallelism to a model, from the plans that its modules declare.

`tp_plan`: see `tp_plans`. `cp_plan`: see `cp_plans`. `dp_plan = "ring"`: the module compares all samples of a global
batch; samples of other data ranks come block by block around a ring.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.errors import UsageError
from megatfm.ops.torch_private import is_fake
from megatfm.parallel.collectives import TensorParallelGroup, all_gather_no_grad
from megatfm.parallel.context_parallel import P2PExchange, build_context_parallel
from megatfm.parallel.cp_plans import install_context_parallel
from megatfm.parallel.layout import ModelLayout, Shard, TensorLayout, replace_forward
from megatfm.parallel.mesh import DENSE_DATA_AXES, TENSOR, Mesh
from megatfm.parallel.styles import ParallelStyle
from megatfm.parallel.tp_plans import PlanRow, match_rows, match_styles

MAX_DIMS = 8
"""Upper bound of a parameter's number of dims."""


def parallelize(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, cp_method: str = "auto") -> ModelLayout:
    """Shard the model's parameters (still on the meta device), install the communication, and return the layout.

    Raises UsageError if a module has two styles, if it has none under tensor parallelism, or if the ranks do not divide
    a dim.
    """
    tp_size = mesh.size(TENSOR)
    tp = TensorParallelGroup(mesh.group(TENSOR), sequence_parallel) if tp_size > 1 else None
    rows_by_module = match_rows(model)
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
    """Shards of this rank that replace a model's parameters and buffers."""

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


def _format_table(
    plan_rows: Mapping[str, list[PlanRow]],
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
    lines = [f"mesh  {mesh.describe()}", "", f"{'modules':<{width}}{'style':<26}{'parameters':<40}partial gradient"]
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


class DataRing:
    """Rotates blocks of samples around the ranks that divide a global batch, for losses that compare all of them;
    implements `megatfm.ops.contrastive.Ring`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size, self._rank = group, group.size(), group.rank()

    def lengths(self, n: int, device: torch.device) -> Sequence[int]:
        """Return the sizes of the blocks that this rank holds after 0, 1, … rotations. n: its own. A collective.

        Fake tensors have no values: all blocks are taken for as large as this rank's.
        """
        gathered = all_gather_no_grad(torch.full((1,), n, device=device), self._group).flatten()
        if is_fake(gathered):
            gathered.cpu()  # a trace counts this host wait
            return [n] * self.size
        lengths_by_rank = gathered.tolist()
        return [lengths_by_rank[(self._rank - step) % self.size] for step in range(self.size)]

    def shift(self, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        """Send tensors [n, …] to the next rank; returns the previous rank's [length, …]."""
        after, before = (self._rank + 1) % self.size, (self._rank - 1) % self.size
        received = [tensor.new_empty(length, *tensor.shape[1:]) for tensor in tensors]
        # Empty tensors are not sent: some backends refuse them.
        sends = [(after, tensor) for tensor in tensors if tensor.numel()]
        P2PExchange(self._group, sends, [(before, tensor) for tensor in received if tensor.numel()]).wait()
        return received


def install_data_ring(model: nn.Module, mesh: Mesh) -> None:
    """Pass a `DataRing` to each module with `dp_plan = "ring"`, so that it sees the samples of all data ranks.

    Context-parallel ranks have different samples of their rows, and are in the ring, too.
    """
    modules = [module for module in model.modules() if getattr(module, "dp_plan", None) == "ring"]
    if modules and mesh.gradient_ranks > 1:
        ring = DataRing(mesh.flat_group(DENSE_DATA_AXES.all))
        for module in modules:
            replace_forward(module, partial(module.forward, ring=ring))
