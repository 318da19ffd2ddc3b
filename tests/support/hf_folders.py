"""Folders in the Hugging Face format: read, edited; small decoders and encoder-decoders to convert."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.models
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from megatfm.commands.conversion import add_convert_arguments, convert_command
from megatfm.convert.convert import convert
from tests.support.reference_gradients import perturb

DECODER_TOKENS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(3))


def perturb_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """A model with noise added to every parameter, biases and norms too."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def copy_to_aligned_memory(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights copied to aligned memory: transformers leaves them where they lie in the file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return model.eval()


def build_hf_gpt2() -> PreTrainedModel:
    """A GPT-2 of transformers."""
    return perturb_parameters(
        GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=24, n_layer=2, n_head=3))
    )


def write_gpt2(folder: Path) -> Path:
    """Write a GPT-2 with noise and a byte-level tokenizer, as transformers does; returns the folder."""
    model = tokenizers.models.BPE()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["import textwrap the größer end"] * 9, trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=32, n_embd=24, n_layer=2, n_head=3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    perturb_parameters(GPT2LMHeadModel(config)).save_pretrained(folder)
    return folder


def build_hf_llama() -> PreTrainedModel:
    """A Llama of transformers, with biases and scaled positions."""
    config = LlamaConfig(
        vocab_size=60, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=77, attention_bias=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    )  # fmt: skip
    return perturb_parameters(LlamaForCausalLM(config))


def read_folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def get_public_config(model: PreTrainedModel) -> dict[str, Any]:
    """A model's config without private keys."""
    return {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}


def load_complete(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a folder's model by transformers; no tensor is missing, and none is superfluous."""
    loaded, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return loaded


def run_convert(*words: str) -> int:
    """Run `megatfm convert`; returns its exit code."""
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    return convert_command(parser.parse_args(words))


def convert_there_and_back(folder: Path, original: PreTrainedModel, **changes: Any) -> Any:
    """Convert `theirs` to `ours` and that to `back`; returns its model, whose config is the original's with changes."""
    convert(folder / "theirs", folder / "ours", "megatfm")
    convert(folder / "ours", folder / "back", "hf")
    loaded = load_complete(type(original), folder / "back")
    assert get_public_config(loaded) == get_public_config(original) | changes
    return loaded


def check_same_tensors(folder: Path, prefix: str = "") -> None:
    """Compare the tensors of `theirs` and `back`, to the bit; names in `theirs` may lack the prefix."""
    original, back = (read_folder_tensors(folder / name) for name in ("theirs", "back"))
    prefix = "" if original.keys() == back.keys() else prefix
    assert {f"{prefix}{key}" for key in original} == back.keys()
    for key, tensor in original.items():
        assert torch.equal(back[f"{prefix}{key}"], tensor), key


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change what is in `model.safetensors`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


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
