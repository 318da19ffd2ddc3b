"""Masked tokens over a million tokens, whole words, static and dynamic masks; and replaced-token detection."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.errors import UsageError
from megatfm.objectives import SpecialTokens

MASK, CLS, SEP, IGNORE = 3, 4, 5, -100
TEXTS = 2000
LENGTH = 500


def within(count: float, n: float, share: float) -> bool:
    """Five standard deviations of a binomial."""
    return abs(count - n * share) < 5 * (n * share * (1 - share)) ** 0.5


@pytest.fixture(scope="module")
def million(make_objective: Any, make_text: Any, build_one: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts, what is shown, and targets, without marks: each [TEXTS, LENGTH]."""
    result = make_objective("masked")
    texts = np.stack([make_text(LENGTH, seed) for seed in range(TEXTS)]).astype(np.int64)
    fields = [build_one(result, tokens, sample=i) for i, tokens in enumerate(texts)]
    for name, ends in (("tokens", (CLS, SEP)), ("targets", (IGNORE, IGNORE))):
        assert {(int(f[name][0]), int(f[name][-1])) for f in fields} == {ends}
    return (
        texts,
        np.stack([f["tokens"][1:-1] for f in fields]),
        np.stack([f["targets"][1:-1] for f in fields]),
    )


def test_rates_over_a_million_tokens(million: Any, special: SpecialTokens) -> None:
    texts, displayed, targets = million
    chosen = targets != IGNORE
    assert (targets[chosen] == texts[chosen]).all(), "the original token is the target"
    assert (displayed[~chosen] == texts[~chosen]).all(), "nothing else is changed"
    assert within(chosen.sum(), texts.size, 0.15)
    assert within((chosen.sum(0) - 0.15 * TEXTS).max() + 0.15 * TEXTS, TEXTS, 0.15), "any place is as likely"
    masked = displayed[chosen] == MASK
    kept = displayed[chosen] == texts[chosen]
    random = ~masked & ~kept
    n = chosen.sum()
    # A random token is the original one now and then.
    same = 0.1 / len(special.text_ids)
    assert within(masked.sum(), n, 0.8)
    assert within(kept.sum(), n, 0.1 + same)
    assert within(random.sum(), n, 0.1 - same)


def test_random_tokens_are_uniform_over_ordinary_ones(million: Any, special: SpecialTokens) -> None:
    texts, displayed, targets = million
    random = displayed[(targets != IGNORE) & (displayed != MASK) & (displayed != texts)]
    counts = np.bincount(random, minlength=1000)
    assert counts[:200].sum() == 0, "reserved ids are never shown"
    assert special.text_ids.tolist() == list(range(200, 1000))
    expected = counts.sum() / 800
    chi2 = float(((counts[200:] - expected) ** 2 / expected).sum())
    assert abs(chi2 - 799) < 5 * (2 * 799) ** 0.5


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_short_texts_have_the_same_rate(make_objective: Any, make_text: Any, build_one: Any, n: int) -> None:
    result = make_objective("masked")
    chosen = sum((build_one(result, make_text(n), sample=i)["targets"] != IGNORE).sum() for i in range(3000))
    assert within(chosen, 3000 * n, 0.15)


def test_whole_words_are_masked_as_a_whole(
    make_objective: Any, make_text: Any, build_one: Any, special: SpecialTokens
) -> None:
    result = make_objective("masked", whole_words=True)
    chosen, n = 0, 0
    for sample in range(600):
        tokens = make_text(LENGTH, sample)
        taken = build_one(result, tokens, sample=sample)["targets"][1:-1] != IGNORE
        assert special.word_starts is not None
        starts = special.word_starts[tokens].copy()
        starts[0] = True
        word = np.cumsum(starts) - 1
        share = np.bincount(word, taken) / np.bincount(word)
        assert set(share.tolist()) <= {0.0, 1.0}
        chosen, n = chosen + int(taken.sum()), n + LENGTH
    assert within(chosen, n, 0.15)


def test_static_masks_are_the_same_in_every_epoch(
    make_objective: Any, make_text: Any, build_one: Any
) -> None:
    tokens = make_text(200)
    for static in (False, True):
        result = make_objective("masked", static=static)
        masks = {build_one(result, tokens, epoch=epoch)["tokens"].tobytes() for epoch in range(5)}
        assert len(masks) == (1 if static else 5)
        remaining = {build_one(result, tokens, sample=sample)["tokens"].tobytes() for sample in range(5)}
        assert len(remaining) == 5


def test_sequences_fit_rows_and_nothing_makes_none(make_objective: Any) -> None:
    result = make_objective("masked", rows=(64,))
    assert result.max_tokens == 62
    assert result.sequence_lengths(np.array([62, 1, 0]), np.zeros(3, np.uint64)).tolist() == [64, 3, 0]
    with pytest.raises(
        UsageError, match=r"data\.sequence_length = 2 is too short for objective\.name = 'masked'"
    ):
        make_objective("masked", rows=(2,))


def test_what_is_missing_is_named(make_objective: Any, make_model: Any, special: SpecialTokens) -> None:
    bare = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=10)
    with pytest.raises(
        UsageError, match=r"objective\.name = 'masked' needs a mask token, and the tokenizer has none: p"
    ):
        make_objective("masked", special=bare)
    with pytest.raises(
        UsageError, match=r"'masked' predicts tokens, and a model with .*: set model\.lm_head\.name=linear"
    ):
        make_objective(
            "masked", model_config=make_model("encoder").with_changes({"lm_head": {"name": "none"}})
        )
    with pytest.raises(UsageError, match=r"'masked' does not train model\.family = 'decoder', but encoder"):
        make_objective("masked", family="decoder")
    wordless = replace(special, word_starts=None)
    with pytest.raises(UsageError, match=r"objective\.whole_words = true needs to know where words begin"):
        make_objective("masked", special=wordless, whole_words=True)
    with pytest.raises(
        UsageError, match=r"objective\.name = 'span_boundary' needs to know where words begin"
    ):
        make_objective("span_boundary", special=wordless)


def test_85_of_100_chosen_tokens_are_masked(make_objective: Any, make_text: Any, build_one: Any) -> None:
    result, n, masked, chosen = make_objective("replaced_token"), 400, 0, 0
    for sample in range(2500):
        tokens = make_text(n, sample)
        fields = build_one(result, tokens, sample=sample)
        assert fields["original"].tolist() == [CLS, *tokens.tolist(), SEP]
        taken = fields["targets"] != IGNORE
        assert (fields["targets"][taken] == fields["original"][taken]).all()
        changed = fields["tokens"] != fields["original"]
        assert (fields["tokens"][changed] == MASK).all(), "no random tokens"
        assert taken[changed].all()
        masked, chosen = masked + int(changed.sum()), chosen + int(taken.sum())
    assert abs(chosen - 150_000) < 5 * (1e6 * 0.15 * 0.85) ** 0.5
    assert abs(masked - 0.85 * chosen) < 5 * (chosen * 0.85 * 0.15) ** 0.5


def test_the_terms_and_their_counts(make_objective: Any) -> None:
    result = make_objective("replaced_token")
    assert dict(result.loss_weights) == {"generator": 1.0, "discriminator": 50.0}
    batch = {
        "targets": torch.tensor([[IGNORE, 7, IGNORE, IGNORE]]),
        "documents": torch.tensor([[0, 0, 0, -1]]),
    }
    assert {name: int(count) for name, count in result.target_counts(batch).items()} == {
        "generator": 1,
        "discriminator": 3,
    }
    assert make_objective("replaced_token", discriminator_weight=10).loss_weights[
        "discriminator"
    ] == pytest.approx(10)
