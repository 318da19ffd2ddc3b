"""Templates of SLURM jobs and the description of a site, for `launchers/slurm.py`."""
