"""GPT-2 and GPT-3: GPT2LMHeadModel. Its matrices are [d_in, d_out], and queries, keys and values are one."""

from megatfm.config import ModelConfig
from megatfm.convert.config_keys import Json, alias, ignored, supported_values, used
from megatfm.convert.encoder import SUMMARY
from megatfm.convert.keys import activation, std, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, concat, per_layer, rename, rename_linear, transpose

KEYS = SUMMARY | {
    "vocab_size": used(50257),
    "n_positions": used(1024),
    "n_embd": used(768),
    "n_layer": used(12),
    "n_head": used(12),
    "layer_norm_epsilon": used(1e-5),
    "resid_pdrop": used(0.1),
    "attn_pdrop": used(0.1),
    "initializer_range": used(0.02),
    "tie_word_embeddings": used(True),
    "hidden_size": alias("n_embd"),
    "max_position_embeddings": alias("n_positions"),
    "num_attention_heads": alias("n_head"),
    "num_hidden_layers": alias("n_layer"),
    "n_inner": used(None, int, None),
    "activation_function": used("gelu_new"),
    "scale_attn_weights": supported_values(True),
    "scale_attn_by_inverse_layer_idx": supported_values(False),
    "bos_token_id": used(50256, int, list, None),
    "eos_token_id": used(50256, int, list, None),
    **ignored("reorder_and_upcast_attn", kinds=[bool]),
    **ignored("embd_pdrop", "n_ctx", "n_special", "predict_special_tokens"),
}


def read(theirs: Json) -> ModelConfig:
    width = theirs["n_embd"]
    return ModelConfig.from_dotted(
        {
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": theirs["n_layer"],
            "attention.n_heads": theirs["n_head"],
            "ffn.d_ff": 4 * width if theirs["n_inner"] is None else theirs["n_inner"],
            "norm.name": "layer_norm",
            "norm.eps": theirs["layer_norm_epsilon"],
            "ffn.activation": activation(theirs["activation_function"]),
            "attention.bias": True,
            "ffn.bias": True,
            "position.name": "learned",
            "position.max_positions": theirs["n_positions"],
            "embedding.tied": theirs["tie_word_embeddings"],
            "dropout": theirs["resid_pdrop"],
            "attention.dropout": theirs["attn_pdrop"],
            "init.name": "gpt2",
            "init.std": theirs["initializer_range"],
        }
    )


def write(ours: ModelConfig) -> Json:
    return {
        "vocab_size": ours.vocab_size,
        "n_positions": ours.position.limit,
        "n_embd": ours.d_model,
        "n_layer": ours.n_layers,
        "n_head": ours.attention.n_heads,
        "n_inner": None if ours.ffn.d_ff == 4 * ours.d_model else ours.ffn.d_ff,
        "activation_function": their_activation(ours.ffn.activation),
        "layer_norm_epsilon": ours.norm.eps,
        "tie_word_embeddings": ours.embedding.tied,
        "resid_pdrop": ours.dropout,
        "embd_pdrop": ours.dropout,
        "attn_pdrop": ours.attention.dropout,
        "initializer_range": std(ours),
    }


def block_rules(config: ModelConfig) -> list[WeightMapping]:
    """Of one block; GPT-1's are named alike."""
    width = config.d_model
    qkv = [f"attn.w{part}" for part in "qkv"]
    return [
        *rename_linear("attn_residual.norm", "ln_1", bias=True),
        concat([f"{name}.weight" for name in qkv], "attn.c_attn.weight", [width] * 3, transpose=True),
        concat([f"{name}.bias" for name in qkv], "attn.c_attn.bias", [width] * 3),
        transpose("attn.wo.weight", "attn.c_proj.weight"),
        rename("attn.wo.bias", "attn.c_proj.bias"),
        *rename_linear("ffn_residual.norm", "ln_2", bias=True),
        transpose("ffn.w_up.weight", "mlp.c_fc.weight"),
        rename("ffn.w_up.bias", "mlp.c_fc.bias"),
        transpose("ffn.w_down.weight", "mlp.c_proj.weight"),
        rename("ffn.w_down.bias", "mlp.c_proj.bias"),
    ]


def rules(config: ModelConfig) -> list[WeightMapping]:
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        rename("decoder.embedding.tokens.weight", "transformer.wte.weight", copies=copies),
        rename("decoder.embedding.positions.weight", "transformer.wpe.weight"),
        *per_layer(config.n_layers, "decoder.layers.", "transformer.h.", block_rules(config)),
        *rename_linear("decoder.norm", "transformer.ln_f", bias=True),
        *([] if config.embedding.tied else [rename("head.weight", "lm_head.weight")]),
    ]


ARCHITECTURES.register("GPT2LMHeadModel")(
    Architecture(
        "gpt2",
        KEYS,
        read,
        write,
        rules,
        base_model_prefix="transformer.",
        ignored_tensors=(r"\.attn\.(masked_)?bias$",),
        fingerprint={"family": "decoder", "position.name": "learned", "norm.placement": "pre"},
    )
)
register_base_model("GPT2Model", ARCHITECTURES.get("GPT2LMHeadModel"))
