"""Linformer against the paper's formula, one document and one head at a time."""

import logging

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, load_config
from megatfm.cost import TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.attention import linformer
from megatfm.layers.block import Block
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.support.reference_gradients import perturb
from tests.support.tensors import draw

LENGTH, RANK, HEADS, WIDTH = 13, 4, 3, 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2, [0] * 13])


def config_of(share: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_dotted(
        {"family": "encoder", "vocab_size": 7, "d_model": WIDTH, "n_layers": 1, "attention.name": "linformer",
         "attention.n_heads": HEADS, "attention.max_length": LENGTH + 2, "attention.projected_length": RANK,
         "attention.share": share, "attention.bias": True, "position.name": "none", "ffn.d_ff": 8, **changes},
    )  # fmt: skip


def written_out(layer: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    """softmax(Q (E K)ᵀ / √d) (F V) of one document [T, D], equation 7."""
    q, k, v = (getattr(layer, f"w{part}")(x).unflatten(-1, (HEADS, -1)) for part in "qkv")
    e = shared if layer.of_keys is None else layer.of_keys.weight
    f = e if layer.of_values is None else layer.of_values.weight
    heads = []
    for n in range(HEADS):
        e_TR, f_TR = ((w[..., n] if w.dim() == 3 else w)[: len(x)] for w in (e, f))
        scores = q[:, n] @ (e_TR.T @ k[:, n]).T / (WIDTH / HEADS) ** 0.5
        heads.append(scores.softmax(-1) @ (f_TR.T @ v[:, n]))
    return layer.wo(torch.cat(heads, -1))


@pytest.mark.parametrize(("packed", "piece", "max_score_bytes"), [
    (False, 4096, 2**24), (True, 4096, 2**24), (False, 4, 2**24), (False, 4096, 2 * HEADS * RANK * 5 * 8),
])  # fmt: skip
@pytest.mark.parametrize("share", ["none", "headwise", "key_value", "layerwise"])
def test_output_and_every_gradient(
    share: str, packed: bool, piece: int, max_score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linformer, "MAX_QUERIES_PER_CHUNK", piece)
    monkeypatch.setattr(linformer, "MAX_SCORE_BYTES", max_score_bytes)
    layer = Block(config_of(share), "encoder").attn.double()
    perturb(layer, scale=0.5)
    shared = draw(LENGTH + 2, RANK, seed=2)
    parameters = [*layer.parameters(), *([shared.requires_grad_()] if share == "layerwise" else [])]
    x, y = (draw(2, LENGTH, WIDTH, seed=seed) for seed in (0, 1))
    documents = DOCUMENTS if packed else torch.zeros(2, LENGTH, dtype=torch.int64)
    sequence = SequenceMetadata(torch.arange(LENGTH).expand(2, -1), DOCUMENTS if packed else None)
    counted = documents >= 0
    expected = torch.zeros_like(x)
    for row in range(2):
        for document in documents[row].unique():
            at = documents[row] == document
            expected[row, at] = written_out(layer, x[row, at], shared)
    right = torch.autograd.grad((expected * y)[counted].sum(), parameters)
    result = layer(x, sequence, shared)
    torch.testing.assert_close(result[counted], expected[counted])
    actual = torch.autograd.grad((result * y)[counted].sum(), parameters)
    largest = max(gradient.norm() for gradient in right)
    for a, b in zip(actual, right, strict=True):
        assert (a - b).norm() <= 1e-12 * largest


def test_pieces_drop_what_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Block(config_of("headwise", **{"attention.dropout": 0.5}), "encoder").attn.double()
    heads = [draw(2, HEADS, n, 4, seed=seed) for seed, n in enumerate((LENGTH, RANK, RANK))]
    keys = torch.randint(2**60, (2, HEADS, LENGTH))
    attended = layer._attend(*heads, keys)
    assert not torch.allclose(attended, layer._attend(*heads, None)), "nothing was dropped"
    monkeypatch.setattr(linformer, "MAX_QUERIES_PER_CHUNK", 4)
    torch.testing.assert_close(layer._attend(*heads, keys), attended, rtol=0, atol=1e-15)


def test_linformer_logs_its_kernel_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = Block(config_of("headwise"), "encoder").attn
    with caplog.at_level(logging.INFO, "megatfm"), torch.no_grad():
        for _ in range(2):
            layer(torch.zeros(1, LENGTH, WIDTH), SequenceMetadata(torch.arange(LENGTH)[None]))
    message = f"attention Linformer(rank={RANK}) on cpu in float32 runs in kernel products, without a mask"
    assert [record.message for record in caplog.records] == [message]


@pytest.mark.parametrize(("share", "more"), [
    ("headwise", 1_572_864), ("key_value", 786_432), ("layerwise", 65_536), ("none", 18_874_368),
])  # fmt: skip
def test_counts_on_roberta(share: str, more: int) -> None:
    options = ["model.attention.name=linformer", "model.attention.max_length=512", f"model.attention.share={share}"]
    with torch.device("meta"):
        model = build(load_config("roberta-base", options).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_697_433 + more


@pytest.mark.parametrize(("changes", "message"), [
    ({"family": "decoder"}, "it would leak the future in family = 'decoder'"),
    ({"position.name": "rope"}, "position.name = 'learned', 'sinusoidal' or 'none'"),
    ({"attention.pattern": {"name": "window", "width": 3}},
     "'linformer' supports full attention only: leave the pattern"),
])  # fmt: skip
def test_models_that_linformer_can_not_serve_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(config_of("none", **changes))


def test_rows_beyond_its_length() -> None:
    layer = Block(config_of("none"), "encoder").attn
    long = LENGTH + 3
    with pytest.raises(UsageError, match=r"rows have 16 tokens, but model\.attention\.max_length = 15: shorten"):
        layer(torch.zeros(1, long, WIDTH), SequenceMetadata(torch.arange(long)[None]))


def test_in_an_encoder_decoder_the_encoder_has_it() -> None:
    model = build(config_of("layerwise", family="encoder_decoder", n_layers=2))
    encoder, decoder = (next(iter(stack.layers.values())) for stack in (model.encoder, model.decoder))
    kinds = [type(layer).__name__ for layer in (encoder.attn, decoder.attn, decoder.cross)]
    assert kinds == ["LinformerAttention", "GroupedQueryAttention", "GroupedQueryAttention"]
    assert [name for name, _ in model.named_parameters() if "sketch" in name] == ["encoder.sketch.weight"]


def test_layers_that_share_have_the_same_sizes() -> None:
    kinds = {"layer_types": ["a", "b"], "n_layers": 2, "layer_type.a": {}}
    kinds["layer_type.b.attention.projected_length"] = RANK + 1
    message = r"model\.layer_type changes max_length or projected_length: give all layers the same, or choose"
    with pytest.raises(UsageError, match=message):
        build(config_of("layerwise", **kinds))


def test_linformer_costs_its_rank() -> None:
    """Each key, value and query meets as many numbers as the rank, besides the four projections."""
    layer = Block(config_of("none"), "encoder").attn
    cost = layer.cost(TokenCounts(LENGTH))
    assert cost.attention_macs == cost.visible_attention_macs == 4 * RANK * LENGTH * WIDTH
    assert cost.matmul_macs == 4 * WIDTH * WIDTH * LENGTH
