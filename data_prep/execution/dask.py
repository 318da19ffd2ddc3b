"""Dask's workers as tasks, for those who have a Dask: it schedules the parts of stages, and retries those of the dead.

Nothing of a corpus goes through Dask: a task is the name of a stage and the number of a part, and what it makes lies in
the folder that all share. A worker runs the pipeline as any process does, waiting at each stage for the numbers that
Dask hands it. A part is still claimed by a lock, as Dask may start a task again before the first try has died.
"""

import fcntl
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.executors import FINISH, POLL_SECONDS, LockExecutor, StageResult
from megatfm.data_prep.execution.progress import Reporter
from megatfm.errors import MegatfmError, UsageError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
CONNECT_SECONDS = 30
CLIENT = "claims/client"
"""Locked by the process that has the workers do the parts, while it lives."""
CLIENT_SECONDS = 5.0
"""How often a worker that waits looks whether that process lives."""


class DaskExecutor(LockExecutor):
    """The process that was started: it has parts done by the workers of a client, and does the rest itself."""

    def __init__(self, client: Any, config: PrepConfig) -> None:
        super().__init__(1, 1, Path())
        self._client = client
        self._config = config.model_dump_json()
        self._life: int | None = None

    def in_folder(self, folder: Path) -> "DaskExecutor":
        """Set the folder of work in progress. Returns self."""
        self._folder = folder
        return self

    def run_tasks(
        self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]
    ) -> None:
        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        self._show_life()
        left = [part for part in range(count) if not is_done(part)]
        words = (self._config, str(Path.cwd()), name)
        futures = [self._client.submit(run_task, *words, part, pure=False, retries=2) for part in left]
        try:
            for _, error in as_completed(futures, with_results=True):
                if error is not None:
                    raise MegatfmError(error)
        except KilledWorker as died:
            raise MegatfmError(
                f"{name}: workers died again and again ({died}): see their logs; the same command goes on"
            ) from died
        finally:
            self._client.cancel(futures)

    def run_once(
        self, name: str, find: Callable[[], StageResult | None], work: Callable[[], StageResult]
    ) -> StageResult:
        result_before = find()
        result = work() if result_before is None else result_before
        if name == FINISH:
            self.release()
        return result

    def release(self) -> None:
        """Let the workers leave the folder, once they have done what they are at."""
        self._client.run(leave, self._config, str(Path.cwd()))
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def _show_life(self) -> None:
        """Hold a lock in the folder that dies with this process, which the workers look at."""
        if self._life is None:
            path = self._folder / CLIENT
            path.parent.mkdir(parents=True, exist_ok=True)
            self._life = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with suppress(OSError):  # another client, or no locks
                fcntl.flock(self._life, fcntl.LOCK_EX | fcntl.LOCK_NB)


def leave(config: str, folder: str) -> None:
    """Leave a preparation, in a worker."""
    with _lock:
        member = _members.pop((config, folder), None)
    if member is not None:
        member.leave()


def run_task(config: str, folder: str, stage: str, part: int) -> str | None:
    """Do a part, in a worker. Returns what is wrong, if it is something that another try would not mend."""
    with _lock:
        member = _members.get((config, folder))
        if member is None or member.has_ended:
            os.chdir(folder)  # as the config may name files from here
            member = _members[config, folder] = _DaskMember(PrepConfig.model_validate(json.loads(config)))
    try:
        member.do(stage, part)
    except MegatfmError as error:
        return str(error)
    return None


class _LeavingError(Exception):
    """Ends the pipeline of a worker."""


class _DaskMember(LockExecutor):
    """A worker, for one config. A thread runs the pipeline; parts of the stage it has come to are done on demand."""

    def __init__(self, config: PrepConfig) -> None:
        super().__init__(1, 1, Path())
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._wanted: str | None = None
        self._local_task: tuple[str, Callable[[int], bool], Callable[[int], None]] | None = None
        self._error: BaseException | None = None
        self.has_ended = self._is_leaving = False
        self._thread = threading.Thread(target=self._run_pipeline, args=(config,), daemon=True)
        self._thread.start()

    def bind(self, folder: Path) -> "_DaskMember":
        self._folder = folder
        return self

    def do(self, stage: str, part: int) -> None:
        with self._one_at_a_time:
            is_done, work = self._wait_for_stage(stage)
            while not is_done(part):
                with self._claim(f"{stage}.{part}") as mine:
                    if mine and not is_done(part):
                        work(part)
                        return
                time.sleep(POLL_SECONDS)  # an earlier try still lives

    def leave(self) -> None:
        with self._one_at_a_time:
            with self._changed:
                self._is_leaving = True
                self._changed.notify_all()
            self._thread.join()

    def _wait_for_stage(self, stage: str) -> tuple[Callable[[int], bool], Callable[[int], None]]:
        """Wait until the pipeline has come to a stage."""
        with self._changed:
            self._wanted = stage
            self._changed.notify_all()
            while not (self._local_task and self._local_task[0] == stage):
                if self._error is not None:
                    raise self._error
                if self.has_ended:
                    return lambda _: True, lambda _: None
                self._changed.wait()
            return self._local_task[1:]

    def run_tasks(
        self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]
    ) -> None:
        with self._changed:
            self._local_task = (name, is_done, work)
            self._changed.notify_all()
            while not self._changed.wait_for(
                lambda: self._is_leaving or self._wanted not in (None, name), CLIENT_SECONDS
            ):
                if not self._client_lives():
                    self._is_leaving = True
            self._local_task = None
            if self._is_leaving:
                raise _LeavingError

    def run_once(
        self, name: str, find: Callable[[], StageResult | None], work: Callable[[], StageResult]
    ) -> StageResult:
        looked = time.monotonic()
        while (result := find()) is None:
            if time.monotonic() - looked > CLIENT_SECONDS:
                self._is_leaving |= not self._client_lives()
                looked = time.monotonic()
            if self._is_leaving:
                raise _LeavingError
            time.sleep(POLL_SECONDS)
        return result

    def _client_lives(self) -> bool:
        """Whether the process that started the work still holds its lock: killed, it tells nobody to leave."""
        try:
            file = os.open(self._folder / CLIENT, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is held, or there are no locks
            return True
        finally:
            os.close(file)
        return False

    def _run_pipeline(self, config: PrepConfig) -> None:
        from megatfm.data_prep.pipeline import run

        try:
            run(config, Reporter(Console(file=io.StringIO())), self.bind)
        except BaseException as error:
            self._error = error
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()


_members: dict[tuple[str, str], _DaskMember] = {}
_lock = threading.Lock()


@contextmanager
def dask_workers(where: str | None, config: PrepConfig) -> Iterator[Callable[[Path], DaskExecutor] | None]:
    """Makes, of the folder for work in progress, a team with the workers of a Dask; None if none is asked for.

    Whoever reaches a scheduler may run code on its workers, so without TLS only one on this machine will do. The keys
    are those of Dask's own config. Raises UsageError for what is no scheduler, MegatfmError for one out of reach.
    """
    if where is None:
        yield None
        return
    with _connected(where) as client:
        team = DaskExecutor(client, config)
        try:
            yield team.in_folder
        finally:
            team.release()


def _connected(where: str) -> Any:
    """A client of the scheduler at an address, or of which a file tells."""
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--dask: is not installed: pip install 'megatfm[cluster]'") from error
    address = _address(where)
    if not address.startswith("tls://") and urlsplit(address).hostname not in LOOPBACK:
        raise UsageError(
            f"--dask {where}: {address} is open to whoever reaches it: start scheduler and workers with TLS (tls://…)"
        )
    try:
        return Client(address, timeout=CONNECT_SECONDS)
    except (OSError, TypeError, ValueError) as error:
        raise MegatfmError(f"--dask {where}: can't be reached at {address} ({error})") from error


def _address(where: str) -> str:
    if "://" in where:
        return where
    try:
        return str(json.loads(Path(where).read_bytes())["address"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--dask {where}: neither an address (tls://host:8786) nor a scheduler file ({error})"
        ) from error
