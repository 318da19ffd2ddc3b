"""How encoders start: truncated normal as in BERT's code, normal as in RoBERTa's."""

from statistics import NormalDist

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import TruncatedNormal, draw, initialise
from megatfm.models import build

SMALL = {
    "family": "encoder",
    "vocab_size": 300,
    "d_model": 96,
    "n_layers": 2,
    "attention.n_heads": 3,
    "ffn.d_ff": 200,
    "norm.name": "layer_norm",
    "norm.placement": "post",
    "embedding.norm": True,
    "ffn.activation": "gelu",
    "attention.bias": True,
    "ffn.bias": True,
    "position.name": "learned",
    "position.max_positions": 64,
    "embedding.n_segments": 2,
    "lm_head.name": "transform",
    "lm_head.bias": True,
}
SENTENCE = {"extra_heads.sentence.classes": 2}
ELECTRA = {
    "family": "electra", "embedding.dim": 64,
    "generator": {"d_model": 48, "n_heads": 1, "d_ff": 96},
}  # fmt: skip


def test_the_truncated_normal_is_the_distribution_of_its_name() -> None:
    """Quantiles against the standard library's normal, cut at two standard deviations."""
    values = draw(TruncatedNormal(0.02), 0, "x", (1000, 500), (0, 0), (1000, 500)).flatten().double() / 0.02
    assert values.abs().max() <= 2
    assert values.abs().max() > 1.999
    normal = NormalDist()
    low, high = normal.cdf(-2), normal.cdf(2)
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        expected = normal.inv_cdf(low + share * (high - low))
        assert float((values <= expected).double().mean()) == pytest.approx(share, abs=5 * 0.5 / 500_000**0.5)
    assert float(values.std()) == pytest.approx(0.8796, abs=0.003)


@pytest.mark.parametrize("options", [SENTENCE, ELECTRA], ids=["encoder", "electra"])
@pytest.mark.parametrize(("init", "spread"), [("bert", 0.8796), ("normal", 1.0)])
def test_matrices_by_the_distribution_biases_0_norms_1(
    init: str, spread: float, options: dict[str, object]
) -> None:
    model = build(ModelConfig.from_dotted(**(SMALL | options), **{"init.name": init, "init.std": 0.05}))
    initialise(model, seed=1)
    kinds = set[str]()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            kinds.add("bias")
            assert not parameter.any(), name
        elif "norm" in name:
            kinds.add("norm")
            assert (parameter == 1).all(), name
        else:
            kinds.add("matrix")
            error = 6 / (2 * parameter.numel()) ** 0.5
            assert float(parameter.detach().std()) == pytest.approx(0.05 * spread, rel=error), name
            assert (parameter.abs() <= 0.1).all() or init == "normal", name
    assert kinds == {"bias", "norm", "matrix"}


def test_no_two_matrices_start_alike() -> None:
    model = build(ModelConfig.from_dotted(**SMALL, **{"init.name": "bert"}))
    initialise(model, seed=1)
    matrices = [p.flatten()[:50] for p in model.parameters() if p.dim() == 2]
    same = [torch.equal(one, other) for i, one in enumerate(matrices) for other in matrices[:i]]
    assert not any(same)
