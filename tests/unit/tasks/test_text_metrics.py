"""Metrics of texts against the published scripts' arithmetic, written anew."""

import collections
import math
import re
import string
from collections.abc import Sequence

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from megatfm.tasks.metrics import calibration_error
from megatfm.tasks.text_metrics import corpus_metric, exact_match, metric_signature, token_f1

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
            hypothesis_grams, reference_grams = n_grams(hypothesis.split(), n), n_grams(reference.split(), n)
            hits += sum((hypothesis_grams & reference_grams).values())
            total += sum(hypothesis_grams.values())
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
            hypothesis_grams, reference_grams = (
                n_grams(text.replace(" ", ""), n) for text in (hypothesis, reference)
            )
            hits += sum((hypothesis_grams & reference_grams).values())
            guessed, wanted = guessed + sum(hypothesis_grams.values()), wanted + sum(reference_grams.values())
        precisions.append(hits / guessed)
        recalls.append(hits / wanted)
    precision, recall = sum(precisions) / 6, sum(recalls) / 6
    expected = 100 * 5 * precision * recall / (4 * precision + recall)
    assert corpus_metric("chrf", HYPOTHESES, REFERENCES)[0] == pytest.approx(expected, abs=1e-9)


def test_exact_match_of_texts_has_an_interval() -> None:
    value, (low, high) = corpus_metric("exact_match", ["a", "b ", "c", "d"], ["a", "b", "x", "D"])
    assert value == 0.5
    assert 0 <= low < 0.5 < high <= 1


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_texts_without_a_match_have_an_interval(name: str) -> None:
    """Resamples without any match score 0.0, which sacrebleu's own mean can't add to its float32."""
    value, (low, high) = corpus_metric(name, ["a b c d e", *["q"] * 7], ["a b c d e", *["x y z u v"] * 7])
    assert 0 == low < value < high <= 100
    assert corpus_metric(name, ["q"] * 8, ["x y z u v"] * 8) == (0.0, (0.0, 0.0))


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_intervals_are_sacrebleu_s(name: str) -> None:
    """The bounds have the distance from one another that sacrebleu gives for its own seed."""
    answers, references = HYPOTHESES * 5, REFERENCES * 5
    value, (low, high) = corpus_metric(name, answers, references)
    result = {"bleu": BLEU, "chrf": CHRF}[name]().corpus_score(answers, [references], n_bootstrap=1000)
    assert value == pytest.approx(float(result.score), abs=1e-9)
    assert (high - low) / 2 == pytest.approx(float(result._ci), abs=1e-5)


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
