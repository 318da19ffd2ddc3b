"""Queries that see none of some keys, as documents have it on a ring of ranks."""

import torch

from megatfm.ops.attention import Variant
from megatfm.ops.attention.blocks import backward, forward
from megatfm.ops.attention.tiles import How


def test_queries_that_see_no_key_get_zeros_and_give_no_gradient() -> None:
    random = torch.Generator().manual_seed(0)
    q, g = (torch.randn(2, 4, 8, 16, generator=random) for _ in range(2))
    k, v = (torch.randn(2, 2, 8, 16, generator=random) for _ in range(2))
    how = How.of([], 8, 16, Variant(), zero=7)
    out, lse = forward(q, k, v, None, how)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((x == 0).all() for x in backward(g, q, k, v, out, lse, None, how))
