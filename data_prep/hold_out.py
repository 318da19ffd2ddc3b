"""The stages that hold documents out for validation, and leave none in training that is nearly the same."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatfm.data_prep.counts import StepStats, format_drop_reasons
from megatfm.data_prep.documents import Document, DocumentWriter, part_path, read_documents
from megatfm.data_prep.files import matches_path
from megatfm.data_prep.guard import NearDuplicates
from megatfm.data_prep.progress import track_progress
from megatfm.data_prep.split import LEVELS, OF_DOCUMENTS, Split, plan_by_hash, plan_parts_of_files, plan_split
from megatfm.data_prep.stages import StageResult, StageRunner
from megatfm.errors import UsageError

NO_SPLIT: StageResult = {"level": "nothing", "names": [], "parts": []}
"""The plan where nothing is held out."""
MANY = 10**6
"""Records from which on they are held out by their hashes, and no longer named one by one."""
NOTES = {
    "file": "split by file: too few larger units",
    "record": "split by record: too few larger units",
    "part of a file": "split by part of a file: parts of one text are in training and in validation, whose loss will "
    "look better than that of new text: add files or records, or name those to hold out in split.files",
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
            split = (
                _split_by_patterns(sizes, config.files) if config.files else plan_split(sizes, share, seed)
            )
            return _plan(split, self._stages.task_results(self._name, basis, range(self._parts)))

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
                    f"too little text to hold {share:.0%} of it out: add text, or change split.validation"
                )
            return _plan(split, ({"files": part[split.level]} for part in parts))

        plan = self._stages.once("plan", basis, by_files)
        return (
            plan
            if plan["level"]
            else self._stages.parts("plan-parts", basis, self._parts, sources, by_sources)
        )

    def run(self, plan: StageResult, size: int, basis: StageResult) -> StageResult:
        """The rest, without near duplicates of what is held out, is for training. Both splits wait in the folder of the
        basis."""
        self._folder = self._stages.at(basis)
        self._near = NearDuplicates(self._config.near_duplicates, self._folder)
        split = Split(plan["level"], frozenset(plan["names"]), plan.get("below", 0), self._config.split.seed)
        held_out = self._write_validation(plan, split, basis) if split else {"bytes": 0}
        with self._stages.reporter.stage("split", size) as advance:

            def work(number: int) -> StageResult:
                counts = StepStats(NearDuplicates.title)
                documents = track_progress(
                    read_documents(part_path(self._input, self._name, number)), advance
                )
                rest = (document for document in documents if not split.holds_out(document))
                with DocumentWriter(part_path(self._folder, "train", number)) as writer:
                    kept = self._near.without(rest, counts) if split else _counted(rest, counts)
                    for document in kept:
                        writer.add(document)
                    writer.commit()
                return {"steps": [counts.as_json()]}

            def join(parts: Iterable[StageResult]) -> StageResult:
                counts = StepStats.merge([part["steps"][0] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no training document is left: {format_drop_reasons([counts])}")
                notes = [NOTES[split.level]] if split and split.level in NOTES else []
                if self._config.split.files:
                    notes = []
                return {
                    "train": {"bytes": counts.bytes_out, "parts": self._parts},
                    "validation": {"bytes": held_out["bytes"], "parts": len(plan["parts"])},
                    "held_out": {name: plan[name] for name in ("level", "names", "below") if name in plan},
                    "notes": notes,
                    "steps": [counts.as_json()],
                }

            return self._stages.parts("split", basis, self._parts, work, join)

    def _write_validation(self, plan: StageResult, split: Split, basis: StageResult) -> StageResult:
        """What is held out waits as `validation`, and can be looked for."""
        with self._stages.reporter.stage("hold out", len(plan["parts"])) as advance:

            def work(number: int) -> StageResult:
                path = part_path(self._input, self._name, plan["parts"][number])
                counts = StepStats("held out")
                with DocumentWriter(part_path(self._folder, "validation", number)) as writer:
                    held_out = filter(split.holds_out, read_documents(path))
                    self._near.scan(number, _written(held_out, writer, counts))
                    writer.commit()
                advance(1)
                return {"bytes": counts.bytes_out}

            def join(parts: Iterable[StageResult]) -> StageResult:
                self._near.index(len(plan["parts"]))
                return {"bytes": sum(each["bytes"] for each in parts)}

            return self._stages.parts("held-out", basis, len(plan["parts"]), work, join)


def _of_documents(parts: Iterable[StageResult], share: float, seed: int) -> Split | None:
    """The split at a level of documents, given of each part by level the bytes of each name."""
    sizes: dict[str, Counter[str]] = {level: Counter() for level in OF_DOCUMENTS}
    for part in parts:
        for level, of_level in sizes.items():
            of_level.update(part[level])
        if any(len(of_level) > MANY for of_level in sizes.values()):
            splits = (plan_by_hash(parts, level, share, seed) for level in OF_DOCUMENTS)
            return next((split for split in splits if split), None)
    return plan_parts_of_files(sizes, share, seed)


def _counted(documents: Iterable[Document], counts: StepStats) -> Iterator[Document]:
    for document in documents:
        counts.count_input(document.text_bytes)
        counts.count_kept(document.text_bytes)
        yield document


def _split_by_patterns(files: Iterable[str], patterns: Sequence[str]) -> Split:
    """The split that the user has made."""
    held_out = frozenset(name for name in files if matches_path(name, patterns))
    if not held_out:
        raise UsageError(
            f"split.files: of {', '.join(patterns)} no document is left to hold out: see what the "
            "steps have dropped"
        )
    return Split("file", held_out)


def _plan(split: Split | None, parts: Iterable[StageResult]) -> StageResult:
    """Of the parts those whose `files`, which may be documents, are held out."""
    if split is None:
        return {"level": None}
    numbers = [
        number
        for number, part in enumerate(parts)
        if any(split.holds_out(Document(name, "")) for name in part["files"])
    ]
    below = {"below": split.below} if split.below else {}
    return {"level": split.level, "names": sorted(split.held_out), **below, "parts": numbers}


def _written(documents: Iterable[Document], writer: DocumentWriter, counts: StepStats) -> Iterator[Document]:
    """The documents, which are written and counted."""
    for document in documents:
        writer.add(document)
        counts.count_kept(document.text_bytes)
        yield document
