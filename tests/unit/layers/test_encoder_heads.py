"""Heads of encoders against their formulas: masked tokens, sentences, and tokens from the borders of their span."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.models import build

T = 12
SMALL = {
    "family": "encoder",
    "vocab_size": 23,
    "d_model": 12,
    "n_layers": 1,
    "attention.n_heads": 3,
    "ffn.d_ff": 20,
    "norm.name": "layer_norm",
    "norm.eps": 1e-3,
    "norm.placement": "post",
    "ffn.activation": "gelu",
    "position.name": "learned",
    "position.max_positions": T,
    "lm_head.name": "transform",
    "lm_head.bias": True,
}


def drawn(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def build_encoder(**options: object) -> torch.nn.Module:
    """Float64, no parameter where it starts."""
    model = build(ModelConfig.from_dotted(**(SMALL | options))).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def same_with_gradients(model: torch.nn.Module, actual: Tensor, expected: Tensor, touched: str) -> None:
    """Values, and every gradient of parameters that begin with `touched`, which must be there."""
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    named = dict(model.named_parameters())
    one, other = (
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in (actual, expected)
    )
    for name, mine, reference in zip(named, one, other, strict=True):
        assert (mine is None) == (reference is None), name
        if reference is None:
            continue
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
        assert not name.startswith(touched) or reference.norm() > 1e-6, name


def norm(x: Tensor, layer: torch.nn.Module) -> Tensor:
    return F.layer_norm(x, layer.weight.shape, layer.weight, layer.bias, 1e-3)


@pytest.mark.parametrize("embedding_dim", [None, 7])
def test_masked_tokens_through_the_transform(embedding_dim: int | None) -> None:
    """Only tokens with a target count; D to E, GELU, norm, the tied table and its bias (Devlin et al. 2019)."""
    model = build_encoder(**{"embedding.dim": embedding_dim})
    tokens, targets = (
        drawn(23, 2, T, seed=0),
        drawn(23, 2, T, seed=1).masked_fill(drawn(3, 2, T, seed=2) > 0, -100),
    )
    output = model(tokens)
    transform = model.head.transform
    inner = norm(
        F.gelu(F.linear(output.hidden, transform.dense.weight, transform.dense.bias)), transform.norm
    )
    logits = inner @ model.encoder.embedding.tokens.weight.T + model.head.bias
    torch.testing.assert_close(output.logits, logits, rtol=1e-12, atol=1e-12)
    expected = -sum(
        logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(T) if targets[b, t] >= 0
    )
    same_with_gradients(model, model(tokens, targets=targets).losses["masked"], expected, "head")


def test_nothing_masked_costs_nothing() -> None:
    model = build_encoder()
    loss = model(drawn(23, 2, T, seed=0), targets=torch.full((2, T), -100)).losses["masked"]
    loss.backward()
    assert loss == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("classes", [2, 5])
def test_sentences_from_their_first_tokens(classes: int) -> None:
    model = build_encoder(**{"extra_heads.sentence.classes": classes})
    tokens, targets = drawn(23, 2, T, seed=3), torch.full((2, T), -100)
    for row, start, label in ((0, 0, 1), (0, 7, 0), (1, 2, classes - 1)):
        targets[row, start] = label
    output = model(tokens)
    head = model.sentence
    pooled = torch.tanh(output.hidden @ head.pooler.weight.T + head.pooler.bias)
    logits = pooled @ head.classifier.weight.T + head.classifier.bias
    torch.testing.assert_close(output.predictions["sentence"], logits[:, 0], rtol=1e-12, atol=1e-12)
    expected = -sum(logits[b, t].log_softmax(-1)[targets[b, t]] for b, t in ((0, 0), (0, 7), (1, 2)))
    losses = model(tokens, targets=torch.full((2, T), -100), sentence_targets=targets).losses
    same_with_gradients(model, losses["sentence"], expected, "sentence")


SPANS = {0: [(2, 4), (6, 6), (9, 10)], 1: [(1, 1), (3, 7)]}
"""Row → first and last token of each masked span; the boundaries are the tokens beside them."""


def test_spans_from_their_boundaries() -> None:
    """Joshi et al. 2020, section 2.2: h = LN(GELU(W₂ LN(GELU(W₁ [x_{s−1}; x_{e+1}; p_{i−s+1}])))), then the table."""
    model = build_encoder(extra_heads={"boundary": {}})
    tokens, targets = drawn(23, 2, T, seed=4), torch.full((2, T), -100)
    left, right = torch.zeros(2, T, dtype=torch.int64), torch.zeros(2, T, dtype=torch.int64)
    original = drawn(23, 2, T, seed=5)
    for row, spans in SPANS.items():
        for first, last in spans:
            for i in range(first, last + 1):
                targets[row, i], left[row, i], right[row, i] = original[row, i], i - (first - 1), last + 1 - i
    hidden, head, expected = model(tokens).hidden, model.boundary, torch.zeros((), dtype=torch.float64)
    for row, spans in SPANS.items():
        for first, last in spans:
            for i in range(first, last + 1):
                place = head.positions.weight[i - first]
                x = torch.cat([hidden[row, first - 1], hidden[row, last + 1], place])
                x = norm(F.gelu(head.dense1.weight @ x + head.dense1.bias), head.norm1)
                x = norm(F.gelu(head.dense2.weight @ x + head.dense2.bias), head.norm2)
                logits = model.encoder.embedding.tokens.weight @ x + head.bias
                expected = expected - logits.log_softmax(-1)[original[row, i]]
    losses = model(tokens, targets=targets, span_left=left, span_right=right).losses
    same_with_gradients(model, losses["boundary"], expected, "boundary")
    both = losses["masked"] + losses["boundary"]
    model.zero_grad()
    both.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_label_smoothing_is_for_training_only() -> None:
    model = build_encoder(**{"lm_head.label_smoothing": 0.1})
    tokens, targets = drawn(23, 1, T, seed=6), drawn(23, 1, T, seed=7)
    logits = model(tokens).logits[0]
    plain = F.cross_entropy(logits, targets[0], reduction="sum")
    smoothed = F.cross_entropy(logits, targets[0], reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(model(tokens, targets=targets).losses["masked"], smoothed)
    torch.testing.assert_close(model.eval()(tokens, targets=targets).losses["masked"], plain)
