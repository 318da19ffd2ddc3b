"""GPT-2 and GPT-3: GPT2LMHeadModel. Its matrices are [d_in, d_out], and queries, keys and values are one."""

from megatfm.config import ModelConfig
from megatfm.convert.keys import Json, activation, only, std, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, fused, layers, linear, same, transposed


def read(theirs: Json) -> ModelConfig:
    only(theirs, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width = theirs["n_embd"]
    return ModelConfig.of(
        {
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": theirs["n_layer"],
            "attention.n_heads": theirs["n_head"],
            "ffn.d_ff": theirs.get("n_inner") or 4 * width,
            "norm.name": "layer_norm",
            "norm.eps": theirs.get("layer_norm_epsilon", 1e-5),
            "ffn.activation": activation(theirs.get("activation_function", "gelu_new")),
            "attention.bias": True,
            "ffn.bias": True,
            "position.name": "learned",
            "position.max_positions": theirs.get("n_positions", 1024),
            "embedding.tied": theirs.get("tie_word_embeddings", True),
            "dropout": theirs.get("resid_pdrop", 0.1),
            "attention.dropout": theirs.get("attn_pdrop", 0.1),
            "init.name": "gpt2",
            "init.std": theirs.get("initializer_range", 0.02),
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


def block_rules(config: ModelConfig) -> list[Rule]:
    """Of one block; GPT-1's are named alike."""
    width = config.d_model
    qkv = [f"attn.w{part}" for part in "qkv"]
    return [
        *linear("attn_residual.norm", "ln_1", bias=True),
        fused([f"{name}.weight" for name in qkv], "attn.c_attn.weight", [width] * 3, transpose=True),
        fused([f"{name}.bias" for name in qkv], "attn.c_attn.bias", [width] * 3),
        transposed("attn.wo.weight", "attn.c_proj.weight"),
        same("attn.wo.bias", "attn.c_proj.bias"),
        *linear("ffn_residual.norm", "ln_2", bias=True),
        transposed("ffn.w_up.weight", "mlp.c_fc.weight"),
        same("ffn.w_up.bias", "mlp.c_fc.bias"),
        transposed("ffn.w_down.weight", "mlp.c_proj.weight"),
        same("ffn.w_down.bias", "mlp.c_proj.bias"),
    ]


def rules(config: ModelConfig) -> list[Rule]:
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        same("decoder.embedding.tokens.weight", "transformer.wte.weight", copies=copies),
        same("decoder.embedding.positions.weight", "transformer.wpe.weight"),
        *layers(config.n_layers, "decoder.layers.", "transformer.h.", block_rules(config)),
        *linear("decoder.norm", "transformer.ln_f", bias=True),
        *([] if config.embedding.tied else [same("head.weight", "lm_head.weight")]),
    ]


ARCHITECTURES.register("GPT2LMHeadModel")(
    Architecture("gpt2", read, write, rules, prefix="transformer.", ignored=(r"\.attn\.(masked_)?bias$",))
)
