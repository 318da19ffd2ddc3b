"""MPI starts the same run as srun alone, and prepares the same corpus as one process: Open MPI's mpirun, MPICH's, and
srun with its PMI plugins."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.prep_files import file_hashes
from tests.support.slurm_cluster import Job, Project, run
from tests.support.training_runs import training_curve

WAYS = ("Open MPI", "MPICH", "pmi2", "pmix")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def starter(way: str, project: Project) -> tuple[str, dict[str, str]]:
    """The words before the command of two ranks, and the variables that they need; skips what is not here."""
    needed = {
        "Open MPI": "mpirun.openmpi",
        "MPICH": "mpirun.mpich",
        "pmi2": "mpirun.mpich",
        "pmix": "mpirun.openmpi",
    }
    if not shutil.which(needed[way]):
        pytest.skip(f"needs {needed[way]}: run `make system-deps`")
    environment = AS_ROOT if needed[way] == "mpirun.openmpi" else debian_mpich(project.folder)
    if way not in ("pmi2", "pmix"):
        return f"{needed[way]} -n 2", environment
    if way not in project.cluster.slurm("srun", "--mpi=list").split():
        pytest.skip(f"needs SLURM's {way} plugin: run `make system-deps`")
    return f"srun --mpi={way}", environment


def debian_mpich(folder: Path) -> dict[str, str]:
    """mpi4py looks for MPICH under the name that its ABI has everywhere but on Debian."""
    (library,) = re.findall(r"libmpich\.so\.12 .*=> (\S+)", run("ldconfig", "-p"))
    (folder / "lib").mkdir()
    (folder / "lib" / "libmpi.so.12").symlink_to(library)
    settings = {"LD_LIBRARY_PATH": str(folder / "lib"), "MPI4PY_LIBMPI": str(folder / "lib" / "libmpi.so.12")}
    return {**settings, "UCX_TLS": "tcp,self"}  # the nodes share no memory


@pytest.fixture(scope="module")
def jobs(request, new_project, prep_config, uninterrupted) -> dict[str, Job | str]:
    """A job for each way that is tested, all submitted at once, or why there is none."""
    actual: dict[str, Job | str] = {}
    for way in (way for way in WAYS if any(item.name.endswith(f"[{way}]") for item in request.session.items)):
        project = new_project(way.replace(" ", "-"))
        try:
            words, environment = starter(way, project)
        except pytest.skip.Exception as reason:
            actual[way] = str(reason)
        else:
            prep = project.command("prep", prep_config(project))
            script = f"{words} {project.command('train', *project.small)} && {words} {prep}"
            actual[way] = project.sbatch(script, "--nodes=2", "--ntasks-per-node=1", **environment)
    return actual


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_run_and_corpus_are_the_same(way, jobs, uninterrupted, corpus):
    if isinstance(job := jobs[way], str):
        pytest.skip(job)
    assert job.finish()["NumNodes"] == "2"
    uninterrupted.finish()
    assert training_curve(job.run_dir) == training_curve(uninterrupted.run_dir)
    assert file_hashes(job.run_dir.with_name("corpus")) == file_hashes(corpus)
