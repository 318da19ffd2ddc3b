"""Hierarchical models against transformers: logits and every gradient at even and odd sizes, several images a row."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.models import SWIN_V2_OPTIONS
from tests.support.swin import batch_of, copy_weights, images_of, make_ours, make_theirs

TOLERANCE = 1e-10
SIZES = [(64, 64), (36, 52), (32, 32), (28, 68)]
"""Pixels. Maps of 16 × 16 then 8 × 8 windows of 4; odd and padded ones (9 × 13, 5 × 7); one window in the second stage;
a long map without shift in the second. transformers crashes on maps smaller than a window."""


@pytest.mark.parametrize("size", SIZES)
def test_swin_is_transformers(size: tuple[int, int]) -> None:
    compare(make_ours(), size)


@pytest.mark.parametrize("size", [(64, 64), (56, 72), (16, 16)])
def test_swin_v2_is_transformers(size: tuple[int, int]) -> None:
    """Theirs sizes windows by the map for which it was configured, which for a fresh model is the image's."""
    compare(make_ours(SWIN_V2_OPTIONS), size)


def test_swin_v2_is_transformers_with_windows_larger_than_pretrained_ones() -> None:
    compare(make_ours(SWIN_V2_OPTIONS | {"position.pretrained_windows": (3, 2)}), (40, 64))


def compare(ours: Any, size: tuple[int, int]) -> None:
    theirs = make_theirs(ours.config, size)
    names = copy_weights(ours, theirs)
    images, inputs = images_of(size, 3)
    labels = [4, 0, 2]
    batch = batch_of(images, [[0], [1], [2]], labels)
    loss, logits = ours(**batch).losses["classifier"], theirs(inputs).logits
    expected = F.cross_entropy(logits, torch.tensor(labels), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    del batch["labels"]
    torch.testing.assert_close(
        ours(**batch).predictions["classifier"], logits, rtol=TOLERANCE, atol=TOLERANCE
    )
    loss.backward()
    expected.backward()
    see_gradients(ours, dict(theirs.named_parameters()), names)


def see_gradients(ours: Any, theirs: dict[str, Any], names: dict[str, str]) -> None:
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    whole = float(torch.stack([parameter.grad.norm() for parameter in theirs.values()]).norm())
    for name, gradient in gradients.items():
        reference: Tensor = theirs[names[name]].grad.reshape(gradient.shape)
        error, norm = float((gradient - reference).norm()), float(reference.norm())
        assert norm > 1e-6 * whole or "wk.bias" in name, f"nothing to compare for {name}"
        assert error <= TOLERANCE * max(norm, 1e-6 * whole), f"{name}: {error / norm:.1e}"
