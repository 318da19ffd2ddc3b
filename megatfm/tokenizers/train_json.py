"""Train a tokenizer.json: byte-level BPE or WordPiece, deterministic and silent."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers.special import ROLES, reserved_names

Pattern = Literal["gpt2", "llama3"]
# Llama 3's and GPT-4's way to cut words: numbers into groups of three digits, breaks with the spaces before them.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MIN_FREQUENCY = 2  # what stands in the text only once makes no piece
CHARACTER_COVERAGE = 0.9999  # rarer characters get no piece, as in our SentencePiece models
CONTINUING_PREFIX = "##"
_WORDPIECE_NAMES = {usual[0]: usual[1] for role, usual in ROLES.items() if role not in ("bos", "eos")}


def train_byte_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    sentinels: int = 32,
    modes: bool = True,
    pattern: Pattern = "gpt2",
) -> bytes:
    """A lossless byte-level BPE (Radford et al. 2019, section 2.2): the bytes of a `tokenizer.json`.

    The vocabulary holds <s>, </s>, <pad>, <mask>, <cls>, <sep>, `sentinels` sentinels, UL2's mode tokens if `modes`,
    256 bytes and the pieces learnt. The same texts in the same order give the same bytes. Raises UsageError if the
    texts are too few for the vocabulary.
    """
    reserved = reserved_names(sentinels, modes)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    pre_tokenizer: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern == "gpt2"
    )
    if pattern == "llama3":
        pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), pre_tokenizer]
        )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        special_tokens=reserved,
        initial_alphabet=alphabet,
    )
    _train(tokenizer, trainer, texts, vocab_size, least=len(reserved) + len(alphabet))
    return tokenizer.to_str(pretty=True).encode()


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int, sentinels: int = 32, modes: bool = True, lowercase: bool = True
) -> bytes:
    """A WordPiece as BERT's (Devlin et al. 2019, section 3): the bytes of a `tokenizer.json`.

    Words are cut at white space and punctuation, without accents if `lowercase`; white space is not kept. The
    vocabulary holds [UNK], <s>, </s>, [PAD], [MASK], [CLS], [SEP], sentinels and modes as `train_byte_bpe`, the
    characters and the pieces learnt. The texts are held in memory. The same texts in the same order give the same
    bytes. Raises UsageError if the texts are too few for the vocabulary.
    """
    reserved = ["[UNK]", *(_WORDPIECE_NAMES.get(name, name) for name in reserved_names(sentinels, modes))]
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with _unicode():
        normal = [normalizer.normalize_str(text) for text in texts]
    alphabet = _alphabet(normal)
    # The trainer would number the characters that continue a word as it meets them, in an order that changes from run
    # to run, and break ties between pairs by these numbers. Taken for special tokens they have an order of their own.
    inside = [
        each
        for each in alphabet
        if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str("a" + each))) == 1
    ]
    continuing = [CONTINUING_PREFIX + each for each in inside]
    learner = Tokenizer(models.WordPiece(unk_token=reserved[0], continuing_subword_prefix=CONTINUING_PREFIX))
    learner.pre_tokenizer = pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        special_tokens=[*reserved, *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUING_PREFIX,
    )
    least = len(reserved) + len(continuing) + len(alphabet)
    _train(learner, trainer, normal, vocab_size, least)
    vocabulary = learner.get_vocab(with_added_tokens=True)
    tokenizer = Tokenizer(
        models.WordPiece(vocab=vocabulary, unk_token=reserved[0], continuing_subword_prefix=CONTINUING_PREFIX)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUING_PREFIX)
    tokenizer.add_special_tokens(reserved)
    return tokenizer.to_str(pretty=True).encode()


def _train(
    tokenizer: Tokenizer, trainer: trainers.Trainer, texts: Iterable[str], vocab_size: int, least: int
) -> None:
    if vocab_size < least:
        raise UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too small for the characters of this text: set "
            f"tokenizer.vocab_size={least} or more"
        )
    seen = Counter[bool]()
    with _unicode():
        tokenizer.train_from_iterator(_counted(texts, seen), trainer)
    if not seen[True]:
        raise UsageError("no text to train a tokenizer on: every document is empty")
    most = tokenizer.get_vocab_size()
    if most < vocab_size:
        raise UsageError(
            f"tokenizer.vocab_size = {vocab_size}: too large for this little text, which gives at most {most} "
            f"pieces: set tokenizer.vocab_size={most} or less, or add text"
        )


@contextmanager
def _unicode() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise MegatfmError(
            f"can't train on text: {error.reason} at character {error.start}: it is not Unicode"
        ) from None


def _counted(texts: Iterable[str], seen: Counter[bool]) -> Iterator[str]:
    for text in texts:
        seen[bool(text.strip())] += 1
        yield text


def _alphabet(texts: list[str]) -> list[str]:
    """The characters that make up nearly all of the texts, without white space, in the order of their codes."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    for space in [each for each in counts if each.isspace()]:
        del counts[space]
    left = CHARACTER_COVERAGE * counts.total()
    kept = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if left <= 0:
            break
        kept.append(character)
        left -= count
    return sorted(kept)
