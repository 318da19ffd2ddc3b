"""Small models, one for each attention pattern."""

from tests.support.models import DROPOUTS, SMALL_MODEL

DROPOUT_DECODER = {**SMALL_MODEL, **DROPOUTS, "attention.n_kv_heads": 2}
DROPOUT_ENCODER = {**SMALL_MODEL, **DROPOUTS, "family": "encoder", "lm_head.bias": True}
LINFORMER_ENCODER = {
    **DROPOUT_ENCODER,
    "attention.name": "linformer",
    "attention.max_length": 12,
    "attention.projected_length": 3,
    "position.name": "learned",
    "position.max_positions": 12,
}
COMPRESSED_DECODER = {**SMALL_MODEL, **DROPOUTS, "position.name": "sinusoidal"}
PATTERN_MODELS = {
    "window": {**DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 3}},
    "window with soft caps": {
        **DROPOUT_DECODER,
        "attention.pattern": {"name": "window", "width": 5},
        "attention.softcap": 2.0,
    },
    "sinks": {
        **DROPOUT_DECODER,
        "attention.pattern": {"name": "window", "width": 5},
        "attention.sinks": True,
    },
    "window of an encoder": {**DROPOUT_ENCODER, "attention.pattern": {"name": "window", "width": 4}},
    "alternating": {
        **DROPOUT_DECODER,
        "layer_types": ["near", "all"],
        "layer_type.near.attention.pattern": {"name": "window", "width": 3},
        "layer_type.all.position.name": "none",
    },
    "first tokens": {
        **DROPOUT_DECODER,
        "attention.pattern": {"name": "window", "width": 2, "initial_tokens": 1},
    },
    "dilated": {**DROPOUT_DECODER, "attention.pattern": {"name": "window", "width": 2, "dilation": 2}},
    "chunked": {**DROPOUT_DECODER, "attention.pattern": {"name": "chunked", "size": 3}},
    "strided": {**DROPOUT_DECODER, "attention.pattern": {"name": "strided", "stride": 2}},
    "bigbird": {
        **DROPOUT_ENCODER,
        "attention.pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 1},
    },
    "bigbird of a decoder": {
        **DROPOUT_DECODER,
        "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    },
    "longformer": {
        **DROPOUT_ENCODER,
        "attention.name": "longformer",
        "attention.pattern": {"name": "longformer", "width": 2, "global_tokens": [0, 3]},
        "position.name": "learned",
        "position.max_positions": 12,
    },
    "longformer without projections of its own": {
        **DROPOUT_ENCODER,
        "attention.pattern": {"name": "longformer", "width": 2},
    },
    "linformer": {**LINFORMER_ENCODER, "attention.share": "none"},
    "linformer, shared by heads": {**LINFORMER_ENCODER, "attention.share": "headwise"},
    "linformer, shared by keys and values": {**LINFORMER_ENCODER, "attention.share": "key_value"},
    "linformer, shared by layers": {**LINFORMER_ENCODER, "attention.share": "layerwise"},
    "linformer of an encoder-decoder": {
        **{key: value for key, value in LINFORMER_ENCODER.items() if key != "head.bias"},
        "family": "encoder_decoder",
        "attention.share": "layerwise",
    },
    "compressed": {**COMPRESSED_DECODER, "attention.name": "compressed"},
    "local, compressed and experts": {
        **{key: value for key, value in COMPRESSED_DECODER.items() if key != "attention.dropout"},
        "n_layers": 3,
        "layer_types": ["local", "compressed", "experts"],
        "layer_type.local.attention.pattern": {"name": "chunked", "size": 5},
        "layer_type.compressed.attention.name": "compressed",
        "layer_type.experts.attention.pattern": {"name": "chunked", "size": 5},
        "layer_type.experts.ffn": {
            "name": "moe",
            "dropout": 0.0,
            "d_ff": 16,
            "n_experts": 4,
            "top_k": 2,
            "router": {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1},
        },
    },
    "fixed": {**DROPOUT_DECODER, "attention.pattern": {"name": "fixed", "stride": 3, "n_summary_tokens": 1}},
}
