"""Examples as a model reads them: special tokens around texts, tokens, and the objective's annotation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

THREADS = 4
"""Threads that tokenize."""
Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class ExampleFormat:
    """Format in which a model reads examples.

    sequence_length: tokens of a row. target_length: tokens of an encoder-decoder's decoder row; None: another model.
    is_causal: a decoder, whose last token of an example carries the label. ends_in_cls: XLNet, whose [CLS] is the last
    token.
    """

    sequence_length: int
    target_length: int | None = None
    is_causal: bool = False
    ends_in_cls: bool = False

    @property
    def cls_index(self) -> int:
        """Index of the token that carries an example's label: 0 or −1."""
        return -1 if self.is_causal or self.ends_in_cls else 0


class FramedTokens(NamedTuple):
    """Tokens [T] with special tokens, and the index of the second segment's first token; None: a single text."""

    tokens: NDArray[np.int64]
    second: int | None


@dataclass(frozen=True)
class Frame:
    """Special tokens before, between and after texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def n_special(self, *, pair: bool) -> int:
        """Return the number of special tokens of one text, or of a pair."""
        return len(self.before) + len(self.after) + (len(self.between) if pair else 0)

    def wrap(self, first: Tokens, second: Tokens | None = None) -> FramedTokens:
        """Return the tokens of one text or of a pair, with special tokens."""
        if second is None:
            return FramedTokens(np.concatenate([self.before, first, self.after]).astype(np.int64), None)
        head = np.concatenate([self.before, first, self.between]).astype(np.int64)
        return FramedTokens(np.concatenate([head, second, self.after]).astype(np.int64), len(head))


def build_frame(tokenizer: Tokenizer, example_format: ExampleFormat) -> Frame:
    """Return a tokenizer's frame: [CLS] a [SEP] b [SEP], or the one of its file's post-processor.

    For a decoder GPT-1's [START] a [DELIM] b [EXTRACT], as BOS; [SEP] or EOS; [CLS] or EOS. For XLNet a [SEP] b [SEP]
    [CLS]. Raises UsageError if the tokenizer of another model has neither these tokens nor a post-processor.
    """
    if example_format.is_causal:
        between = tokenizer.eos if tokenizer.sep is None else tokenizer.sep
        return Frame((tokenizer.bos,), (between,), (tokenizer.eos if tokenizer.cls is None else tokenizer.cls,))
    declared = getattr(tokenizer, "find_pair_template", lambda: None)()
    if declared is not None and not example_format.ends_in_cls:
        return Frame(*declared)
    if tokenizer.cls is None or tokenizer.sep is None:
        raise UsageError(
            "the tokenizer has no tokens such as [CLS] and [SEP] to put around a text: start from a model whose "
            "tokenizer has them"
        )
    if example_format.ends_in_cls:
        return Frame((), (tokenizer.sep,), (tokenizer.sep, tokenizer.cls))
    return Frame((tokenizer.cls,), (tokenizer.sep,), (tokenizer.sep,))


def truncate_longest(first: Tokens, second: Tokens | None, room: int) -> tuple[Tokens, Tokens | None]:
    """Cut the ends of texts to `room` tokens together, the longer one first (transformers' longest_first).

    Of two equally long ones, the second may keep a token more.
    """
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
    if len(first) > len(second):
        return first[:keep_longer], second[:keep_shorter]
    return first[:keep_shorter], second[:keep_longer]


@dataclass(frozen=True)
class EncodedExample:
    """One example: tokens [T] with special tokens, the UTF-8 bytes of its texts, and the objective's annotation.

    annotation: `at`, the indices of the tokens that carry labels; `labels`; `second`, the index where the second text
    begins. side_lengths: for an encoder-decoder, the tokens of encoder and decoder, which follow one another in
    `tokens`.
    """

    tokens: NDArray[np.int64]
    text_bytes: int
    annotation: dict[str, Any]
    side_lengths: tuple[int, int] | None = None


def require_tokens(place: str, column: str, tokens: Tokens) -> None:
    """Raise UsageError for a text of which the tokenizer leaves nothing, such as invisible characters."""
    if not len(tokens):
        raise UsageError(f"{place}: column {column!r} makes no token: give a text, or take the row out")


def make_example(framed: FramedTokens, text_bytes: int, positions: list[int], labels: list[Any]) -> EncodedExample:
    """Return an example of one sequence, of which the tokens at `positions` carry the labels."""
    second = {} if framed.second is None else {"second": framed.second}
    return EncodedExample(framed.tokens, text_bytes, {"at": positions, "labels": labels, **second})


def join_sequences(sequences: Sequence[FramedTokens], cls_index: int, label: Any, text_bytes: int) -> EncodedExample:
    """Return one example of several sequences in a row. Each sequence's `cls_index` token carries a score."""
    lengths = [len(framed.tokens) for framed in sequences]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    annotation = {
        "at": [start + cls_index % n for start, n in zip(starts, lengths, strict=True)],
        "labels": [label],
        "starts": starts,
        "second": [
            start + (n if framed.second is None else framed.second)
            for framed, start, n in zip(sequences, starts, lengths, strict=True)
        ],
    }
    return EncodedExample(np.concatenate([framed.tokens for framed in sequences]), text_bytes, annotation)
