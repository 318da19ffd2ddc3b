"""`megatfm launch`, and `submit` for Python: build a job and its launcher from flags; wait for a job or cancel it."""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatfm.config import Config, load_config, load_section
from megatfm.config.prep import PrepConfig
from megatfm.config.sources import check_is_run
from megatfm.errors import UsageError
from megatfm.files import NewPaths
from megatfm.launchers import scheduler
from megatfm.launchers.job import Job, JobState, Kind, Launcher, Resources
from megatfm.launchers.local import LocalLauncher, MpiLauncher
from megatfm.launchers.run_jobs import cancel_run
from megatfm.launchers.slurm import Site, SlurmLauncher, load_site
from megatfm.launchers.status import RunStatus, get_run_status
from megatfm.launchers.validation import find_launch_errors, find_launch_warnings
from megatfm.registry import check_foreign_plugins, import_plugins, refuse_repeats

SLURM_FLAGS = {
    "nodes": ("N", "nodes of the job (1); with MIN-MAX, the run continues on fewer nodes when some fail"),
    "gpus_per_node": ("G", "GPUs of each node, one process on each"),
    "time": ("T", "time limit, for example 24:00:00"),
    "job_name": ("NAME", "name of the job (the run's name)"),
    "chain": ("N", "queue N jobs that run one after another, for sites that don't requeue jobs"),
    "array": ("N", "with --prep: N tasks in parallel (8)"),
    "partition": ("P", "partition (queue)"),
    "account": ("A", "account to charge"),
    "qos": ("Q", "quality of service"),
    "constraint": ("C", "features that nodes must have"),
    "mem": ("M", "memory of each node, for example 480G"),
    "exclude": ("NODES", "nodes not to use, for example gpu[07,12]"),
    "nodelist": ("NODES", "nodes to use"),
    "reservation": ("NAME", "reservation to run in"),
    "begin": ("WHEN", "earliest start, for example now+2hours"),
    "dependency": ("WHAT", "start after other jobs, for example afterok:4711"),
    "sbatch": ("OPTION", "any other option of sbatch, as --sbatch=--mail-type=FAIL; repeatable"),
    "start": ("srun|torchrun", "program that starts the processes on the nodes (srun)"),
    "site": ("FILE", "description of the site (slurm/site.toml)"),
}
"""Flags of SLURM jobs only: flag → (metavar, help)."""
SITE_FLAGS = ("partition", "account", "qos", "constraint", "exclude", "start", "max_restarts")
"""Flags that override fields of the site file. `--mem`, which overrides `memory`, is the only other one."""
SBATCH_FLAGS = ("nodelist", "reservation", "begin", "dependency")
"""Flags that are passed to sbatch unchanged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `megatfm launch` to a parser. CONFIG and its overrides are added elsewhere."""
    parser.add_argument("--nproc", type=int, metavar="N", help="processes here, or on each node with --slurm")
    parser.add_argument("--mpi", type=int, metavar="N", help="start N processes with mpirun")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start again after a failure, at most N times in a row without a new checkpoint (0; with --slurm 3)",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--prep", action="store_true", help="prepare a corpus: CONFIG is one of `megatfm prep`")
    kinds.add_argument("--evaluate", action="store_true", help="evaluate a run: CONFIG is its run directory")
    parser.add_argument(
        "--trust-plugins",
        action="store_true",
        help="with --evaluate: import the packages that the run names in plugins",
    )
    slurm = parser.add_argument_group("with --slurm")
    slurm.add_argument("--slurm", action="store_true", help="submit a SLURM job")
    types = {"gpus_per_node": int, "chain": int, "array": int, "site": Path}
    for name, (metavar, text) in SLURM_FLAGS.items():
        flag, action = f"--{name.replace('_', '-')}", "append" if name == "sbatch" else "store"
        slurm.add_argument(flag, metavar=metavar, help=text, type=types.get(name, str), action=action)


def main(args: argparse.Namespace, new_paths: NewPaths | None = None) -> int:
    """Start the run that the parsed arguments describe; return its exit code. Raises MegatfmError.

    new_paths: files and folders already created for the run; they are removed if the run is refused.
    """
    if not args.dry_run:
        return launch(args, new_paths)[0]
    launcher, job, notes = build_launch(args)
    files = launcher.render(job)
    for name, text in files.items():
        heading = f"# ==> {name} <==\n" if len(files) > 1 else ""
        print(heading + text)
    print_launch_notes(notes)  # after the script, which is longer than a screen
    return 0


def launch(args: argparse.Namespace, new_paths: NewPaths | None = None) -> tuple[int, Job]:
    """Run or submit the job that the parsed arguments describe; return exit code and job. Raises MegatfmError."""
    launcher, job, notes = build_launch(args)
    print_launch_notes(notes)
    return launcher.submit(job, new_paths or NewPaths()), job


def print_launch_notes(notes: Sequence[str]) -> None:
    """Print a launch's notes to stderr."""
    sys.stdout.flush()
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def build_launch(args: argparse.Namespace) -> tuple[Launcher, Job, list[str]]:
    """Build launcher, job and notes for the user from parsed arguments.

    Raises UsageError for flags or a job that can't work; with --dry-run, reasons against the job are notes.
    """
    check_flags(args)
    kind, resolved, name = resolve_job_config(args)
    job = Job(
        config_name=str(args.config),
        overrides=(*args.overrides, *["--trust-plugins"] * args.trust_plugins),
        config=resolved,
        name=args.job_name or name,
        kind=kind,
        resources=_parse_resources(args),
        array_size=(8 if kind == "prep" else 1) if args.array is None else args.array,
        chain_length=1 if args.chain is None else args.chain,
    )
    site = _make_site(args) if args.slurm else None
    partition = scheduler.find_partition(site.partition) if site else None
    notes = _import_plugins(resolved.plugins) if site and kind != "evaluate" else []
    for problem in find_launch_errors(job, site, partition):
        if not args.dry_run:
            raise UsageError(problem)
        notes.append(f"this would be refused: {problem}")
    if site:
        return SlurmLauncher(site), job, [*notes, *find_launch_warnings(job, site, partition)]
    launcher_class = LocalLauncher if args.mpi is None else MpiLauncher
    return launcher_class(args.max_restarts or 0), job, notes


def _import_plugins(plugins: Sequence[str]) -> list[str]:
    """Import a job's plugins, so that names of their parts can be checked; return a note if one can't be imported.

    A login node may lack what a plugin imports, so that this is no error.
    """
    try:
        import_plugins(plugins)
    except UsageError as error:
        return [f"{error}; names of parts are not checked: make sure that the nodes of the job can import it"]
    return []


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError if flags contradict one another, or don't apply to this kind of job."""
    if args.slurm and args.mpi is not None:
        raise UsageError(
            f"--slurm and --mpi: choose one. A SLURM job starts its ranks by srun: --slurm --nproc {args.mpi} for "
            f"{args.mpi} on each node; --mpi {args.mpi} alone starts them here by mpirun"
        )
    if not args.slurm:
        flags = [f"--{name.replace('_', '-')}" for name in SLURM_FLAGS if getattr(args, name) is not None]
        if flags:
            raise UsageError(f"{', '.join(flags)}: only with --slurm")
        if args.nproc is not None and args.mpi is not None:
            raise UsageError(
                f"--nproc and --mpi: choose one: --nproc {args.nproc} without mpirun, --mpi {args.mpi} with it"
            )
        if args.nproc is None and args.mpi is None:
            raise UsageError("say where to run: one of --nproc N (this machine), --mpi N (mpirun) or --slurm")
    unsupported = {
        "--array": args.array is not None and not args.prep,
        "--chain": args.chain is not None and (args.prep or args.evaluate),
        "--nodes": args.nodes is not None and args.prep,
        "--max-restarts": args.max_restarts is not None and (args.prep or args.evaluate),
        "key=value": args.evaluate and args.overrides,
        "--trust-plugins": args.trust_plugins and not args.evaluate,
    }
    if flags := [flag for flag, is_unsupported in unsupported.items() if is_unsupported]:
        kind = "--prep" if args.prep else "--evaluate" if args.evaluate else "training"
        raise UsageError(f"{', '.join(flags)}: not for {kind}")
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: it must be 0 or more")


def resolve_job_config(args: argparse.Namespace) -> tuple[Kind, Config | PrepConfig, str]:
    """Load the config; return the kind of job, the config, and a default job name."""
    if args.prep:
        prep = load_section(PrepConfig, args.config, args.overrides)
        return "prep", prep, f"prep-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(prep.out).name)}"[:100]
    if args.evaluate:
        check_is_run(Path(args.config))
        run = load_config(args.config)
        check_foreign_plugins(run.plugins, args.config, trusted=args.trust_plugins)
        return "evaluate", run.model_copy(update={"run_dir": str(Path(args.config).absolute())}), run.name
    config = load_config(args.config, args.overrides)
    return "train", config, config.name


def _parse_resources(args: argparse.Namespace) -> Resources:
    """Parse nodes, processes, GPUs and time limit. `--nodes` is a number or a range: `4` or `2-4`."""
    match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", args.nodes or "1")
    if not match:
        raise UsageError(f"--nodes {args.nodes!r}: give a number or a range, for example 4 or 2-4")
    gpus = args.gpus_per_node or 0
    return Resources(
        min_nodes=int(match[1]),
        max_nodes=int(match[2]) if match[2] else None,
        nproc_per_node=next((n for n in (args.nproc, args.mpi) if n is not None), gpus or 1),
        gpus_per_node=gpus,
        time_limit=args.time,
    )


def _make_site(args: argparse.Namespace) -> Site:
    fields = {name: getattr(args, name) for name in SITE_FLAGS} | {"memory": args.mem}
    options = [f"--{name}={value}" for name in SBATCH_FLAGS if (value := getattr(args, name)) is not None]
    return load_site(args.site, fields, [*options, *(args.sbatch or [])])


POLL_SECONDS = 30.0
"""Seconds between two queries of a job's state: frequent queries slow a scheduler down for everyone."""


@dataclass(frozen=True)
class RunHandle:
    """Handle of a submitted run. It needs only the run directory, so any process can construct one."""

    run_dir: Path

    @property
    def state(self) -> JobState:
        """State of the job (PENDING, RUNNING, DONE, FAILED, …) with its reason."""
        return self.progress.state

    @property
    def progress(self) -> RunStatus:
        """Step, loss, time left and restarts: the values that `megatfm status` shows."""
        return get_run_status(self.run_dir)

    def wait(self, timeout: float | None = None, poll_interval: float = POLL_SECONDS) -> JobState:
        """Wait until the run ends, across restarts and all jobs of a chain; return the final state.

        Keeps polling while the scheduler doesn't answer. Raises TimeoutError after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            state = self.state
            if state.is_over:
                return state
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.run_dir}: still {state.name} after {timeout:g} s: {state.reason}")
            time.sleep(poll_interval)

    def cancel(self) -> str:
        """Cancel all jobs of the run; return a sentence that lists them. Raises UsageError if none is left."""
        return cancel_run(self.run_dir)


def submit(config: str | Path, *overrides: str, **flags: object) -> RunHandle:
    """Submit a run as a SLURM job, as `megatfm launch CONFIG --slurm …` does.

    For example `submit("mine.toml", "train.steps=100", nodes=2, gpus_per_node=8, time="24:00:00")`.

    overrides: `key=value` settings of the config. flags: flags of the command, with `_` for `-`; True stands for a
    flag without a value, a list for a repeated flag. Raises UsageError, MegatfmError.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_arguments(parser)
    argv = ["--slurm"]
    for name, values in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for value in values if isinstance(values, list | tuple) else [values]:
            if value is True:
                argv.append(flag)
            elif value is not None and value is not False:  # 0 is a value
                argv.append(f"{flag}={value}")
    try:
        args, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(f"submit: {error}") from None
    if unknown or args.dry_run:
        raise UsageError(f"submit: {(unknown or ['--dry-run'])[0]}: not a flag of jobs: see `megatfm launch --help`")
    refuse_repeats(overrides)
    args.config, args.overrides = str(config), list(overrides)
    return RunHandle(launch(args)[1].run_dir)
