"""Stages of the work: each leaves its result committed before the next begins, and is never done twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.progress import Reporter
from data_prep.team import Team
from data_prep.work import Workspace
from megatfm.config.prep import PrepConfig

Facts = dict[str, Any]


class Stages:
    """Runs stages for a team, in the folder for work in progress. `basis` is all that a stage depends on."""

    def __init__(self, config: PrepConfig, workspace: Workspace, reporter: Reporter, team: Team) -> None:
        self.config = config
        self.reporter = reporter
        self.team = team
        self.out: Path = workspace.out
        self.folder: Path = workspace.folder
        self.at: Callable[[Mapping[str, Any]], Path] = workspace.folder_of
        """The folder in which files of a stage with this basis lie: of another basis they are elsewhere."""
        self.send: Callable[[Path], None] = workspace.send
        self._workspace = workspace

    def finished(self, name: str, basis: Facts, in_out: bool = False) -> Facts | None:
        """The result of a stage, if it is finished."""
        return self.team.agreed(lambda: self._workspace.stage(name, basis, in_out))

    def results(self, name: str, basis: Facts, numbers: Iterable[int]) -> Iterator[Facts]:
        """The results of these parts of a stage that is finished."""
        return (self._workspace.stage(f"{name}.{number:05d}", basis) or {} for number in numbers)

    def once(
        self,
        name: str,
        basis: Facts,
        work: Callable[[], Facts],
        in_out: bool = False,
        tidy: Callable[[], None] = lambda: None,
    ) -> Facts:
        """The result of a stage that is done by one process, unless it is finished.

        in_out: whether it writes into `out`, where it replaces what the stage of another basis wrote.
        tidy: removes files that nobody needs once the stage is committed.
        """
        basis = dict(basis)

        def commit() -> Facts:
            if in_out:
                self._workspace.forget(name)
            result = work()
            self._workspace.commit(name, basis, result, in_out)
            tidy()
            return result

        return self.team.once(name, lambda: self._workspace.stage(name, basis, in_out), commit)

    def parts(
        self,
        name: str,
        basis: Facts,
        count: int,
        work: Callable[[int], Facts],
        join: Callable[[Iterable[Facts]], Facts],
        in_out: bool = False,
        tidy: Callable[[], None] = lambda: None,
    ) -> Facts:
        """The result of a stage that is done in parts, by all, and then joined by one, unless it is finished.

        `in_out` and `tidy` are those of `once`, for the joining.
        """
        basis = dict(basis)
        if (found := self.finished(name, basis, in_out)) is not None:
            self.reporter.say(f"{name}: finished by an earlier run")
            return found

        def part(number: int) -> Facts | None:
            return self._workspace.stage(f"{name}.{number:05d}", basis)

        folder = self.at(basis)

        def is_done(number: int) -> bool:
            # Without reading a result, which may list every document. Of a finished stage parts may be removed.
            is_there = (folder / f"{name}.{number:05d}.json").exists()
            return is_there or self._workspace.stage(name, basis, in_out) is not None

        with self.reporter.parts(count, is_done) as end:

            def do(number: int) -> None:
                self._workspace.commit(f"{name}.{number:05d}", basis, work(number))
                end()

            self.team.share(name, count, is_done, do)
        return self.once(name, basis, lambda: join(_Parts(count, part)), in_out, tidy)


class _Parts:
    """The results of all parts, each read from its file when its turn comes: all at once may be too much."""

    def __init__(self, count: int, read: Callable[[int], Facts | None]) -> None:
        self._count = count
        self._read = read

    def __iter__(self) -> Iterator[Facts]:
        return (self._read(number) or {} for number in range(self._count))
