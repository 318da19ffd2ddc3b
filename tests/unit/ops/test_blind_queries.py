"""A query that sees no key gets 0, and nothing goes back from it, whichever kernel computes it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.ops.attention.block_sparse import block_sparse_attention
from megatfm.ops.attention.flex import flex
from megatfm.ops.attention.mask import DenseMask
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.attention.sdpa import sdpa_attention

B, N, T, S, H = 2, 4, 10, 12, 16
BLIND = 3, 7
CASES: dict[str, tuple[Any, str, bool]] = {
    "written out": (attention_reference, "", False),
    "written out, a bias": (attention_reference, "pairs", False),
    "written out, dropout": (attention_reference, "", True),
    "blocks": (block_sparse_attention, "", False),
    "blocks, a bias": (block_sparse_attention, "distances", False),
    "blocks, dropout": (block_sparse_attention, "", True),
    "fused": (sdpa_attention, "", False),
    "fused, a bias": (sdpa_attention, "pairs", False),
    "fused, a bias by distance": (sdpa_attention, "distances", False),
    "flex": (flex, "", False),
    "flex, dropout": (flex, "", True),
}


def one_by_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """Sums over the keys that are seen, of which there may be none."""
    out = torch.zeros(B, N, T, H, dtype=q.dtype)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                weights = [(q[b, n, t] @ k[b, n // 2, s] / H**0.5 + bias[n, t, s]).exp() for s in range(S)]
                keys = [s for s in range(S) if mask[b, t, s]]
                total = sum(float(weights[s]) for s in keys)
                for s in keys:
                    out[b, n, t] += weights[s] / total * v[b, n // 2, s]
    return out


HALF = [pytest.param(name, torch.bfloat16, 2e-2, id=f"{name}, bf16") for name in CASES if "flex" not in name]
FULL = [pytest.param(name, torch.float32, 1e-5, id=name) for name in CASES]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "dtype", "bound"), FULL + HALF)
def test_blind_queries(name: str, dtype: torch.dtype, bound: float) -> None:
    run, form, drops = CASES[name]
    random = torch.Generator().manual_seed(0)
    shapes = (B, N, T, H), (B, 2, S, H), (B, 2, S, H)
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    mask = torch.rand(B, T, S, generator=random) < 0.5
    mask[:, :, 0] = True
    mask[0, BLIND] = False
    by_distance = torch.randn(N, T + S - 1, generator=random).to(dtype)
    of_pairs = by_distance.unfold(-1, S, 1).flip(-2)
    bias = {"": None, "pairs": of_pairs[None], "distances": by_distance}[form]
    rng_keys = torch.arange(B * N * T).view(B, N, T) if drops else None
    inputs = (
        [q, k, v] if run is flex else [x.requires_grad_() for x in (q, k, v)]
    )  # flex has no gradients on a CPU
    out = run(
        *inputs,
        DenseMask(dense=mask[:, None], block_size=4),
        bias,
        AttentionOptions(dropout=0.25 if drops else 0.0),
        rng_keys,
    )
    assert (out[0, :, BLIND] == 0).all()
    assert out.isfinite().all()
    if not drops:
        added = torch.zeros(N, T, S) if bias is None else of_pairs.float()
        expected = one_by_one(*(x.detach().float() for x in (q, k, v)), mask, added)
        torch.testing.assert_close(out.float(), expected, rtol=bound, atol=bound)
    if run is not flex:
        for gradient in torch.autograd.grad(out[0, :, BLIND].float().sum(), inputs):
            assert (gradient == 0).all()
