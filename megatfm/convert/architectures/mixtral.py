"""Mixtral: MixtralForCausalLM, a Mistral all of whose blocks have experts."""

from megatfm.config import GQAAttentionConfig, ModelConfig, require_variant
from megatfm.convert.architectures import llama, mistral
from megatfm.convert.config_keys import Json, alias, ignored, used
from megatfm.convert.experts import (
    ExpertNames,
    expert_rules,
    require_dropless,
    require_top_k_router,
    top_k_moe_section,
)
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, rename_linear
from megatfm.errors import UsageError

NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
THETA = 1e6
"""Their default, for a config.json that has none."""
KEYS = mistral.KEYS | {
    "rms_norm_eps": used(1e-5),
    "sliding_window": used(None, int, None),
    "num_local_experts": used(8),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": used(2),
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", "router_jitter_noise", kinds=[float]),
}


def read(theirs: Json) -> ModelConfig:
    given = theirs["rope_scaling"] or theirs["rope_parameters"] or {}
    if theirs["rope_theta"] is None and "rope_theta" not in given:
        theirs = theirs | {"rope_theta": THETA}
    dense = mistral.read(theirs)
    experts = top_k_moe_section(
        theirs, theirs["num_local_experts"], dense.ffn.d_ff, dense.ffn.activation, normalise=True
    )
    return dense.with_changes({"ffn": experts})


def write(ours: ModelConfig) -> Json:
    router, experts = require_top_k_router(ours), require_dropless(ours)
    if not router.norm_topk_prob:
        raise UsageError("model.ffn.router.norm_topk_prob = false: Mixtral's weights add up to 1")
    return {
        **mistral.write(ours),
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
    }


def rules(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    bias = require_variant(config.attention, GQAAttentionConfig, "model.attention").bias
    attention = [
        rule
        for part in "qkvo"
        for rule in rename_linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)
    ]
    return llama.rules_around(config, attention, expert_rules(config, NAMES, fused=fused))


ARCHITECTURES.register("MixtralForCausalLM")(
    Architecture(
        "mixtral",
        KEYS,
        read,
        write,
        rules,
        fused_rules=lambda config: rules(config, fused=True),
        base_model_prefix="model.",
        ignored_tensors=(r"rotary_emb\.inv_freq$",),
        max_length_key="max_position_embeddings",
        fingerprint=llama.MARKS | {"ffn.name": "moe"},
    )
)
register_base_model("MixtralModel", ARCHITECTURES.get("MixtralForCausalLM"))
