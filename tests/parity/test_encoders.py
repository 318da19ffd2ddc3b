"""Encoders, long ones and gpt-oss's attention against transformers, from the same perturbed weights: every gradient."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.big_bird import modeling_big_bird
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.longformer import modeling_longformer
from transformers.models.modernbert import modeling_modernbert

from megatfm.config import ModelConfig
from megatfm.layers.attention.patterns.bigbird import draw_random_blocks
from megatfm.layers.block import Block
from megatfm.layers.position import compute_frequencies
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import block_sparse, kernels
from tests.support.hf_encoders import (
    BERT_ENCODER,
    DEBERTA,
    DEBERTA_V3,
    ENCODER_OPTIONS,
    LENGTHS,
    MODERNBERT,
    PAD,
    VOCABULARY,
    draw_tokens,
    padded_batch,
)
from tests.support.reference_gradients import (
    LargestErrors,
    Pair,
    assert_documented,
    build_pair,
    cast_to_float64,
    dtype_fixture,
    perturb,
)

MODELS = {
    "bert": ("BertForPreTraining", {"extra_heads.sentence.classes": 2}),
    "bert-without-sentences": ("BertForMaskedLM", {"ffn.activation": "gelu_tanh"}),
    "roberta": ("RobertaForMaskedLM", {"position.offset": PAD + 1, "embedding.n_segments": 1}),
    "albert": ("AlbertForPreTraining", {
        "ffn.activation": "gelu_tanh", "embedding.dim": 10, "distinct_layers": 1, "extra_heads.sentence.classes": 2,
    }),
    "albert-in-groups": ("AlbertForMaskedLM", {"embedding.dim": 10, "distinct_layers": 2, "n_layers": 4}),
    "deberta": ("DebertaForMaskedLM", {**DEBERTA, "embedding.n_segments": 0, "position.max_distance": 15}),
    "deberta-segments": ("DebertaForMaskedLM", {**DEBERTA, "position.max_distance": 15, "embedding.n_segments": 3}),
    "deberta-v3": ("DebertaV2ForMaskedLM", {**DEBERTA_V3, "embedding.n_segments": 0}),
    "modernbert": ("ModernBertForMaskedLM", MODERNBERT),
    "modernbert-biases": ("ModernBertForMaskedLM", {
        **MODERNBERT, "norm.bias": True, "ffn.bias": True, "attention.bias": True, "lm_head.transform_bias": True,
        "lm_head.bias": False, "n_layers": 4,
    }),
    "deberta-v3-segments": ("DebertaV2ForMaskedLM", {**DEBERTA_V3, "embedding.n_segments": 2}),
    "electra-generator": ("ElectraForMaskedLM", {"embedding.dim": 10}),
    "electra-discriminator": ("ElectraForPreTraining", {"family": "discriminator", "embedding.dim": 10}),
    "electra-discriminator-of-one-width": ("ElectraForPreTraining", {"family": "discriminator"}),
}  # fmt: skip


dtype = dtype_fixture(
    modeling_deberta, modeling_deberta_v2, modeling_modernbert, modeling_big_bird, modeling_longformer
)  # fmt: skip


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


def config_of(model: str) -> ModelConfig:
    options = MODELS[model][1]
    return ModelConfig.from_dotted((ENCODER_OPTIONS if "attention.name" in options else BERT_ENCODER) | options)


def our_loss(losses: dict[str, Tensor], batch: dict[str, Tensor], family: str) -> Tensor:
    """Sums to means, as transformers has them."""
    if family == "discriminator":
        return losses["discriminator"] / batch["attention_mask"].sum()
    mean = losses["masked"] / (batch["labels"] != -100).sum()
    return mean + losses["sentence"] / len(LENGTHS) if "sentence" in losses else mean


def their_logits(output: object) -> tuple[Tensor, Tensor | None]:
    """Logits of tokens, and of sentences."""
    first = getattr(output, "logits", None)
    sentence = getattr(output, "seq_relationship_logits", None)
    return (
        output.prediction_logits if first is None else first,
        getattr(output, "sop_logits", None) if sentence is None else sentence,
    )


def compare(model: str, dtype: torch.dtype) -> LargestErrors:
    """Logits, loss and gradients over a padded batch."""
    config, figures = config_of(model), LargestErrors()
    pair = build_pair(config, dtype)
    assert type(pair.reference).__name__ == MODELS[model][0]
    batch, sentences = padded_batch(config), sentence_labels(config)
    expected = pair.reference(**batch, **sentences)
    inputs = convert_batch(batch, sentences, config.family)
    where = {key: inputs[key] for key in ("documents", "segments")}
    actual = pair.model(batch["input_ids"], **where)
    their_tokens, their_sentences = their_logits(expected)
    counted = batch["attention_mask"] == 1
    figures.compare_logits(actual.logits[counted], their_tokens[counted], dtype)
    if their_sentences is not None:
        figures.compare_logits(actual.predictions["sentence"], their_sentences, dtype)
    loss = our_loss(pair.model(batch["input_ids"], **inputs).losses, batch, config.family)
    figures.compare_losses(loss, expected.loss, pair, dtype)
    return figures


PRESETS = {
    "bert": ["bert-base", "bert-base-cased", "bert-large"],
    "bert-without-sentences": ["spanbert-base", "spanbert-large"],
    "roberta": ["roberta-base", "roberta-large"],
    "albert": ["albert-base"],
    "deberta": ["deberta-base"],
    "modernbert": ["modernbert-base", "modernbert-large"],
    "deberta-v3": ["deberta-v3-base"],
    "electra-generator": ["electra-small", "electra-base", "electra-large"],
    "electra-discriminator": ["electra-small", "electra-base", "electra-large"],
}
"""The rows of docs/guide/models.md whose figures are measured here."""


@pytest.mark.parametrize("model", MODELS)
def test_padded_rows_of_encoders_equal_transformers(model: str, dtype: torch.dtype) -> None:
    figures = compare(model, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 20
    for preset in PRESETS.get(model, []):
        assert_documented(preset, dtype, figures)


def run_on_one_document(pair: Pair, row: dict[str, Tensor], piece: slice) -> tuple[Tensor, Tensor | None]:
    """transformers on one document by itself."""
    return their_logits(pair.reference(**{key: values[:, piece] for key, values in row.items() if key != "labels"}))


@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_are_each_document_alone(model: str, dtype: torch.dtype) -> None:
    config, figures = config_of(model), LargestErrors()
    pair, lengths = build_pair(config, dtype, seed=1), (5, 1, 7)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((2,), -1)])
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(2, dtype=torch.int64)])
    row = {"input_ids": draw_tokens(VOCABULARY, 1, 15, seed=4, low=PAD + 1)}
    if config.embedding.n_segments:
        row["token_type_ids"] = draw_tokens(config.embedding.n_segments, 1, 15, seed=5)
    actual = pair.model(
        row["input_ids"], documents=documents[None], positions=positions[None], segments=row.get("token_type_ids"),
    )  # fmt: skip
    start = 0
    for length in lengths:
        piece = slice(start, start + length)
        figures.compare_logits(actual.logits[:, piece], run_on_one_document(pair, row, piece)[0], dtype)
        start += length
    assert actual.logits.isfinite().all()


@pytest.mark.parametrize("model", ["bert", "albert"])
def test_sentences_of_packed_documents(model: str, dtype: torch.dtype) -> None:
    """A class stands at each document's first token, so that a packed row has several."""
    pair, lengths = build_pair(config_of(model), dtype, seed=2), (6, 4, 5)
    row = {
        "input_ids": draw_tokens(VOCABULARY, 1, 15, seed=6, low=PAD + 1),
        "token_type_ids": draw_tokens(2, 1, 15, seed=7),
    }
    targets = torch.full((1, 15), -100)
    starts = [0, 6, 10]
    targets[0, starts] = torch.tensor([1, 0, 1])
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    losses = pair.model(
        row["input_ids"],
        documents=documents,
        positions=torch.cat([torch.arange(n) for n in lengths])[None],
        segments=row["token_type_ids"],
        targets=torch.full((1, 15), -100),
        sentence_targets=targets,
    ).losses
    expected = torch.zeros((), dtype=dtype)
    for start, length in zip(starts, lengths, strict=True):
        logits = run_on_one_document(pair, row, slice(start, start + length))[1]
        assert logits is not None
        expected = expected - logits.log_softmax(-1)[0, targets[0, start]]
    LargestErrors().compare_logits(losses["sentence"], expected, dtype)
    assert losses["masked"] == 0


BIGBIRD = {
    **BERT_ENCODER, "ffn.activation": "gelu_tanh", "extra_heads.sentence.classes": 2, "position.max_positions": 40,
}  # fmt: skip
LONGFORMER = {
    **BERT_ENCODER, "attention.name": "longformer", "position.max_positions": 40, "position.offset": PAD + 1,
}  # fmt: skip
LONG_MODELS = {
    "bigbird": {**BIGBIRD, "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1}},
    "bigbird-two": {**BIGBIRD, "attention.pattern": {"name": "bigbird", "block_size": 3, "n_random_blocks": 2}},
    "longformer": {**LONGFORMER, "attention.pattern": {"name": "longformer", "width": 4, "global_tokens": [0]}},
    "longformer-three": {
        **LONGFORMER, "attention.pattern": {"name": "longformer", "width": 6, "global_tokens": [0, 5, 30]},
        "embedding.n_segments": 1,
    },
}  # fmt: skip
LONG_PRESETS = {"bigbird": ["bigbird-base", "bigbird-large"], "longformer": ["longformer-base"]}
LONG_LENGTHS = {"bigbird": (24, 33), "bigbird-two": (35,), "longformer": (24, 17), "longformer-three": (35,)}
"""More than what would be seen whole, and some that no block divides."""


def batch_of(config: ModelConfig, length: int) -> dict[str, Tensor]:
    tokens = draw_tokens(VOCABULARY, 2, length, seed=0, low=PAD + 1)
    labels = draw_tokens(VOCABULARY, 2, length, seed=3).where(draw_tokens(3, 2, length, seed=2) == 0, -100)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": draw_tokens(config.embedding.n_segments, 2, length, seed=1),
        "labels": labels,
    }


def compare_long_encoder(model: str, dtype: torch.dtype) -> LargestErrors:
    config, figures = ModelConfig.from_dotted(LONG_MODELS[model]), LargestErrors()
    for length in LONG_LENGTHS[model]:
        pair, batch = build_pair(config, dtype), batch_of(config, length)
        wide = model.startswith("longformer")
        extra: dict[str, Tensor] = {}
        if wide:
            mask = torch.zeros_like(batch["input_ids"])
            mask[:, [token for token in config.attention.pattern.global_tokens if token < length]] = 1
            extra = {"global_attention_mask": mask}
        else:
            pair.reference.train()  # in evaluation its random blocks are all the first one
            extra = {"next_sentence_label": torch.tensor([0, 1])}
        expected = pair.reference(**batch, **extra)
        segments = {"segments": batch["token_type_ids"]}
        actual = pair.model(batch["input_ids"], **segments)
        figures.compare_logits(actual.logits, expected.logits if wide else expected.prediction_logits, dtype)
        inputs = segments | {"targets": batch["labels"]}
        if not wide:
            figures.compare_logits(actual.predictions["sentence"], expected.seq_relationship_logits, dtype)
            inputs["sentence_targets"] = torch.full_like(batch["labels"], -100)
            inputs["sentence_targets"][:, 0] = extra["next_sentence_label"]
        losses = pair.model(batch["input_ids"], **inputs).losses
        loss = losses["masked"] / (batch["labels"] != -100).sum()
        loss = loss if wide else loss + losses["sentence"] / 2
        figures.compare_losses(loss, expected.loss, pair, dtype)
    return figures


@pytest.mark.parametrize("model", LONG_MODELS)
def test_rows_of_several_lengths(model: str, dtype: torch.dtype) -> None:
    figures = compare_long_encoder(model, dtype)
    for preset in LONG_PRESETS.get(model, []):
        assert_documented(preset, dtype, figures)


@pytest.mark.parametrize("model", LONG_MODELS)
def test_block_sparse_kernels_of_long_encoders_equal_transformers(model: str) -> None:
    with (
        cast_to_float64(torch.float64, modeling_big_bird, modeling_longformer),
        mock.patch.object(kernels, "LONG", 1),
        mock.patch.object(block_sparse, "SIZE", 4),
    ):
        compare_long_encoder(model, torch.float64)


def test_padded_rows_of_longformer(dtype: torch.dtype) -> None:
    config = ModelConfig.from_dotted(LONG_MODELS["longformer"])
    pair, batch = build_pair(config, dtype), batch_of(config, 24)
    batch["attention_mask"][1, 15:] = 0
    batch["input_ids"][1, 15:], batch["labels"][1, 15:] = PAD, -100
    wide = torch.zeros_like(batch["input_ids"])
    wide[:, 0] = 1
    expected = pair.reference(**batch, global_attention_mask=wide)
    where = {"documents": batch["attention_mask"] - 1, "segments": batch["token_type_ids"]}
    actual = pair.model(batch["input_ids"], **where)
    counted, figures = batch["attention_mask"] == 1, LargestErrors()
    figures.compare_logits(actual.logits[counted], expected.logits[counted], dtype)
    losses = pair.model(batch["input_ids"], **where, targets=batch["labels"]).losses
    (losses["masked"] / (batch["labels"] != -100).sum()).backward()
    expected.loss.backward()
    figures.compare_gradients(pair, dtype)


@pytest.mark.parametrize(("rows", "heads", "n_random", "seed"), [(12, 4, 1, 0), (30, 3, 3, 5), (40, 2, 2, 11)])
def test_random_blocks_are_theirs(rows: int, heads: int, n_random: int, seed: int) -> None:
    import numpy as np

    expected = modeling_big_bird.BigBirdBlockSparseAttention
    with mock.patch.object(expected, "__init__", lambda self: torch.nn.Module.__init__(self)):
        requested = expected().train()
    lengths, counts = expected._get_rand_attn_plan(rows * 8, 8, n_random)
    state = np.random.get_state()
    np.random.seed(seed)
    expected_blocks = requested._bigbird_block_rand_mask_with_head(rows * 8, rows * 8, 8, 8, heads, lengths, counts)
    np.random.set_state(state)
    actual = draw_random_blocks(rows, heads, n_random, seed)
    assert torch.equal(actual[:, 1:-1], torch.from_numpy(np.stack(expected_blocks)).long())
    assert torch.equal(draw_random_blocks(rows - 3, heads, n_random, seed), actual[:, :-3])


# ---------------------------------------------------------------------------------------- gpt-oss's attention


LENGTH, WIDTH, HEADS, KV_HEADS, HEAD = 13, 24, 6, 2, 4
NAMES = {f"w{part}.{kind}": f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")} | {
    "core.sinks.weight": "sinks"
}


@pytest.mark.parametrize("window", [None, 4])
def test_output_and_every_gradient(window: int | None) -> None:
    pattern = "full" if window is None else {"name": "window", "width": window}
    config = ModelConfig.from_dotted(
        {"vocab_size": 7, "d_model": WIDTH, "n_layers": 1, "attention.n_heads": HEADS,
         "attention.n_kv_heads": KV_HEADS, "attention.bias": True, "attention.sinks": True,
         "attention.pattern": pattern, "ffn.d_ff": 8},
    )  # fmt: skip
    actual = Block(config, "decoder").attn.double()
    perturb(actual, scale=0.5)
    expected = GptOssAttention(
        GptOssConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            attention_bias=True,
            attn_implementation="eager",
        ),
        0,
    ).double()
    named, right = dict(actual.named_parameters()), dict(expected.named_parameters())
    assert {NAMES[name] for name in named} == set(right)
    expected.load_state_dict({NAMES[name]: parameter.detach() for name, parameter in named.items()})
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.arange(LENGTH)[:, None] * compute_frequencies(HEAD, 10_000.0)
    turned = (angles.cos()[None].expand(2, -1, -1), angles.sin()[None].expand(2, -1, -1))
    away = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (away < 0) | (away >= (window or LENGTH))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    expected_output, _ = expected(x, turned, mask[None, None].expand(2, 1, -1, -1))
    result = actual(x, SequenceMetadata(torch.arange(LENGTH).expand(2, -1)))
    torch.testing.assert_close(result, expected_output, rtol=1e-11, atol=1e-12)
    g = torch.randn(expected_output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result.backward(g)
    expected_output.backward(g)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, right[NAMES[name]].grad, rtol=1e-9, atol=1e-11)
