"""Queries that see none of some keys, as documents have it on a ring of ranks."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.attention.patterns.pattern import BlockBounds
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.block_sparse import backward, forward
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.attention.tile import BlockAttentionPlan


def test_queries_that_see_no_key_get_zeros_and_give_no_gradient() -> None:
    random = torch.Generator().manual_seed(0)
    q, g = (torch.randn(2, 4, 8, 16, generator=random) for _ in range(2))
    k, v = (torch.randn(2, 2, 8, 16, generator=random) for _ in range(2))
    how = BlockAttentionPlan.build([], 8, 16, AttentionOptions(), zero_distance=7)
    out, lse = forward(q, k, v, None, how)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((x == 0).all() for x in backward(g, q, k, v, out, lse, None, how))


@dataclass(frozen=True)
class FirstQueriesOnly(AttentionPattern):
    """The first queries see all keys, the others none, as a plugin may have it."""

    count: int

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (q < self.count) & (k >= 0)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (q.first < self.count) & (k.first >= 0)

    def full_block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (q.last < self.count) & (k.first >= 0)


def test_blocks_that_see_all_beside_blocks_that_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "SIZE", 8)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 32, 4, generator=random).requires_grad_() for _ in range(3))
    seen = PatternMask(FirstQueriesOnly(8), SequenceMetadata(torch.arange(32).expand(2, -1)))
    out = block_sparse.block_sparse_attention(q, k, v, seen, None, AttentionOptions(), None)
    assert (out[:, :, 8:] == 0).all()
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :8], k, v)
    torch.testing.assert_close(out[:, :, :8], expected)
    for actual, plain in zip(
        *(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(actual, plain)
