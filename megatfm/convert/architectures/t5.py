"""T5 v1.0 and v1.1, and Switch Transformers: T5s with top-1 experts in some blocks."""

from collections.abc import Callable, Container

from megatfm.config import ModelConfig, T5PositionConfig, require_variant
from megatfm.config.ffn import MoEConfig, SwitchRouterConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.hf_config import Json, alias, ignored, omit_keys, supported_values, used
from megatfm.convert.hf_values import (
    activation_from_hf,
    activation_to_hf,
    check_implied_values,
    read_mapped,
    write_mapped,
)
from megatfm.convert.weight_mapping import (
    WeightMapping,
    add_prefix,
    map_expert_stacks,
    map_layers,
    map_name,
    rename_linear,
    rename_modules,
)
from megatfm.errors import UsageError
from megatfm.layers.feed_forward import ACTIVATIONS

GATED_GELU = "gated-gelu"
"""A feed_forward_proj that means the tanh form of GELU."""

T5_KEYS = {
    **used(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_decoder_layers=(None, int, None),
        num_heads=8, relative_attention_num_buckets=32, relative_attention_max_distance=128, dropout_rate=0.1,
        layer_norm_epsilon=1e-6, feed_forward_proj="relu", dense_act_fn=(None, str), is_gated_act=(None, bool),
        tie_word_embeddings=(None, bool, None), scale_decoder_outputs=(None, bool), pad_token_id=(0, int, None),
        eos_token_id=(1, int, list, None),
    ),
    **supported_values(is_encoder_decoder=True),
    **alias(hidden_size="d_model", num_attention_heads="num_heads", num_hidden_layers="num_layers", head_dim="d_kv"),
    **ignored("initializer_factor", kinds=[float]),
    **ignored("n_positions"),
}  # fmt: skip


T5_MAPPING = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "num_heads": "attention.n_heads",
    "d_kv": "attention.head_dim",
    "d_ff": "ffn.d_ff",
    "layer_norm_epsilon": "norm.eps",
}


def read_t5(hf_config: Json) -> ModelConfig:
    d_model, dropout, ffn = hf_config["d_model"], hf_config["dropout_rate"], hf_config["feed_forward_proj"]
    check_implied_values(hf_config, is_gated_act=ffn.startswith("gated-"))
    check_implied_values(hf_config, dense_act_fn="gelu_new" if ffn == GATED_GELU else ffn.removeprefix("gated-"))
    # transformers 5 has scale_decoder_outputs; in transformers 4, tie_word_embeddings implies it.
    is_scaled = hf_config["scale_decoder_outputs"]
    is_scaled = hf_config["tie_word_embeddings"] is not False if is_scaled is None else is_scaled
    n_encoder_layers, n_layers = hf_config["num_layers"], hf_config["num_decoder_layers"]
    return ModelConfig.from_dotted(
        {
            **read_mapped(hf_config, T5_MAPPING),
            "family": "encoder_decoder",
            "n_layers": n_encoder_layers if n_layers is None else n_layers,
            "n_encoder_layers": n_encoder_layers,
            "ffn.activation": _convert_activation(ffn),
            "attention.scale": 1.0,
            "position.name": "t5",
            "position.buckets": hf_config["relative_attention_num_buckets"],
            "position.max_distance": hf_config["relative_attention_max_distance"],
            "embedding.tied": hf_config["tie_word_embeddings"] is not False,
            "lm_head.scale": d_model**-0.5 if is_scaled else 1.0,
            "dropout": dropout,
            "attention.dropout": dropout,
            "ffn.dropout": dropout,
            "init.name": "t5",
        }
    )


def write_t5(config: ModelConfig) -> Json:
    is_gated = ACTIVATIONS.get(config.ffn.activation).gated
    name = activation_to_hf(config.ffn.activation, gated=is_gated)
    is_gelu = config.ffn.activation == "geglu_tanh"
    position = require_variant(config.position, T5PositionConfig, "model.position")
    return {
        **write_mapped(config, T5_MAPPING),
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.n_layers,
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.max_distance,
        "dropout_rate": config.dropout,
        "feed_forward_proj": GATED_GELU if is_gelu else f"{'gated-' * is_gated}{name}",
        "tie_word_embeddings": config.embedding.tied,
        **({"scale_decoder_outputs": False} if config.embedding.tied and config.head_scale == 1.0 else {}),
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


def map_t5(config: ModelConfig) -> list[WeightMapping]:
    is_gated = ACTIVATIONS.get(config.ffn.activation).gated
    up_projections = {"ffn.w_gate": "wi_0", "ffn.w_up": "wi_1"} if is_gated else {"ffn.w_up": "wi"}
    projections = up_projections | {"ffn.w_down": "wo"}

    def ffn(depth: int, sublayer: int) -> list[WeightMapping]:
        hf_prefix = f"layer.{sublayer}.DenseReluDense"
        return [
            *rename_linear("ffn_residual.norm", f"layer.{sublayer}.layer_norm"),
            *rename_modules({name: f"{hf_prefix}.{hf_name}" for name, hf_name in projections.items()}),
        ]

    return map_t5_style(config, ffn)


def map_t5_style(config: ModelConfig, ffn: Callable[[int, int], list[WeightMapping]]) -> list[WeightMapping]:
    """Map an encoder-decoder with T5's names. ffn: (block, sublayer) → mappings of the feed-forward network."""

    def attention(prefix: str, hf_prefix: str) -> list[WeightMapping]:
        return rename_modules({f"{prefix}.w{part}": f"{hf_prefix}.{part}" for part in "qkvo"})

    def stack(side: str, n_layers: int, attentions: list[WeightMapping], ffn_sublayer: int) -> list[WeightMapping]:
        blocks = ([*attentions, *ffn(depth, ffn_sublayer)] for depth in range(n_layers))
        return map_layers(n_layers, f"{side}.layers.", f"{side}.block.", *blocks)

    self_attention = [
        *rename_linear("attn_residual.norm", "layer.0.layer_norm"),
        *attention("attn", "layer.0.SelfAttention"),
    ]
    cross_attention = [
        *rename_linear("cross_residual.norm", "layer.1.layer_norm"),
        *attention("cross", "layer.1.EncDecAttention"),
    ]
    ends = rename_modules(
        {"position": "block.0.layer.0.SelfAttention.relative_attention_bias", "norm": "final_layer_norm"}
    )
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *["lm_head.weight"] * config.embedding.tied]
    return [
        map_name("encoder.embedding.tokens.weight", "shared.weight", copies=copies),
        *stack("encoder", config.encoder_layers, self_attention, 1),
        *stack("decoder", config.n_layers, [*self_attention, *cross_attention], 2),
        *(mapping for side in ("encoder", "decoder") for mapping in add_prefix(f"{side}.", f"{side}.", ends)),
        *([] if config.embedding.tied else [map_name("head.weight", "lm_head.weight")]),
    ]


def refine_tying(config: ModelConfig, names: Container[str]) -> ModelConfig:
    """Set `embedding.tied` of a v1.1 by its tensors: transformers 5 always writes tie_word_embeddings = true."""
    is_tied = "lm_head.weight" not in names
    return config if config.head_scale != 1.0 else config.with_changes({"embedding.tied": is_tied})


def _convert_activation(hf_name: str) -> str:
    if hf_name == GATED_GELU:
        return "geglu_tanh"
    return activation_from_hf(hf_name.removeprefix("gated-"), gated=hf_name.startswith("gated-"))


register_architecture(
    "T5ForConditionalGeneration",
    Architecture(
        "t5",
        T5_KEYS,
        read_t5,
        write_t5,
        map_t5,
        # Published files have this table, which no cross-attention uses.
        ignored_tensors=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
        max_length_key="n_positions",
        refine_config=refine_tying,
        fingerprint={"family": "encoder_decoder"},
    ),
    base="T5Model",
)

# Switch Transformers (Fedus et al. 2022): SwitchTransformersForConditionalGeneration

KEYS_NOT_IN_SWITCH = ("feed_forward_proj", "is_gated_act", "scale_decoder_outputs", "n_positions", "head_dim")
SWITCH_KEYS = omit_keys(T5_KEYS, *KEYS_NOT_IN_SWITCH) | {
    **used(
        d_model=768, num_layers=12, num_decoder_layers=(12, int, None), num_heads=12, expert_capacity=64, num_experts=8,
        num_sparse_encoder_layers=3, num_sparse_decoder_layers=3, encoder_sparse_step=(None, int),
        decoder_sparse_step=(None, int), dense_act_fn="relu", tie_word_embeddings=True,
    ),
    **supported_values(router_bias=False, router_dtype="float32"),
    **alias(hidden_size="d_model"),
    **ignored("router_jitter_noise", "router_z_loss_coef", "router_aux_loss_coef"),
    **ignored("add_router_probs", "router_ignore_padding_tokens", "router_type", "output_router_logits"),
    **ignored("batch_prioritized_routing", "num_selected_experts"),
    **ignored("feed_forward_proj", "is_gated_act", "n_positions"),
}  # fmt: skip


def read_switch(hf_config: Json) -> ModelConfig:
    t5_keys = {"feed_forward_proj": "relu", "is_gated_act": None, "dense_act_fn": None, "scale_decoder_outputs": None}
    dense = read_t5(hf_config | t5_keys)
    head_scale = dense.d_model**-0.5 if hf_config["tie_word_embeddings"] else 1.0
    activation = activation_from_hf(hf_config["dense_act_fn"])
    dense = dense.with_changes({"ffn.activation": activation, "lm_head.scale": head_scale})
    experts = {
        "name": "moe",
        "d_ff": hf_config["d_ff"],
        "activation": activation,
        "n_experts": hf_config["num_experts"],
        "top_k": 1,
        "expert_capacity": hf_config["expert_capacity"],
        "dropout": 0.0,
        "router": {"name": "switch"},
    }
    in_encoder = _find_sparse_layers(
        hf_config["num_sparse_encoder_layers"], dense.encoder_layers, hf_config["encoder_sparse_step"]
    )
    in_decoder = _find_sparse_layers(
        hf_config["num_sparse_decoder_layers"], dense.n_layers, hf_config["decoder_sparse_step"]
    )
    if any(a != b for a, b in zip(in_encoder, in_decoder, strict=False)):
        raise UsageError(
            "config.json: num_sparse_encoder_layers and num_sparse_decoder_layers (or encoder_sparse_step and "
            "decoder_sparse_step) put experts into other layers of the encoder than of the decoder, which "
            "megatfm has not"
        )
    is_sparse = max(in_encoder, in_decoder, key=len)
    if True not in is_sparse:
        return dense
    names = ["sparse" if sparse else "dense" for sparse in is_sparse]
    sections = {"sparse": {"ffn": experts}, "dense": {}}
    return dense.with_changes(
        {"layer_types": names, **{f"layer_type.{name}": sections[name] for name in dict.fromkeys(names)}}
    )


def _find_sparse_layers(n_sparse: int, n_layers: int, step: int | None = None) -> list[bool]:
    """Return for each layer whether transformers gives it experts. n_sparse = 0 still gives them to the second layer.

    step: from config.json; overrides `n_sparse`.
    """
    if step is None:
        step = n_layers // n_sparse if n_sparse > 0 else n_layers
    return [step == 1 or (step > 0 and i % step == 1) for i in range(n_layers)]


def write_switch(config: ModelConfig) -> Json:
    hf_config = {
        key: value for key, value in write_t5(config).items() if key in SWITCH_KEYS and key != "feed_forward_proj"
    }
    hf_config |= {"dense_act_fn": activation_to_hf(config.ffn.activation), "router_jitter_noise": 0.0}
    sparse = [block for block in map(config.layer_config, range(config.n_layers)) if isinstance(block.ffn, MoEConfig)]
    for block in sparse[:1]:
        experts = require_variant(block.ffn, MoEConfig, "model.ffn")
        require_variant(experts.router, SwitchRouterConfig, "model.ffn.router")
        if experts.expert_capacity is None:
            raise UsageError(
                "model.ffn.expert_capacity is not set: transformers' Switch gives each expert a number of "
                "places for a row"
            )
        hf_config |= {"num_experts": experts.n_experts, "expert_capacity": experts.expert_capacity}
    for side, n_layers in (("encoder", config.encoder_layers), ("decoder", config.n_layers)):
        is_sparse = [isinstance(config.layer_config(depth).ffn, MoEConfig) for depth in range(n_layers)]
        counts = (n for n in range(n_layers + 1) if _find_sparse_layers(n, n_layers) == is_sparse)
        if (count := next(counts, None)) is None:
            raise UsageError(
                f"model.layer_types: transformers' Switch can't have experts in these layers of the {side}"
            )
        hf_config[f"num_sparse_{side}_layers"] = count
    return hf_config


def map_switch(config: ModelConfig) -> list[WeightMapping]:
    projections = {"up": "wi", "down": "wo"}

    def ffn(depth: int, sublayer: int) -> list[WeightMapping]:
        section, hf_prefix = config.layer_config(depth).ffn, f"layer.{sublayer}.mlp."
        norm = rename_linear("ffn_residual.norm", f"layer.{sublayer}.layer_norm")
        if not isinstance(section, MoEConfig):
            return norm + rename_modules({f"ffn.w_{part}": hf_prefix + name for part, name in projections.items()})
        hf_experts = [f"{hf_prefix}experts.expert_{i}." for i in range(section.n_experts)]
        router = rename_linear("ffn.router", f"{hf_prefix}router.classifier")
        return [*norm, *router, *map_expert_stacks(hf_experts, projections)]

    return map_t5_style(config, ffn)


register_architecture(
    "SwitchTransformersForConditionalGeneration",
    Architecture(
        "switch_transformers",
        SWITCH_KEYS,
        read_switch,
        write_switch,
        map_switch,
        ignored_tensors=(r"^(en|de)coder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
        fingerprint={"family": "encoder_decoder"},
    ),
)
