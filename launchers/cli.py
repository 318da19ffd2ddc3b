"""`megatfm launch`, and `submit`, its like in Python: from flags to a job and its launcher."""

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatfm.config import Config, load, load_config
from megatfm.config.prep import PrepConfig
from megatfm.errors import UsageError
from megatfm.files import NewPaths
from megatfm.launchers import scheduler
from megatfm.launchers.job import Job, JobState, Kind, Launcher
from megatfm.launchers.local import LocalLauncher, MpiLauncher
from megatfm.launchers.run_jobs import cancel
from megatfm.launchers.slurm import Site, SlurmLauncher, load_site
from megatfm.launchers.status import RunStatus, run_status
from megatfm.launchers.validation import launch_errors, launch_warnings
from megatfm.registry import check_foreign_plugins, refuse_repeats

SLURM_FLAGS = {
    "nodes": ("N", "nodes of the job (1); MIN-MAX goes on with fewer when nodes fail"),
    "gpus_per_node": ("G", "GPUs of each node, one process on each"),
    "time": ("T", "time limit, for example 24:00:00"),
    "job_name": ("NAME", "name of the job (the run's name)"),
    "chain": ("N", "queue N jobs that follow one another, where jobs aren't requeued"),
    "array": ("N", "with --prep: N tasks side by side (8)"),
    "partition": ("P", "partition (queue)"),
    "account": ("A", "account that is charged"),
    "qos": ("Q", "quality of service"),
    "constraint": ("C", "features that nodes must have"),
    "mem": ("M", "memory of each node, for example 480G"),
    "exclude": ("NODES", "nodes not to use, for example gpu[07,12]"),
    "nodelist": ("NODES", "nodes to use"),
    "reservation": ("NAME", "reservation to run in"),
    "begin": ("WHEN", "start no sooner, for example now+2hours"),
    "dependency": ("WHAT", "start after other jobs, for example afterok:4711"),
    "sbatch": ("OPTION", "any other, as --sbatch=--mail-type=FAIL; repeat it"),
    "start": ("srun|torchrun", "who starts the processes on the nodes (srun)"),
    "site": ("FILE", "description of the site (slurm/site.toml)"),
}
"""Flags that only SLURM jobs have: how the value is called, and help."""
SITE_FLAGS = ("partition", "account", "qos", "constraint", "exclude", "start", "max_restarts")
"""Flags for fields of the site file, with `--mem` for `memory`."""
SBATCH_FLAGS = ("nodelist", "reservation", "begin", "dependency")
"""Flags that become options of sbatch unchanged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatfm launch`, besides CONFIG and its overrides (`config`, `overrides`)."""
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
    kinds.add_argument("--prep", action="store_true", help="CONFIG is of `megatfm prep`: prepare a corpus")
    kinds.add_argument("--evaluate", action="store_true", help="CONFIG is a run directory: evaluate it")
    parser.add_argument(
        "--trust-plugins",
        action="store_true",
        help="with --evaluate: import the packages that the run names in plugins",
    )
    slurm = parser.add_argument_group("SLURM")
    slurm.add_argument("--slurm", action="store_true", help="submit a SLURM job")
    types = {"gpus_per_node": int, "chain": int, "array": int, "site": Path}
    for name, (metavar, text) in SLURM_FLAGS.items():
        flag, action = f"--{name.replace('_', '-')}", "append" if name == "sbatch" else "store"
        slurm.add_argument(flag, metavar=metavar, help=text, type=types.get(name, str), action=action)


def main(args: argparse.Namespace, new_paths: NewPaths | None = None) -> int:
    """Start the run that parsed arguments describe; returns its exit code. Raises MegatfmError.

    new_paths: what was made for the run; it goes again where the run is refused.
    """
    if not args.dry_run:
        return launch(args, new_paths)[0]
    launcher, job = build_launch(args)
    files = launcher.render(job)
    for name, text in files.items():
        heading = f"# ==> {name} <==\n" if len(files) > 1 else ""
        print(heading + text)
    return 0


def launch(args: argparse.Namespace, new_paths: NewPaths | None = None) -> tuple[int, Job]:
    """Run or submit what parsed arguments describe; the exit code, and what it was. Raises MegatfmError."""
    launcher, job = build_launch(args)
    return launcher.submit(job, new_paths or NewPaths()), job


def build_launch(args: argparse.Namespace) -> tuple[Launcher, Job]:
    """The launcher and the job; refuses flags that don't go together."""
    check_flags(args)
    nodes, max_nodes = _nodes(args.nodes)
    kind, resolved, name = resolve_job_config(args)
    gpus = args.gpus_per_node or 0
    job = Job(
        config_name=str(args.config),
        overrides=(*args.overrides, *["--trust-plugins"] * args.trust_plugins),
        config=resolved,
        name=args.job_name or name,
        kind=kind,
        min_nodes=nodes,
        max_nodes=max_nodes,
        nproc_per_node=next((n for n in (args.nproc, args.mpi) if n is not None), gpus or 1),
        gpus_per_node=gpus,
        time_limit=args.time,
        array_size=(8 if kind == "prep" else 1) if args.array is None else args.array,
        chain_length=1 if args.chain is None else args.chain,
    )
    site = _site(args) if args.slurm else None
    partition = scheduler.partition(site.partition) if site else None
    for problem in launch_errors(job, site, partition):
        if not args.dry_run:
            raise UsageError(problem)
        print(f"note: this would be refused: {problem}", file=sys.stderr)
    if site:
        for note in launch_warnings(job, site, partition):
            print(f"note: {note}", file=sys.stderr)
        return SlurmLauncher(site), job
    return (
        LocalLauncher(args.max_restarts or 0) if args.mpi is None else MpiLauncher(args.max_restarts or 0)
    ), job


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that don't go together."""
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
    if wrong := [flag for flag, is_wrong in unsupported.items() if is_wrong]:
        kind = "--prep" if args.prep else "--evaluate" if args.evaluate else "training"
        raise UsageError(f"{', '.join(wrong)}: not for {kind}")
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: it must be 0 or more")


def resolve_job_config(args: argparse.Namespace) -> tuple[Kind, Config | PrepConfig, str]:
    """The kind of job, its config, and a name for it."""
    if args.prep:
        prep = load(PrepConfig, args.config, args.overrides)
        return "prep", prep, f"prep-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(prep.out).name)}"[:100]
    if args.evaluate:
        if not (Path(args.config) / "config.toml").is_file():
            raise UsageError(f"{args.config}: not a run directory: give the one to evaluate")
        run = load_config(args.config)
        check_foreign_plugins(run.plugins, args.config, trusted=args.trust_plugins)
        return "evaluate", run.model_copy(update={"run_dir": str(Path(args.config).absolute())}), run.name
    config = load_config(args.config, args.overrides)
    return "train", config, config.name


def _nodes(text: str | None) -> tuple[int, int | None]:
    """`4` or `2-4`."""
    match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", text or "1")
    if not match:
        raise UsageError(f"--nodes {text!r}: give a number, or the least and the largest, for example 2-4")
    return int(match[1]), int(match[2]) if match[2] else None


def _site(args: argparse.Namespace) -> Site:
    fields = {name: getattr(args, name) for name in SITE_FLAGS} | {"memory": args.mem}
    options = [f"--{name}={value}" for name in SBATCH_FLAGS if (value := getattr(args, name)) is not None]
    return load_site(args.site, fields, [*options, *(args.sbatch or [])])


# --- SLURM jobs from Python -----------------------------------------------------------------------------------------

POLL_SECONDS = 30.0
"""Schedulers don't like to be asked often."""


@dataclass(frozen=True)
class RunHandle:
    """A submitted run, by its run directory: another process can make one of the same folder."""

    run_dir: Path

    @property
    def state(self) -> JobState:
        """State of its job: PENDING, RUNNING, DONE, FAILED and such, with the reason."""
        return self.progress.state

    @property
    def progress(self) -> RunStatus:
        """Step, loss, time left and restarts, as `megatfm status` shows them."""
        return run_status(self.run_dir)

    def wait(self, timeout: float | None = None, poll_interval: float = POLL_SECONDS) -> JobState:
        """Wait for the end, through restarts and all links of a chain. Raises TimeoutError after `timeout` seconds.

        A scheduler that doesn't answer is asked again.
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
        """End all of its jobs; return which. Raises UsageError if none is left."""
        return cancel(self.run_dir)


def submit(config: str | Path, *overrides: str, **flags: object) -> RunHandle:
    """`megatfm launch CONFIG --slurm …`: overrides are its `key=value`, flags its flags, with `_` for `-`.

    `submit("mine.toml", "train.steps=100", nodes=2, gpus_per_node=8, time="24:00:00")`. True means a
    flag without a value, a list a repeated flag. Raises UsageError, MegatfmError.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_arguments(parser)
    words = ["--slurm"]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [flag] if item is True else [] if item in (None, False) else [f"{flag}={item}"]
    try:
        args, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"submit: {error}") from None
    if unknown or args.dry_run:
        raise UsageError(
            f"submit: {(unknown or ['--dry-run'])[0]}: no flag for a job: see `megatfm launch --help`"
        )
    refuse_repeats(overrides)
    args.config, args.overrides = str(config), list(overrides)
    return RunHandle(launch(args)[1].run_dir)
