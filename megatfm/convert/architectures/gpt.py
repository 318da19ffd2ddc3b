"""GPT-1 to GPT-3: OpenAIGPTLMHeadModel, GPT2LMHeadModel. Matrices are [d_in, d_out]; q, k and v are one matrix."""

from collections.abc import Sequence

from megatfm.config import ModelConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.hf_config import SUMMARY_KEYS, Json, alias, ignored, supported_values, used
from megatfm.convert.hf_values import activation_from_hf, activation_to_hf, read_mapped, write_mapped
from megatfm.convert.weight_mapping import WeightMapping, concat, map_layers, map_name, rename_linear, transpose
from megatfm.errors import UsageError

GPT_KEYS = SUMMARY_KEYS | {
    **used(
        n_embd=768, n_layer=12, n_head=12, layer_norm_epsilon=1e-5, resid_pdrop=0.1, attn_pdrop=0.1,
        initializer_range=0.02, tie_word_embeddings=True,
    ),
    **alias(
        hidden_size="n_embd", max_position_embeddings="n_positions", num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    ),
}  # fmt: skip
"""Keys of config.json that GPT-1 and GPT-2 share."""
GPT2_KEYS = GPT_KEYS | {
    **used(
        vocab_size=50257, n_positions=1024, n_inner=(None, int, None), activation_function="gelu_new",
        bos_token_id=(50256, int, list, None), eos_token_id=(50256, int, list, None),
    ),
    **supported_values(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    **ignored("reorder_and_upcast_attn", kinds=[bool]),
    **ignored("embd_pdrop", "n_ctx", "n_special", "predict_special_tokens"),
}  # fmt: skip


GPT_IMPLIED = {"norm.name": "layer_norm", "attention.bias": True, "ffn.bias": True, "position.name": "learned"}
"""Megatfm's keys that config.json implies."""
GPT_MAPPING = {
    "vocab_size": "vocab_size",
    "n_embd": "d_model",
    "n_layer": "n_layers",
    "n_head": "attention.n_heads",
    "layer_norm_epsilon": "norm.eps",
    "n_positions": "position.max_positions",
    "tie_word_embeddings": "embedding.tied",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention.dropout",
    "initializer_range": "init.std",
}


def read_gpt2(hf_config: Json) -> ModelConfig:
    width = hf_config["n_embd"]
    return ModelConfig.from_dotted(
        {
            **GPT_IMPLIED,
            **read_mapped(hf_config, GPT_MAPPING),
            "ffn.d_ff": 4 * width if hf_config["n_inner"] is None else hf_config["n_inner"],
            "ffn.activation": activation_from_hf(hf_config["activation_function"]),
            "init.name": "gpt2",
        }
    )


def write_gpt2(config: ModelConfig) -> Json:
    return {
        **write_mapped(config, GPT_MAPPING),
        "n_inner": None if config.ffn.d_ff == 4 * config.d_model else config.ffn.d_ff,
        "activation_function": activation_to_hf(config.ffn.activation),
        "embd_pdrop": config.dropout,
    }


def map_gpt_block(config: ModelConfig) -> list[WeightMapping]:
    """Map one block of GPT-1 or GPT-2."""
    width = config.d_model
    qkv = [f"attn.w{part}" for part in "qkv"]
    return [
        *rename_linear("attn_residual.norm", "ln_1", bias=True),
        concat([f"{name}.weight" for name in qkv], "attn.c_attn.weight", [width] * 3, transpose=True),
        concat([f"{name}.bias" for name in qkv], "attn.c_attn.bias", [width] * 3),
        transpose("attn.wo.weight", "attn.c_proj.weight"),
        map_name("attn.wo.bias", "attn.c_proj.bias"),
        *rename_linear("ffn_residual.norm", "ln_2", bias=True),
        transpose("ffn.w_up.weight", "mlp.c_fc.weight"),
        map_name("ffn.w_up.bias", "mlp.c_fc.bias"),
        transpose("ffn.w_down.weight", "mlp.c_proj.weight"),
        map_name("ffn.w_down.bias", "mlp.c_proj.bias"),
    ]


def map_gpt(
    config: ModelConfig, tokens: str, positions: str, norm: Sequence[WeightMapping] = ()
) -> list[WeightMapping]:
    """Map a model. tokens, positions: transformers' names of the embeddings. norm: mappings of the last norm, if
    any."""
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        map_name("decoder.embedding.tokens.weight", f"transformer.{tokens}.weight", copies=copies),
        map_name("decoder.embedding.positions.weight", f"transformer.{positions}.weight"),
        *map_layers(config.n_layers, "decoder.layers.", "transformer.h.", map_gpt_block(config)),
        *norm,
        *([] if config.embedding.tied else [map_name("head.weight", "lm_head.weight")]),
    ]


def map_gpt2(config: ModelConfig) -> list[WeightMapping]:
    return map_gpt(config, "wte", "wpe", rename_linear("decoder.norm", "transformer.ln_f", bias=True))


register_architecture(
    "GPT2LMHeadModel",
    Architecture(
        "gpt2",
        GPT2_KEYS,
        read_gpt2,
        write_gpt2,
        map_gpt2,
        base_model_prefix="transformer.",
        ignored_tensors=(r"\.attn\.(masked_)?bias$",),
        fingerprint={"family": "decoder", "position.name": "learned", "norm.placement": "pre"},
    ),
    base="GPT2Model",
)

# GPT-1: OpenAIGPTLMHeadModel

GPT1_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "swish", "swish": "swish"}
"""Activations of GPT-1 in transformers, whose "gelu" is the tanh form → in megatfm."""
GPT1_KEYS = GPT_KEYS | {
    **used(vocab_size=40478, n_positions=512, afn="gelu"),
    **ignored("embd_pdrop", "n_ctx", "n_special", "predict_special_tokens"),
}


def read_gpt1(hf_config: Json) -> ModelConfig:
    width, afn = hf_config["n_embd"], hf_config["afn"]
    if afn not in GPT1_ACTIVATIONS:
        raise UsageError(f"config.json: afn = {afn!r} is not one of {', '.join(GPT1_ACTIVATIONS)}")
    return ModelConfig.from_dotted(
        {
            **GPT_IMPLIED,
            **read_mapped(hf_config, GPT_MAPPING),
            "ffn.d_ff": 4 * width,
            "norm.placement": "post",
            "ffn.activation": GPT1_ACTIVATIONS[afn],
            "init.name": "normal",
        }
    )


def write_gpt1(config: ModelConfig) -> Json:
    afn = next((hf_name for hf_name, name in GPT1_ACTIVATIONS.items() if name == config.ffn.activation), None)
    if afn is None:
        raise UsageError(f"model.ffn.activation = {config.ffn.activation!r} is not one that transformers has here")
    return {**write_mapped(config, GPT_MAPPING), "afn": afn, "embd_pdrop": config.dropout}


def map_gpt1(config: ModelConfig) -> list[WeightMapping]:
    return map_gpt(config, "tokens_embed", "positions_embed")


register_architecture(
    "OpenAIGPTLMHeadModel",
    Architecture(
        "openai-gpt",
        GPT1_KEYS,
        read_gpt1,
        write_gpt1,
        map_gpt1,
        base_model_prefix="transformer.",
        ignored_tensors=(r"\.attn\.bias$", r"position_ids$"),
        fingerprint={"family": "decoder", "position.name": "learned", "norm.placement": "post"},
    ),
    base="OpenAIGPTModel",
)
