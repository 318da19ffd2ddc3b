"""`megatfm launch` in this process, jobs for launchers, a SLURM that answers from files, runs to look at."""

import argparse
import errno
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from unittest.mock import patch

import pytest

from megatfm import cli
from megatfm.config import load_config
from megatfm.launchers import attempts, prolog_epilog, record
from megatfm.launchers.cli import add_arguments, main
from megatfm.launchers.job import Job, Resources


def run_launch(*words: str, config: str = "quickstart") -> int:
    """Run `megatfm launch CONFIG words`; returns its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    add_arguments(parser)
    return main(parser.parse_intermixed_args([config, *words]))


def make_job(**changes: object) -> Job:
    """A training job of the quickstart, with other values in some fields of the job or of its resources."""
    requested = {field.name: changes.pop(field.name) for field in fields(Resources) if field.name in changes}
    defaults: dict[str, object] = {
        "resources": Resources(**requested),  # type: ignore[arg-type]
        "config_name": "quickstart", "overrides": (), "config": load_config("quickstart"), "name": "quickstart",
    }  # fmt: skip
    return Job(**{**defaults, **changes})  # type: ignore[arg-type]


CLUSTER_FLAGS = [
    "--slurm", "--nodes", "4", "--gpus-per-node", "8", "--time", "24:00:00", "--job-name", "big-run",
]  # fmt: skip


@dataclass
class FakeSlurm:
    """Stand-ins: what commands print and whether they fail, by name (`scontrol-show` for `scontrol show`)."""

    folder: Path

    def answer(self, command: str, text: str) -> None:
        (self.folder / command).write_text(text)

    def fail(self, command: str, text: str) -> None:
        (self.folder / f"{command}.fails").write_text(text)

    @property
    def calls(self) -> list[str]:
        """The commands so far, quoted as a shell would."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


MakeRun = Callable[..., Path]


def run_megatfm(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and all that it wrote."""
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    output = capsys.readouterr()
    return int(left.value.code or 0), output.out + output.err


RUNNING = "JobId=7 JobState=RUNNING Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00 Partition=main NumNodes=2\n"


def run_prolog(run: Path, *, least: int = 1, limit: int = 3) -> int:
    """Begin an attempt of job 7; returns the exit code."""
    words = ["--min-nodes", str(least), "--processes-per-node", "1"]
    return prolog_epilog.main(["prolog", *shared_arguments(run, limit), *words])


def run_epilog(run: Path, code: int, *words: str, limit: int = 3) -> int:
    """End an attempt of job 7 with an exit code; returns the exit code of the epilog."""
    requeue = [] if "--no-requeue" in words else ["--requeue"]
    return prolog_epilog.main(["epilog", *shared_arguments(run, limit), "--code", str(code), *requeue, *words])


def shared_arguments(run: Path, limit: int) -> list[str]:
    """Words that prolog and epilog have in common."""
    files = ["--log", str(run / "logs" / "slurm-7.log"), "--config", str(run / "slurm" / "config.toml")]
    return ["--run", str(run), *files, "--max-restarts", str(limit)]


def write_chain(run: Path, *jobs: int) -> None:
    """Write launch.json of a chain of these jobs."""
    (run / "launch.json").write_text(json.dumps({"launcher": "slurm", "jobs": [str(job) for job in jobs]}))


def write_log(run: Path, text: str) -> None:
    """Write the job's log."""
    (run / "logs" / "slurm-7.log").write_text(text)


def write_event(run: Path, **facts: object) -> None:
    """Add a line to the run's events.jsonl."""
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **facts}) + "\n")


def finish_run(run: Path) -> None:
    """The run records that all of its steps are done."""
    write_event(run, event="finished", detail="step 100", step=100)


@contextmanager
def full_disk() -> Iterator[None]:
    """Meanwhile, launchers' records can't be written, and neither can stderr, a job's log."""

    def refuse(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with ExitStack() as stack:
        for module in (attempts, prolog_epilog, record):
            stack.enter_context(patch.object(module, "atomic_write", refuse))
        stack.enter_context(patch.object(sys, "stderr", stack.enter_context(open("/dev/full", "w"))))
        yield
