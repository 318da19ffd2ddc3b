"""Train tokenizers deterministically: byte-level BPE and WordPiece as tokenizer.json, and SentencePiece models."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers.base import ROLES, check_unicode, list_reserved_names
from megatfm.tokenizers.sentence_piece import encode_varint, read_varint

Pattern = Literal["gpt2", "llama3"]
# Pre-tokenization of Llama 3 and GPT-4: numbers in groups of up to three digits, line breaks with the spaces before.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MIN_FREQUENCY = 2  # occurrences that a pair needs to become a piece
CHARACTER_COVERAGE = 0.9999  # rarer characters get no piece; SentencePiece spells them in bytes
_NO_TEXT = "no text to train a tokenizer on: every document is empty"
CONTINUING_PREFIX = "##"
_WORDPIECE_NAMES = {usual[0]: usual[1] for role, usual in ROLES.items() if role not in ("bos", "eos")}


def train_byte_bpe(
    texts: Iterable[str], *, vocab_size: int, sentinels: int = 32, modes: bool = True, pattern: Pattern = "gpt2"
) -> bytes:
    """Train a lossless byte-level BPE (Radford et al. 2019, section 2.2); return the content of a `tokenizer.json`.

    The vocabulary has <s>, </s>, <pad>, <mask>, <cls>, <sep>, `sentinels` sentinels, UL2's mode tokens if `modes`, 256
    bytes and the learnt pieces. The same texts in the same order give the same bytes. Raises UsageError if the texts
    are too few for the vocabulary.
    """
    reserved = list_reserved_names(sentinels, modes)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    pre_tokenizer: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern == "gpt2"
    )
    if pattern == "llama3":
        pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), pre_tokenizer])
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        special_tokens=reserved,
        initial_alphabet=alphabet,
    )
    _train(tokenizer, trainer, texts, vocab_size, min_vocab_size=len(reserved) + len(alphabet))
    return tokenizer.to_str(pretty=True).encode()


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int, sentinels: int = 32, modes: bool = True, lowercase: bool = True
) -> bytes:
    """Train a WordPiece like BERT's (Devlin et al. 2019, section 3); return the content of a `tokenizer.json`.

    Words are split at white space and punctuation, and lose their accents if `lowercase`; white space is not kept. The
    vocabulary has [UNK], <s>, </s>, [PAD], [MASK], [CLS], [SEP], sentinels and modes as in `train_byte_bpe`, the
    characters and the learnt pieces. All texts are held in memory. The same texts in the same order give the same
    bytes. Raises UsageError if the texts are too few for the vocabulary.
    """
    reserved = ["[UNK]", *(_WORDPIECE_NAMES.get(name, name) for name in list_reserved_names(sentinels, modes))]
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with _report_invalid_unicode():
        normalized = [normalizer.normalize_str(text) for text in texts]
    alphabet = _choose_alphabet(normalized)
    # The trainer numbers continuing characters in an order that changes from run to run, and breaks ties between pairs
    # by these numbers. Special tokens have a fixed order.
    inner_characters = [
        character
        for character in alphabet
        if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str("a" + character))) == 1
    ]
    continuations = [CONTINUING_PREFIX + character for character in inner_characters]
    trained_tokenizer = Tokenizer(models.WordPiece(unk_token=reserved[0], continuing_subword_prefix=CONTINUING_PREFIX))
    trained_tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        special_tokens=[*reserved, *continuations],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUING_PREFIX,
    )
    min_vocab_size = len(reserved) + len(continuations) + len(alphabet)
    _train(trained_tokenizer, trainer, normalized, vocab_size, min_vocab_size)
    vocabulary = trained_tokenizer.get_vocab(with_added_tokens=True)
    tokenizer = Tokenizer(
        models.WordPiece(vocab=vocabulary, unk_token=reserved[0], continuing_subword_prefix=CONTINUING_PREFIX)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUING_PREFIX)
    tokenizer.add_special_tokens(reserved)
    return tokenizer.to_str(pretty=True).encode()


def _train(
    tokenizer: Tokenizer, trainer: trainers.Trainer, texts: Iterable[str], vocab_size: int, min_vocab_size: int
) -> None:
    if vocab_size < min_vocab_size:
        raise _make_too_small_error(vocab_size, min_vocab_size)
    has_text = Counter[bool]()
    with _report_invalid_unicode():
        tokenizer.train_from_iterator(_count_texts(texts, has_text), trainer)
    if not has_text[True]:
        raise UsageError(_NO_TEXT)
    if (max_vocab_size := tokenizer.get_vocab_size()) < vocab_size:
        raise _make_too_large_error(vocab_size, max_vocab_size)


def _make_too_small_error(vocab_size: int, minimum: int) -> UsageError:
    return UsageError(
        f"tokenizer.vocab_size = {vocab_size}: too small for the characters of this text: set "
        f"tokenizer.vocab_size={minimum} or more"
    )


def _make_too_large_error(vocab_size: int, maximum: int) -> UsageError:
    return UsageError(
        f"tokenizer.vocab_size = {vocab_size}: too large for this little text, which gives at most {maximum} pieces: "
        f"set tokenizer.vocab_size={maximum} or less, or add text"
    )


@contextmanager
def _report_invalid_unicode() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise MegatfmError(
            f"can't train on text: {error.reason} at character {error.start}: it is not Unicode"
        ) from None


def _count_texts(texts: Iterable[str], has_text: Counter[bool]) -> Iterator[str]:
    """Yield the texts, and count those with and without text in `has_text`."""
    for text in texts:
        has_text[bool(text.strip())] += 1
        yield text


def _choose_alphabet(texts: list[str]) -> list[str]:
    """Return the characters that cover CHARACTER_COVERAGE of the texts, without white space, by code point."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    for space in [character for character in counts if character.isspace()]:
        del counts[space]
    n_to_cover = CHARACTER_COVERAGE * counts.total()
    characters = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if n_to_cover <= 0:
            break
        characters.append(character)
        n_to_cover -= count
    return sorted(characters)


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
        "sentence_iterator": _record_errors((text.translate(_TEXT_TO_MARKS) for text in texts), failures),
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
            character_coverage=CHARACTER_COVERAGE,
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
    if match := _TOO_LARGE.search(message):
        return _make_too_large_error(vocab_size, int(match[1]))
    if match := _TOO_SMALL.search(message):
        return _make_too_small_error(vocab_size, int(match[1]))
    if "sentences_.empty()" in message:
        return UsageError(_NO_TEXT)
    return MegatfmError(f"SentencePiece could not train a tokenizer: {' '.join(message.split())}")
