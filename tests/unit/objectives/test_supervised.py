"""Objectives of labelled examples: fields by hand, several parts in a row, and random examples."""

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


def build_fields(objective: Objective, chunk: DocumentChunk) -> dict[str, list[int]]:
    built = objective.build_example(chunk, ChunkKey(seed=0, epoch=0, sample=6, chunk=0))
    return {name: values.tolist() for name, values in built.items()}


def test_targets_do_not_cross_the_parts_of_an_example() -> None:
    config = model("decoder", {"name": "multiple_choice"}, **{"embedding.n_segments": 2})
    objective = build_objective(MultipleChoiceObjective(lm_weight=0.5), config, SPECIAL, (16,))
    assert objective.loss_weights == {"choice": 1.0, "causal": 0.5}
    ignored = -100
    assert build_fields(objective, chunk(10, CHOICES)) == {
        "tokens": list(range(10, 20)),
        "examples": [-1, -1, -1, 6, -1, -1, -1, -1, -1, 6],
        "parts": [0] * 4 + [1] * 6,
        "segments": [0, 0, 1, 1, 0, 0, 0, 1, 1, 1],
        "targets": [11, 12, 13, ignored, 15, 16, 17, 18, 19, ignored],
        "choice_targets": [ignored, ignored, ignored, 1, *[ignored] * 6],
    }


def test_parts_are_packed_as_separate_documents() -> None:
    config = model("encoder", {"name": "multiple_choice"})
    objective = build_objective(MultipleChoiceObjective(), config, SPECIAL, (32,))
    chunks = [chunk(10, CHOICES), chunk(4, {"at": [3], "labels": [0]}, 50), chunk(10, CHOICES, 30)]
    packed = pack_in_memory(
        [chunk.tokens for chunk in chunks], PackingConfig(objective, (32,), 0), members=[p.files for p in chunks]
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
    fields = build_fields(objective, chunk(10, PAIR))
    assert [place for place, value in enumerate(fields["examples"]) if value == 6] == [3, 9]
    assert [place for place, value in enumerate(fields["sentence_targets"]) if value != -100] == [3]
    assert "words" not in fields


def test_an_answer_span_is_marked_at_both_ends() -> None:
    config = model("encoder", {"name": "span_extraction"})
    objective = build_objective(SpanExtractionObjective(), config, SPECIAL, (16,))
    fields = build_fields(objective, chunk(6, {"at": [0], "labels": [[3, 4]], "second": 2}))
    assert fields["answer_marks"] == [0, 0, 0, 1, 2, 0]
    assert fields["examples"] == [6, *[-1] * 5]
    assert build_fields(objective, chunk(6, {"at": [0], "labels": [[0, 0]]}))["answer_marks"] == [3, *[0] * 5]


def test_an_encoder_decoder_reads_prompts_and_predicts_answers() -> None:
    objective = build_objective(AnswersObjective(), model("encoder_decoder", None), SPECIAL, (8, 6))
    chunks = [chunk(7, {"trained": [[4, 7]]}), chunk(3, {"trained": [[1, 3]]}, 40), chunk(9, {"trained": [[7, 9]]})]
    assert build_fields(objective, chunks[0]) == {
        "encoder_tokens": [10, 11, 12, 13, 2], "tokens": [0, 14, 15, 16], "targets": [14, 15, 16, 2],
    }  # fmt: skip
    packed = pack_in_memory(
        [chunk.tokens for chunk in chunks], PackingConfig(objective, (8, 6), 0), members=[p.files for p in chunks]
    )
    rows = [packed.build_row(number) for number in range(packed.n_rows)]
    assert packed.n_rows == 3, "7 + 2 tokens fill two rows of the decoder's six"
    for row in rows:
        for number in range(row["documents"].max() + 1):
            answer = row["targets"][row["documents"] == number]
            assert answer[-1] == 2
            assert row["tokens"][row["documents"] == number].tolist() == [0, *answer[:-1]]
            assert (row["encoder_documents"] == number).any()


@pytest.mark.parametrize(("objective", "message"), [
    (MultipleChoiceObjective(), "with name = 'multiple_choice'"),
    (SpanExtractionObjective(), "with name = 'span_extraction'"),
    (TextClassificationObjective(), "with name = 'text_classifier'"),
    (MultipleChoiceObjective(lm_weight=1), "'multiple_choice'|only a decoder predicts next tokens"),
])  # fmt: skip
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
        [chunk.tokens for chunk in chunks], PackingConfig(objective, (32,), 0), members=[p.files for p in chunks]
    )
    assert sum((packed.build_row(number)["examples"] >= 0).sum() for number in range(packed.n_rows)) >= 200


@pytest.mark.parametrize("row_lengths", [(64, 64), (64, 8), (8, 64)])
def test_random_pairs_fit_both_sides(row_lengths: tuple[int, int]) -> None:
    objective, random = (
        build_objective(AnswersObjective(name="answers"), model("encoder_decoder", None), SPECIAL, row_lengths),
        np.random.default_rng(0),
    )
    for _ in range(100):
        drawn = objective.random_chunk(random)
        fields = objective.build_example(drawn, ChunkKey(seed=0, epoch=0, sample=0, chunk=0))
        assert len(fields["encoder_tokens"]) <= row_lengths[0]
        assert 1 < len(fields["tokens"]) <= row_lengths[1]
