"""XLNet: XLNetLMHeadModel, and XLNetModel without the head.

Projections are stored by head: [d_in, heads, width], the output projection [d_out, heads, width].
"""

from megatfm.config import ModelConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.hf_config import SUMMARY_KEYS, Json, alias, ignored, supported_values, used
from megatfm.convert.hf_values import (
    activation_from_hf,
    activation_to_hf,
    check_implied_values,
    read_mapped,
    write_mapped,
)
from megatfm.convert.weight_mapping import (
    WeightMapping,
    add_leading_dims,
    map_layers,
    map_name,
    map_tensor,
    rename_linear,
)
from megatfm.errors import UsageError

XLNET_KEYS = SUMMARY_KEYS | {
    **used(
        vocab_size=32000, d_model=1024, n_layer=24, n_head=16, d_inner=4096, d_head=(None, int), ff_activation="gelu",
        layer_norm_eps=1e-12, dropout=0.1, initializer_range=0.02, pad_token_id=(5, int, None),
        bos_token_id=(1, int, list, None), eos_token_id=(2, int, list, None),
    ),
    **supported_values(
        attn_type="bi", bi_data=False, clamp_len=-1, same_length=False, untie_r=True, tie_word_embeddings=True,
    ),
    **alias(n_token="vocab_size", hidden_size="d_model", num_attention_heads="n_head", num_hidden_layers="n_layer"),
    # About memory of earlier segments, which is not used.
    **ignored("mem_len", "reuse_len", "use_mems_eval", "use_mems_train"),
    **ignored("start_n_top", "end_n_top"),
}  # fmt: skip


XLNET_MAPPING = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "n_layer": "n_layers",
    "n_head": "attention.n_heads",
    "d_inner": "ffn.d_ff",
    "layer_norm_eps": "norm.eps",
    "dropout": "dropout",
    "initializer_range": "init.std",
}


def read_xlnet(hf_config: Json) -> ModelConfig:
    if hf_config["d_model"] % 2 or hf_config["n_head"] < 1:
        raise UsageError(
            f"config.json: d_model = {hf_config['d_model']}, n_head = {hf_config['n_head']}: only even "
            "widths run in transformers"
        )
    check_implied_values(hf_config, d_head=hf_config["d_model"] // hf_config["n_head"])
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, XLNET_MAPPING),
            "family": "xlnet",
            "norm.name": "layer_norm",
            "norm.placement": "post",
            "ffn.activation": activation_from_hf(hf_config["ff_activation"]),
            "attention.name": "two_stream",
            "ffn.bias": True,
            "position.name": "transformer_xl",
            "lm_head.bias": True,
            "attention.dropout": hf_config["dropout"],
            "init.name": "normal",
        }
    )


def write_xlnet(config: ModelConfig) -> Json:
    return {
        **write_mapped(config, XLNET_MAPPING),
        "d_head": config.head_width,
        "ff_activation": activation_to_hf(config.ffn.activation),
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": -1,
        "same_length": False,
        "mem_len": None,
        "reuse_len": None,
        "tie_word_embeddings": True,
    }


def map_xlnet(config: ModelConfig) -> list[WeightMapping]:
    n_heads = config.attention.n_heads

    def map_input_projection(megatfm_name: str, hf_name: str) -> WeightMapping:
        """Map [heads · width, d_in] to [d_in, heads, width]."""
        return map_tensor(
            megatfm_name,
            hf_name,
            lambda weight: weight.T.unflatten(1, (n_heads, -1)),
            lambda weight: weight.flatten(1).T,
        )

    block = [
        *(map_input_projection(f"attn.w{part}.weight", f"rel_attn.{part}") for part in "qkv"),
        map_input_projection("attn.wk_position.weight", "rel_attn.r"),
        map_tensor(
            "attn.wo.weight",
            "rel_attn.o",  # [d_out, heads · width] → [d_out, heads, width]
            lambda weight: weight.unflatten(1, (n_heads, -1)),
            lambda weight: weight.flatten(1),
        ),
        map_name("attn.content_bias", "rel_attn.r_w_bias"),
        map_name("attn.position_bias", "rel_attn.r_r_bias"),
        map_name("attn.segment_bias", "rel_attn.r_s_bias"),
        map_name("attn.segments", "rel_attn.seg_embed"),
        *rename_linear("attn_residual.norm", "rel_attn.layer_norm", bias=True),
        *rename_linear("ffn.w_up", "ff.layer_1", bias=True),
        *rename_linear("ffn.w_down", "ff.layer_2", bias=True),
        *rename_linear("ffn_residual.norm", "ff.layer_norm", bias=True),
    ]
    return [
        add_leading_dims("encoder.query.weight", "transformer.mask_emb", 2),
        map_name("encoder.embedding.tokens.weight", "transformer.word_embedding.weight", copies=["lm_loss.weight"]),
        *map_layers(config.n_layers, "encoder.layers.", "transformer.layer.", block),
        map_name("head.bias", "lm_loss.bias"),
    ]


register_architecture(
    "XLNetLMHeadModel",
    Architecture(
        "xlnet",
        XLNET_KEYS,
        read_xlnet,
        write_xlnet,
        map_xlnet,
        base_model_prefix="transformer.",
        fingerprint={"family": "xlnet"},
    ),
    base="XLNetModel",
)
