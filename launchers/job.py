"""A job (`Job`) with its `Resources`, its state (`JobState`), and the interface of launchers (`Launcher`)."""

import os
import re
import sys
from collections.abc import Mapping
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
"""Command of a rank. -P keeps the working directory off sys.path: a `queue.py` there would shadow the standard
library's."""

Kind = Literal["train", "prep", "evaluate"]


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise UsageError if a count is below 1. counts: by the plural of what is counted."""
    for subject, count in counts.items():
        if count < 1:
            raise UsageError(f"number of {subject} is {count}: it must be at least 1")


@dataclass(frozen=True)
class Resources:
    """Nodes, processes, GPUs and time that a job requests.

    `max_nodes`: None unless a range of nodes was requested. Raises UsageError for a value that is out of range.
    """

    min_nodes: int = 1
    max_nodes: int | None = None
    nproc_per_node: int = 1
    gpus_per_node: int = 0
    time_limit: str | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_node < 0:
            raise UsageError(f"--gpus-per-node {self.gpus_per_node}: it must be 0 (no GPUs) or more")
        check_counts({"nodes": self.min_nodes, "processes": self.nproc_per_node})
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise UsageError(f"--nodes {self.min_nodes}-{self.max_nodes}: the smaller number comes first")
        if self.gpus_per_node and self.nproc_per_node != self.gpus_per_node:
            raise UsageError(
                f"{self.nproc_per_node} processes on {self.gpus_per_node} GPUs of a node: each process uses one "
                "GPU, so leave --nproc out"
            )
        if self.time_limit is not None and not TIME.fullmatch(self.time_limit):
            raise UsageError(
                f"--time {self.time_limit!r}: use SLURM's minutes, hours:minutes:seconds or days-hours, "
                "for example 24:00:00"
            )

    @property
    def largest_node_count(self) -> int:
        """Largest number of nodes that the run may use."""
        return self.max_nodes or self.min_nodes

    @property
    def world_size(self) -> int:
        """Number of processes on the largest number of nodes."""
        return self.largest_node_count * self.nproc_per_node

    @property
    def nodes(self) -> str:
        """Number of nodes, or the range MIN-MAX, as sbatch's --nodes takes it."""
        return f"{self.min_nodes}-{self.max_nodes}" if self.max_nodes else str(self.min_nodes)


ONE_PROCESS = Resources()


@dataclass(frozen=True)
class Job:
    """A training, preparation or evaluation: config, name and requested resources.

    `config_name`: the config as the user named it. `array_size`: number of parallel tasks of a preparation.
    `chain_length`: number of jobs that run one after another. Raises UsageError for a field that is out of range or
    contains invalid characters.
    """

    config_name: str
    overrides: tuple[str, ...]
    config: Config | PrepConfig
    name: str
    kind: Kind = "train"
    resources: Resources = ONE_PROCESS
    array_size: int = 1
    chain_length: int = 1

    def __post_init__(self) -> None:
        check_path(self.run_dir)
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"job name {self.name!r}: use up to 100 letters, digits, '.', '_' and '-', for example my-run"
            )
        check_counts({"tasks": self.array_size, "links of the chain": self.chain_length})

    @property
    def world_size(self) -> int:
        """Number of processes on the largest number of nodes."""
        return self.resources.world_size

    @property
    def run_dir(self) -> Path:
        """Absolute run directory. A preparation uses OUT.jobs beside the folder in which the corpus is made."""
        if isinstance(self.config, PrepConfig):
            folder = self.config.local_folder.absolute()
            return folder.with_name(f"{folder.name}.jobs")
        return self.config.run_folder

    @property
    def corpus_url(self) -> dict[str, str]:
        """URL to which a preparation uploads, as a field of its launch record; empty for other jobs."""
        if isinstance(self.config, PrepConfig) and self.config.has_remote_out:
            return {"corpus_url": self.config.out}
        return {}

    @property
    def command(self) -> list[str]:
        """Command of every process."""
        return [*make_megatfm_command(self.kind), self.config_name, *self.overrides]


def make_megatfm_command(kind: Kind, python: str | None = None) -> list[str]:
    """Return the command line that starts a process of this kind of job."""
    return [python or MEGATFM_COMMAND[0], *MEGATFM_COMMAND[1:-1], kind]


def make_python_path() -> dict[str, str]:
    """Return PYTHONPATH for ranks if megatfm can be imported only from the working directory; else an empty dict.

    This is the case in a checkout that isn't installed, when `python -m megatfm` runs in its top folder.
    """
    root = Path(version.__file__).resolve().parents[1]
    first, *later_paths = sys.path
    if sys.flags.safe_path or Path(first or ".").resolve() != root or _import_root(later_paths) == root:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def _import_root(path: list[str]) -> Path | None:
    """Return the folder from which megatfm would be imported if sys.path were `path`."""
    original_path, sys.path = sys.path, path
    try:
        specs = (finder.find_spec("megatfm", None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec), None)
    finally:
        sys.path = original_path
    return Path(spec.origin).resolve().parents[1] if spec and spec.origin else None


FINAL_STATES = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
    *("DONE", "ENDED", "GONE", "NO PROGRESS", "STOPPED"),
}
"""Final states of a job: SLURM's, then ours. A job in any other state holds nodes or may still start."""
UNKNOWN = "UNKNOWN"
"""State of a job if the scheduler doesn't answer, or if the job runs on another machine."""


@dataclass(frozen=True)
class JobState:
    """State of a job: name (RUNNING, …), reason, and `since`, its start in seconds since 1970."""

    name: str
    reason: str = ""
    since: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good. A requeued job has not."""
        return self.name.partition(" by ")[0] in FINAL_STATES  # sacct: "CANCELLED by 1000"

    @property
    def is_unknown(self) -> bool:
        """Whether its state is unknown."""
        return self.name == UNKNOWN


class Launcher(Protocol):
    """Interface of launchers: render a job's files, and run or queue the job."""

    def render(self, job: Job) -> dict[str, str]:
        """Return the job's files, name → text, without writing anything."""
        ...

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Run or queue the job; return the command's exit code.

        new_paths: files and folders created for the job so far; they are removed if the job is refused.
        """
        ...
