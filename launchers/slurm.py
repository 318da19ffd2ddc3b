"""Queues jobs at a SLURM site (`slurm_site.py`).

A training job saves before its time limit, and the next job resumes it. A preparation is a job array whose tasks share
the work. An evaluation reads a run directory. The templates of the job scripts are slurm/*.sbatch.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined

from megatfm.config import Config, to_toml
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import NewPaths, atomic_write
from megatfm.launchers import scheduler, snapshot
from megatfm.launchers.job import Job, make_megatfm_command
from megatfm.launchers.record import lock_launch_record, record_evaluation_jobs, write_launch_record
from megatfm.launchers.run_jobs import refuse_concurrent_launch
from megatfm.launchers.slurm_site import Site
from megatfm.terminal import format_counted

TEMPLATES = {"train": "pretrain", "prep": "data_prep", "evaluate": "evaluate"}


def _read_template(name: str) -> str:
    return (resources.files("megatfm.slurm") / f"{name}.sbatch").read_text(encoding="utf-8")


TEMPLATE_ENVIRONMENT = Environment(
    loader=FunctionLoader(_read_template),
    undefined=StrictUndefined,
    finalize=lambda value: shlex.quote(str(value)),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


class SlurmLauncher:
    """Renders a template of `slurm/` for a site and submits it to sbatch."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def render(self, job: Job) -> dict[str, str]:
        """Return the batch script and its resolved config: later edits of the user's file don't affect a queued job.

        The template quotes every value for the shell. No shell reads #SBATCH lines, so paths there are checked for
        characters that sbatch can't handle. Raises UsageError for such a path.
        """
        name = TEMPLATES[job.kind]
        uses_torchrun = self.site.start == "torchrun" and job.kind == "train"
        tasks = 1 if uses_torchrun else job.resources.nproc_per_node
        cpus = self.site.cpus_per_task
        cpus = cpus * job.resources.nproc_per_node if cpus and uses_torchrun else cpus
        srun_cpus = cpus or (1 if job.resources.max_nodes else None)
        folder, run = _check_sbatch_path(Path.cwd()), _check_sbatch_path(job.run_dir)
        job_id_pattern = "%A_%a" if job.kind == "prep" else "%j"
        options, dependencies = self._split_options()
        script = TEMPLATE_ENVIRONMENT.get_template(name).render(
            job=job,
            site=self.site,
            options=options,
            dependency=",".join(dependencies),
            environment=self._make_environment(),
            cpus_per_task=(cpus or 1) * tasks if job.resources.max_nodes else cpus,
            # Since SLURM 22.05, srun doesn't inherit it from the job.
            srun=[*([f"--cpus-per-task={srun_cpus}"] if srun_cpus else []), *self.site.srun],
            command=[*self.site.container, *self._make_command(job)],
            python=sys.executable,
            pythonpath=self._get_slurm_dir(job) / snapshot.collect_code(job.config.plugins).dir_name,
            node_range=job.resources.nodes,
            tasks_per_node=tasks,
            # In a chain, the next job continues the run. SLURM itself still requeues after a node failure, if allowed.
            requeue="--requeue" if self.site.requeue and job.chain_length == 1 else "--no-requeue",
            config=self._get_slurm_dir(job) / "config.toml",
            folder=folder,
            run=run,
            log=f"{run}/logs/slurm-{job_id_pattern}.log",
        )
        config = job.config
        if isinstance(config, Config):
            config = config.model_copy(update={"run_dir": str(job.run_dir)})
        files = {f"{name}.sbatch": script}
        # An evaluation reads the run's own config. RUN/slurm/config.toml is for the training job, which may be queued.
        return files if job.kind == "evaluate" else {**files, "config.toml": to_toml(config)}

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Write code, config and script into RUN/slurm/, queue the job, and print its number and where to look."""
        files = self.render(job)
        jobs: list[str] = []
        try:
            new_paths.make_folder(job.run_dir)
            with lock_launch_record(job.run_dir):  # of two launchers that begin at once, one is refused
                evaluations = refuse_concurrent_launch(job)
                script, code_name = self._write_files(job, files, new_paths)
                self._queue_jobs(job, script, code_name, jobs, evaluations)
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or self._get_slurm_dir(job)}: can't write the job's files: {error.strerror}"
            ) from error
        finally:
            if not jobs and new_paths.is_new(job.run_dir):
                new_paths.remove()
        self._print_summary(job, jobs)
        return 0

    def _write_files(self, job: Job, files: Mapping[str, str], new_paths: NewPaths) -> tuple[Path, str]:
        """Write the job's files into RUN/slurm/; return the script and the code snapshot's name. Raises OSError."""
        folder = self._get_slurm_dir(job)
        new_paths.make_folder(job.run_dir / "logs")  # without it, SLURM would discard the log
        if not folder.exists():
            new_paths.trees.append(folder)
        folder.mkdir(exist_ok=True)
        code_dir = snapshot.collect_code(job.config.plugins).copy_to(folder)
        script = next(iter(files))
        if code_dir.name not in files[script]:
            raise MegatfmError("the code changed while it was copied: submit again")
        for name, text in files.items():
            atomic_write(folder / name, text)
        return folder / script, code_dir.name

    def _queue_jobs(self, job: Job, script: Path, code_name: str, jobs: list[str], evaluations: Sequence[str]) -> None:
        """Submit the job, or all jobs of its chain; append their ids to `jobs` and record them."""
        _, dependencies = self._split_options()
        for _ in range(job.chain_length):
            jobs.append(_queue_script(script, _make_chain_dependency(dependencies, jobs)))
            if job.kind == "evaluate":
                record_evaluation_jobs(job.run_dir, [*evaluations, *jobs])
            else:  # after each submission, since the first job may already run and look for the others
                fields = {"launcher": "slurm", "kind": job.kind, "array": job.array_size, "code": code_name}
                write_launch_record(job.run_dir, **fields, **job.corpus_url, jobs=jobs)

    def _get_slurm_dir(self, job: Job) -> Path:
        return job.run_dir / "slurm"

    def _make_command(self, job: Job) -> list[str]:
        megatfm = make_megatfm_command(job.kind, self.site.python)
        if job.kind == "evaluate":
            return [*megatfm, str(job.run_dir), *job.overrides]
        config = str(self._get_slurm_dir(job) / "config.toml")
        if job.kind == "train" and self.site.start == "torchrun":
            agent = [megatfm[0], *("-P", "-m", "megatfm.launchers.torchrun", "agent", "--processes")]
            return [*agent, str(job.resources.nproc_per_node), "train", config]
        return [*megatfm, config]

    def _split_options(self) -> tuple[list[str], list[str]]:
        """Split the site's sbatch options into ordinary options and values of --dependency."""
        flag = "--dependency="
        dependencies = [option.removeprefix(flag) for option in self.site.sbatch if option.startswith(flag)]
        return [option for option in self.site.sbatch if not option.startswith(flag)], dependencies

    def _make_environment(self) -> dict[str, str]:
        interface = self.site.interface
        return {
            "OMP_NUM_THREADS": str(self.site.cpus_per_task or 1),
            "PYTHONUNBUFFERED": "1",
            **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
            **self.site.environment,
        }

    def _print_summary(self, job: Job, jobs: list[str]) -> None:
        run = job.run_dir
        if job.kind == "prep":
            size = format_counted(job.array_size, "task")
        else:
            processes = format_counted(job.world_size, "process", "processes")
            size = f"{processes} on {job.resources.nodes} node{'s' * (job.resources.nodes != '1')}"
        log = f"{run}/logs/slurm-{jobs[0]}{'_*' if job.kind == 'prep' else ''}.log"
        name = shlex.quote(str(run))
        print(f"job{'s' * (len(jobs) > 1)} {', '.join(jobs)} {'are' if len(jobs) > 1 else 'is'} queued: {size}")
        print(f"  state    megatfm status {name}")
        print(f"  log      megatfm logs -f {name}    ({log})")
        if job.kind == "train":
            print(f"  metrics  {run}/metrics.jsonl")
        print(f"  cancel   megatfm cancel {name}")
        if not self.site.requeue and job.chain_length == 1 and job.kind == "train":
            print("  note     this site doesn't requeue jobs: --chain N queues N jobs that run one after another")


def _make_chain_dependency(dependencies: Sequence[str], jobs: Sequence[str]) -> str:
    """Return sbatch's --dependency of the next job of a chain; empty for the first, whose script contains its own.

    The job waits for the previous one, however that ends, and for the conditions of the first. `singleton` would be
    simpler, but runs in other folders may have the same job name. Alternatives (`?`) hold only for the first job:
    sbatch doesn't accept them together with another condition.
    """
    if not jobs:
        return ""
    return ",".join([*(name for name in dependencies if "?" not in name), f"afterany:{jobs[-1]}"])


def _queue_script(script: Path, dependency: str) -> str:
    """Queue a script; return the job's id."""
    try:
        output = scheduler.submit_script(str(script), dependency)
    except UsageError as error:
        raise UsageError(f"{error}, or look at the script with --dry-run") from None
    except MegatfmError as error:
        raise MegatfmError(f"sbatch refused {script}: {str(error).partition(': ')[2]}") from None
    job_id = output.rstrip().rpartition("\n")[2].split(";")[0]  # below what a site's own sbatch prints
    if not job_id.isdecimal():
        raise MegatfmError(
            f"sbatch took {script}, but its last line is no job's number ({' '.join(output.split())!r}): look for the "
            "job by squeue"
        )
    return job_id


def _check_sbatch_path(path: Path) -> str:
    if re.search(r"[\x00-\x1f\x7f'\"\\%:]", str(path)):
        raise UsageError(
            f"{str(path)!r}: a SLURM job can't write to a path with quotes, backslashes, '%', ':' or control "
            "characters: choose another run_dir or folder"
        )
    return str(path)
