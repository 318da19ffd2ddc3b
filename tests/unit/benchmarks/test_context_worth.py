"""What judges the worth of context: each target once, from as many tokens as are asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.benchmark_scripts import script


@pytest.fixture(scope="module")
def worth() -> Any:
    return script("context_worth")


class Seen(nn.Module):
    """Gives the token one higher than the last a logit of an eighth of how many stand before it in the row."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        before = (torch.arange(1.0, tokens.shape[1] + 1) / 8).expand_as(tokens)
        logits = torch.zeros(*tokens.shape, self.n).scatter(2, (tokens + 1)[..., None], before[..., None])
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("context", [16, 32, 64])
def test_each_target_is_judged_once_from_half_of_a_context_to_all_of_it(worth: Any, context: int) -> None:
    n, first, end = 400, 65, 385
    losses = worth.losses(Seen(n), torch.arange(n - 1), context, first, end)
    place = torch.arange(first, end)
    before = (context // 2 + 1 + (place - 1) % (context // 2)) / 8
    right = (before.exp() + n - 1).log() - before
    torch.testing.assert_close(losses, right, atol=1e-4, rtol=0)  # a place further is an eighth


def test_means_are_by_how_far_back_a_token_occurred_last(worth: Any) -> None:
    text = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(7))
    back = worth.distances(text)
    for place, token in enumerate(text.tolist()):
        earlier = [place - at for at in range(place) if text[at] == token]
        assert back[place] == min(earlier, default=0)
    short = torch.zeros(60, dtype=torch.int64)  # no target with a whole context
    means = worth.judge(Seen(91), iter([text, short]), 64)
    assert means["all"]["of"] == 256 - 64 + 32 * ((300 - 1) // 32 - 8)
    groups = [group for name, group in means.items() if name != "all"]
    assert list(means) == ["all", "1 to 16 back", "17 to 32 back", "more than 32 back", "never"][: len(means)]
    assert sum(group["of"] for group in groups) == means["all"]["of"]
    for context in (16, 32, 64):
        mean = sum(group["of"] * group["nats"][context] for group in groups) / means["all"]["of"]
        assert mean == pytest.approx(means["all"]["nats"][context], abs=1e-3)
        losses = worth.losses(Seen(91), text, context, 65, 289)
        near = (back[65:289] > 0) & (back[65:289] <= 16)
        mean = means["1 to 16 back"]["nats"][context]
        assert mean == pytest.approx(float(losses[near].mean()), abs=1e-3)
