"""Rotary positions and their scaled frequencies against transformers', and the property they are made for."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megatfm.config.position import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling
from megatfm.layers.rope import compute_frequencies, rotary_table, rotate, scaled_frequencies

B, N, T, H, THETA = 2, 3, 7, 8, 1000.0


def draw(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, N, T, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def test_rope_equals_transformers() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 4, 3, 900, 1, 0, 77]])
    cos, sin = rotary_table(positions, compute_frequencies(H, THETA))
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
        table = rotary_table(positions + start, compute_frequencies(H, THETA))
        return rotate(q, *table) @ rotate(k, *table).transpose(-1, -2)

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-8)


def test_turning_keeps_lengths_and_position_zero() -> None:
    x = draw(1)
    turned = rotate(x, *rotary_table(torch.arange(T).expand(B, T), compute_frequencies(H, THETA)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    assert not torch.equal(turned[:, :, 1], x[:, :, 1])


def test_bfloat16_is_turned_in_float32_also_far_out() -> None:
    x = draw(1, torch.bfloat16)
    positions = torch.arange(T).expand(B, T) + 1_000_003
    table = rotary_table(positions, compute_frequencies(H, THETA))
    assert table[0].dtype == torch.float64
    turned = rotate(x, *table)
    assert turned.dtype == torch.bfloat16
    exact = rotate(x.double(), *table)
    # Rounded once, at the end: bfloat16 keeps eight binary digits, and float32 is exact beside it.
    assert ((turned.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


LONGEST = 4096


def hf_frequencies(
    kind: str, width: int, theta: float, length: int | None = None, **parameters: float
) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, head_dim=width, max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
class TestFrequencies:
    def check(self, actual: tuple[torch.Tensor, float], expected: tuple[torch.Tensor, float]) -> None:
        """transformers computes in float32."""
        assert actual[0].dtype == torch.float64
        torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=1e-5, atol=0)
        assert actual[1] == pytest.approx(expected[1], rel=1e-12)

    def test_linear_scaling_equals_transformers(self, width: int, theta: float) -> None:
        self.check(
            scaled_frequencies(width, theta, LinearScaling(factor=8.0)),
            hf_frequencies("linear", width, theta, factor=8.0),
        )

    @pytest.mark.parametrize("stretch", [1.0, 2.0, 7.0])
    def test_ntk_scaling_equals_transformers(self, width: int, theta: float, stretch: float) -> None:
        """Their dynamic form at a length: `factor · length / longest − (factor − 1)` is the factor of our fixed one."""
        at = 3.0 * stretch - 2.0
        self.check(
            scaled_frequencies(width, theta, NtkScaling(factor=at)),
            hf_frequencies("dynamic", width, theta, length=int(stretch * LONGEST), factor=3.0),
        )

    @pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
    @pytest.mark.parametrize("betas", [(32.0, 1.0), (8.0, 2.0)])
    @pytest.mark.parametrize("attention_factor", [None, 1.3])
    def test_yarn_scaling_equals_transformers(
        self,
        width: int,
        theta: float,
        factor: float,
        betas: tuple[float, float],
        attention_factor: float | None,
    ) -> None:
        more = {} if attention_factor is None else {"attention_factor": attention_factor}
        scaling = YarnScaling(
            factor=factor, original_length=1024, beta_fast=betas[0], beta_slow=betas[1], **more
        )  # fmt: skip
        expected = hf_frequencies(
            "yarn", width, theta, factor=factor, original_max_position_embeddings=1024, beta_fast=betas[0],
            beta_slow=betas[1], **more,
        )  # fmt: skip
        self.check(scaled_frequencies(width, theta, scaling), expected)

    @pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 8.0)])
    def test_llama3_scaling_equals_transformers(
        self, width: int, theta: float, low: float, high: float
    ) -> None:
        scaling = Llama3Scaling(factor=8.0, original_length=8192, low_freq_factor=low, high_freq_factor=high)
        expected = hf_frequencies(
            "llama3", width, theta, factor=8.0, original_max_position_embeddings=8192, low_freq_factor=low,
            high_freq_factor=high,
        )  # fmt: skip
        self.check(scaled_frequencies(width, theta, scaling), expected)


def test_ntk_keeps_the_fastest_channel_and_stretches_the_slowest() -> None:
    plain, _ = scaled_frequencies(64, 10_000.0, None)
    stretched, factor = scaled_frequencies(64, 10_000.0, NtkScaling(factor=4.0))
    assert factor == 1.0
    assert stretched[0] == plain[0] == 1.0
    assert float(plain[-1] / stretched[-1]) == pytest.approx(4.0)
    assert math.isclose(float(plain[1]), 10_000 ** (-2 / 64))
