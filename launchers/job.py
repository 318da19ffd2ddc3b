"""What is to run, and the interface of everything that can run it."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatfm.config import Config
from megatfm.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TIME = re.compile(r"\d+((:\d+){0,2}|-\d+(:\d+){0,2})")


@dataclass(frozen=True)
class Job:
    """One training run: the config as the user named it, what came out of it, and how many processes where.

    Raises UsageError for a field that is out of range or holds characters that have no business in it.
    """

    config: str
    overrides: tuple[str, ...]
    resolved: Config
    name: str
    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_node: int = 0
    time_limit: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"job name {self.name!r}: use up to 100 letters, digits, '.', '_' and '-', for example my-run"
            )
        if self.gpus_per_node < 0:
            raise UsageError(f"--gpus-per-node {self.gpus_per_node}: it must be 0 (no GPUs) or more")
        for count, what in ((self.nodes, "nodes"), (self.processes_per_node, "processes")):
            if count < 1:
                raise UsageError(f"number of {what} is {count}: it must be at least 1")
        if self.gpus_per_node and self.processes_per_node != self.gpus_per_node:
            raise UsageError(
                f"{self.processes_per_node} processes on {self.gpus_per_node} GPUs of a node: one process drives one "
                "GPU, so leave --nproc out"
            )
        if self.time_limit is not None and not TIME.fullmatch(self.time_limit):
            raise UsageError(
                f"--time {self.time_limit!r}: use SLURM's minutes, hours:minutes:seconds or days-hours, "
                "for example 24:00:00"
            )

    @property
    def processes(self) -> int:
        """Processes of the whole run."""
        return self.nodes * self.processes_per_node

    @property
    def run_dir(self) -> Path:
        """The run directory, absolute."""
        return Path(self.resolved.run_dir or Path("runs") / self.resolved.name).absolute()

    @property
    def command(self) -> list[str]:
        """What every process runs."""
        return [*TRAIN, self.config, *self.overrides]


TRAIN = (sys.executable, "-m", "megatfm.cli", "train")


class Launcher(Protocol):
    """A way to run a job."""

    def render(self, job: Job) -> dict[str, str]:
        """The files that describe the job, by name. Pure: touches nothing."""
        ...

    def submit(self, job: Job) -> int:
        """Run or queue the job. Returns the exit code of the command."""
        ...
