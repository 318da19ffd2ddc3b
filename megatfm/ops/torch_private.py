"""Private functions of torch, and names of its operators, collected in one file because a newer torch may change them.

`tests/unit/ops/test_torch_private.py` checks the behaviour that we rely on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

Marked = TypeVar("Marked", bound=Callable[..., object])

flash_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout, is_causal, attn_mask=, scale=) → output and log-sum-exp [B, N, T]."""

flash_on_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(gradient, q, k, v, output, log-sum-exp, dropout, is_causal, attn_mask=, scale=) → gradients of q, k and v."""

flash_on_cuda: Any = torch.ops.aten._scaled_dot_product_flash_attention
"""(q, k, v, dropout, is_causal, scale=) → output, log-sum-exp [B, N, T], and what dropout and jagged rows need."""

flash_on_cuda_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
"""(gradient, q, k, v, output, log-sum-exp, None, None, T, S, dropout, is_causal, seed, offset, scale=) → gradients of
q, k and v."""

bag_weight_gradients: Any = torch.ops.aten._embedding_bag_per_sample_weights_backward
"""(gradient, rows, indices, starts, bag of each index, 0 for sums) → each index's dot product of row and gradient."""

foreach_norm: Any = torch._foreach_norm
"""(tensors, order, dtype) → the norm of each."""

scaled_mm: Any = torch._scaled_mm
"""Scaled fp8 matrix multiplication."""


def weak_dictionary() -> Any:
    """Return a dictionary with weak keys, compared by identity."""
    return WeakIdKeyDictionary()


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a FakeTensor, with a shape but no data."""
    return isinstance(tensor, FakeTensor)


def keeps_graph() -> bool:
    """Return whether the running backward pass keeps the graph (`retain_graph=True`)."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def constant_when_compiled(function: Marked) -> Marked:
    """Mark a function whose result torch.compile treats as a constant: it runs once, during compilation.

    Same effect as `torch.compiler.assume_constant_result`, which imports torch._dynamo to set this attribute. The
    import takes a second, and most commands never compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def has_amx_tiles() -> bool:
    """Return whether the CPU has AMX tiles, which multiply bfloat16 matrices."""
    is_supported: bool = torch.cpu._is_amx_tile_supported()
    return is_supported


KERNEL_FREE = {
    "view", "_unsafe_view", "view_as", "t", "transpose", "expand", "detach", "detach_", "alias", "slice", "select",
    "split", "split_with_sizes", "chunk", "as_strided", "unsqueeze", "squeeze", "permute", "movedim", "unfold",
    "diagonal", "unbind", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "device", "promote_types", "is_same_size", "wait_tensor",
}  # fmt: skip
"""Names of operators that launch no kernel: views, uninitialised memory, and questions about a tensor."""
