"""Templates of SLURM jobs and the description of a site. The launcher is in `launchers/slurm.py`."""
