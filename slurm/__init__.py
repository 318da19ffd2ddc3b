"""Templates of SLURM jobs, for `launchers/slurm.py`, and the description of a site, for `launchers/slurm_site.py`."""
