"""Hierarchical models and MViTv2 against transformers and the paper: values and every gradient, at odd sizes too."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers import stage_blocks
from megatfm.layers.attention.windowed import MapWindows
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.hf_encoders import build_hf_model, copy_hf_weights, draw_images, make_image_batch
from tests.support.images import draw_pixels
from tests.support.models import FAMILY_MODELS, MVIT_MODEL, SWIN_MODEL, SWIN_V2_OPTIONS
from tests.support.reference_gradients import perturb
from tests.support.tensors import assert_same_gradients, move_parameters

TOLERANCE = 1e-10
SIZES = [(64, 64), (36, 52), (32, 32), (28, 68)]
"""Pixels. Maps of 16 × 16 then 8 × 8 windows of 4; odd and padded ones (9 × 13, 5 × 7); one window in the second stage;
a long map without shift in the second. transformers crashes on maps smaller than a window."""


def build_model(options: dict[str, Any] | None = None) -> nn.Module:
    """Our model in float64, its parameters not yet set."""
    return build(ModelConfig.from_dotted(**(SWIN_MODEL | (options or {})))).double().eval()


@pytest.mark.parametrize(("options", "size"), [
    *(({}, size) for size in SIZES),
    ({"attention.pattern.window": 3}, (36, 52)),
    *((SWIN_V2_OPTIONS, size) for size in ((64, 64), (56, 72), (16, 16))),
    (SWIN_V2_OPTIONS | {"position.pretrained_windows": (3, 2)}, (40, 64)),
])  # fmt: skip
def test_swin_is_transformers(options: dict[str, Any], size: tuple[int, int]) -> None:
    """Their Swin v2 sizes windows by the map for which it was configured, which for a fresh model is the image's."""
    compare(build_model(options), size)


def compare(actual: Any, size: tuple[int, int]) -> None:
    reference = build_hf_model(actual.config, size)
    names = copy_hf_weights(actual, reference)
    images, inputs = draw_images(size, 3)
    labels = [4, 0, 2]
    batch = make_image_batch(images, [[0], [1], [2]], labels)
    loss, logits = actual(**batch).losses["classifier"], reference(inputs).logits
    expected = F.cross_entropy(logits, torch.tensor(labels), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    del batch["labels"]
    torch.testing.assert_close(actual(**batch).predictions["classifier"], logits, rtol=TOLERANCE, atol=TOLERANCE)
    loss.backward()
    expected.backward()
    see_gradients(actual, dict(reference.named_parameters()), names)


def see_gradients(actual: Any, expected: dict[str, Any], names: dict[str, str]) -> None:
    gradients = {name: parameter.grad for name, parameter in actual.named_parameters()}
    full = float(torch.stack([parameter.grad.norm() for parameter in expected.values()]).norm())
    for name, gradient in gradients.items():
        reference: Tensor = expected[names[name]].grad.reshape(gradient.shape)
        error, norm = float((gradient - reference).norm()), float(reference.norm())
        assert norm > 1e-6 * full or "wk.bias" in name, f"nothing to compare for {name}"
        assert error <= TOLERANCE * max(norm, 1e-6 * full), f"{name}: {error / norm:.1e}"


def roll_the_wrong_way(patch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.roll
    patch.setattr(torch.Tensor, "roll", lambda x, shifts, dims: right(x, tuple(-shift for shift in shifts), dims))


def leave_out_the_region_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MapWindows, "mask", lambda windows, device: None)


def swap_the_order_of_merging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stage_blocks, "NEIGHBOURS", ((0, 0), (0, 1), (1, 0), (1, 1)))


def hide_padding(patch: pytest.MonkeyPatch) -> None:
    right = MapWindows.pad_and_roll
    far = 1e4  # keys that no query likes
    patch.setattr(
        MapWindows, "pad_and_roll", lambda windows, x: right(windows, x).masked_fill(right(windows, x) == 0, far)
    )


FAULTS = [roll_the_wrong_way, leave_out_the_region_mask, swap_the_order_of_merging, hide_padding]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of odd sides, since half of an even one is as far to the left as to the right."""
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        compare(build_model({"attention.pattern.window": 3}), (36, 52))


@pytest.mark.parametrize("options", [{}, SWIN_V2_OPTIONS], ids=["v1", "v2"])
def test_images_of_a_row_are_each_image_alone(options: dict[str, Any]) -> None:
    actual = move_parameters(build_model(options), 0.3)
    images = [draw_pixels(36, 28, seed=number) for number in range(5)]
    labels = [1, 4, 0, 2, 3]
    packed = make_image_batch(images, [[0, 1, 2], [3, 4]], labels)
    alone = [make_image_batch([image], [[0]], [label]) for image, label in zip(images, labels, strict=True)]
    expected = sum(actual(**batch).losses["classifier"] for batch in alone)
    loss = actual(**packed).losses["classifier"]
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_same_gradients(loss, expected, [*actual.parameters()], rtol=1e-9, atol=1e-11)
    logits = torch.cat([actual(**without_labels(batch)).predictions["classifier"] for batch in alone])
    torch.testing.assert_close(actual(**without_labels(packed)).predictions["classifier"], logits)
    row = make_image_batch(images, [[0, 1, 2]], labels)
    bare = {name: row[name] for name in ("patches", "grid")}
    torch.testing.assert_close(actual(**bare).predictions["classifier"], logits[:3])


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values for name, values in batch.items() if name != "labels"}


def test_images_of_several_sizes_and_parts_of_images_are_refused() -> None:
    images = [draw_pixels(32, 32, seed=0), draw_pixels(16, 64, seed=1)]
    with pytest.raises(UsageError, match="a batch of images of 2 sizes"):
        build_model()(**make_image_batch(images, [[0], [1]], [0, 1]))
    batch = make_image_batch(images[:1], [[0]], [0])
    cut = {name: values[:, :-3] for name, values in batch.items()}
    with pytest.raises(UsageError, match="rows of 61 tokens don't hold images of 8 × 8 patches"):
        build_model()(**cut)


# ----------------------------------------------------------------------------------------------------- MViTv2


Weights = Mapping[str, Tensor]


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
        table(p[f"{name}.position.{axis}"], *sides) for axis, sides in (("rows", (h, kh)), ("columns", (w, kw)))
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
    """Logits of one normalised image."""
    stages, kv_stride, depth = model.config.stages, model.config.attention.kv_stride, 0
    name = "encoder.embedding.overlapping_patches"
    x = F.conv2d(image_CHW[None], p[f"{name}.weight"], p[f"{name}.bias"], stride=4, padding=3)[0].permute(1, 2, 0)
    for stage, (layers, heads) in enumerate(zip(stages.n_layers, stages.n_heads, strict=True)):
        kv_stride = max(kv_stride // 2, 1) if stage else kv_stride
        for number in range(layers):
            x = block(x, heads, p, f"encoder.layers.{depth}", 2 if stage and not number else 1, kv_stride)
            depth += 1
    return linear(norm(x, p, "encoder.norm").mean((0, 1)), p, "classifier.classifier")


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "even": ({"stages.grid": (8, 8)}, (32, 32)),
    "odd": ({"stages.grid": (5, 7)}, (20, 28)),
    "widened by the network": (
        {"attention.widening": "ffn", "stages.n_heads": (2, 4), "stages.grid": (6, 8)},
        (24, 32),
    ),
    "larger than trained": ({"stages.grid": (4, 6)}, (28, 20)),
}


@pytest.mark.parametrize("case", CASES)
def test_mvit_is_the_paper(case: str) -> None:
    options, size = CASES[case]
    actual = build_model(MVIT_MODEL | options)
    perturb(actual, scale=0.3)
    images, inputs = draw_images(size, 2)
    labels = torch.tensor([3, 1])
    loss = actual(**make_image_batch(images, [[0, 1]], labels.tolist())).losses["classifier"]
    parameters = dict(actual.named_parameters())
    expected_logits = torch.stack([logits(image, actual, parameters) for image in inputs])
    expected = F.cross_entropy(expected_logits, labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    gradients, expected_gradients = (torch.autograd.grad(value, [*parameters.values()]) for value in (loss, expected))
    full = float(torch.stack([gradient.norm() for gradient in expected_gradients]).norm())
    for name, first, second in zip(parameters, gradients, expected_gradients, strict=True):
        of_keys = name.endswith(("attn.wk.bias", "pool_k.norm.bias"))  # which softmax undoes, or nearly
        assert of_keys or float(second.norm()) > 1e-6 * full, f"nothing to compare for {name}"
        error = float((first - second).norm())
        assert error <= 1e-9 * max(float(second.norm()), 1e-6 * full), f"{name}: {error:.1e}"


@pytest.mark.parametrize("widening", ["attention", "ffn"])
def test_a_layer_scale_of_one_changes_nothing_in_blocks_that_widen(widening: str) -> None:
    """Values and all gradients; the factors have the width of the sublayer's output."""
    results = []
    for scale in (None, 1.0):
        config = FAMILY_MODELS["mvit v2"].with_changes({"layer_scale": scale, "attention.widening": widening})
        model = build(config).double()
        initialise(model, 3)
        loss = sum(PassThroughObjective([])(model, family_batch(config)).values())
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if "layer_scale" not in name}
        results.append((loss.detach(), gradients))
    assert len(list(model.named_parameters())) > len(results[0][1])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
