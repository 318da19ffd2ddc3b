"""Names of torch that its documentation does not promise, gathered where a newer torch would miss them.

`tests/unit/ops/test_torch_private.py` holds what is relied on of each.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

flash_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout, is_causal, attn_mask=, scale=) → output and logarithm of the sums [B, N, T]."""

flash_on_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(gradient, q, k, v, output, logarithm, dropout, is_causal, attn_mask=, scale=) → gradients of q, k and v."""

foreach_norm: Any = torch._foreach_norm
"""(tensors, order, dtype) → the norm of each."""

scaled_mm: Any = torch._scaled_mm
"""Products of 8-bit floats times a scale."""


def weak_dictionary() -> Any:
    """A dictionary by tensors' identity, which does not keep them."""
    return WeakIdKeyDictionary()


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers, as where torch traces."""
    return isinstance(tensor, FakeTensor)


def keeps_graph() -> bool:
    """Whether the backward pass that is under way keeps the graph for another (`retain_graph`)."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def has_amx_tiles() -> bool:
    """Whether the CPU has matrix units that multiply bfloat16."""
    is_supported: bool = torch.cpu._is_amx_tile_supported()
    return is_supported
