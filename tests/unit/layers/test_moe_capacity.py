"""What experts with a capacity take, by which policy, and who is told of it."""

import pytest
import torch
from torch import Tensor

from megatfm.layers.moe import experts
from megatfm.layers.moe.experts import expert_capacity, within_capacity
from tests.support.moe_layers import E, T, build_moe, moe_inputs, moe_sequence


def test_first_choices_take_room_before_second_ones() -> None:
    choices = torch.tensor([[[0, 1], [1, 0], [0, 1], [2, 2]]])
    assert within_capacity(choices, 2, expert_capacity(choices, 2, 0.5)).tolist() == [
        [[True, True], [True, False], [True, False], [True, True]]
    ]


def taken_one_by_one(choices: Tensor, capacity: int, by_position: bool) -> list[list[list[bool]]]:
    """What experts take, counted choice by choice; of none, everything."""
    rows, tokens, k = choices.shape
    taken = [[[True] * k for _ in range(tokens)] for _ in range(rows)]
    for row in range(rows):
        seen = dict.fromkeys(range(E), 0)
        turns = [(t, i) for t in range(tokens) for i in range(k)]
        for t, i in turns if by_position else sorted(turns, key=lambda turn: turn[::-1]):
            expert = int(choices[row, t, i])
            if expert < E:
                taken[row][t][i] = seen[expert] < capacity
                seen[expert] += 1
    return taken


@pytest.mark.parametrize("by_position", [False, True])
def test_room_is_taken_in_the_order_of_the_policy(by_position: bool) -> None:
    random = torch.Generator().manual_seed(0)
    for top_k, capacity in ((1, 2), (2, 3), (3, 1), (3, 40)):
        drawn = torch.rand(4, 23, E, generator=random).argsort(-1)[..., :top_k]
        choices = drawn.where(torch.rand(4, 23, 1, generator=random) < 0.9, E)
        actual = within_capacity(choices, E, capacity, by_position=by_position)
        assert actual.tolist() == taken_one_by_one(choices, capacity, by_position), (top_k, capacity)


@pytest.mark.parametrize("router", ["top_k", "gshard"])
@pytest.mark.parametrize("policy", ["choice", "position"])
def test_by_position_no_token_depends_on_later_ones(policy: str, router: str) -> None:
    module = build_moe(router={"name": router}, top_k=2, capacity_factor=0.6, drop_policy=policy)
    x, other = moe_inputs().detach(), moe_inputs().detach()
    other[:, T // 2 :] = other[:, T // 2 :].flip(-1)
    with torch.no_grad():
        y, changed = module(x, moe_sequence()).y, module(other, moe_sequence()).y
    difference = float((y - changed)[:, : T // 2].abs().max())
    assert difference < 1e-12 if policy == "position" else difference > 1e-2


def test_a_capacity_that_shows_the_future_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    experts._warn_noncausal_capacity.cache_clear()
    for keys in (
        {},
        {"capacity_factor": 1.0, "drop_policy": "position"},
        {"capacity_factor": 1.0, "top_k": 1},
    ):
        build_moe(**keys)
    assert not caplog.messages
    for _ in range(2):
        build_moe(capacity_factor=1.0)
    (line,) = caplog.messages
    assert "model.ffn.capacity_factor with top_k = 3 in a causal model" in line
    assert 'set model.ffn.drop_policy = "position"' in line
