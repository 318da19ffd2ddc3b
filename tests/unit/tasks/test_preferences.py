"""Preference files: which tokens are trained, what their reference is, and rows that are refused."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatfm import tokenizers
from megatfm.config import PreferenceObjective, TaskConfig
from megatfm.data.inner_documents import with_inner_documents
from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError
from megatfm.layers.preference import FIRST_TARGET
from megatfm.objectives.base import SpecialTokens
from megatfm.objectives.preference import Preferences
from megatfm.objectives.supervised import ANNOTATION
from megatfm.rng import ChunkKey
from megatfm.tasks.preferences import PreferenceEncoder
from megatfm.tokenizers import Tokenizer, train_sentencepiece
from tests.support.models import UNTIED_MODEL

WORDS = ["which animal barks", "the dog does", "the cat", "größer 東京 ☃", "a b c d"]
ROWS = [
    {"prompt": "which animal barks", "chosen": "the dog does", "rejected": "the cat"},
    {"prompt": "größer 東京", "chosen": "☃", "rejected": "a b c d"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers.SentencePieceTokenizer(train_sentencepiece(WORDS * 9, vocab_size=330, sentinels=0))


def scores(sequences: Sequence[Any]) -> list[float]:
    """Another log-probability for each answer: minus its tokens, and a bit of their ids."""
    return [-float(end - begin) - float(tokens[begin:end].sum()) / 1e4 for tokens, (begin, end) in sequences]


def encoder(tokenizer: Tokenizer, length: int = 64, **task: Any) -> PreferenceEncoder:
    config = TaskConfig(form="preference", train="pairs.jsonl", **task)
    return PreferenceEncoder("pairs.jsonl", config, tokenizer, "", length, scores)


def test_prompts_are_read_and_answers_trained(tokenizer: Tokenizer) -> None:
    examples, notes = encoder(tokenizer).encode(ROWS)
    for row, example in zip(ROWS, examples, strict=True):
        second, (chosen, rejected) = example.annotation["second"], example.annotation["trained"]
        prompt = [tokenizer.bos, *tokenizer.encode(row["prompt"] + "\n")]
        for side, start, (begin, end) in (("chosen", 0, chosen), ("rejected", second, rejected)):
            assert example.tokens[start:begin].tolist() == prompt
            assert example.tokens[begin:end].tolist() == [*tokenizer.encode(row[side]), tokenizer.eos]
        assert (chosen[1], rejected[1]) == (second, len(example.tokens))
        sides = [
            (example.tokens[:second], tuple(chosen)),
            (example.tokens[second:], tuple(x - second for x in rejected)),
        ]
        up, down = scores(sides)
        assert example.annotation["reference"] == pytest.approx(up - down, abs=1e-12)
    assert notes == ["pairs.jsonl: 50 % of 2 chosen answers are the likelier at the start"]


def test_a_pair_is_two_documents_of_one_row(tokenizer: Tokenizer) -> None:
    (example, _), _ = encoder(tokenizer).encode(ROWS)
    special = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=330)
    objective = Preferences(special, PreferenceObjective(), UNTIED_MODEL, (64,))
    stored = DocumentChunk(example.tokens, files={ANNOTATION: json.dumps(example.annotation).encode()})
    fields = objective.build_example(stored, ChunkKey(0, 5, 0, 0))
    second, n = example.annotation["second"], len(example.tokens)
    assert {len(values) for values in fields.values()} == {n - 2}
    assert objective.sequence_lengths(np.array([n]), np.array([0], np.uint64)).tolist() == [n - 2]
    kept = [*range(second - 1), *range(second, n - 1)]
    assert fields["tokens"].tolist() == example.tokens[kept].tolist()
    trained = {at for begin, end in example.annotation["trained"] for at in range(begin, end)}
    wanted = [int(example.tokens[at + 1]) if at + 1 in trained else -100 for at in kept]
    assert fields["targets"].tolist() == wanted
    first = wanted.index(next(target for target in wanted if target != -100))
    assert fields["pairs"].tolist() == [
        FIRST_TARGET if at == first else 1 if at < second - 1 else -1 for at in range(n - 2)
    ]
    assert fields["reference"].nonzero()[0].tolist() == [first]
    starts, blank = with_inner_documents(fields, np.array([0, n - 2]), np.array([True]))
    assert starts.tolist() == [0, second - 1, n - 2]
    assert blank is not None
    assert blank.tolist() == [True, True]
    assert "begins" not in fields


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "the cat"}, "row 2: both answers are the same"),
        ({"chosen": ""}, "row 2: column 'chosen' is empty"),
        ({"prompt": None}, "row 2: column 'prompt' is empty"),
        (
            {"chosen": "the dog does " * 40},
            r"row 2: has \d+ tokens in both sequences, more than data.sequence_length = 64",
        ),
    ],
)
def test_rows_that_are_no_pair_are_refused(tokenizer: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encoder(tokenizer).encode([ROWS[0], {**ROWS[0], **row}])


def test_missing_columns_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"has no column 'better', which task\.chosen names"):
        encoder(tokenizer, chosen="better").encode(ROWS)
