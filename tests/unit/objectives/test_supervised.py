"""Examples with labels, and pairs of segments: fields by hand, balance, lengths that tell no label."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.config import (
    AnswersObjective,
    ModelConfig,
    MultipleChoiceObjective,
    SpanExtractionObjective,
    TextClassificationObjective,
)
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig
from megatfm.errors import UsageError
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey

SPECIAL = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=95, cls=3, sep=4)
CHOICES = {"at": [3, 9], "labels": [1], "starts": [0, 4], "second": [2, 7]}
PAIR = {"at": [3, 9], "labels": [2], "starts": [0, 4], "second": [2, 7]}


def model(family: str, head: dict[str, Any] | None, **values: Any) -> ModelConfig:
    heads = {} if head is None else {"extra_heads": {"sentence" if family == "encoder" else "score": head}}
    small = {"vocab_size": 95, "d_model": 16, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 32}
    return ModelConfig.from_dotted({**small, "family": family, **heads, **values})


def chunk(n: int, annotation: dict[str, Any], first: int = 10) -> DocumentChunk:
    tokens = np.arange(first, first + n, dtype=np.uint16)
    return DocumentChunk(tokens, files={"json": json.dumps(annotation).encode()})


def fields_of(objective: Objective, chunk: DocumentChunk) -> dict[str, list[int]]:
    built = objective.build_example(chunk, ChunkKey(seed=0, epoch=0, sample=6, chunk=0))
    return {name: values.tolist() for name, values in built.items()}


def test_choices_and_next_tokens_stay_in_their_parts() -> None:
    config = model("decoder", {"name": "multiple_choice"}, **{"embedding.n_segments": 2})
    objective = build_objective(MultipleChoiceObjective(lm_weight=0.5), config, SPECIAL, (16,))
    assert objective.loss_weights == {"choice": 1.0, "causal": 0.5}
    none = -100
    assert fields_of(objective, chunk(10, CHOICES)) == {
        "tokens": list(range(10, 20)),
        "examples": [-1, -1, -1, 6, -1, -1, -1, -1, -1, 6],
        "parts": [0] * 4 + [1] * 6,
        "segments": [0, 0, 1, 1, 0, 0, 0, 1, 1, 1],
        "targets": [11, 12, 13, none, 15, 16, 17, 18, 19, none],
        "choice_targets": [none, none, none, 1, *[none] * 6],
    }


def test_parts_are_documents_of_their_own_and_examples_stay_apart() -> None:
    config = model("encoder", {"name": "multiple_choice"})
    objective = build_objective(MultipleChoiceObjective(), config, SPECIAL, (32,))
    chunks = [chunk(10, CHOICES), chunk(4, {"at": [3], "labels": [0]}, 50), chunk(10, CHOICES, 30)]
    packed = pack_in_memory(
        [chunk.tokens for chunk in chunks],
        PackingConfig(objective, (32,), 0),
        members=[p.files for p in chunks],
    )
    row = packed.build_row(0)
    assert packed.n_rows == 1
    assert row["documents"].max() == 4
    for number in range(5):
        inside = row["documents"] == number
        assert row["positions"][inside].tolist() == list(range(int(inside.sum())))
        assert len(set(row["parts"][inside].tolist())) == 1
    assert sorted(np.bincount(row["documents"][row["documents"] >= 0]).tolist()) == [4, 4, 4, 6, 6]
    counts = objective.target_counts({name: torch.from_numpy(values) for name, values in row.items()})
    assert counts["choice"] == 3


def test_a_pair_in_both_orders_counts_once() -> None:
    config = model("encoder", {"name": "text_classifier", "classes": 3, "both_orders": True})
    objective = build_objective(TextClassificationObjective(), config, SPECIAL, (16,))
    fields = fields_of(objective, chunk(10, PAIR))
    assert [place for place, value in enumerate(fields["examples"]) if value == 6] == [3, 9]
    assert [place for place, value in enumerate(fields["sentence_targets"]) if value != -100] == [3]
    assert "words" not in fields


def test_an_answer_is_marked_at_its_ends() -> None:
    config = model("encoder", {"name": "span_extraction"})
    objective = build_objective(SpanExtractionObjective(), config, SPECIAL, (16,))
    fields = fields_of(objective, chunk(6, {"at": [0], "labels": [[3, 4]], "second": 2}))
    assert fields["answer_marks"] == [0, 0, 0, 1, 2, 0]
    assert fields["examples"] == [6, *[-1] * 5]
    assert fields_of(objective, chunk(6, {"at": [0], "labels": [[0, 0]]}))["answer_marks"] == [3, *[0] * 5]


def test_an_encoder_decoder_reads_and_answers() -> None:
    objective = build_objective(AnswersObjective(), model("encoder_decoder", None), SPECIAL, (8, 6))
    chunks = [
        chunk(7, {"trained": [[4, 7]]}),
        chunk(3, {"trained": [[1, 3]]}, 40),
        chunk(9, {"trained": [[7, 9]]}),
    ]
    assert fields_of(objective, chunks[0]) == {
        "encoder_tokens": [10, 11, 12, 13, 2], "tokens": [0, 14, 15, 16], "targets": [14, 15, 16, 2],
    }  # fmt: skip
    packed = pack_in_memory(
        [chunk.tokens for chunk in chunks],
        PackingConfig(objective, (8, 6), 0),
        members=[p.files for p in chunks],
    )
    rows = [packed.build_row(number) for number in range(packed.n_rows)]
    assert packed.n_rows == 3, "7 + 2 tokens fill two rows of the decoder's six"
    for row in rows:
        for number in range(row["documents"].max() + 1):
            answer = row["targets"][row["documents"] == number]
            assert answer[-1] == 2
            assert row["tokens"][row["documents"] == number].tolist() == [0, *answer[:-1]]
            assert (row["encoder_documents"] == number).any()


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (MultipleChoiceObjective(), "with name = 'multiple_choice'"),
        (SpanExtractionObjective(), "with name = 'span_extraction'"),
        (TextClassificationObjective(), "with name = 'text_classifier'"),
        (MultipleChoiceObjective(lm_weight=1), "'multiple_choice'|only a decoder predicts next tokens"),
    ],
)
def test_a_model_without_the_head_is_refused(objective: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_objective(objective, model("encoder", None), SPECIAL, (16,))


@pytest.mark.parametrize("name", ["multiple_choice", "span_extraction", "text_classifier"])
def test_random_chunks_fit(name: str) -> None:
    kind = {
        "multiple_choice": MultipleChoiceObjective(), "span_extraction": SpanExtractionObjective(),
        "text_classifier": TextClassificationObjective(),
    }[name]  # fmt: skip
    options = {"both_orders": True} if name == "text_classifier" else {}
    objective = build_objective(kind, model("encoder", {"name": name, **options}), SPECIAL, (32,))
    random = np.random.default_rng(1)
    chunks = [objective.random_chunk(random) for _ in range(200)]
    packed = pack_in_memory(
        [chunk.tokens for chunk in chunks],
        PackingConfig(objective, (32,), 0),
        members=[p.files for p in chunks],
    )
    assert sum((packed.build_row(number)["examples"] >= 0).sum() for number in range(packed.n_rows)) >= 200


# ------------------------------------------------------------------------------------------ pairs of segments


CLS, SEP, IGNORE = 4, 5, -100
NO_MASK = {"mask_replace_prob": 0.0, "random_replace_prob": 0.0}
"""Masked tokens are all kept, so that segments can be read."""


class Block:
    """Documents of a block other than the chunk's; the tokens of each are its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.documents = [np.arange(300 + 50 * i, 300 + 50 * i + n) for i, n in enumerate(lengths)]
        self.lengths = np.array(lengths, np.int64)

    def tokens(self, number: int) -> np.ndarray:
        return self.documents[number]


def parts(fields: dict[str, np.ndarray]) -> tuple[list[int], list[int], int]:
    """Segments A and B and the label, after checking the marks."""
    tokens = fields["tokens"].tolist()
    first, last = (i for i, token in enumerate(tokens) if token == SEP)
    assert (tokens[0], last) == (CLS, len(tokens) - 1)
    assert fields["segments"].tolist() == [0] * (first + 1) + [1] * (last - first)
    assert (fields["targets"][[0, first, last]] == IGNORE).all()
    assert (fields["sentence_targets"][1:] == IGNORE).all()
    return tokens[1:first], tokens[first + 1 : last], int(fields["sentence_targets"][0])


def test_next_sentences_are_next_and_random_ones_from_another_document(make_objective: Any, build_one: Any) -> None:
    result, text = make_objective("next_sentence", **NO_MASK), np.arange(200, 240)
    other_block = Block([50, 45, 30, 50])
    labels, partners, cuts = [], [], ([], [])
    for sample in range(25_000):
        a, b, label = parts(build_one(result, text, sample=sample, partners=other_block))
        assert a == text[: len(a)].tolist()
        assert len(a) + len(b) == len(text), "the planned length"
        assert a
        assert b
        if label == 0:
            assert b == text[len(a) :].tolist()
        else:
            number = (b[0] - 300) // 50
            assert b == list(range(b[0], b[0] + len(b))), "consecutive tokens"
            assert set(b) <= set(other_block.documents[number].tolist()), "of one other document"
            partners.append(number)
        labels.append(label)
        cuts[label].append(len(a))
    assert abs(sum(labels) - 12_500) < 5 * 6_250**0.5
    counts = np.bincount(partners, minlength=4)
    assert np.abs(counts - len(partners) / 4).max() < 5 * len(partners) ** 0.5
    # Kolmogorov and Smirnov: lengths of positives and negatives are of one distribution.
    grid = np.arange(41)
    one, two = (np.searchsorted(np.sort(c), grid, side="right") / len(c) for c in cuts)
    assert np.abs(one - two).max() < 2.2 * (1 / len(cuts[0]) + 1 / len(cuts[1])) ** 0.5


@pytest.mark.parametrize("ends_document", [True, False])
def test_ends_of_documents_do_not_tell_the_label(make_objective: Any, build_one: Any, ends_document: bool) -> None:
    """A full stop at the end of B would: B is the end of its document in both cases, or in neither."""
    result, text, block = (
        make_objective("next_sentence", **NO_MASK),
        np.arange(200, 240),
        Block([50, 41, 30, 7]),
    )
    firsts = {documents[0] for documents in block.documents}
    lasts = {documents[-1] for documents in block.documents}
    places = set()
    for sample in range(2_000):
        _, b, label = parts(build_one(result, text, sample=sample, partners=block, ends_document=ends_document))
        if label:
            assert not firsts & set(b)
            assert (b[-1] in lasts) == ends_document
            places.add(b[0])
    assert len(places) > 60, "elsewhere in the documents, anywhere"


@pytest.mark.parametrize("lengths", [[3], [1, 2], [40, 3], [1000]])
@pytest.mark.parametrize("n", [2, 3, 30])
def test_short_partners_decide_the_cut(make_objective: Any, build_one: Any, lengths: list[int], n: int) -> None:
    result, text = make_objective("next_sentence", **NO_MASK), np.arange(200, 200 + n)
    lengths_of_parts = {parts(build_one(result, text, sample=i, partners=Block(lengths)))[2] for i in range(200)}
    assert lengths_of_parts == {0, 1}


def test_alone_in_a_block_there_are_only_positives(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result = make_objective("next_sentence")
    labels = {parts(build_one(result, make_text(30), sample=i))[2] for i in range(200)}
    assert labels == {0}
    assert result.needs_other_documents
    assert not make_objective("sentence_order").needs_other_documents


def test_segments_are_swapped_half_of_the_time(make_objective: Any, build_one: Any) -> None:
    result, text = make_objective("sentence_order", **NO_MASK), np.arange(200, 260)
    labels, cuts = [], ([], [])
    for sample in range(17_000):
        a, b, label = parts(build_one(result, text, sample=sample))
        assert a
        assert b
        assert (b + a if label else a + b) == text.tolist()
        labels.append(label)
        cuts[label].append(len(b if label else a))
    assert abs(sum(labels) - 8_500) < 5 * 4_250**0.5
    counts = np.bincount(cuts[0] + cuts[1], minlength=60)[1:]
    chi2 = float(((counts - 17_000 / 59) ** 2 / (17_000 / 59)).sum())
    assert abs(chi2 - 58) < 5 * (2 * 58) ** 0.5, "any place of the cut is as likely"


@pytest.mark.parametrize("name", ["next_sentence", "sentence_order"])
def test_tokens_are_masked_as_well(make_objective: Any, make_text: Any, build_one: Any, name: str) -> None:
    result, chosen = make_objective(name), 0
    for sample in range(2_500):
        fields = build_one(result, make_text(400, sample % 400), sample=sample, partners=Block([500]))
        chosen += int((fields["targets"] != IGNORE).sum())
    n = 2_500 * 400
    assert abs(chosen - 0.15 * n) < 5 * (n * 0.15 * 0.85) ** 0.5
    static = make_objective(name, static=True)
    tokens = make_text(50)
    epochs = {build_one(static, tokens, epoch=e, partners=Block([60]))["tokens"].tobytes() for e in range(4)}
    assert len(epochs) == 1


def test_a_model_without_a_sentence_head_is_refused(make_objective: Any, make_model: Any) -> None:
    plain = make_model("encoder").with_changes({"extra_heads": {}})
    with pytest.raises(
        UsageError, match=r"'next_sentence' needs a model with the head: add \[model\.extra_heads\.sentence\]"
    ):
        make_objective("next_sentence", model_config=plain)
    without = make_objective("sentence_order", model_config=make_model("encoder", **{"embedding.n_segments": 0}))
    assert "segments" not in without.build_example(DocumentChunk(np.arange(200, 210)), ChunkKey(0, 0, 0, 0))
