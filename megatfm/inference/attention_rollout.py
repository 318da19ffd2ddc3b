"""Attention rollout: how much each token of the input reaches each token of the output (Abnar & Zuidema 2020)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import DotProductAttention

# B batch, N heads, T tokens


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record each layer's attention [B, T, T], the mean over its heads, of a forward pass inside the block.

    The layer's own kernel computes it: with the identity as values it returns its weights. Raises UsageError in the
    pass for a layer that doesn't attend from all tokens to all.
    """
    maps: list[Tensor] = []

    def record(core: DotProductAttention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        q_BNTH, k_BKSH, v_BKSH, *others = args
        n_tokens = k_BKSH.shape[-2]
        if q_BNTH.shape[-2] != n_tokens or v_BKSH.shape[-2] != n_tokens or q_BNTH.shape[0] != v_BKSH.shape[0]:
            raise UsageError(
                f"attention rollout needs layers in which all tokens of an image meet: {core.pattern_name} has "
                f"{q_BNTH.shape[-2]} queries and {n_tokens} keys"
            )
        identity = torch.eye(n_tokens, dtype=v_BKSH.dtype, device=v_BKSH.device)
        values = identity.expand(*v_BKSH.shape[:2], -1, -1).contiguous()
        weights_BNTT = core.forward(q_BNTH, k_BKSH, values, *others, **options)
        maps.append(weights_BNTT.to(torch.promote_types(weights_BNTT.dtype, torch.float32)).mean(1))

    cores = [module for module in model.modules() if isinstance(module, DotProductAttention)]
    hooks = [core.register_forward_pre_hook(record, with_kwargs=True) for core in cores]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def rollout(maps: list[Tensor]) -> Tensor:
    """Return [B, T, T], from tokens of the output to those of the input: the product over layers of (A + I) / 2, each
    row scaled to the sum 1. maps: attention [B, T, T] of each layer, the first one first."""
    identity = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    reached_BTT = identity.expand_as(maps[0])
    for attention_BTT in maps:
        mixed_BTT = (attention_BTT + identity) / 2
        reached_BTT = mixed_BTT / mixed_BTT.sum(-1, keepdim=True) @ reached_BTT
    return reached_BTT
