"""The `[task]` section: labelled files of a downstream task, and how their rows become examples."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from megatfm.config.section import PathStr, Section

METRICS = {
    "classification": ("accuracy", "f1", "f1_macro", "matthews"),
}
"""Metrics that a form is measured by; the first is its usual one."""


class TaskConfig(Section):
    """A downstream task for `megatfm finetune`: files with labels, and what their columns mean."""

    form: Literal["classification"] = "classification"
    """classification: one class for each text, or pair of texts."""
    train: PathStr = Field(examples=["reviews.train.csv"])
    """File with the training examples: .csv, .tsv, .jsonl or .parquet, or a Hugging Face dataset's folder."""
    validation: PathStr | None = Field(default=None, examples=["reviews.validation.csv"])
    """File on which checkpoints are compared."""
    test: PathStr | None = None
    """File that is evaluated once, with the best checkpoint."""
    text: str = "text"
    """Column of the text."""
    text_pair: str | None = Field(default=None, examples=["hypothesis"])
    """Column of the second text, in tasks on pairs."""
    label: str = "label"
    """Column of the label."""
    labels: list[str] = Field(default_factory=list, examples=[["negative", "positive"]])
    """All labels, in the order of the classes; left out, those of the training file, sorted."""
    too_long: Literal["error", "truncate"] = "error"
    """What happens to a text that doesn't fit data.sequence_length: refuse the file, naming the row, or cut the longer
    text at its end; how many were cut is logged."""
    epochs: PositiveFloat | None = None
    """Passes over the training examples, from which train.steps follows; left out, train.steps decides, or 3 passes
    where the config has none."""
    metric: str | None = Field(default=None, examples=["f1_macro"])
    """Metric of the first validation set by which the best checkpoint is chosen; left out, the form's first."""

    @model_validator(mode="after")
    def _known_metric(self) -> Self:
        if self.metric is not None and self.metric not in METRICS[self.form]:
            raise ValueError(
                f"metric = {self.metric!r}: form = {self.form!r} has {', '.join(METRICS[self.form])}: "
                "choose one of them"
            )
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels = {self.labels}: one is named twice: name each label once")
        return self

    @property
    def best_by(self) -> str:
        """Metric by which the best checkpoint is chosen."""
        return self.metric or METRICS[self.form][0]
