"""Start `megatfm train` on this machine, under MPI or as a SLURM job: render what will run, then run it. No torch."""

from launchers.api import Submitted, submit
from launchers.cli import add_arguments, main
from launchers.job import Job, Launcher
from launchers.local import Local
from launchers.mpi import Mpi
from launchers.slurm import Slurm

__all__ = ["Job", "Launcher", "Local", "Mpi", "Slurm", "Submitted", "add_arguments", "main", "submit"]
