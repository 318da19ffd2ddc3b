"""Rows of a task become prompts with answers, and their metrics against arithmetic by hand."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatfm import rng
from megatfm.config import EvaluationTaskConfig
from megatfm.errors import UsageError
from megatfm.tasks.question_scores import (
    Likelihood,
    average_metrics,
    score_choices,
    score_cloze,
    score_rank,
    score_text,
    summarise_results,
)
from megatfm.tasks.questions import EvaluationTask, Question, open_evaluation_task, parse_task_files
from tests.support.files import write_lines

ROWS = [
    {"ask": f"Größe {number}?", "a": "ja", "b": "東京", "key": "AB"[number % 2], "all": ["x", "y z"]}
    for number in range(7)
]
CHOICE = 'data = "rows.jsonl"\nprompt = "Q: {{ ask }}\\nA:"\nchoices = ["{{ a }}", "{{ b }}"]\nanswer = "key"\n'
LABELS = 'labels = ["A", "B"]\n'


def write_rows(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "rows") -> None:
    write_lines(folder / f"{name}.jsonl", rows)


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
    (tmp_path / "marked.toml").write_text(CHOICE + LABELS, encoding="utf-8-sig")  # as Windows' editors write it
    assert open_evaluation_task(tmp_path / "marked.toml").fingerprint == task.fingerprint


@pytest.mark.parametrize(("value", "right"), [("y z", 1), (1, 1), ("0", 0), ("x", 0)])
def test_the_right_answer_is_named_by_number_or_text(tmp_path: Path, value: Any, right: int) -> None:
    write_rows(tmp_path, [{**ROWS[0], "key": value}])
    config = CHOICE.replace('["{{ a }}", "{{ b }}"]', '"all"') + 'delimiter = ""\n'
    (question,) = open_evaluation_task(write_task(tmp_path, config)).questions
    assert (question.choices, question.right) == (("x", "y z"), right)


def test_cloze_takes_one_answer_and_generation_all(tmp_path: Path) -> None:
    write_rows(tmp_path)
    config = 'data = "rows.jsonl"\nprompt = "{{ ask }}"\nanswer = "all"\n'
    cloze, *_ = open_evaluation_task(write_task(tmp_path, f'kind = "cloze"\n{config}')).questions
    assert cloze.choices == (" x",)
    text, *_ = open_evaluation_task(write_task(tmp_path, f'kind = "generation"\n{config}')).questions
    assert (text.choices, text.accepted) == ((), ("x", "y z"))


def test_an_empty_stop_text_is_refused(tmp_path: Path) -> None:
    """Each answer would end before it."""
    write_rows(tmp_path)
    with pytest.raises(UsageError, match=r"stop = .* should have at least 1 character"):
        open_evaluation_task(write_task(tmp_path, CHOICE + 'stop = ["x", ""]\n'))


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
    assert [q.prompt for q in open_evaluation_task(path, limit=3).questions] == [q.prompt for q in questions[:3]]
    other_seed = open_evaluation_task(write_task(tmp_path, path.read_text() + "shots_seed = 1\n"))
    assert [q.prompt for q in other_seed.questions] != [q.prompt for q in questions]


def test_the_cost_of_solved_examples_is_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a question does not grow with the number of examples; no question is its own example."""
    monkeypatch.setattr(rng, "MAX_RANKED", 20)
    monkeypatch.setattr(rng, "permutation", lambda *_: pytest.fail("orders all examples"))
    n_numbers = 0
    draw = rng.bit_generator

    class CountingGenerator:
        def __init__(self, *key: rng.KeyPart) -> None:
            self.generator = draw(*key)

        def random_raw(self, n: int) -> Any:
            nonlocal n_numbers
            n_numbers += n
            return self.generator.random_raw(n)

    monkeypatch.setattr(rng, "bit_generator", CountingGenerator)
    rows = [{**ROWS[0], "ask": f"Größe {number}?"} for number in range(300)]
    write_rows(tmp_path, rows)
    questions = open_evaluation_task(write_task(tmp_path, CHOICE + LABELS + "shots = 3\n")).questions
    for question in questions:
        asked = re.findall(r"Größe (\d+)\?", question.prompt)
        assert len(set(asked)) == len(asked) == 4
        assert int(asked[-1]) == question.number
    assert 4 * 300 <= n_numbers < 5 * 300


def test_solved_examples_of_another_file(tmp_path: Path) -> None:
    write_rows(tmp_path)
    write_rows(tmp_path, [{"ask": "other", "a": "c", "b": "d", "key": "B"}], "train")
    path = write_task(tmp_path, CHOICE + LABELS + 'shots = 1\nshots_from = "train.jsonl"\n')
    assert open_evaluation_task(path).questions[0].prompt == "Q: other\nA: d\n\nQ: Größe 0?\nA:"


def test_the_fingerprint_of_tasks_depends_on_their_questions(tmp_path: Path) -> None:
    write_rows(tmp_path)
    path = write_task(tmp_path, CHOICE + LABELS)
    first = open_evaluation_task(path).fingerprint
    write_rows(tmp_path, [*ROWS[:-1], {**ROWS[-1], "a": "nein"}])
    assert open_evaluation_task(path).fingerprint != first


@pytest.mark.parametrize(("config", "row", "message"), [
    (CHOICE, {"key": "C"}, r"rows.jsonl, row 1: column 'key' is 'C': give the text of one of the 2 answers"),
    (CHOICE, {"key": 2}, "row 1: column 'key' is '2'"),
    (CHOICE + LABELS, {"key": None}, "row 1: column 'key' is ''.*called A, B"),
    (CHOICE, {"a": " "}, "row 1: answer 0 is empty"),
    (CHOICE.replace("{{ a }}", "{{ c }}"), {}, "'c' is undefined; there are: ask, a, b"),
    (CHOICE.replace("{{ a }}", "{{ a"), {}, "can't be filled in"),
    (CHOICE.replace("{{ a }}", "{{ ''.__class__.mro() }}"), {}, "can't be filled in"),
    (CHOICE.replace("{{ a }}", "{{ a + 1 }}"), {}, "can't be filled in: can only concatenate str"),
    (CHOICE.replace('"key"', '"kee"'), {}, "has no column 'kee'"),
    (CHOICE.replace('["{{ a }}", "{{ b }}"]', '"a"'), {}, "column 'a' is 'ja': give a list"),
    (CHOICE.replace('["{{ a }}", "{{ b }}"]', '"all"'), {"all": ["x"], "key": 0}, "has one answer"),
    (CHOICE.replace('choices = ["{{ a }}", "{{ b }}"]\n', ""), {}, "choices is missing"),
    (CHOICE + 'labels = ["A"]\n', {}, "1 names for 2 choices"),
    (CHOICE + LABELS + "shots = 7\n", {}, "shots = 7: .* has 6 other examples"),
    ('kind = "cloze"\n' + CHOICE, {}, "kind = 'cloze' has none"),
    ('kind = "retrieval"\ndata = "rows.jsonl"\nprompt = ""\nshots = 1', {}, "shots: kind = 'retrieval' compares"),
    ('kind = "cloze"\ndata = "rows.jsonl"\nprompt = ""\nanswer = "a"', {"a": ""}, "column 'a' is empty"),
    (CHOICE + "shot = 1\n", {}, "shot"),
])  # fmt: skip
def test_bad_tasks_and_rows_are_refused(tmp_path: Path, config: str, row: dict[str, Any], message: str) -> None:
    write_rows(tmp_path, [{**ROWS[0], **row}, *ROWS[1:]])
    with pytest.raises(UsageError, match=message):
        open_evaluation_task(write_task(tmp_path, config))


def test_files_have_names() -> None:
    assert parse_task_files(["a/x.toml", "y=b/x.toml"]) == {"x": "a/x.toml", "y": "b/x.toml"}
    with pytest.raises(UsageError, match=r"--task b/x.toml: 'x' is named already"):
        parse_task_files(["a/x.toml", "b/x.toml"])
    with pytest.raises(UsageError, match="there is no such file"):
        open_evaluation_task("nowhere.toml")


# ---------------------------------------------------------------------------------------------------- metrics


QUESTION = Question(4, "Q:", (" a", " größer", " bb cc"), right=2, unconditional="")


def test_each_normalisation_chooses_by_its_own_length() -> None:
    """By hand: sums −3, −6, −4; per token −1.5, −6, −1; per byte −3, −6/8, −4/5; against −1, −9, −2: −2, 3, −2."""
    answers = [Likelihood(-3.0, 2), Likelihood(-6.0, 1), Likelihood(-4.0, 4)]
    unconditional = [Likelihood(-1.0, 2), Likelihood(-9.0, 1), Likelihood(-2.0, 4)]
    result = score_choices(QUESTION, answers, " ", unconditional)
    assert result.record["chosen"] == {
        "accuracy": 0, "accuracy_per_token": 2, "accuracy_per_byte": 1, "accuracy_pmi": 1,
    }  # fmt: skip
    accuracies = {name: value for name, value in result.values.items() if name.startswith("accuracy")}
    assert accuracies == {
        "accuracy": 0.0, "accuracy_per_token": 1.0, "accuracy_per_byte": 0.0, "accuracy_pmi": 0.0,
    }  # fmt: skip
    assert (result.values["bits"], result.values["bytes"]) == (pytest.approx(4 / math.log(2)), 5)


def test_an_answer_without_probability_is_not_chosen() -> None:
    """Neither prompt allows it, so its two log-probabilities have no difference."""
    answers = [Likelihood(number, 1) for number in (-math.inf, -3.0, -9.0)]
    result = score_choices(QUESTION, answers, " ", [Likelihood(-math.inf, 1)] + [Likelihood(-1.0, 1)] * 2)
    assert result.record["chosen"] == {
        "accuracy": 1, "accuracy_per_token": 1, "accuracy_per_byte": 1, "accuracy_pmi": 1
    }  # fmt: skip


def test_equal_answers_choose_the_first() -> None:
    question = Question(0, "", (" a", " a"), right=1)
    result = score_choices(question, [Likelihood(-1.0, 1)] * 2, " ")
    assert result.values["accuracy"] == 0


def task(kind: str) -> EvaluationTask:
    choices = {"choices": ["a", "b"]} if kind == "choice" else {}
    config = EvaluationTaskConfig(kind=kind, data="rows.jsonl", prompt="", **choices)
    return EvaluationTask("t", config, [], "")


def test_bits_per_byte_are_of_all_and_accuracies_means() -> None:
    questions = [Question(n, "", (" ab", " abcd"), right=right) for n, right in enumerate((0, 1, 1))]
    results = [
        score_choices(question, [Likelihood(number, 1) for number in log_probabilities], " ")
        for question, log_probabilities in zip(questions, ([-1.0, -2.0], [-3.0, -5.0], [-9.0, -7.0]), strict=True)
    ]
    summary = summarise_results(task("choice"), results)
    assert summary["metrics"]["accuracy"] == pytest.approx(2 / 3)
    assert summary["metrics"]["bits_per_byte"] == pytest.approx((1 + 5 + 7) / math.log(2) / (2 + 4 + 4))
    low, high = summary["intervals"]["accuracy"]
    assert 0 <= low < 2 / 3 < high <= 1
    assert summarise_results(task("choice"), results[::-1])["metrics"] == summary["metrics"]


def test_a_cloze_is_right_where_each_token_is_the_likeliest() -> None:
    question = Question(0, "", (" word",))
    answers = (1.0, True), (3.0, False)
    results = [score_cloze(question, Likelihood(-nats, 2, is_greedy), " ") for nats, is_greedy in answers]
    metrics = summarise_results(task("cloze"), results)["metrics"]
    assert metrics == pytest.approx({"accuracy": 0.5, "bits_per_byte": 4 / math.log(2) / 8, "perplexity": math.exp(2)})


@pytest.mark.parametrize(("accepted", "text", "exact_match", "f1"), [
    (("The Eiffel Tower",), "eiffel tower!", 1, 1),
    (("red", "dark blue"), "a blue", 0, 2 / 3),
    (("東京、",), "東京", 0, 0),
    (("yes",), "", 0, 0),
    (("a",), "the", 1, 1),
    (("one two two",), "two two three", 0, 2 / 3),
])  # fmt: skip
def test_texts_are_compared_as_squad_does(accepted: tuple[str, ...], text: str, exact_match: float, f1: float) -> None:
    """SQuAD's script drops punctuation of ASCII alone."""
    values = score_text(Question(0, "", accepted=accepted), text).values
    assert values == pytest.approx({"exact_match": exact_match, "f1": f1})


def test_a_rank_counts_from_one() -> None:
    results = [score_rank(Question(n, ""), rank) for n, rank in enumerate((1, 10, 20))]
    metrics = average_metrics("retrieval", results)
    assert metrics == pytest.approx({"recall_at_1": 1 / 3, "recall_at_10": 2 / 3, "reciprocal_rank": 1.15 / 3})


def test_ranks_give_scikit_learn_s_recall_and_mrr() -> None:
    """One right answer a question: recall at k is top-k accuracy, MRR the label ranking average precision."""
    import sklearn.metrics

    random = np.random.default_rng(4)
    n_questions, n_answers = 40, 25
    similarities, right = random.normal(size=(n_questions, n_answers)), random.integers(0, n_answers, n_questions)
    ranks = [1 + int((row > row[place]).sum()) for row, place in zip(similarities, right, strict=True)]
    results = [score_rank(Question(n, ""), rank) for n, rank in enumerate(ranks)]
    metrics = average_metrics("retrieval", results)
    labels = range(n_answers)
    assert metrics == pytest.approx(
        {
            "recall_at_1": sklearn.metrics.top_k_accuracy_score(right, similarities, k=1, labels=labels),
            "recall_at_10": sklearn.metrics.top_k_accuracy_score(right, similarities, k=10, labels=labels),
            "reciprocal_rank": sklearn.metrics.label_ranking_average_precision_score(
                np.eye(n_answers)[right], similarities
            ),
        }
    )
