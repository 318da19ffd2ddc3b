"""Stages of the work: each commits its result before the next begins, and is never done twice."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import write_whole
from megatfm.data_prep.execution.executors import TaskExecutor
from megatfm.data_prep.execution.progress import Reporter
from megatfm.data_prep.execution.workspace import Workspace

StageResult = dict[str, Any]
SWEPT = "swept"
"""Mark of a folder whose documents were removed, as the stage that reads them is committed."""
USES = "uses-"
"""Beginning of the name of an empty file that names another folder, which goes when this one is renewed."""


class StageRunner:
    """Runs stages for a team, in the folder for work in progress. `basis` is all that a stage depends on."""

    def __init__(
        self, config: PrepConfig, workspace: Workspace, reporter: Reporter, team: TaskExecutor
    ) -> None:
        self.config = config
        self.reporter = reporter
        self.team = team
        self.out: Path = workspace.out
        self.folder: Path = workspace.folder
        self.at: Callable[[Mapping[str, Any]], Path] = workspace.folder_of
        """The folder in which files of a stage with this basis lie: of another basis they are elsewhere."""
        self.send: Callable[[Path], None] = workspace.upload
        self._workspace = workspace

    def load_result(self, name: str, basis: StageResult, in_out: bool = False) -> StageResult | None:
        """The result of a stage, if it is finished."""
        return self.team.broadcast_result(lambda: self._workspace.stage(name, basis, in_out))

    def task_results(self, name: str, basis: StageResult, numbers: Iterable[int]) -> Iterator[StageResult]:
        """The results of these parts of a stage that is finished."""
        return (self._workspace.stage(f"{name}.{number:05d}", basis) or {} for number in numbers)

    def sweep(self, folder: Path, paths: Iterable[Path]) -> None:
        """Remove the documents of a folder, once the stage that reads them is committed; first it is marked."""
        write_whole(folder / SWEPT, b"")
        for path in paths:
            path.unlink(missing_ok=True)

    def renew_if_swept(self, basis: StageResult, reader: str, basis_of_reader: StageResult) -> None:
        """Remove a folder that was swept, so that its stages run again, unless the stage `reader` is committed: with
        other settings the documents are needed once more."""
        folder = self._workspace.folder_of(basis)

        def needless() -> StageResult | None:
            is_read = self._workspace.stage(reader, basis_of_reader) is not None
            return {} if is_read or not (folder / SWEPT).exists() else None

        def renew() -> StageResult:
            for note in folder.glob(f"{USES}*"):
                shutil.rmtree(self.folder / note.name.removeprefix(USES), ignore_errors=True)
            removed = folder.with_name(f"{folder.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            folder.rename(removed)  # at once: a commit whose documents are gone must never be seen
            shutil.rmtree(removed)
            self.reporter.log(
                f"documents for {reader} were removed after an earlier run: they are made again"
            )
            return {}

        self.team.run_once(f"renew-{folder.name}", needless, renew)

    def once(
        self,
        name: str,
        basis: StageResult,
        work: Callable[[], StageResult],
        in_out: bool = False,
        tidy: Callable[[], None] = lambda: None,
    ) -> StageResult:
        """The result of a stage that is done by one process, unless it is finished.

        in_out: whether it writes into `out`, where it replaces what the stage of another basis wrote.
        tidy: removes files that nobody needs once the stage is committed.
        """
        basis = dict(basis)

        def commit() -> StageResult:
            if in_out:
                self._workspace.forget(name)
            result = work()
            self._workspace.commit(name, basis, result, in_out)
            tidy()
            return result

        return self.team.run_once(name, lambda: self._workspace.stage(name, basis, in_out), commit)

    def parts(
        self,
        name: str,
        basis: StageResult,
        count: int,
        work: Callable[[int], StageResult],
        join: Callable[[Iterable[StageResult]], StageResult],
        in_out: bool = False,
        tidy: Callable[[], None] = lambda: None,
    ) -> StageResult:
        """The result of a stage that is done in parts, by all, and then joined by one, unless it is finished.

        `in_out` and `tidy` are those of `once`, for the joining.
        """
        basis = dict(basis)
        if (result := self.load_result(name, basis, in_out)) is not None:
            self.reporter.skip(name)
            return result

        def task(number: int) -> StageResult | None:
            return self._workspace.stage(f"{name}.{number:05d}", basis)

        def do(number: int) -> None:
            self._workspace.commit(f"{name}.{number:05d}", basis, work(number))

        folder = self.at(basis)

        def is_done(number: int) -> bool:
            # Without reading a result, which may list every document. Of a finished stage parts may be removed.
            is_there = (folder / f"{name}.{number:05d}.json").exists()
            return is_there or self._workspace.stage(name, basis, in_out) is not None

        self.team.run_tasks(name, count, is_done, do)
        return self.once(name, basis, lambda: join(_Parts(count, task)), in_out, tidy)


class _Parts:
    """The results of all parts, each read from its file when its turn comes: all at once may be too much."""

    def __init__(self, count: int, read: Callable[[int], StageResult | None]) -> None:
        self._count = count
        self._read = read

    def __iter__(self) -> Iterator[StageResult]:
        return (self._read(number) or {} for number in range(self._count))
