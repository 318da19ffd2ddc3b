"""A task on which a model is evaluated without training: a file of its own, for `megatfm evaluate RUN --task FILE`."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatfm.config.section import PathStr, Section


class EvaluationTaskConfig(Section):
    """A file of questions, their prompts, and the kind of answer."""

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
    stop: list[str] = Field(default_factory=lambda: ["\n"], examples=[["\n"]])
    """Stop texts: a generated text ends before the first of them."""

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if self.kind == "choice" and not self.choices:
            raise ValueError(
                "choices is missing: kind = 'choice' needs a template for each answer, or the name of a column"
            )
        if self.kind != "choice" and self.choices:
            raise ValueError(
                f"choices: kind = {self.kind!r} has none: leave them out, or set kind = 'choice'"
            )
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
