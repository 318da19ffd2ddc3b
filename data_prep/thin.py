"""What the whole corpus has more than once: looked for in the documents that wait in parts, and taken out of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatfm.data_prep import duplicates
from megatfm.data_prep.counts import StepStats, format_drop_reasons
from megatfm.data_prep.documents import Document, DocumentWriter, part_path, read_documents
from megatfm.data_prep.duplicates.index import DedupContext, KeyTable, KeyTableWriter
from megatfm.data_prep.progress import UpdateProgress, track_progress
from megatfm.data_prep.stages import StageResult, StageRunner
from megatfm.errors import UsageError


class DedupStage:
    """Runs the searches of the config one after the other, from the documents that wait as `clean` in a folder."""

    def __init__(self, stages: StageRunner, folder: Path, clean: StageResult) -> None:
        self._stages = stages
        self._input = folder
        self._parts: int = clean["parts"]
        self._clean = clean

    def run(self, basis: StageResult) -> StageResult:
        """Under which name the documents wait now, their bytes, and the counts of all searches. If there are any, they
        wait in the folder of the basis."""
        name, size, counts = "clean", self._clean["bytes"], []
        for number, config in enumerate(self._stages.config.duplicates):
            search = duplicates.make(config)
            searched = DedupPass(self._stages, self._stages.at(basis), str(number), search, self._parts)
            rows = self._scan(searched, name, size, basis)
            found = searched.find(rows, basis)
            result = self._thin(searched, name, size, rows, found, basis)
            name, size = searched.out, result["bytes"]
            counts.append(result["step"])
        return {"name": name, "bytes": size, "steps": counts}

    def _scan(self, searched: "DedupPass", name: str, size: int, basis: StageResult) -> list[int]:
        """How many rows each part has."""
        with self._stages.reporter.stage(f"look for {searched.search.title}", size) as advance:

            def work(part: int) -> StageResult:
                documents = track_progress(read_documents(self._waiting(searched, name, part)), advance)
                writer = KeyTableWriter(searched.rows(part))
                return {"rows": writer.write(searched.search.compute_keys(documents))}

            def join(parts: Iterable[StageResult]) -> StageResult:
                return {"rows": [each["rows"] for each in parts]}

            rows: list[int] = self._stages.parts(f"scan-{searched.key}", basis, self._parts, work, join)[
                "rows"
            ]
            return rows

    def _thin(
        self,
        searched: "DedupPass",
        name: str,
        size: int,
        rows: Sequence[int],
        found: StageResult,
        basis: StageResult,
    ) -> StageResult:
        """What is left of all parts."""
        with searched.remaining(rows, found, size) as left:

            def work(part: int) -> StageResult:
                counts = StepStats(searched.search.title)
                documents = read_documents(self._waiting(searched, name, part))
                return {
                    **write_part(searched.folder, searched.out, part, left(part, documents, counts)),
                    "step": counts.as_json(),
                }

            def join(parts: Iterable[StageResult]) -> StageResult:
                counts = StepStats.merge([part["step"] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no document is left: {format_drop_reasons([counts])}")
                return {"bytes": counts.bytes_out, "step": counts.as_json()}

            def tidy() -> None:
                searched.remove_marks(found)
                if name != "clean":  # that is where other duplicates would be looked for
                    for part in range(self._parts):
                        self._waiting(searched, name, part).unlink(missing_ok=True)

            return self._stages.parts(searched.out, basis, self._parts, work, join, tidy=tidy)

    def _waiting(self, searched: "DedupPass", name: str, part: int) -> Path:
        return part_path(self._input if name == "clean" else searched.folder, name, part)


class DedupPass:
    """One search: where its rows lie, what it finds, and what is left of the documents, in `folder`."""

    def __init__(
        self, stages: StageRunner, folder: Path, key: str, search: duplicates.DedupMethod, parts: int
    ) -> None:
        self._stages, self.folder = stages, folder
        self.key, self.search, self._parts = key, search, parts
        self.out = f"thin-{key}"
        self._memory_bytes: int = stages.config.memory_bytes

    def rows(self, part: int) -> Path:
        """Where the rows of a part lie until all is found."""
        return self.folder / f"rows-{self.key}.{part:05d}"

    def find(self, counts: Sequence[int], basis: StageResult) -> StageResult:
        """Mark the rows that go. What that took is removed at the end, and done again only if it is not finished.

        How the search is divided depends on the memory, so its files lie in a folder of that, which the result names.
        """
        stage, basis_of_tasks = f"found-{self.key}", {**basis, "memory_bytes": self._memory_bytes}
        if (known := self._stages.load_result(stage, basis)) is not None:
            return known
        folder = self._stages.at(basis_of_tasks) / f"index-{self.key}"
        folder.mkdir(exist_ok=True)
        rows = KeyTable([self.rows(part) for part in range(self._parts)], *self.search.row, counts)
        found = self.search.find_duplicates(
            rows, DedupContext(folder, self._memory_bytes, self._tasks(basis_of_tasks))
        )

        def tidy() -> None:
            for path in [*folder.iterdir(), *map(self.rows, range(self._parts))]:
                if not path.name.startswith("marks."):
                    path.unlink(missing_ok=True)

        where = folder.relative_to(self._stages.folder).as_posix()
        return self._stages.once(stage, basis, lambda: {**found, "index": where}, tidy=tidy)

    def remove_marks(self, found: StageResult) -> None:
        """Remove the marks of rows, once nobody needs them."""
        for path in (self._stages.folder / found["index"]).glob("marks.*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def remaining(
        self, counts: Sequence[int], found: StageResult, size: int
    ) -> Iterator[Callable[[int, Iterator[Document], StepStats], Iterator[Document]]]:
        """A function of a part, its documents and counts: the documents that are left."""
        begins = KeyTable([], *self.search.row, counts).begins
        index = DedupContext(self._stages.folder / found["index"], self._memory_bytes, self._tasks({}))
        marks = index.is_duplicate(int(begins[-1]), found["each"])
        with self._stages.reporter.stage(f"remove {self.search.title}", size) as advance:

            def left(part: int, documents: Iterator[Document], counts: StepStats) -> Iterator[Document]:
                of_part = marks.read(int(begins[part]), int(begins[part + 1]))[:, 0]
                return self.search.remove_duplicates(track_progress(documents, advance), of_part, counts)

            yield left

    def _tasks(self, basis: StageResult) -> duplicates.RunTasks:
        """Has the tasks of a search done as stages."""

        def run(
            step: str,
            count: int,
            total: int,
            work: Callable[[int, UpdateProgress], StageResult],
            join: Callable[[Iterable[StageResult]], StageResult] = lambda _: {},
        ) -> StageResult:
            with self._stages.reporter.stage(f"{self.search.title}: {step}", total) as advance:
                return self._stages.parts(
                    f"{step}-{self.key}", basis, count, lambda number: work(number, advance), join
                )

        return run


def write_part(folder: Path, name: str, part: int, documents: Iterable[Document]) -> StageResult:
    """Write the documents of a part. Returns the bytes that each `files` has in it."""
    files: dict[str, int] = {}
    with DocumentWriter(part_path(folder, name, part)) as writer:
        for document in documents:
            writer.add(document)
            files[document.file] = files.get(document.file, 0) + document.text_bytes
        writer.commit()
    return {"files": files}
