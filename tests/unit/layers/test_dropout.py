"""Dropout and stochastic depth: their statistics, and that they depend on keys and on nothing else."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout, DropPath
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build

ROWS, T, D = 64, 50, 96


def layout_of(keys: Tensor | None, length: int = T) -> SequenceMetadata:
    rows = 1 if keys is None else len(keys)
    return SequenceMetadata(torch.arange(length).expand(rows, length), rng_keys=keys)


def keys(n: int = ROWS, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**62, (n,), generator=torch.Generator().manual_seed(seed))


def near(observed: float, share: float, n: int) -> bool:
    """Within five standard deviations of a binomial's mean."""
    return abs(observed - share) <= 5 * math.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.003])
def test_rate_and_scale(rate: float) -> None:
    dropped = Dropout(rate, "here")(torch.ones(ROWS, T, D, dtype=torch.float64), layout_of(keys()))
    n = dropped.numel()
    assert near(float((dropped == 0).double().mean()), rate, n)
    (kept,) = dropped[dropped != 0].unique().tolist()
    assert kept == pytest.approx(1 / (1 - rate), rel=2e-5), "the rate is a multiple of 1/65,536"
    assert near(float((dropped == 0)[:, 0].double().mean()), rate, n // T), "a token alone"
    assert near(float((dropped == 0)[..., 1].double().mean()), rate, n // D), "a channel alone"


def test_masks_of_rows_tokens_channels_layers_and_places_are_independent() -> None:
    x, sequence = torch.ones(ROWS, T, D), layout_of(keys())
    first = Dropout(0.3, "here")(x, sequence) == 0
    remaining = {
        "another place": Dropout(0.3, "there")(x, sequence) == 0,
        "another layer": Dropout(0.3, "here")(x, sequence.at_layer(0)) == 0,
        "other rows": first.roll(1, 0),
        "other tokens": first.roll(1, 1),
        "the next channel": first.roll(1, 2),
        "a channel of the next hash": first.roll(4, 2),
        "another step": Dropout(0.3, "here")(x, layout_of(keys(seed=1))) == 0,
    }
    for what, other in remaining.items():
        assert near(float((first & other).double().mean()), 0.09, first.numel()), what
    layers = [Dropout(0.3, "here")(x, sequence.at_layer(depth)) == 0 for depth in range(3)]
    assert near(float((layers[1] & layers[2]).double().mean()), 0.09, first.numel())


def test_a_row_is_dropped_alike_in_any_batch() -> None:
    dropout, x = Dropout(0.4, "here"), torch.randn(ROWS, T, D, generator=torch.Generator().manual_seed(1))
    full = dropout(x, layout_of(keys()))
    assert torch.equal(full, dropout(x, layout_of(keys()))), "and once more"
    parts = [dropout(x[i : i + 8], layout_of(keys()[i : i + 8])) for i in range(0, ROWS, 8)]
    assert torch.equal(torch.cat(parts), full)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(dropout(x[order], layout_of(keys()[order])), full[order])


def test_evaluation_drops_nothing_and_training_without_keys_is_refused() -> None:
    x = torch.ones(1, T, D)
    dropout, path = Dropout(0.4, "here"), DropPath("here")
    with pytest.raises(UsageError, match=r"^dropout in training needs random keys.*pass keys"):
        dropout(x, layout_of(None))
    with pytest.raises(UsageError, match=r"^stochastic depth in training needs random keys"):
        path(x, layout_of(None).at_layer(1, 0.9))
    assert torch.equal(path(x, layout_of(None).at_layer(1, 0.0)), x)
    assert torch.equal(dropout.eval()(x, layout_of(None)), x)
    assert torch.equal(path.eval()(x, layout_of(keys(1)).at_layer(1, 0.9)), x)
    assert torch.equal(Dropout(0.0, "here")(x, layout_of(None)), x)


def test_drop_path_leaves_out_whole_rows_at_its_rate() -> None:
    x, many = torch.ones(20_000, 1, 4, dtype=torch.float64), keys(20_000)
    path = DropPath("here")
    out = path(x, layout_of(many, 1).at_layer(2, 0.3))
    assert (out == out[:, :, :1]).all()
    assert near(float((out[:, 0, 0] == 0).double().mean()), 0.3, len(many))
    assert out[out != 0].unique().tolist() == [pytest.approx(1 / 0.7)]
    deeper = path(x, layout_of(many, 1).at_layer(3, 0.3))
    both = ((out == 0) & (deeper == 0))[:, 0, 0]
    assert near(float(both.double().mean()), 0.09, len(many)), "layers are independent"
    assert torch.equal(path(x, layout_of(many, 1).at_layer(2, 0.0)), x)


CONFIG = ModelConfig(
    family="encoder",
    vocab_size=31,
    d_model=16,
    n_layers=4,
    dropout=0.2,
    drop_path=0.4,
    attention={"n_heads": 4, "dropout": 0.3},
    ffn={"d_ff": 24, "activation": "gelu", "dropout": 0.1},
    norm={"name": "layer_norm", "placement": "post"},
    embedding={"norm": True, "n_segments": 2},
    position={"name": "learned", "max_positions": 11},
    init={"std": 0.3},
)


def test_depths_rise_linearly_from_zero() -> None:
    assert build(CONFIG).encoder.skip_rates == [pytest.approx(0.4 * i / 3) for i in range(4)]


@pytest.fixture
def model() -> torch.nn.Module:
    model = build(CONFIG).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


TOKENS = torch.randint(0, 31, (6, 11), generator=torch.Generator().manual_seed(4))


def test_a_model_s_rows_do_not_depend_on_their_neighbours(model: torch.nn.Module) -> None:
    logits = model(TOKENS, keys=keys(6)).logits
    alone = torch.cat([model(TOKENS[i : i + 1], keys=keys(6)[i : i + 1]).logits for i in range(6)])
    torch.testing.assert_close(logits, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits, model(TOKENS, keys=keys(6, seed=1)).logits)
    assert not torch.allclose(logits, model.eval()(TOKENS).logits)


def test_recomputing_drops_the_same(model: torch.nn.Module) -> None:
    def gradients(run: object) -> list[Tensor]:
        model.zero_grad()
        run().square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def forward() -> Tensor:
        return model(TOKENS, keys=keys(6)).hidden

    plain = gradients(forward)
    torch.manual_seed(99)
    again = gradients(lambda: checkpoint(forward, use_reentrant=False, preserve_rng_state=False))
    assert plain
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
