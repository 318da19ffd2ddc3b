"""Masked and replaced tokens, SpanBERT's spans, and pairs of sentences: rates, lengths, replacements, labels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.data.sequences import DocumentChunk
from megatfm.errors import UsageError
from megatfm.objectives import SpecialTokens
from megatfm.rng import ChunkKey
from tests.support.text_objectives import SPECIAL, OtherDocuments, build_fields, make_model, make_objective, make_text

MASK, CLS, SEP, IGNORE = 3, 4, 5, -100
TEXTS = 2000
LENGTH = 500


def is_within(count: float, n: float, share: float) -> bool:
    """Five standard deviations of a binomial."""
    return abs(count - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@pytest.fixture(scope="module")
def masked_texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts, what is shown, and targets, without marks: each [TEXTS, LENGTH]."""
    result = make_objective("masked")
    texts = np.stack([make_text(LENGTH, seed) for seed in range(TEXTS)]).astype(np.int64)
    fields = [build_fields(result, tokens, sample=i) for i, tokens in enumerate(texts)]
    for name, ends in (("tokens", (CLS, SEP)), ("targets", (IGNORE, IGNORE))):
        assert {(int(f[name][0]), int(f[name][-1])) for f in fields} == {ends}
    return (texts, np.stack([f["tokens"][1:-1] for f in fields]), np.stack([f["targets"][1:-1] for f in fields]))


def test_mask_and_replacement_rates_over_a_million_tokens(masked_texts: Any) -> None:
    texts, displayed, targets = masked_texts
    chosen = targets != IGNORE
    assert (targets[chosen] == texts[chosen]).all(), "the original token is the target"
    assert (displayed[~chosen] == texts[~chosen]).all(), "nothing else is changed"
    assert is_within(chosen.sum(), texts.size, 0.15)
    assert is_within((chosen.sum(0) - 0.15 * TEXTS).max() + 0.15 * TEXTS, TEXTS, 0.15), "any place is as likely"
    masked = displayed[chosen] == MASK
    unchanged = displayed[chosen] == texts[chosen]
    random = ~masked & ~unchanged
    n = chosen.sum()
    # A random token is the original one now and then.
    unchanged_by_chance = 0.1 / len(SPECIAL.text_ids)
    assert is_within(masked.sum(), n, 0.8)
    assert is_within(unchanged.sum(), n, 0.1 + unchanged_by_chance)
    assert is_within(random.sum(), n, 0.1 - unchanged_by_chance)


def test_random_tokens_are_uniform_over_text_ids(masked_texts: Any) -> None:
    texts, displayed, targets = masked_texts
    random = displayed[(targets != IGNORE) & (displayed != MASK) & (displayed != texts)]
    counts = np.bincount(random, minlength=1000)
    assert counts[:200].sum() == 0, "reserved ids are never shown"
    assert SPECIAL.text_ids.tolist() == list(range(200, 1000))
    expected = counts.sum() / 800
    chi2 = float(((counts[200:] - expected) ** 2 / expected).sum())
    assert abs(chi2 - 799) < 5 * (2 * 799) ** 0.5


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_short_texts_have_the_same_rate(n: int) -> None:
    result = make_objective("masked")
    chosen = sum((build_fields(result, make_text(n), sample=i)["targets"] != IGNORE).sum() for i in range(3000))
    assert is_within(chosen, 3000 * n, 0.15)


def test_words_are_masked_whole() -> None:
    result = make_objective("masked", whole_words=True)
    chosen, n = 0, 0
    for sample in range(600):
        tokens = make_text(LENGTH, sample)
        is_chosen = build_fields(result, tokens, sample=sample)["targets"][1:-1] != IGNORE
        assert SPECIAL.word_starts is not None
        starts = SPECIAL.word_starts[tokens].copy()
        starts[0] = True
        word = np.cumsum(starts) - 1
        share = np.bincount(word, is_chosen) / np.bincount(word)
        assert set(share.tolist()) <= {0.0, 1.0}
        chosen, n = chosen + int(is_chosen.sum()), n + LENGTH
    assert is_within(chosen, n, 0.15)


def test_static_masks_are_the_same_in_every_epoch() -> None:
    tokens = make_text(200)
    for static in (False, True):
        result = make_objective("masked", static=static)
        masks = {build_fields(result, tokens, epoch=epoch)["tokens"].tobytes() for epoch in range(5)}
        assert len(masks) == (1 if static else 5)
        remaining = {build_fields(result, tokens, sample=sample)["tokens"].tobytes() for sample in range(5)}
        assert len(remaining) == 5


def test_sequences_fit_rows_and_empty_chunks_make_none() -> None:
    result = make_objective("masked", rows=(64,))
    assert result.max_tokens == 62
    assert result.sequence_lengths(np.array([62, 1, 0]), np.zeros(3, np.uint64)).tolist() == [64, 3, 0]
    with pytest.raises(UsageError, match=r"data\.sequence_length = 2 is too short for objective\.name = 'masked'"):
        make_objective("masked", rows=(2,))


def test_missing_special_tokens_are_named() -> None:
    bare = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=10)
    with pytest.raises(UsageError, match=r"objective\.name = 'masked' needs a mask token, and the tokenizer has none"):
        make_objective("masked", special=bare)
    with pytest.raises(UsageError, match=r"'masked' predicts tokens, .*: set model\.lm_head\.name=linear"):
        make_objective("masked", model_config=make_model("encoder").with_changes({"lm_head": {"name": "none"}}))
    with pytest.raises(UsageError, match=r"'masked' does not train model\.family = 'decoder', but encoder"):
        make_objective("masked", family="decoder")
    wordless = replace(SPECIAL, word_starts=None)
    with pytest.raises(UsageError, match=r"objective\.whole_words = true needs to know where words begin"):
        make_objective("masked", special=wordless, whole_words=True)
    with pytest.raises(UsageError, match=r"objective\.name = 'span_boundary' needs to know where words begin"):
        make_objective("span_boundary", special=wordless)


def test_replaced_token_masks_85_percent_of_chosen_tokens() -> None:
    result, n, masked, chosen = make_objective("replaced_token"), 400, 0, 0
    for sample in range(2500):
        tokens = make_text(n, sample)
        fields = build_fields(result, tokens, sample=sample)
        assert fields["original"].tolist() == [CLS, *tokens.tolist(), SEP]
        is_chosen = fields["targets"] != IGNORE
        assert (fields["targets"][is_chosen] == fields["original"][is_chosen]).all()
        changed = fields["tokens"] != fields["original"]
        assert (fields["tokens"][changed] == MASK).all(), "no random tokens"
        assert is_chosen[changed].all()
        masked, chosen = masked + int(changed.sum()), chosen + int(is_chosen.sum())
    assert abs(chosen - 150_000) < 5 * (1e6 * 0.15 * 0.85) ** 0.5
    assert abs(masked - 0.85 * chosen) < 5 * (chosen * 0.85 * 0.15) ** 0.5


def test_replaced_token_counts_its_terms() -> None:
    result = make_objective("replaced_token")
    assert dict(result.loss_weights) == {"generator": 1.0, "discriminator": 50.0}
    batch = {"targets": torch.tensor([[IGNORE, 7, IGNORE, IGNORE]]), "documents": torch.tensor([[0, 0, 0, -1]])}
    counts = {name: int(count) for name, count in result.target_counts(batch).items()}
    assert counts == {"generator": 1, "discriminator": 3}
    assert make_objective("replaced_token", discriminator_weight=10).loss_weights["discriminator"] == pytest.approx(10)


# --------------------------------------------------------------------------------- spans and their boundaries


@pytest.fixture(scope="module")
def spans() -> dict[str, Any]:
    """Spans as (words, text's tokens, what is shown) and totals, found from `targets` alone."""
    result = make_objective("span_boundary")
    actual: list[tuple[int, np.ndarray, np.ndarray]] = []
    n_words = n_masked = n_masked_words = 0
    for sample in range(TEXTS):
        tokens = make_text(LENGTH, sample)
        fields = build_fields(result, tokens, sample=sample)
        chosen = fields["targets"][1:-1] != IGNORE
        displayed = fields["tokens"][1:-1]
        assert (fields["targets"][1:-1][chosen] == tokens[chosen]).all()
        assert (displayed[~chosen] == tokens[~chosen]).all()
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        starts = SPECIAL.word_starts[tokens].copy()
        starts[0] = True
        word = np.append(np.cumsum(starts), starts.sum() + 1)
        left, right = np.zeros(LENGTH + 2, int), np.zeros(LENGTH + 2, int)
        for begin, end in edges.reshape(-1, 2):
            assert starts[begin], "a span begins with a word"
            assert end == LENGTH or starts[end], "and ends with one"
            actual.append((int(word[end - 1] - word[begin] + 1), tokens[begin:end], displayed[begin:end]))
            for i in range(begin, end):
                left[i + 1], right[i + 1] = i - (begin - 1), end - i
        assert fields["span_left"].tolist() == left.tolist()
        assert fields["span_right"].tolist() == right.tolist()
        n_words, n_masked = n_words + int(starts.sum()), n_masked + int(chosen.sum())
        n_masked_words += sum(span[0] for span in actual[-len(edges) // 2 :]) if len(edges) else 0
    return {"spans": actual, "words": n_words, "masked": n_masked, "masked words": n_masked_words}


def test_span_lengths_are_geometric(spans: dict[str, Any]) -> None:
    """P(l) ∝ 0.8^(l−1)·0.2 over 1 … 10, renormalised; the bound is six standard deviations of χ² with 9 degrees."""
    lengths = np.array([span[0] for span in spans["spans"]])
    share = 0.2 * 0.8 ** np.arange(10)
    expected = len(lengths) * share / share.sum()
    counts = np.bincount(lengths, minlength=11)[1:]
    assert len(counts) == 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 9 + 6 * 18**0.5
    assert lengths.mean() == pytest.approx(3.8, abs=0.05), "the paper's mean"


def test_spans_cover_fifteen_percent(spans: dict[str, Any]) -> None:
    assert spans["masked"] / (TEXTS * LENGTH) == pytest.approx(0.15, abs=0.001)
    assert spans["masked words"] / spans["words"] == pytest.approx(0.15, abs=0.001)


def test_the_replacement_of_a_span_is_drawn_once(spans: dict[str, Any]) -> None:
    kinds = {"mask": 0, "random": 0, "kept": 0}
    for _, text, displayed in spans["spans"]:
        if (displayed == MASK).all():
            kinds["mask"] += 1
        elif (displayed == text).all():
            kinds["kept"] += 1
        else:
            assert not (displayed == MASK).any()
            assert (displayed >= 200).all()
            kinds["random"] += 1
    n = sum(kinds.values())
    for kind, share in (("mask", 0.8), ("random", 0.1), ("kept", 0.1)):
        assert abs(kinds[kind] - n * share) < 5 * (n * share * (1 - share)) ** 0.5 + n * 0.1 / 800


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_short_texts_have_spans_that_fit(n: int) -> None:
    result = make_objective("span_boundary", mask_rate=0.5)
    masked = [int((build_fields(result, make_text(n), sample=i)["targets"] != IGNORE).sum()) for i in range(300)]
    assert max(masked) > 0
    assert max(masked) <= n


def test_spans_are_uniform_over_positions() -> None:
    result, tokens = make_objective("span_boundary"), make_text(100)
    counts = sum((build_fields(result, tokens, sample=i)["targets"][1:-1] != IGNORE).astype(int) for i in range(2000))
    share = counts / 2000
    assert share[20:80].min() > 0.12
    assert share[20:80].max() < 0.2
    # The first word is masked only by a span that begins with it, the last only by one that ends with it.
    assert share.min() > 0.02
    assert share[:10].mean() == pytest.approx(share[-10:].mean(), abs=0.03)


def test_a_model_without_the_head_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'span_boundary' needs .* the head: add \[model\.extra_heads\.boundary\]"):
        make_objective("span_boundary", model_config=make_model("encoder").with_changes({"extra_heads": {}}))


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
