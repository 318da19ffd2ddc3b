"""`megatfm launch`: which launcher, with what resources."""

import argparse
from pathlib import Path

from launchers.job import Job, Launcher
from launchers.local import Local
from launchers.mpi import Mpi
from launchers.site import load_site
from launchers.slurm import Slurm
from megatfm.config import load_config
from megatfm.errors import UsageError

SLURM_ONLY = ("nodes", "gpus_per_node", "time", "partition", "account", "constraint", "job_name", "site")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatfm launch`, besides CONFIG and its overrides (`config`, `overrides`)."""
    parser.add_argument("--nproc", type=int, metavar="N", help="processes here, or on each node with --slurm")
    parser.add_argument("--mpi", type=int, metavar="N", help="start N processes with mpirun")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    slurm = parser.add_argument_group("SLURM")
    slurm.add_argument("--slurm", action="store_true", help="submit a SLURM job")
    slurm.add_argument("--nodes", type=int, metavar="N", help="nodes of the job (1)")
    slurm.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="GPUs of each node, one process on each"
    )
    slurm.add_argument("--time", metavar="T", help="time limit, for example 24:00:00")
    slurm.add_argument("--partition", metavar="P", help="partition (queue)")
    slurm.add_argument("--account", metavar="A", help="account that is charged")
    slurm.add_argument("--constraint", metavar="C", help="features that nodes must have")
    slurm.add_argument("--job-name", metavar="NAME", help="name of the job (the run's name)")
    slurm.add_argument("--site", type=Path, metavar="FILE", help="description of the site (slurm/site.toml)")


def main(args: argparse.Namespace) -> int:
    """Start the run that parsed arguments describe; returns its exit code. Raises MegatfmError."""
    launcher, job = _choose(args)
    if not args.dry_run:
        return launcher.submit(job)
    files = launcher.render(job)
    for name, text in files.items():
        heading = f"# ==> {name} <==\n" if len(files) > 1 else ""
        print(heading + text)
    return 0


def _choose(args: argparse.Namespace) -> tuple[Launcher, Job]:
    """The launcher and the job; refuses flags that don't go together."""
    if args.slurm and args.mpi is not None:
        raise UsageError("--slurm and --mpi: choose one; inside a SLURM job ranks are started by srun")
    if not args.slurm:
        given = [f"--{name.replace('_', '-')}" for name in SLURM_ONLY if getattr(args, name) is not None]
        if given:
            raise UsageError(f"{', '.join(given)}: only with --slurm")
        if (args.nproc is None) == (args.mpi is None):
            raise UsageError("say where to run: one of --nproc N (this machine), --mpi N (mpirun) or --slurm")
    overrides = tuple(args.overrides)
    resolved = load_config(args.config, overrides)
    gpus = args.gpus_per_node or 0
    job = Job(
        config=str(args.config),
        overrides=overrides,
        resolved=resolved,
        name=args.job_name or resolved.name,
        nodes=1 if args.nodes is None else args.nodes,
        processes_per_node=next((n for n in (args.nproc, args.mpi) if n is not None), gpus or 1),
        gpus_per_node=gpus,
        time_limit=args.time,
    )
    if args.slurm:
        flags = {name: getattr(args, name) for name in ("partition", "account", "constraint")}
        return Slurm(load_site(args.site, flags)), job
    return (Local() if args.mpi is None else Mpi()), job
