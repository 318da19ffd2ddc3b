"""Stochastic depth of packed images: as in a loop over the images, each alone, with the same draws."""

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.dropout import DropPath
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.support.image_models import IMAGE_MODELS, SIDE
from tests.support.images import pixels, to_batch
from tests.support.models import SWIN_MODEL

RATE = 0.6
SHAPES = [(1, 3), (2, 2), (3, 2), (2, 3)]
CONFIGS = {
    "vit": (IMAGE_MODELS["class"].with_changes({"drop_path": RATE}), 2, SHAPES),
    "swin": (ModelConfig.from_dotted(SWIN_MODEL | {"drop_path": RATE}), 0, [(8, 8)] * 4),
}
"""Model, its special tokens, and the images in patches."""
ROWS = [[0, 1, 2], [3], [2, 0]]


def draws_of(
    model: nn.Module, batch: dict[str, Tensor], keys: Tensor, n_images: int
) -> dict[str, list[Tensor]]:
    """Factors [B, images] of each sublayer, which must be the same for all tokens of an image."""
    draws: dict[str, list[Tensor]] = {}

    def record(name: str, inputs: tuple[Tensor, SequenceMetadata], out: Tensor) -> None:
        x, sequence = inputs
        numbers = torch.zeros_like(sequence.positions) if sequence.documents is None else sequence.documents
        factors = torch.zeros(len(x), n_images, dtype=x.dtype)
        for row in range(len(x)):
            for image in range(int(numbers[row].max()) + 1):
                of_image = numbers[row] == image
                factors[row, image] = (out[row, of_image] / x[row, of_image]).mean()
                torch.testing.assert_close(out[row, of_image], x[row, of_image] * factors[row, image])
        draws.setdefault(name, []).append(factors)

    hooks = [
        module.register_forward_hook(lambda _, inputs, out, name=name: record(name, inputs, out))
        for name, module in model.named_modules()
        if isinstance(module, DropPath)
    ]
    model(**batch, keys=keys)
    for hook in hooks:
        hook.remove()
    return draws


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_images_are_dropped_as_in_a_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, n_special, shapes = CONFIGS[name]
    torch.manual_seed(0)
    model = build(config).double()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    images = [pixels(SIDE * h, SIDE * w, seed=seed) for seed, (h, w) in enumerate(shapes)]
    side = max(h * w for h, w in shapes) + n_special
    batch = to_batch(images, SIDE, n_special, ROWS, labels=[0, 1, 0, 1], row_length=3 * side)
    keys = torch.arange(len(ROWS)) * 31 + 7
    draws = draws_of(model, batch, keys, 3)
    loss = sum(model(**batch, keys=keys).losses.values())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    names = {module: n for n, module in model.named_modules()}
    model.zero_grad()
    alone, place = torch.zeros((), dtype=torch.float64), (0, 0)
    monkeypatch.setattr(DropPath, "forward", lambda self, x, _: x * draws[names[self]][0][place])
    for row, numbers in enumerate(ROWS):
        for index, number in enumerate(numbers):
            place = (row, index)
            one = to_batch([images[number]], SIDE, n_special, [[0]], labels=[[0, 1, 0, 1][number]])
            alone = alone + sum(model(**one, keys=keys[:1]).losses.values())
    alone.backward()
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=1e-12)
    assert gradients
    for n, parameter in model.named_parameters():
        if n in gradients:
            torch.testing.assert_close(parameter.grad, gradients[n], rtol=1e-10, atol=1e-12)
    some_row_differs = any(len(factors[0].unique()) > 1 for calls in draws.values() for factors in calls)
    assert some_row_differs, "images of a row have draws of their own"


def test_images_of_a_row_are_dropped_independently_and_the_first_as_the_row_s_only_one() -> None:
    rows, images = 20_000, 3
    keys = torch.arange(rows) * 7919 + 3
    documents = torch.arange(images).expand(rows, images)
    positions, grid = torch.zeros_like(documents), torch.ones(rows, images, 4, dtype=torch.int32)
    path, x = DropPath("here"), torch.ones(rows, images, 1, dtype=torch.float64)

    def dropped(documents: Tensor | None, grid: Tensor | None) -> Tensor:
        sequence = SequenceMetadata(positions, documents, rng_keys=keys, grid=grid)
        return path(x, sequence.at_layer(2, 0.3))[..., 0] == 0

    result = dropped(documents, grid)
    for image in range(images):
        assert float(result[:, image].double().mean()) == pytest.approx(0.3, abs=0.015)
        for other in range(image):
            both = (result[:, image] & result[:, other]).double().mean()
            assert float(both) == pytest.approx(0.09, abs=0.01)
    assert torch.equal(result[:, 0], dropped(None, grid)[:, 0])
    assert torch.equal(dropped(documents, None), result[:, :1].expand(rows, images)), "text by full rows"
