"""Every combination of parts against a transformer that is written out, values and gradients; and that it trains.

This is the reference for what transformers has not: Shaw's positions, DeepNorm, sandwich norms, the Transformer of 2017
with its three ties, ReLU², label smoothing, soft caps together with all else, heads for later tokens, prefixes.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.models import build
from tests.support.dense_reference import DenseTransformer, compute_alibi_slopes
from tests.support.models import (
    ACTIVATIONS,
    DENSE_VOCABULARY,
    MASKS,
    NORM_POSITIONS,
    NORMS,
    POSITIONS,
    SMALL_DENSE,
    combination,
)
from tests.support.reference_gradients import perturb

PARTS = {
    "transformer-2017": {"family": "encoder_decoder", "norm.name": "layer_norm", "norm.placement": "post",
                         "ffn.activation": "relu", "ffn.bias": True, "position.name": "sinusoidal",
                         "embedding.scale": 4.0, "lm_head.label_smoothing": 0.1, "n_encoder_layers": 3},
    "grouped heads, qk-norm": {"attention.n_heads": 4, "attention.n_kv_heads": 2, "attention.qk_norm": True,
                               "attention.head_dim": 6},
    "soft caps": {"attention.softcap": 1.5, "lm_head.softcap": 2.0, "lm_head.bias": True, "position.name": "alibi"},
    "soft cap with shaw, one key-value head": {
        "attention.softcap": 1.5, "position.name": "shaw", "position.max_distance": 2, "attention.n_heads": 4,
        "attention.n_kv_heads": 1,
    },
    "label smoothing, soft cap, scales": {
        "lm_head.label_smoothing": 0.2, "lm_head.softcap": 3.0, "lm_head.scale": 0.5, "attention.scale": 0.7,
        "embedding.tied": False,
    },
    "later tokens": {"n_mtp_heads": 2, "lm_head.label_smoothing": 0.1},
    "alibi with six heads": {"attention.n_heads": 6, "d_model": 24, "position.name": "alibi"},
    "t5 with more encoder layers, biases": {
        "family": "encoder_decoder", "n_encoder_layers": 3, "attention.bias": True, "position.name": "t5",
        "position.buckets": 4, "position.max_distance": 5, "norm.placement": "deepnorm", "init.name": "deepnorm",
    },
}  # fmt: skip
DOCUMENTS = (6, 1, 4)
PREFIXES = (3, 0, 4)
ENCODER_DOCUMENTS = (5, 3, 2)


def draw(n: int, seed: int) -> Tensor:
    return torch.randint(0, DENSE_VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def spans(lengths: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(lengths))
    return [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def row(lengths: tuple[int, ...], padding: int) -> dict[str, Tensor]:
    """Documents and positions [1, T] of a packed row."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return {
        "documents": torch.cat([documents, torch.full((padding,), -1)])[None],
        "positions": torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])[None],
    }


def batch(config: ModelConfig, mask: str) -> dict[str, Tensor]:
    """One row of three documents and two padding tokens."""
    result = {**row(DOCUMENTS, 2), "tokens": draw(13, 1)[None], "targets": draw(13, 2)[None]}
    result["targets"] = result["targets"].where(result["documents"] >= 0, -100)
    result["targets"][0, 2] = -100
    if mask == "prefix":
        result["prefix"] = torch.zeros(1, 13, dtype=torch.int64)
        for piece, n in zip(spans(DOCUMENTS), PREFIXES, strict=True):
            result["prefix"][0, piece.start : piece.start + n] = 1
    if config.family == "encoder_decoder":
        result |= {f"encoder_{key}": value for key, value in row(ENCODER_DOCUMENTS, 1).items()}
        result["encoder_tokens"] = draw(11, 3)[None]
    return result


def reference(config: ModelConfig, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of the documents one after the other, and the sum of all losses."""
    dense = DenseTransformer(config, dict(model.named_parameters()))
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for document, piece in enumerate(spans(DOCUMENTS)):
        options: dict[str, Any] = {"prefix": PREFIXES[document] if "prefix" in inputs else 0}
        if "encoder_tokens" in inputs:
            options["encoder_tokens"] = inputs["encoder_tokens"][0, spans(ENCODER_DOCUMENTS)[document]]
        hidden = dense.hidden(inputs["tokens"][0, piece], **options)
        logits.append(dense.logits(hidden))
        targets = inputs["targets"][0, piece]
        loss = loss + dense.loss(logits[-1], targets)
        for ahead in range(1, config.n_mtp_heads + 1):
            later = torch.full_like(targets, -100)
            later[:-ahead] = targets[ahead:]
            loss = loss + dense.loss(dense.future_logits(hidden, ahead), later)
    return torch.cat(logits), loss


def compare(config: ModelConfig, mask: str) -> None:
    """Logits, loss and the gradient of every parameter, in float64."""
    actual = build(config).double()
    for _, module in actual.named_modules():
        if hasattr(module, "slopes"):
            module.slopes.copy_(torch.tensor(compute_alibi_slopes(config.attention.n_heads)))
    perturb(actual, scale=0.4)
    result = batch(config, mask)
    inputs = {key: value for key, value in result.items() if key != "targets"}
    expected_logits, expected_loss = reference(config, actual, result)
    logits = actual(**inputs).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[0, : sum(DOCUMENTS)], expected_logits, rtol=1e-10, atol=1e-10)
    loss = sum(actual(**result).losses.values())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    named = dict(actual.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    expected = torch.autograd.grad(expected_loss, list(named.values()))
    norm = torch.stack([g.norm() for g in expected]).norm()
    for name, first, second in zip(named, gradients, expected, strict=True):
        assert (first - second).norm() <= 1e-9 * torch.maximum(second.norm(), 1e-6 * norm), name
        assert second.norm() > 1e-6 * norm or name.endswith("wk.bias"), f"nothing to compare for {name}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_under_every_mask_and_norm_position(position: str, mask: str) -> None:
    turns = itertools.cycle(itertools.product(NORMS, ACTIVATIONS))
    for norm_position in NORM_POSITIONS:
        norm, activation = next(turns)
        compare(combination(norm_position, norm, activation, position, mask), mask)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_every_norm(activation: str) -> None:
    for norm in NORMS:
        compare(combination("pre", norm, activation, "rope", "causal"), "causal")


@pytest.mark.parametrize("parts", PARTS)
def test_combined_parts_equal_the_dense_reference(parts: str) -> None:
    config = ModelConfig.from_dotted(**(SMALL_DENSE | PARTS[parts]))
    compare(config, "pairs" if config.family == "encoder_decoder" else "causal")


def test_transformer_2017_has_one_table_for_both_sides_and_the_head() -> None:
    model = build(ModelConfig.from_dotted(**(SMALL_DENSE | PARTS["transformer-2017"])))
    assert model.encoder.embedding.tokens is model.decoder.embedding.tokens
    assert model.head.weight is model.encoder.embedding.tokens.weight
    assert model.encoder.norm is None
    assert model.decoder.norm is None
