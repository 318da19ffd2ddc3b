"""T5 v1.0 and v1.1: T5ForConditionalGeneration."""

from collections.abc import Callable, Container

from megatfm.config import ModelConfig, T5PositionConfig, require_variant
from megatfm.convert.config_keys import Json, alias, ignored, supported_values, used
from megatfm.convert.keys import activation, check_implied_values, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, rename, rename_linear, with_prefix
from megatfm.layers.activation import ACTIVATIONS

GATED_GELU = "gated-gelu"
"""Means the tanh form, whatever "gelu" means elsewhere."""

KEYS = {
    "vocab_size": used(32128),
    "d_model": used(512),
    "d_kv": used(64),
    "d_ff": used(2048),
    "num_layers": used(6),
    "num_decoder_layers": used(None, int, None),
    "num_heads": used(8),
    "relative_attention_num_buckets": used(32),
    "relative_attention_max_distance": used(128),
    "dropout_rate": used(0.1),
    "layer_norm_epsilon": used(1e-6),
    "feed_forward_proj": used("relu"),
    "dense_act_fn": used(None, str),
    "is_gated_act": used(None, bool),
    "tie_word_embeddings": used(None, bool, None),
    "scale_decoder_outputs": used(None, bool),
    "is_encoder_decoder": supported_values(True),
    "pad_token_id": used(0, int, None),
    "eos_token_id": used(1, int, list, None),
    "hidden_size": alias("d_model"),
    "num_attention_heads": alias("num_heads"),
    "num_hidden_layers": alias("num_layers"),
    "head_dim": alias("d_kv"),
    **ignored("initializer_factor", kinds=[float]),
    **ignored("n_positions"),
}


def read(theirs: Json) -> ModelConfig:
    width, rate, inner = theirs["d_model"], theirs["dropout_rate"], theirs["feed_forward_proj"]
    check_implied_values(theirs, is_gated_act=inner.startswith("gated-"))
    check_implied_values(
        theirs, dense_act_fn="gelu_new" if inner == GATED_GELU else inner.removeprefix("gated-")
    )
    # transformers 4 says by tie_word_embeddings what transformers 5 says by scale_decoder_outputs, where it writes it.
    scaled = theirs["scale_decoder_outputs"]
    scaled = theirs["tie_word_embeddings"] is not False if scaled is None else scaled
    n_layers = theirs["num_layers"]
    return ModelConfig.from_dotted(
        {
            "family": "encoder_decoder",
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": n_layers if theirs["num_decoder_layers"] is None else theirs["num_decoder_layers"],
            "n_encoder_layers": n_layers,
            "attention.n_heads": theirs["num_heads"],
            "attention.head_dim": theirs["d_kv"],
            "ffn.d_ff": theirs["d_ff"],
            "norm.eps": theirs["layer_norm_epsilon"],
            "ffn.activation": _activation(inner),
            "attention.scale": 1.0,
            "position.name": "t5",
            "position.buckets": theirs["relative_attention_num_buckets"],
            "position.max_distance": theirs["relative_attention_max_distance"],
            "embedding.tied": theirs["tie_word_embeddings"] is not False,
            "lm_head.scale": width**-0.5 if scaled else 1.0,
            "dropout": rate,
            "attention.dropout": rate,
            "ffn.dropout": rate,
            "init.name": "t5",
        }
    )


def write(ours: ModelConfig) -> Json:
    gated = ACTIVATIONS.get(ours.ffn.activation).gated
    name = their_activation(ours.ffn.activation, gated=gated)
    position = require_variant(ours.position, T5PositionConfig, "model.position")
    return {
        "vocab_size": ours.vocab_size,
        "d_model": ours.d_model,
        "d_kv": ours.head_width,
        "d_ff": ours.ffn.d_ff,
        "num_layers": ours.encoder_layers,
        "num_decoder_layers": ours.n_layers,
        "num_heads": ours.attention.n_heads,
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.max_distance,
        "dropout_rate": ours.dropout,
        "layer_norm_epsilon": ours.norm.eps,
        "feed_forward_proj": GATED_GELU
        if ours.ffn.activation == "geglu_tanh"
        else f"{'gated-' * gated}{name}",
        "tie_word_embeddings": ours.embedding.tied,
        **({"scale_decoder_outputs": False} if ours.embedding.tied and ours.head_scale == 1.0 else {}),
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


def rules(config: ModelConfig) -> list[WeightMapping]:
    def ffn(depth: int, number: int) -> list[WeightMapping]:
        inner = f"layer.{number}.DenseReluDense"
        gated = ACTIVATIONS.get(config.ffn.activation).gated
        ups = {"ffn.w_gate": "wi_0", "ffn.w_up": "wi_1"} if gated else {"ffn.w_up": "wi"}
        return [
            *rename_linear("ffn_residual.norm", f"layer.{number}.layer_norm"),
            *(rule for ours, theirs in ups.items() for rule in rename_linear(ours, f"{inner}.{theirs}")),
            *rename_linear("ffn.w_down", f"{inner}.wo"),
        ]

    return rules_around(config, ffn)


def rules_around(config: ModelConfig, ffn: Callable[[int, int], list[WeightMapping]]) -> list[WeightMapping]:
    """Of all but feed-forward networks, whose rules are `ffn(depth, number of the sublayer)`."""

    def attention(ours: str, theirs: str) -> list[WeightMapping]:
        return [rule for part in "qkvo" for rule in rename_linear(f"{ours}.w{part}", f"{theirs}.{part}")]

    def stack(side: str, n: int, attentions: list[WeightMapping], number: int) -> list[WeightMapping]:
        return [
            rule
            for i in range(n)
            for rule in with_prefix(
                f"{side}.layers.{i}.", f"{side}.block.{i}.", [*attentions, *ffn(i, number)]
            )
        ]

    both = [
        *rename_linear("attn_residual.norm", "layer.0.layer_norm"),
        *attention("attn", "layer.0.SelfAttention"),
    ]
    cross = [
        *rename_linear("cross_residual.norm", "layer.1.layer_norm"),
        *attention("cross", "layer.1.EncDecAttention"),
    ]
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return [
        rename(
            "encoder.embedding.tokens.weight",
            "shared.weight",
            copies=[*copies, *["lm_head.weight"] * config.embedding.tied],
        ),
        *stack("encoder", config.encoder_layers, both, 1),
        *stack("decoder", config.n_layers, [*both, *cross], 2),
        *(
            rule
            for stack in ("encoder", "decoder")
            for rule in (
                rename(
                    f"{stack}.position.weight",
                    f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                ),
                *rename_linear(f"{stack}.norm", f"{stack}.final_layer_norm"),
            )
        ),
        *([] if config.embedding.tied else [rename("head.weight", "lm_head.weight")]),
    ]


def fit(config: ModelConfig, names: Container[str]) -> ModelConfig:
    """Whether v1.1 shares its output matrix, config.json of transformers 5 doesn't tell, where it always says so."""
    shares = "lm_head.weight" not in names
    return config if config.head_scale != 1.0 else config.with_changes({"embedding.tied": shares})


def _activation(theirs: str) -> str:
    if theirs == GATED_GELU:
        return "geglu_tanh"
    return activation(theirs.removeprefix("gated-"), gated=theirs.startswith("gated-"))


ARCHITECTURES.register("T5ForConditionalGeneration")(
    Architecture(
        "t5",
        KEYS,
        read,
        write,
        rules,
        # Published files have this table too, though no cross-attention uses one.
        ignored_tensors=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
        max_length_key="n_positions",
        refine_config=fit,
        fingerprint={"family": "encoder_decoder"},
    )
)
register_base_model("T5Model", ARCHITECTURES.get("T5ForConditionalGeneration"))
