"""Attention rollout against transformers' attention and a product written out here; images packed into a row."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.vit import modeling_vit

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.inference.attention_rollout import record_attention, rollout
from megatfm.models import build
from tests.support.images import pixels, to_batch
from tests.support.reference_gradients import doubled, pair

SIDE, MEAN, STD = 4, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
CONFIG = ModelConfig.from_dotted(
    {
        "family": "encoder",
        "d_model": 24,
        "n_layers": 3,
        "attention.n_heads": 3,
        "attention.bias": True,
        "ffn.d_ff": 48,
        "ffn.activation": "gelu",
        "ffn.bias": True,
        "norm.name": "layer_norm",
        "norm.eps": 1e-6,
        "embedding.name": "patches",
        "embedding.patch_size": SIDE,
        "embedding.mean": MEAN,
        "embedding.std": STD,
        "position.name": "learned_2d",
        "position.grid": (4, 4),
        "lm_head.name": "none",
        "extra_heads.classifier.n_classes": 5,
    }
)


def product(attentions: Any) -> NDArray[np.float64]:
    """Rollout [n, T, T] of attentions [n, N, T, T] by the paper's recursion, an image and a layer at a time."""
    images = []
    for number in range(len(attentions[0])):
        reached = None
        for layer in attentions:
            mean = layer[number].double().numpy().mean(axis=0)
            mixed = 0.5 * mean + 0.5 * np.eye(len(mean))
            mixed /= mixed.sum(axis=1, keepdims=True)
            reached = mixed if reached is None else np.matmul(mixed, reached)
        images.append(reached)
    return np.stack(images)  # type: ignore[arg-type]


def recorded(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rollout, and the logits of the same pass."""
    with torch.no_grad(), record_attention(model) as maps:
        output = model(**batch)
    return rollout(maps), output.predictions["classifier"]


def test_transformers_attention() -> None:
    """Two images share a row, whose tokens don't reach one another; recording changes no output."""
    both = pair(CONFIG, torch.float64, among=["ViTForImageClassification"])
    images = [pixels(16, 16, seed=seed) for seed in range(3)]
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    values = torch.stack([(image.double() / 255 - mean) / std for image in images])
    with torch.no_grad(), doubled(torch.float64, modeling_vit):
        expected = both.theirs(pixel_values=values, output_attentions=True)
    expected_rollout = product(expected.attentions)
    reached, logits = recorded(both.ours, to_batch(images, SIDE, 1, [[0, 1], [2]]))
    for number, (row, begin) in enumerate([(0, 0), (0, 17), (1, 0)]):
        block = reached[row, begin : begin + 17]
        torch.testing.assert_close(
            block[:, begin : begin + 17], torch.from_numpy(expected_rollout[number]), rtol=1e-9, atol=1e-11
        )
        assert block.sum(-1) == pytest.approx(torch.ones(17).tolist())
    assert (reached[0, :17, 17:] == 0).all()
    torch.testing.assert_close(logits, expected.logits, rtol=1e-9, atol=1e-10)
    assert all(not module._forward_pre_hooks for module in both.ours.modules())


def test_one_layer_without_attention_reaches_itself() -> None:
    """With A = I nothing moves; with uniform attention half stays."""
    torch.testing.assert_close(rollout([torch.eye(3)[None]]), torch.eye(3)[None])
    uniform = torch.full((1, 4, 4), 0.25)
    torch.testing.assert_close(rollout([uniform]), 0.5 * torch.eye(4)[None] + 0.125)


def test_layers_that_see_parts_are_refused() -> None:
    """A Swin transformer, whose maps shrink from stage to stage."""
    config = ModelConfig.from_dotted(
        {
            "family": "hierarchical",
            "d_model": 8,
            "stages": {"layers": [1, 1], "heads": [1, 2], "grid": [3, 3]},
            "attention": {"name": "windowed", "pattern": {"name": "windows_2d", "window": 2}},
            "position.name": "relative_2d",
            "ffn.d_ff": 16,
            "ffn.activation": "gelu",
            "norm.name": "layer_norm",
            "embedding": {"name": "patches", "patch_size": SIDE, "n_class_tokens": 0},
            "lm_head.name": "none",
        }
    )
    message = r"'hierarchical' with model\.attention\.name = 'windowed'"
    with pytest.raises(UsageError, match=message), record_attention(build(config)):
        pytest.fail("should have refused")
