"""Describes a job (`Job`), its state (`JobState`), and the interface of launchers (`Launcher`)."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megatfm import version
from megatfm.config import Config
from megatfm.config.prep import PrepConfig
from megatfm.config.section import check_path
from megatfm.errors import UsageError
from megatfm.files import NewPaths

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TIME = re.compile(r"\d+((:\d+){0,2}|-\d+(:\d+){0,2})")

MEGATFM_COMMAND = (sys.executable, "-P", "-m", "megatfm", "train")
"""The command that starts ranks. -P keeps the working directory off the path: a `queue.py` there would hide
Python's."""

Kind = Literal["train", "prep", "evaluate"]


@dataclass(frozen=True)
class Job:
    """A training, preparation or evaluation: its config, its name, and the nodes and processes that it asks for.

    `config_name` is the config as the user named it; `max_nodes` is `min_nodes` if left out. `array_size`: tasks of a
    preparation that work side by side. `chain_length`: jobs that follow one another. Raises UsageError for a field that
    is out of range or holds characters that it can't.
    """

    config_name: str
    overrides: tuple[str, ...]
    config: Config | PrepConfig
    name: str
    kind: Kind = "train"
    min_nodes: int = 1
    max_nodes: int | None = None
    nproc_per_node: int = 1
    gpus_per_node: int = 0
    time_limit: str | None = None
    array_size: int = 1
    chain_length: int = 1

    def __post_init__(self) -> None:
        check_path(self.run_dir)
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"job name {self.name!r}: use up to 100 letters, digits, '.', '_' and '-', for example my-run"
            )
        if self.gpus_per_node < 0:
            raise UsageError(f"--gpus-per-node {self.gpus_per_node}: it must be 0 (no GPUs) or more")
        counts = {"nodes": self.min_nodes, "processes": self.nproc_per_node, "tasks": self.array_size}
        for subject, count in {**counts, "links of the chain": self.chain_length}.items():
            if count < 1:
                raise UsageError(f"number of {subject} is {count}: it must be at least 1")
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise UsageError(f"--nodes {self.min_nodes}-{self.max_nodes}: the least number comes first")
        if self.gpus_per_node and self.nproc_per_node != self.gpus_per_node:
            raise UsageError(
                f"{self.nproc_per_node} processes on {self.gpus_per_node} GPUs of a node: one process drives one "
                "GPU, so leave --nproc out"
            )
        if self.time_limit is not None and not TIME.fullmatch(self.time_limit):
            raise UsageError(
                f"--time {self.time_limit!r}: use SLURM's minutes, hours:minutes:seconds or days-hours, "
                "for example 24:00:00"
            )

    @property
    def largest_node_count(self) -> int:
        """Nodes that the run may grow to; without a range, the nodes that it has."""
        return self.max_nodes or self.min_nodes

    @property
    def world_size(self) -> int:
        """Processes of the whole run, at most."""
        return self.largest_node_count * self.nproc_per_node

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute. A preparation has one beside what it makes."""
        if isinstance(self.config, PrepConfig):
            out = Path(self.config.out).absolute()
            return out.with_name(f"{out.name}.jobs")
        return Path(self.config.run_dir or Path("runs") / self.config.name).absolute()

    @property
    def command(self) -> list[str]:
        """Command of every process."""
        return [*megatfm_command(self.kind), self.config_name, *self.overrides]


def megatfm_command(kind: Kind, python: str | None = None) -> list[str]:
    """The command line of megatfm for a kind of job."""
    return [python or MEGATFM_COMMAND[0], *MEGATFM_COMMAND[1:-1], kind]


def python_path() -> dict[str, str]:
    """PYTHONPATH for ranks, where this megatfm is found in the working directory alone; else nothing.

    That is an uninstalled checkout, used by `python -m megatfm` from its top.
    """
    root = Path(version.__file__).resolve().parents[1]
    first, *later_paths = sys.path
    if sys.flags.safe_path or Path(first or ".").resolve() != root or _origin(later_paths) == root:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def _origin(path: list[str]) -> Path | None:
    """The folder in which megatfm is found on another path than today's, by all finders."""
    original_path, sys.path = sys.path, path
    try:
        specs = (finder.find_spec("megatfm", None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec), None)
    finally:
        sys.path = original_path
    return Path(spec.origin).resolve().parents[1] if spec and spec.origin else None


OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
    *("DONE", "ENDED", "GONE", "NO PROGRESS", "STOPPED"),
}
"""States of a job that has ended for good: SLURM's, then ours. Jobs in other states hold nodes or may start."""
UNKNOWN = "UNKNOWN"
"""State of a job whose state is unknown: the scheduler doesn't answer, or it runs on another machine."""


@dataclass(frozen=True)
class JobState:
    """State of a job as its scheduler reports it: name (RUNNING, …), reason, start in seconds since 1970."""

    name: str
    reason: str = ""
    since: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has surely ended for good: one that waits to be started again has not."""
        return self.name.partition(" by ")[0] in OVER  # sacct: "CANCELLED by 1000"

    @property
    def is_unknown(self) -> bool:
        """Whether its state is unknown."""
        return self.name == UNKNOWN


class Launcher(Protocol):
    """A way to run a job."""

    def render(self, job: Job) -> dict[str, str]:
        """The files that describe the job, by name. Pure: touches nothing."""
        ...

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Run or queue the job. Returns the exit code of the command.

        new_paths: what was made for the job so far. A job that is refused before it begins leaves nothing in a run
        directory that is new.
        """
        ...
