"""N processes under mpirun, Open MPI's or MPICH's."""

import os
import shlex
import shutil
import signal

from megatfm.errors import UsageError
from megatfm.launchers.foreground import ForegroundLauncher
from megatfm.launchers.job import Job
from megatfm.launchers.local import default_env
from megatfm.launchers.supervise import Child, supervise


class MpiLauncher(ForegroundLauncher):
    """Hands the ranks to mpirun; all of them write to this terminal."""

    name = "mpi"

    def render(self, job: Job) -> dict[str, str]:
        """The mpirun command."""
        child = self._child(job)
        env = " ".join(f"{key}={shlex.quote(value)}" for key, value in child.environment.items())
        return {"launch.sh": f"{env} {shlex.join(child.command)}\n"}

    def submit(self, job: Job) -> int:
        """Run to the end; returns mpirun's exit code where it means something (0, 2, 75), else 1."""
        if not shutil.which("mpirun"):
            raise UsageError(
                "mpirun is not on PATH: install openmpi-bin (`make system-deps`), load your site's MPI module, or "
                f"use --nproc {job.world_size}"
            )
        return self.run(job, lambda: supervise([self._child(job)]))

    def _child(self, job: Job) -> Child:
        return Child(
            "mpirun",
            ["mpirun", "-n", str(job.world_size), *job.command],
            {**mpi_env(), **default_env(job.world_size)},
            # mpirun answers SIGTERM by killing the ranks, but passes SIGUSR1 on, so that they can save.
            stop_signal=signal.SIGUSR1,
            parent_death_signal=signal.SIGTERM,
        )


def mpi_env() -> dict[str, str]:
    """Variables that Open MPI 4 and 5 read; MPICH ignores them and behaves so by itself."""
    env = {
        # More ranks than cores is what a laptop needs; binding would press all threads of a rank onto one core.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {key: os.environ.get(key, value) for key, value in env.items()}
