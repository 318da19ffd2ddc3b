"""Models of images against transformers and formulas: patches, positions on the grid, pools, images packed in rows."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.support.images import draw_pixels, make_batch
from tests.support.tensors import move_parameters

SMALL: dict[str, Any] = {
    "family": "encoder", "d_model": 24, "n_layers": 2, "attention.n_heads": 3, "attention.bias": True, "ffn.d_ff": 40,
    "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "norm.eps": 1e-6,
    "position.name": "learned_2d", "position.grid": (4, 4), "embedding.name": "patches", "embedding.patch_size": 4,
    "embedding.mean": (0.5, 0.4, 0.3), "embedding.std": (0.2, 0.3, 0.4), "lm_head.name": "none",
    "extra_heads.classifier.n_classes": 5,
}  # fmt: skip
SIZES = [(8, 32), (37, 53), (16, 16), (4, 4), (20, 12)]
"""Heights and widths in pixels; sides that 4 doesn't divide are cropped."""


def make_model(options: dict[str, Any]) -> nn.Module:
    """An option that is None is left out."""
    values = {key: value for key, value in (SMALL | options).items() if value is not None}
    return move_parameters(build(ModelConfig.from_dotted(**values)).eval(), 0.3)


def loss_and_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    loss = model(**batch).losses["classifier"]
    return loss, list(torch.autograd.grad(loss, [*model.parameters()], allow_unused=True))


VARIANTS: dict[str, dict[str, Any]] = {
    "class token": {},
    "distillation token, registers": {"embedding.n_class_tokens": 2, "embedding.n_register_tokens": 3},
    "mean": {"extra_heads.classifier.pool": "mean", "embedding.n_class_tokens": 0},
    "mean beside a class token": {"extra_heads.classifier.pool": "class_mean", "embedding.n_register_tokens": 2},
    "attention": {"extra_heads.classifier.pool": "attention", "embedding.n_class_tokens": 0},
    "tanh layer": {"extra_heads.classifier.hidden": True},
    "sinusoidal": {"position.name": "sinusoidal_2d", "position.grid": None},
    "rotary": {"position.name": "rope_2d", "position.grid": None, "attention.n_heads": 2},
    "normalized rotary": {
        "position.name": "rope_2d", "position.grid": None, "attention.n_heads": 2, "position.normalized": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_images_are_each_image_alone(name: str) -> None:
    model = make_model(VARIANTS[name])
    n_special = model.config.embedding.n_special_tokens
    images = [draw_pixels(*size, seed=number) for number, size in enumerate(SIZES)]
    labels = [number % 5 for number in range(len(images))]
    packed = make_batch(images, 4, n_special, [[0, 1], [2, 3, 4]], labels=labels, row_length=160)
    alone = [
        make_batch([image], 4, n_special, [[0]], labels=[label]) for image, label in zip(images, labels, strict=True)
    ]
    loss, gradients = loss_and_gradients(model, packed)
    results = [loss_and_gradients(model, batch) for batch in alone]
    torch.testing.assert_close(loss, sum(loss for loss, _ in results), rtol=1e-12, atol=1e-12)
    for number, (name, _) in enumerate(model.named_parameters()):
        expected = sum(gradients_of_image[number] for _, gradients_of_image in results)
        # A bias of keys adds the same to all scores of a query, unless keys are turned.
        assert name.endswith("wk.bias") or expected.norm() > 1e-6, name
        torch.testing.assert_close(gradients[number], expected, rtol=1e-11, atol=1e-11)
    logits, *logits_of_images = (
        model(**{key: value for key, value in batch.items() if key != "labels"}).predictions["classifier"]
        for batch in (packed, *alone)
    )
    torch.testing.assert_close(logits, torch.cat(logits_of_images), rtol=1e-12, atol=1e-12)


def test_special_tokens_and_raw_pixels() -> None:
    """Vectors written out for each token: normalised pixels as a convolution sees them, and positions by name."""
    model = make_model({"embedding.n_class_tokens": 2, "embedding.n_register_tokens": 1})
    image = draw_pixels(17, 19, seed=0)
    batch = make_batch([image], 4, 3, [[0]])
    embedding = model.encoder.embedding
    actual = embedding(batch["patches"], SequenceMetadata(batch["positions"], grid=batch["grid"]))[0]
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None] for values in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    )
    kernel = embedding.patches.projection.weight.unflatten(1, (3, 4, 4))
    convolved = F.conv2d((image.double() / 255)[None].sub(mean).div(std), kernel, embedding.patches.projection.bias, 4)
    special, places = embedding.patches.special, embedding.positions
    torch.testing.assert_close(actual[:2], special[:2] + places.special, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual[2], special[2], rtol=1e-12, atol=1e-12)
    patches = convolved[0].flatten(1).T + places.weight
    torch.testing.assert_close(actual[3:], patches, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("changes", "message"), [
    ({"embedding.name": "tokens", "vocab_size": 9}, "position.name = 'learned_2d' is for patches"),
    ({"embedding.n_class_tokens": 0}, "choose pool = 'mean'"),
    ({"embedding.channels": 1}, r"give one for each, e.g. mean = \[0.5\]"),
    ({"position.name": "rope_2d", "position.grid": None, "attention.n_heads": 4}, "choose attention.head_dim = 8"),
])  # fmt: skip
def test_parts_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model({**({"embedding.patch_size": None, "embedding.mean": None, "embedding.std": None}
                       if "embedding.name" in changes else {}), **changes})  # fmt: skip


def test_a_batch_without_a_grid_is_refused() -> None:
    batch = make_batch([draw_pixels(16, 16, seed=0)], 4, 1, [[0]])
    del batch["grid"]
    with pytest.raises(TypeError, match=r"needs the field 'grid'"):
        make_model({})(**batch)


def test_mixed_and_smoothed_labels() -> None:
    """The sum over images of the mixed, smoothed cross-entropy, by hand; in evaluation labels are not smoothed."""
    model = make_model({"extra_heads.classifier.label_smoothing": 0.2})
    batch = make_batch([draw_pixels(16, 16, seed=n) for n in range(3)], 4, 1, [[0, 1], [2]], labels=[1, 4, 2])
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).predictions["classifier"]
    first = batch["labels"] >= 0
    batch["mixed_labels"] = torch.full_like(batch["labels"], -100).masked_scatter(first, torch.tensor([0, 3, 2]))
    batch["label_weights"] = torch.zeros(first.shape).masked_scatter(first, torch.tensor([0.25, 1.0, 0.5]))
    plain = soft = 0.0
    for number, (label, other, weight) in enumerate([(1, 0, 0.25), (4, 3, 1.0), (2, 2, 0.5)]):
        log_p = logits[number].log_softmax(-1)
        hard = weight * log_p[label] + (1 - weight) * log_p[other]
        plain, soft = plain - hard, soft - 0.8 * hard - 0.2 * log_p.mean()
    torch.testing.assert_close(model(**batch).losses["classifier"], plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.train()(**batch).losses["classifier"], soft, rtol=1e-12, atol=1e-12)
