"""Frames: the special tokens that a tokenizer puts around a text, and around and between two."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

Tokens = NDArray[np.integer]


class Framed(NamedTuple):
    """Tokens of an example, and where its second text begins (its segment's first token); None: it has one text."""

    tokens: NDArray[np.int64]
    second: int | None


@dataclass(frozen=True)
class Frame:
    """Special tokens before, between and after texts. second_segment: how many of `between` belong to the second."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def n_special(self, *, pair: bool) -> int:
        """Return how many special tokens stand around one text, or around and between two."""
        return len(self.before) + len(self.after) + (len(self.between) if pair else 0)

    def wrap(self, first: Tokens, second: Tokens | None = None) -> Framed:
        """Return the framed tokens."""
        if second is None:
            return Framed(np.concatenate([self.before, first, self.after]).astype(np.int64), None)
        head = np.concatenate([self.before, first, self.between]).astype(np.int64)
        return Framed(np.concatenate([head, second, self.after]).astype(np.int64), len(head))


def frame_of(tokenizer: Tokenizer, *, is_causal: bool = False) -> Frame:
    """Return a tokenizer's frame: [CLS] a [SEP] b [SEP], or what its file's post-processor puts around texts.

    is_causal: of a decoder, as GPT-1's [START] a [DELIM] b [EXTRACT]: BOS; [SEP] or EOS; [CLS] or EOS. Raises
    UsageError if an encoder's has neither the marks nor a post-processor.
    """
    if is_causal:
        between = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
        return Frame(
            (tokenizer.bos,), (between,), (tokenizer.eos if tokenizer.cls is None else tokenizer.cls,)
        )
    declared = getattr(tokenizer, "pair_frame", lambda: None)()
    if declared is not None:
        return Frame(*declared)
    if tokenizer.cls is None or tokenizer.sep is None:
        raise UsageError(
            "the tokenizer has no tokens such as [CLS] and [SEP] to put around a text: start from a model whose "
            "tokenizer has them"
        )
    return Frame((tokenizer.cls,), (tokenizer.sep,), (tokenizer.sep,))


def truncate_longest(first: Tokens, second: Tokens | None, room: int) -> tuple[Tokens, Tokens | None]:
    """Cut texts to `room` tokens together, at their ends, the longer one first, as transformers' longest_first."""
    if second is None:
        return first[:room], None
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    longer, shorter = max(len(first), len(second)), min(len(first), len(second))
    if longer - shorter >= excess:
        keep_longer, keep_shorter = longer - excess, shorter
    else:
        keep_shorter = room // 2
        keep_longer = room - keep_shorter
    if len(first) >= len(second):
        return first[:keep_longer], second[:keep_shorter]
    return first[:keep_shorter], second[:keep_longer]
