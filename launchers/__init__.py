"""Start runs on this machine, under MPI or as SLURM jobs, and watch them: render, submit, status, logs. No torch."""

from megatfm.launchers.cli import RunHandle, submit

__all__ = ["RunHandle", "submit"]
