"""Small decoders and encoder-decoders of transformers."""

from typing import Any

import torch
import transformers

from tests.support.hf_folders import DECODER_TOKENS
from tests.support.reference_gradients import perturb

SMALL_DECODER = {"vocab_size": 60}
GPT_OPTIONS = {**SMALL_DECODER, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
LLAMA_OPTIONS = {
    **SMALL_DECODER, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2,
}  # fmt: skip
MLA_OPTIONS = {
    **LLAMA_OPTIONS, "num_key_value_heads": 6, "first_k_dense_replace": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 3, "kv_lora_rank": 5,
}  # fmt: skip
MOE_OPTIONS = {**LLAMA_OPTIONS, "num_local_experts": 5, "num_experts_per_tok": 2}
DEEPSEEK_V3_OPTIONS = {
    **MLA_OPTIONS, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "q_lora_rank": 7,
}  # fmt: skip
DEEPSEEK_V2_OPTIONS = {
    **MLA_OPTIONS, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 4,
    "topk_group": 2, "kv_lora_rank": 6,
    "q_lora_rank": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512,
        "mscale": 0.7, "mscale_all_dim": 0.8,
    },
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"]
GEMMA_OPTIONS = {
    **LLAMA_OPTIONS, "head_dim": 4, "query_pre_attn_scalar": 9, "sliding_window": 4, "layer_types": ALTERNATING,
}  # fmt: skip
T5_OPTIONS = {
    **SMALL_DECODER, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
}  # fmt: skip
SWITCH_OPTIONS = {
    **T5_OPTIONS, "num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3,
    "expert_capacity": 4,
}  # fmt: skip
HF_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt1": ("OpenAIGPTLMHeadModel", GPT_OPTIONS),
    "mistral": ("MistralForCausalLM", {**LLAMA_OPTIONS, "sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {**LLAMA_OPTIONS, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA_OPTIONS),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA_OPTIONS, "head_dim": 6, "attention_bias": True}),
    "mla": ("DeepseekV3ForCausalLM", {**MLA_OPTIONS, "q_lora_rank": 7}),
    "mla-whole-queries": ("DeepseekV3ForCausalLM", {**MLA_OPTIONS, "q_lora_rank": None}),
    "mixtral": ("MixtralForCausalLM", MOE_OPTIONS),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**MOE_OPTIONS, "head_dim": 6, "moe_intermediate_size": 12}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3_OPTIONS),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA_OPTIONS, "num_experts": 5, "num_experts_per_tok": 2, "eos_token_id": 2}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2_OPTIONS),
    "gpt-oss": ("GptOssForCausalLM", {**MOE_OPTIONS, "head_dim": 4, "sliding_window": 4}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA_OPTIONS),
    "gemma3": ("Gemma3ForCausalLM", GEMMA_OPTIONS),
    "switch": ("SwitchTransformersForConditionalGeneration", SWITCH_OPTIONS),
    "t5": ("T5ForConditionalGeneration", T5_OPTIONS),
    "t5-v1.1": (
        "T5ForConditionalGeneration",
        {**T5_OPTIONS, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}


def build_hf_decoder(name: str) -> Any:
    """One of HF_DECODERS, perturbed."""
    kind, values = HF_DECODERS[name]
    # By default experts are multiplied by torch's grouped_mm, which has no float64.
    config = getattr(transformers, kind).config_class(**values, experts_implementation="eager")
    model = getattr(transformers, kind)(config)
    if name == "t5-v1.1":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    perturb(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model.eval()


def decoder_logits(model: Any, *, is_megatfm: bool) -> torch.Tensor:
    """Logits of DECODER_TOKENS, by our model or by that of transformers."""
    if "T5" in type(model).__name__ or hasattr(model, "encoder"):
        return (
            model(DECODER_TOKENS, DECODER_TOKENS.flip(1)).logits
            if is_megatfm
            else model(DECODER_TOKENS.flip(1), decoder_input_ids=DECODER_TOKENS).logits
        )
    return model(DECODER_TOKENS).logits
