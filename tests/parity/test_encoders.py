"""Encoders against transformers, from the same perturbed weights: logits, losses and every gradient."""

import pytest
import torch
from torch import Tensor
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.modernbert import modeling_modernbert

from megatfm.config import ModelConfig
from tests.support.hf_encoders import (
    BERT_ENCODER,
    DEBERTA,
    DEBERTA_V3,
    ENCODER_OPTIONS,
    LENGTHS,
    MODERNBERT,
    PAD,
    VOCABULARY,
    convert_batch,
    draw_tokens,
    padded_batch,
    sentence_labels,
)
from tests.support.reference_gradients import LargestErrors, Pair, assert_documented, build_pair, dtype_fixture

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


dtype = dtype_fixture(modeling_deberta, modeling_deberta_v2, modeling_modernbert)


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
