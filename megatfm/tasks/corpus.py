"""Labelled files tokenized once: a corpus of framed examples, each with its label, named by all that decides it."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from megatfm.config import TaskConfig
from megatfm.corpus.manifest import MANIFEST
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import UsageError
from megatfm.files import temporary_path
from megatfm.objectives.supervised import ANNOTATION
from megatfm.tasks.answers import AnswerEncoder
from megatfm.tasks.choices import ChoiceEncoder
from megatfm.tasks.files import read_rows, require_columns
from megatfm.tasks.forms import EncodedExample, RowEncoder, labels_of
from megatfm.tasks.preferences import LogProbabilities, PreferenceEncoder
from megatfm.tasks.spans import SpanEncoder
from megatfm.tokenizers import Tokenizer
from megatfm.version import __version__

NOT_STORED = frozenset(
    {
        "train", "validation", "test", "epochs", "metric", "lm_weight", "n_best", "max_answer_tokens", "text_metrics",
        "beams", "length_penalty", "max_new_tokens",
    }
)  # fmt: skip
"""Keys of a task that don't change its corpora."""


@dataclass(frozen=True)
class TaskCorpus:
    """A tokenized file: its folder, how many examples it has, and what to say of it."""

    folder: Path
    n_examples: int
    notes: Sequence[str] = ()


def read_labels(task: TaskConfig) -> list[str]:
    """Return the labels of a task in the order of the classes: those of the config, or of the training file."""
    if task.labels or task.form not in ("classification", "multilabel", "tagging"):
        return list(task.labels)
    rows = read_rows(task.train)
    require_columns(task.train, rows, {"task.label": task.label})
    return labels_of(task, rows)


def prepare_corpus(
    path: str,
    task: TaskConfig,
    tokenizer: Tokenizer,
    sequence_length: int,
    folder: Path,
    *,
    tokenizer_file: str = "",
    with_labels: bool = True,
    is_causal: bool = False,
    target_length: int | None = None,
    reference: LogProbabilities | None = None,
    reference_identity: str = "",
) -> TaskCorpus:
    """Tokenize a file into a corpus below `folder`, or find the one that an earlier call left there.

    task: with all `labels`. with_labels: false for files whose labels are to be predicted. is_causal: for a decoder,
    in which the last token of an example carries its label. target_length: tokens of an encoder-decoder's decoder.
    reference: of preferences, the model at the start, and what tells it from others. Raises UsageError that names file
    and row.
    """
    rows = read_rows(path)
    key = {
        "version": __version__,
        "rows": blake3(json.dumps(rows, default=str, sort_keys=True).encode()).hexdigest(),
        "tokenizer": tokenizer.hash,
        "task": {
            name: value for name, value in task.model_dump(mode="json").items() if name not in NOT_STORED
        },
        "sequence_length": sequence_length,
        "with_labels": with_labels,
        "is_causal": is_causal,
        "target_length": target_length,
        "chat_template": _content(task.chat_template),
        **({"reference": reference_identity} if reference_identity else {}),
    }
    target = folder / blake3(json.dumps(key, sort_keys=True).encode()).hexdigest(8)
    if not (target / MANIFEST).is_file():
        carrier = -1 if is_causal else 0
        encoder: RowEncoder | AnswerEncoder | SpanEncoder | ChoiceEncoder | PreferenceEncoder
        if task.form == "span_extraction":
            encoder = SpanEncoder(path, task, tokenizer, sequence_length, with_labels)
        elif task.form == "multiple_choice":
            encoder = ChoiceEncoder(path, task, tokenizer, sequence_length, with_labels, carrier)
        elif task.has_head:
            encoder = RowEncoder(path, task, tokenizer, sequence_length, with_labels, carrier)
        elif reference is not None:
            encoder = PreferenceEncoder(path, task, tokenizer, tokenizer_file, sequence_length, reference)
        else:
            encoder = AnswerEncoder(path, task, tokenizer, tokenizer_file, sequence_length, target_length)
        encoded, notes = encoder.encode(rows)
        _write(target, encoded, str(path), tokenizer, key | {"notes": notes})
    manifest = json.loads((target / MANIFEST).read_bytes())
    return TaskCorpus(target, len(rows), manifest["provenance"]["notes"])


def _content(path: str | None) -> str | None:
    """Return the hash of a file's content, where there is one."""
    return blake3(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None


def _write(
    target: Path,
    examples: Sequence[EncodedExample],
    source: str,
    tokenizer: Tokenizer,
    provenance: dict[str, object],
) -> None:
    """Write a corpus beside its place, and give it its name when it is whole."""
    partial = temporary_path(target)
    with ShardWriter(partial, tokenizer_hash=tokenizer.hash, token_dtype=tokenizer.token_dtype) as writer:
        for number, example in enumerate(examples):
            writer.add(
                f"{number:08d}",
                example.tokens,
                source,
                example.text_bytes,
                members={ANNOTATION: json.dumps(example.annotation, separators=(",", ":")).encode()},
                image_size=example.sizes,
            )
        writer.finish(provenance)
    try:
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial)
        if not (target / MANIFEST).is_file():
            raise


def check_files_exist(task: TaskConfig) -> None:
    """Raise UsageError for a file of the task that is not there, before anything else is done."""
    for key in ("train", "validation", "test"):
        path = getattr(task, key)
        if path is not None and not Path(path).exists():
            raise UsageError(f"task.{key} = {path}: there is no such file or folder: give one with examples")
