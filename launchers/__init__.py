"""Start `megatfm train` on this machine, under MPI or as a SLURM job: render what will run, then run it. No torch."""

from megatfm.launchers.api import Submitted, submit
from megatfm.launchers.cli import add_arguments, main
from megatfm.launchers.job import Job, Launcher
from megatfm.launchers.local import Local
from megatfm.launchers.mpi import Mpi
from megatfm.launchers.slurm import Slurm

__all__ = ["Job", "Launcher", "Local", "Mpi", "Slurm", "Submitted", "add_arguments", "main", "submit"]
