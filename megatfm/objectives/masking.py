"""BERT's masking of tokens and whole words, which the objectives in `masked` share."""

from dataclasses import dataclass

import numpy as np

from megatfm import rng
from megatfm.config import MaskedObjective, ReplacedTokenObjective
from megatfm.objectives.base import Example, FloatArray, IntArray, SpecialTokens, TokenArray, randint_below
from megatfm.ops.cross_entropy import IGNORE


def round_at_random(expected: float, u: float) -> int:
    """Return `expected` rounded down or up at random, so that the mean is exact. u: uniform in [0, 1)."""
    return int(np.floor(expected + u))


@dataclass(frozen=True)
class Masking:
    """BERT's masking of tokens or whole words (Devlin et al. 2019, section 3.1)."""

    special: SpecialTokens
    mask_id: int
    mask_rate: float
    mask_replace_prob: float
    random_replace_prob: float
    whole_words: bool = False

    @classmethod
    def from_config(cls, config: MaskedObjective | ReplacedTokenObjective, special: SpecialTokens) -> "Masking":
        """Return the masking of a config's section. Raises UsageError if the tokenizer lacks a required token."""
        mask_id = special.require_token("mask", config.name)
        if isinstance(config, ReplacedTokenObjective):
            return cls(special, mask_id, config.mask_rate, config.mask_replace_prob, 0.0)
        if config.whole_words:
            special.require_word_starts("objective.whole_words = true")
        return cls(
            special, mask_id, config.mask_rate, config.mask_replace_prob, config.random_replace_prob, config.whole_words
        )

    def __call__(self, tokens: TokenArray, key: tuple[int | str, ...]) -> tuple[IntArray, IntArray]:
        """Return masked inputs [n] and targets [n] of tokens [n]."""
        n = len(tokens)
        random = rng.uniform(3 * n + 1, *key)
        masked_indices = self._choose(tokens, random[: n + 1])
        masked_tokens, targets = tokens.astype(np.int64), np.full(n, IGNORE, np.int64)
        targets[masked_indices] = masked_tokens[masked_indices]
        masked_tokens[masked_indices] = replace_masked(
            masked_tokens[masked_indices],
            random[n + 1 : 2 * n + 1][masked_indices],
            random[2 * n + 1 :][masked_indices],
            self,
        )
        return masked_tokens, targets

    def _choose(self, tokens: TokenArray, random: FloatArray) -> IntArray:
        """Return the indices of the tokens to predict: mask_rate · n of them, by `round_at_random`."""
        budget = round_at_random(self.mask_rate * len(tokens), float(random[-1]))
        if not self.whole_words:
            return np.argsort(random[:-1], kind="stable")[:budget]
        starts = self.special.find_word_boundaries(tokens)
        return choose_words(starts, len(tokens), budget, random[: len(starts)])


def choose_words(starts: IntArray, n: int, budget: int, random: FloatArray) -> IntArray:
    """Return the token indices of random words with at most `budget` tokens (BERT's whole-word masking).

    Words are tried in random order, and one that exceeds the budget is skipped. starts [words]: first tokens of the
    words among n tokens. random [words]: uniform.
    """
    lengths = np.diff(starts, append=n)
    order = np.argsort(random, kind="stable")
    total = np.cumsum(lengths[order])
    n_fitting = int(np.searchsorted(total, budget, side="right"))
    chosen_words, tokens_left = order[:n_fitting].tolist(), budget - int(total[n_fitting - 1] if n_fitting else 0)
    for word in order[n_fitting:]:
        if tokens_left == 0:
            break
        if lengths[word] <= tokens_left:
            chosen_words.append(word)
            tokens_left -= int(lengths[word])
    is_chosen = np.zeros(len(starts), bool)
    is_chosen[chosen_words] = True
    return np.flatnonzero(np.repeat(is_chosen, lengths))


def replace_masked(
    original: IntArray, case_uniform: FloatArray, token_uniform: FloatArray, masking: Masking
) -> IntArray:
    """Replace tokens [n] by the mask token, a random token, or themselves.

    case_uniform [n] and token_uniform [n], in [0, 1), select the case and the random token.
    """
    text_ids = masking.special.text_ids
    masked_tokens = original.copy()
    masked_tokens[case_uniform < masking.mask_replace_prob] = masking.mask_id
    is_random = (case_uniform >= masking.mask_replace_prob) & (
        case_uniform < masking.mask_replace_prob + masking.random_replace_prob
    )
    if is_random.any():
        masked_tokens[is_random] = text_ids[randint_below(len(text_ids), token_uniform[is_random])]
    return masked_tokens


def make_single_segment_example(masked_tokens: IntArray, targets: IntArray, cls: int, sep: int) -> Example:
    """Return [CLS] text [SEP] with the text's targets."""
    tokens = np.empty(len(masked_tokens) + 2, np.int64)
    target_tokens = np.full(len(tokens), IGNORE, np.int64)
    tokens[0], tokens[1:-1], tokens[-1] = cls, masked_tokens, sep
    target_tokens[1:-1] = targets
    return {"tokens": tokens, "targets": target_tokens}
