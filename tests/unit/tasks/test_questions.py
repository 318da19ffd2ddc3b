"""Rows of a task become prompts with answers; what can't is refused with file, row and column."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatfm.errors import UsageError
from megatfm.tasks.questions import named_task_files, open_evaluation_task

ROWS = [
    {"ask": f"Größe {number}?", "a": "ja", "b": "東京", "key": "AB"[number % 2], "all": ["x", "y z"]}
    for number in range(7)
]
CHOICE = (
    'data = "rows.jsonl"\nprompt = "Q: {{ ask }}\\nA:"\nchoices = ["{{ a }}", "{{ b }}"]\nanswer = "key"\n'
)
LABELS = 'labels = ["A", "B"]\n'


def write_rows(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "rows") -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(folder: Path, text: str) -> Path:
    path = folder / "task.toml"
    path.write_text(text)
    return path


def test_a_row_becomes_a_prompt_and_answers(tmp_path: Path) -> None:
    write_rows(tmp_path)
    task = open_evaluation_task(write_task(tmp_path, CHOICE + LABELS))
    assert task.name == "task"
    question = task.questions[3]
    assert (question.number, question.prompt) == (3, "Q: Größe 3?\nA:")
    assert (question.choices, question.right) == ((" ja", " 東京"), 1)
    assert len(open_evaluation_task(tmp_path / "task.toml", limit=2).questions) == 2


@pytest.mark.parametrize(("value", "right"), [("y z", 1), (1, 1), ("0", 0), ("x", 0)])
def test_the_right_answer_is_named_by_number_or_text(tmp_path: Path, value: Any, right: int) -> None:
    write_rows(tmp_path, [{**ROWS[0], "key": value}])
    config = CHOICE.replace('["{{ a }}", "{{ b }}"]', '"all"') + 'delimiter = ""\n'
    (question,) = open_evaluation_task(write_task(tmp_path, config)).questions
    assert (question.choices, question.right) == (("x", "y z"), right)


def test_of_a_cloze_the_answer_follows_and_of_generation_all_are_accepted(tmp_path: Path) -> None:
    write_rows(tmp_path)
    config = 'data = "rows.jsonl"\nprompt = "{{ ask }}"\nanswer = "all"\n'
    cloze, *_ = open_evaluation_task(write_task(tmp_path, f'kind = "cloze"\n{config}')).questions
    assert cloze.choices == (" x",)
    text, *_ = open_evaluation_task(write_task(tmp_path, f'kind = "generation"\n{config}')).questions
    assert (text.choices, text.accepted) == ((), ("x", "y z"))


def test_no_question_is_its_own_example(tmp_path: Path) -> None:
    write_rows(tmp_path)
    for question in open_evaluation_task(write_task(tmp_path, CHOICE + LABELS + "shots = 6\n")).questions:
        asked = [row["ask"] for row in ROWS if row["ask"] in question.prompt]
        assert len(asked) == len(ROWS)
        assert question.prompt.count(f"Größe {question.number}?") == 1


def test_solved_examples_are_others_and_depend_on_the_question_alone(tmp_path: Path) -> None:
    write_rows(tmp_path)
    path = write_task(tmp_path, CHOICE + LABELS + 'shots = 2\nshots_separator = "\\n--\\n"\n')
    questions = open_evaluation_task(path).questions
    solved = [f"Q: {row['ask']}\nA: {row['a'] if row['key'] == 'A' else row['b']}\n--\n" for row in ROWS]
    for question in questions:
        bare = f"Q: Größe {question.number}?\nA:"
        assert question.prompt.endswith(bare)
        shots = question.prompt.removesuffix(bare)
        used = [number for number, text in enumerate(solved) if text in shots]
        assert len(used) == 2
        assert question.number not in used
        assert len(shots) == sum(len(solved[number]) for number in used)
    assert len({question.prompt[:20] for question in questions}) > 1, "each question draws its own"
    assert [q.prompt for q in open_evaluation_task(path, limit=3).questions] == [
        q.prompt for q in questions[:3]
    ]
    other = open_evaluation_task(write_task(tmp_path, path.read_text() + "shots_seed = 1\n"))
    assert [q.prompt for q in other.questions] != [q.prompt for q in questions]


def test_solved_examples_of_another_file(tmp_path: Path) -> None:
    write_rows(tmp_path)
    write_rows(tmp_path, [{"ask": "other", "a": "c", "b": "d", "key": "B"}], "train")
    path = write_task(tmp_path, CHOICE + LABELS + 'shots = 1\nshots_from = "train.jsonl"\n')
    assert open_evaluation_task(path).questions[0].prompt == "Q: other\nA: d\n\nQ: Größe 0?\nA:"


def test_the_fingerprint_tells_tasks_apart_by_what_is_asked(tmp_path: Path) -> None:
    write_rows(tmp_path)
    path = write_task(tmp_path, CHOICE + LABELS)
    first = open_evaluation_task(path).fingerprint
    write_rows(tmp_path, [*ROWS[:-1], {**ROWS[-1], "a": "nein"}])
    assert open_evaluation_task(path).fingerprint != first


@pytest.mark.parametrize(
    ("config", "row", "message"),
    [
        (
            CHOICE,
            {"key": "C"},
            r"rows.jsonl, row 1: column 'key' is 'C': give the text of one of the 2 answers",
        ),
        (CHOICE, {"key": 2}, "row 1: column 'key' is '2'"),
        (CHOICE + LABELS, {"key": None}, "row 1: column 'key' is ''.*called A, B"),
        (CHOICE, {"a": " "}, "row 1: answer 0 is empty"),
        (CHOICE.replace("{{ a }}", "{{ c }}"), {}, "'c' is undefined; there are: ask, a, b"),
        (CHOICE.replace("{{ a }}", "{{ a"), {}, "can't be filled in"),
        (CHOICE.replace("{{ a }}", "{{ ''.__class__.mro() }}"), {}, "can't be filled in"),
        (CHOICE.replace('"key"', '"kee"'), {}, "has no column 'kee'"),
        (CHOICE.replace('["{{ a }}", "{{ b }}"]', '"a"'), {}, "column 'a' is 'ja': give a list"),
        (CHOICE.replace('["{{ a }}", "{{ b }}"]', '"all"'), {"all": ["x"], "key": 0}, "has one answer"),
        (CHOICE.replace('choices = ["{{ a }}", "{{ b }}"]\n', ""), {}, "choices is missing"),
        (CHOICE + 'labels = ["A"]\n', {}, "1 names for 2 choices"),
        (CHOICE + LABELS + "shots = 7\n", {}, "shots = 7: .* has 6 other examples"),
        ('kind = "cloze"\n' + CHOICE, {}, "kind = 'cloze' has none"),
        ('kind = "cloze"\ndata = "rows.jsonl"\nprompt = ""\nanswer = "a"', {"a": ""}, "column 'a' is empty"),
        (CHOICE + "shot = 1\n", {}, "shot"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: str, row: dict[str, Any], message: str) -> None:
    write_rows(tmp_path, [{**ROWS[0], **row}, *ROWS[1:]])
    with pytest.raises(UsageError, match=message):
        open_evaluation_task(write_task(tmp_path, config))


def test_files_have_names() -> None:
    assert named_task_files(["a/x.toml", "y=b/x.toml"]) == {"x": "a/x.toml", "y": "b/x.toml"}
    with pytest.raises(UsageError, match=r"--task b/x.toml: 'x' is named already"):
        named_task_files(["a/x.toml", "b/x.toml"])
    with pytest.raises(UsageError, match="there is no such file"):
        open_evaluation_task("nowhere.toml")
