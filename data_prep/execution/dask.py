"""Dask's workers as tasks: Dask schedules the parts of stages, and retries those of dead workers.

No text goes through Dask: a task is the name of a stage and the number of a part, and files lie in the shared folder. A
worker runs the pipeline like any other process, and waits at each stage for the parts that Dask assigns to it. A lock
claims each part, since Dask may start a task again before the first try has died.
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
from megatfm.data_prep.execution.executors import FINISH, POLL_SECONDS, FindResult, LockExecutor, StageResult, Work
from megatfm.data_prep.execution.progress import Reporter
from megatfm.errors import MegatfmError, UsageError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
CONNECT_SECONDS = 30
CLIENT = "claims/client"
"""Name of the lock that the client process holds while it lives."""
CLIENT_SECONDS = 5.0
"""Seconds between a waiting worker's checks that the client lives."""


class DaskExecutor(LockExecutor):
    """The client process: it submits parts to the workers, and does the indivisible work itself."""

    def __init__(self, client: Any, config: PrepConfig) -> None:
        super().__init__(1, 1, Path())
        self._client = client
        self._config = config.model_dump_json()
        self._client_lock: int | None = None

    def in_folder(self, folder: Path) -> "DaskExecutor":
        """Set the folder of work in progress. Returns self."""
        self._folder = folder
        return self

    def run_parts(self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]) -> None:
        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        self._lock_client()
        pending_parts = [part for part in range(count) if not is_done(part)]
        arguments = (self._config, str(Path.cwd()), name)
        futures = [self._client.submit(run_part, *arguments, part, pure=False, retries=2) for part in pending_parts]
        try:
            for _, error in as_completed(futures, with_results=True):
                if error is not None:
                    raise MegatfmError(error)
        except KilledWorker as error:
            raise MegatfmError(
                f"{name}: workers died repeatedly ({error}): see their logs, then run the same command to continue"
            ) from error
        finally:
            self._client.cancel(futures)

    def run_once(self, name: str, find: FindResult, work: Work) -> StageResult:
        committed = find()
        result = work() if committed is None else committed
        if name == FINISH:
            self.release()
        return result

    def release(self) -> None:
        """Let the workers leave the folder once they have finished their parts."""
        self._client.run(leave, self._config, str(Path.cwd()))
        if self._client_lock is not None:
            os.close(self._client_lock)
            self._client_lock = None

    def _lock_client(self) -> None:
        """Hold a lock that ends with this process, and that the workers check."""
        if self._client_lock is None:
            path = self._folder / CLIENT
            path.parent.mkdir(parents=True, exist_ok=True)
            self._client_lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with suppress(OSError):  # another client, or no locks
                fcntl.flock(self._client_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def leave(config: str, folder: str) -> None:
    """End a worker's preparation."""
    with _lock:
        preparation = _preparations.pop((config, folder), None)
    if preparation is not None:
        preparation.leave()


def run_part(config: str, folder: str, stage: str, part: int) -> str | None:
    """Do a part in a worker. Returns the message of an error that another try would not mend."""
    with _lock:
        preparation = _preparations.get((config, folder))
        if preparation is None or preparation.has_ended:
            os.chdir(folder)  # as the config may name files from here
            preparation = _preparations[config, folder] = _DaskPreparation(
                PrepConfig.model_validate(json.loads(config))
            )
    try:
        preparation.run_part(stage, part)
    except MegatfmError as error:
        return str(error)
    return None


class _LeavingError(Exception):
    """Ends the pipeline of a worker."""


class _DaskPreparation(LockExecutor):
    """A worker's preparation of one config. A thread runs the pipeline, and parts of its current stage on demand."""

    def __init__(self, config: PrepConfig) -> None:
        super().__init__(1, 1, Path())
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._requested_stage: str | None = None
        self._current_stage: tuple[str, Callable[[int], bool], Callable[[int], None]] | None = None
        self._error: BaseException | None = None
        self.has_ended = self._is_leaving = False
        self._thread = threading.Thread(target=self._run_pipeline, args=(config,), daemon=True)
        self._thread.start()

    def in_folder(self, folder: Path) -> "_DaskPreparation":
        self._folder = folder
        return self

    def run_part(self, stage: str, part: int) -> None:
        with self._one_at_a_time:
            is_done, work = self._wait_for_stage(stage)
            while not is_done(part):
                with self._try_claim(f"{stage}.{part}") as is_claimed:
                    if is_claimed and not is_done(part):
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
            self._requested_stage = stage
            self._changed.notify_all()
            while not (self._current_stage and self._current_stage[0] == stage):
                if self._error is not None:
                    raise self._error
                if self.has_ended:
                    return lambda _: True, lambda _: None
                self._changed.wait()
            return self._current_stage[1:]

    def run_parts(self, name: str, count: int, is_done: Callable[[int], bool], work: Callable[[int], None]) -> None:
        with self._changed:
            self._current_stage = (name, is_done, work)
            self._changed.notify_all()
            while not self._changed.wait_for(
                lambda: self._is_leaving or self._requested_stage not in (None, name), CLIENT_SECONDS
            ):
                if not self._is_client_alive():
                    self._is_leaving = True
            self._current_stage = None
            if self._is_leaving:
                raise _LeavingError

    def run_once(self, name: str, find: FindResult, work: Work) -> StageResult:
        last_check = time.monotonic()
        while (result := find()) is None:
            if time.monotonic() - last_check > CLIENT_SECONDS:
                self._is_leaving |= not self._is_client_alive()
                last_check = time.monotonic()
            if self._is_leaving:
                raise _LeavingError
            time.sleep(POLL_SECONDS)
        return result

    def _is_client_alive(self) -> bool:
        """Return whether the client still holds its lock. A killed client can't tell its workers to leave."""
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
            run(config, Reporter(Console(file=io.StringIO())), self.in_folder)
        except BaseException as error:
            self._error = error
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()


_preparations: dict[tuple[str, str], _DaskPreparation] = {}
_lock = threading.Lock()


@contextmanager
def connect_dask_workers(scheduler: str | None, config: PrepConfig) -> Iterator[Callable[[Path], DaskExecutor] | None]:
    """Yield the function that makes an executor over Dask's workers from a work folder; None if `scheduler` is None.

    Anyone who reaches a scheduler may run code on its workers, so without TLS it must be on this machine. The keys are
    those of Dask's own config. Raises UsageError if `scheduler` is no scheduler, MegatfmError if it is out of reach.
    """
    if scheduler is None:
        yield None
        return
    with _connect(scheduler) as client:
        executor = DaskExecutor(client, config)
        try:
            yield executor.in_folder
        finally:
            executor.release()


def _connect(scheduler: str) -> Any:
    """Return a client of the scheduler at an address, or in a scheduler file."""
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError("--dask: is not installed: pip install 'megatfm[cluster]'") from error
    address = _find_address(scheduler)
    if not address.startswith("tls://") and urlsplit(address).hostname not in LOOPBACK:
        raise UsageError(
            f"--dask {scheduler}: {address} is open to anyone who reaches it: start scheduler and workers with TLS "
            "(tls://…)"
        )
    try:
        return Client(address, timeout=CONNECT_SECONDS)
    except (OSError, TypeError, ValueError) as error:
        raise MegatfmError(f"--dask {scheduler}: can't be reached at {address} ({error})") from error


def _find_address(scheduler: str) -> str:
    if "://" in scheduler:
        return scheduler
    try:
        return str(json.loads(Path(scheduler).read_bytes())["address"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"--dask {scheduler}: neither an address (tls://host:8786) nor a scheduler file ({reason})"
        ) from error
