"""Gemma 2 and the text models of Gemma 3: Gemma2ForCausalLM, Gemma3ForCausalLM.

Norms before and after sublayers, stored less 1; windows in turn; soft caps (2); norms of queries and keys, and bases of
rotary positions by kind of block (3).
"""

from megatfm.config import ModelConfig, RopeConfig, ScaledAttention, expect
from megatfm.convert import layer_types
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import WORD, Json, idle, only, taken
from megatfm.convert.keys import ROPE, activation, rope, rope_of_kind, std, their_activation, their_rope
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, linear, same, under
from megatfm.errors import UsageError

GEMMA2 = ROPE | {
    "vocab_size": taken(256000),
    "hidden_size": taken(2304),
    "intermediate_size": taken(9216),
    "num_hidden_layers": taken(26),
    "num_attention_heads": taken(8),
    "num_key_value_heads": taken(4),
    "head_dim": taken(256),
    "hidden_activation": taken("gelu_pytorch_tanh"),
    "max_position_embeddings": taken(8192),
    "rms_norm_eps": taken(1e-6),
    "tie_word_embeddings": taken(True),
    "attention_bias": taken(False),
    "attention_dropout": taken(0.0, float, None),
    "query_pre_attn_scalar": taken(256),
    "sliding_window": taken(4096, int),
    "layer_types": taken(None, list, None),
    "final_logit_softcapping": taken(30.0, float, None),
    "attn_logit_softcapping": taken(50.0, float, None),
    "use_bidirectional_attention": only(None, False),
    "initializer_range": taken(0.02),
    "pad_token_id": taken(0, int, None),
    "eos_token_id": taken(1, int, list, None),
    "bos_token_id": taken(2, int, list, None),
    **idle("hidden_act"),
    **idle("cache_implementation", kinds=WORD),
}
GEMMA3 = GEMMA2 | {
    "vocab_size": taken(262_208),
    "max_position_embeddings": taken(131_072),
    "final_logit_softcapping": taken(None, float, None),
    "attn_logit_softcapping": only(None),  # which transformers reads and does not apply
    "use_bidirectional_attention": only(False, None),
    "original_max_position_embeddings": only(None),
    "partial_rotary_factor": only(None),
    "rope_local_base_freq": taken(None, float),
    "sliding_window_pattern": taken(None, int),
    **idle("_sliding_window_pattern", kinds=[int]),
}
PATTERN, THETA, LOCAL_THETA = 6, 1e6, 1e4
"""Theirs: of Gemma 3, every so-manieth block sees all; bases of rotary positions."""
SCALE = "embedding.scale"


def read(theirs: Json) -> ModelConfig:
    kinds = layer_types.read(theirs, 2)
    return _read(theirs, {**rope(theirs), **layer_types.blocks(kinds, _window(theirs), {})})


def read_3(theirs: Json) -> ModelConfig:
    pattern = PATTERN if theirs["sliding_window_pattern"] is None else theirs["sliding_window_pattern"]
    if pattern < 1:
        raise UsageError(f"config.json: sliding_window_pattern = {pattern}: choose 1 or more")
    whole = rope_of_kind(theirs, layer_types.GLOBAL, "rope_theta", THETA, scaled=True)
    local = rope_of_kind(theirs, layer_types.LOCAL, "rope_local_base_freq", LOCAL_THETA)
    kinds = layer_types.blocks(
        layer_types.read(theirs, pattern), {**_window(theirs), "position": local}, {"position": whole}
    )
    return _read(theirs, {"attention.qk_norm": True, **kinds})


def _window(theirs: Json) -> Json:
    return {"attention": {"pattern": {"name": "window", "width": theirs["sliding_window"]}}}


def _read(theirs: Json, others: Json) -> ModelConfig:
    width, heads, queries = (
        theirs["hidden_size"],
        theirs["num_attention_heads"],
        theirs["query_pre_attn_scalar"],
    )
    if heads < 1 or width % heads or theirs["head_dim"] < 1 or queries < 1:
        raise UsageError(
            f"config.json: num_attention_heads = {heads} must divide hidden_size = {width}, and head_dim = "
            f"{theirs['head_dim']} and query_pre_attn_scalar = {queries} be above 0"
        )
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if isinstance(theirs[key], int):
            raise UsageError(f"config.json: {key} = {theirs[key]}: transformers takes {theirs[key]}.0 alone")
    return ModelConfig.of(
        {
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": theirs["num_hidden_layers"],
            "attention.n_heads": heads,
            "attention.n_kv_heads": theirs["num_key_value_heads"],
            "attention.head_dim": theirs["head_dim"],
            "attention.bias": theirs["attention_bias"],
            "attention.scale": queries**-0.5,
            "attention.softcap": theirs["attn_logit_softcapping"],
            "attention.dropout": theirs["attention_dropout"] or 0.0,
            "ffn.d_ff": theirs["intermediate_size"],
            "ffn.activation": activation(theirs["hidden_activation"], gated=True),
            "norm.eps": theirs["rms_norm_eps"],
            "norm.placement": "sandwich",
            "norm.from_one": True,
            "embedding.scale": width**0.5,
            "embedding.tied": theirs["tie_word_embeddings"],
            "head.softcap": theirs["final_logit_softcapping"],
            "init.name": "normal",
            "init.std": theirs["initializer_range"],
            **others,
        }
    )


def write(ours: ModelConfig) -> Json:
    return {**_write(ours), **their_rope(ours)}


def write_3(ours: ModelConfig) -> Json:
    if not getattr(ours.attention, "qk_norm", False):
        raise UsageError("model.attention.qk_norm = false: Gemma 3 normalises queries and keys")
    types = layer_types.write(ours)
    depths = {kind: types.index(kind) for kind in dict.fromkeys(types)}
    ropes = {kind: their_rope(ours.at(depth))["rope_parameters"] for kind, depth in depths.items()}
    plain = {"rope_type": "default", "rope_theta": LOCAL_THETA}
    return {
        **_write(ours),
        "rope_parameters": {kind: ropes.get(kind, plain) for kind in (layer_types.LOCAL, layer_types.GLOBAL)},
    }


def _write(ours: ModelConfig) -> Json:
    attention = expect(ours.attention, ScaledAttention, "model.attention")
    expect(ours.at(0).position, RopeConfig, "model.position")
    scale = attention.scale or ours.head_width**-0.5
    activated = their_activation(ours.ffn.activation, gated=True)
    return {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.d_model,
        "intermediate_size": ours.ffn.d_ff,
        "num_hidden_layers": ours.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": ours.head_width,
        "hidden_activation": "gelu_pytorch_tanh" if activated == "gelu_new" else activated,
        "rms_norm_eps": ours.norm.eps,
        "tie_word_embeddings": ours.embedding.tied,
        "attention_bias": getattr(attention, "bias", False),
        "attention_dropout": attention.dropout,
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": layer_types.window(ours, 4096),
        "layer_types": layer_types.write(ours),
        "final_logit_softcapping": ours.head.softcap,
        "attn_logit_softcapping": attention.softcap,
        "initializer_range": std(ours),
    }


def rules(config: ModelConfig) -> list[Rule]:
    bias, normed = (bool(getattr(config.attention, key, False)) for key in ("bias", "qk_norm"))
    block = [
        *linear("attn_residual.norm", "input_layernorm"),
        *(rule for part in "qkvo" for rule in linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)),
        *(rule for part in "qk" * normed for rule in linear(f"attn.{part}_norm", f"self_attn.{part}_norm")),
        *linear("attn_residual.norm_out", "post_attention_layernorm"),
        *linear("ffn_residual.norm", "pre_feedforward_layernorm"),
        *llama.dense_rules("ffn", "mlp"),
        *linear("ffn_residual.norm_out", "post_feedforward_layernorm"),
    ]
    copies = ["lm_head.weight"] if config.embedding.tied else []
    return [
        same("decoder.embedding.tokens.weight", "model.embed_tokens.weight", copies=copies),
        *(
            rule
            for i in range(config.n_layers)
            for rule in under(f"decoder.layers.{i}.", f"model.layers.{i}.", block)
        ),
        *linear("decoder.norm", "model.norm"),
        *([] if config.embedding.tied else [same("head.weight", "lm_head.weight")]),
    ]


MARKS = llama.MARKS | {"norm.placement": "sandwich", "norm.from_one": True}
ARCHITECTURES.register("Gemma2ForCausalLM")(
    Architecture(
        "gemma2",
        GEMMA2,
        read,
        write,
        rules,
        prefix="model.",
        length_key="max_position_embeddings",
        marks=MARKS,
    )
)
register_bare("Gemma2Model", ARCHITECTURES.get("Gemma2ForCausalLM"))
ARCHITECTURES.register("Gemma3ForCausalLM")(
    Architecture(
        "gemma3_text",
        GEMMA3,
        read_3,
        write_3,
        rules,
        prefix="model.",
        length_key="max_position_embeddings",
        marks=MARKS | {"attention.qk_norm": True},
    )
)
register_bare("Gemma3TextModel", ARCHITECTURES.get("Gemma3ForCausalLM"))
