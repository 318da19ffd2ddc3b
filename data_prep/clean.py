"""The first stages: files become documents, which pass the steps; then identical ones are taken out."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from megatfm.data_prep import steps
from megatfm.data_prep.counts import Counts, why
from megatfm.data_prep.documents import Document, PartsWriter, part_path, read_documents
from megatfm.data_prep.duplicates.exact import Exact
from megatfm.data_prep.duplicates.index import RowsWriter
from megatfm.data_prep.files import Listing, runs
from megatfm.data_prep.read import Read
from megatfm.data_prep.split import choose
from megatfm.data_prep.stages import Facts, Stages
from megatfm.data_prep.steps import FixUnicode, pass_through
from megatfm.data_prep.thin import Searched, write_part
from megatfm.errors import UsageError

MANY_COPIES = 0.5
"""Share of documents from which on copies are told of."""


class Clean:
    """Reads files, in runs of about `part_bytes`, and cleans what is in them; then drops identical texts."""

    def __init__(self, stages: Stages, listing: Listing) -> None:
        self._stages = stages
        self._config = stages.config
        self._listing = listing
        self._steps = [steps.make(each) for each in self._config.steps]

    def run(self, basis: Facts) -> Facts:
        """Documents of all parts wait as `clean`, in the folder of the basis."""
        self._folder = self._stages.at(basis)
        read = self._read(basis)
        pieces = [
            (part, piece) for part, counts in enumerate(read["documents"]) for piece in range(len(counts))
        ]
        counts = [count for counts in read["documents"] for count in counts]
        searched = _Pieces(self._stages, self._folder, pieces)
        found = searched.find(counts, basis)
        with searched.left(counts, found, read["bytes"]) as left:

            def work(number: int) -> Facts:
                counts = Counts(Exact.title)
                documents = read_documents(searched.piece(number))
                kept = self._noting(left(number, documents, counts), self._identity(number))
                return {**write_part(self._folder, "clean", number, kept), "step": counts.as_json()}

            def join(parts: Iterable[Facts]) -> Facts:
                step = Counts.joined([part["step"] for part in parts])
                _name_firsts(step, found["examples"], searched, counts)
                return {
                    "bytes": step.bytes_out,
                    "parts": len(pieces),
                    "blake3": _joined(map(self._identity, range(len(pieces)))),
                    "steps": [*read["steps"], step.as_json()],
                    "notes": [*read["notes"], *_of_copies(step)],
                    "skipped_files": read["skipped_files"],
                }

            def tidy() -> None:
                for number in range(len(pieces)):
                    searched.piece(number).unlink(missing_ok=True)
                    self._identity(number).unlink(missing_ok=True)
                searched.remove_marks(found)

            return self._stages.parts("clean", basis, len(pieces), work, join, tidy=tidy)

    def _read(self, basis: Facts) -> Facts:
        """What passes the steps, in pieces of about `part_bytes`, and the hashes of the texts."""
        listing = self._listing
        limit, notes = self._document_limit()
        notes += [note for each in self._steps for note in each.notes]
        if listing.left_out:
            notes.append(f"left out by name: {listing.left_out:,} files or folders")
        ranges = runs([file.size for file in listing.files], self._config.part_bytes)
        found_bad = list(listing.bad)
        total = sum(file.size for file in listing.files)
        with self._stages.reporter.stage("read and clean", total) as advance:

            def work(number: int) -> Facts:
                first, end = ranges[number]
                known = len(listing.bad)
                read = Read(listing, limit, listing.files[first:end], found_bad if number == 0 else ())
                repairs = [FixUnicode()] if self._config.read.repair_unicode else []
                passes: list[steps.DocumentStep] = [*repairs, *self._fresh_steps()]
                documents = self._write_pieces(number, pass_through(passes, read.documents(advance)))
                counts = [read.counts, *(each.counts for each in passes)]
                return {
                    "documents": documents,
                    "skipped_files": [f"{bad.where}: {bad.reason}" for bad in listing.bad[known:]],
                    "steps": [each.as_json() for each in counts],
                }

            def join(parts: Iterable[Facts]) -> Facts:
                skipped = [f"{bad.where}: {bad.reason}" for bad in found_bad]
                skipped += [line for part in parts for line in part["skipped_files"]]
                counts = [*map(Counts.joined, zip(*(part["steps"] for part in parts), strict=True))]
                if not counts[-1].documents_out:
                    raise UsageError(f"{listing.root}: no document is left: {why(counts)}")
                return {
                    "bytes": counts[-1].bytes_out,
                    "documents": [part["documents"] for part in parts],
                    "steps": [each.as_json() for each in counts],
                    "notes": notes,
                    "skipped_files": skipped,
                }

            return self._stages.parts("read", basis, len(ranges), work, join)

    def _write_pieces(self, number: int, documents: Iterator[Document]) -> list[int]:
        """Write the documents of a part of the files. Returns how many each piece has."""
        counts: list[int] = []
        rows: list[Any] = []
        search = Exact()

        def end_piece() -> None:
            counts.append(len(rows))
            RowsWriter(_rows(self._folder, number, len(counts) - 1)).write(iter(rows))
            rows.clear()

        with PartsWriter(self._folder, _name(number), self._config.part_bytes) as writer:
            for document in documents:
                if writer.is_full:
                    end_piece()
                writer.add(document)
                rows += search.scan([document])
            writer.commit()
            end_piece()
        return counts

    def _noting(self, documents: Iterable[Document], path: Path) -> Iterator[Document]:
        """The documents; their hashes are written to a file."""
        hashes = bytearray()
        for document in documents:
            hashes += blake3(json.dumps(document.as_json()).encode()).digest()
            yield document
        RowsWriter(path).write(iter([np.frombuffer(hashes, np.uint8)]))

    def _identity(self, number: int) -> Path:
        return self._folder / f"identity.{number:05d}"

    def _document_limit(self) -> tuple[int, list[str]]:
        """How long a document may be. The files of a corpus may be too few to hold some of them out: then they
        are cut so finely that parts of them can be."""
        limit = self._config.read.max_document_bytes
        share, seed = self._config.split.validation, self._config.split.seed
        sizes = {file.name: file.size for file in self._listing.files}
        records = any(self._listing.format(file) != "text" for file in self._listing.files)
        if records or not share or self._config.split.files or choose(sizes, share, seed):
            return limit, []
        finer = max(1024, min(limit, int(sum(sizes.values()) * share / 4)))
        return finer, [f"too few files to hold some out: cut into documents of at most {finer:,} bytes"]

    def _fresh_steps(self) -> list[steps.Counted]:
        """The steps of the config, with counts of nothing yet; lists and indices are read once for all parts."""
        for each in self._steps:
            each.counts = Counts(each.counts.step)
        return self._steps


class _Pieces(Searched):
    """The search for identical texts in the pieces of what was read."""

    def __init__(self, stages: Stages, folder: Path, pieces: list[tuple[int, int]]) -> None:
        super().__init__(stages, folder, "exact", Exact(), len(pieces))
        self._pieces = pieces

    def rows(self, part: int) -> Path:
        return _rows(self.folder, *self._pieces[part])

    def piece(self, part: int) -> Path:
        number, piece = self._pieces[part]
        return part_path(self.folder, _name(number), piece)


def _name(number: int) -> str:
    return f"read.{number:05d}"


def _rows(folder: Path, number: int, piece: int) -> Path:
    return folder / f"digests.{number:05d}.{piece:05d}"


def _joined(paths: Iterable[Path]) -> str:
    """One hash of many, which does not depend on the parts."""
    whole = blake3()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()


def _of_copies(step: Counts) -> list[str]:
    """A note on a corpus of which most is there more than once."""
    copies = step.documents_in - step.documents_out
    if copies <= MANY_COPIES * step.documents_in:
        return []
    return [
        f"{copies:,} of {step.documents_in:,} documents are copies of others, letter by letter, and were left out: "
        "look whether files were read twice, or a step leaves the same of all"
    ]


def _name_firsts(step: Counts, examples: list[list[int]], searched: _Pieces, counts: list[int]) -> None:
    """Say of the examples of identical texts which the first one is."""
    if Exact.reason not in step.dropped:
        return
    begins = np.cumsum([0, *counts])
    dropped = step.dropped[Exact.reason]
    for number, (source, (_, first)) in enumerate(zip(dropped.examples, examples, strict=True)):
        part = int(np.searchsorted(begins, first, "right")) - 1
        documents = read_documents(searched.piece(part))
        document = next(islice(documents, first - int(begins[part]), None))
        dropped.examples[number] = f"{source} = {document.source}"
