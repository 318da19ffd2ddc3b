"""The command line of data_prep, shared with `megatfm prep`."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from megatfm import data_prep
from megatfm.config import load_section
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.dask import connect_dask_workers
from megatfm.data_prep.execution.executors import (
    Executor,
    LockExecutor,
    MpiExecutor,
    get_mpi_rank,
    get_mpi_world,
    parse_task,
    supports_flock,
)
from megatfm.data_prep.execution.progress import Reporter
from megatfm.errors import EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, MegatfmError, UsageError, describe_impossible_path
from megatfm.terminal import list_hangup_signals, mute_closed_streams

DASK_HELP = "have the workers of a Dask cluster do the parts: its scheduler's address (tls://…) or file"
TASK_HELP = "this is task I of N that share the work, counted from 1, for example in a SLURM array"


def cli(argv: Sequence[str] | None = None) -> int:
    """`CONFIG [key=value …]`: prepare a corpus. Returns the exit code: 0 done, 1 failed, 2 usage, 75 stopped."""
    parser = argparse.ArgumentParser(prog="megatfm prep", description="Prepare a corpus.")
    parser.add_argument("config", help="a TOML file or the name of a preset, for example quickstart-data")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example read.folder=my-texts")
    parser.add_argument("--task", "--part", dest="task", metavar="I/N", help=TASK_HELP)
    parser.add_argument("--dask", metavar="SCHEDULER", help=DASK_HELP)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args(argv)
    stop_signals = (signal.SIGTERM, *list_hangup_signals())
    previous_handlers = {name: signal.signal(name, _raise_interrupt) for name in stop_signals}
    world: Any = None
    is_first = True
    try:
        config = load_section(PrepConfig, arguments.config, arguments.overrides)
        task = rank_and_size = parse_task(arguments.task) if arguments.task else None
        if arguments.dask:
            if rank_and_size:
                raise UsageError("--task and --dask: give one of them")
        elif rank_and_size is None and (rank_and_size := get_mpi_rank(os.environ)):
            is_first = rank_and_size[0] == 1
            if config.overwrite or not supports_flock(config.local_folder):
                world = get_mpi_world(rank_and_size[1])
        with connect_dask_workers(arguments.dask, config) as workers:
            _prepare(config, workers or _make_executor(world, rank_and_size), is_first, task or (1, 1))
        code = 0
    except MegatfmError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except (OSError, ValueError) as error:
        message = describe_impossible_path(error)
        if arguments.debug or not (message or isinstance(error, OSError)):
            raise
        code = EXIT_USAGE if message else EXIT_FAILED
        if message is None and isinstance(error, OSError):
            message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"error: {message or type(error).__name__}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: committed parts are kept; run the same command to resume", file=sys.stderr)
        code = EXIT_REQUEUE
    finally:
        for name, handler in previous_handlers.items():
            signal.signal(name, handler)
    if code and world is not None:  # the other ranks would wait for this one for ever
        sys.stderr.flush()
        world.Abort(code)
    return code


def _make_executor(world: Any, rank_and_size: tuple[int, int] | None) -> Callable[[Path], Executor] | None:
    """Return the factory of the executor: of MPI's ranks, or of one of several tasks; None for a single process."""
    if world is not None:
        return lambda _: MpiExecutor(world)
    return partial(LockExecutor, *rank_and_size) if rank_and_size else None


def _prepare(
    config: PrepConfig, make_executor: Callable[[Path], Executor] | None, is_first: bool, task: tuple[int, int]
) -> None:
    console = Console(stderr=True) if is_first else Console(file=io.StringIO())
    reporter = Reporter(console, task)
    summary = data_prep.run(config, reporter, make_executor)
    for note in summary.result["notes"]:
        reporter.log(f"note: {note}")
    for skipped in summary.result["skipped_files"]:
        reporter.log(f"skipped: {skipped}")
    console.print(summary.to_table())
    if summary.already_done:
        reporter.log(f"{summary.out} was already prepared with this config: nothing to do")


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGHUP:
        mute_closed_streams()
    raise KeyboardInterrupt
