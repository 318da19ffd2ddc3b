"""Activation checkpointing of blocks (Chen et al. 2016): the backward pass recomputes activations that weren't saved.

Dropout is keyed, so the recomputation drops the same elements, and gradients are equal to the bit.

"none" saves all activations. "full" saves only a block's input. "selective" also saves the outputs of matmuls with
weights, of fused attention, of tensor-parallel reductions and of all-to-alls, so that only cheap operations are
repeated (and unfused attention scores; Korthikanti et al. 2022, section 5). It saves only the sum of matmuls that are
summed over ranks. A size such as "2 GB" saves all activations of as many blocks as fit. With a share such as "50 %",
torch.compile solves a knapsack problem for each block.

torch can trace the recomputation of a block that is compiled whole. A block compiled in parts, around modules that stay
eager, is recomputed from outside ("full"), or each part by itself ("selective").
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.transfer import HostReads
from megatfm.parallel.collectives import is_partial_product, use_functional_collectives
from megatfm.parallel.layout import replace_forward

UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
SAVED_OPS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _collectives.all_reduce.default,
    _collectives.reduce_scatter_tensor.default,
    _collectives.all_to_all_single.default,
}
SAVED_OP_NAMES = {
    "torch_attn::_varlen_attn", "flex_attention", "megatfm::grouped_gemm", "megatfm_imaginary::attention",
}  # fmt: skip
"""Names of saved operators that exist only after their module is imported; the last one stands for all fused attention
on an imaginary GPU."""

Forward = Callable[..., Any]


def recompute(stage: nn.Module, blocks: Iterable[nn.Module], mode: str, *, compiled: bool = False) -> None:
    """Apply a recompute mode to the blocks of a stage. Call it before they are compiled or sharded."""
    if compiled:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = parse_share(mode)
    if mode.endswith("%"):
        return
    if compiled and mode != "none":
        from torch._dynamo import config

        # Blocks cache values for later layers, such as masks. Recomputation needn't repeat this side effect.
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    budget = MemoryBudget(stage, parse_bytes(mode)) if mode not in ("none", "full", "selective") else None
    for block in blocks:
        if budget:
            replace_forward(block, partial(budget.forward, block, block.forward))
        elif mode != "none":
            replace_forward(block, partial(_run_checkpointed, block, block.forward, mode))


def recompute_parts(block: nn.Module, eager: Collection[nn.Module]) -> None:
    """Apply "selective" to the parts of a block that is compiled around some `eager` modules. Call it before that.

    Each part also saves its input. Of eager modules, experts are parts; attention saves what its kernels save.
    """
    for part in _iter_parts(block, eager):
        replace_forward(part, _make_part_forward(part, part.forward))
    for module in eager:
        if not getattr(module, "is_compiled", True):
            replace_forward(module, partial(_run_checkpointed, module, module.forward, "selective"))


def _iter_parts(module: nn.Module, eager: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest submodules that contain no eager module."""
    for child in module.children():
        if eager_inside := [inner for inner in child.modules() if inner in eager]:
            yield from () if child in eager_inside else _iter_parts(child, eager)
        else:
            yield child


def _make_part_forward(part: nn.Module, forward: Forward) -> Forward:
    """Make the checkpointed forward of a part. A function, as torch compiles each `functools.partial` anew."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # called by an eager module, which is itself recomputed
            return forward(*args, **kwargs)
        return _run_checkpointed(part, forward, "selective", *args, **kwargs)

    return run


def recompute_from_outside(block: nn.Module) -> None:
    """Apply "full" to a block that is compiled in parts. Call it after that."""
    assert block._compiled_call_impl is not None
    block._compiled_call_impl = partial(_checkpoint_compiled_call, block, block._compiled_call_impl)


def _checkpoint_compiled_call(block: nn.Module, call: Forward, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a compiled call. Its recomputation finds the values that layers share as the pass found them, so that
    the same compiled code runs, with the same saved tensors in the same order."""
    if not (block.training and torch.is_grad_enabled()):
        return call(*args, **kwargs)
    args_before_pass = [fork_cache(x) for x in args]
    passes = chain([lambda: args], repeat(lambda: [fork_cache(x) for x in args_before_pass]))
    return checkpoint(
        lambda: call(*next(passes)(), **kwargs),
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(_make_eager_contexts, None),
    )


def fork_cache(value: Any) -> Any:
    """Return metadata with a cache of its own; other values as they are."""
    return value.fork_cache() if isinstance(value, SequenceMetadata) else value


def parse_share(text: str) -> float:
    """Parse "50 %" to 0.5; other modes give 1."""
    return int(text[:-1]) / 100 if text.endswith("%") else 1.0


def parse_bytes(text: str) -> int:
    """Parse "2 GB" or "500MB" to bytes."""
    unit = text[-2:]
    return int(float(text[:-2]) * UNITS[unit])


def _run_checkpointed(block: nn.Module, forward: Forward, mode: str, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_policy)
    if not torch.compiler.is_compiling():
        options["context_fn"] = partial(_make_eager_contexts, options.get("context_fn"))
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _make_eager_contexts(
    make_selective: Callable[[], Any] | None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of forward pass and recomputation, which repeats no read of the host. Selective ones have
    functional collectives, whose results can be saved."""
    first, again = HostReads().make_contexts()
    if make_selective is None:
        return first, again
    forward, recomputation = make_selective()
    return (
        _enter(first, use_functional_collectives(), forward),
        _enter(again, use_functional_collectives(), _SkipPartialProducts(), recomputation),
    )


@contextmanager
def _enter(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class _SkipPartialProducts(TorchDispatchMode):
    """In a recomputation, gives uninitialised memory, which nothing reads, for a product whose sum was saved."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is _aten.mm.default and is_partial_product():
            return args[0].new_empty(args[0].shape[0], args[1].shape[1])
        return operator(*args, **(kwargs or {}))


def _save_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator in SAVED_OPS or _get_operator_name(operator) in SAVED_OP_NAMES
    if not is_saved or (operator is _aten.mm.default and is_partial_product()):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _get_operator_name(operator: Any) -> str:
    """Return the name of an operator without its overload."""
    return str(operator._schema.name if hasattr(operator, "_schema") else operator)


class MemoryBudget:
    """Saves all activations of the first blocks, up to `limit` bytes in a forward pass, and recomputes later blocks.

    The first block of each kind and input shape is measured, and saves its activations regardless of the limit. Ranks
    of a tensor-parallel group have the same shapes, so they decide alike. A pipeline holds several forward passes, each
    with this limit.
    """

    def __init__(self, stage: nn.Module, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._sizes: dict[Any, int] = {}
        self._keys: dict[nn.Module, Any] = {}
        stage.register_forward_pre_hook(lambda *_: setattr(self, "used", 0))

    def forward(self, block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a block; in training, save its activations if they fit the budget, else checkpoint it."""
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if block not in self._keys:
            self._keys[block] = make_memory_key(block)
        key = self._keys[block], _get_shapes(args), _get_shapes(kwargs.values())
        if key not in self._sizes:
            output, self._sizes[key] = measure_saved_bytes(block, partial(forward, *args, **kwargs))
            self.used += self._sizes[key]
            return output
        if self.used + self._sizes[key] > self.limit:
            return _run_checkpointed(block, forward, "full", *args, **kwargs)
        self.used += self._sizes[key]
        return forward(*args, **kwargs)


def make_memory_key(block: nn.Module) -> Any:
    """Return a hashable key, equal for blocks with equal activation memory: modules, patterns and weight shapes."""
    modules = tuple(
        (path, type(module), repr(getattr(module, "pattern", None))) for path, module in block.named_modules()
    )
    return modules, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def measure_saved_bytes(block: nn.Module, forward: Forward) -> tuple[Any, int]:
    """Return the output of `forward()`, and the bytes that it saves for the backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return output, sum(storages.values())


def _get_shapes(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value.shape) if isinstance(value, Tensor) else None for value in values)
