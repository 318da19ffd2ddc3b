"""The `[data]` section: which corpora are read, and in what order."""

from typing import Any, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from megatfm.config.images import ImagesConfig
from megatfm.config.section import MAX_LENGTH, PathStr, Section, find_nearest_divisor


class MixtureSource(Section):
    """One corpus of a mixture."""

    path: PathStr
    """Folder or URL of the corpus."""
    weight: NonNegativeFloat
    """Weight; the corpus's share of the rows is this over the sum of all weights. 0: not read, until
    data.mixture_schedule gives it a weight."""
    quarantine: list[str] = Field(default_factory=list)
    """Samples that become padding, as in `data.quarantine`."""


class MixtureChange(Section):
    """New weights from a number of tokens on."""

    tokens: PositiveInt
    """Tokens of the run, with padding, after which the weights apply."""
    weights: dict[str, NonNegativeFloat]
    """Weight of every source; 0: not read."""


class RampupStage(Section):
    """Steps at the start of a run with fewer or shorter rows."""

    steps: PositiveInt
    """Number of steps."""
    global_batch: PositiveInt | None = None
    """Rows of full length in each step; left out: train.global_batch."""
    sequence_length: PositiveInt | None = None
    """Length of rows, a divisor of data.sequence_length. Rows are cut, so a step has as many tokens."""


class DataConfig(Section):
    """Corpora of `megatfm prep`, and the order in which their text is read."""

    train: PathStr | None = Field(default=None, examples=["corpora/quickstart/train"])
    """Folder or URL of the training corpus (shards and manifest.json). "": none, for a mixture."""
    mixture: dict[str, MixtureSource] = Field(default_factory=dict)
    """Training corpora by name, e.g. `[data.mixture.web]` with `path = "corpora/web"` and `weight = 0.7`."""
    mixture_schedule: list[MixtureChange] = Field(default_factory=list)
    """New weights of the mixture, in the order of their tokens."""
    mixture_block_rows: PositiveInt = Field(default=1024, le=2**20)
    """Rows of a stream within which the mixture's weights hold exactly, to one row."""
    validation: dict[str, PathStr] = Field(default_factory=dict)
    """Named validation corpora, e.g. `validation.code = "corpora/code/validation"`."""
    tokenizer: PathStr | None = Field(default=None, examples=["corpora/quickstart/tokenizer.model"])
    """The tokenizer of the corpora (checked by its hash): its file, or a folder with it. Left out only if the objective
    reads no text."""
    sequence_length: PositiveInt = Field(examples=[512], le=MAX_LENGTH)
    """Tokens of a packed row; in an encoder-decoder, of the encoder's."""
    target_length: PositiveInt | None = Field(default=None, examples=[128], le=MAX_LENGTH)
    """Tokens of a packed row of an encoder-decoder's decoder."""
    shuffle: bool = True
    """Read in shuffled order, a new one each epoch; false: in stored order."""
    read_streams: PositiveInt | None = Field(default=None, examples=[64], le=MAX_LENGTH)
    """Number of streams, parts of the corpus that are read in turn; part of the order, so fixed for a run. Left out:
    from train.global_batch, so that no two ranks read the same text."""
    attend_across_documents: bool = False
    """Let packed documents see the ones before them in their row; positions then count through the row."""
    rampup: list[RampupStage] = Field(default_factory=list)
    """Stages at the start of the run, e.g. `[{ steps = 100, global_batch = 8, sequence_length = 128 }]`."""
    quarantine: list[str] = Field(default_factory=list, examples=[["17", "120-153"]])
    """Indices or ranges of damaged samples of `data.train`, which become padding; all others keep their order."""
    images: ImagesConfig = ImagesConfig()
    """Size and transforms of images, for objectives that read them."""
    workers: NonNegativeInt = 0
    """Worker processes of each rank that read and pack ahead. 0: threads of the rank."""
    cache_dir: PathStr | None = None
    """Folder for shards from URLs and indexes, shared by a machine's ranks; left out, `~/.cache/megatfm/shards`."""
    cache_bytes: PositiveInt = 2**36
    """Size above which the least recently read data is dropped. It should hold a shard for each stream."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_train(cls, values: Any) -> Any:
        """Drop train = "", which replaces a preset's corpus by a mixture."""
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
            raise ValueError("quarantine: in a mixture this is a key of the source, data.mixture.NAME.quarantine")
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
            raise ValueError(f"mixture_schedule: tokens = {tokens}: each change comes after the one before it")
        return self

    @model_validator(mode="after")
    def _check_rampup(self) -> Self:
        for number, stage in enumerate(self.rampup):
            if stage.sequence_length and self.sequence_length % stage.sequence_length:
                raise ValueError(
                    f"rampup[{number}].sequence_length = {stage.sequence_length} does not divide data.sequence_length "
                    f"= {self.sequence_length}: the nearest that does is "
                    f"{find_nearest_divisor(self.sequence_length, stage.sequence_length)}"
                )
        return self
