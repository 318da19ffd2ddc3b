"""Rotary positions against transformers', and the property they are made for."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megatfm.layers.rope import frequencies, rotary_table, rotate

B, N, T, H, THETA = 2, 3, 7, 8, 1000.0


def draw(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, N, T, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def test_rope_equals_transformers() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 4, 3, 900, 1, 0, 77]])
    cos, sin = rotary_table(positions, frequencies(H, THETA))
    q, k = draw(1), draw(2)
    expected = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1)[:, 0], torch.cat((sin, sin), -1)[:, 0])
    torch.testing.assert_close(rotate(q, cos, sin), expected[0])
    torch.testing.assert_close(rotate(k, cos, sin), expected[1])
    for i in range(H // 2):  # the angles, by hand
        angle = positions.double() * THETA ** (-2 * i / H)
        torch.testing.assert_close(cos[:, 0, :, i], angle.cos(), rtol=0, atol=1e-13)
        torch.testing.assert_close(sin[:, 0, :, i], angle.sin(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shift", [1, 1000, 10**6])
def test_a_score_depends_on_the_distance_alone(shift: int) -> None:
    q, k = draw(1), draw(2)
    positions = torch.arange(T).expand(B, T)

    def scores(start: int) -> torch.Tensor:
        table = rotary_table(positions + start, frequencies(H, THETA))
        return rotate(q, *table) @ rotate(k, *table).transpose(-1, -2)

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-8)


def test_turning_keeps_lengths_and_position_zero() -> None:
    x = draw(1)
    turned = rotate(x, *rotary_table(torch.arange(T).expand(B, T), frequencies(H, THETA)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    assert not torch.equal(turned[:, :, 1], x[:, :, 1])


def test_bfloat16_is_turned_in_float32_also_far_out() -> None:
    x = draw(1, torch.bfloat16)
    positions = torch.arange(T).expand(B, T) + 1_000_003
    table = rotary_table(positions, frequencies(H, THETA))
    assert table[0].dtype == torch.float64
    turned = rotate(x, *table)
    assert turned.dtype == torch.bfloat16
    exact = rotate(x.double(), *table)
    # Rounded once, at the end: bfloat16 keeps eight binary digits, and float32 is exact beside it.
    assert ((turned.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
