"""Confusion matrices, scores, errors and pictures on the report's page: against scikit-learn, and files that lie."""

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatfm.report import write_report
from megatfm.report.predictions import compute_class_results, read_galleries, summarize
from megatfm.report.run import Run
from tests.support.files import write_lines
from tests.support.images import encode_image
from tests.support.small_runs import report_page

EVIL = "<img src=x onerror=alert(1)>"


def count_pairs(targets: Iterable[int], predicted: Iterable[int]) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    for pair in zip(targets, predicted, strict=True):
        counts[pair] = counts.get(pair, 0) + 1
    return counts


@pytest.mark.parametrize("n_classes", [2, 16, 17, 70])
def test_scores_and_matrix_against_scikit_learn(n_classes: int) -> None:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    random = np.random.default_rng(n_classes)
    targets = random.integers(0, n_classes, 500)
    predicted = np.where(random.random(500) < 0.6, targets, random.integers(0, n_classes, 500))
    labels = [f"class {number}" for number in range(n_classes)]
    result = summarize("set", count_pairs(targets.tolist(), predicted.tolist()), labels)
    assert result.accuracy == pytest.approx((targets == predicted).mean())
    assert result.examples == 500
    expected = precision_recall_fscore_support(targets, predicted, labels=range(n_classes), zero_division=0.0)
    scores = {scores.name: scores for scores in result.scores}
    for number, label in enumerate(labels):
        row = scores[label]
        actual = (row.precision, row.recall, row.f1, row.examples)
        assert actual == pytest.approx(tuple(column[number] for column in expected)), label
    matrix = confusion_matrix(targets, predicted)
    wrong = np.where(np.eye(n_classes, dtype=bool), 0, matrix)
    assert result.confusions[0][2] == wrong.max()
    if n_classes <= 16:
        assert [[cell.count for cell in row] for _, row in result.cells] == matrix.tolist()
        return
    assert len(result.worst) == 10
    assert max(row.f1 for row in result.worst) <= min(row.f1 for row in result.scores if row not in result.worst)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(result.picture.partition(",")[2]))))
    np.testing.assert_array_equal(pixels[..., 3] > 0, matrix > 0)
    blue = pixels[..., 2].astype(int) > pixels[..., 0]
    np.testing.assert_array_equal(blue & (pixels[..., 3] > 0), np.diag(np.diag(matrix)) > 0)


def test_a_class_without_examples_and_one_never_predicted() -> None:
    result = summarize("set", {(0, 1): 3, (0, 0): 1}, ["α", "β", "γ"])
    assert [(row.name, row.examples, row.precision, row.recall, row.f1) for row in result.scores] == [
        ("α", 4, 1.0, 0.25, 0.4),
        ("β", 0, 0.0, 0.0, 0.0),
    ]
    assert result.confusions == [("α", "β", 3, 0.75)]


def test_the_picture_of_many_classes_has_a_bounded_size() -> None:
    """A pixel stands for several classes; the strongest of its pairs is drawn."""
    n_classes = 21_841  # of ImageNet-21k
    counts = {(7, 7): 4, (7, 9): 1, (100, 21_840): 3}
    result = summarize("set", counts, [str(number) for number in range(n_classes)])
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(result.picture.partition(",")[2]))))
    assert pixels.shape == (993, 993, 4)  # 22 classes a pixel
    assert np.argwhere(pixels[..., 3]).tolist() == [[0, 0], [4, 992]]
    assert pixels[0, 0, 2] > pixels[0, 0, 0], "the correct predictions are the stronger pair"


def write_images(run: Path, labels: list[str], counts: Any) -> None:
    (run / "confusion.json").write_text(json.dumps({"step": 7, "sets": {EVIL: {"labels": labels, "counts": counts}}}))


def make_png(colour: str) -> bytes:
    return encode_image(Image.new("RGB", (3, 2), colour))


def test_classes_and_pictures_on_the_page(run: Path) -> None:
    write_images(run, [EVIL, "猫"], [[0, 0, 5], [0, 1, 2], [1, 1, 3]])
    (run / "pictures").mkdir()
    (run / "pictures" / "rollout-00.png").write_bytes(make_png("red"))
    entry = {"file": "pictures/rollout-00.png", "caption": EVIL}
    gallery = {"title": "Attention rollout", "note": EVIL, "pictures": [entry]}
    (run / "pictures.json").write_text(json.dumps({"step": 7, "galleries": [gallery]}))
    page = report_page(run)
    html = (run / "report.html").read_text()
    assert EVIL not in html
    assert base64.b64encode(make_png("red")).decode() in html
    assert "80.00 % of 10 right, step 7" in page.text
    assert "猫" in page.text


def test_a_run_without_predictions_has_no_prediction_sections(run: Path) -> None:
    text = report_page(run).text
    assert "Confusion matrix" not in text
    assert "Pictures" not in text


@pytest.mark.parametrize(
    "counts",
    [None, {}, [], [[0]], [[0, "1", 2]], [[-1, 0, 2]], [[0, 0, 0]], [[True, 0, 1]], [[0, 0, 1.5]], [[2**40, 0, 1]]],
)
def test_invalid_counts_are_ignored(run: Path, counts: Any) -> None:
    write_images(run, ["a"], counts)
    assert compute_class_results(Run(run)) == []
    write_report(run)


def test_pictures_that_cannot_be_shown_are_counted(run: Path, tmp_path: Path) -> None:
    """Outside the folder, a link, no PNG, too large, not there: left out and counted."""
    (tmp_path / "secret.png").write_bytes(make_png("blue"))
    folder = run / "pictures"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("no picture")
    (folder / "large.png").write_bytes(make_png("red") + bytes(2**20))
    (folder / "good.png").write_bytes(make_png("green"))
    names = [
        "../secret.png", "pictures/../../secret.png", str(tmp_path / "secret.png"), "pictures/link.png",
        "pictures/text.png", "pictures/large.png", "pictures/none.png", "pictures/a\0b", 3, "pictures/good.png",
    ]  # fmt: skip
    entries = [{"file": name, "caption": "x"} for name in names]
    table = {"galleries": [7, {"title": "t", "pictures": entries}, {"title": "empty", "pictures": None}]}
    (run / "pictures.json").write_text(json.dumps(table))
    read = Run(run)
    (gallery,) = read_galleries(read)
    assert len(gallery.pictures) == 1
    assert read.notes[-1] == "9 picture(s) left out that can't be read"


def write_task(run: Path, rows: list[dict[str, Any]], predictions: list[dict[str, Any]]) -> Path:
    """Make a fine-tuning run of the run, with its file of examples beside it."""
    file = run / "reviews.jsonl"
    write_lines(file, rows)
    with (run / "config.toml").open("a") as config:
        config.write(f'[task]\nform = "classification"\ntrain = "{file}"\nvalidation = "{file}"\n')
    (run / "predictions").mkdir()
    write_lines(run / "predictions" / "validation.jsonl", predictions)
    results = {"confusion": [[1, 2], [1, 0]], "metrics": {}}
    result = {"step": 3, "labels": ["false", "true"], "sets": {"validation": results}}
    (run / "task.json").write_text(json.dumps(result))
    return file


ROWS = [
    {"text": "fine", "label": False},
    {"text": "خطأ " + EVIL, "label": False},
    {"text": "long " * 200, "label": True},
    {"text": "", "label": False},
]
PREDICTIONS = [
    {"row": 1, "label": "false", "probability": 0.9},
    {"row": 2, "label": "true", "probability": 0.6},
    {"row": 3, "label": "false", "probability": 0.8},
    {"row": 4, "label": "true", "probability": 0.7},
]


def test_the_most_confident_errors_of_a_fine_tuning_run_come_first(run: Path) -> None:
    write_task(run, ROWS, PREDICTIONS)
    (result,) = compute_class_results(Run(run))
    assert [(error.row, error.label, error.predicted) for error in result.errors] == [
        (3, "true", "false"),
        (4, "false", "true"),
        (2, "false", "true"),
    ]
    assert len(result.errors[0].text) < 410
    text = report_page(run).text
    assert "خطأ" in text
    assert "25.00 % of 4 right, step 3" in text
    assert EVIL not in (run / "report.html").read_text()


def test_a_task_file_that_moved_or_changed_is_noted(run: Path) -> None:
    file = write_task(run, ROWS, PREDICTIONS)
    file.write_text(json.dumps(ROWS[0]) + "\n")
    read = Run(run)
    (result,) = compute_class_results(read)
    assert not result.errors
    assert "has 1 row, and 4 were predicted" in read.notes[-1]
    file.unlink()
    read = Run(run)
    compute_class_results(read)
    assert "errors on validation are not shown: " in read.notes[-1]
    assert "reviews.jsonl" in report_page(run).text
