"""Stages of a preparation: each commits its result before the next begins, and is never run twice."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import write_whole
from megatfm.data_prep.execution.executors import Executor, StageResult
from megatfm.data_prep.execution.progress import Reporter, UpdateProgress
from megatfm.data_prep.execution.workspace import Workspace

SWEPT = "swept"
"""Marker of a folder whose documents were removed because the stage that reads them is committed."""
USES = "uses-"
"""Prefix of an empty file that names another folder, which is removed when this one is renewed."""


class StageRunner:
    """Runs stages on an executor, and commits their results. `basis`: everything on which a stage depends.

    `get_folder(basis)` is the folder of intermediate files of the stages with this basis.
    """

    def __init__(self, config: PrepConfig, workspace: Workspace, reporter: Reporter, executor: Executor) -> None:
        self.config = config
        self.reporter = reporter
        self.executor = executor
        self.out: Path = workspace.out
        self.folder: Path = workspace.folder
        self.get_folder: Callable[[StageResult], Path] = workspace.get_folder
        self.upload: Callable[[Path], None] = workspace.upload
        self._workspace = workspace

    def load_result(self, name: str, basis: StageResult, in_out: bool = False) -> StageResult | None:
        """Return the result of a finished stage, else None."""
        return self.executor.broadcast_result(lambda: self._workspace.read_stage(name, basis, in_out))

    def read_part_results(self, name: str, basis: StageResult, parts: Iterable[int]) -> Iterator[StageResult]:
        """Yield the results of these parts of a finished stage."""
        return (self._workspace.read_stage(f"{name}.{part:05d}", basis) or {} for part in parts)

    def sweep(self, folder: Path, paths: Iterable[Path]) -> None:
        """Mark a folder as swept, and remove its documents, once the stage that reads them is committed."""
        write_whole(folder / SWEPT, b"")
        for path in paths:
            path.unlink(missing_ok=True)

    def renew_if_swept(self, basis: StageResult, reader: str, reader_basis: StageResult) -> None:
        """Remove a swept folder whose documents the stage `reader` needs again, so that its stages run again.

        If `reader` is committed, nothing is removed.
        """
        folder = self._workspace.get_folder(basis)

        def find_reader_result() -> StageResult | None:
            is_read = self._workspace.read_stage(reader, reader_basis) is not None
            return {} if is_read or not (folder / SWEPT).exists() else None

        def renew() -> StageResult:
            for marker in folder.glob(f"{USES}*"):
                shutil.rmtree(self.folder / marker.name.removeprefix(USES), ignore_errors=True)
            removed = folder.with_name(f"{folder.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            folder.rename(removed)  # at once: a commit whose documents are gone must never be seen
            shutil.rmtree(removed, ignore_errors=True)
            self.reporter.log(f"{reader} needs documents that an earlier run removed: making them again")
            return {}

        self.executor.run_once(f"renew-{folder.name}", find_reader_result, renew)

    def run_once(
        self,
        name: str,
        basis: StageResult,
        work: Callable[[], StageResult],
        in_out: bool = False,
        tidy: Callable[[], None] = lambda: None,
    ) -> StageResult:
        """Run a stage in one process, unless it is finished. Returns its result.

        in_out: whether it writes into `out`, where it replaces files of another basis.
        tidy: removes files that no stage needs once this one is committed.
        """
        basis = dict(basis)

        def commit() -> StageResult:
            if in_out:
                self._workspace.forget(name)
            result = work()
            self._workspace.commit(name, basis, result, in_out)
            tidy()
            return result

        return self.executor.run_once(name, lambda: self._workspace.read_stage(name, basis, in_out), commit)

    def run_parts(
        self,
        name: str,
        basis: StageResult,
        count: int,
        work: Callable[[int, UpdateProgress], StageResult],
        join: Callable[[Iterable[StageResult]], StageResult],
        *,
        total: int,
        unit: str = "bytes",
        in_out: bool = False,
        tidy: Callable[[], None] = lambda: None,
    ) -> StageResult:
        """Run a stage's parts in all processes and join them in one, unless it is finished. Returns its result.

        work: does a part, and reports its progress towards `total` of all parts, in `unit`. in_out, tidy: as for
        `run_once`, when the parts are joined.
        """
        basis = dict(basis)
        if (result := self.load_result(name, basis, in_out)) is not None:
            self.reporter.log(f"{name} | skipped: committed by an earlier run")
            return result

        def read_part_result(part: int) -> StageResult | None:
            return self._workspace.read_stage(f"{name}.{part:05d}", basis)

        folder = self.get_folder(basis)

        def is_done(part: int) -> bool:
            # Only the file is looked for: a result may list every document. A finished stage's parts may be removed.
            is_there = (folder / f"{name}.{part:05d}.json").exists()
            return is_there or self._workspace.read_stage(name, basis, in_out) is not None

        with self.reporter.stage(name, total, unit) as advance:

            def run_part(part: int) -> None:
                self._workspace.commit(f"{name}.{part:05d}", basis, work(part, advance))

            self.executor.run_parts(name, count, is_done, run_part)
            return self.run_once(name, basis, lambda: join(_PartResults(count, read_part_result)), in_out, tidy)


class _PartResults:
    """Results of all parts, read from their files one at a time, since together they may not fit in memory."""

    def __init__(self, count: int, read: Callable[[int], StageResult | None]) -> None:
        self._count = count
        self._read = read

    def __iter__(self) -> Iterator[StageResult]:
        return (self._read(part) or {} for part in range(self._count))
