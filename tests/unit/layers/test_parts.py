"""The small parts against their formulas."""

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.layers.feed_forward import ACTIVATIONS, FFN
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.norm import NORMS
from megatfm.layers.sequence import SequenceMetadata


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_rms_norm_equals_its_formula(scale: float) -> None:
    norm = NORMS.get("rms_norm")(6, 1e-5).double()
    norm.weight.data = draw(6)
    x = scale * draw(3, 4, 6, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)


def test_swiglu_equals_its_formula() -> None:
    gate, activation = draw(3, 5), ACTIVATIONS.get("swiglu")
    assert activation.gated
    torch.testing.assert_close(activation.function(gate), gate / (1 + (-gate).exp()), rtol=1e-12, atol=1e-15)


def test_gated_ffn_equals_its_formula() -> None:
    config = ModelConfig(d_model=4, n_layers=1, attention={"n_heads": 1}, ffn={"d_ff": 6})
    ffn = FFN(config, make_initialiser(config)).double()
    sequence = SequenceMetadata(torch.arange(3).expand(2, 3))
    for seed, parameter in enumerate(ffn.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed)
    x = draw(2, 3, 4, seed=9)
    gate, up = x @ ffn.w_gate.weight.T, x @ ffn.w_up.weight.T
    expected = (gate * gate.sigmoid() * up) @ ffn.w_down.weight.T
    torch.testing.assert_close(ffn(x, sequence), expected, rtol=1e-12, atol=1e-12)
