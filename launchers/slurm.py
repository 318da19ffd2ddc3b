"""Queues SLURM jobs, and reads the description of the cluster: `Site`, from a site file (slurm/site.toml) and flags.

A training job saves before its time limit, and the next job resumes it. A preparation is a job array whose tasks share
the work. An evaluation reads a run directory. The templates of the job scripts are slurm/*.sbatch.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatfm.config import Config, load_section, to_toml
from megatfm.config.section import Section
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import NewPaths, atomic_write
from megatfm.launchers import scheduler, snapshot
from megatfm.launchers.job import Job, make_megatfm_command
from megatfm.launchers.record import lock_launch_record, record_evaluation_jobs, write_launch_record
from megatfm.launchers.run_jobs import refuse_concurrent_launch
from megatfm.terminal import format_counted

if TYPE_CHECKING:
    from jinja2 import Template

# The site

# Allow the names that sites use, but no quote, blank, newline or `$`.
SlurmToken = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:/+@-]*\z", max_length=200)]
Constraint = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]*\z", max_length=200)]
NodeList = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*\z", max_length=1000)]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?\z", max_length=20)]
SBATCH_OPTION_PATTERN = r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:/+@?*%\[\]-]+)?\Z"
SbatchOption = Annotated[str, Field(pattern=SBATCH_OPTION_PATTERN.replace(r"\Z", r"\z"), max_length=200)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\z", max_length=200)]
SingleLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*\z")]


class Site(Section):
    """Description of a cluster; see the comments in `slurm/site.toml`."""

    partition: SlurmToken | None = None
    """Partition (queue) of jobs."""
    account: SlurmToken | None = None
    """Account to charge."""
    qos: SlurmToken | None = None
    """Quality of service."""
    constraint: Constraint | None = None
    """Features that nodes must have."""
    exclude: NodeList | None = None
    """Nodes that jobs never use."""
    cpus_per_task: PositiveInt | None = None
    """Cores of each process."""
    memory: Memory | None = None
    """Memory of each node; by default the partition's default."""
    exclusive: bool = False
    """Whether jobs use whole nodes, shared with no other job."""
    gpus: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Option that requests GPUs; some sites support only gres."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """More options of sbatch."""
    srun: list[SbatchOption] = Field(default_factory=list)
    """More options of srun."""
    modules: list[SlurmToken] = Field(default_factory=list)
    """Environment modules to load."""
    setup: list[list[SingleLine]] = Field(default_factory=list)
    """Commands that run first in a job, each a list of arguments."""
    container: list[SingleLine] = Field(default_factory=list)
    """Command prefix that runs a process in a container, as a list of arguments."""
    python: SingleLine | None = None
    """Python inside the container; by default the Python that submits."""
    start: Literal["srun", "torchrun"] = "srun"
    """Program that starts the processes: srun, one task per process, or torchrun, one task per node."""
    interface: SlurmToken | None = None
    """Network interface for communication between processes."""
    stop_seconds: PositiveInt = 300
    """Seconds before the time limit at which a run is signalled to save and requeue."""
    requeue: bool = True
    """Whether the site allows jobs to be requeued; if not, use `--chain`."""
    max_restarts: NonNegativeInt = 3
    """Largest number of failures in a row, without a new checkpoint, after which a run is restarted."""
    environment: dict[VariableName, SingleLine] = Field(default_factory=dict)
    """Environment variables of every process."""


RESERVED_SBATCH_OPTIONS = (
    *("array", "chdir", "error", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
    *("account", "constraint", "cpus-per-task", "exclude", "gpus-per-node", "mem", "partition", "qos", "time"),
)
"""Options of sbatch that users can't set: the templates set them, or there are flags and site fields for them."""
UNABBREVIATED_OPTIONS = (*RESERVED_SBATCH_OPTIONS, "begin", "dependency", "nodelist", "reservation")
"""Options that must not be abbreviated, as sbatch would allow, because this module looks for their full names."""
FROM_SHELL = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
"""Site field → sbatch's environment variable that is its default."""


def load_site(path: Path | None, overrides: dict[str, str | int | None], options: Sequence[str] = ()) -> Site:
    """Load a site file: `path`, else `slurm/site.toml` in the working directory, else megatfm's default.

    overrides: values that replace fields, unless None. options: options of sbatch to add to the site's. Raises
    UsageError.
    """
    local_file = Path("slurm/site.toml")
    default_file = Path(str(resources.files("megatfm.slurm") / "site.toml"))
    site_file = path or (local_file if local_file.is_file() else default_file)
    for option in options:
        if re.fullmatch(SBATCH_OPTION_PATTERN, option) is None:
            raise UsageError(
                f"{option!r}: not an option of sbatch: write one as --name=value, without blanks or quotes"
            )
    fields = {key: value for key, value in overrides.items() if value is not None}
    site = _load(site_file, fields)
    shell_values: dict[str, str | int] = {
        key: value for key, name in FROM_SHELL.items() if getattr(site, key) is None and (value := os.environ.get(name))
    }
    if shell_values:
        site = _load(site_file, fields | shell_values)
    for option in (*site.sbatch, *options):
        _check_option(option)
    return site.model_copy(update={"sbatch": [*site.sbatch, *options]})


def _load(path: Path, fields: dict[str, str | int]) -> Site:
    return load_section(Site, path, [f"{key}={json.dumps(value)}" for key, value in fields.items()])


def _check_option(option: str) -> None:
    """Raise UsageError for an option, or an abbreviation of one, that `megatfm launch` sets itself."""
    name = option.removeprefix("--").partition("=")[0]
    if name in RESERVED_SBATCH_OPTIONS:
        raise UsageError(f"{option}: `megatfm launch` sets this itself: see its own flags, and the site file's fields")
    full_names = [full_name for full_name in UNABBREVIATED_OPTIONS if full_name.startswith(name)]
    if full_names and name not in UNABBREVIATED_OPTIONS:
        raise UsageError(
            f"{option}: sbatch would take this for --{' or --'.join(full_names)}: write the full name, or use the "
            "flag of `megatfm launch`"
        )


# The launcher

_NO_ANSWER = re.compile("timed out|gave no answer|Zero Bytes")
"""Errors of sbatch after which SLURM may have the job."""
TEMPLATES = {"train": "pretrain", "prep": "data_prep", "evaluate": "evaluate"}


def _read_template(name: str) -> str:
    return (resources.files("megatfm.slurm") / f"{name}.sbatch").read_text(encoding="utf-8")


def _load_template(name: str) -> "Template":
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # a tenth of the time of `megatfm status`

    environment = Environment(
        loader=FunctionLoader(_read_template),
        undefined=StrictUndefined,
        finalize=lambda value: shlex.quote(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


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
        script = _load_template(name).render(
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
                self._refuse_unrecorded_jobs(job)
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

    def _refuse_unrecorded_jobs(self, job: Job) -> None:
        """Raise UsageError if the queue has a job of this run that sbatch submitted without getting an answer."""
        try:
            jobs = scheduler.find_jobs_of_script(str(self._get_slurm_dir(job) / f"{TEMPLATES[job.kind]}.sbatch"))
        except MegatfmError:  # sbatch will say what is wrong
            return
        if jobs:
            raise UsageError(
                f"{job.run_dir}: job {jobs[0]} of this run is in the queue, and no launch recorded it, since SLURM did "
                f"not answer then: end it with `megatfm cancel {jobs[0]}`, and launch again"
            )

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
            try:
                jobs.append(_queue_script(script, _make_chain_dependency(dependencies, jobs)))
            except MegatfmError as error:
                if not jobs:
                    raise
                raise MegatfmError(
                    f"{error}. The chain has only its first {len(jobs)} of {job.chain_length} jobs, {', '.join(jobs)}: "
                    f"`megatfm cancel {shlex.quote(str(job.run_dir))}` ends them"
                ) from None
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
        if _NO_ANSWER.search(str(error)):
            raise MegatfmError(
                f"{error}. SLURM may have queued the job nevertheless: launch again once `squeue --me` answers; a job "
                "that is there is then named"
            ) from None
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
