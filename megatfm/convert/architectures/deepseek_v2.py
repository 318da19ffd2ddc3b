"""DeepSeek-V2 and V2-Lite (DeepseekV2ForCausalLM): a V3 with a softmax router, which ranks groups by their best
expert."""

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import DeepSeekV2RouterConfig
from megatfm.convert.architecture import Architecture, register_architecture
from megatfm.convert.architectures import deepseek
from megatfm.convert.architectures.llama import check_head_count
from megatfm.convert.hf_config import Json, alias, ignored, omit_keys, supported_values, used
from megatfm.convert.weight_mapping import require_dropless
from megatfm.errors import UsageError

GREEDY, LIMITED = "greedy", "group_limited_greedy"
V3_ONLY_KEYS = (
    "rope_interleave",
    "scoring_func",
    "num_local_experts",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
DEEPSEEK_V2_KEYS = omit_keys(deepseek.DEEPSEEK_V3_KEYS, *V3_ONLY_KEYS) | {
    "vocab_size": used(102400),
    "hidden_size": used(4096),
    "intermediate_size": used(11008),
    "num_hidden_layers": used(32),
    "first_k_dense_replace": used(0),
    "num_attention_heads": used(32),
    "num_key_value_heads": used(None, int, None),
    "max_position_embeddings": used(2048),
    "mlp_bias": supported_values(False),
    "bos_token_id": used(1, int, list, None),
    "eos_token_id": used(2, int, list, None),
    "moe_intermediate_size": used(1407),
    "n_routed_experts": used(64),
    "num_experts": alias("n_routed_experts"),
    "num_experts_per_tok": used(None, int),
    "n_shared_experts": used(2),
    "n_group": used(None, int, None),
    "topk_group": used(None, int, None),
    "routed_scaling_factor": used(1.0),
    "topk_method": supported_values(GREEDY, LIMITED),
    "scoring_func": supported_values("softmax"),
    **ignored("norm_topk_prob", kinds=[bool, None]),  # transformers never normalises
    **ignored("router_aux_loss_coef"),
}


def read_deepseek_v2(hf_config: Json) -> ModelConfig:
    check_head_count(hf_config)
    has_experts = hf_config["first_k_dense_replace"] < hf_config["num_hidden_layers"]
    required = ["num_experts_per_tok"] + ["n_group", "topk_group"] * (hf_config["topk_method"] == LIMITED)
    for key in required if has_experts else ():
        if hf_config[key] is None:
            raise UsageError(f"config.json: {key} is not there: say how many")
    groups = {"n_group": hf_config["n_group"], "topk_group": hf_config["topk_group"]}
    router = {
        "name": "deepseek_v2",
        "routed_scaling_factor": hf_config["routed_scaling_factor"],
        **(groups if hf_config["topk_method"] == LIMITED else {}),
    }
    return deepseek.read_with_router(hf_config, router)


def write_deepseek_v2(config: ModelConfig) -> Json:
    hf_config = deepseek.write_without_router(config)
    for block in deepseek.list_sparse_blocks(config)[:1]:
        router = require_variant(require_dropless(block).router, DeepSeekV2RouterConfig, "model.ffn.router")
        is_limited = router.n_group > 1
        hf_config |= {
            "topk_method": LIMITED if is_limited else GREEDY,
            "n_group": router.n_group,
            "topk_group": router.topk_group,
            "routed_scaling_factor": router.routed_scaling_factor,
            "norm_topk_prob": False,
        }
    return hf_config


register_architecture(
    "DeepseekV2ForCausalLM",
    Architecture(
        "deepseek_v2",
        DEEPSEEK_V2_KEYS,
        read_deepseek_v2,
        write_deepseek_v2,
        deepseek.map_deepseek_v3,
        map_fused_weights=lambda config: deepseek.map_deepseek_v3(config, fused=True),
        base_model_prefix="model.",
        max_length_key="max_position_embeddings",
        fingerprint={"family": "decoder", "attention.name": "mla"},
    ),
    base="DeepseekV2Model",
)
