"""What the whole corpus has more than once: looked for in the documents that wait in parts, and taken out of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatfm.data_prep import duplicates
from megatfm.data_prep.counts import Counts, why
from megatfm.data_prep.documents import Document, DocumentWriter, part_path, read_documents
from megatfm.data_prep.duplicates.index import Index, Rows, RowsWriter
from megatfm.data_prep.progress import Advance, advancing
from megatfm.data_prep.stages import Facts, Stages
from megatfm.errors import UsageError


class Thin:
    """Runs the searches of the config one after the other, from the documents that wait as `clean`."""

    def __init__(self, stages: Stages, clean: Facts) -> None:
        self._stages = stages
        self._folder = stages.folder
        self._parts: int = clean["parts"]
        self._clean = clean

    def run(self, basis: Facts) -> Facts:
        """Under which name the documents wait now, their bytes, and the counts of all searches."""
        name, size, counts = "clean", self._clean["bytes"], []
        for number, config in enumerate(self._stages.config.duplicates):
            search = duplicates.make(config)
            searched = Searched(self._stages, str(number), search, self._parts)
            rows = self._scan(searched, name, size, basis)
            found = searched.find(rows, basis)
            result = self._thin(searched, name, size, rows, found, basis)
            name, size = searched.out, result["bytes"]
            counts.append(result["step"])
        return {"name": name, "bytes": size, "steps": counts}

    def _scan(self, searched: "Searched", name: str, size: int, basis: Facts) -> list[int]:
        """How many rows each part has."""
        with self._stages.reporter.stage(f"look for {searched.search.title}", size) as advance:

            def work(part: int) -> Facts:
                documents = advancing(read_documents(part_path(self._folder, name, part)), advance)
                writer = RowsWriter(searched.rows(part))
                return {"rows": writer.write(searched.search.scan(documents))}

            def join(parts: Iterable[Facts]) -> Facts:
                return {"rows": [each["rows"] for each in parts]}

            rows: list[int] = self._stages.parts(f"scan-{searched.key}", basis, self._parts, work, join)[
                "rows"
            ]
            return rows

    def _thin(
        self, searched: "Searched", name: str, size: int, rows: Sequence[int], found: Facts, basis: Facts
    ) -> Facts:
        """What is left of all parts."""
        with searched.left(rows, found, size) as left:

            def work(part: int) -> Facts:
                counts = Counts(searched.search.title)
                documents = read_documents(part_path(self._folder, name, part))
                return {
                    **write_part(self._folder, searched.out, part, left(part, documents, counts)),
                    "step": counts.as_json(),
                }

            def join(parts: Iterable[Facts]) -> Facts:
                counts = Counts.joined([part["step"] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no document is left: {why([counts])}")
                return {"bytes": counts.bytes_out, "step": counts.as_json()}

            return self._stages.parts(searched.out, basis, self._parts, work, join)


class Searched:
    """One search: where its rows lie, what it finds, and what is left of the documents."""

    def __init__(self, stages: Stages, key: str, search: duplicates.Search, parts: int) -> None:
        self._stages = stages
        self.key, self.search, self._parts = key, search, parts
        self.out = f"thin-{key}"
        self._memory_bytes: int = stages.config.memory_bytes

    def rows(self, part: int) -> Path:
        """Where the rows of a part lie until all is found."""
        return self._stages.folder / f"rows-{self.key}.{part:05d}"

    def find(self, counts: Sequence[int], basis: Facts) -> Facts:
        """Mark the rows that go. What that took is removed at the end, and done again only if it is not finished."""
        stage, folder = f"found-{self.key}", self._stages.folder / f"index-{self.key}"
        if (known := self._stages.finished(stage, basis)) is not None:
            return known
        folder.mkdir(exist_ok=True)
        rows = Rows([self.rows(part) for part in range(self._parts)], *self.search.row, counts)
        found = self.search.find(rows, Index(folder, self._memory_bytes, self._tasks(basis)))

        def finish() -> Facts:
            for path in [*folder.iterdir(), *map(self.rows, range(self._parts))]:
                if not path.name.startswith("marks."):
                    path.unlink(missing_ok=True)
            return found

        return self._stages.once(stage, basis, finish)

    @contextmanager
    def left(
        self, counts: Sequence[int], found: Facts, size: int
    ) -> Iterator[Callable[[int, Iterator[Document], Counts], Iterator[Document]]]:
        """A function of a part, its documents and counts: the documents that are left."""
        begins = Rows([], *self.search.row, counts).begins
        index = Index(self._stages.folder / f"index-{self.key}", self._memory_bytes, self._tasks({}))
        marks = index.marks(int(begins[-1]), found["each"])
        with self._stages.reporter.stage(f"remove {self.search.title}", size) as advance:

            def left(part: int, documents: Iterator[Document], counts: Counts) -> Iterator[Document]:
                of_part = marks.read(int(begins[part]), int(begins[part + 1]))[:, 0]
                return self.search.thin(advancing(documents, advance), of_part, counts)

            yield left

    def _tasks(self, basis: Facts) -> duplicates.RunTasks:
        """Has the tasks of a search done as stages. How they are divided depends on the memory."""
        basis = {**basis, "memory_bytes": self._memory_bytes}

        def run(
            step: str,
            count: int,
            total: int,
            work: Callable[[int, Advance], Facts],
            join: Callable[[Iterable[Facts]], Facts] = lambda _: {},
        ) -> Facts:
            with self._stages.reporter.stage(f"{self.search.title}: {step}", total) as advance:
                return self._stages.parts(
                    f"{step}-{self.key}", basis, count, lambda number: work(number, advance), join
                )

        return run


def write_part(folder: Path, name: str, part: int, documents: Iterable[Document]) -> Facts:
    """Write the documents of a part. Returns the bytes that each `files` has in it."""
    files: dict[str, int] = {}
    with DocumentWriter(part_path(folder, name, part)) as writer:
        for document in documents:
            writer.add(document)
            files[document.file] = files.get(document.file, 0) + document.text_bytes
        writer.commit()
    return {"files": files}
