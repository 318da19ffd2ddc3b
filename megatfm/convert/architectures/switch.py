"""Switch Transformer (Fedus et al. 2022): SwitchTransformersForConditionalGeneration, a T5 some of whose blocks have
experts, of which each token goes through one."""

from megatfm.config import ModelConfig, require_variant
from megatfm.config.experts import MoEConfig, SwitchRouterConfig
from megatfm.convert.architectures import t5
from megatfm.convert.config_keys import Json, alias, ignored, supported_values, used
from megatfm.convert.experts import stacked, unbind_experts
from megatfm.convert.keys import activation, their_activation
from megatfm.convert.registry import ARCHITECTURES, Architecture
from megatfm.convert.table import WeightMapping, rename
from megatfm.errors import UsageError

WITHOUT = ("feed_forward_proj", "is_gated_act", "scale_decoder_outputs", "n_positions", "head_dim")
KEYS = {key: value for key, value in t5.KEYS.items() if key not in WITHOUT} | {
    "d_model": used(768),
    "num_layers": used(12),
    "num_decoder_layers": used(12, int, None),
    "num_heads": used(12),
    "expert_capacity": used(64),
    "num_experts": used(8),
    "num_sparse_encoder_layers": used(3),
    "num_sparse_decoder_layers": used(3),
    "encoder_sparse_step": used(None, int),
    "decoder_sparse_step": used(None, int),
    "router_bias": supported_values(False),
    "router_dtype": supported_values("float32"),
    "dense_act_fn": used("relu"),
    "tie_word_embeddings": used(True),
    "hidden_size": alias("d_model"),
    **ignored("router_jitter_noise", "router_z_loss_coef", "router_aux_loss_coef"),
    **ignored("add_router_probs", "router_ignore_padding_tokens", "router_type", "output_router_logits"),
    **ignored("batch_prioritized_routing", "num_selected_experts"),
    **ignored("feed_forward_proj", "is_gated_act", "n_positions"),
}


def read(theirs: Json) -> ModelConfig:
    plain = {
        "feed_forward_proj": "relu",
        "is_gated_act": None,
        "dense_act_fn": None,
        "scale_decoder_outputs": None,
    }
    dense = t5.read(theirs | plain)
    scaled = dense.d_model**-0.5 if theirs["tie_word_embeddings"] else 1.0
    acts = activation(theirs["dense_act_fn"])
    dense = dense.with_changes({"ffn.activation": acts, "lm_head.scale": scaled})
    experts = {
        "name": "moe",
        "d_ff": theirs["d_ff"],
        "activation": acts,
        "n_experts": theirs["num_experts"],
        "top_k": 1,
        "expert_capacity": theirs["expert_capacity"],
        "dropout": 0.0,
        "router": {"name": "switch"},
    }
    kinds = _kinds(theirs["num_sparse_encoder_layers"], dense.encoder_layers, theirs["encoder_sparse_step"])
    others = _kinds(theirs["num_sparse_decoder_layers"], dense.n_layers, theirs["decoder_sparse_step"])
    if any(one != other for one, other in zip(kinds, others, strict=False)):
        raise UsageError(
            "config.json: num_sparse_encoder_layers and num_sparse_decoder_layers (or encoder_sparse_step and "
            "decoder_sparse_step) put experts into other layers of the encoder than of the decoder, which "
            "megatfm has not"
        )
    longer = max(kinds, others, key=len)
    if True not in longer:
        return dense
    names = ["sparse" if sparse else "dense" for sparse in longer]
    sections = {"sparse": {"ffn": experts}, "dense": {}}
    return dense.with_changes(
        {"layer_types": names, **{f"layer_type.{name}": sections[name] for name in dict.fromkeys(names)}}
    )


def _kinds(n_sparse: int, n_layers: int, step: int | None = None) -> list[bool]:
    """Which layers transformers gives experts to: with none asked for, the second, where there are two or more.

    step: from config.json, where it overrules the number of such layers.
    """
    if step is None:
        step = n_layers // n_sparse if n_sparse > 0 else n_layers
    return [step == 1 or (step > 0 and i % step == 1) for i in range(n_layers)]


def write(ours: ModelConfig) -> Json:
    acts = their_activation(ours.ffn.activation)
    theirs = t5.write(ours)
    theirs = {key: value for key, value in theirs.items() if key in KEYS and key != "feed_forward_proj"}
    theirs |= {"dense_act_fn": acts, "router_jitter_noise": 0.0}
    sparse = [
        config for config in map(ours.layer_config, range(ours.n_layers)) if isinstance(config.ffn, MoEConfig)
    ]
    for config in sparse[:1]:
        experts = require_variant(config.ffn, MoEConfig, "model.ffn")
        require_variant(experts.router, SwitchRouterConfig, "model.ffn.router")
        if experts.expert_capacity is None:
            raise UsageError(
                "model.ffn.expert_capacity is not set: transformers' Switch gives each expert a number of "
                "places for a row"
            )
        theirs |= {"num_experts": experts.n_experts, "expert_capacity": experts.expert_capacity}
    for side, n_layers in (("encoder", ours.encoder_layers), ("decoder", ours.n_layers)):
        wanted = [isinstance(ours.layer_config(depth).ffn, MoEConfig) for depth in range(n_layers)]
        counts = (n for n in range(n_layers + 1) if _kinds(n, n_layers) == wanted)
        if (count := next(counts, None)) is None:
            raise UsageError(
                f"model.layer_types: transformers' Switch can't have experts in these layers of the {side}"
            )
        theirs[f"num_sparse_{side}_layers"] = count
    return theirs


def rules(config: ModelConfig) -> list[WeightMapping]:
    def experts(n: int, number: int) -> list[WeightMapping]:
        inner = f"layer.{number}.mlp"
        return [
            rename("ffn.router.weight", f"{inner}.router.classifier.weight"),
            *(
                WeightMapping(
                    (f"ffn.experts.w_{ours}",),
                    tuple(f"{inner}.experts.expert_{e}.{theirs}.weight" for e in range(n)),
                    unbind_experts,
                    stacked,
                )
                for ours, theirs in (("up", "wi"), ("down", "wo"))
            ),
        ]

    def ffn(depth: int, number: int) -> list[WeightMapping]:
        section = config.layer_config(depth).ffn
        norm = rename("ffn_residual.norm.weight", f"layer.{number}.layer_norm.weight")
        if isinstance(section, MoEConfig):
            return [norm, *experts(section.n_experts, number)]
        parts = (("up", "wi"), ("down", "wo"))
        return [
            norm,
            *(
                rename(f"ffn.w_{ours}.weight", f"layer.{number}.mlp.{theirs}.weight")
                for ours, theirs in parts
            ),
        ]

    return t5.rules_around(config, ffn)


ARCHITECTURES.register("SwitchTransformersForConditionalGeneration")(
    Architecture(
        "switch_transformers",
        KEYS,
        read,
        write,
        rules,
        ignored_tensors=(
            r"^(en|de)coder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
        ),
        fingerprint={"family": "encoder_decoder"},
    )
)
