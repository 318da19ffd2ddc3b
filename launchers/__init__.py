"""Start `megatfm train` on this machine, under MPI or as a SLURM job: render what will run, then run it. No torch."""

from megatfm.launchers.api import RunHandle, submit
from megatfm.launchers.cli import add_arguments, main
from megatfm.launchers.job import Job, Launcher
from megatfm.launchers.local import LocalLauncher
from megatfm.launchers.mpi import MpiLauncher
from megatfm.launchers.slurm import SlurmLauncher

__all__ = [
    "Job",
    "Launcher",
    "LocalLauncher",
    "MpiLauncher",
    "RunHandle",
    "SlurmLauncher",
    "add_arguments",
    "main",
    "submit",
]
