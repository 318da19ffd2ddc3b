"""Small models of every family, dense part and attention pattern, with experts; packed rows, and optimizers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    ModelConfig,
    MuonConfig,
    OptimizerSection,
    ScheduleFreeConfig,
    SoapConfig,
)
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.pattern import BlockBounds
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.moe.moe import MoE
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.cross_entropy import IGNORE

ROWS, LENGTH = 8, 12
"""Rows of a batch and tokens of a row (`tests/support/batches.py`)."""
UNTIED_MODEL = ModelConfig.from_dotted({
    "vocab_size": 96, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "attention.n_kv_heads": 2, "ffn.d_ff": 80,
    "embedding.tied": False,
})  # fmt: skip
TIED_MODEL = UNTIED_MODEL.with_changes({"embedding.tied": True})
ADAMW = AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.3)
MUON = MuonConfig(lr=1e-2, matrix_lr=0.02, weight_decay=0.1, max_grad_norm=0.3)
SMALL_MODEL = {"vocab_size": 95, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 48}
DROPOUTS = {"dropout": 0.2, "attention.dropout": 0.1, "ffn.dropout": 0.1, "drop_path": 0.3}
BERT_OPTIONS = {
    "norm.name": "layer_norm", "norm.placement": "post", "ffn.activation": "gelu", "attention.bias": True,
    "ffn.bias": True, "embedding.norm": True, "position.name": "learned", "position.max_positions": LENGTH,
    "embedding.n_segments": 2, "lm_head.name": "transform", "lm_head.bias": True, "init.name": "bert",
}  # fmt: skip
SWIN_MODEL: dict[str, Any] = {
    "family": "hierarchical", "d_model": 16, "stages.n_layers": (2, 3), "stages.n_heads": (2, 4),
    "attention.name": "windowed", "attention.pattern": {"name": "windows_2d", "window": 4}, "ffn.d_ff": 40,
    "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "position.name": "relative_2d",
    "embedding": {"name": "patches", "patch_size": 4, "n_class_tokens": 0, "norm": True}, "lm_head.name": "none",
    "extra_heads.classifier": {"n_classes": 5, "pool": "mean"},
}  # fmt: skip
SWIN_V2_OPTIONS: dict[str, Any] = {
    "attention.cosine": True,
    "position.name": "log_relative_2d",
    "norm.placement": "res_post",
    "stages.merging_norm": "output",
}
MVIT_MODEL: dict[str, Any] = SWIN_MODEL | {
    "stages.n_layers": (1, 2),
    "stages.n_heads": (1, 2),
    "stages.grid": (5, 4),
    "attention.name": "pooled",
    "attention.pattern": "full",
    "norm.eps": 1e-6,
    "position.name": "relative_axes",
    "embedding": {"name": "overlapping_patches", "patch_size": 4, "n_class_tokens": 0},
}
PYRAMID_OPTIONS = {
    "stages.grid": (5, 4), "stages.n_heads": (4, 8), "d_model": 32, "attention.pattern.window": 3,
}  # fmt: skip
"""Maps of 5 × 4, which are padded and shifted, then 3 × 2, one window smaller than the table."""
MVIT_HEADS = {"stages.n_heads": (4, 8), "d_model": 32}
FAMILY_MODELS = {
    "gpt": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, n_mtp_heads=1,
        **{"norm.name": "layer_norm", "ffn.activation": "gelu_tanh", "position.name": "learned",
           "position.max_positions": LENGTH, "attention.bias": True, "ffn.bias": True, "lm_head.label_smoothing": 0.1,
           "lm_head.softcap": 5.0},
    ),
    "alibi, sandwich norm": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS,
        **{
            "position.name": "alibi",
            "norm.placement": "sandwich",
            "attention.qk_norm": True,
            "attention.bias": True,
            "attention.output_bias": False,
        },
    ),
    "shaw, deepnorm": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS,
        **{"position.name": "shaw", "norm.placement": "deepnorm", "init.name": "deepnorm",
           "position.max_distance": 3},
    ),
    "llama": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, **{"attention.n_kv_heads": 2, "embedding.tied": False},
    ),
    "latent attention": ModelConfig.from_dotted(
        **SMALL_MODEL,
        **{"attention.name": "mla", "attention.kv_lora_rank": 8, "attention.q_lora_rank": 6,
           "attention.qk_rope_head_dim": 4},
    ),
    "bert": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, **BERT_OPTIONS, family="encoder", extra_heads={"sentence": {}, "boundary": {}},
    ),
    "albert": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, **BERT_OPTIONS, family="encoder", distinct_layers=1, **{"embedding.dim": 16},
    ),
    "deberta": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, family="encoder",
        **{"attention.name": "deberta", "position.name": "deberta", "position.max_distance": 4},
    ),
    "deberta v3": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, family="encoder",
        **{"attention.name": "deberta_v2", "position.name": "deberta_v2", "position.buckets": 4,
           "position.max_distance": 8},
    ),
    "t5": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, family="encoder_decoder", n_encoder_layers=1,
        **{"position.name": "t5", "init.name": "t5", "attention.scale": 1.0, "lm_head.scale": 0.2},
    ),
    "xlnet": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, family="xlnet",
        **{"attention.name": "two_stream", "position.name": "transformer_xl", "lm_head.bias": True},
    ),
    "electra": ModelConfig.from_dotted(
        **SMALL_MODEL, **DROPOUTS, **BERT_OPTIONS, family="electra",
        generator={"d_model": 16, "n_heads": 4, "d_ff": 24}, **{"embedding.dim": 16},
    ),
    "swin": ModelConfig.from_dotted(**(SWIN_MODEL | PYRAMID_OPTIONS), **DROPOUTS),
    "mvit v2": ModelConfig.from_dotted(**(MVIT_MODEL | MVIT_HEADS), **DROPOUTS),
    "swin v2": ModelConfig.from_dotted(**(SWIN_MODEL | SWIN_V2_OPTIONS | PYRAMID_OPTIONS), **DROPOUTS),
}  # fmt: skip
PREFIX_LM = "prefix language model"
FAMILY_NAMES = (*FAMILY_MODELS, PREFIX_LM)
TINY_MODEL = {"vocab_size": 31, "d_model": 16, "n_layers": 2, "attention.n_heads": 2, "ffn.d_ff": 16}
TINY_LATENT = {"name": "mla", "n_heads": 2, "kv_lora_rank": 6, "qk_rope_head_dim": 4}


DENSE_VOCABULARY = 23
SMALL_DENSE = {
    "vocab_size": DENSE_VOCABULARY, "d_model": 16, "n_layers": 2, "attention.n_heads": 2, "ffn.d_ff": 20,
    "norm.eps": 1e-3,
}  # fmt: skip
NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")
NORMS = ("layer_norm", "rms_norm")
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "swish", "swiglu", "geglu", "geglu_tanh")
POSITIONS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"position.max_positions": 16},
    "rope": {"position.theta": 100.0},
    "alibi": {},
    "t5": {"position.buckets": 8, "position.max_distance": 6},
    "shaw": {"position.max_distance": 3},
    "none": {},
}
MASKS = ("causal", "prefix", "full", "pairs")


def combination(norm_position: str, norm: str, activation: str, position: str, mask: str) -> ModelConfig:
    """A model of these parts."""
    families = {"full": "encoder", "pairs": "encoder_decoder"}
    return ModelConfig.from_dotted(
        **SMALL_DENSE, **POSITIONS[position], family=families.get(mask, "decoder"),
        **{"norm.placement": norm_position, "norm.name": norm, "ffn.activation": activation,
           "position.name": position, "init.name": "deepnorm" if norm_position == "deepnorm" else "normal"},
    )  # fmt: skip


B, T, D, F_, E = 3, 11, 16, 8, 8
"""Rows, tokens, width, width of an expert, experts."""
ROUTER_LOSSES = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.1, "z_loss_coef": 0.1}


def moe_config(**ffn: Any) -> ModelConfig:
    """A model of one block; ffn: options beside the usual ones."""
    ffn = {"name": "moe", "d_ff": F_, "n_experts": E, "top_k": 3, "router": {"name": "top_k", **ROUTER_LOSSES}} | ffn
    return ModelConfig.from_dotted({"vocab_size": 8, "d_model": D, "n_layers": 1, "attention.n_heads": 1, "ffn": ffn})


def build_moe(dtype: torch.dtype = torch.float64, seed: int = 0, **ffn: Any) -> MoE:
    """A mixture with random weights and state."""
    config = moe_config(**ffn)
    module = MoE(config, make_initialiser(config)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(0.7 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    module.shares.abs_().div_(module.shares.sum())
    return module


def moe_sequence(documents: Tensor | None = None, rows: int = B) -> SequenceMetadata:
    """Rows of T tokens."""
    return SequenceMetadata(torch.arange(T).expand(rows, T), documents, rng_keys=torch.arange(rows))


def moe_inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    """Random inputs that take a gradient."""
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


OPTIMIZER_OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "layer_decay": 0.8}
OPTIMIZERS: dict[str, OptimizerSection] = {
    "adamw": AdamWConfig(**OPTIMIZER_OPTIONS),
    "adamw, short moments": AdamWConfig(**OPTIMIZER_OPTIONS, moments_dtype="bf16"),
    "adamw, weights averaged": AdamWConfig(**OPTIMIZER_OPTIONS, ema_decay=0.7),
    "muon": MuonConfig(**OPTIMIZER_OPTIONS),
    "muon, weights averaged": MuonConfig(**OPTIMIZER_OPTIONS, ema_decay=0.7),
    "soap": SoapConfig(**OPTIMIZER_OPTIONS, precondition_frequency=2, max_precond_dim=32),
    "adafactor": AdafactorConfig(**OPTIMIZER_OPTIONS),
    "lamb": LambConfig(**OPTIMIZER_OPTIONS),
    "lion": LionConfig(**OPTIMIZER_OPTIONS),
    "schedule_free_adamw": ScheduleFreeConfig(**OPTIMIZER_OPTIONS),
}


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
