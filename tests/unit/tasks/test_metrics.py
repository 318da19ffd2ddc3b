"""Metrics by hand: counts, intervals, and metrics of texts against the published scripts' arithmetic."""

import collections
import math
import random
import re
import string
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from megatfm.config import TaskConfig
from megatfm.errors import MegatfmError
from megatfm.tasks import metrics
from megatfm.tasks.metrics import calibration_error, compute_text_metric, exact_match, get_metric_signature, token_f1
from megatfm.tasks.predictions import Predictions

TARGETS = np.array([0, 0, 0, 1, 1, 1, 1, 1])
PREDICTED = np.array([0, 1, 1, 1, 1, 1, 0, 0])


def test_metrics_of_two_classes() -> None:
    tp, fp, fn, tn = 3, 2, 2, 1
    table = metrics.list_metrics(TaskConfig(train="x", labels=["no", "yes"]))
    actual = {name: metric(TARGETS, PREDICTED) for name, metric in table.items()}
    assert actual["accuracy"] == pytest.approx(4 / 8)
    assert actual["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert actual["f1_macro"] == pytest.approx((2 * tp / (2 * tp + fp + fn) + 2 * tn / (2 * tn + fp + fn)) / 2)
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert actual["matthews"] == pytest.approx((tp * tn - fp * fn) / product**0.5)
    assert metrics.confusion_matrix(TARGETS, PREDICTED, 3) == [[1, 2, 0], [2, 3, 0], [0, 0, 0]]
    scores = metrics.compute_class_scores(TARGETS, PREDICTED, ["no", "yes", "never"])
    assert scores["yes"] == {"precision": 0.6, "recall": 0.6, "f1": pytest.approx(0.6), "examples": 5}
    assert scores["never"]["examples"] == 0


def test_three_classes_have_a_weighted_f1() -> None:
    targets, predicted = np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])
    f1 = metrics.list_metrics(TaskConfig(train="x", labels=["a", "b", "c"]))["f1"]
    assert f1(targets, predicted) == pytest.approx((1 * 1 + 0 * 1 + 0.8 * 2) / 4)
    # Where only two of them occur, class 0 has 2 / 3 and class 1 nothing.
    assert f1(np.array([0, 0, 0, 1]), np.array([1, 0, 0, 0])) == pytest.approx(2 / 3 * 3 / 4)


def test_the_interval_covers_what_it_says() -> None:
    """About 95 % of 200 intervals of a coin of 0.7 hold 0.7, within five deviations."""
    random, inside = np.random.default_rng(3), 0
    for _ in range(200):
        predicted = (random.random(100) < 0.7).astype(np.int64)
        low, high = metrics.bootstrap_interval(metrics.accuracy, np.ones(100, np.int64), predicted, samples=200)
        inside += low <= 0.7 <= high
    assert 0.95 - 5 * (0.95 * 0.05 / 200) ** 0.5 < inside / 200 <= 1
    same = [metrics.bootstrap_interval(metrics.accuracy, TARGETS, PREDICTED) for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize("of_texts", [False, True])
def test_an_interval_takes_the_memory_of_one_sample(of_texts: bool) -> None:
    """And is that of all samples drawn at once, as earlier versions drew them."""
    hits = np.arange(20_000) % 3 == 0
    drawn = hits[np.random.default_rng(0).integers(0, len(hits), (1000, len(hits)))].mean(1)
    expected = np.quantile(drawn, [0.025, 0.975])
    tracemalloc.start()
    if of_texts:
        _, interval = compute_text_metric("exact_match", ["a"] * len(hits), ["a" if hit else "b" for hit in hits])
    else:
        interval = metrics.bootstrap_interval(metrics.accuracy, np.ones(len(hits), np.bool_), hits)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert interval == pytest.approx(expected.tolist(), rel=1e-12)
    assert peak < 20 * hits.size * 8


@pytest.mark.parametrize(("tags", "spans"), [
    ("O O", []),
    ("B-A I-A O B-A", [("A", 0, 2), ("A", 3, 4)]),
    ("B-A B-A I-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 3)]),
    ("I-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),
    ("B-A I-B I-B", [("A", 0, 1), ("B", 1, 3)]),
    ("S-A B-A E-A I-A", [("A", 0, 1), ("A", 1, 3), ("A", 3, 4)]),
])  # fmt: skip
def test_spans_are_those_of_conlleval(tags: str, spans: list[tuple[str, int, int]]) -> None:
    assert metrics.find_tag_spans(tags.split()) == spans


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["classification", "multilabel", "regression", "tagging"])
def test_logits_that_are_not_finite_predict_nothing(form: str, broken: float) -> None:
    """During training the metrics are NaN; a file of predictions is refused."""
    labels = [] if form == "regression" else ["a", "b", "c"]
    task, columns = TaskConfig(form=form, train="a.csv", labels=labels), max(1, len(labels))  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    logits = random.normal(size=(6, columns)).astype(np.float32)
    targets = random.integers(0, 2, (6, columns)) if form in ("multilabel", "regression") else np.arange(6) % 3
    intact = Predictions(task, np.arange(6), np.zeros(6, np.int64), logits, targets)
    assert len(list(intact.rows())) == 6
    assert np.isfinite([*intact.metrics().values()]).all()
    logits[2, -1] = broken
    if broken == -np.inf:
        logits[2] = broken
    assert np.isnan([*intact.metrics().values()]).all()
    with pytest.raises(MegatfmError, match="logits are not finite: the weights are, or the training was, broken"):
        list(intact.rows())


def test_f1_of_spans() -> None:
    targets, predicted = [["B-A", "I-A", "O", "B-B"], ["O"]], [["B-A", "O", "O", "B-B"], ["B-B"]]
    assert metrics.span_f1(targets, predicted) == pytest.approx(2 * 1 / (2 + 3))
    assert metrics.span_f1([["O"]], [["O"]]) == 0


SEQEVAL = [
    ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", 1),
    ("B-PER I-PER O", "B-PER O O", 0),
    ("B-PER I-PER O", "O B-PER O", 0),
    ("I-PER I-PER O", "B-PER I-PER O", 1),
    ("B-PER B-PER", "B-PER I-PER", 0),
    ("B-PER I-LOC", "B-PER I-PER", 0),
    ("O O", "O B-PER", 0),
    ("O", "O", 0),
    ("B-PER I-PER I-PER|I-PER", "B-PER I-PER I-PER|B-PER", 1),
    ("B-PER|I-PER", "B-PER|O", 2 / 3),
    ("B-PER I-PER E-PER S-LOC", "B-PER I-PER I-PER B-LOC", 1),
    ("S-PER S-PER", "B-PER E-PER", 0),
    ("E-PER E-PER I-PER", "I-PER I-PER I-PER", 0),
    ("B-A-B I-A-B O", "B-A-B I-A O", 0),
    ("O I-LOC O I-LOC B-LOC", "O B-LOC O B-LOC I-LOC", 0.4),
]
"""Tags of texts, predicted ones, and what seqeval 1.2.2's f1_score gives for them."""


@pytest.mark.parametrize(("targets", "predicted", "expected"), SEQEVAL)
def test_f1_of_spans_is_seqeval_s(targets: str, predicted: str, expected: float) -> None:
    texts = ([text.split() for text in side.split("|")] for side in (targets, predicted))
    assert metrics.span_f1(*texts) == pytest.approx(expected, abs=1e-12)


def test_f1_of_spans_is_seqeval_s_on_random_tags() -> None:
    """300 texts of up to 12 words in BIOES with types of their own or none, four in ten drawn anew."""
    draw = random.Random(11)
    kinds = [f"{mark}-{kind}" for mark in "BIES" for kind in ("PER", "LOC", "A-B")]
    tags = ["O", "O", *kinds, "B", "I", "E", "S"]
    targets = [[draw.choice(tags) for _ in range(1 + draw.randrange(12))] for _ in range(300)]
    predicted = [[tag if draw.random() < 0.6 else draw.choice(tags) for tag in text] for text in targets]
    assert metrics.span_f1(targets, predicted) == pytest.approx(0.6437177280550774, abs=1e-15)


def test_many_labels_by_hand() -> None:
    targets, predicted = np.array([[1, 0, 1], [0, 0, 1]]), np.array([[1, 0, 1], [1, 0, 0]])
    assert metrics.subset_accuracy(targets, predicted) == 0.5
    assert metrics.f1_micro(targets, predicted) == pytest.approx(2 * 2 / (3 + 3))
    assert metrics.f1_macro(targets, predicted) == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)


def test_one_flag_is_one_class() -> None:
    """Counted by hand; right zeros count for nothing, as with more flags. Twice the same flag changes no F1."""
    draw = np.random.default_rng(5)
    for _ in range(20):
        targets, predicted = draw.integers(0, 2, (9, 1)), draw.integers(0, 2, (9, 1))
        hits, n_positive = int((targets & predicted).sum()), int(targets.sum() + predicted.sum())
        expected = 2 * hits / n_positive if n_positive else 0.0
        for metric in (metrics.f1_micro, metrics.f1_macro):
            assert metric(targets, predicted) == pytest.approx(expected, abs=1e-15)
            twice = metric(np.hstack([targets, targets]), np.hstack([predicted, predicted]))
            assert twice == pytest.approx(expected, abs=1e-15)


def test_matthews_is_the_correlation_of_one_hot_classes() -> None:
    """And 0 without a warning where all examples, or all predictions, have one class, as resamples of small files."""
    draw = np.random.default_rng(6)
    for n_classes in (2, 3, 5):
        targets, predicted = draw.integers(0, n_classes, 30), draw.integers(0, n_classes, 30)
        predicted = np.where(draw.random(30) < 0.6, targets, predicted)
        x, y = (np.eye(n_classes)[side] - np.eye(n_classes)[side].mean(0) for side in (targets, predicted))
        expected = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
        assert metrics.matthews(targets, predicted) == pytest.approx(expected, abs=1e-14)
    ones = np.ones(4, np.int64)
    for targets, predicted in ((ones, ones), (ones, 0 * ones), (ones, np.array([0, 1, 1, 0]))):
        assert metrics.matthews(targets, predicted) == metrics.matthews(predicted, targets) == 0
    assert metrics.bootstrap_interval(metrics.matthews, np.array([0, 1]), np.array([0, 1])) == (0.0, 1.0)


def test_probabilities_of_sure_flags() -> None:
    task = TaskConfig(form="multilabel", train="a.csv", labels=["a", "b", "c", "d"])
    logits = np.array([[-1000, 1000, -np.log(3), 0]], np.float32)
    predictions = Predictions(task, np.zeros(1, np.int64), np.zeros(1, np.int64), logits, np.zeros((1, 4), np.int64))
    assert predictions.probabilities == pytest.approx(np.array([[0, 1, 0.25, 0.5]]), abs=1e-7)


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


# ------------------------------------------------------------------------------------------------------ texts


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
    "the old lamp was red and new", "Anna saw the old red lamp in Bern", "und das war es auch schon", "übrigens ja",
]  # fmt: skip
REFERENCES = [
    "the old lamp was new and red", "Anna saw a red old lamp in Bern", "und das war es dann auch", "ja , übrigens",
]  # fmt: skip


def n_grams(items: Sequence[str], n: int) -> collections.Counter:
    return collections.Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def test_bleu_is_that_of_papineni_et_al() -> None:
    """Corpus counts of one to four words, clipped, their geometric mean and the brevity penalty."""
    logs, lengths = [], [0, 0]
    for n in range(1, 5):
        hits = total = 0
        for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
            hypothesis_grams, reference_grams = n_grams(hypothesis.split(), n), n_grams(reference.split(), n)
            hits += sum((hypothesis_grams & reference_grams).values())
            total += sum(hypothesis_grams.values())
        logs.append(math.log(hits / total))
    for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
        lengths[0] += len(hypothesis.split())
        lengths[1] += len(reference.split())
    penalty = min(1.0, math.exp(1 - lengths[1] / lengths[0]))
    value, (low, high) = compute_text_metric("bleu", HYPOTHESES, REFERENCES)
    assert value == pytest.approx(100 * penalty * math.exp(sum(logs) / 4), abs=1e-9)
    assert low < high


def test_chrf_is_that_of_popovic() -> None:
    """The mean precision and recall of one to six characters without spaces, weighed by β = 2."""
    precisions, recalls = [], []
    for n in range(1, 7):
        hits = guessed = n_reference = 0
        for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
            hypothesis_grams, reference_grams = (n_grams(text.replace(" ", ""), n) for text in (hypothesis, reference))
            hits += sum((hypothesis_grams & reference_grams).values())
            guessed += sum(hypothesis_grams.values())
            n_reference += sum(reference_grams.values())
        precisions.append(hits / guessed)
        recalls.append(hits / n_reference)
    precision, recall = sum(precisions) / 6, sum(recalls) / 6
    expected = 100 * 5 * precision * recall / (4 * precision + recall)
    assert compute_text_metric("chrf", HYPOTHESES, REFERENCES)[0] == pytest.approx(expected, abs=1e-9)


def test_exact_match_of_texts_has_an_interval() -> None:
    value, (low, high) = compute_text_metric("exact_match", ["a", "b ", "c", "d"], ["a", "b", "x", "D"])
    assert value == 0.5
    assert 0 <= low < 0.5 < high <= 1


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_texts_without_a_match_have_an_interval(name: str) -> None:
    """Resamples without any match score 0.0, which sacrebleu's own mean can't add to its float32."""
    value, (low, high) = compute_text_metric(name, ["a b c d e", *["q"] * 7], ["a b c d e", *["x y z u v"] * 7])
    assert 0 == low < value < high <= 100
    assert compute_text_metric(name, ["q"] * 8, ["x y z u v"] * 8) == (0.0, (0.0, 0.0))


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_intervals_are_sacrebleu_s(name: str) -> None:
    """The bounds have the distance from one another that sacrebleu gives for its own seed."""
    answers, references = HYPOTHESES * 5, REFERENCES * 5
    value, (low, high) = compute_text_metric(name, answers, references)
    result = {"bleu": BLEU, "chrf": CHRF}[name]().corpus_score(answers, [references], n_bootstrap=1000)
    assert value == pytest.approx(float(result.score), abs=1e-9)
    assert (high - low) / 2 == pytest.approx(float(result._ci), abs=1e-5)


def test_signatures_name_the_settings() -> None:
    assert get_metric_signature("bleu").startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    assert get_metric_signature("chrf").startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no")
    assert get_metric_signature("exact_match") == "exact_match"


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
