"""The first stages: read files as documents, apply the steps, and drop identical documents."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from megatfm.data_prep.dedup.key_table import write_keys
from megatfm.data_prep.dedup.methods import ExactDedup
from megatfm.data_prep.dedup.runner import DedupPass, write_part
from megatfm.data_prep.documents import (
    ChunkedDocumentWriter,
    Document,
    StepStats,
    format_drop_reasons,
    get_part_path,
    read_documents,
    warn_of_skipped,
)
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.filters.base import CountingFilter, make_filter, pass_through
from megatfm.data_prep.filters.text import FixUnicode
from megatfm.data_prep.input_files import DocumentReader, InputFiles, chunk_by_bytes
from megatfm.data_prep.split import choose_held_out
from megatfm.errors import UsageError

MANY_COPIES = 0.5
"""Share of copies among the documents above which there is a warning."""


class CleanStage:
    """Reads files in parts of about `task_bytes`, and cleans their documents; then drops identical texts."""

    def __init__(self, stages: StageRunner, inputs: InputFiles) -> None:
        self._stages = stages
        self._config = stages.config
        self._inputs = inputs
        repairs = [CountingFilter(FixUnicode())] if self._config.read.fix_unicode else []
        self._steps = [*repairs, *map(make_filter, self._config.steps)]

    def run(self, basis: StageResult) -> StageResult:
        """Read, clean and deduplicate. The documents lie as `exact_dedup` in the folder of the basis."""
        self._folder = self._stages.get_folder(basis)
        read_result = self._read(basis)
        chunks = [(part, chunk) for part, counts in enumerate(read_result["documents"]) for chunk in range(len(counts))]
        counts = [count for counts in read_result["documents"] for count in counts]
        exact_dedup = _ExactDedup(self._stages, self._folder, chunks)
        duplicates = exact_dedup.find(counts, basis)
        filter_part = exact_dedup.make_part_filter(counts, duplicates)

        def work(part: int, advance: UpdateProgress) -> StageResult:
            counts = StepStats(ExactDedup.title)
            part_documents = read_documents(exact_dedup.get_chunk_path(part))
            remaining = filter_part(part, part_documents, counts, advance)
            hashed_documents = self._hash_documents(remaining, self._get_hashes_path(part))
            return {**write_part(self._folder, "exact_dedup", part, hashed_documents), "step": counts.as_json()}

        def join(parts: Iterable[StageResult]) -> StageResult:
            step = StepStats.merge([part["step"] for part in parts])
            _name_first_copies(step, duplicates["examples"], exact_dedup, counts)
            return {
                "bytes": step.bytes_out,
                "parts": len(chunks),
                "blake3": _hash_files(map(self._get_hashes_path, range(len(chunks)))),
                "steps": [*read_result["steps"], step.as_json()],
                "notes": [*read_result["notes"], *_warn_of_copies(step)],
                "skipped_files": read_result["skipped_files"],
            }

        def tidy() -> None:
            for index in range(len(chunks)):
                exact_dedup.get_chunk_path(index).unlink(missing_ok=True)
                self._get_hashes_path(index).unlink(missing_ok=True)
            exact_dedup.remove_marks(duplicates)

        return self._stages.run_parts(
            "exact_dedup", basis, len(chunks), work, join, total=read_result["bytes"], tidy=tidy
        )

    def _read(self, basis: StageResult) -> StageResult:
        """Write the documents that pass the steps, in chunks of about `task_bytes`, and the hashes of their texts."""
        inputs = self._inputs
        limit, notes = self._find_document_limit()
        notes += [note for step in self._steps for note in step.notes]
        notes += inputs.notes
        ranges = chunk_by_bytes([file.size for file in inputs.files], self._config.task_bytes)
        known_bad = list(inputs.bad)
        total = sum(file.size for file in inputs.files)

        def work(part: int, advance: UpdateProgress) -> StageResult:
            first, end = ranges[part]
            n_bad_before = len(inputs.bad)
            reader = DocumentReader(inputs, limit, inputs.files[first:end], known_bad if part == 0 else ())
            steps = self._reset_counts()
            documents = self._write_chunks(part, pass_through(steps, reader.iter_documents(advance)))
            counts = [reader.counts, *(step.counts for step in steps)]
            return {
                "documents": documents,
                "skipped_files": [f"{bad.where}: {bad.reason}" for bad in inputs.bad[n_bad_before:]],
                "steps": [step_counts.as_json() for step_counts in counts],
            }

        def join(parts: Iterable[StageResult]) -> StageResult:
            skipped = [f"{bad.where}: {bad.reason}" for bad in known_bad]
            skipped += [line for part in parts for line in part["skipped_files"]]
            counts = [*map(StepStats.merge, zip(*(part["steps"] for part in parts), strict=True))]
            if not counts[-1].documents_out:
                raise UsageError(
                    f"{inputs.root}: no document is left: {format_drop_reasons(counts)}: "
                    "loosen the steps that drop them, or mend what is read"
                )
            return {
                "bytes": counts[-1].bytes_out,
                "documents": [part["documents"] for part in parts],
                "steps": [step_counts.as_json() for step_counts in counts],
                "notes": [*notes, *warn_of_skipped(counts[0])],
                "skipped_files": skipped,
            }

        return self._stages.run_parts("clean", basis, len(ranges), work, join, total=total)

    def _write_chunks(self, part: int, documents: Iterator[Document]) -> list[int]:
        """Write the documents of a part of the files. Returns the number in each chunk."""
        counts: list[int] = []
        keys: list[Any] = []
        method = ExactDedup()

        def end_chunk() -> None:
            counts.append(len(keys))
            write_keys(_get_keys_path(self._folder, part, len(counts) - 1), keys)
            keys.clear()

        with ChunkedDocumentWriter(self._folder, _make_part_name(part), self._config.task_bytes) as writer:
            for document in documents:
                if writer.is_full:
                    end_chunk()
                writer.add(document)
                keys += method.compute_keys([document])
            writer.commit()
            end_chunk()
        return counts

    def _hash_documents(self, documents: Iterable[Document], path: Path) -> Iterator[Document]:
        """Yield the documents, and write their hashes to a file."""
        hashes = bytearray()
        for document in documents:
            hashes += blake3(json.dumps(document.to_list()).encode()).digest()
            yield document
        write_keys(path, [np.frombuffer(hashes, np.uint8)])

    def _get_hashes_path(self, part: int) -> Path:
        return self._folder / f"identity.{part:05d}"

    def _find_document_limit(self) -> tuple[int, list[str]]:
        """Return the size limit of a document in bytes, and notes.

        If the files are too few to hold some out, they are cut so finely that parts of them can be held out.
        """
        limit = self._config.read.max_document_bytes
        share, seed = self._config.split.validation, self._config.split.seed
        sizes = {file.name: file.size for file in self._inputs.files}
        holds_records = any(self._inputs.find_format(file) != "text" for file in self._inputs.files)
        if holds_records or not share or self._config.split.validation_files or choose_held_out(sizes, share, seed):
            return limit, []
        cut_limit = max(1024, min(limit, int(sum(sizes.values()) * share / 4)))
        return cut_limit, [f"too few files to hold some out: cut into documents of at most {cut_limit:,} bytes"]

    def _reset_counts(self) -> list[CountingFilter]:
        """Return the steps with new counts; their lists and indices are read once for all parts."""
        for step in self._steps:
            step.counts = StepStats(step.counts.step)
        return self._steps


class _ExactDedup(DedupPass):
    """The search for identical texts in the chunks of clean documents."""

    def __init__(self, stages: StageRunner, folder: Path, chunks: list[tuple[int, int]]) -> None:
        super().__init__(stages, folder, "exact_dedup", ExactDedup(), len(chunks))
        self._chunks = chunks

    def get_rows_path(self, part: int) -> Path:
        return _get_keys_path(self.folder, *self._chunks[part])

    def get_chunk_path(self, part: int) -> Path:
        file_part, chunk = self._chunks[part]
        return get_part_path(self.folder, _make_part_name(file_part), chunk)


def _make_part_name(part: int) -> str:
    return f"clean.{part:05d}"


def _get_keys_path(folder: Path, part: int, chunk: int) -> Path:
    return folder / f"digests.{part:05d}.{chunk:05d}"


def _hash_files(paths: Iterable[Path]) -> str:
    """Hash the files' contents as one stream, independent of how it is divided."""
    fingerprint = blake3()
    for path in paths:
        fingerprint.update(path.read_bytes())
    return fingerprint.hexdigest()


def _warn_of_copies(step: StepStats) -> list[str]:
    """Return a note if most documents are copies."""
    copies = step.documents_in - step.documents_out
    if copies <= MANY_COPIES * step.documents_in:
        return []
    return [
        f"{copies:,} of {step.documents_in:,} documents are exact copies of others, and were left out: check whether "
        "files are read twice, or a step leaves the same text of all documents"
    ]


def _name_first_copies(step: StepStats, examples: list[list[int]], exact_dedup: _ExactDedup, counts: list[int]) -> None:
    """Name the first occurrence beside each example of an identical text."""
    if ExactDedup.reason not in step.dropped:
        return
    starts = np.cumsum([0, *counts])
    dropped = step.dropped[ExactDedup.reason]
    for index, (source, (_, first)) in enumerate(zip(dropped.examples, examples, strict=True)):
        part = int(np.searchsorted(starts, first, "right")) - 1
        documents = read_documents(exact_dedup.get_chunk_path(part))
        document = next(islice(documents, first - int(starts[part]), None))
        dropped.examples[index] = f"{source} = {document.id}"
