"""Every family runs on another input than tokens, with the hidden vectors that tokens would have given."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.linear import Linear
from megatfm.models import build

V, B, T = 11, 2, 8
SIZES = {"vocab_size": V, "d_model": 16, "n_layers": 2, "attention.n_heads": 2, "ffn.d_ff": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {},
    "discriminator": {},
    "encoder_decoder": {"n_encoder_layers": 1, "position.name": "t5"},
    "xlnet": {"attention.name": "two_stream", "position.name": "transformer_xl"},
}


class Chances(nn.Module):
    """The expected vector of tokens that are known by their probabilities [B, T, V] alone."""

    def __init__(self, config: ModelConfig, initial: Any) -> None:
        super().__init__()
        self.matrix = Linear(V, config.d_model, initial("embedding", V, config.d_model), bias=False)

    def forward(self, chances_BTV: Tensor) -> Tensor:
        return self.matrix(chances_BTV)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_in_place_of_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDINGS._parts, "chances", Chances)
    torch.manual_seed(1)
    values = SIZES | FAMILIES[family] | {"family": family, "embedding.tied": False}
    of_tokens = build(ModelConfig.from_dotted(values)).double()
    of_chances = build(ModelConfig.from_dotted({**values, "embedding.name": "chances"})).double()
    for parameter in of_tokens.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = {
        name.replace("embedding.tokens.weight", "embedding.chances.matrix.weight"): tensor
        for name, tensor in of_tokens.state_dict().items()
    }
    for name, tensor in weights.items():
        if name.endswith("chances.matrix.weight"):
            weights[name] = tensor.T
    of_chances.load_state_dict(weights)
    tokens = torch.randint(V, (B, T))
    chances = F.one_hot(tokens, V).double()
    sides = ("", "encoder_") if family == "encoder_decoder" else ("",)
    other = {"order": torch.stack([torch.randperm(T) for _ in range(B)])} if family == "xlnet" else {}
    expected = of_tokens(**{f"{side}tokens": tokens for side in sides}, **other).hidden
    hidden = of_chances(**{f"{side}chances": chances for side in sides}, **other).hidden
    assert torch.allclose(hidden, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="chances"):
        of_chances(**{f"{side}tokens": tokens for side in sides}, **other)
