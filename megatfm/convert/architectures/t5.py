"""T5 v1.0 and v1.1: T5ForConditionalGeneration."""

from megatfm.config import ModelConfig, T5PositionConfig, expect
from megatfm.convert.keys import Json, activation, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import Rule, layers, linear, same
from megatfm.layers.activation import ACTIVATIONS

GATED_GELU = "gated-gelu"
"""Means the tanh form, whatever "gelu" means elsewhere."""


def read(theirs: Json) -> ModelConfig:
    width, rate = theirs["d_model"], theirs.get("dropout_rate", 0.1)
    # transformers 4 says by tie_word_embeddings what transformers 5 says by scale_decoder_outputs, where it writes it.
    scaled = theirs.get("scale_decoder_outputs", theirs.get("tie_word_embeddings") is not False)
    n_layers = theirs["num_layers"]
    return ModelConfig.of(
        {
            "family": "encoder_decoder",
            "vocab_size": theirs["vocab_size"],
            "d_model": width,
            "n_layers": theirs.get("num_decoder_layers") or n_layers,
            "n_encoder_layers": n_layers,
            "attention.n_heads": theirs["num_heads"],
            "attention.head_dim": theirs["d_kv"],
            "ffn.d_ff": theirs["d_ff"],
            "norm.eps": theirs.get("layer_norm_epsilon", 1e-6),
            "ffn.activation": _activation(theirs.get("feed_forward_proj", "relu")),
            "attention.scale": 1.0,
            "position.name": "t5",
            "position.buckets": theirs.get("relative_attention_num_buckets", 32),
            "position.max_distance": theirs.get("relative_attention_max_distance", 128),
            "embedding.tied": scaled,
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
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


def rules(config: ModelConfig) -> list[Rule]:
    def attention(ours: str, theirs: str) -> list[Rule]:
        return [rule for part in "qkvo" for rule in linear(f"{ours}.w{part}", f"{theirs}.{part}")]

    def ffn(number: int) -> list[Rule]:
        inner = f"layer.{number}.DenseReluDense"
        gated = ACTIVATIONS.get(config.ffn.activation).gated
        ups = {"ffn.w_gate": "wi_0", "ffn.w_up": "wi_1"} if gated else {"ffn.w_up": "wi"}
        return [
            *linear("ffn_residual.norm", f"layer.{number}.layer_norm"),
            *(rule for ours, theirs in ups.items() for rule in linear(ours, f"{inner}.{theirs}")),
            *linear("ffn.w_down", f"{inner}.wo"),
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
        *layers(config.encoder_layers, "encoder.layers.", "encoder.block.", [*both, *ffn(1)]),
        *layers(config.n_layers, "decoder.layers.", "decoder.block.", [*both, *cross, *ffn(2)]),
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


def _activation(theirs: str) -> str:
    if theirs == GATED_GELU:
        return "geglu_tanh"
    return activation(theirs.removeprefix("gated-"), gated=theirs.startswith("gated-"))


ARCHITECTURES.register("T5ForConditionalGeneration")(
    Architecture(
        "t5",
        read,
        write,
        rules,
        # Published files have this table too, though no cross-attention uses one.
        ignored=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
        length_key="n_positions",
    )
)
