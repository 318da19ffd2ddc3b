"""The environment that each launcher makes, and what is read from it."""

import shutil
from pathlib import Path

import pytest

from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.process_environment import (
    ProcessEnvironment,
    count_local_ranks,
    read_process_environment,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
# What SLURM 22.05 really sets: `srun -N2 -n3` for task 1, and the script of `sbatch -N2 -n4`.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "n[1-2]",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n1",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ProcessEnvironment("none")),
        (TORCHRUN, ProcessEnvironment("torchrun", 3, 4, 1, "head", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment("torchrun")),
        (STEP | TORCHRUN, ProcessEnvironment("torchrun", 3, 4, 1, "head", 29500)),
        (BATCH, ProcessEnvironment("none")),
        (STEP, ProcessEnvironment("srun", 1, 3, 1, "n1", 12_000 + 31 * 7)),
        (STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "9"}, ProcessEnvironment("srun", 1, 3, 1, "head", 9)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ProcessEnvironment("none")),
        (OPEN_MPI, ProcessEnvironment("mpirun", 1, 2, 1)),
        (MPICH, ProcessEnvironment("mpirun", 1, 2, 0)),
        (
            STEP | OPEN_MPI,
            ProcessEnvironment("mpirun", 1, 2, 1),
        ),  # mpirun inside a job: its daemons are the step's tasks
        (STEP | MPICH, ProcessEnvironment("mpirun", 1, 2, 0)),
        (
            STEP | MPICH | {"PMI_SIZE": "3"},
            ProcessEnvironment("srun", 1, 3, 1, "n1", 12_000 + 31 * 7),
        ),  # srun --mpi=pmi2
    ],
)
def test_launchers_are_told_apart(environment: dict[str, str], place: ProcessEnvironment) -> None:
    assert read_process_environment(environment) == place


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, although"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' in the environment is not a number"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4: ranks are 0 to 3"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment: ports are 1 to 65535"),
        ({"MASTER_PORT": "0"}, "ports are 1 to 65535"),
        ({"RANK": "9" * 5000}, "RANK='9999"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two'"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"},
            "LOCAL_RANK='x' in the environment is not a number",
        ),
    ],
)
def test_contradictions_are_one_line(change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_process_environment(TORCHRUN | change)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID='first' in the environment is not a number"),
        ({"SLURM_PROCID": "first", "SLURM_STEP_NUM_TASKS": "1"}, "SLURM_PROCID='first'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a number"),
        ({"MASTER_PORT": "65536"}, "ports are 1 to 65535"),
    ],
)
def test_what_srun_and_a_user_made_of_it_is_one_line(change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_process_environment(STEP | change)
    assert words in str(error.value)


def test_a_node_list_needs_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MegatfmError, match=r"can't expand SLURM_STEP_NODELIST=n\[1-2\].*set MASTER_ADDR"):
        read_process_environment(STEP | {"SLURM_STEP_NODELIST": "n[1-2]"})


def test_a_scontrol_that_names_no_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(MegatfmError, match=r"can't expand SLURM_STEP_NODELIST=n\[1-2\].*set MASTER_ADDR"):
        read_process_environment(STEP | {"SLURM_STEP_NODELIST": "n[1-2]"})


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, None),
        (TORCHRUN, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 4),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}, 1),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3),6,2(x2)", "SLURM_NODEID": "2"}, 8),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3),6,2(x2)", "SLURM_NODEID": "5"}, 2),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "1"}, None),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "?", "SLURM_NODEID": "0"}, None),
        (BATCH | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, None),
        (STEP | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        (MPICH | {"MPI_LOCALNRANKS": "3"}, 3),
    ],
)
def test_how_many_ranks_are_on_this_machine(environment: dict[str, str], count: int | None) -> None:
    assert count_local_ranks(environment) == count


@pytest.mark.skipif(not shutil.which("scontrol"), reason="needs SLURM's scontrol: run `make system-deps`")
def test_the_head_node_is_the_first_of_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert read_process_environment(STEP | {"SLURM_STEP_NODELIST": "gpu[07-09,12],login1"}).address == "gpu07"
