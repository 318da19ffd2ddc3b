"""Run the methods of `[[dedup]]` over the corpus: compute keys for each part, find duplicates, remove them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatfm.config.prep import PrepConfig
from megatfm.data_prep.dedup.key_table import DedupContext, KeyTable, RunParts, write_keys
from megatfm.data_prep.dedup.methods import DedupMethod, make_dedup_method
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
from megatfm.data_prep.execution.stages import USES, StageRunner
from megatfm.errors import UsageError

PartFilter = Callable[[int, Iterator[Document], StepStats, UpdateProgress], Iterator[Document]]
"""Yields the documents of a part that are no duplicates, with counts and progress."""


def list_pass_names(config: PrepConfig) -> list[str]:
    """Return the names of the passes of `[[dedup]]`, which are those of the stages that remove duplicates."""
    return [f"dedup-{index}-{method.name}" for index, method in enumerate(config.dedup)]


class DedupStage:
    """Runs the config's methods in order, on the documents that lie as `exact_dedup` in a folder."""

    def __init__(self, stages: StageRunner, folder: Path, clean: StageResult) -> None:
        self._stages = stages
        self._input = folder
        self._parts: int = clean["parts"]
        self._clean = clean

    def run(self, basis: StageResult) -> StageResult:
        """Run all passes. Returns the name of the remaining documents, their bytes, and the statistics of each pass.
        After a pass, the documents lie in the folder of the basis."""
        input_name, size, counts = "exact_dedup", self._clean["bytes"], []
        names = list_pass_names(self._stages.config)
        for index, config in enumerate(self._stages.config.dedup):
            method = make_dedup_method(config)
            dedup_pass = DedupPass(self._stages, self._stages.get_folder(basis), names[index], method, self._parts)
            rows = self._compute_keys(dedup_pass, input_name, size, basis)
            duplicates = dedup_pass.find(rows, basis)
            result = self._remove(dedup_pass, input_name, size, rows, duplicates, basis)
            input_name, size = dedup_pass.name, result["bytes"]
            counts.append(result["step"])
        return {"name": input_name, "bytes": size, "steps": counts}

    def _compute_keys(self, dedup_pass: "DedupPass", input_name: str, size: int, basis: StageResult) -> list[int]:
        """Compute the keys of all parts. Returns how many rows each part has."""
        stage = f"{dedup_pass.name}-{dedup_pass.method.key_name}"

        def work(part: int, advance: UpdateProgress) -> StageResult:
            documents = track_progress(read_documents(self._get_documents_path(dedup_pass, input_name, part)), advance)
            return {"rows": write_keys(dedup_pass.get_rows_path(part), dedup_pass.method.compute_keys(documents))}

        def join(parts: Iterable[StageResult]) -> StageResult:
            return {"rows": [part["rows"] for part in parts]}

        rows: list[int] = self._stages.run_parts(stage, basis, self._parts, work, join, total=size)["rows"]
        return rows

    def _remove(
        self,
        dedup_pass: "DedupPass",
        input_name: str,
        size: int,
        rows: Sequence[int],
        duplicates: StageResult,
        basis: StageResult,
    ) -> StageResult:
        """Write the remaining documents of all parts."""
        filter_part = dedup_pass.make_part_filter(rows, duplicates)

        def work(part: int, advance: UpdateProgress) -> StageResult:
            counts = StepStats(dedup_pass.method.title)
            documents = read_documents(self._get_documents_path(dedup_pass, input_name, part))
            return {
                **write_part(dedup_pass.folder, dedup_pass.name, part, filter_part(part, documents, counts, advance)),
                "step": counts.as_json(),
            }

        def join(parts: Iterable[StageResult]) -> StageResult:
            counts = StepStats.merge([part["step"] for part in parts])
            if not counts.documents_out:
                raise UsageError(f"no document is left: {format_drop_reasons([counts])}")
            return {"bytes": counts.bytes_out, "step": counts.as_json()}

        def tidy() -> None:
            dedup_pass.remove_marks(duplicates)
            inputs = [self._get_documents_path(dedup_pass, input_name, part) for part in range(self._parts)]
            if input_name == "exact_dedup":
                self._stages.sweep(self._input, inputs)
            else:  # an earlier pass of the same settings, whose next one is committed
                for path in inputs:
                    path.unlink(missing_ok=True)

        return self._stages.run_parts(dedup_pass.name, basis, self._parts, work, join, total=size, tidy=tidy)

    def _get_documents_path(self, dedup_pass: "DedupPass", input_name: str, part: int) -> Path:
        return get_part_path(self._input if input_name == "exact_dedup" else dedup_pass.folder, input_name, part)


class DedupPass:
    """One pass of a method, in `folder`: computes rows, finds duplicates, yields the remaining documents.

    name: of the stage that removes duplicates, and of the documents that it leaves; its other stages begin with it.
    """

    def __init__(self, stages: StageRunner, folder: Path, name: str, method: DedupMethod, parts: int) -> None:
        self._stages, self.folder = stages, folder
        self.name, self.method, self._parts = name, method, parts
        self._memory_bytes: int = stages.config.dedup_memory_bytes

    def get_rows_path(self, part: int) -> Path:
        """Return the path of the rows of a part, which are removed after the search."""
        return self.folder / f"rows-{self.name}.{part:05d}"

    def find(self, counts: Sequence[int], basis: StageResult) -> StageResult:
        """Mark the duplicate rows, unless that is committed. Intermediate files are removed at the end.

        The division of the search depends on the memory, so its files lie in a folder for that, which the result names.
        """
        stage, search_basis = f"{self.name}-duplicates", {**basis, "memory_bytes": self._memory_bytes}
        if (result := self._stages.load_result(stage, basis)) is not None:
            return result
        search_folder = self._stages.get_folder(search_basis)
        (self.folder / f"{USES}{search_folder.name}").touch()
        folder = search_folder / f"index-{self.name}"
        folder.mkdir(exist_ok=True)
        rows = KeyTable([self.get_rows_path(part) for part in range(self._parts)], *self.method.row, counts)
        duplicates = self.method.find_duplicates(
            rows, DedupContext(folder, self._memory_bytes, self._make_part_runner(search_basis))
        )

        def tidy() -> None:
            for path in [*folder.iterdir(), *map(self.get_rows_path, range(self._parts))]:
                if not path.name.startswith("marks."):
                    path.unlink(missing_ok=True)

        index_folder = folder.relative_to(self._stages.folder).as_posix()
        return self._stages.run_once(stage, basis, lambda: {**duplicates, "index": index_folder}, tidy=tidy)

    def remove_marks(self, duplicates: StageResult) -> None:
        """Remove the marks of rows, once no stage needs them."""
        for path in (self._stages.folder / duplicates["index"]).glob("marks.*"):
            path.unlink(missing_ok=True)

    def make_part_filter(self, counts: Sequence[int], duplicates: StageResult) -> PartFilter:
        """Return the filter of a part's documents by their marks. counts: rows of each part."""
        begins = KeyTable([], *self.method.row, counts).begins
        context = DedupContext(
            self._stages.folder / duplicates["index"], self._memory_bytes, self._make_part_runner({})
        )
        marks = context.open_marks(int(begins[-1]), duplicates["marks_per_file"])

        def filter_part(
            part: int, documents: Iterator[Document], counts: StepStats, advance: UpdateProgress
        ) -> Iterator[Document]:
            part_marks = marks.read(int(begins[part]), int(begins[part + 1]))[:, 0]
            return self.method.remove_duplicates(track_progress(documents, advance), part_marks, counts)

        return filter_part

    def _make_part_runner(self, basis: StageResult) -> RunParts:
        """Return the function that runs the parts of a search as stages."""

        def run(
            step: str,
            count: int,
            total: int,
            work: Callable[[int, UpdateProgress], StageResult],
            join: Callable[[Iterable[StageResult]], StageResult] = lambda _: {},
        ) -> StageResult:
            return self._stages.run_parts(f"{self.name}-{step}", basis, count, work, join, total=total, unit="rows")

        return run


def write_part(folder: Path, name: str, part: int, documents: Iterable[Document]) -> StageResult:
    """Write the documents of a part. Returns `files`: the bytes of each file in it."""
    files: dict[str, int] = {}
    with DocumentWriter(get_part_path(folder, name, part)) as writer:
        for document in documents:
            writer.add(document)
            files[document.file] = files.get(document.file, 0) + document.text_bytes
        writer.commit()
    return {"files": files}
