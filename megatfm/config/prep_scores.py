"""Steps of `megatfm prep` that score documents by a model."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

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
