"""Attention rollout: how much each token of the input reaches each token of the output (Abnar & Zuidema 2020)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import DotProductAttention

# B batch, N heads, T tokens


@contextmanager
def record_attention(model: Any) -> Iterator[list[Tensor]]:
    """Record the mean attention over heads [B, T, T] of each layer, for a forward pass inside the block.

    The layer's kernel computes it: with the identity as values, it returns its weights. Raises UsageError unless all
    layers are dot-product attention over the same tokens.
    """
    config = model.config
    cores = [module for module in model.modules() if isinstance(module, DotProductAttention)]
    if config.family != "encoder" or len(cores) != config.n_layers:
        raise UsageError(
            "attention rollout multiplies dot-product attention of layers that have the same tokens: model.family = "
            f"{config.family!r} with model.attention.name = {config.attention.name!r} has other layers"
        )
    maps: list[Tensor] = []

    def record(core: DotProductAttention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        q_BNTH, k_BKTH, v_BKTH, *arguments = args
        identity = torch.eye(v_BKTH.shape[-2], dtype=v_BKTH.dtype, device=v_BKTH.device)
        values = identity.expand(*v_BKTH.shape[:2], -1, -1).contiguous()
        weights_BNTT = core.forward(q_BNTH, k_BKTH, values, *arguments, **options)
        maps.append(weights_BNTT.to(torch.promote_types(weights_BNTT.dtype, torch.float32)).mean(1))

    hooks = [core.register_forward_pre_hook(record, with_kwargs=True) for core in cores]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def compute_rollout(maps: list[Tensor]) -> Tensor:
    """Return the rollout [B, output token, input token]: the product over layers of (A + I) / 2, rows scaled to sum 1.

    maps: attention [B, T, T] of each layer, first layer first.
    """
    identity = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    reached_BTT = identity.expand_as(maps[0])
    for attention_BTT in maps:
        mixed_BTT = (attention_BTT + identity) / 2
        reached_BTT = mixed_BTT / mixed_BTT.sum(-1, keepdim=True) @ reached_BTT
    return reached_BTT
