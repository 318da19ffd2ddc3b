"""SLURM: the description of a cluster (`Site`, from slurm/site.toml), and the launcher that queues jobs there.

A training job saves ahead of its time limit and goes on in the next; a preparation is an array of tasks that share
their work; an evaluation reads a run directory. The templates are slurm/*.sbatch.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from pydantic import Field, NonNegativeInt, PositiveInt

from megatfm.config import Config, load, to_toml
from megatfm.config.section import Section
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import NewPaths, atomic_write
from megatfm.launchers import scheduler, snapshot
from megatfm.launchers.job import Job, megatfm_command
from megatfm.launchers.record import record_evaluation_jobs, write_launch_record
from megatfm.launchers.run_jobs import refuse_concurrent_launch

# Wide enough for every site's names, too narrow for a quote, a space, a newline or a `$`.
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
    """Account that jobs are charged to."""
    qos: SlurmToken | None = None
    """Quality of service."""
    constraint: Constraint | None = None
    """Features that nodes must have."""
    exclude: NodeList | None = None
    """Nodes never to use."""
    cpus_per_task: PositiveInt | None = None
    """Cores for each process."""
    memory: Memory | None = None
    """Memory of each node; left out, what the partition gives."""
    exclusive: bool = False
    """Whole nodes, with no other jobs on them."""
    gpus: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """The option that requests GPUs; sites with old settings know only gres."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """More options of sbatch."""
    srun: list[SbatchOption] = Field(default_factory=list)
    """More options of srun."""
    modules: list[SlurmToken] = Field(default_factory=list)
    """Environment modules to load."""
    setup: list[list[SingleLine]] = Field(default_factory=list)
    """Commands before anything else, as lists of words."""
    container: list[SingleLine] = Field(default_factory=list)
    """Command put before every process, one word an item."""
    python: SingleLine | None = None
    """Python inside the container; left out, the one that submits."""
    start: Literal["srun", "torchrun"] = "srun"
    """Starter of the processes: srun, one task a process, or torchrun, one task a node."""
    interface: SlurmToken | None = None
    """Network interface over which processes meet."""
    stop_seconds: PositiveInt = 300
    """Seconds before the time limit at which a run is signalled to save and requeue."""
    requeue: bool = True
    """Whether jobs may be requeued here; where not, use `--chain`."""
    max_restarts: NonNegativeInt = 3
    """Failures in a row without a new checkpoint after which a run is still started again."""
    environment: dict[VariableName, SingleLine] = Field(default_factory=dict)
    """Variables for every process."""


RESERVED_SBATCH_OPTIONS = (
    *("array", "chdir", "error", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
    *(
        "account",
        "constraint",
        "cpus-per-task",
        "exclude",
        "gpus-per-node",
        "mem",
        "partition",
        "qos",
        "time",
    ),
)
"""Options of sbatch on which the scripts rely as they are, and those for which there are flags and fields."""
WRITTEN_OUT = (*RESERVED_SBATCH_OPTIONS, "begin", "dependency", "nodelist", "reservation")
"""Options that are read here, for which sbatch would take a beginning of the name, too."""
FROM_SHELL = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
"""Field → the variable of sbatch whose value it has where neither the site nor a flag says another."""


def load_site(path: Path | None, overrides: dict[str, str | int | None], options: Sequence[str] = ()) -> Site:
    """Read a site: `path`, else `slurm/site.toml` here, else the one that ships with megatfm.

    `overrides` replace fields where they are not None; `options` of sbatch are added to the site's. Raises UsageError.
    """
    local_file, shipped = Path("slurm/site.toml"), Path(str(resources.files("megatfm.slurm") / "site.toml"))
    site_file = path or (local_file if local_file.is_file() else shipped)
    for option in options:
        if re.fullmatch(SBATCH_OPTION_PATTERN, option) is None:
            raise UsageError(
                f"{option!r}: no option of sbatch: give one as --name=value, without blanks or quotes"
            )
    fields = {key: value for key, value in overrides.items() if value is not None}
    site = _load(site_file, fields)
    shell = {key: os.environ.get(name) for key, name in FROM_SHELL.items() if getattr(site, key) is None}
    if any(shell.values()):
        site = _load(site_file, fields | {key: value for key, value in shell.items() if value})
    for option in (*site.sbatch, *options):
        _check_option(option)
    return site.model_copy(update={"sbatch": [*site.sbatch, *options]})


def _load(path: Path, fields: dict[str, str | int]) -> Site:
    return load(Site, path, [f"{key}={json.dumps(value)}" for key, value in fields.items()])


def _check_option(option: str) -> None:
    """Raise UsageError for one that `megatfm launch` sets itself, also where the name is cut short."""
    name = option.removeprefix("--").partition("=")[0]
    if name in RESERVED_SBATCH_OPTIONS:
        raise UsageError(
            f"{option}: `megatfm launch` sets this itself: see its own flags, and the site file's fields"
        )
    longer = [option_name for option_name in WRITTEN_OUT if option_name.startswith(name)]
    if longer and name not in WRITTEN_OUT:
        raise UsageError(
            f"{option}: sbatch would take this for --{' or --'.join(longer)}: write the name out, or leave it to "
            "`megatfm launch`, which has flags for what it sets itself"
        )


# --- the launcher ---------------------------------------------------------------------------------------------------

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

    def submit(self, job: Job, new_paths: NewPaths) -> int:
        """Write code, config and script into RUN/slurm/, queue the job, say its number and where to look."""
        files, evaluations = self.render(job), refuse_concurrent_launch(job)
        jobs: list[str] = []
        try:
            script, code = self._write_files(job, files, new_paths)
            self._queue(job, script, code, jobs, evaluations)
        except OSError as error:
            raise MegatfmError(
                f"{error.filename or self._slurm_dir(job)}: can't write the job's files: {error.strerror}"
            ) from error
        finally:
            if not jobs and new_paths.is_new(job.run_dir):
                new_paths.remove()
        self._print_summary(job, jobs)
        return 0

    def _write_files(self, job: Job, files: Mapping[str, str], new_paths: NewPaths) -> tuple[Path, str]:
        """Write the job's files into RUN/slurm/; returns the script and the name of the code's copy. Raises OSError."""
        folder = self._slurm_dir(job)
        new_paths.make_folder(job.run_dir / "logs")  # sbatch would lose the log without it
        if not folder.exists():
            new_paths.trees.append(folder)
        folder.mkdir(exist_ok=True)
        code = snapshot.collect_code(job.config.plugins).copy_to(folder)
        script = next(iter(files))
        if code.name not in files[script]:
            raise MegatfmError("the code changed while it was copied: submit again")
        for name, text in files.items():
            atomic_write(folder / name, text)
        return folder / script, code.name

    def _queue(self, job: Job, script: Path, code: str, jobs: list[str], evaluations: Sequence[str]) -> None:
        """Submit the job, or the links of its chain, and record their numbers, which are added to `jobs`."""
        _, dependencies = self._options()
        for _ in range(job.chain_length):
            jobs.append(_sbatch(script, _following(dependencies, jobs)))
            if job.kind == "evaluate":
                record_evaluation_jobs(job.run_dir, [*evaluations, *jobs])
            else:  # after each, so that the first knows of the others as soon as can be
                facts = {"launcher": "slurm", "kind": job.kind, "array": job.array_size, "code": code}
                write_launch_record(job.run_dir, **facts, jobs=jobs)

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
                "megatfm.launchers.torchrun",
                "agent",
                "--processes",
                str(job.nproc_per_node),
            ]
            return [*agent, "train", config]
        return [*megatfm, config]

    def _options(self) -> tuple[list[str], list[str]]:
        """sbatch's further options, and what the job waits for."""
        flag = "--dependency="
        waits = [option.removeprefix(flag) for option in self.site.sbatch if option.startswith(flag)]
        return [option for option in self.site.sbatch if not option.startswith(flag)], waits

    def _environment(self) -> dict[str, str]:
        interface = self.site.interface
        return {
            "OMP_NUM_THREADS": str(self.site.cpus_per_task or 1),
            "PYTHONUNBUFFERED": "1",
            **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
            **self.site.environment,
        }

    def _print_summary(self, job: Job, jobs: list[str]) -> None:
        run, numbers = job.run_dir, ", ".join(jobs)
        if job.kind == "prep":
            size = f"{job.array_size} tasks"
        else:
            nodes = f"{job.min_nodes}-{job.max_nodes}" if job.max_nodes else str(job.min_nodes)
            size = f"{job.world_size} processes on {nodes} nodes"
        log = f"{run}/logs/slurm-{jobs[0]}{'_*' if job.kind == 'prep' else ''}.log"
        print(f"job{'s' * (len(jobs) > 1)} {numbers} {'are' if len(jobs) > 1 else 'is'} queued: {size}")
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
    """Dependencies of a link of a chain: the link before it, however that ends, and what the first one waits for.

    Not by the name of the job (`singleton`), which runs in other folders may have, too. Of alternatives (`?`), which
    sbatch doesn't take together with another condition, the first link alone waits for one.
    """
    if not jobs:
        return ""
    return ",".join([*(name for name in dependencies if "?" not in name), f"afterany:{jobs[-1]}"])


def _template(name: str) -> str:
    return (resources.files("megatfm.slurm") / f"{name}.sbatch").read_text(encoding="utf-8")


def _sbatch(script: Path, dependency: str) -> str:
    """Queue a script; returns the job's number."""
    try:
        output = scheduler.submit(str(script), dependency)
    except UsageError as error:
        raise UsageError(f"{error}, or look at the script with --dry-run") from None
    except MegatfmError as error:
        raise MegatfmError(f"sbatch refused {script}: {str(error).partition(': ')[2]}") from None
    job_id = output.strip().split(";")[0]
    if not job_id.isdecimal():
        raise MegatfmError(f"sbatch refused {script}: {' '.join(output.split())}")
    return job_id


def _sbatch_path(path: Path) -> str:
    if re.search(r"[\x00-\x1f\x7f'\"\\%:]", str(path)):
        raise UsageError(
            f"{str(path)!r}: a SLURM job can't write to a path with quotes, backslashes, '%', ':' or control "
            "characters: choose another run_dir or folder"
        )
    return str(path)
