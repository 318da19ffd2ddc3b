"""Windows of maps against the definition, on the whole padded map: a query sees a key if both are in the same cell."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.attention.patterns.windows_2d import Windows2d
from megatfm.layers.attention.windowed import WindowedAttention
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.maps import MapSequence
from megatfm.layers.sequence import SequenceMetadata

D, HEADS = 12, 3
OPTIONS: dict[str, Any] = {
    "family": "encoder", "d_model": D, "n_layers": 1, "attention.name": "windowed", "attention.n_heads": HEADS,
    "ffn.d_ff": 8, "position.name": "relative_2d", "vocab_size": 8,
}  # fmt: skip
MAPS = {
    "padded": ((5, 4), 3), "whole windows": ((6, 9), 3), "one row of windows": ((3, 8), 3), "one window": ((4, 4), 4),
    "smaller than a window": ((2, 3), 4), "narrow": ((7, 2), 4), "one token": ((1, 1), 3), "even": ((8, 8), 4),
}  # fmt: skip


def make(window: int, shifted: bool, **options: Any) -> WindowedAttention:
    values = OPTIONS | {"attention.pattern": {"name": "windows_2d", "window": window}} | options
    config = ModelConfig.from_dotted(**values)
    module = WindowedAttention(config, make_initialiser(config), Windows2d(window, shifted)).double()
    generator = torch.Generator().manual_seed(window)
    for parameter in module.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def by_definition(module: WindowedAttention, x_HWD: Tensor, window: int, shifted: bool) -> Tensor:
    """Attention over the whole padded map, pair by pair of tokens; no roll, no windows, no region mask."""
    height, width, _ = x_HWD.shape
    m = min(window, height, width)
    shift = m // 2 if shifted and min(height, width) > window else 0
    x = F.pad(x_HWD, (0, 0, 0, -width % m, 0, -height % m))
    rows, columns = x.shape[:2]
    row, column = (
        place.flatten() for place in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    )
    cells = [(int(r - shift) // m, int(c - shift) // m) for r, c in zip(row, column, strict=True)]
    q, k, v = (
        F.linear(x.flatten(0, 1), w.weight, w.bias).unflatten(-1, (HEADS, -1))
        for w in (module.wq, module.wk, module.wv)
    )
    out = []
    for at in range(rows * columns):
        seen = [other for other in range(rows * columns) if cells[other] == cells[at]]
        offset = (
            (row[at] - row[seen] + window - 1) * (2 * window - 1) + column[at] - column[seen] + window - 1
        )
        scores = (
            torch.einsum("nh,snh->ns", q[at], k[seen]) / (D // HEADS) ** 0.5
            + module.position.weight[offset].T
        )
        out.append(torch.einsum("ns,snh->nh", scores.softmax(-1), v[seen]).flatten())
    y = torch.stack(out).unflatten(0, (rows, columns))[:height, :width]
    return F.linear(y, module.wo.weight, module.wo.bias)


@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("name", MAPS)
def test_windows_are_cells(name: str, shifted: bool) -> None:
    """Values and gradients, of two rows of three images each."""
    (height, width), window = MAPS[name]
    module = make(window, shifted)
    x = torch.randn(2, 3 * height * width, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(3 * height * width).expand(2, -1)
    actual = module(
        x.requires_grad_(), MapSequence.from_sequence(SequenceMetadata(positions), (height, width))
    )
    maps = x.unflatten(1, (3, height, width)).flatten(0, 1)
    expected = torch.stack([by_definition(module, one, window, shifted) for one in maps]).reshape(
        actual.shape
    )
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    direction = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inputs = [x, *module.parameters()]
    for one, other in zip(
        torch.autograd.grad(actual, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_pairs_are_those_of_windows() -> None:
    """A window's tokens see one another, which is all that costs count."""
    assert Windows2d(7).count_pairs(56 * 56) == 64 * 49**2
    assert Windows2d(7).count_pairs(16) == 16 * 16


def test_attention_drops_each_image_s_probabilities_otherwise() -> None:
    """Two equal images of a row, which without dropout have equal outputs."""
    module = make(3, True, **{"attention.dropout": 0.5}).train()
    image = torch.randn(1, 20, D, dtype=torch.float64)
    row = torch.cat([image, image], 1)
    positions = torch.arange(40).expand(1, -1)

    def outputs(keys: int) -> Tensor:
        sequence = SequenceMetadata(positions, rng_keys=torch.tensor([keys]))
        return module(row, MapSequence.from_sequence(sequence, (5, 4)))

    first, second = outputs(1).chunk(2, 1)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(outputs(1), outputs(1))
    module.eval()
    first, second = outputs(1).chunk(2, 1)
    torch.testing.assert_close(first, second)
