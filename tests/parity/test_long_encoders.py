"""BigBird and Longformer against transformers, from the same perturbed weights: logits, losses and every gradient."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.big_bird import modeling_big_bird
from transformers.models.longformer import modeling_longformer

from megatfm.config import ModelConfig
from megatfm.layers.attention.patterns.bigbird import draw_random_blocks
from megatfm.ops.attention import block_sparse, kernels
from tests.support.encoder_batches import BERT_ENCODER, PAD, VOCABULARY, draw_tokens
from tests.support.reference_gradients import Figures, doubled, dtype_fixture, hold_to_the_docs, pair

BIGBIRD = {
    **BERT_ENCODER,
    "ffn.activation": "gelu_tanh",
    "extra_heads.sentence.classes": 2,
    "position.max_positions": 40,
}
LONGFORMER = {
    **BERT_ENCODER,
    "attention.name": "longformer",
    "position.max_positions": 40,
    "position.offset": PAD + 1,
}
MODELS = {
    "bigbird": {**BIGBIRD, "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1}},
    "bigbird-two": {
        **BIGBIRD,
        "attention.pattern": {"name": "bigbird", "block_size": 3, "n_random_blocks": 2},
    },
    "longformer": {
        **LONGFORMER,
        "attention.pattern": {"name": "longformer", "width": 4, "global_tokens": [0]},
    },
    "longformer-three": {
        **LONGFORMER,
        "attention.pattern": {"name": "longformer", "width": 6, "global_tokens": [0, 5, 30]},
        "embedding.n_segments": 1,
    },
}
PRESETS = {"bigbird": ["bigbird-base", "bigbird-large"], "longformer": ["longformer-base"]}
LENGTHS = {"bigbird": (24, 33), "bigbird-two": (35,), "longformer": (24, 17), "longformer-three": (35,)}
"""More than what would be seen whole, and some that no block divides."""


dtype = dtype_fixture(modeling_big_bird, modeling_longformer)


def batch_of(config: ModelConfig, length: int, rows: int = 2) -> dict[str, Tensor]:
    tokens = draw_tokens(VOCABULARY, rows, length, seed=0, low=PAD + 1)
    labels = draw_tokens(VOCABULARY, rows, length, seed=3).where(
        draw_tokens(3, rows, length, seed=2) == 0, -100
    )
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": draw_tokens(config.embedding.n_segments, rows, length, seed=1),
        "labels": labels,
    }


def compare(model: str, dtype: torch.dtype) -> Figures:
    config, figures = ModelConfig.from_dotted(MODELS[model]), Figures()
    for length in LENGTHS[model]:
        both, batch = pair(config, dtype), batch_of(config, length)
        wide = model.startswith("longformer")
        extra: dict[str, Tensor] = {}
        if wide:
            mask = torch.zeros_like(batch["input_ids"])
            mask[:, [token for token in config.attention.pattern.global_tokens if token < length]] = 1
            extra = {"global_attention_mask": mask}
        else:
            both.theirs.train()  # in evaluation its random blocks are all the first one
            extra = {"next_sentence_label": torch.tensor([0, 1])}
        expected = both.theirs(**batch, **extra)
        segments = {"segments": batch["token_type_ids"]}
        actual = both.ours(batch["input_ids"], **segments)
        figures.see_logits(actual.logits, expected.logits if wide else expected.prediction_logits, dtype)
        inputs = segments | {"targets": batch["labels"]}
        if not wide:
            figures.see_logits(actual.predictions["sentence"], expected.seq_relationship_logits, dtype)
            inputs["sentence_targets"] = torch.full_like(batch["labels"], -100)
            inputs["sentence_targets"][:, 0] = extra["next_sentence_label"]
        losses = both.ours(batch["input_ids"], **inputs).losses
        loss = losses["masked"] / (batch["labels"] != -100).sum()
        loss = loss if wide else loss + losses["sentence"] / 2
        figures.see_logits(loss, expected.loss, dtype)
        loss.backward()
        expected.loss.backward()
        figures.see_gradients(both, dtype)
    return figures


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_several_lengths(model: str, dtype: torch.dtype) -> None:
    figures = compare(model, dtype)
    for preset in PRESETS.get(model, []):
        hold_to_the_docs(preset, dtype, figures)


@pytest.mark.parametrize("model", MODELS)
def test_by_blocks(model: str) -> None:
    with (
        doubled(torch.float64, modeling_big_bird, modeling_longformer),
        mock.patch.object(kernels, "LONG", 1),
        mock.patch.object(block_sparse, "SIZE", 4),
    ):
        compare(model, torch.float64)


def test_padded_rows_of_longformer(dtype: torch.dtype) -> None:
    config = ModelConfig.from_dotted(MODELS["longformer"])
    both, batch = pair(config, dtype), batch_of(config, 24)
    batch["attention_mask"][1, 15:] = 0
    batch["input_ids"][1, 15:], batch["labels"][1, 15:] = PAD, -100
    wide = torch.zeros_like(batch["input_ids"])
    wide[:, 0] = 1
    expected = both.theirs(**batch, global_attention_mask=wide)
    where = {"documents": batch["attention_mask"] - 1, "segments": batch["token_type_ids"]}
    actual = both.ours(batch["input_ids"], **where)
    counted, figures = batch["attention_mask"] == 1, Figures()
    figures.see_logits(actual.logits[counted], expected.logits[counted], dtype)
    losses = both.ours(batch["input_ids"], **where, targets=batch["labels"]).losses
    (losses["masked"] / (batch["labels"] != -100).sum()).backward()
    expected.loss.backward()
    figures.see_gradients(both, dtype)


@pytest.mark.parametrize(
    ("rows", "heads", "n_random", "seed"), [(12, 4, 1, 0), (30, 3, 3, 5), (40, 2, 2, 11)]
)
def test_random_blocks_are_theirs(rows: int, heads: int, n_random: int, seed: int) -> None:
    import numpy as np

    expected = modeling_big_bird.BigBirdBlockSparseAttention
    with mock.patch.object(expected, "__init__", lambda self: torch.nn.Module.__init__(self)):
        requested = expected().train()
    lengths, counts = expected._get_rand_attn_plan(rows * 8, 8, n_random)
    state = np.random.get_state()
    np.random.seed(seed)
    wanted = requested._bigbird_block_rand_mask_with_head(rows * 8, rows * 8, 8, 8, heads, lengths, counts)
    np.random.set_state(state)
    actual = draw_random_blocks(rows, heads, n_random, seed)
    assert torch.equal(actual[:, 1:-1], torch.from_numpy(np.stack(wanted)).long())
    assert torch.equal(draw_random_blocks(rows - 3, heads, n_random, seed), actual[:, :-3])
