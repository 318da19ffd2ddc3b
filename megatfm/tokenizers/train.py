"""Train a SentencePiece model, BPE or unigram: lossless, deterministic and silent."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import sentencepiece

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers.proto import as_varint, read_varint
from megatfm.tokenizers.special import reserved_names

# No piece is learnt across these: line breaks with the indentation after them, a word or a run of punctuation with
# the space before it. Longer pieces give fewer tokens but are harder to predict; docs/LOG.md has the comparison.
# The model itself encodes whole texts.
_SEGMENT = re.compile(r"\n[\n\t ]*| ?\w+| ?[^\w\s]+|\s+")
# The trainer separates segments by tabs, so no piece could hold one, and lets none but an all-space piece end in a
# space, so no piece could be a line break with its indentation. Both are therefore learnt as characters of private
# use, and put back into the pieces, where a space is U+2581; the model then spells all of them exactly.
_SPACE_MARK, _TAB_MARK = "\ue020", "\ue009"
_MARKS_TO_TEXT = str.maketrans({_SPACE_MARK: " ", _TAB_MARK: "\t"})
_MARKS_TO_PIECE = {_SPACE_MARK: "\u2581", _TAB_MARK: "\t"}
# For training alone, characters with a meaning of their own count as spaces: the marks, the space of pieces, and
# U+2585, SentencePiece's mark for unknown characters, for which it would skip the whole sentence without a word.
_TEXT_TO_MARKS = str.maketrans(
    {" ": _SPACE_MARK, "\t": _TAB_MARK, "\u2581": _SPACE_MARK, "\u2585": _SPACE_MARK, _TAB_MARK: _SPACE_MARK}
)
# Longer sentences would be skipped too; a text is one sentence.
_MAX_SENTENCE_BYTES = 2**30
_FIELD_1 = 0x0A  # protobuf's tag of field 1 as a byte string
_TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


def train_sentencepiece(
    texts: Iterable[str],
    *,
    vocab_size: int,
    sentinels: int = 32,
    modes: bool = False,
    model_type: Literal["bpe", "unigram"] = "bpe",
) -> bytes:
    """The model (the bytes of a `tokenizer.model`) of `vocab_size` pieces for `texts`.

    The vocabulary holds <unk>, <s>, </s>, <pad>, <mask>, <cls>, <sep>, `sentinels` sentinels, UL2's mode tokens if
    `modes`, 256 bytes and the pieces learnt. The same texts in the same order give the same bytes. Raises UsageError
    if the texts are too few for the vocabulary.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    model_options: dict[str, Any] = {
        "sentence_iterator": _record_errors(_sentences(texts), failures),
        "pretokenizer": _segments,
        "allow_inconsistent_pretokenization": True,  # pieces respect the segments, encoding needn't know them
    }
    if model_type == "unigram":
        # It learns from the segments themselves, each once with its count; docs/LOG.md has the comparison.
        model_options = {
            "sentence_iterator": _record_errors(_counted_segments(texts), failures),
            "input_format": "tsv",
        }
    try:
        sentencepiece.SentencePieceTrainer.train(
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            unk_surface="\ufffd",
            control_symbols=reserved_names(sentinels, modes, without=("bos", "eos", "pad")),
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are spelled in bytes and take no piece
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_by_whitespace=False,
            split_by_unicode_script=False,
            split_by_number=False,
            max_sentencepiece_length=32,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=1,  # the number is written into the model, so it must not follow the machine
            minloglevel=2,
            **model_options,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise _readable(error, vocab_size) from error
    return _with_spaces(model.getvalue())


def _with_spaces(model: bytes) -> bytes:
    """The model with spaces and tabs instead of their marks in its pieces.

    A model is a protobuf message whose fields are all byte strings; field 1, repeated, is a piece, whose own field 1
    is its text and stands first. So this needs no protobuf package, whose version would have to fit SentencePiece's.
    """
    changed, at = bytearray(), 0
    while at < len(model):
        tag = model[at]
        size, start = read_varint(model, at + 1)
        at = start + size
        payload = model[start:at]
        if tag == _FIELD_1:
            text_size, text_start = read_varint(payload, 1)
            text = payload[text_start : text_start + text_size]
            for mark, spelled in _MARKS_TO_PIECE.items():
                text = text.replace(mark.encode(), spelled.encode())
            payload = bytes([_FIELD_1, *as_varint(len(text)), *text, *payload[text_start + text_size :]])
        changed += bytes([tag, *as_varint(len(payload))]) + payload
    return bytes(changed)


def _segments(sentence: str) -> list[str]:
    segments = _SEGMENT.findall(sentence.translate(_MARKS_TO_TEXT))
    return [segment.translate(_TEXT_TO_MARKS) for segment in segments]


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text.translate(_TEXT_TO_MARKS)


def _counted_segments(texts: Iterable[str]) -> Iterator[str]:
    """Each segment with its count, the most frequent first."""
    counts = Counter[str]()
    for text in texts:
        counts.update(_SEGMENT.findall(text))
    for segment, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"{segment.translate(_TEXT_TO_MARKS)}\t{count}"


def _record_errors(sentences: Iterator[str], failures: list[BaseException]) -> Iterator[str]:
    """What to train on. SentencePiece turns what goes wrong here into a RuntimeError of its own, even a Ctrl-C,
    so the cause is kept in `failures`."""
    try:
        yield from sentences
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
