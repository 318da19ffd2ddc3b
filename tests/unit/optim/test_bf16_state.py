"""Moments in bfloat16: what is rounded by chance is right on average, and the same wherever an element lies."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.engines.interface import ShardLocation
from megatfm.ops.keyed_random import BF16_STEPS, hash_elements, stochastic_round
from megatfm.optim import optimizers
from megatfm.optim.optimizers import BF16StateAdamW

BETAS = (0.9, 0.999)


@pytest.mark.parametrize("value", [1.0, 1.003, -0.3, 1e-30, 1e-41, 0.0, 3.0e38])
def test_over_all_chances_the_mean_is_the_value(value: float) -> None:
    exact = torch.tensor(value)
    rounded = stochastic_round(exact.expand(BF16_STEPS).contiguous(), torch.arange(BF16_STEPS))
    assert rounded.double().mean().item() == exact.double().item()
    ends = rounded.unique()
    assert len(ends) == (1 if exact.bfloat16().float() == exact else 2)
    assert int(ends[-1:].view(torch.int16) - ends[:1].view(torch.int16)) in (0, 1, -1)  # neighbours


def test_a_block_s_hashes_are_those_of_its_place_in_the_whole() -> None:
    shape, cpu = (7, 5, 3), torch.device("cpu")
    full = hash_elements(11, shape, (0, 0, 0), shape, cpu)
    assert torch.equal(hash_elements(11, shape, (2, 1, 0), (4, 3, 3), cpu), full[2:6, 1:4])
    assert full.unique().numel() == full.numel()
    assert not torch.isin(hash_elements(12, shape, (0, 0, 0), shape, cpu), full).any()


def stepped(
    weight: Tensor, gradients: list[Tensor], place: ShardLocation | None, **options: Any
) -> BF16StateAdamW:
    optimizer = BF16StateAdamW([{"params": [weight], **options}], lr=1e-2, betas=BETAS, eps=1e-8)
    if place:
        optimizer.set_shard_locations({weight: place})
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return optimizer


def test_the_arithmetic_is_that_of_torch_s_adamw() -> None:
    """To the bit in the first step, whose moments begin at 0; later as far as bfloat16 goes."""
    start, random = torch.randn(40, 30), torch.Generator().manual_seed(0)
    gradients = [torch.randn(40, 30, generator=random) for _ in range(5)]
    for n in (1, 5):
        actual, expected = start.clone(), start.clone()
        optimizer = stepped(actual, gradients[:n], None, weight_decay=0.1)
        torch_s = torch.optim.AdamW([expected], lr=1e-2, betas=BETAS, eps=1e-8, weight_decay=0.1, fused=True)
        largest: dict[str, Tensor] = {}
        for gradient in gradients[:n]:
            expected.grad = gradient.clone()
            torch_s.step()
            for key in ("exp_avg", "exp_avg_sq"):
                now = torch_s.state[expected][key].abs()
                largest[key] = torch.maximum(largest.get(key, now), now)
        # An update is the rate times m/√v, and a moment is off by 2⁻⁷ of itself for each step that it has gone through.
        assert (actual - expected).abs().max() <= 1e-2 * 2**-7 * n * (n - 1)
        for key in ("exp_avg", "exp_avg_sq"):
            kept, wanted = optimizer.state[actual][key], torch_s.state[expected][key]
            assert kept.dtype == torch.bfloat16
            # A step of bfloat16 at each rounding, of what was there then.
            assert ((kept - wanted).abs() <= 1.1 * n * 2**-7 * largest[key]).all()


def test_a_long_mean_moves_though_each_step_is_less_than_half_of_bfloat16_s() -> None:
    weight = torch.zeros(4096)
    optimizer = stepped(weight, [torch.ones(4096)], None)
    square = optimizer.state[weight]["exp_avg_sq"]
    square.fill_(1.0)
    for _ in range(300):
        weight.grad = torch.full((4096,), 1.2)
        optimizer.step()
    assert (0.999 * square.new_ones(()) + 0.001 * 1.44).bfloat16() == 1  # to the nearest, it would stay
    expected = 1.44 - 0.44 * 0.999**300
    assert square.float().mean().item() == pytest.approx(expected, abs=0.01)


def test_pieces_and_blocks_are_moved_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gradients = torch.randn(9, 8), [torch.randn(9, 8) for _ in range(3)]
    full = start.clone()
    kept = stepped(full, gradients, ShardLocation("a", (9, 8), (0, 0))).state[full]
    monkeypatch.setattr(optimizers, "CHUNK_ELEMENTS", 20)
    block = start[3:, 2:7].clone()
    mine = stepped(block, [g[3:, 2:7] for g in gradients], ShardLocation("a", (9, 8), (3, 2))).state[block]
    assert torch.equal(block, full[3:, 2:7])
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(mine[key], kept[key][3:, 2:7])
    other = start.clone()
    stepped(other, gradients, ShardLocation("b", (9, 8), (0, 0)))
    assert not torch.equal(other, full), "every parameter has chances of its own"
