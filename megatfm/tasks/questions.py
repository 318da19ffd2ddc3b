"""Questions of an evaluation task: its rows as prompts, with answers, and with solved examples before them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from blake3 import blake3
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatfm import rng
from megatfm.config import EvaluationTaskConfig, load
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean
from megatfm.tasks.files import Row, read_rows, require_columns
from megatfm.tasks.forms import label_text

NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Question:
    """A row of a task: the prompt, with what stands before the answer, and the answers.

    choices: answers that are compared, or, of a cloze, the right one. right: the number of the right one.
    accepted: texts that count as right where a text is generated. unconditional: the prompt without the question.
    """

    number: int
    prompt: str
    choices: tuple[str, ...] = ()
    right: int = 0
    accepted: tuple[str, ...] = ()
    unconditional: str | None = None


@dataclass(frozen=True)
class EvaluationTask:
    """A task by its name, with its questions in the order of the file.

    fingerprint: BLAKE3 of the config and of all rows, so that results can be told to be of one task.
    """

    name: str
    config: EvaluationTaskConfig
    questions: Sequence[Question]
    fingerprint: str


def open_evaluation_task(path: str | Path, *, name: str | None = None, limit: int = 0) -> EvaluationTask:
    """Read a task's file and its rows. limit: only the first so many questions; 0: all.

    Raises UsageError that names the file, the row and the column.
    """
    if not Path(path).is_file():
        raise UsageError(f"{path}: there is no such file: give the TOML file of a task")
    name = name or Path(path).stem
    if not NAME.fullmatch(name):
        raise UsageError(f"task {name!r}: choose a name of letters, digits, '.', '_' and '-'")
    config = load(EvaluationTaskConfig, path)
    rows = read_rows(config.data)
    reader = QuestionReader(config.data, config)
    questions = reader.read(rows)
    content = blake3(config.model_dump_json(exclude={"data", "shots_from"}).encode())
    content.update(repr(questions).encode())
    return EvaluationTask(name, config, questions[: limit or None], content.hexdigest(8))


@dataclass(frozen=True)
class QuestionReader:
    """Renders the rows of a file."""

    path: str
    config: EvaluationTaskConfig

    def read(self, rows: Sequence[Row]) -> list[Question]:
        """Return a question for each row. Raises UsageError that names the row."""
        config = self.config
        columns = {"answer": config.answer}
        if isinstance(config.choices, str):
            columns["choices"] = config.choices
        require_columns(self.path, rows, columns)
        plain = [self._question(number, row) for number, row in enumerate(rows)]
        if not config.shots:
            return plain
        examples, among_rows = plain, True
        if config.shots_from is not None:
            stored = read_rows(config.shots_from)
            require_columns(config.shots_from, stored, columns)
            reader = QuestionReader(config.shots_from, config)
            examples, among_rows = [reader._question(number, row) for number, row in enumerate(stored)], False
        if len(examples) - among_rows < config.shots:
            raise UsageError(
                f"shots = {config.shots}: {config.shots_from or config.data} has {len(examples) - among_rows} other "
                "examples: choose fewer, or name a larger file in shots_from"
            )
        return [self._with_shots(question, examples, among_rows) for question in plain]

    def _with_shots(self, question: Question, examples: Sequence[Question], among_rows: bool) -> Question:
        """Put solved examples before a question, drawn for its number; never the question itself."""
        config = self.config
        order = rng.permutation(len(examples), config.shots_seed, "shots", question.number).tolist()
        chosen = [number for number in order if not (among_rows and number == question.number)]
        solved = "".join(
            f"{shot.prompt}{shot.choices[shot.right] if shot.choices else config.delimiter + shot.accepted[0]}"
            f"{config.shots_separator}"
            for shot in (examples[number] for number in chosen[: config.shots])
        )
        return Question(**{**vars(question), "prompt": solved + question.prompt})

    def _question(self, number: int, row: Row) -> Question:
        config = self.config
        prompt = self._render(config.prompt, number, row)
        if config.kind != "choice":
            accepted = self._texts(number, row)
            choices = (config.delimiter + accepted[0],) if config.kind == "cloze" else ()
            return Question(number, prompt, choices, accepted=accepted)
        if isinstance(config.choices, str):
            column = row.get(config.choices)
            if not isinstance(column, list) or not column:
                self._refuse(number, f"column {config.choices!r} is {column!r:.40}: give a list of answers")
            texts = [label_text(text) for text in column or ()]
        else:
            texts = [self._render(template, number, row) for template in config.choices]
        if len(texts) < 2:
            self._refuse(number, "has one answer: give two or more, or set kind = 'cloze'")
        if empty := [place for place, text in enumerate(texts) if not text.strip()]:
            self._refuse(number, f"answer {empty[0]} is empty: give a text, or take the row out")
        unconditional = config.unconditional_prompt
        return Question(
            number,
            prompt,
            tuple(config.delimiter + text for text in texts),
            self._right(number, row.get(config.answer), texts),
            unconditional=None if unconditional is None else self._render(unconditional, number, row),
        )

    def _right(self, number: int, value: Any, texts: Sequence[str]) -> int:
        """Return the number of the right answer."""
        name, labels = "" if value is None else label_text(value), self.config.labels
        if labels:
            if name not in labels[: len(texts)]:
                known = ", ".join(labels[: len(texts)])
                self._refuse(
                    number,
                    f"column {self.config.answer!r} is {name!r}{did_you_mean(name, labels)}; the row's answers are "
                    f"called {known}: mend the row or labels",
                )
            return labels.index(name)
        if name in texts:
            return texts.index(name)
        if not name.isdecimal() or int(name) >= len(texts):
            self._refuse(
                number,
                f"column {self.config.answer!r} is {name!r:.60}: give the text of one of the {len(texts)} answers, or "
                f"its number from 0 to {len(texts) - 1} (or name them in labels)",
            )
        return int(name)

    def _texts(self, number: int, row: Row) -> tuple[str, ...]:
        """Return the texts that count as right."""
        value = row.get(self.config.answer)
        texts = [
            label_text(text) for text in (value if isinstance(value, list) else [value]) if text is not None
        ]
        if not texts or not all(texts):
            self._refuse(number, f"column {self.config.answer!r} is empty: give a text, or take the row out")
        return tuple(texts)

    def _render(self, template: str, number: int, row: Row) -> str:
        try:
            return _compile(template).render(row)
        except jinja2.TemplateError as error:
            columns = ", ".join(map(str, row))
            self._refuse(
                number, f"the template {template!r:.60} can't be filled in: {error}; there are: {columns}"
            )
            raise AssertionError from error

    def _refuse(self, number: int, reason: str) -> None:
        raise UsageError(f"{self.path}, row {number + 1}: {reason}")


@cache
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string(template)


def answer_bytes(question: Question, delimiter: str) -> list[int]:
    """Return the UTF-8 bytes of each answer, without the delimiter before it."""
    return [len(choice.removeprefix(delimiter).encode()) for choice in question.choices]


def named_task_files(words: Sequence[str]) -> Mapping[str, str]:
    """Return task files by name, from words `FILE` or `NAME=FILE`. Raises UsageError for a name that comes twice."""
    files: dict[str, str] = {}
    for word in words:
        name, equals, path = word.rpartition("=")
        name = name if equals else Path(path).stem
        if name in files:
            raise UsageError(
                f"--task {word}: {name!r} is named already: give it another name, for example --task {name}-2={path}"
            )
        files[name] = path
    return files
