"""A SLURM job: one task per rank, told to save ahead of the time limit, requeued until the run is done."""

import os
import re
import shlex
import subprocess
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from launchers.job import TRAIN, Job
from launchers.site import Site
from megatfm.config import to_toml
from megatfm.errors import MegatfmError, UsageError


class Slurm:
    """Renders `slurm/pretrain.sbatch` for a site and hands it to sbatch."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def render(self, job: Job) -> dict[str, str]:
        """The batch script, and the resolved config that it trains: later edits don't reach a queued job.

        Every value that the template puts in is quoted; what stands in #SBATCH lines, which no shell reads, is
        checked for characters that sbatch would trip over. Raises UsageError for such a path.
        """
        threads = str(self.site.cpus_per_task or 1)
        interface = self.site.interface
        environment = {
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
            **self.site.environment,
        }
        template = Environment(
            undefined=StrictUndefined,
            finalize=lambda value: shlex.quote(str(value)),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        ).from_string((resources.files("slurm") / "pretrain.sbatch").read_text(encoding="utf-8"))
        script = template.render(
            job=job,
            site=self.site,
            environment=environment,
            command=[*self.site.container, *TRAIN, str(self._folder(job) / "config.toml")],
            folder=_sbatch_path(Path.cwd()),
            log=f"{_sbatch_path(job.run_dir)}/logs/slurm-%j.log",
        )
        config = job.resolved.model_copy(update={"run_dir": str(job.run_dir)})
        return {"pretrain.sbatch": script, "config.toml": to_toml(config)}

    def submit(self, job: Job) -> int:
        """Write the files into RUN/slurm/, queue the job, say its number and where to look."""
        folder = self._folder(job)
        try:
            (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)  # sbatch would lose the log without it
            folder.mkdir(exist_ok=True)
            for name, text in self.render(job).items():
                _write(folder / name, text)
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or folder}: can't write the job's files: {error.strerror}"
            ) from error
        number = _sbatch(folder / "pretrain.sbatch")
        print(f"job {number} is queued: {job.processes} processes on {job.nodes} nodes")
        print(f"  state    squeue -j {number}")
        print(f"  log      {job.run_dir}/logs/slurm-{number}.log")
        print(f"  metrics  {job.run_dir}/metrics.jsonl")
        print(f"  cancel   scancel {number}")
        return 0

    def _folder(self, job: Job) -> Path:
        return job.run_dir / "slurm"


def _sbatch(script: Path) -> int:
    """Queue a script; returns the job's number."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError(
            "sbatch is not on PATH: run this on a login node of the cluster, or look at the script with --dry-run"
        ) from None
    number = done.stdout.strip().split(";")[0]
    if done.returncode or not number.isdecimal():
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise MegatfmError(f"sbatch refused {script}: {said}")
    return int(number)


def _sbatch_path(path: Path) -> str:
    if re.search(r"[\x00-\x1f\x7f'\"\\%]", str(path)):
        raise UsageError(
            f"{str(path)!r}: a SLURM job can't write to a path with quotes, backslashes, '%' or control characters: "
            "choose another run_dir or folder"
        )
    return str(path)


def _write(path: Path, text: str) -> None:
    """Write a file so that its name never holds a half."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
