"""The steps of `megatfm prep` that a config asks for: `[[steps]]` see one document, `[[dedup]]` the corpus."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationInfo

from megatfm.config.prep_scores import (
    ClassifierConfig,
    FastTextConfig,
    LinearConfig,
    PerplexityConfig,
    PresidioConfig,
)
from megatfm.config.section import Fraction, PathStr, Section


class NormalizeConfig(Section):
    """Brings text into a Unicode normal form."""

    name: Literal["normalize"]
    form: Literal["NFC", "NFD", "NFKC", "NFKD"] = "NFC"
    """The form (Unicode Standard Annex 15). The K forms also fold ligatures, widths and superscripts."""


class HtmlConfig(Section):
    """Takes the text out of HTML; a document that has no tag in it is left as it is."""

    name: Literal["html"]
    main_content: bool = True
    """Only the main content: no navigation, footers, forms and advertisements."""


class LanguageConfig(Section):
    """Identifies each document's language, and keeps the listed ones."""

    name: Literal["language"]
    languages: tuple[str, ...] = Field((), examples=[["en", "de"]])
    """ISO 639-1 codes of the languages to keep; left out, all, only to be counted."""
    language_threshold: Fraction = 0.0
    """Drop a document whose language is less probable than this."""
    max_characters: PositiveInt = 1000
    """Length of the excerpt that is examined, taken at five places evenly over a document."""


class GopherQualityConfig(Section):
    """The quality rules of MassiveText (Rae et al. 2021, Gopher, appendix A.1.1), for English."""

    name: Literal["gopher_quality"]
    word_tokenizer: Literal["space", "spacy"] = "space"
    """Definition of a word: text between white space, or a token of spaCy's tokenizer of `language`, as in datatrove,
    the code of FineWeb."""
    language: str = "en"
    """The language of spaCy's tokenizer."""
    min_doc_words: NonNegativeInt = 50
    """Words in a document, at least; a word is what stands between white space."""
    max_doc_words: PositiveInt = 100_000
    """Words in a document, at most."""
    min_avg_word_length: float = 3.0
    """Characters in a word, on the average, at least."""
    max_avg_word_length: float = 10.0
    """Characters in a word, on the average, at most."""
    max_symbol_word_ratio: float = 0.1
    """Hash signs for a word, and ellipses for a word."""
    max_bullet_lines_ratio: Fraction = 0.9
    """Share of the lines that begin with a bullet."""
    max_ellipsis_lines_ratio: Fraction = 0.3
    """Share of the lines that end with an ellipsis."""
    min_alpha_words_ratio: Fraction = 0.8
    """Share of the words that have a letter."""
    min_stop_words: NonNegativeInt = 2
    """Number of `stop_words` that must occur."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Words that any text of the language has."""


class GopherRepetitionConfig(Section):
    """The repetition rules of MassiveText (Rae et al. 2021, Gopher, table A1)."""

    name: Literal["gopher_repetition"]
    word_tokenizer: Literal["space", "spacy"] = "space"
    """Definition of a word: text between white space, or a token of spaCy's tokenizer of `language`, as in datatrove,
    the code of FineWeb."""
    language: str = "en"
    """The language of spaCy's tokenizer."""
    dup_line_frac: Fraction = 0.3
    """Share of the lines, from which on repeated lines are too many."""
    dup_para_frac: Fraction = 0.3
    """Share of the paragraphs, from which on repeated paragraphs are too many; blank lines separate paragraphs."""
    dup_line_char_frac: Fraction = 0.2
    """Share of the characters that lie in repeated lines."""
    dup_para_char_frac: Fraction = 0.2
    """Share of the characters that lie in repeated paragraphs."""
    top_n_grams: tuple[Fraction, ...] = (0.2, 0.18, 0.16)
    """Share of the characters that lie in the most frequent run of 2, 3, 4 words."""
    dup_n_grams: tuple[Fraction, ...] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)
    """Share of the characters that lie in repeated runs of 5, 6, 7, 8, 9, 10 words."""


class C4Config(Section):
    """The rules of C4 (Raffel et al. 2020, section 2.2), line by line, but for its word list: see c4_badwords."""

    name: Literal["c4"]
    filter_no_terminal_punct: bool = True
    """Remove lines that don't end like a sentence."""
    min_words_per_line: NonNegativeInt = 5
    """Remove lines of fewer words."""
    max_word_length: PositiveInt = 1000
    """Remove lines with a longer word."""
    min_num_sentences: NonNegativeInt = 3
    """Drop documents that have fewer left."""
    filter_curly_bracket: bool = True
    """Drop documents that have one, as C4 does."""


class FineWebConfig(Section):
    """The rules that FineWeb adds to those of C4 and Gopher (Penedo et al. 2024, section 3.6)."""

    name: Literal["fineweb"]
    word_tokenizer: Literal["space", "spacy"] = "space"
    """Definition of a word: text between white space, or a token of spaCy's tokenizer of `language`, as in datatrove,
    the code of FineWeb."""
    language: str = "en"
    """The language of spaCy's tokenizer."""
    line_punct_thr: Fraction = 0.12
    """Share of the lines that must end with a punctuation mark."""
    char_duplicates_ratio: Fraction = 0.1
    """Share of the characters that lie in repeated lines; the code of datatrove has 0.01."""
    short_line_thr: Fraction = 0.67
    """Share of the lines that are short."""
    short_line_length: PositiveInt = 30
    """Characters up to which a line is short."""
    new_line_ratio: float = 0.3
    """Line breaks for a word; a list has many."""


class UrlFilterConfig(Section):
    """Drops documents by where they come from, as far as their format says so (a WARC file, a `url` field)."""

    name: Literal["url_filter"]
    file: PathStr = Field(examples=["blocked.txt"])
    """A domain (with all below it) or the beginning of a URL in each line; `#` begins a remark."""


class C4BadWordsConfig(Section):
    """Drops documents that hold a word of a list."""

    name: Literal["c4_badwords"]
    file: PathStr = Field(examples=["words.txt"])
    """A word or phrase in each line, in any case; found only between characters that are no part of a word."""
    whole_words: bool = True
    """Set it to false for languages that put no space between words."""


class PIIConfig(Section):
    """Replaces what may point to a person."""

    name: Literal["pii"]
    email: str = "<EMAIL>"
    """Replacement for an e-mail address; with an empty text they stay, here and below."""
    ip: str = "<IP>"
    """Replacement for a public IP address, v4 or v6."""
    phone: str = "<PHONE>"
    """Replacement for a telephone number: an international one (+44 …), one in the forms of North America, France or
    Britain, or any after a word such as `tel`."""
    ssn: str = "<SSN>"
    """Replacement for a social security number of the United States."""
    secret: str = "<SECRET>"
    """Replacement for a key or token: of AWS, Google, GitHub, GitLab, Slack, Stripe, OpenAI, OpenRouter, Anthropic,
    SendGrid, Hugging Face, npm, PyPI; a JSON Web Token; a block with a private key."""
    card: str = "<CARD>"
    """Replacement for the number of a payment card: known first digits, and a check digit (ISO 7812) that fits."""
    iban: str = "<IBAN>"
    """Replacement for a bank account: an IBAN of its country's length, whose check digits (ISO 13616) fit."""


class DecontaminateConfig(Section):
    """Drops documents that share a run of words with an evaluation set (Brown et al. 2020, appendix C)."""

    name: Literal["decontaminate"]
    files: tuple[PathStr, ...] = Field(examples=[["evaluation/questions.jsonl"]], min_length=1)
    """Files of the evaluation sets: `.jsonl` (every text in a record), also as `.gz` or `.zst`, or plain text."""
    n_grams: Annotated[int, Field(ge=2, le=100)] = 13
    """Words in a run, without case and punctuation."""
    min_words: PositiveInt = 8
    """An evaluation text shorter than `n_grams` is looked for as a whole if it has at least so many."""


class MetadataFilterConfig(Section):
    """Keeps documents by the value of a field: one of `read.metadata_keys`, "domain", or what an earlier step found."""

    name: Literal["metadata_filter"]
    field: Annotated[str, Field(min_length=1)]
    """The field; `a.b` is one that was kept under that name."""
    allowed: tuple[str | int | float | bool, ...] = ()
    """Values to keep; left out, all."""
    denied: tuple[str | int | float | bool, ...] = ()
    """Values to drop."""
    min: float | str | None = None
    """Drop documents below: numbers by their size, dates and other text by the alphabet."""
    max: float | str | None = None
    """Drop documents above."""
    missing: Literal["drop", "keep"] = "drop"
    """Handling of documents without the field."""


class SampleConfig(Section):
    """Keeps a fixed random part of the documents: the way to mix sources in given shares."""

    name: Literal["sample"]
    rate: Fraction = 1.0
    """The part to keep of what no pattern of `rate_by_path` fits."""
    rate_by_path: dict[str, Fraction] = Field({}, examples=[{"web/*": 0.2}])
    """Path patterns, below the corpus folder, and the part to keep of each; the first that fits counts."""
    seed: NonNegativeInt = 0
    """Another seed keeps other documents."""


class PluginStepConfig(Section):
    """A step of a plugin, with its own keys."""

    model_config = ConfigDict(extra="allow")

    name: str
    """The name under which the plugin registers it."""


KnownStep = (
    NormalizeConfig
    | HtmlConfig
    | LanguageConfig
    | GopherQualityConfig
    | GopherRepetitionConfig
    | C4Config
    | FineWebConfig
    | UrlFilterConfig
    | C4BadWordsConfig
    | PIIConfig
    | PresidioConfig
    | DecontaminateConfig
    | FastTextConfig
    | LinearConfig
    | ClassifierConfig
    | PerplexityConfig
    | MetadataFilterConfig
    | SampleConfig
)
_BY_NAME: dict[str, type[Section]] = {
    get_args(section.model_fields["name"].annotation)[0]: section for section in get_args(KnownStep)
}


def _by_its_name(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, Section):
        return value
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"a step needs a name: {', '.join(sorted(_BY_NAME))}, or one that a plugin registers"
        )
    return _BY_NAME.get(name, PluginStepConfig).model_validate(value, context=info.context)


StepConfig = Annotated[KnownStep | PluginStepConfig, BeforeValidator(_by_its_name)]


class RepeatedLinesConfig(Section):
    """Removes lines that an earlier document, or an earlier place of the same one, already had."""

    name: Literal["lines"]
    min_characters: NonNegativeInt = 20
    """Shorter lines stay, however often they come."""
    normalize: bool = True
    """Compare without case, digits, punctuation and space, as CCNet (Wenzek et al. 2020, section 3.1)."""


class RepeatedParagraphsConfig(Section):
    """Removes paragraphs (what stands between blank lines) that the corpus already had."""

    name: Literal["paragraphs"]
    min_characters: NonNegativeInt = 50
    """Shorter paragraphs stay, however often they come."""
    normalize: bool = True
    """Compare without case, digits, punctuation and space."""


class MinHashConfig(Section):
    """Keeps the first of documents that are nearly the same: MinHash and locality-sensitive hashing (Broder 1997)."""

    name: Literal["minhash"]
    similarity: Annotated[float, Field(ge=0.5, le=1.0)] = 0.75
    """Share of common shingles (Jaccard similarity, estimated by MinHash) from which two documents are near."""
    n_grams: PositiveInt = 5
    """Words in a shingle, an n-gram of words."""
    num_buckets: Annotated[int, Field(ge=1, le=64)] = 14
    """Bands of the signature; documents that agree in all hashes of a band are compared. 14 bands of 8 hashes are those
    of FineWeb: similarity 0.75 meets with probability 0.77, 0.8 with 0.92, 0.85 with 0.99."""
    hashes_per_bucket: PositiveInt = 8
    """Hashes in a band."""


class RepeatedSubstringsConfig(Section):
    """Removes runs of bytes that the corpus already had, as a suffix array finds them (Lee et al. 2022, section 4.1),
    by an index on disk that takes eight times the text."""

    name: Literal["exact_substrings"]
    min_bytes: Annotated[int, Field(ge=20)] = 200
    """Bytes from which on a run counts; 50 tokens of English are about 200."""


DedupConfig = Annotated[
    RepeatedLinesConfig | RepeatedParagraphsConfig | MinHashConfig | RepeatedSubstringsConfig,
    Field(discriminator="name"),
]


class TokensConfig(Section):
    """Format of files of token ids."""

    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """The type of the ids in files of format `tokens`, little-endian; Megatron's index files say it themselves."""
    eos_id: NonNegativeInt | None = None
    """The id after each document, which is left out: a shard knows where its documents end."""
