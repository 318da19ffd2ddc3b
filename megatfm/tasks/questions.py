"""Questions of an evaluation task: rows rendered as prompts and answers, after solved examples (shots)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from blake3 import blake3
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatfm import rng
from megatfm.config import EvaluationTaskConfig, load_section
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean
from megatfm.tasks.chat import TEMPLATE_ERRORS
from megatfm.tasks.files import Row, format_label, read_rows, require_columns
from megatfm.tokenizers import Tokenizer

NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Question:
    """A row of a task as a prompt and its answers. Its `repr` is part of the task's fingerprint.

    number: index of the row. choices: the answers to compare; a cloze has only the right one. right: index of the
    right choice. accepted: texts that count as right where a text is generated. unconditional: the prompt without the
    question, for accuracy_pmi.
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

    fingerprint: BLAKE3 of config and rows, in hexadecimal; results with the same one are comparable.
    """

    name: str
    config: EvaluationTaskConfig
    questions: Sequence[Question]
    fingerprint: str


def open_evaluation_task(path: str | Path, *, name: str | None = None, limit: int = 0) -> EvaluationTask:
    """Read a task's file and its rows. limit: number of questions to keep; 0: all.

    Raises UsageError that names the file, the row and the column.
    """
    if not Path(path).is_file():
        raise UsageError(f"{path}: there is no such file: give the TOML file of a task")
    name = name or Path(path).stem
    if not NAME.fullmatch(name):
        raise UsageError(f"task {name!r}: choose a name of letters, digits, '.', '_' and '-'")
    config = load_section(EvaluationTaskConfig, path)
    rows = read_rows(config.data)
    reader = QuestionReader(config.data, config)
    questions = reader.read(rows)
    content = blake3(config.model_dump_json(exclude={"data", "shots_from"}).encode())
    content.update(repr(questions).encode())
    return EvaluationTask(name, config, questions[: limit or None], content.hexdigest(8))


@dataclass(frozen=True)
class QuestionReader:
    """Renders the rows of a file as questions."""

    path: str
    config: EvaluationTaskConfig

    def read(self, rows: Sequence[Row]) -> list[Question]:
        """Return a question for each row. Raises UsageError that names the row."""
        config = self.config
        columns = {"answer": config.answer}
        if isinstance(config.choices, str):
            columns["choices"] = config.choices
        require_columns(self.path, rows, columns)
        questions = [self._make_question(number, row) for number, row in enumerate(rows)]
        if not config.shots:
            return questions
        examples, excludes_itself = questions, True
        if config.shots_from is not None:
            shot_rows = read_rows(config.shots_from)
            require_columns(config.shots_from, shot_rows, columns)
            reader = QuestionReader(config.shots_from, config)
            examples, excludes_itself = (
                [reader._make_question(number, row) for number, row in enumerate(shot_rows)],
                False,
            )
        n_examples = len(examples) - excludes_itself
        if n_examples < config.shots:
            raise UsageError(
                f"shots = {config.shots}: {config.shots_from or config.data} has {n_examples} other examples: choose "
                "fewer, or name a larger file in shots_from"
            )
        return [self._with_shots(question, examples, excludes_itself) for question in questions]

    def _with_shots(self, question: Question, examples: Sequence[Question], excludes_itself: bool) -> Question:
        """Put solved examples before a question, drawn by its number. excludes_itself: never draw the question."""
        config = self.config
        n_drawn = config.shots + excludes_itself
        order = rng.sample(n_drawn, len(examples), config.shots_seed, "shots", question.number)
        chosen = [number for number in order if not (excludes_itself and number == question.number)]
        solved = "".join(
            f"{shot.prompt}{shot.choices[shot.right] if shot.choices else config.delimiter + shot.accepted[0]}"
            f"{config.shots_separator}"
            for shot in (examples[number] for number in chosen[: config.shots])
        )
        return Question(**{**vars(question), "prompt": solved + question.prompt})

    def _make_question(self, number: int, row: Row) -> Question:
        config, place = self.config, f"{self.path}, row {number + 1}"
        prompt = self._render(config.prompt, place, row)
        if config.kind != "choice":
            accepted = self._read_accepted_texts(place, row)
            choices = (config.delimiter + accepted[0],) if config.kind == "cloze" else ()
            return Question(number, prompt, choices, accepted=accepted)
        if isinstance(config.choices, str):
            column = row.get(config.choices)
            if not isinstance(column, list) or not column:
                raise UsageError(f"{place}: column {config.choices!r} is {column!r:.40}: give a list of answers")
            texts = [format_label(text) for text in column]
        else:
            texts = [self._render(template, place, row) for template in config.choices]
        if len(texts) < 2:
            raise UsageError(f"{place}: has one answer: give two or more, or set kind = 'cloze'")
        if empty := [index for index, text in enumerate(texts) if not text.strip()]:
            raise UsageError(f"{place}: answer {empty[0]} is empty: give a text, or take the row out")
        unconditional = config.unconditional_prompt
        return Question(
            number,
            prompt,
            tuple(config.delimiter + text for text in texts),
            self._find_right_answer(place, row.get(config.answer), texts),
            unconditional=None if unconditional is None else self._render(unconditional, place, row),
        )

    def _find_right_answer(self, place: str, value: Any, texts: Sequence[str]) -> int:
        """Return the index of the right answer."""
        name, labels = "" if value is None else format_label(value), self.config.labels
        if labels:
            if name not in labels[: len(texts)]:
                answer_names = ", ".join(labels[: len(texts)])
                raise UsageError(
                    f"{place}: column {self.config.answer!r} is {name!r}{did_you_mean(name, labels)}; the row's "
                    f"answers are called {answer_names}: mend the row or labels"
                )
            return labels.index(name)
        if name in texts:
            return texts.index(name)
        if not name.isdecimal() or int(name) >= len(texts):
            raise UsageError(
                f"{place}: column {self.config.answer!r} is {name!r:.60}: give the text of one of the {len(texts)} "
                f"answers, or its number from 0 to {len(texts) - 1} (or name them in labels)"
            )
        return int(name)

    def _read_accepted_texts(self, place: str, row: Row) -> tuple[str, ...]:
        """Return the accepted texts."""
        value = row.get(self.config.answer)
        texts = [format_label(text) for text in (value if isinstance(value, list) else [value]) if text is not None]
        if not texts or not all(texts):
            raise UsageError(f"{place}: column {self.config.answer!r} is empty: give a text, or take the row out")
        return tuple(texts)

    def _render(self, template: str, place: str, row: Row) -> str:
        try:
            return _compile(template).render(row)
        except TEMPLATE_ERRORS as error:
            columns = ", ".join(map(str, row))
            raise UsageError(
                f"{place}: the template {template!r:.60} can't be filled in: {error}; there are: {columns}"
            ) from None


@cache
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string(template)


def count_answer_bytes(question: Question, delimiter: str) -> list[int]:
    """Return each answer's number of UTF-8 bytes, without the delimiter before it."""
    return [len(choice.removeprefix(delimiter).encode()) for choice in question.choices]


def parse_task_files(arguments: Sequence[str]) -> Mapping[str, str]:
    """Return name → task file from arguments `FILE` or `NAME=FILE`. Raises UsageError for a repeated name."""
    files: dict[str, str] = {}
    for argument in arguments:
        name, equals, path = argument.rpartition("=")
        name = name if equals else Path(path).stem
        if name in files:
            raise UsageError(
                f"--task {argument}: {name!r} is named already: give it another name, for example --task "
                f"{name}-2={path}"
            )
        files[name] = path
    return files


@dataclass(frozen=True)
class TextPair:
    """A prompt and an answer that continues it."""

    prompt: str
    answer: str


def split_pair(
    tokenizer: Tokenizer, pair: TextPair, encode: Callable[[str], list[int]] | None = None
) -> tuple[str, list[int]]:
    """Return the prompt without its trailing spaces, which move to the answer, and the answer's tokens (maybe none).

    Both are tokenized as one text and cut where the prompt's tokens end, as in lm-evaluation-harness. If a token spans
    the cut, the answer is tokenized alone. encode: text → tokens; None: `tokenizer.encode`.
    """
    encode = encode or (lambda text: tokenizer.encode(text).tolist())
    prompt = pair.prompt.rstrip()
    answer = pair.prompt[len(prompt) :] + pair.answer
    joint_tokens, prompt_tokens = encode(prompt + answer), encode(prompt)
    if joint_tokens[: len(prompt_tokens)] == prompt_tokens and len(joint_tokens) > len(prompt_tokens):
        return prompt, joint_tokens[len(prompt_tokens) :]
    return prompt, encode(answer)


def list_scored_pairs(task: EvaluationTask) -> list[TextPair]:
    """Return the distinct pairs whose likelihood a task needs: answers after prompts and unconditional prompts."""
    return list(dict.fromkeys(pair for question in task.questions for pair in list_question_pairs(question)))


def list_question_pairs(question: Question) -> list[TextPair]:
    """Return a question's choices after its prompt, then after its unconditional prompt if it has one."""
    prompts = [question.prompt] + ([] if question.unconditional is None else [question.unconditional])
    return [TextPair(prompt, answer) for prompt in prompts for answer in question.choices]
