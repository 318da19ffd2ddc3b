"""Files of downstream tasks and the meaning of their columns: `[task]`, which trains, and `megatfm evaluate --task`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatfm.config.section import PathStr, Section

METRICS = {
    "classification": ("accuracy", "f1", "f1_macro", "matthews"),
    "multilabel": ("f1_micro", "f1_macro", "exact_match"),
    "regression": ("pearson", "spearman", "r2"),
    "tagging": ("span_f1", "accuracy", "f1_macro"),
    "span_extraction": ("f1", "exact_match"),
    "multiple_choice": ("accuracy",),
    "generation": ("loss",),
    "chat": ("loss",),
    "preference": ("loss", "reward_accuracy", "reward_margin"),
}
"""Form → its metrics, the default first. More is better, except of the loss."""

FORMS_OF_KEY = {
    "labels": ("classification", "multilabel", "tagging", "multiple_choice"),
    "class_weights": ("classification", "tagging"),
    "no_answer": ("span_extraction",),
    "text_metrics": ("generation",),
    "prefix": ("generation",),
    "chat_template": ("chat", "preference"),
}
"""Key → the forms that have it."""


class TaskConfig(Section):
    """A downstream task for `megatfm finetune`: files with labels, and the meaning of their columns."""

    form: Literal[
        "classification", "multilabel", "regression", "tagging", "span_extraction", "multiple_choice", "generation",
        "chat", "preference",
    ] = "classification"  # fmt: skip
    """classification: one class for each text, or pair of texts. multilabel: any number of classes. regression: a
    number. tagging: a class for each word. span_extraction: the span of a text that answers a question.
    multiple_choice: one of several texts. generation: a text as the answer. chat: conversations, whose answers are
    trained. preference: the better one of two answers to a prompt (DPO)."""
    train: PathStr = Field(examples=["reviews.train.csv"])
    """File with the training examples: .csv, .tsv, .jsonl or .parquet, or a Hugging Face dataset's folder."""
    validation: PathStr | None = Field(default=None, examples=["reviews.validation.csv"])
    """File on which checkpoints are compared."""
    test: PathStr | None = None
    """File that is evaluated once, with the best checkpoint."""
    text: str = "text"
    """Column of the text; in tagging, of the list of words, or of a text that is split at spaces; in span_extraction,
    of the question (left out, `question`)."""
    text_pair: str | None = Field(default=None, examples=["hypothesis"])
    """Column of the second text, in tasks on pairs; in span_extraction, of the text with the answer (left out,
    `context`); in multiple_choice, of a question, or of words that each choice continues."""
    label: str = "label"
    """Column of the label; several labels are a list, or a text with `;` between them (in tagging, spaces); in
    span_extraction, of the answers (left out, `answers`); in multiple_choice, of the right choice: its index from 0, or
    its name in task.labels."""
    choices: list[str] = Field(default_factory=list, examples=[["ending0", "ending1"]])
    """Columns of the choices in multiple_choice, or the column with a list of them."""
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
    """Text before each text in `generation`."""
    separator: str = "\n"
    """Text between text and answer in `generation`."""
    class_weights: Literal["balanced"] | list[PositiveFloat] = Field(
        default_factory=list, examples=["balanced", [1.0, 5.0]]
    )
    """Factor of the loss of each label's examples, in classification and tagging, in the order of the labels. balanced:
    inversely proportional to the label's share of the training file, so that all labels weigh the same."""
    too_long: Literal["error", "truncate"] = "error"
    """Treatment of a text that doesn't fit data.sequence_length: refuse the file, naming the row, or cut the longer
    text at its end; the number of cut texts is logged."""
    both_orders: bool = False
    """Read each pair in both orders, and add their vectors: for pairs without an order, as in GPT-1's similarity."""
    stride: PositiveInt = 128
    """Tokens from one window of a long text to the next, in span_extraction."""
    no_answer: bool = False
    """Whether some questions have no answer in their text (SQuAD 2.0), in span_extraction."""
    n_best: PositiveInt = 20
    """Number of likeliest first and last tokens of a window that are combined to answers, in span_extraction."""
    max_answer_tokens: PositiveInt = 30
    """Maximal tokens of a predicted answer, in span_extraction."""
    max_question_tokens: PositiveInt = 64
    """Maximal tokens of a question, in span_extraction; `too_long` decides about longer ones."""
    text_metrics: list[Literal["bleu", "chrf", "exact_match"]] = Field(default_factory=list, examples=[["bleu"]])
    """Metrics of answers that are generated after training, in generation."""
    beams: PositiveInt = 1
    """Beams of the search for these answers; 1: greedy."""
    length_penalty: NonNegativeFloat = 0.6
    """α of the beam search's length penalty (Wu et al. 2016)."""
    max_new_tokens: PositiveInt = 128
    """Maximal tokens of a generated answer."""
    lm_weight: NonNegativeFloat = Field(default=0.0, examples=[0.5])
    """Weight of an auxiliary next-token loss, in decoders."""
    epochs: PositiveFloat | None = None
    """Passes over the training examples, which set train.steps; left out, train.steps decides, or 3 passes if it is
    left out, too."""
    metric: str | None = Field(default=None, examples=["f1_macro"])
    """Metric of the first validation set by which the best checkpoint is chosen; left out, the form's first."""

    @model_validator(mode="before")
    @classmethod
    def _name_squad_columns(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("form") == "span_extraction":
            return {"text": "question", "text_pair": "context", "label": "answers", **values}
        return values

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.metric is not None and self.metric not in METRICS[self.form]:
            raise ValueError(
                f"metric = {self.metric!r}: form = {self.form!r} has {', '.join(METRICS[self.form])}: "
                "choose one of them"
            )
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels = {self.labels}: one is named twice: name each label once")
        if self.form == "tagging" and self.text_pair:
            raise ValueError("text_pair: form = 'tagging' labels the words of one text: leave text_pair out")
        if bool(self.choices) != (self.form == "multiple_choice"):
            raise ValueError(
                "choices: name the columns of the choices for form = 'multiple_choice', and for no other form"
            )
        if self.both_orders and (not self.text_pair or self.form not in ("classification", "multilabel", "regression")):
            raise ValueError("both_orders: is for pairs with a label: set text_pair, or leave both_orders out")
        for key, forms in FORMS_OF_KEY.items():
            if getattr(self, key) and self.form not in forms:
                forms_with_key = " or ".join(map(repr, forms))
                raise ValueError(f"{key}: is for form = {forms_with_key}, and this one is {self.form!r}: leave it out")
        return self

    @property
    def best_by(self) -> str:
        """Metric by which the best checkpoint is chosen."""
        if self.metric is None and self.form == "tagging" and not self.has_spans:
            return "accuracy"
        return self.metric or METRICS[self.form][0]

    @property
    def has_head(self) -> bool:
        """Whether the task has its own head, in place of the one over the vocabulary."""
        return self.form not in ("generation", "chat", "preference")

    @property
    def has_spans(self) -> bool:
        """Whether tags mark spans, as B-PER and I-PER do."""
        return "O" in self.labels and all(label == "O" or label[1:2] == "-" for label in self.labels)


class EvaluationTaskConfig(Section):
    """A task on which a model is evaluated without training: a file of questions, their prompts, the kind of answer."""

    kind: Literal["choice", "cloze", "generation", "retrieval"] = "choice"
    """choice: which of several answers is the likeliest. cloze: whether the model's likeliest tokens are the answer's.
    generation: whether the generated text is an answer. retrieval: whether the answer's vector is the nearest to the
    prompt's, of all answers of the file."""
    data: PathStr = Field(examples=["questions.jsonl"])
    """File with a row for each question: .csv, .tsv, .jsonl or .parquet, or a Hugging Face dataset's folder."""
    prompt: str = Field(examples=["Question: {{ question }}\nAnswer:"])
    """Text before the answer: a Jinja template over the columns of a row."""
    choices: str | list[str] = Field(default_factory=list, examples=[["{{ a }}", "{{ b }}"], "options"])
    """Answers of `choice`: a template for each, or the name of a column with a list of them."""
    answer: str = "answer"
    """Column of the right answer: in `choice` its index from 0, its text or its name in `labels`; in other kinds its
    text, or a list of accepted texts."""
    labels: list[str] = Field(default_factory=list, examples=[["A", "B", "C", "D"]])
    """Names of the choices in the column `answer`, in their order."""
    delimiter: str = " "
    """Text between prompt and answer."""
    unconditional_prompt: str | None = Field(default=None, examples=["Answer:"])
    """A prompt without the question, which adds accuracy_pmi to `choice`: by log p(answer | prompt) − log p(answer |
    this prompt) (Brown et al. 2020, section 2.4)."""
    shots: NonNegativeInt = 0
    """Solved examples before each question, with their prompts and right answers."""
    shots_from: PathStr | None = Field(default=None, examples=["train.jsonl"])
    """File of the solved examples, with the columns of `data`; left out, the other rows of `data`."""
    shots_seed: NonNegativeInt = 0
    """Seed of the solved examples, which are drawn for each question by its row alone."""
    shots_separator: str = "\n\n"
    """Text after each solved example."""
    max_tokens: PositiveInt = 64
    """Maximal tokens of a text in `generation`."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=lambda: ["\n"], examples=[["\n"]])
    """Stop texts: a generated text ends before the first of them."""

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.kind == "choice" and not self.choices:
            raise ValueError(
                "choices is missing: kind = 'choice' needs a template for each answer, or the name of a column"
            )
        if self.kind != "choice" and self.choices:
            raise ValueError(f"choices: kind = {self.kind!r} has none: leave them out, or set kind = 'choice'")
        if self.kind != "choice" and (self.labels or self.unconditional_prompt is not None):
            raise ValueError(
                f"labels, unconditional_prompt: are for kind = 'choice', not {self.kind!r}: leave them out"
            )
        if self.kind == "retrieval" and self.shots:
            raise ValueError("shots: kind = 'retrieval' compares vectors of single texts: leave shots out")
        if self.labels and isinstance(self.choices, list) and len(self.labels) != len(self.choices):
            raise ValueError(
                f"labels: {len(self.labels)} names for {len(self.choices)} choices: give one for each choice"
            )
        return self
