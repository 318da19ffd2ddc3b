"""The `[data]` section: which corpora are read, and in what order."""

from typing import Any, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.images import ImagesConfig
from megatfm.config.section import MAX_LENGTH, PathStr, Section


class MixtureSource(Section):
    """One corpus of a mixture."""

    path: PathStr
    """Folder or URL of the corpus."""
    weight: PositiveFloat
    """Its share of the rows is its weight over the sum of all weights."""
    quarantine: list[str] = Field(default_factory=list)
    """Samples of it that become padding, as in `data.quarantine`."""


class MixtureChange(Section):
    """Other weights from a number of tokens on."""

    tokens: PositiveInt
    """Tokens that the run has seen, padding included, when they begin."""
    weights: dict[str, NonNegativeFloat]
    """Weight of every source; 0: it is not read."""


class WarmupStage(Section):
    """Steps at the start of a run that are smaller or shorter than the others."""

    steps: PositiveInt
    """Number of steps."""
    global_batch: PositiveInt | None = None
    """Rows of full length in each of them; left out: train.global_batch."""
    sequence_length: PositiveInt | None = None
    """Every row is cut into rows of this length, so that a step has as many tokens; it divides data.sequence_length."""


class DataConfig(Section):
    """Corpora made by `megatfm prep`, and the order in which their text is read."""

    train: PathStr | None = Field(default=None, examples=["corpora/quickstart/train"])
    """Folder or URL of the training corpus (shards and manifest.json). "": none, since there is a mixture."""
    mixture: dict[str, MixtureSource] = Field(default_factory=dict)
    """Training corpora by name, e.g. `[data.mixture.web]` with `path = "corpora/web"` and `weight = 0.7`."""
    mixture_schedule: list[MixtureChange] = Field(default_factory=list)
    """New weights of the mixture, in the order of their tokens."""
    mixture_block_rows: PositiveInt = Field(default=1024, le=2**20)
    """Rows of a stream in which the mixture's weights hold exactly, to one row."""
    validation: dict[str, PathStr] = Field(default_factory=dict)
    """Named validation corpora, e.g. `validation.code = "corpora/code/validation"`."""
    tokenizer: PathStr | None = Field(default=None, examples=["corpora/quickstart/tokenizer.model"])
    """The tokenizer that made the corpora (checked by its hash): its file, or a folder that holds it. Left out only
    where the objective reads no text."""
    sequence_length: PositiveInt = Field(examples=[512], le=MAX_LENGTH)
    """Tokens in one packed row; in an encoder-decoder, in one of the encoder's."""
    target_length: PositiveInt | None = Field(default=None, examples=[128], le=MAX_LENGTH)
    """Tokens in one packed row of an encoder-decoder's decoder."""
    shuffle: bool = True
    """Read in a shuffled order, another one each epoch; false reads in stored order."""
    read_streams: PositiveInt | None = Field(default=None, examples=[64], le=MAX_LENGTH)
    """Places of the corpus that are read in turn; part of the order, so fixed for a run. Left out: from
    train.global_batch, so that no two ranks read the same text."""
    attend_across_documents: bool = False
    """Let packed documents see the ones before them in their row; positions then run through."""
    rampup: list[WarmupStage] = Field(default_factory=list)
    """Stages at the start of the run, e.g. `[{ steps = 100, global_batch = 8, sequence_length = 128 }]`."""
    quarantine: list[str] = Field(default_factory=list, examples=[["17", "120-153"]])
    """Numbers or ranges of damaged samples of `data.train`, which become padding; all others keep their places."""
    images: ImagesConfig = ImagesConfig()
    """Size and transforms of images, for objectives that read them."""
    workers: NonNegativeInt = 0
    """Processes on each rank that read and pack ahead. 0: threads of the rank itself."""
    cache_dir: PathStr | None = None
    """Folder for shards from URLs and indexes, shared by a machine's ranks; left out, `~/.cache/megatfm/shards`."""
    cache_bytes: PositiveInt = 2**36
    """Size above which the least recently read data is dropped. It should hold a shard for each stream."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_train(cls, values: Any) -> Any:
        """A preset's corpus can't be removed in favour of a mixture."""
        if isinstance(values, dict) and values.get("train") == "" and values.get("mixture"):
            return {key: value for key, value in values.items() if key != "train"}
        return values

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.train is None) == (not self.mixture):
            raise ValueError(
                "train: give the training corpus as data.train, or several as data.mixture, and not both"
                if self.train
                else "train: field required; for example 'corpora/quickstart/train' (or several as data.mixture)"
            )
        if self.quarantine and self.mixture:
            raise ValueError(
                "quarantine: in a mixture this is a key of the source, data.mixture.NAME.quarantine"
            )
        if self.mixture_schedule and not self.mixture:
            raise ValueError("mixture_schedule: there is no data.mixture whose weights could change")
        for change in self.mixture_schedule:
            if change.weights.keys() != self.mixture.keys():
                raise ValueError(
                    f"mixture_schedule: weights for {', '.join(change.weights)}, but the mixture has "
                    f"{', '.join(self.mixture)}: give one for each (0: it is not read)"
                )
        tokens = [change.tokens for change in self.mixture_schedule]
        if sorted(set(tokens)) != tokens:
            raise ValueError(
                f"mixture_schedule: tokens = {tokens}: each change comes after the one before it"
            )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        for stage in self.rampup:
            if stage.sequence_length and self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"warmup: sequence_length = {stage.sequence_length} does not divide data.sequence_length = "
                    f"{self.sequence_length}: choose one that does"
                )
        return self
