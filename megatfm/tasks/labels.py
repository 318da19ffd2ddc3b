"""Labels of rows: as the config lists them, their classes, and those that a file has."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean
from megatfm.tasks.files import Row

MAX_SHOWN = 20
"""Number of labels that an error lists."""
LABEL_SEPARATOR = ";"
INTEGER = re.compile(r"-?\d{1,4000}")
"""Labels that are sorted as numbers; Python reads no longer ones."""


def format_label(value: Any) -> str:
    """Return a label as the config lists it. Booleans of typed files become `true` and `false`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()


def find_class_index(place: str, label: Any, labels: Sequence[str]) -> int:
    """Return the class of a row's label. place: of the row, for errors. Raises UsageError for an unlisted one."""
    name = "" if label is None else format_label(label)
    if isinstance(label, list | Mapping):
        raise UsageError(
            f"{place}: label {label!r:.60} is no single label: give one, or set task.form = 'multilabel' for lists"
        )
    if not name and name not in labels:
        raise UsageError(f"{place}: has no label: give one, or take the row out")
    if name not in labels:
        listed = ", ".join(labels[:MAX_SHOWN]) + (", …" if len(labels) > MAX_SHOWN else "")
        raise UsageError(
            f"{place}: label {name!r} is none of the task's{did_you_mean(name, labels)}; there are: {listed}: mend the "
            "row, or list it in task.labels"
        )
    return labels.index(name)


def list_labels(task: TaskConfig, row: Row) -> list[str]:
    """Return the labels of a row, unchecked: one, or those of a list or of a text that is split."""
    value = row.get(task.label)
    if task.form != "classification" and isinstance(value, str):
        value = value.split(LABEL_SEPARATOR if task.form == "multilabel" else None)
    return [format_label(item) for item in (value if isinstance(value, list) else [value]) if item is not None]


def collect_labels(task: TaskConfig, rows: Sequence[Row]) -> list[str]:
    """Return the labels of the rows: integers first, by value, then the others by text. Raises UsageError for none,
    and for two spellings of one."""
    names = {name for row in rows for name in list_labels(task, row)} - {""}
    if not names:
        raise UsageError(f"{task.train}: column {task.label!r} is empty: name the column of the labels in task.label")
    if missing := sorted(name for name in names if name.lower() == "nan"):
        raise UsageError(
            f"{task.train}: column {task.label!r} has the label {missing[0]!r}, as missing values are written: mend "
            "its rows, or name all labels in task.labels if it is one"
        )
    spellings: dict[str, str] = {}
    for name in sorted(names):
        bare = unicodedata.normalize("NFC", name)
        number = bare.removesuffix(".0")
        if (earlier := spellings.setdefault(number if INTEGER.fullmatch(number) else bare, name)) != name:
            raise UsageError(
                f"{task.train}: column {task.label!r} has the labels {earlier!r} and {name!r}, two spellings of one: "
                "write it one way, or name all labels in task.labels"
            )
    return sorted(names, key=lambda name: (0, int(name), name) if INTEGER.fullmatch(name) else (1, 0, name))
