"""Predictions of a run's last evaluation: confusion matrices, scores of classes, errors, and example images."""

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatfm.errors import MegatfmError
from megatfm.report.charts import Tick, encode_png
from megatfm.report.run import Run
from megatfm.tasks.files import format_label, read_rows
from megatfm.terminal import format_counted

MAX_CELLS = 16
"""Largest number of classes for which the confusion matrix is a table of counts; it is a picture of shares for more."""
MAX_PIXELS = 1024
"""Largest number of pixels of a picture's side; in pictures of more classes, a pixel stands for several."""
MAX_CLASS_INDEX = 2**20
"""Larger indices of classes in a file are invalid."""
MAX_CLASSES, N_WORST, MAX_CONFUSIONS, MAX_ERRORS = 16, 10, 10, 20
"""Largest numbers of rows: of the table of classes, of worst classes if there are more, of confusions, and of texts."""
MAX_TICKS = 32
"""Largest number of class names at each side of a picture."""
MAX_PICTURES, MAX_PICTURE_BYTES = 96, 2**20
MAX_TEXT = 400
"""Largest number of characters of a text that are shown."""
CORRECT_COLOUR, WRONG_COLOUR = (47, 107, 216), (217, 115, 13)

Counts = Mapping[tuple[int, int], int]
"""(label, predicted class) → examples."""


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class."""

    name: str
    examples: int
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if no example of the class is predicted correctly."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True)
class Cell:
    """A cell of the confusion matrix: its count, and the strength of its colour, from 0 to 1."""

    count: int
    share: float
    is_right: bool


@dataclass(frozen=True)
class TextError:
    """A text that was classified wrongly."""

    row: int
    text: str
    label: str
    predicted: str
    probability: float | None


@dataclass(frozen=True)
class ClassResults:
    """Classification results of a set, for the template."""

    name: str
    accuracy: float
    examples: int
    scores: Sequence[ClassScores]
    cells: Sequence[tuple[str, Sequence[Cell]]]
    """Rows of a small confusion matrix; empty for a large one, which is `picture`."""
    picture: str
    ticks: Sequence[tuple[Tick, str]]
    confusions: Sequence[tuple[str, str, int, float]]
    """Label, predicted class, number of examples, and their share of the label's examples."""
    errors: Sequence[TextError] = ()

    @property
    def worst(self) -> Sequence[ClassScores]:
        """Classes with the lowest F1, if there are too many to show all."""
        if len(self.scores) <= MAX_CLASSES:
            return ()
        return sorted(self.scores, key=lambda scores: scores.f1)[:N_WORST]


@dataclass(frozen=True)
class EmbeddedGallery:
    """Pictures of one kind, as data URIs with captions."""

    title: str
    note: str
    pictures: Sequence[tuple[str, str]]


def compute_class_results(run: Run) -> list[ClassResults]:
    """Return the results of each set, for a run on images or a fine-tuning run."""
    results = []
    for name, table in _get_sets(run.confusion).items():
        counts = _parse_counts(table.get("counts"))
        if counts:
            results.append(summarize(name, counts, _make_labels(table.get("labels"), counts)))
    labels = run.task_results.get("labels")
    for name, table in _get_sets(run.task_results).items():
        rows = table.get("confusion")
        counts = _parse_counts(_list_triples(rows)) if isinstance(rows, list) else {}
        if counts:
            names = _make_labels(labels, counts)
            results.append(summarize(name, counts, names, list_text_errors(run, name)))
    return results


def _get_sets(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    sets = table.get("sets")
    if not isinstance(sets, Mapping):
        return {}
    return {str(name): value for name, value in sets.items() if isinstance(value, Mapping)}


def _list_triples(rows: Sequence[Any]) -> list[list[Any]]:
    return [
        [label, predicted, count]
        for label, row in enumerate(rows)
        if isinstance(row, list)
        for predicted, count in enumerate(row)
    ]


def _parse_counts(entries: Any) -> dict[tuple[int, int], int]:
    """Return the positive counts of entries [label, predicted, count]; ignores invalid entries."""
    counts: Counter[tuple[int, int]] = Counter()
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, list) or len(entry) != 3 or not all(type(n) is int and n >= 0 for n in entry):
            continue
        label, predicted, count = entry
        if max(label, predicted) <= MAX_CLASS_INDEX:
            counts[label, predicted] += count
    return {pair: count for pair, count in counts.items() if count}


def _make_labels(names: Any, counts: Counts) -> list[str]:
    """Return the names of all classes; a class without a name has its index."""
    known_names = [str(name) for name in names] if isinstance(names, list) else []
    n_classes = max(len(known_names), 1 + max(max(pair) for pair in counts))
    return known_names + [str(index) for index in range(len(known_names), n_classes)]


def summarize(name: str, counts: Counts, labels: Sequence[str], errors: Sequence[TextError] = ()) -> ClassResults:
    """Compute scores, confusion matrix and most frequent confusions of a set. labels: names of the classes."""
    label_totals, predicted_totals = Counter[int](), Counter[int]()
    for (label, predicted), count in counts.items():
        label_totals[label] += count
        predicted_totals[predicted] += count
    total, n_correct = sum(counts.values()), sum(counts.get((c, c), 0) for c in range(len(labels)))
    scores = [
        ClassScores(
            class_name,
            label_totals[index],
            counts.get((index, index), 0) / max(predicted_totals[index], 1),
            counts.get((index, index), 0) / max(label_totals[index], 1),
        )
        for index, class_name in enumerate(labels)
        if label_totals[index] or predicted_totals[index]
    ]
    wrong = sorted(
        ((count, pair) for pair, count in counts.items() if pair[0] != pair[1]), key=lambda entry: (-entry[0], entry[1])
    )
    confusions = [
        (labels[label], labels[predicted], count, count / label_totals[label])
        for count, (label, predicted) in wrong[:MAX_CONFUSIONS]
    ]
    is_small = len(labels) <= MAX_CELLS
    return ClassResults(
        name=name,
        accuracy=n_correct / total,
        examples=total,
        scores=scores,
        cells=_make_cells(counts, labels, label_totals) if is_small else (),
        picture="" if is_small else _draw_matrix(counts, len(labels), label_totals),
        ticks=() if is_small else _make_ticks(labels),
        confusions=confusions,
        errors=errors,
    )


def _make_cells(counts: Counts, labels: Sequence[str], totals: Mapping[int, int]) -> list[tuple[str, list[Cell]]]:
    def make_cell(row: int, column: int) -> Cell:
        count = counts.get((row, column), 0)
        return Cell(count, math.sqrt(count / totals[row]) if count else 0.0, row == column)

    indices = range(len(labels))
    return [(labels[row], [make_cell(row, column) for column in indices]) for row in indices]


def _draw_matrix(counts: Counts, n_classes: int, label_totals: Mapping[int, int]) -> str:
    """Draw the confusion matrix with one pixel per pair of classes, or the strongest of several pairs.

    The opacity is the square root of the pair's share of the label's examples, so that rare errors are visible.
    """
    stride = -(-n_classes // MAX_PIXELS)
    side, transparent = -(-n_classes // stride), (0, 0, 0, 0)
    pixels = [[transparent] * side for _ in range(side)]
    for (label, predicted), count in counts.items():
        opacity = max(24, round(255 * math.sqrt(count / label_totals[label])))
        row, column = pixels[label // stride], predicted // stride
        if opacity > row[column][3]:
            row[column] = (*(CORRECT_COLOUR if label == predicted else WRONG_COLOUR), opacity)
    return encode_png(pixels)


def _make_ticks(labels: Sequence[str]) -> list[tuple[Tick, str]]:
    """Return ticks with shortened class names, at most MAX_TICKS, and the full names."""
    stride = -(-len(labels) // MAX_TICKS)
    return [
        (Tick(100 * (index + 0.5) / len(labels), labels[index][:12]), labels[index])
        for index in range(0, len(labels), stride)
    ]


# --- errors of texts ------------------------------------------------------------------------------------------------


def list_text_errors(run: Run, name: str) -> list[TextError]:
    """Return the most confident errors of a fine-tuning run that classifies texts.

    Reads predictions from the run directory, texts and labels from the task's file, which may have moved or changed.
    """
    task = run.config.get("task")
    if not isinstance(task, Mapping) or task.get("form", "classification") != "classification":
        return []
    path = task.get(name)
    predictions = [
        line for line in run.read_lines(f"predictions/{name}.jsonl") if type(line.get("row")) is int and "label" in line
    ]
    if not isinstance(path, str) or not predictions:
        return []
    try:
        rows = read_rows(path)
    except MegatfmError as error:
        run.notes.append(f"errors on {name} are not shown: {error}")
        return []
    if len(rows) != len(predictions):
        run.notes.append(
            f"errors on {name} are not shown: {path} has {format_counted(len(rows), 'row')}, "
            f"and {len(predictions):,} were predicted"
        )
        return []
    errors = []
    for line in predictions:
        if not 1 <= line["row"] <= len(rows):
            continue
        row, predicted = rows[line["row"] - 1], str(line["label"])
        label = format_label(row.get(task.get("label", "label")))
        if label == predicted:
            continue
        texts = (row.get(column) for column in (task.get("text", "text"), task.get("text_pair")) if column)
        text = " ⏵ ".join(str(column_text) for column_text in texts if column_text is not None)
        text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"
        probability = line.get("probability")
        confidence = float(probability) if isinstance(probability, int | float) else None
        errors.append(TextError(line["row"], text, label, predicted, confidence))
    errors.sort(key=lambda error: (-(error.probability or 0.0), error.row))
    return errors[:MAX_ERRORS]


# --- pictures -------------------------------------------------------------------------------------------------------


def read_galleries(run: Run) -> list[EmbeddedGallery]:
    """Return the pictures that `megatfm evaluate --images` has written; notes those that can't be read."""
    entries = run.pictures.get("galleries")
    galleries: list[EmbeddedGallery] = []
    n_unreadable, remaining = 0, MAX_PICTURES
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, Mapping):
            continue
        pictures = []
        listed = entry.get("pictures")
        for picture in (listed if isinstance(listed, list) else [])[:remaining]:
            uri = _read_data_uri(run.folder, picture.get("file") if isinstance(picture, Mapping) else None)
            if uri:
                pictures.append((uri, str(picture.get("caption", ""))))
            else:
                n_unreadable += 1
        remaining -= len(pictures)
        if pictures:
            galleries.append(EmbeddedGallery(str(entry.get("title", "")), str(entry.get("note", "")), pictures))
    if n_unreadable:
        run.notes.append(f"{n_unreadable} picture(s) left out that can't be read")
    return galleries


def _read_data_uri(folder: Path, name: Any) -> str:
    """Return a PNG file of the run's folder `pictures` as a data URI; empty if it isn't one."""
    if not isinstance(name, str) or Path(name).parent != Path("pictures"):
        return ""
    try:
        path = folder / name
        if path.is_symlink() or path.stat().st_size > MAX_PICTURE_BYTES:
            return ""
        content = path.read_bytes()
    except (OSError, ValueError):
        return ""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return ""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
