"""Which tokens are masked, and what is shown in their place: shared by the objectives of encoders."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatfm import keyed
from megatfm.config import MaskedObjective, ReplacedTokenObjective
from megatfm.keyed import PieceKey
from megatfm.objectives.registry import Example, SpecialTokens, TokenArray
from megatfm.ops.cross_entropy import IGNORE

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def masking_key(key: PieceKey, name: str, static: bool = False) -> tuple[int | str, ...]:
    """What is drawn from for a piece; `static`: the same in every epoch."""
    return (key.seed, key.sample, key.piece, name) if static else (*key, name)


def stochastic_round(expected: float, u: float) -> int:
    """A whole number whose mean is `expected`, for uniform u in [0, 1)."""
    return int(np.floor(expected + u))


def randint_below(n: int | Ints, u: float | Floats) -> Ints:
    """Uniform whole numbers in [0, n), from uniform u in [0, 1)."""
    return np.minimum((np.asarray(u) * n).astype(np.int64), np.asarray(n) - 1)


@dataclass(frozen=True)
class Masking:
    """BERT's masking (Devlin et al. 2019, section 3.1), of tokens or of whole words."""

    special: SpecialTokens
    mask: int
    rate: float
    mask_share: float
    random_share: float
    whole_words: bool = False

    @classmethod
    def of(cls, config: MaskedObjective | ReplacedTokenObjective, special: SpecialTokens) -> "Masking":
        """As a config's section asks. Raises UsageError if the tokenizer lacks what it needs."""
        mask = special.require_token("mask", config.name)
        if isinstance(config, ReplacedTokenObjective):
            return cls(special, mask, config.mask_rate, config.mask_replace_prob, 0.0)
        if config.whole_words:
            special.require_word_starts("objective.whole_words = true")
        return cls(
            special,
            mask,
            config.mask_rate,
            config.mask_replace_prob,
            config.random_replace_prob,
            config.whole_words,
        )

    def __call__(self, tokens: TokenArray, key: tuple[int | str, ...]) -> tuple[Ints, Ints]:
        """What is shown of a text's tokens [n], and the targets [n]."""
        n = len(tokens)
        random = keyed.uniform(3 * n + 1, *key)
        chosen = self._chosen(tokens, random[: n + 1])
        masked_tokens, targets = tokens.astype(np.int64), np.full(n, IGNORE, np.int64)
        targets[chosen] = masked_tokens[chosen]
        masked_tokens[chosen] = replace_masked(
            masked_tokens[chosen], random[n + 1 : 2 * n + 1][chosen], random[2 * n + 1 :][chosen], self
        )
        return masked_tokens, targets

    def _chosen(self, tokens: TokenArray, random: Floats) -> Ints:
        """Numbers of the chosen tokens. Their number is rate · n, rounded up or down at random so that the mean is
        exact for texts of any length."""
        budget = stochastic_round(self.rate * len(tokens), float(random[-1]))
        if not self.whole_words:
            return np.argsort(random[:-1], kind="stable")[:budget]
        starts = self.special.word_boundaries(tokens)
        return choose_words(starts, len(tokens), budget, random[: len(starts)])


def choose_words(starts: Ints, n: int, budget: int, random: Floats) -> Ints:
    """Numbers of the tokens of words in random order, those left out that would exceed the budget of tokens (as in
    BERT's code for whole words). starts [words]: where words begin among the n tokens."""
    lengths = np.diff(starts, append=n)
    order = np.argsort(random, kind="stable")
    total = np.cumsum(lengths[order])
    first = int(np.searchsorted(total, budget, side="right"))
    chosen, left = order[:first].tolist(), budget - int(total[first - 1] if first else 0)
    for word in order[first:]:
        if left == 0:
            break
        if lengths[word] <= left:
            chosen.append(word)
            left -= int(lengths[word])
    taken = np.zeros(len(starts), bool)
    taken[chosen] = True
    return np.flatnonzero(np.repeat(taken, lengths))


def replace_masked(original: Ints, which: Floats, draw: Floats, masking: Masking) -> Ints:
    """What stands in place of chosen tokens: the mask token, a random one, or the token itself, decided by `which`,
    uniform in [0, 1); `draw`, as well, chooses the random ones."""
    ordinary = masking.special.text_ids
    masked_tokens = original.copy()
    masked_tokens[which < masking.mask_share] = masking.mask
    random = (which >= masking.mask_share) & (which < masking.mask_share + masking.random_share)
    if random.any():
        masked_tokens[random] = ordinary[randint_below(len(ordinary), draw[random])]
    return masked_tokens


def single_segment_example(masked_tokens: Ints, targets: Ints, cls: int, sep: int) -> Example:
    """[CLS] text [SEP] with the text's targets."""
    tokens, target_tokens = (
        np.empty(len(masked_tokens) + 2, np.int64),
        np.full(len(masked_tokens) + 2, IGNORE, np.int64),
    )
    tokens[0], tokens[1:-1], tokens[-1] = cls, masked_tokens, sep
    target_tokens[1:-1] = targets
    return {"tokens": tokens, "targets": target_tokens}
