"""DeepSeek-V2 and V2-Lite (DeepseekV2ForCausalLM): a V3 with a softmax router, which ranks groups by their best
expert."""

from functools import partial

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import DeepSeekV2RouterConfig
from megatfm.convert.architectures import deepseek
from megatfm.convert.architectures.llama import check_head_count, register_decoder
from megatfm.convert.hf_config import Json, alias, ignored, omit_keys, supported_values, used
from megatfm.convert.weight_mapping import require_dropless
from megatfm.errors import UsageError

GREEDY, LIMITED = "greedy", "group_limited_greedy"
V3_ONLY_KEYS = ("rope_interleave", "scoring_func", "num_local_experts", "num_nextn_predict_layers", "num_mtp_layers")
DEEPSEEK_V2_KEYS = omit_keys(deepseek.DEEPSEEK_V3_KEYS, *V3_ONLY_KEYS) | {
    **used(
        vocab_size=102400, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, first_k_dense_replace=0,
        num_attention_heads=32, num_key_value_heads=(None, int, None), max_position_embeddings=2048,
        bos_token_id=(1, int, list, None), eos_token_id=(2, int, list, None), moe_intermediate_size=1407,
        n_routed_experts=64, num_experts_per_tok=(None, int), n_shared_experts=2, n_group=(None, int, None),
        topk_group=(None, int, None), routed_scaling_factor=1.0,
    ),
    **supported_values(mlp_bias=False, topk_method=(GREEDY, LIMITED), scoring_func="softmax"),
    **alias(num_experts="n_routed_experts"),
    **ignored("norm_topk_prob", kinds=[bool, None]),  # transformers never normalises
    **ignored("router_aux_loss_coef"),
}  # fmt: skip


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


register_decoder(
    "DeepseekV2", "deepseek_v2", DEEPSEEK_V2_KEYS, read_deepseek_v2, write_deepseek_v2, deepseek.map_deepseek_v3,
    features=deepseek.DEEPSEEK_FEATURES, map_fused_weights=partial(deepseek.map_deepseek_v3, fused=True),
)  # fmt: skip
