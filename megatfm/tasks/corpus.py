"""Labelled files tokenized once, into a corpus named by the hash of rows, tokenizer and settings."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from megatfm.config import TaskConfig
from megatfm.corpus.manifest import MANIFEST
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import UsageError
from megatfm.files import temporary_path
from megatfm.objectives.supervised import ANNOTATION
from megatfm.tasks.answers import AnswerEncoder, PreferenceEncoder, ReferenceScorer
from megatfm.tasks.chat import CHAT_FORMS, load_chat_template
from megatfm.tasks.examples import EncodedExample, ExampleFormat
from megatfm.tasks.files import MAX_SHOWN, Row, collect_labels, format_label, list_labels, read_rows, require_columns
from megatfm.tasks.labelled_texts import ChoiceEncoder, LabelledTextEncoder
from megatfm.tasks.spans import SpanEncoder
from megatfm.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatfm.version import __version__

NOT_STORED = frozenset(
    {
        "train", "validation", "test", "epochs", "metric", "lm_weight", "n_best", "max_answer_tokens", "text_metrics",
        "beams", "length_penalty", "max_new_tokens", "class_weights",
    }
)  # fmt: skip
"""Keys of a task that don't change its corpora."""


@dataclass(frozen=True)
class TaskCorpus:
    """A tokenized file: its folder, number of examples, and notes for the log."""

    folder: Path
    n_examples: int
    notes: Sequence[str] = ()


def read_labels(task: TaskConfig) -> list[str]:
    """Return a task's labels in the order of the classes, from the config or else from the training file.

    Numbers have no classes. Raises UsageError for a single class or number, of which every text would be a sure case.
    """
    predicts_numbers = task.form == "regression"
    if task.labels or task.form not in ("classification", "multilabel", "tagging", "regression"):
        return list(task.labels)
    rows = read_rows(task.train)
    require_columns(task.train, rows, {"task.label": task.label})
    labels = (
        sorted({format_label(row.get(task.label)) for row in rows}) if predicts_numbers else collect_labels(task, rows)
    )
    if len(labels) < 2 and task.form != "multilabel":
        raise UsageError(
            f"{task.train}: all rows have the label {labels[0]!r}, so that there is nothing to learn: add rows of "
            f"another label{'' if predicts_numbers else ', or name all labels in task.labels'}"
        )
    return [] if predicts_numbers else labels


def compute_class_weights(task: TaskConfig) -> list[float]:
    """Return the weight of each of a task's `labels`; balanced, n / (C · n_c), whose mean over examples is 1.

    Raises UsageError for labels without examples in the training file, or another number of weights than labels.
    """
    if task.class_weights != "balanced":
        if task.class_weights and len(task.class_weights) != len(task.labels):
            raise UsageError(
                f"task.class_weights has {len(task.class_weights)} weights for {len(task.labels)} labels "
                f"({', '.join(task.labels[:MAX_SHOWN])}): give one for each, in this order, or 'balanced'"
            )
        return list(task.class_weights)
    rows = read_rows(task.train)
    require_columns(task.train, rows, {"task.label": task.label})
    counts = Counter(label for row in rows for label in list_labels(task, row))
    if missing := [label for label in task.labels if not counts[label]]:
        raise UsageError(
            f"{task.train}: no example has the label {missing[0]!r}, so that it can't be weighed: give the numbers in "
            "task.class_weights, or take the label out of task.labels"
        )
    total = sum(counts[label] for label in task.labels)
    return [total / (len(task.labels) * counts[label]) for label in task.labels]


def prepare_corpus(
    path: str,
    task: TaskConfig,
    tokenizer: Tokenizer,
    example_format: ExampleFormat,
    folder: Path,
    *,
    tokenizer_file: str = "",
    with_labels: bool = True,
    reference: ReferenceScorer | None = None,
) -> TaskCorpus:
    """Tokenize a file into a corpus below `folder`, or reuse the one that an earlier call left there.

    task: with all `labels`. tokenizer_file: the file beside which a chat template lies. with_labels: false for files
    whose labels are to be predicted. reference: for preferences. Raises UsageError that names file and row.
    """
    rows = read_rows(path)
    identity = {
        "version": __version__,
        "rows": blake3(json.dumps(rows, default=str, sort_keys=True).encode()).hexdigest(),
        "tokenizer": tokenizer.hash,
        "task": {name: value for name, value in task.model_dump(mode="json").items() if name not in NOT_STORED},
        "sequence_length": example_format.sequence_length,
        "with_labels": with_labels,
        "is_causal": example_format.is_causal,
        **({"ends_in_cls": True} if example_format.ends_in_cls else {}),
        "target_length": example_format.target_length,
        "chat_template": _hash_chat_template(task, tokenizer_file, tokenizer),
        **({"reference": reference.identity} if reference else {}),
    }
    corpus_folder = folder / blake3(json.dumps(identity, sort_keys=True).encode()).hexdigest(8)
    if not (corpus_folder / MANIFEST).is_file():
        encoder: _Encoder
        if reference is not None:
            encoder = PreferenceEncoder(path, task, tokenizer, example_format, tokenizer_file, reference)
        elif task.has_head:
            encoder = ENCODERS.get(task.form, LabelledTextEncoder)(path, task, tokenizer, example_format, with_labels)
        else:
            encoder = AnswerEncoder(path, task, tokenizer, example_format, tokenizer_file)
        encoded, notes = encoder.encode(rows)
        _write_corpus(corpus_folder, encoded, str(path), tokenizer, identity | {"notes": notes})
    manifest = json.loads((corpus_folder / MANIFEST).read_bytes())
    return TaskCorpus(corpus_folder, len(rows), manifest["provenance"]["notes"])


class _Encoder(Protocol):
    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples and notes for the log. Raises UsageError that names the row."""
        ...


ENCODERS: Mapping[str, Callable[[str, TaskConfig, Tokenizer, ExampleFormat, bool], _Encoder]] = {
    "span_extraction": SpanEncoder,
    "multiple_choice": ChoiceEncoder,
}
"""Form of a task with a head → its encoder, where that is not `LabelledTextEncoder`."""


def _hash_chat_template(task: TaskConfig, tokenizer_file: str, tokenizer: Tokenizer) -> str | None:
    """Return the hash of the template that renders a task's conversations; None where none can be read."""
    if task.form not in CHAT_FORMS or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    try:
        return blake3(load_chat_template(tokenizer_file, tokenizer, task.chat_template).source.encode()).hexdigest()
    except UsageError:  # refused by name where a conversation is rendered
        return None


def _write_corpus(
    folder: Path, examples: Sequence[EncodedExample], source: str, tokenizer: Tokenizer, provenance: dict[str, object]
) -> None:
    """Write a corpus to a temporary folder, and rename it once it is complete."""
    partial = temporary_path(folder)
    try:
        with ShardWriter(partial, tokenizer_hash=tokenizer.hash, token_dtype=tokenizer.token_dtype) as writer:
            for index, example in enumerate(examples):
                writer.add(
                    f"{index:08d}",
                    example.tokens,
                    source,
                    example.text_bytes,
                    members={ANNOTATION: json.dumps(example.annotation, separators=(",", ":")).encode()},
                    side_lengths=example.side_lengths,
                )
            writer.finish(provenance)
        partial.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_files_exist(task: TaskConfig) -> None:
    """Raise UsageError for a file of the task that does not exist."""
    for key in ("train", "validation", "test"):
        path = getattr(task, key)
        if path is not None and not Path(path).exists():
            raise UsageError(f"task.{key} = {path}: there is no such file or folder: give one with examples")
