"""Embeddings: what is summed, in what order norm, dropout and projection come, and what is shared."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build

SMALL = {
    "family": "encoder", "vocab_size": 23, "d_model": 12, "n_layers": 4, "attention.n_heads": 3, "ffn.d_ff": 20,
    "norm.name": "layer_norm", "norm.placement": "post", "ffn.activation": "gelu", "position.name": "learned",
    "position.max_positions": 9,
}  # fmt: skip
TOKENS = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.randint(0, 3, (2, 7), generator=torch.Generator().manual_seed(1))
LAYOUT = SequenceMetadata(torch.arange(7).expand(2, 7))


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """Float64, no parameter where it starts."""
    generator = torch.Generator().manual_seed(2)
    module = module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


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
    embedding = moved(InputEmbedding(config, "encoder"))
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
    embedding = moved(InputEmbedding(config, "encoder"))
    keys = torch.tensor([5, 6])
    sequence = SequenceMetadata(torch.arange(7).expand(2, 7), rng_keys=keys)
    dropout_inputs: list[Tensor] = []
    embedding.projection.register_forward_pre_hook(lambda _, inputs: dropout_inputs.append(inputs[0]))
    embedding(TOKENS, sequence)
    embedding.eval()(TOKENS, sequence)
    dropped, full = dropout_inputs
    assert 0.2 < float((dropped == 0).double().mean()) < 0.8
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, 2 * full), rtol=1e-12, atol=0)


def test_packed_documents_count_from_their_own_start() -> None:
    embedding = moved(InputEmbedding(ModelConfig.from_dotted(**SMALL), "encoder"))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    sequence = SequenceMetadata(positions, torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2))
    second = embedding(TOKENS[:, 3:], SequenceMetadata(torch.arange(4).expand(2, 4)))
    assert torch.equal(embedding(TOKENS, sequence)[:, 3:], second)


def test_a_sequence_longer_than_the_table_is_refused() -> None:
    embedding = InputEmbedding(ModelConfig.from_dotted(**SMALL), "encoder")
    with pytest.raises(UsageError, match=r"a sequence has 10 tokens, but model\.position\.max_positions = 9"):
        embedding(torch.zeros(1, 10, dtype=torch.int64), SequenceMetadata(torch.arange(10)[None]))


def test_a_shared_block_gets_the_sum_of_its_uses_gradients() -> None:
    """ALBERT's parameter sharing: the same as blocks of their own with equal weights, gradients added up."""
    shared = moved(build(ModelConfig.from_dotted(**SMALL, distinct_layers=2)))
    alone = build(ModelConfig.from_dotted(**SMALL)).double()
    assert len(shared.encoder.layers) == 2
    state = shared.state_dict()
    for depth in range(4):
        source, target = f"encoder.layers.{depth // 2}.", f"encoder.layers.{depth}."
        state |= {
            target + name.removeprefix(source): tensor
            for name, tensor in shared.state_dict().items()
            if name.startswith(source)
        }
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


def test_tied_tables_get_both_gradients() -> None:
    config = ModelConfig.from_dotted(**SMALL)
    tied, apart = moved(build(config)), build(config.with_changes({"embedding.tied": False})).double()
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        model(TOKENS, targets=TOKENS.roll(1, 1)).losses["masked"].backward()
    table, head = apart.encoder.embedding.tokens.weight.grad, apart.head.weight.grad
    assert table.norm() > 1e-3
    assert head.norm() > 1e-3
    torch.testing.assert_close(tied.encoder.embedding.tokens.weight.grad, table + head, rtol=1e-10, atol=1e-10)


def test_layer_norm_by_its_formula() -> None:
    from megatfm.layers.norm import NORMS

    layer = moved(NORMS.get("layer_norm")(6, 1e-2))
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    expected_norm = norm(x, layer.weight, layer.bias, 1e-2)
    torch.testing.assert_close(layer(x), expected_norm, rtol=1e-12, atol=1e-12)
    weights = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    actual = torch.autograd.grad((layer(x) * weights).sum(), [x, layer.weight, layer.bias])
    expected = torch.autograd.grad((expected_norm * weights).sum(), [x, layer.weight, layer.bias])
    for value, expected_value in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, expected_value, rtol=1e-10, atol=1e-10)


def test_post_norm_ends_in_its_norm_and_a_stack_of_it_in_none() -> None:
    """N(x + S(x)), twice a block (Devlin et al. 2019); no norm after the last."""
    config = ModelConfig.from_dotted(**(SMALL | {"n_layers": 1}))
    model = moved(build(config))
    block = model.encoder.layers["0"]
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    y = F.layer_norm(x + block.attn(x, LAYOUT), (12,), *block.attn_residual.norm.parameters(), config.norm.eps)
    expected = F.layer_norm(y + block.ffn(y, LAYOUT), (12,), *block.ffn_residual.norm.parameters(), config.norm.eps)
    torch.testing.assert_close(block(x, LAYOUT), expected, rtol=1e-12, atol=1e-12)
    assert model.encoder.norm is None
    assert torch.equal(model(TOKENS).hidden, block(model.encoder.embedding(TOKENS, LAYOUT), LAYOUT))
