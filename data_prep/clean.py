"""The first stage: files become documents, which pass the steps; identical ones are joined."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from blake3 import blake3

from data_prep import steps
from data_prep.counts import Counts, why
from data_prep.documents import DocumentWriter, PartsWriter, part_path, read_parts
from data_prep.duplicates.index import Rows, RowsWriter
from data_prep.files import Listing, runs
from data_prep.read import Read
from data_prep.readers import format_of
from data_prep.split import choose
from data_prep.stages import Facts, Stages
from data_prep.steps import ExactDuplicates, FixUnicode, exact, pass_through
from megatfm.errors import UsageError


class Clean:
    """Reads files, in runs of about `part_bytes`, and cleans what is in them; then drops identical texts."""

    def __init__(self, stages: Stages, listing: Listing) -> None:
        self._stages = stages
        self._config = stages.config
        self._folder = stages.folder
        self._listing = listing
        self._steps = [steps.make(each) for each in self._config.steps]

    def run(self, basis: Facts) -> Facts:
        """Documents of all parts wait as `clean`."""
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
                passes: list[steps.Step] = [FixUnicode(), *self._fresh_steps()]
                digests = bytearray()
                with DocumentWriter(part_path(self._folder, "read", number)) as writer:
                    for document in pass_through(passes, read.documents(advance)):
                        writer.add(document)
                        digests += exact.digest(document)
                    writer.commit()
                RowsWriter(self._digests(number)).write(iter([np.frombuffer(digests, np.uint8)]))
                skipped = [f"{bad.path}: {bad.reason}" for bad in listing.bad[known:]]
                return {
                    "skipped_files": skipped,
                    "steps": [
                        counts.as_json() for counts in (read.counts, *(each.counts for each in passes))
                    ],
                }

            def join(parts: Iterable[Facts]) -> Facts:
                skipped = [f"{bad.path}: {bad.reason}" for bad in found_bad]
                skipped += [line for part in parts for line in part["skipped_files"]]
                return {**self._deduplicate(parts), "notes": notes, "skipped_files": skipped}

            return self._stages.parts("clean", basis, len(ranges), work, join)

    def _deduplicate(self, parts: Iterable[Facts]) -> Facts:
        """Join what was read, without exact duplicates."""
        steps_of_parts = [part["steps"] for part in parts]
        rows = Rows([self._digests(number) for number in range(len(steps_of_parts))], *exact.ROW)
        first = exact.firsts(rows, self._folder / "first.npy", self._config.memory_bytes)
        step, digest = ExactDuplicates(first), blake3()
        with PartsWriter(self._folder, "clean", self._config.part_bytes) as writer:
            for document in pass_through([step], read_parts(self._folder, "read", len(steps_of_parts))):
                digest.update(json.dumps(document.as_json()).encode())
                writer.add(document)
            counts = [*map(Counts.joined, zip(*steps_of_parts, strict=True)), step.counts]
            if not step.counts.documents_out:
                raise UsageError(f"{self._listing.root}: no document is left: {why(counts)}")
            writer.commit()
        return {
            "bytes": step.counts.bytes_out,
            "parts": writer.parts,
            "blake3": digest.hexdigest(),
            "steps": [each.as_json() for each in counts],
        }

    def _digests(self, number: int) -> Path:
        return self._folder / f"digests.{number:05d}"

    def _document_limit(self) -> tuple[int, list[str]]:
        """How long a document may be. The files of a corpus may be too few to hold some of them out: then they
        are cut so finely that parts of them can be."""
        limit = self._config.read.max_document_bytes
        share, seed = self._config.split.validation, self._config.split.seed
        sizes = {file.name: file.size for file in self._listing.files}
        records = any(format_of(file.path, self._config.read) != "text" for file in self._listing.files)
        if records or choose(sizes, share, seed):
            return limit, []
        finer = max(1024, min(limit, int(sum(sizes.values()) * share / 4)))
        return finer, [f"too few files to hold some out: cut into documents of at most {finer:,} bytes"]

    def _fresh_steps(self) -> list[steps.Counted]:
        """The steps of the config, with counts of nothing yet; lists and indices are read once for all parts."""
        for each in self._steps:
            each.counts = Counts(each.counts.step)
        return self._steps
