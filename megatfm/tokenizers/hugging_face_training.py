"""Train a tokenizer.json of the `tokenizers` library, byte-level BPE or WordPiece, deterministically."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers.base import ROLES, list_reserved_names

Pattern = Literal["gpt2", "llama3"]
# Pre-tokenization of Llama 3 and GPT-4: numbers in groups of up to three digits, line breaks with the spaces before.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MIN_FREQUENCY = 2  # occurrences that a pair needs to become a piece
CHARACTER_COVERAGE = 0.9999  # rarer characters get no piece, as in our SentencePiece models
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
        raise UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too small for the characters of this text: set "
            f"tokenizer.vocab_size={min_vocab_size} or more"
        )
    has_text = Counter[bool]()
    with _report_invalid_unicode():
        tokenizer.train_from_iterator(_count_texts(texts, has_text), trainer)
    if not has_text[True]:
        raise UsageError("no text to train a tokenizer on: every document is empty")
    max_vocab_size = tokenizer.get_vocab_size()
    if max_vocab_size < vocab_size:
        raise UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too large for this little text, which gives at most "
            f"{max_vocab_size} pieces: set tokenizer.vocab_size={max_vocab_size} or less, or add text"
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
