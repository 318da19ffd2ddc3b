"""Small models for each attention pattern, patterns that only name pairs, packed rows, models that no kernel knows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.pattern import BlockBounds
from megatfm.ops.cross_entropy import IGNORE
from tests.support.models import DROPOUTS, SMALL_MODEL

DROPOUT_DECODER = {**SMALL_MODEL, **DROPOUTS, "attention.n_kv_heads": 2}
DROPOUT_ENCODER = {**SMALL_MODEL, **DROPOUTS, "family": "encoder", "lm_head.bias": True}
LINFORMER_ENCODER = {
    **DROPOUT_ENCODER, "attention.name": "linformer", "attention.max_length": 12, "attention.projected_length": 3,
    "position.name": "learned", "position.max_positions": 12,
}  # fmt: skip
COMPRESSED_DECODER = {**SMALL_MODEL, **DROPOUTS, "position.name": "sinusoidal"}
PATTERN_MODELS = {
    "window": {**DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 3}},
    "window with soft caps": {
        **DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 5}, "attention.softcap": 2.0,
    },
    "sinks": {**DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 5}, "attention.sinks": True},
    "window of an encoder": {**DROPOUT_ENCODER, "attention.pattern": {"name": "window", "width": 4}},
    "alternating": {
        **DROPOUT_DECODER, "layer_types": ["near", "all"],
        "layer_type.near.attention.pattern": {"name": "window", "width": 3}, "layer_type.all.position.name": "none",
    },
    "first tokens": {**DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 2, "initial_tokens": 1}},
    "dilated": {**DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 2, "dilation": 2}},
    "chunked": {**DROPOUT_DECODER, "attention.pattern": {"name": "chunked", "size": 3}},
    "strided": {**DROPOUT_DECODER, "attention.pattern": {"name": "strided", "stride": 2}},
    "bigbird": {**DROPOUT_ENCODER, "attention.pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 1}},
    "bigbird of a decoder": {
        **DROPOUT_DECODER, "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    },
    "longformer": {
        **DROPOUT_ENCODER, "attention.name": "longformer",
        "attention.pattern": {"name": "longformer", "width": 2, "global_tokens": [0, 3]}, "position.name": "learned",
        "position.max_positions": 12,
    },
    "longformer without projections of its own": {
        **DROPOUT_ENCODER, "attention.pattern": {"name": "longformer", "width": 2},
    },
    "linformer": {**LINFORMER_ENCODER, "attention.share": "none"},
    "linformer, shared by heads": {**LINFORMER_ENCODER, "attention.share": "headwise"},
    "linformer, shared by keys and values": {**LINFORMER_ENCODER, "attention.share": "key_value"},
    "linformer, shared by layers": {**LINFORMER_ENCODER, "attention.share": "layerwise"},
    "linformer of an encoder-decoder": {
        **{key: value for key, value in LINFORMER_ENCODER.items() if key != "head.bias"}, "family": "encoder_decoder",
        "attention.share": "layerwise",
    },
    "compressed": {**COMPRESSED_DECODER, "attention.name": "compressed"},
    "local, compressed and experts": {
        **{key: value for key, value in COMPRESSED_DECODER.items() if key != "attention.dropout"}, "n_layers": 3,
        "layer_types": ["local", "compressed", "experts"],
        "layer_type.local.attention.pattern": {"name": "chunked", "size": 5},
        "layer_type.compressed.attention.name": "compressed",
        "layer_type.experts.attention.pattern": {"name": "chunked", "size": 5},
        "layer_type.experts.ffn": {
            "name": "moe", "dropout": 0.0, "d_ff": 16, "n_experts": 4, "top_k": 2,
            "router": {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1},
        },
    },
    "fixed": {**DROPOUT_DECODER, "attention.pattern": {"name": "fixed", "stride": 3, "n_summary_tokens": 1}},
}  # fmt: skip


@dataclass(frozen=True)
class LastTokensPattern(AttentionPattern):
    """The last `width` tokens."""

    width: int

    @property
    def is_relative(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (k <= q) & (k > q - self.width)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (k.first <= q.last) & (k.last > q.first - self.width)


@dataclass(frozen=True)
class SameChunkPattern(AttentionPattern):
    """Earlier tokens of the same chunk of the document, longer chunks in later heads."""

    size: int

    @property
    def differs_by_head(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        size = self.size + heads
        return (k <= q) & (k // size == q // size)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        size = self.size + heads
        return (k.first <= q.last) & (k.last // size >= q.first // size)


ROW_LENGTH = 29


def packed_batch(family: str, *, prefix: bool) -> dict[str, Tensor]:
    """Two rows, of which the first has two documents and padding."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(0, 20, (2, ROW_LENGTH), generator=generator) for _ in range(3)]
    documents = torch.tensor([[0] * 17 + [1] * 9 + [-1] * 3, [0] * 29])
    first = (documents == 0).sum(1, keepdim=True) * (documents == 1)
    result = {
        "tokens": draw[0], "targets": draw[1], "documents": documents,
        "positions": torch.arange(ROW_LENGTH).expand(2, -1) - first, "keys": torch.tensor([5, 6]),
    }  # fmt: skip
    if family == "encoder_decoder":
        result |= {f"encoder_{key}": result[key] for key in ("documents", "positions")} | {"encoder_tokens": draw[2]}
    return result | ({"prefix": torch.arange(ROW_LENGTH).expand(2, -1) < 3} if prefix else {})


def loss_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the sum of all loss terms."""
    model.zero_grad()
    torch.stack([*model(**inputs).losses.values()]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SCORE_SIZES = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 24}
SHAW_OPTIONS = {"position.name": "shaw", "position.max_distance": 3, "attention.dropout": 0.2}
SCORE_MODELS = {
    "shaw": SHAW_OPTIONS,
    "shaw, prefixes": SHAW_OPTIONS,
    "shaw, window": {**SHAW_OPTIONS, "attention.pattern": {"name": "window", "width": 5, "initial_tokens": 1}},
    "shaw, bigbird": {
        **SHAW_OPTIONS, "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    },
    "shaw of an encoder": {**SHAW_OPTIONS, "family": "encoder"},
    "deberta": {"family": "encoder", "attention.name": "deberta", "attention.dropout": 0.2,
                "position.name": "deberta", "position.max_distance": 4},
    "deberta v3": {"family": "encoder", "attention.name": "deberta_v2", "position.name": "deberta_v2",
                   "position.buckets": 4, "position.max_distance": 8},
    "xlnet": {"family": "xlnet", "attention.name": "two_stream", "attention.dropout": 0.2,
              "position.name": "transformer_xl"},
}  # fmt: skip


def score_inputs(family: str, *, prefix: bool) -> dict[str, Tensor]:
    """Packed rows; of XLNet, with unequally many targets in random orders, and segments."""
    result = packed_batch(family, prefix=prefix)
    if family != "xlnet":
        return result
    drawn = torch.rand(2, ROW_LENGTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = drawn.argsort(1).argsort(1) - torch.tensor([[13], [16]])
    targets = result["targets"].where((order > 0) & (result["documents"] >= 0), IGNORE)
    assert len(set((targets != IGNORE).sum(1).tolist())) == 2
    segments = (torch.arange(ROW_LENGTH) % 7 > 2).long().expand(2, -1)
    return result | {"order": order.clamp(min=0), "targets": targets, "segments": segments}
