"""Train a SentencePiece model, BPE or unigram, deterministically."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import sentencepiece

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers.base import check_unicode, list_reserved_names
from megatfm.tokenizers.sentence_piece import encode_varint, read_varint

# No piece crosses these segments: line breaks with the indentation after them, a word or a run of punctuation with the
# space before it. Longer pieces give fewer tokens but are harder to predict; docs/LOG.md has the comparison. The model
# encodes unsegmented texts.
_SEGMENT = re.compile(r"\n[\n\t ]*| ?\w+| ?[^\w\s]+|\s+")
# The trainer separates segments by tabs, so no piece could contain one, and only all-space pieces may end in a space,
# so no piece could be a line break with its indentation. Both are therefore learnt as private-use characters, and
# restored in the pieces, where a space is U+2581.
_SPACE_MARK, _TAB_MARK = "\ue020", "\ue009"
_MARKS_TO_TEXT = str.maketrans({_SPACE_MARK: " ", _TAB_MARK: "\t"})
_MARKS_TO_PIECE = {_SPACE_MARK: "\u2581", _TAB_MARK: "\t"}
# In training, characters with a special meaning count as spaces: the marks, U+2581, and U+2585, SentencePiece's mark
# for unknown characters, for which it would silently skip the sentence.
_TEXT_TO_MARKS = str.maketrans(
    {" ": _SPACE_MARK, "\t": _TAB_MARK, "\u2581": _SPACE_MARK, "\u2585": _SPACE_MARK, _TAB_MARK: _SPACE_MARK}
)
# Longer sentences would be skipped; a text is one sentence.
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
    """Train a SentencePiece model of `vocab_size` pieces; return the content of a `tokenizer.model`.

    The vocabulary has <unk>, <s>, </s>, <pad>, <mask>, <cls>, <sep>, `sentinels` sentinels, UL2's mode tokens if
    `modes`, 256 bytes and the learnt pieces. The same texts in the same order give the same bytes. Raises UsageError if
    the texts are too few for the vocabulary.
    """
    model = io.BytesIO()
    failures: list[BaseException] = []
    model_options: dict[str, Any] = {
        "sentence_iterator": _record_errors(_iter_sentences(texts), failures),
        "pretokenizer": _split_segments,
        "allow_inconsistent_pretokenization": True,  # encoding needs no segments
    }
    if model_type == "unigram":
        # Unigram learns from distinct segments with their counts; docs/LOG.md has the comparison.
        model_options = {
            "sentence_iterator": _record_errors(_iter_counted_segments(texts), failures),
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
            control_symbols=list_reserved_names(sentinels, modes, without=("bos", "eos", "pad")),
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
            num_threads=1,  # stored in the model, so it must not depend on the machine
            minloglevel=2,
            **model_options,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise _explain_error(error, vocab_size) from error
    return _restore_spaces(model.getvalue())


def _restore_spaces(model: bytes) -> bytes:
    """Return the model with spaces and tabs instead of their marks in its pieces.

    A model is a protobuf message whose fields are all byte strings. Field 1, repeated, is a piece, whose first field,
    number 1, is its text.
    """
    restored, offset = bytearray(), 0
    while offset < len(model):
        tag = model[offset]
        size, payload_start = read_varint(model, offset + 1)
        offset = payload_start + size
        payload = model[payload_start:offset]
        if tag == _FIELD_1:
            text_size, text_start = read_varint(payload, 1)
            text = payload[text_start : text_start + text_size]
            for mark, piece_text in _MARKS_TO_PIECE.items():
                text = text.replace(mark.encode(), piece_text.encode())
            payload = bytes([_FIELD_1, *encode_varint(len(text)), *text, *payload[text_start + text_size :]])
        restored += bytes([tag, *encode_varint(len(payload))]) + payload
    return bytes(restored)


def _split_segments(sentence: str) -> list[str]:
    segments = _SEGMENT.findall(sentence.translate(_MARKS_TO_TEXT))
    return [segment.translate(_TEXT_TO_MARKS) for segment in segments]


def _iter_sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text.translate(_TEXT_TO_MARKS)


def _iter_counted_segments(texts: Iterable[str]) -> Iterator[str]:
    """Yield distinct segments with their counts, the most frequent first, as TSV lines."""
    counts = Counter[str]()
    for text in texts:
        counts.update(_SEGMENT.findall(text))
    for segment, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"{segment.translate(_TEXT_TO_MARKS)}\t{count}"


def _record_errors(sentences: Iterator[str], failures: list[BaseException]) -> Iterator[str]:
    """Yield the sentences, and append an error of the iterator, or of half a surrogate pair, to `failures`.

    SentencePiece replaces such errors by a RuntimeError, even KeyboardInterrupt.
    """
    try:
        for sentence in sentences:
            check_unicode([sentence])
            yield sentence
    except BaseException as error:
        failures.append(error)
        raise


def _explain_error(error: RuntimeError, vocab_size: int) -> MegatfmError:
    message = str(error)
    if max_match := _TOO_LARGE.search(message):
        return UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too large for this little text, which gives at most {max_match[1]} "
            f"pieces: set tokenizer.vocab_size={max_match[1]} or less, or add text"
        )
    if min_match := _TOO_SMALL.search(message):
        return UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too small for the characters of this text: set "
            f"tokenizer.vocab_size={min_match[1]} or more"
        )
    if "sentences_.empty()" in message:
        return UsageError("no text to train a tokenizer on: every document is empty")
    return MegatfmError(f"SentencePiece could not train a tokenizer: {' '.join(message.split())}")
