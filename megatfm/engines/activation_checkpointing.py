"""Activation checkpointing of blocks (Chen et al. 2016): activations that the forward pass doesn't keep are computed
again in the backward pass. Dropout is keyed, so the second pass drops what the first did, and gradients are the same to
the bit.

"none" keeps everything. "full" keeps a block's input. "selective" also keeps the outputs of weights' products, of fused
attention and of sums over tensor-parallel ranks, so that only cheap operations are repeated (and, where attention is
written out, its scores; Korthikanti et al. 2022, section 5). A size such as "2 GB" keeps all of as many blocks as fit.
A share such as "50 %" leaves the choice to the compiler, which solves a knapsack of sizes and costs for each block.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatfm.parallel.collectives import use_functional_collectives
from megatfm.parallel.layout import replace_forward

UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

_aten, _sums = torch.ops.aten, torch.ops._c10d_functional
SAVED_OPS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _sums.all_reduce.default,
    _sums.reduce_scatter_tensor.default,
}
SAVED_OP_NAMES = {"torch_attn::_varlen_attn", "flex_attention"}
"""Operators that exist only once their modules are imported."""

Forward = Callable[..., Any]


def recompute(stage: nn.Module, blocks: Iterable[nn.Module], mode: str, *, compiled: bool = False) -> None:
    """Let a stage's blocks run that way. To be called before they are compiled or sharded."""
    if compiled:
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = share_of(mode)
    if mode.endswith("%"):
        return
    if compiled and mode != "none":
        from torch._dynamo import config

        # A block caches values for later layers, such as a mask, in the forward pass; that's enough.
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    budget = MemoryBudget(stage, size_of(mode)) if mode not in ("none", "full", "selective") else None
    for block in blocks:
        if budget:
            replace_forward(block, partial(budget.forward, block, block.forward))
        elif mode != "none":
            replace_forward(block, partial(_checkpointed, block, block.forward, mode))


def share_of(text: str) -> float:
    """0.5 in "50 %"; all, where another way says what is kept."""
    return int(text[:-1]) / 100 if text.endswith("%") else 1.0


def size_of(text: str) -> int:
    """Bytes in "2 GB" or "500MB"."""
    unit = text[-2:]
    return int(float(text[:-2]) * UNITS[unit])


def _checkpointed(block: nn.Module, forward: Forward, mode: str, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    options: dict[str, Any] = {}
    if mode == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        options["context_fn"] = contexts if torch.compiler.is_compiling() else partial(_keepable, contexts)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _keepable(
    contexts: Callable[[], Any],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the two passes, in which collectives are operators with results."""
    first, second = contexts()
    return _within(first), _within(second)


@contextmanager
def _within(context: AbstractContextManager[None]) -> Iterator[None]:
    with use_functional_collectives(), context:
        yield


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator in SAVED_OPS or _name(operator) in SAVED_OP_NAMES
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    """Without its overload; higher-order operators have none."""
    return str(operator._schema.name if hasattr(operator, "_schema") else operator)


class MemoryBudget:
    """Keeps all activations of a forward pass's blocks while they fit into `limit` bytes, and recomputes later blocks.

    The activations of a block are measured when the first block of its kind with inputs of these shapes runs, which
    keeps all of them regardless of the limit; ranks of one tensor-parallel group have the same shapes, so they decide
    alike. Bytes are those of one forward pass: a pipeline holds several.
    """

    def __init__(self, stage: nn.Module, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._sizes: dict[Any, int] = {}
        self._kinds: dict[nn.Module, Any] = {}
        stage.register_forward_pre_hook(lambda *_: self._start())

    def _start(self) -> None:
        self.used = 0

    def forward(self, block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output, kept or recomputed in training, just computed where nothing needs gradients."""
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if block not in self._kinds:
            self._kinds[block] = kind_of(block)
        key = self._kinds[block], _shapes(args), _shapes(kwargs.values())
        if key not in self._sizes:
            output, self._sizes[key] = measured(block, partial(forward, *args, **kwargs))
            self.used += self._sizes[key]
            return output
        if self.used + self._sizes[key] > self.limit:
            return _checkpointed(block, forward, "full", *args, **kwargs)
        self.used += self._sizes[key]
        return forward(*args, **kwargs)


def kind_of(block: nn.Module) -> Any:
    """Return what identifies blocks that keep equally much: parts, patterns of attention, and the shapes of weights."""
    parts = tuple(
        (path, type(part), repr(getattr(part, "pattern", None))) for path, part in block.named_modules()
    )
    return parts, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def measured(block: nn.Module, forward: Forward) -> tuple[Any, int]:
    """Return the output of `forward()`, and the bytes that it saves for the backward pass beside the weights."""
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


def _shapes(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value.shape) if isinstance(value, Tensor) else None for value in values)
