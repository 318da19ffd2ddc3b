"""OLMoE: OlmoeForCausalLM, a Llama that normalises all heads' queries and keys together, with experts in all blocks."""

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
from megatfm.errors import UsageError

KEYS = llama.KEYS | {
    "vocab_size": used(50304),
    "hidden_size": used(2048),
    "intermediate_size": used(2048),
    "num_hidden_layers": used(16),
    "num_attention_heads": used(16),
    "max_position_embeddings": used(4096),
    "rms_norm_eps": used(1e-5),
    "attention_dropout": used(0.0),
    "clip_qkv": supported_values(None),
    "mlp_bias": supported_values(False),
    "pad_token_id": used(1, int, None),
    "bos_token_id": COMMON["bos_token_id"],
    "eos_token_id": used(50279, int, list, None),
    "num_experts": used(64),
    "num_local_experts": alias("num_experts"),
    "num_experts_per_tok": used(8),
    "norm_topk_prob": used(False),
    **ignored("output_router_logits", kinds=[bool]),
    **ignored("router_aux_loss_coef", kinds=[float]),
}


def read(theirs: Json) -> ModelConfig:
    dense = llama.read(theirs)
    if theirs["head_dim"] not in (None, dense.d_model // dense.attention.n_heads):
        raise UsageError(
            f"config.json: head_dim = {theirs['head_dim']}: OLMoE's norms of queries and keys are as wide as "
            "hidden_size: leave it out"
        )
    experts = top_k_moe_section(
        theirs,
        theirs["num_experts"],
        dense.ffn.d_ff,
        dense.ffn.activation,
        normalise=theirs["norm_topk_prob"],
    )
    return dense.with_changes({"ffn": experts, "attention.qk_norm": "all_heads"})


def write(ours: ModelConfig) -> Json:
    router, experts = require_top_k_router(ours), require_dropless(ours)
    return {
        **{key: value for key, value in llama.write(ours).items() if key not in ("mlp_bias", "head_dim")},
        "clip_qkv": None,
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": router.norm_topk_prob,
    }


def rules(config: ModelConfig, *, fused: bool = False) -> list[WeightMapping]:
    bias = bool(getattr(config.attention, "bias", False))
    attention = [
        *(
            rule
            for part in "qkvo"
            for rule in rename_linear(f"attn.w{part}", f"self_attn.{part}_proj", bias=bias)
        ),
        *(rule for part in "qk" for rule in rename_linear(f"attn.w{part}_norm", f"self_attn.{part}_norm")),
    ]
    return llama.rules_around(config, attention, expert_rules(config, ExpertNames(), fused=fused))


ARCHITECTURES.register("OlmoeForCausalLM")(
    Architecture(
        "olmoe",
        KEYS,
        read,
        write,
        rules,
        fused_rules=lambda config: rules(config, fused=True),
        base_model_prefix="model.",
        ignored_tensors=(r"rotary_emb\.inv_freq$",),
        max_length_key="max_position_embeddings",
        fingerprint=llama.MARKS | {"ffn.name": "moe", "attention.qk_norm": "all_heads"},
    )
)
register_base_model("OlmoeModel", ARCHITECTURES.get("OlmoeForCausalLM"))
