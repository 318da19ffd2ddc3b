"""Next-sentence and sentence-order prediction: balance of the labels, and lengths and ends that don't reveal them."""

import numpy as np
import pytest

from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError
from megatfm.rng import ChunkKey
from tests.support.text_objectives import OtherDocuments, build_fields, make_model, make_objective, make_text

CLS, SEP, IGNORE = 4, 5, -100
NO_MASK = {"mask_replace_prob": 0.0, "random_replace_prob": 0.0}
"""Masked tokens are all kept, so that segments can be read."""


def make_documents(*lengths: int) -> OtherDocuments:
    """Documents of other tokens than the chunk's; those of each are its own."""
    return OtherDocuments([np.arange(300 + 50 * i, 300 + 50 * i + n) for i, n in enumerate(lengths)])


def split_segments(fields: dict[str, np.ndarray]) -> tuple[list[int], list[int], int]:
    """Segments A and B and the label, after checking the marks."""
    tokens = fields["tokens"].tolist()
    first, last = (i for i, token in enumerate(tokens) if token == SEP)
    assert (tokens[0], last) == (CLS, len(tokens) - 1)
    assert fields["segments"].tolist() == [0] * (first + 1) + [1] * (last - first)
    assert (fields["targets"][[0, first, last]] == IGNORE).all()
    assert (fields["sentence_targets"][1:] == IGNORE).all()
    return tokens[1:first], tokens[first + 1 : last], int(fields["sentence_targets"][0])


def test_b_follows_a_or_is_from_another_document() -> None:
    result, text = make_objective("next_sentence", **NO_MASK), np.arange(200, 240)
    other_block = make_documents(50, 45, 30, 50)
    labels, partners, cuts = [], [], ([], [])
    for sample in range(8_000):
        a, b, label = split_segments(build_fields(result, text, sample=sample, partners=other_block))
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
    assert abs(sum(labels) - 4_000) < 5 * 2_000**0.5
    counts = np.bincount(partners, minlength=4)
    assert np.abs(counts - len(partners) / 4).max() < 5 * len(partners) ** 0.5
    # Kolmogorov and Smirnov: lengths of positives and negatives are of one distribution.
    grid = np.arange(41)
    positives, negatives = (np.searchsorted(np.sort(c), grid, side="right") / len(c) for c in cuts)
    assert np.abs(positives - negatives).max() < 2.2 * (1 / len(cuts[0]) + 1 / len(cuts[1])) ** 0.5


@pytest.mark.parametrize("ends_document", [True, False])
def test_ends_of_documents_do_not_reveal_the_label(ends_document: bool) -> None:
    """A full stop at the end of B would: B is the end of its document in both cases, or in neither."""
    result, text = make_objective("next_sentence", **NO_MASK), np.arange(200, 240)
    block = make_documents(50, 41, 30, 7)
    firsts = {documents[0] for documents in block.documents}
    lasts = {documents[-1] for documents in block.documents}
    positions = set()
    for sample in range(2_000):
        _, b, label = split_segments(
            build_fields(result, text, sample=sample, partners=block, ends_document=ends_document)
        )
        if label:
            assert not firsts & set(b)
            assert (b[-1] in lasts) == ends_document
            positions.add(b[0])
    assert len(positions) > 60, "elsewhere in the documents, anywhere"


@pytest.mark.parametrize("lengths", [[3], [1, 2], [40, 3], [1000]])
@pytest.mark.parametrize("n", [2, 3, 30])
def test_short_documents_limit_the_length_of_b(lengths: list[int], n: int) -> None:
    result, text = make_objective("next_sentence", **NO_MASK), np.arange(200, 200 + n)
    built = (build_fields(result, text, sample=i, partners=make_documents(*lengths)) for i in range(200))
    labels = {split_segments(fields)[2] for fields in built}
    assert labels == {0, 1}


def test_a_single_document_in_a_block_has_label_0_only() -> None:
    result = make_objective("next_sentence")
    labels = {split_segments(build_fields(result, make_text(30), sample=i))[2] for i in range(200)}
    assert labels == {0}
    assert result.needs_other_documents
    assert not make_objective("sentence_order").needs_other_documents


def test_sentence_order_swaps_half_of_the_pairs() -> None:
    result, text = make_objective("sentence_order", **NO_MASK), np.arange(200, 260)
    labels, cuts = [], ([], [])
    for sample in range(6_000):
        a, b, label = split_segments(build_fields(result, text, sample=sample))
        assert a
        assert b
        assert (b + a if label else a + b) == text.tolist()
        labels.append(label)
        cuts[label].append(len(b if label else a))
    assert abs(sum(labels) - 3_000) < 5 * 1_500**0.5
    counts = np.bincount(cuts[0] + cuts[1], minlength=60)[1:]
    chi2 = float(((counts - 6_000 / 59) ** 2 / (6_000 / 59)).sum())
    assert abs(chi2 - 58) < 5 * (2 * 58) ** 0.5, "any place of the cut is as likely"


@pytest.mark.parametrize("name", ["next_sentence", "sentence_order"])
def test_tokens_of_both_segments_are_masked(name: str) -> None:
    result, chosen = make_objective(name), 0
    for sample in range(2_500):
        fields = build_fields(result, make_text(400, sample % 400), sample=sample, partners=make_documents(500))
        chosen += int((fields["targets"] != IGNORE).sum())
    n = 2_500 * 400
    assert abs(chosen - 0.15 * n) < 5 * (n * 0.15 * 0.85) ** 0.5
    static = make_objective(name, static=True)
    tokens = make_text(50)
    epochs = {build_fields(static, tokens, epoch=e, partners=make_documents(60))["tokens"].tobytes() for e in range(4)}
    assert len(epochs) == 1


def test_a_model_without_a_sentence_head_is_refused() -> None:
    plain = make_model("encoder").with_changes({"extra_heads": {}})
    with pytest.raises(UsageError, match=r"'next_sentence' needs .* the head: add \[model\.extra_heads\.sentence\]"):
        make_objective("next_sentence", model_config=plain)
    without = make_objective("sentence_order", model_config=make_model("encoder", **{"embedding.n_segments": 0}))
    assert "segments" not in without.build_example(DocumentChunk(np.arange(200, 210)), ChunkKey(0, 0, 0, 0))
