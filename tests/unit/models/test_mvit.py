"""MViTv2 against the paper written out for one image, values and every gradient; it equals timm's (docs/LOG.md)."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import find_config, load_config
from megatfm.models import build
from tests.support.models import MVIT_MODEL
from tests.support.swin import batch_of, images_of, make_ours

COUNTS = {
    "mvitv2-t": 24_173_320,
    "mvitv2-s": 34_870_216,
    "mvitv2-b": 51_472_744,
    "mvitv2-l": 217_992_952,
}
"""With 1,000 classes, as timm counts them."""
Weights = Mapping[str, Tensor]


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_counts(preset: str) -> None:
    with torch.device("meta"):
        model = build(load_config(preset).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[preset]
    header = (find_config(preset)[0]).read_text(encoding="utf-8").partition("\nname")[0]
    assert f"{COUNTS[preset]:,} parameters" in header


def linear(x: Tensor, p: Weights, name: str) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def norm(x: Tensor, p: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], 1e-6)


def pooled(x_HWD: Tensor, heads: int, p: Weights, name: str, stride: int) -> Tensor:
    """One head after the other, [N, h, w, C]."""
    result = []
    for head in x_HWD.chunk(heads, -1):
        kernel = p[f"{name}.weight"].view(head.shape[-1], 1, 3, 3)
        y = F.conv2d(head.permute(2, 0, 1)[None], kernel, stride=stride, padding=1, groups=head.shape[-1])
        result.append(norm(y[0].permute(1, 2, 0), p, f"{name}.norm"))
    return torch.stack(result)


def offset(query: int, key: int, queries: int, keys: int) -> int:
    """Number of an offset along an axis: places of the shorter side are spread over the longer one."""
    along_q, along_k = query * max(keys / queries, 1), key * max(queries / keys, 1)
    return int(along_q - along_k + (keys - 1) * max(queries / keys, 1))


def table(rows: Tensor, queries: int, keys: int) -> Tensor:
    expected = 2 * max(queries, keys) - 1
    return rows if len(rows) == expected else F.interpolate(rows.T[None], expected, mode="linear")[0].T


def attention(x_HWD: Tensor, heads: int, p: Weights, name: str, stride: int, kv_stride: int) -> Tensor:
    q, k, v = (
        pooled(linear(x_HWD, p, f"{name}.w{part}"), heads, p, f"{name}.pool_{part}", step)
        for part, step in (("q", stride), ("k", kv_stride), ("v", kv_stride))
    )
    (h, w), (kh, kw) = q.shape[1:3], k.shape[1:3]
    rows, columns = (
        table(p[f"{name}.position.{axis}"], *sides)
        for axis, sides in (("rows", (h, kh)), ("columns", (w, kw)))
    )
    out = []
    for r in range(h):
        for c in range(w):
            query = q[:, r, c]  # [N, C]
            scores = torch.einsum("nc,nijc->nij", query, k) / q.shape[-1] ** 0.5
            by_row = torch.stack([query @ rows[offset(r, i, h, kh)] for i in range(kh)], -1)
            by_column = torch.stack([query @ columns[offset(c, j, w, kw)] for j in range(kw)], -1)
            scores = scores + by_row[:, :, None] + by_column[:, None, :]
            share = scores.flatten(1).softmax(-1)
            out.append((torch.einsum("ns,nsc->nc", share, v.flatten(1, 2)) + query).flatten())
    return linear(torch.stack(out).unflatten(0, (h, w)), p, f"{name}.wo")


def block(x_HWD: Tensor, heads: int, p: Weights, name: str, stride: int, kv_stride: int) -> Tensor:
    normed = norm(x_HWD, p, f"{name}.attn_residual.norm")
    skip = linear(normed, p, f"{name}.attn_skip") if f"{name}.attn_skip.weight" in p else x_HWD
    if stride > 1:
        skip = F.max_pool2d(skip.permute(2, 0, 1)[None], 3, 2, 1)[0].permute(1, 2, 0)
    x_HWD = skip + attention(normed, heads, p, f"{name}.attn", stride, kv_stride)
    normed = norm(x_HWD, p, f"{name}.ffn_residual.norm")
    skip = linear(normed, p, f"{name}.ffn_skip") if f"{name}.ffn_skip.weight" in p else x_HWD
    return skip + linear(F.gelu(linear(normed, p, f"{name}.ffn.w_up")), p, f"{name}.ffn.w_down")


def logits(image_CHW: Tensor, model: nn.Module, p: Weights) -> Tensor:
    """Of one normalised image."""
    stages, kv_stride, depth = model.config.stages, model.config.attention.kv_stride, 0
    name = "encoder.embedding.overlapping_patches"
    x = F.conv2d(image_CHW[None], p[f"{name}.weight"], p[f"{name}.bias"], stride=4, padding=3)[0].permute(
        1, 2, 0
    )
    for stage, (layers, heads) in enumerate(zip(stages.layers, stages.heads, strict=True)):
        kv_stride = max(kv_stride // 2, 1) if stage else kv_stride
        for number in range(layers):
            x = block(x, heads, p, f"encoder.layers.{depth}", 2 if stage and not number else 1, kv_stride)
            depth += 1
    return linear(norm(x, p, "encoder.norm").mean((0, 1)), p, "classifier.classifier")


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "even": ({"stages.grid": (8, 8)}, (32, 32)),
    "odd": ({"stages.grid": (5, 7)}, (20, 28)),
    "widened by the network": (
        {"attention.widening": "ffn", "stages.heads": (2, 4), "stages.grid": (6, 8)},
        (24, 32),
    ),
    "larger than trained": ({"stages.grid": (4, 6)}, (28, 20)),
}


@pytest.mark.parametrize("case", CASES)
def test_mvit_is_the_paper(case: str) -> None:
    options, size = CASES[case]
    actual = make_ours(MVIT_MODEL | options)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in actual.named_parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 1 + noise if "norm.weight" in name else noise
    images, inputs = images_of(size, 2)
    labels = torch.tensor([3, 1])
    loss = actual(**batch_of(images, [[0, 1]], labels.tolist())).losses["classifier"]
    parameters = dict(actual.named_parameters())
    expected = F.cross_entropy(
        torch.stack([logits(one, actual, parameters) for one in inputs]), labels, reduction="sum"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    gradients, wanted = (torch.autograd.grad(value, [*parameters.values()]) for value in (loss, expected))
    full = float(torch.stack([gradient.norm() for gradient in wanted]).norm())
    for name, one, other in zip(parameters, gradients, wanted, strict=True):
        of_keys = name.endswith(("attn.wk.bias", "pool_k.norm.bias"))  # which softmax undoes, or nearly
        assert of_keys or float(other.norm()) > 1e-6 * full, f"nothing to compare for {name}"
        error = float((one - other).norm())
        assert error <= 1e-9 * max(float(other.norm()), 1e-6 * full), f"{name}: {error:.1e}"
