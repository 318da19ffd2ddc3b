"""Small encoders of transformers, with options and tokens to compare them."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from megatfm.config import ModelConfig
from tests.support.hf_folders import perturb_parameters
from tests.support.reference_gradients import perturb

ENCODER_TOKENS = torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(3))
SMALL_ENCODER: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
XLNET_OPTIONS: dict[str, Any] = {"vocab_size": 60, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 40}
DEBERTA_OPTIONS = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c", "max_relative_positions": -1,
}  # fmt: skip
HF_ENCODERS: dict[str, dict[str, Any]] = {
    "BertForPreTraining": {},
    "BertForMaskedLM": {"hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-6},
    "RobertaForMaskedLM": {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.2},
    "AlbertForPreTraining": {"embedding_size": 10},
    "AlbertForMaskedLM": {"embedding_size": 10, "num_hidden_groups": 2},
    "DebertaForMaskedLM": DEBERTA_OPTIONS,
    "DebertaV2ForMaskedLM": {
        **DEBERTA_OPTIONS, "position_buckets": 6, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
    },
    "ElectraForPreTraining": {"embedding_size": 10},
    "ElectraForMaskedLM": {"embedding_size": 10},
    "ModernBertForMaskedLM": {"local_attention": 4, "num_hidden_layers": 4, "pad_token_id": 1},
    "XLNetLMHeadModel": {"mem_len": None, "dropout": 0.2},
}  # fmt: skip


def build_hf_encoder(name: str, **options: Any) -> PreTrainedModel:
    """One of HF_ENCODERS, perturbed."""
    kind = getattr(transformers, name)
    small = XLNET_OPTIONS if name.startswith("XLNet") else SMALL_ENCODER
    return perturb_parameters(kind(kind.config_class(**(small | HF_ENCODERS[name] | options))))


def get_vocabulary_logits(output: Any) -> torch.Tensor:
    """Logits over the vocabulary."""
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


SMALL_LONG_ENCODER = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
HF_LONG_ENCODERS: dict[str, dict[str, Any]] = {
    "BigBirdForPreTraining": {**SMALL_LONG_ENCODER, "block_size": 2, "num_random_blocks": 1},
    "BigBirdForMaskedLM": {**SMALL_LONG_ENCODER, "block_size": 2, "num_random_blocks": 1},
    "LongformerForMaskedLM": {**SMALL_LONG_ENCODER, "attention_window": 4, "type_vocab_size": 1},
}
LONG_TOKENS = torch.randint(7, 60, (2, 48), generator=torch.Generator().manual_seed(3))
"""Longer than what is seen whole, also with blocks or random blocks more than twice as large as above. Blocks of 2, 3
and 6 divide it: transformers pads the rest with a token that need not be there."""


def build_hf_long_encoder(name: str, **changes: Any) -> Any:
    """One of HF_LONG_ENCODERS, perturbed and without dropout."""
    kind = getattr(transformers, name)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    reference = kind(kind.config_class(**{**HF_LONG_ENCODERS[name], **dropped, **changes}))
    perturb(reference)
    return reference


def long_encoder_logits(expected: Any, seen_by_all: Sequence[int] = (0,)) -> torch.Tensor:
    """Logits of LONG_TOKENS with the pattern of training; seen_by_all: a Longformer's global tokens."""
    if type(expected).__name__.startswith("Longformer"):
        mask = torch.isin(torch.arange(LONG_TOKENS.shape[1]), torch.tensor(seen_by_all)).long()
        return expected.eval()(LONG_TOKENS, global_attention_mask=mask.expand(len(LONG_TOKENS), -1)).logits
    expected.train()  # in evaluation BigBird's random blocks are all the first one
    for module in expected.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    result = expected(LONG_TOKENS)
    return result.prediction_logits if hasattr(result, "prediction_logits") else result.logits


VOCABULARY, LENGTHS = 47, (13, 9, 11)
"""Ids of the small vocabulary, and tokens of the rows of a batch."""
PAD = 1
"""Never among the tokens that count: transformers gives a padding token's embedding no gradient."""
ENCODER_OPTIONS = {
    "family": "encoder", "vocab_size": VOCABULARY, "d_model": 24, "n_layers": 3, "attention.n_heads": 4,
    "ffn.d_ff": 40, "norm.name": "layer_norm", "norm.eps": 1e-7, "norm.placement": "post", "embedding.norm": True,
    "ffn.activation": "gelu", "ffn.bias": True, "embedding.n_segments": 2, "lm_head.name": "transform",
    "lm_head.bias": True,
}  # fmt: skip
LEARNED_POSITIONS = {"attention.bias": True, "position.name": "learned", "position.max_positions": 15}
"""BERT's attention and positions; all but DeBERTa have them."""
BERT_ENCODER = ENCODER_OPTIONS | LEARNED_POSITIONS
DEBERTA = {"attention.name": "deberta", "position.name": "deberta"}
DEBERTA_V3 = {
    **DEBERTA, "attention.name": "deberta_v2", "position.name": "deberta_v2", "position.buckets": 6,
    "position.max_distance": 15,
}  # fmt: skip
MODERNBERT = {
    "attention.name": "gqa", "norm.placement": "pre", "norm.bias": False, "norm.first_attention_norm": False,
    "ffn.bias": False,
    "ffn.activation": "geglu", "embedding.n_segments": 0, "lm_head.transform_bias": False,
    "layer_types": ["global", "local", "local"],
    "layer_type.global": {"position.theta": 500.0},
    "layer_type.local": {"position.theta": 20.0, "attention.pattern": {"name": "window", "width": 4}},
}  # fmt: skip


def draw_tokens(high: int, *shape: int, seed: int, low: int = 0) -> Tensor:
    """Random integers from low up to below high."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(config: ModelConfig) -> dict[str, Tensor]:
    """Rows of odd lengths, padded to the longest, as transformers takes them."""
    longest = max(LENGTHS)
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).long()
    tokens = draw_tokens(VOCABULARY, len(LENGTHS), longest, seed=0, low=PAD + 1).where(mask == 1, PAD)
    batch = {"input_ids": tokens, "attention_mask": mask}
    if config.embedding.n_segments:
        batch["token_type_ids"] = draw_tokens(config.embedding.n_segments, *tokens.shape, seed=1)
    if config.family == "discriminator":
        batch["labels"] = draw_tokens(2, *tokens.shape, seed=2)
        return batch
    chosen = (draw_tokens(3, *tokens.shape, seed=2) == 0) & (mask == 1)
    batch["labels"] = draw_tokens(VOCABULARY, *tokens.shape, seed=3).where(chosen, -100)
    return batch


def sentence_labels(config: ModelConfig) -> dict[str, Tensor]:
    """Labels of sentence pairs under transformers' name, which differs."""
    if "sentence" not in config.extra_heads:
        return {}
    name = "sentence_order_label" if config.embedding.dim else "next_sentence_label"
    return {name: torch.tensor([0, 1, 1])}


def convert_batch(batch: dict[str, Tensor], sentences: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The batch as we take it: padding is document −1, a sentence's class stands at its first token."""
    documents = batch["attention_mask"] - 1
    inputs: dict[str, Any] = {"documents": documents, "segments": batch.get("token_type_ids")}
    if family == "discriminator":
        return inputs | {"replaced": batch["labels"].where(documents == 0, -100)}
    for labels in sentences.values():
        inputs["sentence_targets"] = torch.full_like(documents, -100)
        inputs["sentence_targets"][:, 0] = labels
    return inputs | {"targets": batch["labels"]}
