"""A task on which a model is evaluated without training: a file of its own, for `megatfm evaluate RUN --task FILE`."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatfm.config.section import PathStr, Section


class EvaluationTaskConfig(Section):
    """Rows of a file, the prompt that is made of each, and what is asked of the model."""

    kind: Literal["choice", "cloze", "generation", "retrieval"] = "choice"
    """choice: which of several answers is the likeliest. cloze: whether the model's likeliest tokens are the answer's.
    generation: whether the text that the model makes is an answer. retrieval: whether the vector of the answer, of all
    answers of the file, is the nearest to that of the prompt."""
    data: PathStr = Field(examples=["questions.jsonl"])
    """File with a row for each question: .csv, .tsv, .jsonl or .parquet, or a Hugging Face dataset's folder."""
    prompt: str = Field(examples=["Question: {{ question }}\nAnswer:"])
    """Text before the answer: a Jinja template over the columns of a row."""
    choices: str | list[str] = Field(default_factory=list, examples=[["{{ a }}", "{{ b }}"], "options"])
    """Answers of `choice`: a template for each, or the name of a column that holds a list of them."""
    answer: str = "answer"
    """Column of the right answer: of `choice` its number from 0, its text or its name in `labels`; of the others its
    text, or a list of texts that are all right."""
    labels: list[str] = Field(default_factory=list, examples=[["A", "B", "C", "D"]])
    """Names that the column `answer` has for the choices, in their order."""
    delimiter: str = " "
    """Text between prompt and answer."""
    unconditional_prompt: str | None = Field(default=None, examples=["Answer:"])
    """A template without the question: then `choice` has accuracy_pmi, by log p(answer | prompt) − log p(answer | this
    prompt) (Brown et al. 2020, section 2.4)."""
    shots: NonNegativeInt = 0
    """Solved examples before each question, with their prompts and right answers."""
    shots_from: PathStr | None = Field(default=None, examples=["train.jsonl"])
    """File of those examples, with the columns of `data`; left out, the other rows of `data`."""
    shots_seed: NonNegativeInt = 0
    """Seed of their choice, which is another for each question and depends on nothing else."""
    shots_separator: str = "\n\n"
    """Text after each solved example."""
    max_tokens: PositiveInt = 64
    """Longest text that `generation` makes, in tokens."""
    stop: list[str] = Field(default_factory=lambda: ["\n"], examples=[["\n"]])
    """Texts at the first of which a generated text ends."""

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
