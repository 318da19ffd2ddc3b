"""The first stages: files become documents, which pass the steps; then identical ones are taken out."""

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
    part_path,
    read_documents,
)
from megatfm.data_prep.execution.stages import StageResult, StageRunner
from megatfm.data_prep.filters.base import CountingFilter, PipelineStep, make_filter, pass_through
from megatfm.data_prep.filters.text import FixUnicode
from megatfm.data_prep.input_files import DocumentReader, InputFiles, chunk_by_bytes
from megatfm.data_prep.split import choose_held_out
from megatfm.errors import UsageError

MANY_COPIES = 0.5
"""Share of documents from which on copies are told of."""


class CleanStage:
    """Reads files, in runs of about `task_bytes`, and cleans what is in them; then drops identical texts."""

    def __init__(self, stages: StageRunner, listing: InputFiles) -> None:
        self._stages = stages
        self._config = stages.config
        self._listing = listing
        self._steps = [make_filter(step) for step in self._config.steps]

    def run(self, basis: StageResult) -> StageResult:
        """Read, clean and deduplicate: documents of all parts wait as `exact_dedup`, in the folder of the basis."""
        self._folder = self._stages.at(basis)
        read = self._read(basis)
        pieces = [
            (part, piece) for part, counts in enumerate(read["documents"]) for piece in range(len(counts))
        ]
        counts = [count for counts in read["documents"] for count in counts]
        searched = _ExactDedup(self._stages, self._folder, pieces)
        duplicates = searched.find(counts, basis)
        with searched.remaining(counts, duplicates, read["bytes"]) as left:

            def work(number: int) -> StageResult:
                counts = StepStats(ExactDedup.title)
                documents = read_documents(searched.piece(number))
                kept = self._hash_documents(left(number, documents, counts), self._hash_path(number))
                return {**write_part(self._folder, "exact_dedup", number, kept), "step": counts.as_json()}

            def join(parts: Iterable[StageResult]) -> StageResult:
                step = StepStats.merge([part["step"] for part in parts])
                _name_first_copies(step, duplicates["examples"], searched, counts)
                return {
                    "bytes": step.bytes_out,
                    "parts": len(pieces),
                    "blake3": _joined(map(self._hash_path, range(len(pieces)))),
                    "steps": [*read["steps"], step.as_json()],
                    "notes": [*read["notes"], *_copies_warning(step)],
                    "skipped_files": read["skipped_files"],
                }

            def tidy() -> None:
                for number in range(len(pieces)):
                    searched.piece(number).unlink(missing_ok=True)
                    self._hash_path(number).unlink(missing_ok=True)
                searched.remove_marks(duplicates)

            return self._stages.parts("exact_dedup", basis, len(pieces), work, join, tidy=tidy)

    def _read(self, basis: StageResult) -> StageResult:
        """Write what passes the steps, in pieces of about `task_bytes`, and the hashes of the texts."""
        listing = self._listing
        limit, notes = self._document_limit()
        notes += [note for step in self._steps for note in step.notes]
        if listing.n_excluded:
            notes.append(f"left out by name: {listing.n_excluded:,} files or folders")
        ranges = chunk_by_bytes([file.size for file in listing.files], self._config.task_bytes)
        found_bad = list(listing.bad)
        total = sum(file.size for file in listing.files)
        with self._stages.reporter.stage("clean", total) as advance:

            def work(number: int) -> StageResult:
                first, end = ranges[number]
                known = len(listing.bad)
                read = DocumentReader(
                    listing, limit, listing.files[first:end], found_bad if number == 0 else ()
                )
                repairs = [FixUnicode()] if self._config.read.fix_unicode else []
                passes: list[PipelineStep] = [*repairs, *self._fresh_steps()]
                documents = self._write_pieces(number, pass_through(passes, read.documents(advance)))
                counts = [read.counts, *(part_counts.counts for part_counts in passes)]
                return {
                    "documents": documents,
                    "skipped_files": [f"{bad.where}: {bad.reason}" for bad in listing.bad[known:]],
                    "steps": [step_counts.as_json() for step_counts in counts],
                }

            def join(parts: Iterable[StageResult]) -> StageResult:
                skipped = [f"{bad.where}: {bad.reason}" for bad in found_bad]
                skipped += [line for part in parts for line in part["skipped_files"]]
                counts = [*map(StepStats.merge, zip(*(part["steps"] for part in parts), strict=True))]
                if not counts[-1].documents_out:
                    raise UsageError(f"{listing.root}: no document is left: {format_drop_reasons(counts)}")
                return {
                    "bytes": counts[-1].bytes_out,
                    "documents": [part["documents"] for part in parts],
                    "steps": [step_counts.as_json() for step_counts in counts],
                    "notes": notes,
                    "skipped_files": skipped,
                }

            return self._stages.parts("clean", basis, len(ranges), work, join)

    def _write_pieces(self, number: int, documents: Iterator[Document]) -> list[int]:
        """Write the documents of a part of the files. Returns how many each piece has."""
        counts: list[int] = []
        rows: list[Any] = []
        search = ExactDedup()

        def end_piece() -> None:
            counts.append(len(rows))
            write_keys(_rows(self._folder, number, len(counts) - 1), rows)
            rows.clear()

        with ChunkedDocumentWriter(self._folder, _name(number), self._config.task_bytes) as writer:
            for document in documents:
                if writer.is_full:
                    end_piece()
                writer.add(document)
                rows += search.compute_keys([document])
            writer.commit()
            end_piece()
        return counts

    def _hash_documents(self, documents: Iterable[Document], path: Path) -> Iterator[Document]:
        """The documents; their hashes are written to a file."""
        hashes = bytearray()
        for document in documents:
            hashes += blake3(json.dumps(document.to_list()).encode()).digest()
            yield document
        write_keys(path, [np.frombuffer(hashes, np.uint8)])

    def _hash_path(self, number: int) -> Path:
        return self._folder / f"identity.{number:05d}"

    def _document_limit(self) -> tuple[int, list[str]]:
        """How long a document may be. The files of a corpus may be too few to hold some of them out: then they
        are cut so finely that parts of them can be."""
        limit = self._config.read.max_document_bytes
        share, seed = self._config.split.validation, self._config.split.seed
        sizes = {file.name: file.size for file in self._listing.files}
        records = any(self._listing.format(file) != "text" for file in self._listing.files)
        if records or not share or self._config.split.validation_files or choose_held_out(sizes, share, seed):
            return limit, []
        finer = max(1024, min(limit, int(sum(sizes.values()) * share / 4)))
        return finer, [f"too few files to hold some out: cut into documents of at most {finer:,} bytes"]

    def _fresh_steps(self) -> list[CountingFilter]:
        """The steps of the config, with counts of nothing yet; lists and indices are read once for all parts."""
        for step in self._steps:
            step.counts = StepStats(step.counts.step)
        return self._steps


class _ExactDedup(DedupPass):
    """The search for identical texts in the pieces of what was read."""

    def __init__(self, stages: StageRunner, folder: Path, pieces: list[tuple[int, int]]) -> None:
        super().__init__(stages, folder, "exact_dedup", ExactDedup(), len(pieces))
        self._pieces = pieces

    def rows(self, part: int) -> Path:
        return _rows(self.folder, *self._pieces[part])

    def piece(self, part: int) -> Path:
        number, piece = self._pieces[part]
        return part_path(self.folder, _name(number), piece)


def _name(number: int) -> str:
    return f"clean.{number:05d}"


def _rows(folder: Path, number: int, piece: int) -> Path:
    return folder / f"digests.{number:05d}.{piece:05d}"


def _joined(paths: Iterable[Path]) -> str:
    """One hash of many, which does not depend on the parts."""
    fingerprint = blake3()
    for path in paths:
        fingerprint.update(path.read_bytes())
    return fingerprint.hexdigest()


def _copies_warning(step: StepStats) -> list[str]:
    """A note on a corpus of which most is there more than once."""
    copies = step.documents_in - step.documents_out
    if copies <= MANY_COPIES * step.documents_in:
        return []
    return [
        f"{copies:,} of {step.documents_in:,} documents are copies of others, letter by letter, and were left out: "
        "look whether files were read twice, or a step leaves the same of all"
    ]


def _name_first_copies(
    step: StepStats, examples: list[list[int]], searched: _ExactDedup, counts: list[int]
) -> None:
    """Say of the examples of identical texts which the first one is."""
    if ExactDedup.reason not in step.dropped:
        return
    begins = np.cumsum([0, *counts])
    dropped = step.dropped[ExactDedup.reason]
    for number, (source, (_, first)) in enumerate(zip(dropped.examples, examples, strict=True)):
        part = int(np.searchsorted(begins, first, "right")) - 1
        documents = read_documents(searched.piece(part))
        document = next(islice(documents, first - int(begins[part]), None))
        dropped.examples[number] = f"{source} = {document.id}"
