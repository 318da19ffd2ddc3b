"""The `[task]` section: labelled files of a downstream task, and how their rows become examples."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from megatfm.config.section import PathStr, Section

METRICS = {
    "classification": ("accuracy", "f1", "f1_macro", "matthews"),
    "multilabel": ("f1_micro", "f1_macro", "exact_match"),
    "regression": ("pearson", "spearman", "r2"),
    "tagging": ("span_f1", "accuracy", "f1_macro"),
    "generation": ("loss",),
    "chat": ("loss",),
    "preference": ("loss", "reward_accuracy", "reward_margin"),
}
"""Metrics that a form is measured by, where more is better but for the loss; the first is its usual one."""


class TaskConfig(Section):
    """A downstream task for `megatfm finetune`: files with labels, and what their columns mean."""

    form: Literal[
        "classification", "multilabel", "regression", "tagging", "generation", "chat", "preference"
    ] = "classification"
    """classification: one class for each text, or pair of texts. multilabel: any number of classes. regression: a
    number. tagging: a class for each word. generation: a text as the answer. chat: conversations, whose answers are
    trained. preference: two answers to a prompt, one of them the better (DPO)."""
    train: PathStr = Field(examples=["reviews.train.csv"])
    """File with the training examples: .csv, .tsv, .jsonl or .parquet, or a Hugging Face dataset's folder."""
    validation: PathStr | None = Field(default=None, examples=["reviews.validation.csv"])
    """File on which checkpoints are compared."""
    test: PathStr | None = None
    """File that is evaluated once, with the best checkpoint."""
    text: str = "text"
    """Column of the text; in tagging, of the list of words, or of a text that is cut at spaces."""
    text_pair: str | None = Field(default=None, examples=["hypothesis"])
    """Column of the second text, in tasks on pairs."""
    label: str = "label"
    """Column of the label; of several labels, a list, or a text with `;` between them (in tagging, spaces)."""
    labels: list[str] = Field(default_factory=list, examples=[["negative", "positive"]])
    """All labels, in the order of the classes; left out, those of the training file, sorted."""
    messages: str = "messages"
    """Column of the conversation in `chat`: a list of {role, content}."""
    prompt: str = "prompt"
    """Column of the prompt in `preference`: a text, or a list of messages."""
    chosen: str = "chosen"
    """Column of the better answer in `preference`: a text, or a list of messages that ends in it."""
    rejected: str = "rejected"
    """Column of the other answer."""
    chat_template: PathStr | None = None
    """Jinja file that renders conversations; left out, the tokenizer's own template."""
    prefix: str = Field(default="", examples=["translate English to German: "])
    """Words before each text in `generation`."""
    separator: str = "\n"
    """Words between text and answer in `generation`."""
    too_long: Literal["error", "truncate"] = "error"
    """What happens to a text that doesn't fit data.sequence_length: refuse the file, naming the row, or cut the longer
    text at its end; how many were cut is logged."""
    lm_weight: NonNegativeFloat = Field(default=0.0, examples=[0.5])
    """Weight of the loss of the next tokens besides, in decoders."""
    epochs: PositiveFloat | None = None
    """Passes over the training examples, from which train.steps follows; left out, train.steps decides, or 3 passes
    where the config has none."""
    metric: str | None = Field(default=None, examples=["f1_macro"])
    """Metric of the first validation set by which the best checkpoint is chosen; left out, the form's first."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if self.metric is not None and self.metric not in METRICS[self.form]:
            raise ValueError(
                f"metric = {self.metric!r}: form = {self.form!r} has {', '.join(METRICS[self.form])}: "
                "choose one of them"
            )
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels = {self.labels}: one is named twice: name each label once")
        if self.form == "regression" and self.labels:
            raise ValueError("labels: form = 'regression' predicts numbers: leave labels out")
        if self.form == "tagging" and self.text_pair:
            raise ValueError("text_pair: form = 'tagging' labels the words of one text: leave text_pair out")
        return self

    @property
    def best_by(self) -> str:
        """Metric by which the best checkpoint is chosen."""
        if self.metric is None and self.form == "tagging" and not self.has_spans:
            return "accuracy"
        return self.metric or METRICS[self.form][0]

    @property
    def has_head(self) -> bool:
        """Whether the task is done by a head of its own, not by the one over the vocabulary."""
        return self.form not in ("generation", "chat", "preference")

    @property
    def has_spans(self) -> bool:
        """Whether tags mark spans, as B-PER and I-PER do."""
        return "O" in self.labels and all(label == "O" or label[1:2] == "-" for label in self.labels)
