"""The frequencies of scaled rotary positions, against transformers' own."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatfm.config.position import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling
from megatfm.layers.rope import scaled_frequencies

LONGEST = 4096


def theirs(
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
            theirs("linear", width, theta, factor=8.0),
        )

    @pytest.mark.parametrize("stretch", [1.0, 2.0, 7.0])
    def test_ntk_scaling_equals_transformers(self, width: int, theta: float, stretch: float) -> None:
        """Their dynamic form at a length: `factor · length / longest − (factor − 1)` is the factor of our fixed one."""
        at = 3.0 * stretch - 2.0
        self.check(
            scaled_frequencies(width, theta, NtkScaling(factor=at)),
            theirs("dynamic", width, theta, length=int(stretch * LONGEST), factor=3.0),
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
        expected = theirs(
            "yarn", width, theta, factor=factor, original_max_position_embeddings=1024, beta_fast=betas[0],
            beta_slow=betas[1], **more,
        )  # fmt: skip
        self.check(scaled_frequencies(width, theta, scaling), expected)

    @pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 8.0)])
    def test_llama3_scaling_equals_transformers(
        self, width: int, theta: float, low: float, high: float
    ) -> None:
        scaling = Llama3Scaling(factor=8.0, original_length=8192, low_freq_factor=low, high_freq_factor=high)
        expected = theirs(
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
