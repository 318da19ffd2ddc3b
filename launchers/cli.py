"""`megatfm launch`: which launcher, with what resources."""

import argparse
import re
import sys
from pathlib import Path

from megatfm.config import Config, load, load_config
from megatfm.config.prep import PrepConfig
from megatfm.errors import UsageError
from megatfm.launchers.job import Job, Kind, Launcher
from megatfm.launchers.local import LocalLauncher
from megatfm.launchers.mpi import MpiLauncher
from megatfm.launchers.refusals import launch_errors, launch_warnings
from megatfm.launchers.site import Site, load_site
from megatfm.launchers.slurm import SlurmLauncher
from megatfm.registry import check_foreign_plugins

SITE_FLAGS = ("partition", "account", "qos", "constraint", "max_restarts", "start")
SBATCH_FLAGS = ("nodelist", "reservation", "begin", "dependency")
SLURM_FLAGS = (
    *(
        "mem",
        "exclude",
        "sbatch",
        *SBATCH_FLAGS,
        "nodes",
        "gpus_per_node",
        "time",
        "job_name",
        "chain",
        "array",
        "site",
    ),
    *(flag for flag in SITE_FLAGS if flag != "max_restarts"),
)


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
    slurm.add_argument(
        "--nodes", metavar="N", help="nodes of the job (1); MIN-MAX goes on with fewer when nodes fail"
    )
    slurm.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="GPUs of each node, one process on each"
    )
    slurm.add_argument("--time", metavar="T", help="time limit, for example 24:00:00")
    slurm.add_argument("--job-name", metavar="NAME", help="name of the job (the run's name)")
    slurm.add_argument(
        "--chain",
        type=int,
        metavar="N",
        help="queue N jobs that follow one another, where jobs aren't requeued",
    )
    slurm.add_argument("--array", type=int, metavar="N", help="with --prep: N tasks side by side (8)")
    slurm.add_argument("--partition", metavar="P", help="partition (queue)")
    slurm.add_argument("--account", metavar="A", help="account that is charged")
    slurm.add_argument("--qos", metavar="Q", help="quality of service")
    slurm.add_argument("--constraint", metavar="C", help="features that nodes must have")
    slurm.add_argument("--mem", metavar="M", help="memory of each node, for example 480G")
    slurm.add_argument("--exclude", metavar="NODES", help="nodes not to use, for example gpu[07,12]")
    for name, metavar, text in (
        ("nodelist", "NODES", "nodes to use"),
        ("reservation", "NAME", "reservation to run in"),
        ("begin", "WHEN", "start no sooner, for example now+2hours"),
        ("dependency", "WHAT", "start after other jobs, for example afterok:4711"),
    ):
        slurm.add_argument(f"--{name}", metavar=metavar, help=text)
    slurm.add_argument(
        "--sbatch",
        metavar="OPTION",
        action="append",
        help="any other, as --sbatch=--mail-type=FAIL; repeat it",
    )
    slurm.add_argument(
        "--start", metavar="srun|torchrun", help="who starts the processes on the nodes (srun)"
    )
    slurm.add_argument("--site", type=Path, metavar="FILE", help="description of the site (slurm/site.toml)")


def main(args: argparse.Namespace) -> int:
    """Start the run that parsed arguments describe; returns its exit code. Raises MegatfmError."""
    if not args.dry_run:
        return launch(args)[0]
    launcher, job = build_launch(args)
    files = launcher.render(job)
    for name, text in files.items():
        heading = f"# ==> {name} <==\n" if len(files) > 1 else ""
        print(heading + text)
    return 0


def launch(args: argparse.Namespace) -> tuple[int, Job]:
    """Run or submit what parsed arguments describe; the exit code, and what it was. Raises MegatfmError."""
    launcher, job = build_launch(args)
    return launcher.submit(job), job


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
    for problem in launch_errors(job, site):
        if not args.dry_run:
            raise UsageError(problem)
        print(f"note: this would be refused: {problem}", file=sys.stderr)
    if site:
        for note in launch_warnings(job, site):
            print(f"note: {note}", file=sys.stderr)
        return SlurmLauncher(site), job
    return (
        LocalLauncher(args.max_restarts or 0) if args.mpi is None else MpiLauncher(args.max_restarts or 0)
    ), job


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that don't go together."""
    if args.slurm and args.mpi is not None:
        raise UsageError("--slurm and --mpi: choose one; inside a SLURM job ranks are started by srun")
    if not args.slurm:
        given = [f"--{name.replace('_', '-')}" for name in SLURM_FLAGS if getattr(args, name) is not None]
        if given:
            raise UsageError(f"{', '.join(given)}: only with --slurm")
        if (args.nproc is None) == (args.mpi is None):
            raise UsageError("say where to run: one of --nproc N (this machine), --mpi N (mpirun) or --slurm")
    refused = {
        "--array": args.array is not None and not args.prep,
        "--chain": args.chain is not None and (args.prep or args.evaluate),
        "--nodes": args.nodes is not None and args.prep,
        "--max-restarts": args.max_restarts is not None and (args.prep or args.evaluate),
        "key=value": args.evaluate and args.overrides,
        "--trust-plugins": args.trust_plugins and not args.evaluate,
    }
    if wrong := [flag for flag, is_wrong in refused.items() if is_wrong]:
        kind = "--prep" if args.prep else "--evaluate" if args.evaluate else "training"
        raise UsageError(f"{', '.join(wrong)}: not for {kind}")
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: it must be 0 or more")


def resolve_job_config(args: argparse.Namespace) -> tuple[Kind, Config | PrepConfig, str]:
    """What is to be done, its config, and a name for the job."""
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
    fields = {name: getattr(args, name) for name in SITE_FLAGS} | {
        "memory": args.mem,
        "exclude": args.exclude,
    }
    options = [f"--{name}={value}" for name in SBATCH_FLAGS if (value := getattr(args, name)) is not None]
    return load_site(args.site, fields, [*options, *(args.sbatch or [])])
