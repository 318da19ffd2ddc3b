"""Decoders and encoder-decoders against transformers, from the same perturbed weights: logits, loss, every gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_rope_utils
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.switch_transformers import modeling_switch_transformers
from transformers.models.t5 import modeling_t5

from megatfm.config import ModelConfig
from tests.support.reference_gradients import LargestErrors, Pair, assert_documented, build_pair, dtype_fixture

VOCABULARY, LENGTHS, PACKED = 47, (13, 9, 11), (5, 1, 7)
MODULES = (
    modeling_deepseek_v2, modeling_deepseek_v3, modeling_gemma2, modeling_gemma3, modeling_gpt_oss, modeling_llama,
    modeling_mistral, modeling_mixtral, modeling_olmoe, modeling_qwen2, modeling_qwen3, modeling_qwen3_moe,
    modeling_rope_utils, modeling_switch_transformers, modeling_t5,
)  # fmt: skip
SMALL = {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 3, "attention.n_heads": 6, "ffn.d_ff": 40}
GPT = {
    **SMALL, "norm.name": "layer_norm", "norm.eps": 1e-4, "ffn.activation": "gelu_tanh", "attention.bias": True,
    "ffn.bias": True, "position.name": "learned", "position.max_positions": 15,
}  # fmt: skip
LLAMA = {
    **SMALL, "attention.n_kv_heads": 2, "norm.eps": 1e-4, "position.theta": 500.0, "embedding.tied": False,
}  # fmt: skip
MLA = {**SMALL, "norm.eps": 1e-6, "attention.name": "mla", "position.theta": 500.0, "embedding.tied": False}
EXPERTS = {"name": "moe", "d_ff": 20, "n_experts": 6, "top_k": 2}
NOT_NORMALISED = {**EXPERTS, "router": {"name": "top_k", "norm_topk_prob": False}}
V3_EXPERTS = {
    **EXPERTS,
    "n_shared_experts": 2,
    "router": {"name": "deepseek_v3", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
}
T5 = {
    **SMALL, "family": "encoder_decoder", "n_layers": 2, "n_encoder_layers": 3, "attention.head_dim": 5,
    "norm.eps": 1e-4, "ffn.activation": "relu", "attention.scale": 1.0, "position.name": "t5", "position.buckets": 8,
    "position.max_distance": 10,
}  # fmt: skip
V2_EXPERTS = {
    **EXPERTS,
    "n_shared_experts": 2,
    "router": {"name": "deepseek_v2", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
}
OSS_EXPERTS = {
    **EXPERTS, "activation": "clamped_swiglu", "bias": True, "router": {"name": "top_k", "bias": True},
}  # fmt: skip
SWITCH_EXPERTS = {
    **EXPERTS, "d_ff": 40, "activation": "relu", "top_k": 1, "expert_capacity": 3, "router": {"name": "switch"},
}  # fmt: skip
WINDOW = {"attention.pattern": {"name": "window", "width": 4}}
GEMMA = {
    **SMALL,
    "d_model": 36,  # whose root transformers can't round
    "attention.n_kv_heads": 2,
    "attention.head_dim": 4,
    "attention.scale": 9**-0.5,
    "ffn.activation": "geglu_tanh",
    "norm.eps": 1e-4,
    "norm.placement": "sandwich",
    "norm.zero_centered": True,
    "embedding.scale": 6.0,
    "layer_types": ["local", "global"],
    "layer_type.local": WINDOW,
    "layer_type.global": {},
}
SWITCH = {
    **T5, "lm_head.scale": 24**-0.5, "n_layers": 4, "n_encoder_layers": 4, "layer_types": ["dense", "sparse"],
    "layer_type.dense": {},
}  # fmt: skip
YARN = {"name": "yarn", "factor": 4.0, "original_length": 16, "beta_fast": 2.0, "beta_slow": 0.3}
LLAMA3 = {"name": "llama3", "factor": 4.0, "original_length": 40, "high_freq_factor": 3.0}
MODELS = {
    "gpt1": ("OpenAIGPTLMHeadModel", {**GPT, "norm.placement": "post", "ffn.d_ff": 96}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt2-untied": ("GPT2LMHeadModel", {**GPT, "embedding.tied": False, "ffn.activation": "relu2"}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama-tied-one-kv-head": ("LlamaForCausalLM", {**LLAMA, "embedding.tied": True, "attention.n_kv_heads": 1}),
    "llama-all-kv-heads": ("LlamaForCausalLM", {**LLAMA, "attention.n_kv_heads": 6, "ffn.activation": "geglu"}),
    "llama-wide-heads": (
        "LlamaForCausalLM",
        {**LLAMA, "attention.head_dim": 6, "attention.bias": True, "ffn.bias": True},
    ),
    "llama-linear": ("LlamaForCausalLM", {**LLAMA, "position.scaling": {"name": "linear", "factor": 4.0}}),
    "llama-yarn": ("LlamaForCausalLM", {**LLAMA, "attention.head_dim": 12, "position.scaling": YARN}),
    "llama-3.1": ("LlamaForCausalLM", {**LLAMA, "attention.head_dim": 12, "position.scaling": LLAMA3}),
    "mistral": ("MistralForCausalLM", LLAMA),
    "mistral-window": ("MistralForCausalLM", {**LLAMA, "attention.pattern": {"name": "window", "width": 4}}),
    "mla": (
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "attention.qk_nope_head_dim": 5,
            "attention.kv_lora_rank": 7,
            "attention.q_lora_rank": 9,
            "attention.qk_rope_head_dim": 6,
            "attention.v_head_dim": 3,
        },
    ),
    "mla-whole-queries": (
        "DeepseekV3ForCausalLM",
        {**MLA, "attention.kv_lora_rank": 7, "attention.qk_rope_head_dim": 2},
    ),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "ffn": EXPERTS}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "attention.bias": True, "attention.output_bias": False}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "attention.qk_norm": True, "attention.head_dim": 6}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**LLAMA, "ffn": EXPERTS, "attention.qk_norm": True}),
    "qwen3-moe-not-normalised": (
        "Qwen3MoeForCausalLM",
        {**LLAMA, "ffn": NOT_NORMALISED, "attention.qk_norm": True, "attention.head_dim": 6},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "attention.kv_lora_rank": 7,
            "attention.qk_rope_head_dim": 2,
            "layer_types": ["first", "rest", "rest"],
            "layer_type.first": {},
            "layer_type.rest": {"ffn": V3_EXPERTS},
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA, "ffn": NOT_NORMALISED, "attention.qk_norm": "all_heads"}),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {
            **MLA,
            "attention.kv_lora_rank": 6,  # transformers' complex numbers need even strides
            "attention.qk_rope_head_dim": 8,
            "attention.scale": 0.4,
            "position.scaling": {
                "name": "yarn",
                "factor": 4.0,
                "original_length": 16,
                "beta_fast": 2.0,
                "attention_factor": 1.1,
            },
            "layer_types": ["first", "rest", "rest"],
            "layer_type.first": {},
            "layer_type.rest": {"ffn": V2_EXPERTS},
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **LLAMA,
            "attention.head_dim": 12,
            "attention.bias": True,
            "attention.sinks": True,
            "ffn": OSS_EXPERTS,
            "position.scaling": {"name": "yarn", "factor": 4.0, "original_length": 16, "truncate": False},
            "layer_types": ["local", "global"],
            "layer_type.local": WINDOW,
            "layer_type.global": {},
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attention.softcap": 2.0, "lm_head.softcap": 3.0}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "attention.qk_norm": True,
            "layer_types": ["local", "local", "global"],
            "layer_type.local": {**WINDOW, "position.theta": 20.0},
            "layer_type.global": {"position.theta": 500.0, "position.scaling": {"name": "linear", "factor": 4.0}},
        },
    ),
    "switch": ("SwitchTransformersForConditionalGeneration", {**SWITCH, "layer_type.sparse": {"ffn": SWITCH_EXPERTS}}),
    "switch-roomy": (
        "SwitchTransformersForConditionalGeneration",
        {**SWITCH, "layer_type.sparse": {"ffn": {**SWITCH_EXPERTS, "expert_capacity": 40}}},
    ),
    "t5": ("T5ForConditionalGeneration", {**T5, "lm_head.scale": 24**-0.5}),
    "t5-v1.1": ("T5ForConditionalGeneration", {**T5, "embedding.tied": False, "ffn.activation": "geglu_tanh"}),
}
ENCODER_DECODERS = ["switch", "switch-roomy", "t5", "t5-v1.1"]
DECODERS = [name for name in MODELS if name not in ENCODER_DECODERS]
DOCUMENTED = {
    "gpt1": ["gpt1"],
    "gpt2": ["gpt2-124m", "gpt3-175b"],
    "llama": ["llama3-8b"],
    "mistral": ["mistral-7b"],
    "mistral-window": ["mistral-7b-v0.1"],
    "mla": ["mla-1b"],
    "mixtral": ["mixtral-8x7b", "mixtral-8x22b"],
    "olmoe": ["olmoe-1b-7b"],
    "deepseek-v2": ["deepseek-v2-lite"],
    "gpt-oss": ["gpt-oss-20b"],
    "gemma2": ["gemma2-2b", "gemma2-9b"],
    "gemma3": ["gemma3-1b", "gemma3-4b"],
    "switch": ["switch-base-8", "switch-base-128"],
    "qwen3-moe": ["qwen3-30b-a3b"],
    "deepseek-v3": ["deepseek-v3"],
    "t5": ["t5-base"],
    "t5-v1.1": ["t5-v1.1-base"],
}
"""The rows of docs/guide/models.md whose figures are measured here."""


dtype = dtype_fixture(*MODULES)


def pair_of(model: str, dtype: torch.dtype, seed: int = 0) -> Pair:
    name, values = MODELS[model]
    pair = build_pair(ModelConfig.from_dotted(**values), dtype, seed, among=[name])
    assert type(pair.reference).__name__ == name
    return pair


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def mask_of(lengths: tuple[int, ...], *, left: bool = False) -> Tensor:
    """1 for tokens and 0 for padding, [B, T]."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return mask.flip(1) if left else mask


def compare_decoder(model: str, dtype: torch.dtype, *, left: bool = False) -> LargestErrors:
    """Logits, loss and gradients over rows of odd lengths, padded at one end."""
    figures, pair, mask = LargestErrors(), pair_of(model, dtype), mask_of(LENGTHS, left=left)
    tokens, counted = draw(*mask.shape, seed=0), mask == 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = pair.reference(
        input_ids=tokens, attention_mask=mask, position_ids=positions, labels=tokens.where(counted, -100)
    )
    where = {"documents": mask - 1, "positions": positions}
    figures.compare_logits(pair.model(tokens, **where).logits[counted], expected.logits[counted], dtype)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:].where(counted[:, 1:] & counted[:, :-1], -100)
    loss = pair.model(tokens, targets=targets, **where).losses["causal"] / (targets != -100).sum()
    # transformers counts the first token after padding at the left as a target of that padding.
    expected_loss = F.cross_entropy(expected.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    their_loss = expected_loss if left else expected.loss
    figures.compare_losses(loss, their_loss, pair, dtype)
    return figures


@pytest.mark.parametrize("model", DECODERS)
def test_padded_rows_of_decoders_equal_transformers(model: str, dtype: torch.dtype) -> None:
    figures = compare_decoder(model, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 20
    for preset in DOCUMENTED.get(model, ()):
        assert_documented(preset, dtype, figures)


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1"])
def test_rows_padded_at_the_left(model: str, dtype: torch.dtype) -> None:
    assert compare_decoder(model, dtype, left=True).compared > 20


def packed(lengths: tuple[int, ...], padding: int) -> tuple[Tensor, Tensor, list[slice]]:
    """Documents and positions of one row, and where the documents are."""
    documents = [torch.full((n,), i) for i, n in enumerate(lengths)]
    positions = [torch.arange(n) for n in lengths]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    pieces = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    return (
        torch.cat([*documents, torch.full((padding,), -1)])[None],
        torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)])[None],
        pieces,
    )


@pytest.mark.parametrize("model", DECODERS)
def test_packed_documents_are_each_document_alone(model: str, dtype: torch.dtype) -> None:
    """Logits and gradients of one row with padding, against the documents one after the other."""
    figures, pair = LargestErrors(), pair_of(model, dtype, seed=1)
    documents, positions, pieces = packed(PACKED, padding=2)
    tokens, targets = draw(1, 15, seed=4), torch.full((1, 15), -100)
    where = {"documents": documents, "positions": positions}
    logits = pair.model(tokens, **where).logits
    assert logits.isfinite().all()
    alone = [pair.reference(input_ids=tokens[:, piece]).logits for piece in pieces]
    for piece, expected in zip(pieces, alone, strict=True):
        figures.compare_logits(logits[:, piece], expected, dtype)
        targets[:, piece.start : piece.stop - 1] = tokens[:, piece.start + 1 : piece.stop]
    losses = [
        F.cross_entropy(expected[0], targets[0, piece], reduction="sum", ignore_index=-100)
        for piece, expected in zip(pieces, alone, strict=True)
    ]
    loss, their_loss = (pair.model(tokens, targets=targets, **where).losses["causal"], torch.stack(losses).sum())
    figures.compare_losses(loss, their_loss, pair, dtype)


def compare_encoder_decoder(model: str, dtype: torch.dtype) -> LargestErrors:
    """Logits, loss and gradients over padded pairs of odd lengths."""
    figures, pair = LargestErrors(), pair_of(model, dtype)
    encoder_mask, mask = mask_of((12, 17, 5)), mask_of(LENGTHS)
    encoder_tokens, targets = draw(*encoder_mask.shape, seed=0), draw(*mask.shape, seed=1)
    targets = targets.where(mask == 1, -100)
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.int64), targets[:, :-1].clamp(min=0)], 1)
    expected = pair.reference(
        input_ids=encoder_tokens, attention_mask=encoder_mask, decoder_input_ids=tokens, decoder_attention_mask=mask,
        labels=targets,
    )  # fmt: skip
    where = {"encoder_tokens": encoder_tokens, "encoder_documents": encoder_mask - 1, "documents": mask - 1}
    counted = mask == 1
    figures.compare_logits(pair.model(tokens, **where).logits[counted], expected.logits[counted], dtype)
    loss = pair.model(tokens, targets=targets, **where).losses["span"] / counted.sum()
    figures.compare_losses(loss, expected.loss, pair, dtype)
    return figures


@pytest.mark.parametrize("model", ENCODER_DECODERS)
def test_padded_pairs_of_encoder_decoders_equal_transformers(model: str, dtype: torch.dtype) -> None:
    figures = compare_encoder_decoder(model, dtype)
    assert figures.logits > 0
    assert figures.compared > 40
    for preset in DOCUMENTED.get(model, ()):
        assert_documented(preset, dtype, figures)


@pytest.mark.parametrize("model", [name for name in ENCODER_DECODERS if name != "switch"])
def test_packed_pairs_are_each_pair_alone(model: str, dtype: torch.dtype) -> None:
    """Several pairs in a row of the encoder and one of the decoder, of other lengths and with padding."""
    figures, pair = LargestErrors(), pair_of(model, dtype, seed=1)
    encoder_documents, encoder_positions, encoder_pieces = packed((4, 9, 2), padding=3)
    documents, positions, pieces = packed((6, 1, 5), padding=1)
    encoder_tokens, tokens, targets = draw(1, 18, seed=0), draw(1, 13, seed=1), draw(1, 13, seed=2)
    targets = targets.where(documents >= 0, -100)
    where = {
        "encoder_tokens": encoder_tokens, "encoder_documents": encoder_documents,
        "encoder_positions": encoder_positions, "documents": documents, "positions": positions,
    }  # fmt: skip
    logits = pair.model(tokens, **where).logits
    assert logits.isfinite().all()
    their_loss = torch.zeros((), dtype=dtype)
    for encoder_piece, piece in zip(encoder_pieces, pieces, strict=True):
        reference = pair.reference(
            input_ids=encoder_tokens[:, encoder_piece], decoder_input_ids=tokens[:, piece]
        ).logits
        figures.compare_logits(logits[:, piece], reference, dtype)
        their_loss = their_loss + F.cross_entropy(reference[0], targets[0, piece], reduction="sum")
    loss = pair.model(tokens, targets=targets, **where).losses["span"]
    figures.compare_losses(loss, their_loss, pair, dtype)
