"""Metrics of questions against arithmetic by hand."""

import math

import pytest

from megatfm.config import EvaluationTaskConfig
from megatfm.tasks.question_scores import (
    Likelihood,
    mean_metrics,
    normalise_answer,
    score_choices,
    score_cloze,
    score_rank,
    score_text,
    summarise_results,
)
from megatfm.tasks.questions import EvaluationTask, Question

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


def test_of_equal_answers_the_first_wins() -> None:
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
        for question, log_probabilities in zip(
            questions, ([-1.0, -2.0], [-3.0, -5.0], [-9.0, -7.0]), strict=True
        )
    ]
    summary = summarise_results(task("choice"), results)
    assert summary["metrics"]["accuracy"] == pytest.approx(2 / 3)
    assert summary["metrics"]["bits_per_byte"] == pytest.approx((1 + 5 + 7) / math.log(2) / (2 + 4 + 4))
    low, high = summary["intervals"]["accuracy"]
    assert 0 <= low < 2 / 3 < high <= 1
    assert summarise_results(task("choice"), results[::-1])["metrics"] == summary["metrics"]


def test_a_cloze_is_right_where_each_token_is_the_likeliest() -> None:
    question = Question(0, "", (" word",))
    results = [
        score_cloze(question, Likelihood(-nats, 2, is_greedy), " ")
        for nats, is_greedy in ((1.0, True), (3.0, False))
    ]
    metrics = summarise_results(task("cloze"), results)["metrics"]
    assert metrics == pytest.approx(
        {"accuracy": 0.5, "bits_per_byte": 4 / math.log(2) / 8, "perplexity": math.exp(2)}
    )


@pytest.mark.parametrize(
    ("accepted", "text", "exact_match", "f1"),
    [
        (("The Eiffel Tower",), "eiffel tower!", 1, 1),
        (("red", "dark blue"), "a blue", 0, 2 / 3),
        (("東京、",), "東京", 1, 1),
        (("yes",), "", 0, 0),
        (("a",), "the", 1, 1),
        (("one two two",), "two two three", 0, 2 / 3),
    ],
)
def test_texts_are_compared_as_squad_does(
    accepted: tuple[str, ...], text: str, exact_match: float, f1: float
) -> None:
    values = score_text(Question(0, "", accepted=accepted), text).values
    assert values == pytest.approx({"exact_match": exact_match, "f1": f1})


def test_an_answer_is_normalised() -> None:
    assert normalise_answer("  The «Größe»,  an APPLE-pie. ") == "größe applepie"


def test_a_rank_counts_from_one() -> None:
    results = [score_rank(Question(n, ""), rank) for n, rank in enumerate((1, 10, 20))]
    metrics = mean_metrics("retrieval", results)
    assert metrics == pytest.approx(
        {"recall_at_1": 1 / 3, "recall_at_10": 2 / 3, "reciprocal_rank": 1.15 / 3}
    )
