"""Qwen3 with experts in all blocks: Qwen3MoeForCausalLM, a Llama that normalises queries and keys head by head."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import COMMON, Json, alias, idle, only, taken
from megatfm.convert.experts import ExpertNames, dropless, expert_rules, top_k_router, top_k_section
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.convert.table import Rule, linear

KEYS = llama.KEYS | {
    "vocab_size": taken(151936),
    "hidden_size": taken(2048),
    "intermediate_size": taken(6144),  # of dense blocks, of which there are none
    "num_hidden_layers": taken(24),
    "num_key_value_heads": taken(4),
    "head_dim": taken(None, int),
    "max_position_embeddings": taken(32768),
    "attention_bias": only(False),
    "qkv_bias": only(False),
    "use_qk_norm": only(True),
    "mlp_bias": only(False),
    "attention_dropout": taken(0.0),
    "bos_token_id": COMMON["bos_token_id"],
    "eos_token_id": COMMON["eos_token_id"],
    "num_local_experts": taken(128),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": taken(8),
    "moe_intermediate_size": taken(768),
    "norm_topk_prob": taken(False),
    "decoder_sparse_step": only(1),
    "mlp_only_layers": only([], None),
    "shared_expert_intermediate_size": only(0),
    "use_sliding_window": only(False),
    **idle("sliding_window", "max_window_layers", kinds=[int, None]),
    **idle("output_router_logits", kinds=[bool]),
    **idle("router_aux_loss_coef", kinds=[float]),
}


def read(theirs: Json) -> ModelConfig:
    dense = llama.read(theirs)
    experts = top_k_section(
        theirs,
        theirs["num_local_experts"],
        theirs["moe_intermediate_size"],
        dense.ffn.activation,
        normalise=theirs["norm_topk_prob"],
    )
    return dense.changed({"ffn": experts, "attention.qk_norm": True})


def write(ours: ModelConfig) -> Json:
    router, experts = top_k_router(ours), dropless(ours)
    theirs = {key: value for key, value in llama.write(ours).items() if key != "mlp_bias"}
    return {
        **theirs,
        "moe_intermediate_size": experts.d_ff,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def rules(config: ModelConfig, *, fused: bool = False) -> list[Rule]:
    attention = [
        *(rule for part in "qkvo" for rule in linear(f"attn.w{part}", f"self_attn.{part}_proj")),
        *(rule for part in "qk" for rule in linear(f"attn.{part}_norm", f"self_attn.{part}_norm")),
    ]
    return llama.rules_around(config, attention, expert_rules(config, ExpertNames(), fused=fused))


ARCHITECTURES.register("Qwen3MoeForCausalLM")(
    Architecture(
        "qwen3_moe",
        KEYS,
        read,
        write,
        rules,
        fused_rules=lambda config: rules(config, fused=True),
        prefix="model.",
        length_key="max_position_embeddings",
        marks=llama.MARKS | {"ffn.name": "moe", "attention.qk_norm": True},
    )
)
register_bare("Qwen3MoeModel", ARCHITECTURES.get("Qwen3MoeForCausalLM"))
