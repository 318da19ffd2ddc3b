"""Steps of `megatfm prep` that have a model say something of a document."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from megatfm.config.section import Fraction, PathStr, Section


class FastTextConfig(Section):
    """Keeps documents by the probability of a label under a fastText model (Joulin et al. 2016)."""

    name: Literal["fasttext"]
    file: PathStr = Field(examples=["quality.bin"])
    """The model, as fastText saves it."""
    label: str = Field(examples=["__label__hq"])
    """The label whose probability counts."""
    min_score: Fraction = 0.0
    """Drop a document whose label is less probable."""
    max_score: Fraction = 1.0
    """Drop a document whose label is more probable."""
    save_as: str | None = Field(None, examples=["quality"])
    """Keep the probability under this name, as a field of the document."""


class LinearConfig(Section):
    """Keeps documents by a linear classifier of your own: logistic regression over hashed runs of words."""

    name: Literal["linear_classifier"]
    file: PathStr = Field(examples=["quality.npz"])
    """Its weights, as `megatfm.data_prep.filters.classifiers.LinearClassifier` saves them: `.npz` or `.safetensors`
    with "weight" [2^k], "bias" [1] and "ngrams" [1]."""
    min_score: Fraction = 0.0
    """Drop a document that is less probable."""
    max_score: Fraction = 1.0
    """Drop a document that is more probable."""
    save_as: str | None = Field(None, examples=["quality"])
    """Keep the probability under this name, as a field of the document."""


class ClassifierConfig(Section):
    """Keeps documents by a transformer that classifies texts, in Hugging Face's format (Penedo et al. 2024)."""

    name: Literal["classifier"]
    folder: PathStr = Field(examples=["edu-classifier"])
    """The folder of the model and its tokenizer, on this machine; nothing is downloaded, and no code in it is run."""
    label: str | None = Field(None, examples=["LABEL_1"])
    """The label whose probability counts; left out for a model of one output, whose number counts as it is."""
    max_tokens: PositiveInt = 512
    """Length of the excerpt that is scored, from the document's beginning."""
    min_score: float | None = Field(None, examples=[3.0])
    """Drop a document that has less."""
    max_score: float | None = None
    """Drop a document that has more."""
    save_as: str | None = Field(None, examples=["quality"])
    """Keep the number under this name, as a field of the document."""
    device: str = "cpu"
    """Device of the model, for example "cuda"."""


class PerplexityConfig(Section):
    """Keeps documents by their perplexity under a causal model of yours (Wenzek et al. 2020, section 3.4)."""

    name: Literal["perplexity"]
    run: PathStr = Field(examples=["runs/small"])
    """A checkpoint, or a run directory, of which the newest counts."""
    max_tokens: PositiveInt = 1024
    """Length of the excerpt that is scored, from the document's beginning."""
    min_score: Annotated[float, Field(ge=1)] = 1.0
    """Drop a document whose perplexity of a token is lower, as that of boilerplate is."""
    max_score: Annotated[float, Field(gt=1)] | None = Field(None, examples=[1000.0])
    """Drop a document whose perplexity is higher."""
    save_as: str | None = Field(None, examples=["perplexity"])
    """Keep the perplexity under this name, as a field of the document."""
    device: str = "cpu"
    """Device of the model, for example "cuda"."""


class PresidioConfig(Section):
    """Replaces what the recognisers of Microsoft Presidio find by form and checksum: numbers of many countries' IDs,
    bank accounts, passports, … Those that need a language model (names of people) are not used."""

    name: Literal["presidio"]
    entities: tuple[str, ...] = Field(examples=[["US_SSN", "UK_NHS"]], min_length=1)
    """Entities to look for, by Presidio's names."""
    language: str = "en"
    """The language of its recognisers."""
    min_score: Fraction = 0.5
    """Leave what is less certain: a form that other numbers have, too, is certain only where a checksum fits."""
