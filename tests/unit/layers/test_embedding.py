"""Embeddings: what is summed, in what order norm, dropout and projection come, and what is shared."""

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.support.tensors import move_parameters

SMALL = {
    "family": "encoder", "vocab_size": 23, "d_model": 12, "n_layers": 4, "attention.n_heads": 3, "ffn.d_ff": 20,
    "norm.name": "layer_norm", "norm.placement": "post", "ffn.activation": "gelu", "position.name": "learned",
    "position.max_positions": 9,
}  # fmt: skip
TOKENS = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.randint(0, 3, (2, 7), generator=torch.Generator().manual_seed(1))
LAYOUT = SequenceMetadata(torch.arange(7).expand(2, 7))


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


@pytest.mark.parametrize("offset", [0, 2])
def test_factorised_with_all_that_there_is(offset: int) -> None:
    """Scale on the tokens alone; sum, norm, then the projection from E to D (Lan et al. 2020; Clark et al. 2020)."""
    config = ModelConfig.from_dotted(
        **SMALL,
        **{"embedding.dim": 5, "embedding.norm": True, "embedding.n_segments": 3, "embedding.scale": 1.5,
           "position.offset": offset, "norm.eps": 1e-3},
    )  # fmt: skip
    embedding = move_parameters(InputEmbedding(config, "encoder"), 1.0)
    named = dict(embedding.named_parameters())
    assert {name: tuple(p.shape) for name, p in named.items()} == {
        "tokens.weight": (23, 5), "positions.weight": (9 + offset, 5), "segments.weight": (3, 5),
        "norm.weight": (5,), "norm.bias": (5,), "projection.weight": (12, 5), "projection.bias": (12,),
    }  # fmt: skip
    x = 1.5 * named["tokens.weight"][TOKENS] + named["positions.weight"][torch.arange(7) + offset]
    x = norm(x + named["segments.weight"][SEGMENTS], named["norm.weight"], named["norm.bias"], 1e-3)
    expected = x @ named["projection.weight"].T + named["projection.bias"]
    torch.testing.assert_close(embedding(TOKENS, LAYOUT, SEGMENTS), expected, rtol=1e-12, atol=1e-12)
    zero = embedding(TOKENS, LAYOUT, torch.zeros_like(SEGMENTS))
    assert torch.equal(embedding(TOKENS, LAYOUT), zero), "without segments, all are in the first"


def test_dropout_comes_after_the_norm_and_before_the_projection() -> None:
    config = ModelConfig.from_dotted(**SMALL, dropout=0.5, **{"embedding.dim": 5, "embedding.norm": True})
    embedding = move_parameters(InputEmbedding(config, "encoder"), 1.0)
    sequence = SequenceMetadata(torch.arange(7).expand(2, 7), rng_keys=torch.tensor([5, 6]))
    dropout_inputs: list[Tensor] = []
    embedding.projection.register_forward_pre_hook(lambda _, inputs: dropout_inputs.append(inputs[0]))
    embedding(TOKENS, sequence)
    embedding.eval()(TOKENS, sequence)
    dropped, full = dropout_inputs
    assert 0.2 < float((dropped == 0).double().mean()) < 0.8
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, 2 * full), rtol=1e-12, atol=0)


def test_a_shared_block_gets_the_sum_of_its_uses_gradients() -> None:
    """ALBERT's parameter sharing: the same as blocks of their own with equal weights, gradients added up."""
    shared = move_parameters(build(ModelConfig.from_dotted(**SMALL, distinct_layers=2)), 1.0)
    alone = build(ModelConfig.from_dotted(**SMALL)).double()
    assert len(shared.encoder.layers) == 2
    state = shared.state_dict()
    for depth in range(4):
        block = shared.encoder.layers[str(depth // 2)].state_dict()
        state |= {f"encoder.layers.{depth}.{name}": tensor for name, tensor in block.items()}
    alone.load_state_dict(state)
    torch.testing.assert_close(shared(TOKENS).logits, alone(TOKENS).logits, rtol=1e-12, atol=1e-12)
    for model in (shared, alone):
        model(TOKENS, targets=TOKENS.roll(1, 1)).losses["masked"].backward()
    local = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in shared.named_parameters():
        expected = local[name]
        if name.startswith("encoder.layers."):
            _, _, number, remaining = name.split(".", 3)
            expected = sum(local[f"encoder.layers.{2 * int(number) + i}.{remaining}"] for i in (0, 1))
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-9)
        assert parameter.grad.norm() > 1e-6 or name.endswith("wk.bias")
