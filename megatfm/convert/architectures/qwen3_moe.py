"""Qwen3 with experts in all blocks: Qwen3MoeForCausalLM, a Llama that normalises queries and keys head by head."""

from megatfm.config import ModelConfig
from megatfm.convert.architectures import llama
from megatfm.convert.config_keys import COMMON, Json, alias, ignored, supported_values, used
from megatfm.convert.experts import (
    ExpertNames,
    expert_rules,
    require_dropless,
    require_top_k_router,
    top_k_moe_section,
)
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_base_model
from megatfm.convert.table import WeightMapping, rename_linear

KEYS = llama.KEYS | {
    "vocab_size": used(151936),
    "hidden_size": used(2048),
    "intermediate_size": used(6144),  # of dense blocks, of which there are none
    "num_hidden_layers": used(24),
    "num_key_value_heads": used(4),
    "head_dim": used(None, int),
    "max_position_embeddings": used(32768),
    "attention_bias": supported_values(False),
    "qkv_bias": supported_values(False),
    "use_qk_norm": supported_values(True),
    "mlp_bias": supported_values(False),
    "attention_dropout": used(0.0),
    "bos_token_id": COMMON["bos_token_id"],
    "eos_token_id": COMMON["eos_token_id"],
    "num_local_experts": used(128),
    "num_experts": alias("num_local_experts"),
    "num_experts_per_tok": used(8),
    "moe_intermediate_size": used(768),
    "norm_topk_prob": used(False),
    "decoder_sparse_step": supported_values(1),
    "mlp_only_layers": supported_values([], None),
    "shared_expert_intermediate_size": supported_values(0),
    "use_sliding_window": supported_values(False),
    **ignored("sliding_window", "max_window_layers", kinds=[int, None]),
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", kinds=[float]),
}


def read(theirs: Json) -> ModelConfig:
    dense = llama.read(theirs)
    experts = top_k_moe_section(
        theirs,
        theirs["num_local_experts"],
        theirs["moe_intermediate_size"],
        dense.ffn.activation,
        normalise=theirs["norm_topk_prob"],
    )
    return dense.with_changes({"ffn": experts, "attention.qk_norm": True})


def write(ours: ModelConfig) -> Json:
    router, experts = require_top_k_router(ours), require_dropless(ours)
    theirs = {key: value for key, value in llama.write(ours).items() if key != "mlp_bias"}
    return {
        **theirs,
        "moe_intermediate_size": experts.d_ff,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def rules(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    attention = [
        *(rule for part in "qkvo" for rule in rename_linear(f"attn.w{part}", f"self_attn.{part}_proj")),
        *(rule for part in "qk" for rule in rename_linear(f"attn.{part}_norm", f"self_attn.{part}_norm")),
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
        base_model_prefix="model.",
        max_length_key="max_position_embeddings",
        fingerprint=llama.MARKS | {"ffn.name": "moe", "attention.qk_norm": True},
    )
)
register_base_model("Qwen3MoeModel", ARCHITECTURES.get("Qwen3MoeForCausalLM"))
