"""Run the methods of `[[dedup]]` over the corpus: compute keys for each part, find duplicates, remove them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatfm.config.prep import PrepConfig
from megatfm.data_prep.dedup.key_table import DedupContext, KeyTable, RunTasks, write_keys
from megatfm.data_prep.dedup.methods import DedupMethod, make_dedup_method
from megatfm.data_prep.documents import (
    Document,
    DocumentWriter,
    StepStats,
    format_drop_reasons,
    part_path,
    read_documents,
)
from megatfm.data_prep.execution.progress import UpdateProgress, track_progress
from megatfm.data_prep.execution.stages import USES, StageResult, StageRunner
from megatfm.errors import UsageError


def pass_names(config: PrepConfig) -> list[str]:
    """Return the names of the passes of `[[dedup]]`, which are those of the stages that remove duplicates."""
    return [f"dedup-{number}-{method.name}" for number, method in enumerate(config.dedup)]


class DedupStage:
    """Runs the methods of the config one after the other, on the documents that wait as `exact_dedup` in a folder."""

    def __init__(self, stages: StageRunner, folder: Path, clean: StageResult) -> None:
        self._stages = stages
        self._input = folder
        self._parts: int = clean["parts"]
        self._clean = clean

    def run(self, basis: StageResult) -> StageResult:
        """Under which name the documents wait now, their bytes, and the counts of all searches. If there are any, they
        wait in the folder of the basis."""
        name, size, counts = "exact_dedup", self._clean["bytes"], []
        names = pass_names(self._stages.config)
        for number, config in enumerate(self._stages.config.dedup):
            search = make_dedup_method(config)
            searched = DedupPass(self._stages, self._stages.at(basis), names[number], search, self._parts)
            rows = self._compute_keys(searched, name, size, basis)
            duplicates = searched.find(rows, basis)
            result = self._remove(searched, name, size, rows, duplicates, basis)
            name, size = searched.out, result["bytes"]
            counts.append(result["step"])
        return {"name": name, "bytes": size, "steps": counts}

    def _compute_keys(self, searched: "DedupPass", name: str, size: int, basis: StageResult) -> list[int]:
        """Compute the keys of all parts. Returns how many rows each part has."""
        stage = f"{searched.key}-{searched.search.key_name}"
        with self._stages.reporter.stage(stage, size) as advance:

            def work(part: int) -> StageResult:
                documents = track_progress(read_documents(self._waiting(searched, name, part)), advance)
                return {"rows": write_keys(searched.rows(part), searched.search.compute_keys(documents))}

            def join(parts: Iterable[StageResult]) -> StageResult:
                return {"rows": [part["rows"] for part in parts]}

            rows: list[int] = self._stages.parts(stage, basis, self._parts, work, join)["rows"]
            return rows

    def _remove(
        self,
        searched: "DedupPass",
        name: str,
        size: int,
        rows: Sequence[int],
        duplicates: StageResult,
        basis: StageResult,
    ) -> StageResult:
        """Write what is left of all parts."""
        with searched.remaining(rows, duplicates, size) as left:

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
                searched.remove_marks(duplicates)
                inputs = [self._waiting(searched, name, part) for part in range(self._parts)]
                if name == "exact_dedup":
                    self._stages.sweep(self._input, inputs)
                else:  # an earlier pass of the same settings, whose next one is committed
                    for path in inputs:
                        path.unlink(missing_ok=True)

            return self._stages.parts(searched.out, basis, self._parts, work, join, tidy=tidy)

    def _waiting(self, searched: "DedupPass", name: str, part: int) -> Path:
        return part_path(self._input if name == "exact_dedup" else searched.folder, name, part)


class DedupPass:
    """One search: where its rows lie, what it finds, and what is left of the documents, in `folder`."""

    def __init__(self, stages: StageRunner, folder: Path, key: str, search: DedupMethod, parts: int) -> None:
        self._stages, self.folder = stages, folder
        self.key, self.search, self._parts = key, search, parts
        self.out = key
        self._memory_bytes: int = stages.config.dedup_memory_bytes

    def rows(self, part: int) -> Path:
        """Where the rows of a part lie until all is found."""
        return self.folder / f"rows-{self.key}.{part:05d}"

    def find(self, counts: Sequence[int], basis: StageResult) -> StageResult:
        """Mark the rows that go. What that took is removed at the end, and done again only if it is not finished.

        How the search is divided depends on the memory, so its files lie in a folder of that, which the result names.
        """
        stage, basis_of_tasks = f"{self.key}-duplicates", {**basis, "memory_bytes": self._memory_bytes}
        if (known := self._stages.load_result(stage, basis)) is not None:
            return known
        of_tasks = self._stages.at(basis_of_tasks)
        (self.folder / f"{USES}{of_tasks.name}").touch()
        folder = of_tasks / f"index-{self.key}"
        folder.mkdir(exist_ok=True)
        rows = KeyTable([self.rows(part) for part in range(self._parts)], *self.search.row, counts)
        duplicates = self.search.find_duplicates(
            rows, DedupContext(folder, self._memory_bytes, self._tasks(basis_of_tasks))
        )

        def tidy() -> None:
            for path in [*folder.iterdir(), *map(self.rows, range(self._parts))]:
                if not path.name.startswith("marks."):
                    path.unlink(missing_ok=True)

        where = folder.relative_to(self._stages.folder).as_posix()
        return self._stages.once(stage, basis, lambda: {**duplicates, "index": where}, tidy=tidy)

    def remove_marks(self, duplicates: StageResult) -> None:
        """Remove the marks of rows, once nobody needs them."""
        for path in (self._stages.folder / duplicates["index"]).glob("marks.*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def remaining(
        self, counts: Sequence[int], duplicates: StageResult, size: int
    ) -> Iterator[Callable[[int, Iterator[Document], StepStats], Iterator[Document]]]:
        """A function of a part, its documents and counts: the documents that are left."""
        begins = KeyTable([], *self.search.row, counts).begins
        index = DedupContext(self._stages.folder / duplicates["index"], self._memory_bytes, self._tasks({}))
        marks = index.is_duplicate(int(begins[-1]), duplicates["each"])
        with self._stages.reporter.stage(self.out, size) as advance:

            def left(part: int, documents: Iterator[Document], counts: StepStats) -> Iterator[Document]:
                of_part = marks.read(int(begins[part]), int(begins[part + 1]))[:, 0]
                return self.search.remove_duplicates(track_progress(documents, advance), of_part, counts)

            yield left

    def _tasks(self, basis: StageResult) -> RunTasks:
        """Has the tasks of a search done as stages."""

        def run(
            step: str,
            count: int,
            total: int,
            work: Callable[[int, UpdateProgress], StageResult],
            join: Callable[[Iterable[StageResult]], StageResult] = lambda _: {},
        ) -> StageResult:
            stage = f"{self.key}-{step}"
            with self._stages.reporter.stage(stage, total, "rows") as advance:
                return self._stages.parts(stage, basis, count, lambda number: work(number, advance), join)

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
