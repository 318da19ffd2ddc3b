"""ZeRO stages 2 and 3 by FSDP2 (Zhao et al. 2023): blocks gather weights before they run, and reduce-scatter
gradients."""

import logging
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from megatfm.engines.interface import Precision
from megatfm.engines.native.zero import ZeroOptions
from megatfm.ops.transfer import align_all
from megatfm.parallel.layout import ModelLayout, iter_blocks
from megatfm.parallel.mesh import DENSE_DATA_AXES, DataAxes, Mesh

log = logging.getLogger("megatfm")

CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""Dispatch modes of torch's selective checkpointing, in the forward pass and in the recomputation."""


class FullySharded:
    """Sharded weights and gradients. Stage 3 gathers a block's weights for its forward and again for its backward pass;
    stage 2 keeps them in between."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        mesh: Mesh,
        *,
        zero_options: ZeroOptions,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._model, self._zero_options = model, zero_options
        self._needs_reduction = False  # True if `reduce` must reduce gradients, as no backward pass does
        self.sharded = True
        model.to(precision.param_dtype)
        _shard(model, layout, mesh, precision, zero_options)
        _prefetch(model, zero_options.get_prefetch_depth(device.type))
        if zero_options.use_group_allocator:
            _allocate_in_groups(model, mesh, device)
        model.to_empty(device=device)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._parameters = dict(model.named_parameters())
        self.zero_dims = {name: layout[name].fsdp_dim for name, p in self._parameters.items() if isinstance(p, DTensor)}
        self.local = {name: _get_local(p) for name, p in self._parameters.items()}

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self._model, FSDPModule)
        return self._model

    def start_microbatch(self, is_last: bool) -> None:
        self._root.set_requires_gradient_sync(is_last or self._zero_options.grad_accumulation == "sharded")
        if self._zero_options.zero == 2:
            self._root.set_reshard_after_backward(is_last)

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Defer the reduction of gradients to `reduce`. keep_unsharded: stage 3 keeps gathered weights until the end of
        the step, as the second part of a backward pass doesn't gather them again."""
        self._needs_reduction = True
        self._root.set_requires_gradient_sync(False)
        self._root.set_is_last_backward(False)
        if keep_unsharded:
            self._root.set_reshard_after_forward(False)
        self._root.set_reshard_after_backward(not keep_unsharded and self._zero_options.zero == 3)

    def reduce(self) -> None:
        """Reduce gradients of a pipeline; without one, the last backward pass did. Then copy gradients that FSDP2 left
        unaligned in its buffers to aligned memory."""
        if self._needs_reduction:
            reduce_gradients(self._model)
        self._needs_reduction = False
        gradients = self.gradients()
        for name, gradient in align_all(gradients).items():
            dtensor = self._parameters[name].grad
            if gradient is not gradients[name] and isinstance(dtensor, DTensor):
                dtensor._local_tensor = gradient  # as FSDP2 itself sets it

    def gradients(self) -> dict[str, Tensor]:
        return {name: _get_local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def wait_for_weights(self) -> None:
        """Do nothing: weights are gathered where they are used."""

    def sync_weights(self, frozen: bool = False) -> None:
        for module in self._modules:
            module.reshard()  # drop gathered weights, which are outdated


def reduce_gradients(module: nn.Module) -> None:
    """Make FSDP2 reduce a module's accumulated gradients, unscaled. A collective."""
    from torch.distributed.pipelining import PipelineStage

    stage: Any = SimpleNamespace(submod=module)  # all that torch reads of a stage here
    PipelineStage.perform_reduce_grad(stage, grad_scale_factor=1)


def _shard(model: nn.Module, layout: ModelLayout, mesh: Mesh, precision: Precision, zero_options: ZeroOptions) -> None:
    """Apply `fully_shard` to each block and to the rest of the model; within them, first to each module whose
    parameters have other data axes (experts)."""
    policy = (
        MixedPrecisionPolicy(precision.compute_dtype, zero_options.reduce_dtype or precision.param_dtype)
        if precision.is_mixed
        else MixedPrecisionPolicy(reduce_dtype=zero_options.reduce_dtype)
    )
    layouts = {p: layout[name] for name, p in model.named_parameters()}

    def shard_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(layouts[parameter].fsdp_dim)

    # None: reshard all but the root, whose weights are needed again at once.
    reshard = False if zero_options.zero == 2 else None
    experts = _find_expert_modules(model, layout)
    for module, data_axes in (*experts, *((m, DENSE_DATA_AXES) for m in (*iter_blocks(model), model))):
        fully_shard(
            module,
            mesh=mesh.fsdp_mesh(data_axes),
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=shard_dim,
        )
        if data_axes != DENSE_DATA_AXES:
            _hide_hooks(module)
    # Generation runs the encoder without the model's forward, which would gather the weights outside of blocks.
    if hasattr(model, "encode"):
        register_fsdp_forward_method(model, "encode")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global count, so gradients are summed, not averaged. FSDP2 would
            # otherwise use a pre-multiplied sum, which gloo doesn't have.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _prefetch(model: nn.Module, depth: int) -> None:
    """Prefetch the weights of the next `depth` blocks before a block runs, and of the previous ones before its backward
    pass. Only within a stack, whose blocks run in order: prefetched weights that aren't used would stay in memory.

    Experts, which other ranks gather, are prefetched likewise (as in torchtitan), those of the block itself first. On
    their own, they would be gathered when they run, since the host is not ahead of the device: it waits in each layer
    for the number of rows that they receive.
    """
    if not depth:
        return
    stacks: dict[str, list[list[FSDPModule]]] = {}  # of each stack, its blocks, each followed by its experts
    for path, module in model.named_modules():
        if path.rpartition(".")[0].rpartition(".")[2] == "layers" and isinstance(module, FSDPModule):
            parts = model.get_submodule(path).modules()
            groups: list[FSDPModule] = [part for part in parts if isinstance(part, FSDPModule)]
            stacks.setdefault(path.rpartition(".")[0], []).append(groups)
    for stack in stacks.values():
        for i, (block, *experts) in enumerate(stack):
            block.set_modules_to_forward_prefetch([*experts, *chain(*stack[i + 1 : i + 1 + depth])])
            block.set_modules_to_backward_prefetch([*experts, *chain(*stack[max(i - depth, 0) : i][::-1])])


def _allocate_in_groups(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Let process groups allocate communication buffers; logs a warning if their backend can't."""
    group = mesh.flat_group(DENSE_DATA_AXES.shard)
    if not group._get_backend(device).supports_tensor_alloc(device):
        log.warning(
            "parallel.comm_buffers = 'process_group': %s can't allocate memory for %s: torch allocates the buffers",
            dist.get_backend(group),
            device,
        )
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)


def _hide_hooks(module: nn.Module) -> None:
    """Hide FSDP2's hooks from selective checkpointing, which requires a recomputation to repeat the same operations:
    the second gather may have less to do. Other dispatch modes, such as the imaginary GPU, still see the hooks."""

    def hide(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return hook(*args, **kwargs)
            with _disable_current_modes() as modes:
                kept_modes = [mode for mode in modes if not isinstance(mode, CHECKPOINT_MODES)]
                for mode in kept_modes:
                    _push_mode(mode)
                try:
                    return hook(*args, **kwargs)
                finally:
                    for _ in kept_modes:
                        _pop_mode()

        return call

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hide(hook)


def _find_expert_modules(model: nn.Module, layout: ModelLayout) -> list[tuple[nn.Module, DataAxes]]:
    """Return the modules whose direct parameters have other data axes than dense ones, and these axes."""
    axes_by_path = {
        name.rpartition(".")[0]: layout[name].data_axes
        for name, _ in model.named_parameters()
        if layout[name].data_axes != DENSE_DATA_AXES
    }
    return [(model.get_submodule(path), data_axes) for path, data_axes in axes_by_path.items()]


def _get_local(tensor: Tensor) -> Tensor:
    """Return the local block of a DTensor, sharing its storage."""
    # `to_local`, an autograd function, and DTensor's `detach` are slow, and there are many tensors.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
