"""Hold documents out for validation, and drop their near duplicates from training.

1. Plan the split: which folders, files, records or parts of files are held out (`plan_by_files` and its variants).
2. Write the held-out documents, with an index of their MinHash signatures on disk (`dedup/validation.py`).
3. Write the other documents for training, except near duplicates of held-out ones (`SplitStage`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from megatfm.data_prep.dedup.validation import ValidationNearDuplicates
from megatfm.data_prep.documents import (
    Document,
    DocumentWriter,
    StepStats,
    format_drop_reasons,
    get_part_path,
    read_documents,
)
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress, track_progress
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.input_files import matches_path
from megatfm.errors import UsageError

LEVELS: Mapping[str, Callable[[Document], str]] = {
    "top-level folder": lambda document: document.top_level,
    "file": lambda document: document.file,
    "record": lambda document: document.unit,
    "part of a file": lambda document: document.id,
}
"""Units that a split keeps together, from the best protection against leaks to the least: "part of a file" gives none,
since parts of one text fall into both splits."""
FILE_LEVELS, DOCUMENT_LEVELS = (*LEVELS,)[:2], (*LEVELS,)[2:]
"""Levels that follow from the names of files, and levels that need the documents."""


@dataclass(frozen=True)
class Split:
    """The level at which a corpus is split, and the held-out names.

    below: if there are too many names, names with a smaller 16-bit hash are held out.
    """

    level: str
    held_out: frozenset[str]
    below: int = 0
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.held_out) or self.below > 0

    def holds_out(self, document: Document) -> bool:
        """Return whether a document is for validation; documents with one name at the level stay together."""
        if self.below:
            return _choose_bin(LEVELS[self.level](document), self.seed) < self.below
        return bool(self.held_out) and LEVELS[self.level](document) in self.held_out


def _hash_name(name: str, seed: int) -> bytes:
    return blake3(f"{seed}:{name}".encode()).digest()


def _choose_bin(name: str, seed: int) -> int:
    return int.from_bytes(_hash_name(name, seed)[:2], "big")


def choose_held_out(sizes: Mapping[str, int], share: float, seed: int) -> frozenset[str]:
    """Choose names to hold out: at most `share` of all bytes, at least half of that, or none. sizes: bytes by name.

    Names are tried in the order of a hash of (seed, name), so that a new name changes the choice little. A name that
    is larger than the bytes that remain is passed over.
    """
    max_bytes = share * sum(sizes.values())
    remaining_bytes = max_bytes
    held_out = set()
    for name in sorted(sizes, key=lambda name: _hash_name(name, seed)):
        if sizes[name] <= remaining_bytes:
            held_out.add(name)
            remaining_bytes -= sizes[name]
    return frozenset(held_out) if max_bytes and remaining_bytes <= max_bytes / 2 else frozenset()


def plan_by_files(files: Mapping[str, int], share: float, seed: int) -> Split | None:
    """Plan the split at the first level of files at which `share` can be met; None if there is none.

    files: bytes of each file.
    """
    for level in FILE_LEVELS:
        sizes: Counter[str] = Counter()
        for file, size in files.items():
            sizes[LEVELS[level](Document(file, ""))] += size
        if held_out := choose_held_out(sizes, share, seed):
            return Split(level, held_out)
    return None


def plan_by_documents(sizes: Mapping[str, Mapping[str, int]], share: float, seed: int) -> Split | None:
    """Plan the split at a level of documents; None if there are too few. sizes: bytes of each name, by level."""
    for level in DOCUMENT_LEVELS:
        if held_out := choose_held_out(sizes[level], share, seed):
            return Split(level, held_out)
    return None


def plan_by_hash(parts: Iterable[Mapping[str, Mapping[str, int]]], level: str, share: float, seed: int) -> Split | None:
    """Plan the split by hashes of names, if there are too many names to hold in memory; None if that is impossible.

    Names with the lowest hashes are held out: at most `share` of all bytes, and at least half of that. parts: for each
    part, by level, the bytes of each name.
    """
    bins = np.zeros(2**16, np.int64)
    for part in parts:
        for name, size in part[level].items():
            bins[_choose_bin(name, seed)] += size
    sums, max_bytes = np.cumsum(bins), share * int(bins.sum())
    below = int(np.searchsorted(sums, max_bytes, "right"))
    fits = below > 0 and max_bytes > 0 and 2 * int(sums[below - 1]) >= max_bytes
    return Split(level, frozenset(), below, seed) if fits else None


NO_SPLIT: StageResult = {"level": "nothing", "names": [], "parts": []}
"""The plan that holds out nothing."""
HELD_OUT = "held_out"
"""Drop reason under which the step `split` counts documents that go to validation."""
MAX_NAMES = 10**6
"""Largest number of records that are held out by name; more are held out by their hashes."""
NOTES = {
    "file": "whole files are held out: too few folders",
    "record": "single records are held out: too few files",
    "part of a file": "split by part of a file: parts of one text are in training and in validation, whose loss will "
    "look better than that of new text: add files or records, or name those to hold out in split.validation_files",
}


class SplitStage:
    """Splits documents into training and validation.

    folder, name, parts: where they lie, the stage that wrote them and counted the bytes of each file, and its parts.
    """

    def __init__(self, stages: StageRunner, folder: Path, name: str, parts: int) -> None:
        self._stages = stages
        self._config = stages.config
        self._input = folder
        self._name, self._parts = name, parts

    def plan(self, basis: StageResult) -> StageResult:
        """Choose the held-out documents: the level, the names, and the parts that contain some."""
        config = self._config.split
        share, seed = config.validation, config.seed
        if not config.has_validation_split:
            return NO_SPLIT

        def plan_whole_files() -> StageResult:
            sizes: Counter[str] = Counter()
            for part in self._stages.read_part_results(self._name, basis, range(self._parts)):
                sizes.update(part["files"])
            by_name = _split_by_patterns(sizes, config.validation_files) if config.validation_files else None
            return _describe_plan(
                by_name or plan_by_files(sizes, share, seed),
                self._stages.read_part_results(self._name, basis, range(self._parts)),
            )

        def measure(part: int, advance: UpdateProgress) -> StageResult:
            sizes: dict[str, Counter[str]] = {level: Counter() for level in DOCUMENT_LEVELS}
            for document in read_documents(get_part_path(self._input, self._name, part)):
                for level, level_sizes in sizes.items():
                    level_sizes[LEVELS[level](document)] += document.text_bytes
            advance(1)
            return sizes

        def combine_measures(parts: Iterable[StageResult]) -> StageResult:
            split = _plan_documents(parts, share, seed)
            if split is None:
                raise UsageError(
                    f"too little text to hold {100 * share:.0f} % of it out: documents are held out whole: add some, "
                    "change split.validation, or hold nothing out with split.validation=0"
                )
            return _describe_plan(split, ({"files": part[split.level]} for part in parts))

        if (plan := self._stages.run_once("split-plan", basis, plan_whole_files))["level"]:
            return plan
        return self._stages.run_parts(
            "split-plan-parts", basis, self._parts, measure, combine_measures, total=self._parts, unit="parts"
        )

    def run(self, plan: StageResult, size: int, basis: StageResult) -> StageResult:
        """Write both splits into the folder of the basis: training without near duplicates of held-out documents."""
        self._folder = self._stages.get_folder(basis)
        self._near = ValidationNearDuplicates(self._config.split.near_duplicates, self._folder)
        split = Split(plan["level"], frozenset(plan["names"]), plan.get("below", 0), self._config.split.seed)
        held_out = self._write_validation(plan, split, basis) if split else {"bytes": 0}

        def work(part: int, advance: UpdateProgress) -> StageResult:
            counts = StepStats("split")
            documents = track_progress(read_documents(get_part_path(self._input, self._name, part)), advance)
            training = _drop_held_out(documents, split, counts)
            with DocumentWriter(get_part_path(self._folder, "train", part)) as writer:
                kept_documents = self._near.drop_near(training, counts) if split else _count_kept(training, counts)
                for document in kept_documents:
                    writer.add(document)
                writer.commit()
            return {"steps": [counts.as_json()]}

        def join(parts: Iterable[StageResult]) -> StageResult:
            counts = StepStats.merge([part["steps"][0] for part in parts])
            if not counts.documents_out:
                raise UsageError(f"no training document is left: {format_drop_reasons([counts])}")
            notes = [NOTES[split.level]] if split and split.level in NOTES else []
            if self._config.split.validation_files:
                notes = []
            return {
                "train": {"bytes": counts.bytes_out, "parts": self._parts},
                "validation": {"bytes": held_out["bytes"], "parts": len(plan["parts"])},
                "held_out": {name: plan[name] for name in ("level", "names", "below") if name in plan},
                "notes": notes,
                "steps": [counts.as_json()],
            }

        def tidy() -> None:
            parts = range(self._parts)
            self._stages.sweep(self._input, (get_part_path(self._input, self._name, n) for n in parts))

        return self._stages.run_parts("split-train", basis, self._parts, work, join, total=size, tidy=tidy)

    def _write_validation(self, plan: StageResult, split: Split, basis: StageResult) -> StageResult:
        """Write the held-out documents as `validation`, with the index of their signatures."""
        parts = plan["parts"]

        def work(index: int, advance: UpdateProgress) -> StageResult:
            path = get_part_path(self._input, self._name, parts[index])
            counts = StepStats("held out")
            with DocumentWriter(get_part_path(self._folder, "validation", index)) as writer:
                held_out = _count_kept(filter(split.holds_out, read_documents(path)), counts)
                self._near.scan(index, writer.write(held_out))
                writer.commit()
            advance(1)
            return {"bytes": counts.bytes_out}

        def join(results: Iterable[StageResult]) -> StageResult:
            self._near.index(len(parts))
            return {"bytes": sum(result["bytes"] for result in results)}

        return self._stages.run_parts("split-validation", basis, len(parts), work, join, total=len(parts), unit="parts")


def _plan_documents(parts: Iterable[StageResult], share: float, seed: int) -> Split | None:
    """Plan the split at a level of documents. parts: for each part, by level, the bytes of each name."""
    sizes: dict[str, Counter[str]] = {level: Counter() for level in DOCUMENT_LEVELS}
    for part in parts:
        for level, level_sizes in sizes.items():
            level_sizes.update(part[level])
        if any(len(level_sizes) > MAX_NAMES for level_sizes in sizes.values()):
            splits = (plan_by_hash(parts, level, share, seed) for level in DOCUMENT_LEVELS)
            return next((split for split in splits if split), None)
    return plan_by_documents(sizes, share, seed)


def _drop_held_out(documents: Iterable[Document], split: Split, counts: StepStats) -> Iterator[Document]:
    """Yield the documents that are not held out, and count the others as dropped."""
    for document in documents:
        if split.holds_out(document):
            counts.count_input(document.text_bytes)
            counts.count_dropped(HELD_OUT, document.text_bytes, document.id)
        else:
            yield document


def _count_kept(documents: Iterable[Document], counts: StepStats) -> Iterator[Document]:
    for document in documents:
        counts.count_input(document.text_bytes)
        counts.count_kept(document.text_bytes)
        yield document


def _split_by_patterns(files: Iterable[str], patterns: Sequence[str]) -> Split:
    """Return the split that the user's patterns name."""
    held_out = frozenset(name for name in files if matches_path(name, patterns))
    if not held_out:
        raise UsageError(
            f"split.validation_files: of {', '.join(patterns)} no document is left to hold out: see what the "
            "steps have dropped"
        )
    return Split("file", held_out)


def _describe_plan(split: Split | None, parts: Iterable[StageResult]) -> StageResult:
    """Return a split as JSON, with the numbers of the parts that contain held-out files or documents."""
    if split is None:
        return {"level": None}
    part_indices = [
        index for index, part in enumerate(parts) if any(split.holds_out(Document(name, "")) for name in part["files"])
    ]
    below = {"below": split.below} if split.below else {}
    return {"level": split.level, "names": sorted(split.held_out), **below, "parts": part_indices}
