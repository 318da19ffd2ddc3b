"""The choice of a token, against transformers' filters and the probabilities themselves."""

import pytest
import torch
from torch import Tensor

from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.decoding import Sampling

V = 50
DRAWS = 4000


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2


def frequencies(sampling: Sampling, logits_V: Tensor) -> Tensor:
    """How often each token is chosen, over many positions."""
    rows = logits_V.expand(4, V)
    chosen = torch.cat([sampling.sample(rows, position) for position in range(DRAWS // 4)])
    return torch.bincount(chosen, minlength=V) / DRAWS


def expected(logits_V: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distribution that transformers samples from."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits_V[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    return TopPLogitsWarper(top_p)(None, scores).softmax(-1)[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (1.0, 7, 1.0),
        (1.0, 0, 0.7),
        (0.8, 20, 0.9),
        (1.0, 99, 1.0),
        (1.0, 0, 0.01),
    ],
)
def test_tokens_come_with_the_probabilities_of_transformers(
    logits: Tensor, temperature: float, top_k: int, top_p: float
) -> None:
    wanted = expected(logits, temperature, top_k, top_p)
    actual = frequencies(Sampling(temperature, top_k, top_p), logits)
    assert not actual[wanted == 0].any(), "a token outside the cut was chosen"
    deviations = (actual - wanted) / (wanted * (1 - wanted) / DRAWS).clamp_min(1e-12).sqrt()
    assert deviations.abs().max() < 4.5


def test_a_draw_depends_on_seed_row_and_position_alone(logits: Tensor) -> None:
    def draws(seed: int, positions: range) -> list[int]:
        return [int(Sampling(1.0, seed=seed).sample(logits[None], position)) for position in positions]

    assert draws(0, range(30)) == [*draws(0, range(15)), *draws(0, range(15, 30))]
    assert draws(0, range(30)) != draws(1, range(30))
    rows = Sampling(1.0).sample(logits.expand(40, V), 7)
    assert len(set(rows.tolist())) > 5
    assert torch.equal(rows[:10], Sampling(1.0).sample(logits.expand(10, V), 7))


def test_a_low_temperature_is_greedy_and_never_overflows(logits: Tensor) -> None:
    for temperature in (0.0, 1e-300, 1e-6):
        assert int(Sampling(temperature).sample(logits[None] * 1e30, 0)) == int(logits.argmax())


def test_ids_beyond_the_tokenizer_are_never_chosen(logits: Tensor) -> None:
    logits[-1] = 1e9
    for temperature in (0.0, 1.0):
        assert int(Sampling(temperature, vocab_size=V - 1).sample(logits[None], 0)) < V - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_named(logits: Tensor, bad: float) -> None:
    rows = logits.repeat(3, 1)
    rows[1, 3] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(MegatfmError, match="of text 2 at position 9 are not finite"):
            Sampling(temperature).sample(rows, [3, 9, 4])
    with pytest.raises(MegatfmError, match="of text 1 at position 3 are not finite"):
        Sampling().sample(torch.full_like(rows, -float("inf")), 3)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.9)])
def test_ids_that_a_head_masks_are_never_chosen(logits: Tensor, top_k: int, top_p: float) -> None:
    masked = logits.clone()
    masked[::2] = -float("inf")
    actual = frequencies(Sampling(1.0, top_k, top_p), masked)
    wanted = expected(masked, 1.0, top_k, top_p)
    assert not actual[::2].any()
    assert ((actual - wanted) / (wanted * (1 - wanted) / DRAWS).clamp_min(1e-12).sqrt()).abs().max() < 4.5
    assert int(Sampling().sample(masked[None], 0)) == int(masked.argmax())


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)
