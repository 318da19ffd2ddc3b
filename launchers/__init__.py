"""Starts runs on this machine, under MPI or as SLURM jobs, and reports their status and logs. Imports no torch."""

from megatfm.launchers.cli import RunHandle, submit

__all__ = ["RunHandle", "submit"]
