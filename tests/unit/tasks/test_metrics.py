"""Metrics by hand: counts written out, and the interval's coverage."""

import collections
import math
import re
import string
from collections.abc import Sequence

import numpy as np
import pytest

from megatfm.config import EvaluationTaskConfig
from megatfm.tasks import metrics
from megatfm.tasks.metrics import calibration_error
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
from megatfm.tasks.text_metrics import corpus_metric, exact_match, metric_signature, token_f1

TARGETS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
PREDICTED = np.array([0, 1, 1, 1, 1, 1, 0, 0])


def test_metrics_of_two_classes() -> None:
    tp, fp, fn, tn = 3, 2, 2, 1
    table = metrics.METRICS_OF_FORM["classification"]
    actual = {name: metric(TARGETS, PREDICTED) for name, metric in table.items()}
    assert actual["accuracy"] == pytest.approx(4 / 8)
    assert actual["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert actual["f1_macro"] == pytest.approx(
        (2 * tp / (2 * tp + fp + fn) + 2 * tn / (2 * tn + fp + fn)) / 2
    )
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert actual["matthews"] == pytest.approx((tp * tn - fp * fn) / product**0.5)
    assert metrics.confusion_matrix(TARGETS, PREDICTED, 3) == [[1, 2, 0], [2, 3, 0], [0, 0, 0]]
    scores = metrics.per_class_scores(TARGETS, PREDICTED, ["no", "yes", "never"])
    assert scores["yes"] == {"precision": 0.6, "recall": 0.6, "f1": pytest.approx(0.6), "examples": 5}
    assert scores["never"]["examples"] == 0


def test_three_classes_have_a_weighted_f1() -> None:
    targets, predicted = np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])
    assert metrics.f1(targets, predicted) == pytest.approx((1 * 1 + 0 * 1 + 0.8 * 2) / 4)


def test_the_interval_covers_what_it_says() -> None:
    """Of 200 samples of a coin of 0.7, some 95 % of the intervals hold 0.7; within five deviations of that."""
    random, inside = np.random.default_rng(3), 0
    for _ in range(200):
        predicted = (random.random(100) < 0.7).astype(np.int64)
        low, high = metrics.bootstrap_interval(
            metrics.accuracy, np.ones(100, np.int64), predicted, samples=200
        )
        inside += low <= 0.7 <= high
    assert 0.95 - 5 * (0.95 * 0.05 / 200) ** 0.5 < inside / 200 <= 1
    same = [metrics.bootstrap_interval(metrics.accuracy, TARGETS, PREDICTED) for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("O O", []),
        ("B-A I-A O B-A", [("A", 0, 2), ("A", 3, 4)]),
        ("B-A B-A I-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 3)]),
        ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A I-B I-B", [("A", 0, 1), ("B", 1, 3)]),
        ("S-A B-A E-A I-A", [("A", 0, 1), ("A", 1, 3), ("A", 3, 4)]),
    ],
)
def test_spans_are_those_of_conlleval(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert metrics.spans_of(tags.split()) == spans


def test_f1_of_spans() -> None:
    targets, predicted = [["B-A", "I-A", "O", "B-B"], ["O"]], [["B-A", "O", "O", "B-B"], ["B-B"]]
    assert metrics.span_f1(targets, predicted) == pytest.approx(2 * 1 / (2 + 3))
    assert metrics.span_f1([["O"]], [["O"]]) == 0


def test_many_labels_by_hand() -> None:
    targets, predicted = np.array([[1, 0, 1], [0, 0, 1]]), np.array([[1, 0, 1], [1, 0, 0]])
    assert metrics.exact_match(targets, predicted) == 0.5
    assert metrics.f1_micro(targets, predicted) == pytest.approx(2 * 2 / (3 + 3))
    assert metrics.f1_macro(targets, predicted) == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)


def test_correlations_by_hand() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 3.0]), np.array([2.0, 9.0, 4.0, 100.0])
    n, ranks = len(x), (np.array([1, 2, 3.5, 3.5]), np.array([1, 3, 2, 4.0]))

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        covariance = (a * b).sum() - a.sum() * b.sum() / n
        return covariance / (((a * a).sum() - a.sum() ** 2 / n) * ((b * b).sum() - b.sum() ** 2 / n)) ** 0.5

    assert metrics.pearson(x, y) == pytest.approx(correlation(x, y))
    assert metrics.spearman(x, y) == pytest.approx(correlation(*ranks))
    assert metrics.pearson(x, np.ones(4)) == 0
    assert metrics.r2(x, x + 1) == pytest.approx(1 - 4 / ((x - x.mean()) ** 2).sum())


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


ANSWERS = [
    ("The Eiffel Tower.", ["Eiffel Tower", "the tower"]),
    ("a  quick,brown fox", ["quick brown fox"]),
    ("Über-größe", ["über größe", "Übergröße"]),
    ("東京", ["東京", "Tokyo"]),
    ("", [""]),
    ("the", [""]),
    ("", ["a"]),
    ("Rome", [""]),
    ("red red lamp", ["red lamp lamp"]),
    ("42 %", ["42"]),
]


def squad_normalise(s: str) -> str:
    """evaluate-v1.1.py's order: lower, punctuation, articles, white space."""
    s = "".join(ch for ch in s.lower() if ch not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())


def squad_f1(prediction: str, truth: str) -> float:
    """evaluate-v2.0.py's compute_f1."""
    gold, guess = squad_normalise(truth).split(), squad_normalise(prediction).split()
    same = sum((collections.Counter(gold) & collections.Counter(guess)).values())
    if not gold or not guess:
        return int(gold == guess)
    if same == 0:
        return 0
    precision, recall = same / len(guess), same / len(gold)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(("answer", "references"), ANSWERS)
def test_exact_match_and_f1_are_squad_s(answer: str, references: list[str]) -> None:
    assert token_f1(answer, references) == pytest.approx(max(squad_f1(answer, truth) for truth in references))
    expected = max(squad_normalise(answer) == squad_normalise(truth) for truth in references)
    assert exact_match(answer, references) == expected


HYPOTHESES = [
    "the old lamp was red and new",
    "Anna saw the old red lamp in Bern",
    "und das war es auch schon",
    "übrigens ja",
]
REFERENCES = [
    "the old lamp was new and red",
    "Anna saw a red old lamp in Bern",
    "und das war es dann auch",
    "ja , übrigens",
]


def n_grams(items: Sequence[str], n: int) -> collections.Counter:
    return collections.Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def test_bleu_is_that_of_papineni_et_al() -> None:
    """Corpus counts of one to four words, clipped, their geometric mean and the brevity penalty."""
    logs, lengths = [], [0, 0]
    for n in range(1, 5):
        hits = total = 0
        for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
            ours, theirs = n_grams(hypothesis.split(), n), n_grams(reference.split(), n)
            hits, total = hits + sum((ours & theirs).values()), total + sum(ours.values())
        logs.append(math.log(hits / total))
    for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
        lengths[0] += len(hypothesis.split())
        lengths[1] += len(reference.split())
    penalty = min(1.0, math.exp(1 - lengths[1] / lengths[0]))
    value, (low, high) = corpus_metric("bleu", HYPOTHESES, REFERENCES)
    assert value == pytest.approx(100 * penalty * math.exp(sum(logs) / 4), abs=1e-9)
    assert low < high


def test_chrf_is_that_of_popovic() -> None:
    """The mean precision and recall of one to six characters without spaces, weighed by β = 2."""
    precisions, recalls = [], []
    for n in range(1, 7):
        hits = guessed = wanted = 0
        for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
            ours, theirs = (n_grams(text.replace(" ", ""), n) for text in (hypothesis, reference))
            hits += sum((ours & theirs).values())
            guessed, wanted = guessed + sum(ours.values()), wanted + sum(theirs.values())
        precisions.append(hits / guessed)
        recalls.append(hits / wanted)
    precision, recall = sum(precisions) / 6, sum(recalls) / 6
    expected = 100 * 5 * precision * recall / (4 * precision + recall)
    assert corpus_metric("chrf", HYPOTHESES, REFERENCES)[0] == pytest.approx(expected, abs=1e-9)


def test_exact_match_of_texts_has_an_interval() -> None:
    value, (low, high) = corpus_metric("exact_match", ["a", "b ", "c", "d"], ["a", "b", "x", "D"])
    assert value == 0.5
    assert 0 <= low < 0.5 < high <= 1


def test_signatures_name_the_settings() -> None:
    assert metric_signature("bleu").startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    assert metric_signature("chrf").startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no")
    assert metric_signature("exact_match") == "exact_match"


def test_calibration_error_by_hand() -> None:
    """Bins of equal width, closed at their right, each |accuracy − confidence| by its share of examples."""
    random = np.random.default_rng(0)
    probabilities = random.dirichlet(np.ones(3), 300)
    targets = random.integers(0, 3, 300)
    confidence, hits = probabilities.max(1), probabilities.argmax(1) == targets
    expected = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(hits[inside].mean() - confidence[inside].mean())
    assert calibration_error(targets, probabilities) == pytest.approx(expected)
    assert calibration_error(np.array([0, 1]), np.eye(2)) == 0
    assert calibration_error(np.array([1, 0]), np.eye(2)) == 1
