"""SLURM jobs: training that saves ahead of the time limit and goes on until it is done; preparation; evaluation."""

import re
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined

from megatfm.atomic import atomic_write
from megatfm.config import Config, to_toml
from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import scheduler, snapshot
from megatfm.launchers.beside import refuse_concurrent_launch
from megatfm.launchers.files import record_evaluation_jobs, write_launch_record
from megatfm.launchers.job import Job, JobState, megatfm_command
from megatfm.launchers.queue import job_ids, run_job_state
from megatfm.launchers.site import Site

TEMPLATES = {"train": "pretrain", "prep": "data_prep", "evaluate": "evaluate"}


class SlurmLauncher:
    """Renders a template of `slurm/` for a site and hands it to sbatch."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def render(self, job: Job) -> dict[str, str]:
        """The batch script, and the resolved config that it uses: later edits don't reach a queued job.

        Every value that the template puts in is quoted; what stands in #SBATCH lines, which no shell reads, is
        checked for characters that sbatch would trip over. Raises UsageError for such a path.
        """
        name = TEMPLATES[job.kind]
        template = Environment(
            loader=FunctionLoader(_template),
            undefined=StrictUndefined,
            finalize=lambda value: shlex.quote(str(value)),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        ).get_template(name)
        agent = self.site.start == "torchrun" and job.kind == "train"
        tasks = 1 if agent else job.nproc_per_node
        cpus = self.site.cpus_per_task
        cpus = cpus * job.nproc_per_node if cpus and agent else cpus
        srun_cpus = cpus or (1 if job.max_nodes else None)
        folder, run = _sbatch_path(Path.cwd()), _sbatch_path(job.run_dir)
        job_id_pattern = "%A_%a" if job.kind == "prep" else "%j"
        options, dependencies = self._options()
        script = template.render(
            job=job,
            site=self.site,
            options=options,
            dependency=",".join(dependencies),
            environment=self._environment(),
            cpus_per_task=(cpus or 1) * tasks if job.max_nodes else cpus,
            # srun does not take it from the job by itself (SLURM 22.05 and later).
            srun=[*([f"--cpus-per-task={srun_cpus}"] if srun_cpus else []), *self.site.srun],
            command=[*self.site.container, *self._command(job)],
            python=sys.executable,
            pythonpath=self._slurm_dir(job) / snapshot.collect_code(job.config.plugins).dir_name,
            node_range=f"{job.min_nodes}-{job.max_nodes}" if job.max_nodes else str(job.min_nodes),
            tasks_per_node=tasks,
            # In a chain, the next link goes on; on nodes lost, SLURM itself requeues where that is allowed.
            requeue="--requeue" if self.site.requeue and job.chain_length == 1 else "--no-requeue",
            config=self._slurm_dir(job) / "config.toml",
            folder=folder,
            run=run,
            log=f"{run}/logs/slurm-{job_id_pattern}.log",
        )
        config = job.config
        if isinstance(config, Config):
            config = config.model_copy(update={"run_dir": str(job.run_dir)})
        files = {f"{name}.sbatch": script}
        # An evaluation reads the run's own config. The one here is of the training job, which may still wait.
        return files if job.kind == "evaluate" else {**files, "config.toml": to_toml(config)}

    def submit(self, job: Job) -> int:
        """Write code, config and script into RUN/slurm/, queue the job, say its number and where to look."""
        folder, files = self._slurm_dir(job), self.render(job)
        beside, (_, dependencies) = refuse_concurrent_launch(job), self._options()
        try:
            (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)  # sbatch would lose the log without it
            folder.mkdir(exist_ok=True)
            code = snapshot.collect_code(job.config.plugins).copy_to(folder)
            if code.name not in next(iter(files.values())):
                raise MegatfmError("the code changed while it was copied: submit again")
            for name, text in files.items():
                atomic_write(folder / name, text)
            script = folder / next(iter(files))
            jobs: list[str] = []
            for _ in range(job.chain_length):
                jobs.append(_sbatch(script, _following(dependencies, jobs)))
                if job.kind == "evaluate":
                    record_evaluation_jobs(job.run_dir, [*beside, *jobs])
                else:  # after each, so that the first knows of the others as soon as can be
                    facts = {
                        "launcher": "slurm",
                        "kind": job.kind,
                        "array": job.array_size,
                        "code": code.name,
                    }
                    write_launch_record(job.run_dir, **facts, jobs=jobs)
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or folder}: can't write the job's files: {error.strerror}"
            ) from error
        self._print_summary(job, jobs)
        return 0

    def status(self, run: Path) -> JobState:
        """What squeue or, after the job, scontrol or the run's own record says."""
        return run_job_state(run)

    def logs(self, run: Path) -> list[Path]:
        """The batch log of the job that ran last, or of each task of its array."""
        for job in reversed(job_ids(run)):
            found = sorted((run / "logs").glob(f"slurm-{job}.log")) or sorted(
                (run / "logs").glob(f"slurm-{job}_*.log")
            )
            if found:
                return found
        return []

    def _slurm_dir(self, job: Job) -> Path:
        return job.run_dir / "slurm"

    def _command(self, job: Job) -> list[str]:
        megatfm = megatfm_command(job.kind, self.site.python)
        if job.kind == "evaluate":
            return [*megatfm, str(job.run_dir), *job.overrides]
        config = str(self._slurm_dir(job) / "config.toml")
        if job.kind == "train" and self.site.start == "torchrun":
            agent = [
                megatfm[0],
                "-P",
                "-m",
                "megatfm.launchers.agent",
                "--processes",
                str(job.nproc_per_node),
            ]
            return [*agent, "train", config]
        return [*megatfm, config]

    def _options(self) -> tuple[list[str], list[str]]:
        """sbatch's further options, and what the job waits for."""
        flag = "--dependency="
        waits = [each.removeprefix(flag) for each in self.site.sbatch if each.startswith(flag)]
        return [each for each in self.site.sbatch if not each.startswith(flag)], waits

    def _environment(self) -> dict[str, str]:
        interface = self.site.interface
        return {
            "OMP_NUM_THREADS": str(self.site.cpus_per_task or 1),
            "PYTHONUNBUFFERED": "1",
            **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
            **self.site.environment,
        }

    def _print_summary(self, job: Job, jobs: list[str]) -> None:
        run, job_id_pattern = job.run_dir, ", ".join(jobs)
        if job.kind == "prep":
            what = f"{job.array_size} tasks"
        else:
            nodes = f"{job.min_nodes}-{job.max_nodes}" if job.max_nodes else str(job.min_nodes)
            what = f"{job.world_size} processes on {nodes} nodes"
        log = f"{run}/logs/slurm-{jobs[0]}{'_*' if job.kind == 'prep' else ''}.log"
        print(
            f"job{'s' * (len(jobs) > 1)} {job_id_pattern} {'are' if len(jobs) > 1 else 'is'} queued: {what}"
        )
        print(f"  state    megatfm status {run}")
        print(f"  log      megatfm logs -f {run}    ({log})")
        if job.kind == "train":
            print(f"  metrics  {run}/metrics.jsonl")
        print(f"  cancel   megatfm cancel {run}")
        if not self.site.requeue and job.chain_length == 1 and job.kind == "train":
            print(
                "  note     jobs are not requeued at this site: --chain N queues N jobs that follow one another"
            )


def _following(dependencies: Sequence[str], jobs: Sequence[str]) -> str:
    """What a link of a chain waits for: the link before it, however that ends, and what the first one waits for.

    Not by the name of the job (`singleton`), which runs in other folders may have, too. Of alternatives (`?`), which
    sbatch doesn't take together with another condition, the first link alone waits for one.
    """
    if not jobs:
        return ""
    return ",".join([*(each for each in dependencies if "?" not in each), f"afterany:{jobs[-1]}"])


def _template(name: str) -> str:
    return (resources.files("megatfm.slurm") / f"{name}.sbatch").read_text(encoding="utf-8")


def _sbatch(script: Path, dependency: str) -> str:
    """Queue a script; returns the job's number."""
    try:
        said = scheduler.submit(str(script), dependency)
    except UsageError as error:
        raise UsageError(f"{error}, or look at the script with --dry-run") from None
    except MegatfmError as error:
        raise MegatfmError(f"sbatch refused {script}: {str(error).partition(': ')[2]}") from None
    job_id_pattern = said.strip().split(";")[0]
    if not job_id_pattern.isdecimal():
        raise MegatfmError(f"sbatch refused {script}: {' '.join(said.split())}")
    return job_id_pattern


def _sbatch_path(path: Path) -> str:
    if re.search(r"[\x00-\x1f\x7f'\"\\%:]", str(path)):
        raise UsageError(
            f"{str(path)!r}: a SLURM job can't write to a path with quotes, backslashes, '%', ':' or control "
            "characters: choose another run_dir or folder"
        )
    return str(path)
