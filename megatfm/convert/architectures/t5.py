"""T5 v1.0 and v1.1: T5ForConditionalGeneration."""

from collections.abc import Callable, Container

from megatfm.config import ModelConfig, T5PositionConfig, expect
from megatfm.convert.config_keys import Json, alias, idle, only, taken
from megatfm.convert.keys import activation, derived, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, linear, same, under
from megatfm.layers.activation import ACTIVATIONS

GATED_GELU = "gated-gelu"
"""Means the tanh form, whatever "gelu" means elsewhere."""

KEYS = {
    "vocab_size": taken(32128),
    "d_model": taken(512),
    "d_kv": taken(64),
    "d_ff": taken(2048),
    "num_layers": taken(6),
    "num_decoder_layers": taken(None, int, None),
    "num_heads": taken(8),
    "relative_attention_num_buckets": taken(32),
    "relative_attention_max_distance": taken(128),
    "dropout_rate": taken(0.1),
    "layer_norm_epsilon": taken(1e-6),
    "feed_forward_proj": taken("relu"),
    "dense_act_fn": taken(None, str),
    "is_gated_act": taken(None, bool),
    "tie_word_embeddings": taken(None, bool, None),
    "scale_decoder_outputs": taken(None, bool),
    "is_encoder_decoder": only(True),
    "pad_token_id": taken(0, int, None),
    "eos_token_id": taken(1, int, list, None),
    "hidden_size": alias("d_model"),
    "num_attention_heads": alias("num_heads"),
    "num_hidden_layers": alias("num_layers"),
    "head_dim": alias("d_kv"),
    **idle("initializer_factor", kinds=[float]),
    **idle("n_positions"),
}


def read(theirs: Json) -> ModelConfig:
    width, rate, inner = theirs["d_model"], theirs["dropout_rate"], theirs["feed_forward_proj"]
    derived(theirs, is_gated_act=inner.startswith("gated-"))
    derived(theirs, dense_act_fn="gelu_new" if inner == GATED_GELU else inner.removeprefix("gated-"))
    # transformers 4 says by tie_word_embeddings what transformers 5 says by scale_decoder_outputs, where it writes it.
    scaled = theirs["scale_decoder_outputs"]
    scaled = theirs["tie_word_embeddings"] is not False if scaled is None else scaled
    n_layers = theirs["num_layers"]
    return ModelConfig.of(
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
            "head.scale": width**-0.5 if scaled else 1.0,
            "dropout": rate,
            "attention.dropout": rate,
            "ffn.dropout": rate,
            "init.name": "t5",
        }
    )


def write(ours: ModelConfig) -> Json:
    gated = ACTIVATIONS.get(ours.ffn.activation).gated
    name = their_activation(ours.ffn.activation, gated=gated)
    position = expect(ours.position, T5PositionConfig, "model.position")
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


def rules(config: ModelConfig) -> list[Rule]:
    def ffn(depth: int, number: int) -> list[Rule]:
        inner = f"layer.{number}.DenseReluDense"
        gated = ACTIVATIONS.get(config.ffn.activation).gated
        ups = {"ffn.w_gate": "wi_0", "ffn.w_up": "wi_1"} if gated else {"ffn.w_up": "wi"}
        return [
            *linear("ffn_residual.norm", f"layer.{number}.layer_norm"),
            *(rule for ours, theirs in ups.items() for rule in linear(ours, f"{inner}.{theirs}")),
            *linear("ffn.w_down", f"{inner}.wo"),
        ]

    return rules_around(config, ffn)


def rules_around(config: ModelConfig, ffn: Callable[[int, int], list[Rule]]) -> list[Rule]:
    """Of all but feed-forward networks, whose rules are `ffn(depth, number of the sublayer)`."""

    def attention(ours: str, theirs: str) -> list[Rule]:
        return [rule for part in "qkvo" for rule in linear(f"{ours}.w{part}", f"{theirs}.{part}")]

    def stack(side: str, n: int, attentions: list[Rule], number: int) -> list[Rule]:
        return [
            rule
            for i in range(n)
            for rule in under(f"{side}.layers.{i}.", f"{side}.block.{i}.", [*attentions, *ffn(i, number)])
        ]

    both = [*linear("attn_residual.norm", "layer.0.layer_norm"), *attention("attn", "layer.0.SelfAttention")]
    cross = [
        *linear("cross_residual.norm", "layer.1.layer_norm"),
        *attention("cross", "layer.1.EncDecAttention"),
    ]
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return [
        same(
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
                same(
                    f"{stack}.position.weight",
                    f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                ),
                *linear(f"{stack}.norm", f"{stack}.final_layer_norm"),
            )
        ),
        *([] if config.embedding.tied else [same("head.weight", "lm_head.weight")]),
    ]


def fit(config: ModelConfig, names: Container[str]) -> ModelConfig:
    """Whether v1.1 shares its output matrix, config.json of transformers 5 doesn't tell, where it always says so."""
    shares = "lm_head.weight" not in names
    return config if config.head_scale != 1.0 else config.changed({"embedding.tied": shares})


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
        ignored=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
        length_key="n_positions",
        fit=fit,
        marks={"family": "encoder_decoder"},
    )
)
register_bare("T5Model", ARCHITECTURES.get("T5ForConditionalGeneration"))
