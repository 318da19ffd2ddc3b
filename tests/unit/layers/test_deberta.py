"""Buckets and refusals of disentangled attention; windows of maps against their definition, pair by pair."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention.relative import assign_log_buckets
from megatfm.layers.attention.windowed import WindowedAttention, Windows2d
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import MapSequence
from megatfm.models import build
from tests.support.tensors import assert_same_gradients, draw, move_parameters

CONFIG = ModelConfig(
    family="encoder", vocab_size=23, d_model=12, n_layers=2, attention={"name": "deberta", "n_heads": 2},
    ffn={"d_ff": 20}, position={"name": "deberta", "max_distance": 3},
)  # fmt: skip
BUCKETS = {"name": "deberta_v2", "buckets": 4, "max_distance": 7}
SHARED = CONFIG.with_changes({"attention.name": "deberta_v2", "position": BUCKETS})


@pytest.mark.parametrize(("n", "farthest"), [(256, 512), (6, 15), (4, 5), (32, 128)])
def test_buckets_are_those_of_the_released_code(n: int, farthest: int) -> None:
    distances = torch.arange(1 - 2 * farthest, 2 * farthest)
    actual, reference = assign_log_buckets(distances, n, farthest), make_log_bucket_position(distances, n, farthest)
    assert torch.equal(actual, reference.long())
    assert actual.dtype == torch.int64
    assert actual[distances.abs() < farthest].abs().max() < n


@pytest.mark.parametrize(("config", "change"), [
    (CONFIG, {"position.name": "none"}), (CONFIG, {"family": "decoder"}),
    (CONFIG, {"position.name": "rope", "family": "decoder"}),
    (SHARED, {"position.name": "deberta"}), (SHARED, {"family": "decoder"}),
])  # fmt: skip
def test_deberta_needs_its_own_positions_and_sees_all(config: ModelConfig, change: dict[str, str]) -> None:
    message = rf"needs model\.position\.name = '{config.attention.name}' and family = 'encoder'"
    with pytest.raises(UsageError, match=message):
        build(config.with_changes(change))


def test_buckets_that_leave_no_room_are_refused() -> None:
    """The refusal comes before anything is built; the smallest number that passes orders distances by buckets."""
    with pytest.raises(ValidationError, match=r"max_distance = 3 .*buckets = 8: choose 6 or more"):
        SHARED.with_changes({"position.buckets": 8, "position.max_distance": 3})
    SHARED.with_changes({"position.buckets": 8, "position.max_distance": 6})
    assert (assign_log_buckets(torch.arange(-40, 40), 8, 6).diff() >= 0).all()


# -------------------------------------------------------------------------------------------- windows of maps


WIDTH, HEADS = 12, 3
OPTIONS: dict[str, Any] = {
    "family": "encoder", "d_model": WIDTH, "n_layers": 1, "attention.name": "windowed", "attention.n_heads": HEADS,
    "ffn.d_ff": 8, "position.name": "relative_2d", "vocab_size": 8,
}  # fmt: skip
MAPS = {
    "padded": ((5, 4), 3), "whole windows": ((6, 9), 3), "one row of windows": ((3, 8), 3), "one window": ((4, 4), 4),
    "smaller than a window": ((2, 3), 4), "narrow": ((7, 2), 4), "one token": ((1, 1), 3), "even": ((8, 8), 4),
}  # fmt: skip


def make(window: int, shifted: bool, **options: Any) -> WindowedAttention:
    values = OPTIONS | {"attention.pattern": {"name": "windows_2d", "window": window}} | options
    config = ModelConfig.from_dotted(**values)
    return move_parameters(WindowedAttention(config, make_initialiser(config), Windows2d(window, shifted)), 0.7)


def by_definition(module: WindowedAttention, x_HWD: Tensor, window: int, shifted: bool) -> Tensor:
    """Attention over the whole padded map, pair by pair of tokens; no roll, no windows, no region mask."""
    height, width, _ = x_HWD.shape
    m = min(window, height, width)
    shift = m // 2 if shifted and min(height, width) > window else 0
    x = F.pad(x_HWD, (0, 0, 0, -width % m, 0, -height % m))
    rows, columns = x.shape[:2]
    row, column = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
    cells = [(int(r - shift) // m, int(c - shift) // m) for r, c in zip(row, column, strict=True)]
    q, k, v = (
        F.linear(x.flatten(0, 1), w.weight, w.bias).unflatten(-1, (HEADS, -1))
        for w in (module.wq, module.wk, module.wv)
    )
    out = []
    for at in range(rows * columns):
        neighbours = [other for other in range(rows * columns) if cells[other] == cells[at]]
        down, right = (places[at] - places[neighbours] + window - 1 for places in (row, column))
        bias = module.position.weight[down * (2 * window - 1) + right].T
        scores = torch.einsum("nh,snh->ns", q[at], k[neighbours]) / (WIDTH // HEADS) ** 0.5 + bias
        out.append(torch.einsum("ns,snh->nh", scores.softmax(-1), v[neighbours]).flatten())
    y = torch.stack(out).unflatten(0, (rows, columns))[:height, :width]
    return F.linear(y, module.wo.weight, module.wo.bias)


@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("name", MAPS)
def test_windows_are_cells(name: str, shifted: bool) -> None:
    (height, width), window = MAPS[name]
    module = make(window, shifted)
    x = draw(2, 3 * height * width, WIDTH).requires_grad_()
    positions = torch.arange(3 * height * width).expand(2, -1)
    actual = module(x, MapSequence.from_sequence(SequenceMetadata(positions), (height, width)))
    maps = x.unflatten(1, (3, height, width)).flatten(0, 1)
    expected = torch.stack([by_definition(module, first, window, shifted) for first in maps]).reshape(actual.shape)
    assert_same_gradients(actual, expected, [x, *module.parameters()], rtol=1e-11, atol=1e-11)


def test_pairs_are_those_of_windows() -> None:
    """Costs count the pairs within a window."""
    assert Windows2d(7).count_pairs(56 * 56) == 64 * 49**2
    assert Windows2d(7).count_pairs(16) == 16 * 16


def test_attention_drops_each_image_s_probabilities_otherwise() -> None:
    """Two equal images of a row, which without dropout have equal outputs."""
    module = make(3, True, **{"attention.dropout": 0.5}).train()
    row = draw(1, 20, WIDTH).repeat(1, 2, 1)
    sequence = SequenceMetadata(torch.arange(40).expand(1, -1), rng_keys=torch.tensor([1]))
    maps = MapSequence.from_sequence(sequence, (5, 4))
    first, second = module(row, maps).chunk(2, 1)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(module(row, maps), module(row, maps))
    first, second = module.eval()(row, maps).chunk(2, 1)
    torch.testing.assert_close(first, second)
