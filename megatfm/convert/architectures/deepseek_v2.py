"""DeepSeek-V2 and V2-Lite: DeepseekV2ForCausalLM, a V3 with softmax, and groups as good as their best expert."""

from megatfm.config import ModelConfig, expect
from megatfm.config.experts import DeepSeekV2RouterConfig
from megatfm.convert.architectures import deepseek
from megatfm.convert.config_keys import Json, alias, idle, only, taken
from megatfm.convert.experts import dropless
from megatfm.convert.registry import ARCHITECTURES, Architecture, register_bare
from megatfm.errors import UsageError

GREEDY, LIMITED = "greedy", "group_limited_greedy"
V3_ALONE = (
    "rope_interleave",
    "scoring_func",
    "num_local_experts",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
KEYS = {key: value for key, value in deepseek.KEYS.items() if key not in V3_ALONE} | {
    "vocab_size": taken(102400),
    "hidden_size": taken(4096),
    "intermediate_size": taken(11008),
    "num_hidden_layers": taken(32),
    "first_k_dense_replace": taken(0),
    "num_attention_heads": taken(32),
    "num_key_value_heads": taken(None, int, None),
    "max_position_embeddings": taken(2048),
    "mlp_bias": only(False),
    "bos_token_id": taken(1, int, list, None),
    "eos_token_id": taken(2, int, list, None),
    "moe_intermediate_size": taken(1407),
    "n_routed_experts": taken(64),
    "num_experts": alias("n_routed_experts"),
    "num_experts_per_tok": taken(None, int),
    "n_shared_experts": taken(2),
    "n_group": taken(None, int, None),
    "topk_group": taken(None, int, None),
    "routed_scaling_factor": taken(1.0),
    "topk_method": only(GREEDY, LIMITED),
    "scoring_func": only("softmax"),
    **idle("norm_topk_prob", kinds=[bool, None]),  # theirs never does
    **idle("router_aux_loss_coef"),
}


def read(theirs: Json) -> ModelConfig:
    has_experts = theirs["first_k_dense_replace"] < theirs["num_hidden_layers"]
    needed = ["num_experts_per_tok"] + ["n_group", "topk_group"] * (theirs["topk_method"] == LIMITED)
    for key in needed if has_experts else ():
        if theirs[key] is None:
            raise UsageError(f"config.json: {key} is not there: say how many")
    groups = {"n_groups": theirs["n_group"], "top_groups": theirs["topk_group"]}
    router = {
        "name": "deepseek_v2",
        "scale": theirs["routed_scaling_factor"],
        **(groups if theirs["topk_method"] == LIMITED else {}),
    }
    return deepseek.read_with(theirs, router)


def write(ours: ModelConfig) -> Json:
    theirs = deepseek.write_with(ours)
    for config in deepseek.sparse_blocks(ours)[:1]:
        router = expect(dropless(config).router, DeepSeekV2RouterConfig, "model.ffn.router")
        limited = router.n_groups > 1
        theirs |= {
            "topk_method": LIMITED if limited else GREEDY,
            "n_group": router.n_groups,
            "topk_group": router.top_groups,
            "routed_scaling_factor": router.scale,
            "norm_topk_prob": False,
        }
    return theirs


ARCHITECTURES.register("DeepseekV2ForCausalLM")(
    Architecture(
        "deepseek_v2",
        KEYS,
        read,
        write,
        deepseek.rules,
        fused_rules=lambda config: deepseek.rules(config, fused=True),
        prefix="model.",
        length_key="max_position_embeddings",
        marks={"family": "decoder", "attention.name": "latent"},
    )
)
register_bare("DeepseekV2Model", ARCHITECTURES.get("DeepseekV2ForCausalLM"))
