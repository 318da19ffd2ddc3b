"""Train a SentencePiece BPE model: lossless, deterministic and silent."""

import io
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers.tokenizer import CLASS, MASK, SENTINEL, SEPARATOR

# A line break opens a segment and doesn't close it: pieces may then hold a break, the indentation after it and
# the first word, and SentencePiece, which strips breaks at the end of a sentence, loses none. The bound keeps
# a text without breaks from becoming one giant sentence.
_SEGMENT = re.compile(r"\n{0,8}[^\n]{1,1024}|\n{1,8}")
# Sentences with SentencePiece's own mark for unknown characters would be skipped without a word.
_UNKNOWN_MARK = "\u2585"
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


def train_sentencepiece(texts: Iterable[str], *, vocab_size: int, sentinels: int = 32) -> bytes:
    """The BPE model (the bytes of a `tokenizer.model`) of `vocab_size` pieces for `texts`.

    The vocabulary holds <unk>, <s>, </s>, <pad>, <mask>, <cls>, <sep>, `sentinels` sentinels, 256 bytes and the
    pieces learnt. The same texts in the same order give the same bytes. Raises UsageError if the texts are too
    few for the vocabulary.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_segments(texts, failures),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            unk_surface="\ufffd",
            control_symbols=[MASK, CLASS, SEPARATOR, *(SENTINEL.format(n) for n in range(sentinels))],
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are spelled in bytes and take no piece
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_by_unicode_script=False,
            split_by_number=False,
            max_sentencepiece_length=32,
            max_sentence_length=1 << 16,
            num_threads=1,  # the number is written into the model, so it must not follow the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise _readable(error, vocab_size) from error
    return model.getvalue()


def _segments(texts: Iterable[str], failures: list[BaseException]) -> Iterator[str]:
    """The segments of all texts. SentencePiece turns what goes wrong here into a RuntimeError of its own, even a
    Ctrl-C, so the cause is kept in `failures`."""
    try:
        for text in texts:
            yield from _SEGMENT.findall(text.replace(_UNKNOWN_MARK, " "))
    except BaseException as error:
        failures.append(error)
        raise


def _readable(error: RuntimeError, vocab_size: int) -> MegatfmError:
    message = str(error)
    if most := _TOO_LARGE.search(message):
        return UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too large for this little text, which gives at most {most[1]} "
            f"pieces: set tokenizer.vocab_size={most[1]} or less, or add text"
        )
    if least := _TOO_SMALL.search(message):
        return UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too small for the characters of this text: set "
            f"tokenizer.vocab_size={least[1]} or more"
        )
    if "sentences_.empty()" in message:
        return UsageError("no text to train a tokenizer on: every document is empty")
    return MegatfmError(f"SentencePiece could not train a tokenizer: {' '.join(message.split())}")
