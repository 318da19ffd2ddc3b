"""Mixtral: MixtralForCausalLM, a Mistral all of whose blocks have experts."""

from megatfm.config import HeadsAttentionConfig, ModelConfig, expect
from megatfm.convert.architectures import llama, mistral
from megatfm.convert.config_keys import Json, alias, idle, taken
from megatfm.convert.experts import ExpertNames, dropless, expert_rules, top_k_router, top_k_section
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, linear
from megatfm.errors import UsageError

NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
THETA = 1e6
"""Their default, for a config.json that has none."""
KEYS = mistral.KEYS | {
    "rms_norm_eps": taken(1e-5),
    "sliding_window": taken(None, int, None),
    "num_local_experts": taken(8),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": taken(2),
    **idle("output_router_logits", kinds=[bool]),
    **idle("router_aux_loss_coef", "router_jitter_noise", kinds=[float]),
}


def read(theirs: Json) -> ModelConfig:
    given = theirs["rope_scaling"] or theirs["rope_parameters"] or {}
    if theirs["rope_theta"] is None and "rope_theta" not in given:
        theirs = theirs | {"rope_theta": THETA}
    dense = mistral.read(theirs)
    experts = top_k_section(
        theirs, theirs["num_local_experts"], dense.ffn.d_ff, dense.ffn.activation, normalise=True
    )
    return dense.changed({"ffn": experts})


def write(ours: ModelConfig) -> Json:
    router, experts = top_k_router(ours), dropless(ours)
    if not router.normalise:
        raise UsageError("model.ffn.router.normalise = false: Mixtral's weights add up to 1")
    return {
        **mistral.write(ours),
        "num_local_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
    }


def rules(config: ModelConfig, *, fused: bool = False) -> list[Rule]:
    bias = expect(config.attention, HeadsAttentionConfig, "model.attention").bias
    attention = [
        rule for part in "qkvo" for rule in linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)
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
        prefix="model.",
        ignored=(r"rotary_emb\.inv_freq$",),
        length_key="max_position_embeddings",
        marks=llama.MARKS | {"ffn.name": "moe"},
    )
)
register_bare("MixtralModel", ARCHITECTURES.get("MixtralForCausalLM"))
