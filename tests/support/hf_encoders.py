"""Small encoders of transformers."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.hf_folders import perturbed
from tests.support.reference_gradients import perturb

ENCODER_TOKENS = torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(3))
SMALL_ENCODER = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
XLNET_OPTIONS = {"vocab_size": 60, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 40}
DEBERTA_OPTIONS = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c", "max_relative_positions": -1,
}  # fmt: skip
HF_ENCODERS = {
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


def hf_encoder(name: str, **options: Any) -> PreTrainedModel:
    """One of HF_ENCODERS, perturbed."""
    kind = getattr(transformers, name)
    small = XLNET_OPTIONS if name.startswith("XLNet") else SMALL_ENCODER
    return perturbed(kind(kind.config_class(**(small | HF_ENCODERS[name] | options))))


def first_logits(output: Any) -> torch.Tensor:
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


def hf_long_encoder(name: str, **changes: Any) -> Any:
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
