"""The steps of `megatfm prep`: `[[steps]]` on single documents, `[[dedup]]` on the corpus."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

from megatfm.config.parts import ByName, PartName
from megatfm.config.section import Fraction, PathStr, Section


class FastTextConfig(Section):
    """Keeps documents by the probability of a label under a fastText model (Joulin et al. 2016)."""

    name: Literal["fasttext"]
    file: PathStr = Field(examples=["quality.bin"])
    """The model in fastText's binary format."""
    label: str = Field(examples=["__label__hq"])
    """The label whose probability counts."""
    min_score: Fraction = 0.0
    """Drop a document whose label is less probable."""
    max_score: Fraction = 1.0
    """Drop a document whose label is more probable."""
    save_as: str | None = Field(None, examples=["quality"])
    """Keep the probability under this name, as a field of the document."""


class LinearConfig(Section):
    """Keeps documents by your own linear classifier: logistic regression over hashed n-grams of words."""

    name: Literal["linear_classifier"]
    file: PathStr = Field(examples=["quality.npz"])
    """The weights of a `megatfm.data_prep.filters.classifiers.LinearClassifier`: `.npz` or `.safetensors` with "weight"
    [2^k], "bias" [1] and "ngrams" [1]."""
    min_score: Fraction = 0.0
    """Drop a document with a lower probability."""
    max_score: Fraction = 1.0
    """Drop a document with a higher probability."""
    save_as: str | None = Field(None, examples=["quality"])
    """Keep the probability under this name, as a field of the document."""


class ClassifierConfig(Section):
    """Keeps documents by a transformer that classifies texts, in Hugging Face's format (Penedo et al. 2024)."""

    name: Literal["classifier"]
    folder: PathStr = Field(examples=["edu-classifier"])
    """Local folder of the model and its tokenizer; nothing is downloaded, and none of its code is run."""
    label: str | None = Field(None, examples=["LABEL_1"])
    """The label whose probability is the score; left out for a model of one output, which is the score."""
    max_tokens: PositiveInt = 512
    """Number of first tokens of a document that are scored."""
    min_score: float | None = Field(None, examples=[3.0])
    """Drop a document with a lower score."""
    max_score: float | None = None
    """Drop a document with a higher score."""
    save_as: str | None = Field(None, examples=["quality"])
    """Store the score under this name, as a field of the document."""
    device: str = "cpu"
    """Device of the model, for example "cuda"."""


class PerplexityConfig(Section):
    """Keeps documents by their perplexity under your own causal model (Wenzek et al. 2020, section 3.4)."""

    name: Literal["perplexity"]
    run: PathStr = Field(examples=["runs/small"])
    """A checkpoint, or a run directory, whose newest checkpoint is used."""
    max_tokens: PositiveInt = 1024
    """Number of first tokens of a document that are scored."""
    min_score: Annotated[float, Field(ge=1)] = 1.0
    """Drop a document whose perplexity per token is lower, such as boilerplate."""
    max_score: Annotated[float, Field(gt=1)] | None = Field(None, examples=[1000.0])
    """Drop a document whose perplexity is higher."""
    save_as: str | None = Field(None, examples=["perplexity"])
    """Keep the perplexity under this name, as a field of the document."""
    device: str = "cpu"
    """Device of the model, for example "cuda"."""


class PresidioConfig(Section):
    """Replaces matches of Microsoft Presidio's recognisers by form and checksum: numbers of many countries' IDs, bank
    accounts, passports, … Recognisers that need a language model (names of people) are not used."""

    name: Literal["presidio"]
    entities: tuple[str, ...] = Field(examples=[["US_SSN", "UK_NHS"]], min_length=1)
    """Entities to look for, by Presidio's names."""
    language: str = "en"
    """The language of its recognisers."""
    min_score: Fraction = 0.5
    """Leave matches with a lower score as they are.

    A form that other numbers share scores high only if a checksum fits.
    """


class NormalizeConfig(Section):
    """Converts text to a Unicode normal form."""

    name: Literal["normalize"]
    form: Literal["NFC", "NFD", "NFKC", "NFKD"] = "NFC"
    """The form (Unicode Standard Annex 15). The K forms also fold ligatures, widths and superscripts."""


class HtmlConfig(Section):
    """Extracts the text of HTML; a document without a tag is unchanged."""

    name: Literal["html"]
    main_content: bool = True
    """Keep the main content alone: no navigation, footers, forms and advertisements."""


class LanguageConfig(Section):
    """Identifies each document's language, and keeps the listed ones."""

    name: Literal["language"]
    languages: tuple[str, ...] = Field((), examples=[["en", "de"]])
    """ISO 639-1 codes of the languages to keep; left out, all, which are only counted."""
    language_threshold: Fraction = 0.0
    """Drop a document whose language has a lower probability."""
    max_characters: PositiveInt = 1000
    """Characters of the examined excerpt, from five evenly spaced positions of a document."""


class WordRulesSection(Section):
    """Keys of rules that count words."""

    name: str
    word_tokenizer: Literal["space", "spacy"] = "space"
    """Definition of a word: text between white space, or a token of spaCy's tokenizer of `language`, as in datatrove,
    the code of FineWeb."""
    language: str = "en"
    """The language of spaCy's tokenizer."""


class GopherQualityConfig(WordRulesSection):
    """The quality rules of MassiveText (Rae et al. 2021, Gopher, appendix A.1.1), for English."""

    name: Literal["gopher_quality"]
    min_doc_words: NonNegativeInt = 50
    """Minimal words of a document."""
    max_doc_words: PositiveInt = 100_000
    """Maximal words of a document."""
    min_avg_word_length: float = 3.0
    """Minimal mean characters of a word."""
    max_avg_word_length: float = 10.0
    """Maximal mean characters of a word."""
    max_symbol_word_ratio: float = 0.1
    """Maximal hash signs per word, and ellipses per word."""
    max_bullet_lines_ratio: Fraction = 0.9
    """Maximal share of the lines that begin with a bullet."""
    max_ellipsis_lines_ratio: Fraction = 0.3
    """Maximal share of the lines that end with an ellipsis."""
    min_alpha_words_ratio: Fraction = 0.8
    """Minimal share of the words with a letter."""
    min_stop_words: NonNegativeInt = 2
    """Minimal number of `stop_words` that occur."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Frequent words of the language."""


class GopherRepetitionConfig(WordRulesSection):
    """The repetition rules of MassiveText (Rae et al. 2021, Gopher, table A1)."""

    name: Literal["gopher_repetition"]
    dup_line_frac: Fraction = 0.3
    """Maximal share of the lines that are repeated."""
    dup_para_frac: Fraction = 0.3
    """Maximal share of the paragraphs, separated by blank lines, that are repeated."""
    dup_line_char_frac: Fraction = 0.2
    """Maximal share of the characters in repeated lines."""
    dup_para_char_frac: Fraction = 0.2
    """Maximal share of the characters in repeated paragraphs."""
    top_n_grams: tuple[Fraction, ...] = (0.2, 0.18, 0.16)
    """Maximal shares of the characters in the most frequent 2-, 3- and 4-gram of words."""
    dup_n_grams: tuple[Fraction, ...] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)
    """Maximal shares of the characters in repeated 5-, 6-, 7-, 8-, 9- and 10-grams of words."""


class C4Config(Section):
    """The rules of C4 (Raffel et al. 2020, section 2.2), except its word list: see c4_badwords."""

    name: Literal["c4"]
    filter_no_terminal_punct: bool = True
    """Remove lines that don't end like a sentence."""
    min_words_per_line: NonNegativeInt = 5
    """Remove lines with fewer words."""
    max_word_length: PositiveInt = 1000
    """Remove lines with a longer word, in characters."""
    min_num_sentences: NonNegativeInt = 3
    """Drop documents with fewer sentences left."""
    filter_curly_bracket: bool = True
    """Drop documents with a curly bracket."""


class FineWebConfig(WordRulesSection):
    """The rules that FineWeb adds to those of C4 and Gopher (Penedo et al. 2024, section 3.6)."""

    name: Literal["fineweb"]
    line_punct_thr: Fraction = 0.12
    """Minimal share of the lines that end with a punctuation mark."""
    char_duplicates_ratio: Fraction = 0.1
    """Maximal share of the characters in repeated lines; datatrove's code has 0.01."""
    short_line_thr: Fraction = 0.67
    """Maximal share of the lines that are short."""
    short_line_length: PositiveInt = 30
    """Maximal characters of a short line."""
    new_line_ratio: float = 0.3
    """Maximal line breaks per word; lists have many."""


class UrlFilterConfig(Section):
    """Drops documents by their URL, if their format has one (a WARC file, a `url` field)."""

    name: Literal["url_filter"]
    file: PathStr = Field(examples=["blocked.txt"])
    """File with a domain (with its subdomains) or a URL prefix in each line; `#` begins a comment."""


class C4BadWordsConfig(Section):
    """Drops documents that contain a word of a list."""

    name: Literal["c4_badwords"]
    file: PathStr = Field(examples=["words.txt"])
    """File with a word or phrase in each line, in any case."""
    whole_words: bool = True
    """Match complete words only; false for languages without spaces between words."""


class PIIConfig(Section):
    """Replaces personally identifiable information."""

    name: Literal["pii"]
    email: str = "<EMAIL>"
    """Replacement for an e-mail address. An empty text keeps it, here and below."""
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
    """Drops documents that share an n-gram of words with an evaluation set (Brown et al. 2020, appendix C)."""

    name: Literal["decontaminate"]
    files: tuple[PathStr, ...] = Field(examples=[["evaluation/questions.jsonl"]], min_length=1)
    """Files of the evaluation sets: `.jsonl` (every text in a record), also as `.gz` or `.zst`, or plain text."""
    n_grams: Annotated[int, Field(ge=2, le=100)] = 13
    """Words of an n-gram, compared without case and punctuation."""
    min_words: PositiveInt = 8
    """Minimal words of an evaluation text shorter than `n_grams`, which is searched in full."""


class MetadataFilterConfig(Section):
    """Keeps documents by the value of a field: one of `read.metadata_keys`, "domain", or an earlier step's."""

    name: Literal["metadata_filter"]
    field: Annotated[str, Field(min_length=1)]
    """The field; `a.b` is one that was stored under that name."""
    allowed: tuple[str | int | float | bool, ...] = ()
    """Values to keep; left out, all."""
    denied: tuple[str | int | float | bool, ...] = ()
    """Values to drop."""
    min: float | str | None = None
    """Drop documents with a lower value: numbers by size, dates and other texts by alphabetical order."""
    max: float | str | None = None
    """Drop documents with a higher value."""
    missing: Literal["drop", "keep"] = "drop"
    """Handling of documents without the field."""


class SampleConfig(Section):
    """Keeps a fixed random sample of the documents, for example to mix sources."""

    name: Literal["sample"]
    rate: Fraction = 1.0
    """Share to keep of documents that match no pattern of `rate_by_path`."""
    rate_by_path: dict[str, Fraction] = Field({}, examples=[{"web/*": 0.2}])
    """Pattern of paths below the corpus folder → share to keep; the first match counts."""
    seed: NonNegativeInt = 0
    """Seed of the sample."""


class PluginStepConfig(Section):
    """A step of a plugin, with its own keys."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, PartName("cleaning step")]
    """The name under which the plugin registers it."""


StepConfig = Annotated[
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
    | PluginStepConfig,
    ByName("a step"),
]


class RepeatedLinesConfig(Section):
    """Removes lines that occurred earlier in the corpus or the document."""

    name: Literal["lines"]
    min_characters: NonNegativeInt = 20
    """Shorter lines are kept, even if repeated."""
    normalize: bool = True
    """Compare without case, digits, punctuation and space, as CCNet (Wenzek et al. 2020, section 3.1)."""


class RepeatedParagraphsConfig(Section):
    """Removes paragraphs, separated by blank lines, that occurred earlier in the corpus."""

    name: Literal["paragraphs"]
    min_characters: NonNegativeInt = 50
    """Shorter paragraphs are kept, even if repeated."""
    normalize: bool = True
    """Compare without case, digits, punctuation and space."""


class MinHashConfig(Section):
    """Keeps the first of near-duplicate documents: MinHash and locality-sensitive hashing (Broder 1997)."""

    name: Literal["minhash"]
    similarity: Annotated[float, Field(ge=0.5, le=1.0)] = 0.75
    """Share of common shingles (Jaccard similarity, estimated by MinHash) from which two documents are near."""
    n_grams: PositiveInt = 5
    """Words in a shingle, an n-gram of words."""
    num_buckets: Annotated[int, Field(ge=1, le=64)] = 14
    """Bands of the signature; documents that agree in all hashes of a band are compared. FineWeb has 14 bands of 8
    hashes: documents of similarity 0.75 are compared with probability 0.77, 0.8 with 0.92, 0.85 with 0.99."""
    hashes_per_bucket: PositiveInt = 8
    """Hashes of a band."""


class RepeatedSubstringsConfig(Section):
    """Removes substrings that occurred earlier in the corpus, as by a suffix array (Lee et al. 2022, section 4.1); its
    index on disk takes eight times the text."""

    name: Literal["exact_substrings"]
    min_bytes: Annotated[int, Field(ge=20)] = 200
    """Minimal bytes of a substring; 50 tokens of English are about 200."""


DedupConfig = Annotated[
    RepeatedLinesConfig | RepeatedParagraphsConfig | MinHashConfig | RepeatedSubstringsConfig,
    Field(discriminator="name"),
]


class TokensConfig(Section):
    """Format of files of token ids."""

    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of the ids in files of format `tokens`, little-endian; Megatron's index files have their own."""
    eos_id: NonNegativeInt | None = None
    """Id after each document, which is not stored: shards record where documents end."""
