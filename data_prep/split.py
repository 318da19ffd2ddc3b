"""Hold documents out for validation, and leave none in training that is nearly the same.

1. Plan the split: which folders, files, records or parts of files are held out (`plan_split` and its kin).
2. Write what is held out, with an index of its MinHash signatures on disk (`dedup/validation.py`).
3. Write the others as training documents, but for near duplicates of what is held out (`SplitStage`).
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
    part_path,
    read_documents,
)
from megatfm.data_prep.execution.progress import track_progress
from megatfm.data_prep.execution.stages import StageResult, StageRunner
from megatfm.data_prep.input_files import matches_path
from megatfm.errors import UsageError

LEVELS: Mapping[str, Callable[[Document], str]] = {
    "top-level folder": lambda document: document.top_level,
    "file": lambda document: document.file,
    "record": lambda document: document.unit,
    "part of a file": lambda document: document.id,
}
"""Units that a split keeps together, from the best protection against leaks to the least: none at all, between the
parts of one text."""
OF_FILES, OF_DOCUMENTS = (*LEVELS,)[:2], (*LEVELS,)[2:]
"""The levels that names of files tell, and those for which documents must be looked at."""


@dataclass(frozen=True)
class Split:
    """The level at which a corpus is split, and the names held out there; or of very many names those whose hash, the
    first two bytes of it, is less than `below`."""

    level: str
    held_out: frozenset[str]
    below: int = 0
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.held_out) or self.below > 0

    def holds_out(self, document: Document) -> bool:
        """Whether a document is for validation, as all are that share its name at the level."""
        if self.below:
            return _bin(LEVELS[self.level](document), self.seed) < self.below
        return bool(self.held_out) and LEVELS[self.level](document) in self.held_out


def _digest(name: str, seed: int) -> bytes:
    return blake3(f"{seed}:{name}".encode()).digest()


def _bin(name: str, seed: int) -> int:
    return int.from_bytes(_digest(name, seed)[:2], "big")


def choose_held_out(sizes: Mapping[str, int], share: float, seed: int) -> frozenset[str]:
    """Choose names to hold out, given the bytes of each: at most `share` of all bytes, at least half of that, or none.

    Names come in the order of a hash of (seed, name), so that a new one disturbs the others little; one that
    is too large for what is left is passed over.
    """
    most = share * sum(sizes.values())
    left = most
    held_out = set()
    for name in sorted(sizes, key=lambda name: _digest(name, seed)):
        if sizes[name] <= left:
            held_out.add(name)
            left -= sizes[name]
    return frozenset(held_out) if most and left <= most / 2 else frozenset()


def plan_split(files: Mapping[str, int], share: float, seed: int) -> Split | None:
    """Plan the split of a corpus, given the bytes of each file, at the first level at which `share` can be met; None if
    that needs documents."""
    for level in OF_FILES:
        sizes: Counter[str] = Counter()
        for file, size in files.items():
            sizes[LEVELS[level](Document(file, ""))] += size
        if held_out := choose_held_out(sizes, share, seed):
            return Split(level, held_out)
    return None


def plan_parts_of_files(sizes: Mapping[str, Mapping[str, int]], share: float, seed: int) -> Split | None:
    """Plan the split of documents, given by level the bytes of each name; None if there are too few."""
    for level in OF_DOCUMENTS:
        if held_out := choose_held_out(sizes[level], share, seed):
            return Split(level, held_out)
    return None


def plan_by_hash(
    parts: Iterable[Mapping[str, Mapping[str, int]]], level: str, share: float, seed: int
) -> Split | None:
    """Plan the split of more documents than a process could hold the names of, given of each part by level the bytes of
    each name: those of the lowest hashes, at most `share` of all bytes and at least half; None if there is none."""
    bins = np.zeros(2**16, np.int64)
    for part in parts:
        for name, size in part[level].items():
            bins[_bin(name, seed)] += size
    sums, most = np.cumsum(bins), share * int(bins.sum())
    below = int(np.searchsorted(sums, most, "right"))
    fits = below > 0 and most > 0 and 2 * int(sums[below - 1]) >= most
    return Split(level, frozenset(), below, seed) if fits else None


NO_SPLIT: StageResult = {"level": "nothing", "names": [], "parts": []}
"""The plan where nothing is held out."""
HELD_OUT = "held_out"
"""Reason by which the step `split` counts documents that go to validation."""
MANY = 10**6
"""Records from which on they are held out by their hashes, and no longer named one by one."""
NOTES = {
    "file": "split by file: too few larger units",
    "record": "split by record: too few larger units",
    "part of a file": "split by part of a file: parts of one text are in training and in validation, whose loss will "
    "look better than that of new text: add files or records, or name those to hold out in split.validation_files",
}


class SplitStage:
    """Splits the documents that wait in a folder, in the parts of `name`, whose stage noted the bytes of each file in
    each part."""

    def __init__(self, stages: StageRunner, folder: Path, name: str, parts: int) -> None:
        self._stages = stages
        self._config = stages.config
        self._input = folder
        self._name, self._parts = name, parts

    def plan(self, basis: StageResult) -> StageResult:
        """Choose what is held out: the level, the names, and the parts that have some of it."""
        config = self._config.split
        share, seed = config.validation, config.seed
        if not config.has_validation_split:
            return NO_SPLIT

        def by_files() -> StageResult:
            sizes: Counter[str] = Counter()
            for part in self._stages.task_results(self._name, basis, range(self._parts)):
                sizes.update(part["files"])
            by_name = _split_by_patterns(sizes, config.validation_files) if config.validation_files else None
            return _plan(
                by_name or plan_split(sizes, share, seed),
                self._stages.task_results(self._name, basis, range(self._parts)),
            )

        def sources(number: int) -> StageResult:
            sizes: dict[str, Counter[str]] = {level: Counter() for level in OF_DOCUMENTS}
            for document in read_documents(part_path(self._input, self._name, number)):
                for level, of_level in sizes.items():
                    of_level[LEVELS[level](document)] += document.text_bytes
            return sizes

        def by_sources(parts: Iterable[StageResult]) -> StageResult:
            split = _of_documents(parts, share, seed)
            if split is None:
                raise UsageError(
                    f"too little text to hold {100 * share:.0f} % of it out: add text, or change split.validation"
                )
            return _plan(split, ({"files": part[split.level]} for part in parts))

        if (plan := self._stages.once("split-plan", basis, by_files))["level"]:
            return plan
        return self._stages.parts("split-plan-parts", basis, self._parts, sources, by_sources)

    def run(self, plan: StageResult, size: int, basis: StageResult) -> StageResult:
        """Write both splits into the folder of the basis: training without near duplicates of what is held out."""
        self._folder = self._stages.at(basis)
        self._near = ValidationNearDuplicates(self._config.split.near_duplicates, self._folder)
        split = Split(plan["level"], frozenset(plan["names"]), plan.get("below", 0), self._config.split.seed)
        held_out = self._write_validation(plan, split, basis) if split else {"bytes": 0}
        with self._stages.reporter.stage("split-train", size) as advance:

            def work(number: int) -> StageResult:
                counts = StepStats("split")
                documents = track_progress(
                    read_documents(part_path(self._input, self._name, number)), advance
                )
                training = _without_held_out(documents, split, counts)
                with DocumentWriter(part_path(self._folder, "train", number)) as writer:
                    kept = self._near.drop_near(training, counts) if split else _counted(training, counts)
                    for document in kept:
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
                self._stages.sweep(self._input, (part_path(self._input, self._name, n) for n in parts))

            return self._stages.parts("split-train", basis, self._parts, work, join, tidy=tidy)

    def _write_validation(self, plan: StageResult, split: Split, basis: StageResult) -> StageResult:
        """Write what is held out as `validation`, with the index of its signatures."""
        with self._stages.reporter.stage("split-validation", len(plan["parts"]), "parts") as advance:

            def work(number: int) -> StageResult:
                path = part_path(self._input, self._name, plan["parts"][number])
                counts = StepStats("held out")
                with DocumentWriter(part_path(self._folder, "validation", number)) as writer:
                    held_out = _counted(filter(split.holds_out, read_documents(path)), counts)
                    self._near.scan(number, writer.write(held_out))
                    writer.commit()
                advance(1)
                return {"bytes": counts.bytes_out}

            def join(parts: Iterable[StageResult]) -> StageResult:
                self._near.index(len(plan["parts"]))
                return {"bytes": sum(part["bytes"] for part in parts)}

            return self._stages.parts("split-validation", basis, len(plan["parts"]), work, join)


def _of_documents(parts: Iterable[StageResult], share: float, seed: int) -> Split | None:
    """Plan the split at a level of documents, given of each part by level the bytes of each name."""
    sizes: dict[str, Counter[str]] = {level: Counter() for level in OF_DOCUMENTS}
    for part in parts:
        for level, of_level in sizes.items():
            of_level.update(part[level])
        if any(len(of_level) > MANY for of_level in sizes.values()):
            splits = (plan_by_hash(parts, level, share, seed) for level in OF_DOCUMENTS)
            return next((split for split in splits if split), None)
    return plan_parts_of_files(sizes, share, seed)


def _without_held_out(documents: Iterable[Document], split: Split, counts: StepStats) -> Iterator[Document]:
    """Yield the documents that are not held out. The others are counted, so that the counts add up."""
    for document in documents:
        if split.holds_out(document):
            counts.count_input(document.text_bytes)
            counts.count_dropped(HELD_OUT, document.text_bytes, document.id)
        else:
            yield document


def _counted(documents: Iterable[Document], counts: StepStats) -> Iterator[Document]:
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


def _plan(split: Split | None, parts: Iterable[StageResult]) -> StageResult:
    """Return a split as JSON, with the numbers of the parts of which some `files` (or documents) are held out."""
    if split is None:
        return {"level": None}
    numbers = [
        number
        for number, part in enumerate(parts)
        if any(split.holds_out(Document(name, "")) for name in part["files"])
    ]
    below = {"below": split.below} if split.below else {}
    return {"level": split.level, "names": sorted(split.held_out), **below, "parts": numbers}
