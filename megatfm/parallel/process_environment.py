"""Rank and world size from the environment of torchrun, srun or mpirun."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatfm.errors import MegatfmError, UsageError

Launcher = Literal["none", "torchrun", "srun", "mpirun"]

# Below the kernel's range for outgoing connections (32768 up), so no connection sits on the port by accident.
FIRST_PORT, N_PORTS = 12_000, 20_000

TORCHRUN_LOCAL_VARS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Rank, world size and local rank under the two families of mpirun (Intel MPI is of MPICH's).
OPEN_MPI_VARS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MPICH_VARS = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")


@dataclass(frozen=True)
class ProcessEnvironment:
    """Facts of the environment: rank and world size, and where rank 0 listens when that is known already."""

    launcher: Launcher
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int = 0


def read_process_environment(environment: Mapping[str, str]) -> ProcessEnvironment:
    """Read rank and world size from a launcher's variables. Raises UsageError where they contradict each other.

    mpirun and torchrun come before srun, because inside a SLURM job both start their helpers with srun. A process
    in a bare sbatch or salloc shell sees SLURM's job variables but belongs to no step of several tasks: it is alone.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    for names in (OPEN_MPI_VARS, MPICH_VARS):
        if names[0] in environment and not _is_step(environment):
            rank, world_size, local_rank = _read_numbers(environment, *names)
            return ProcessEnvironment("mpirun", rank, world_size, local_rank)
    if _is_step(environment):
        return _from_srun(environment)
    return ProcessEnvironment("none")


def count_local_ranks(environment: Mapping[str, str]) -> int | None:
    """Return the number of this run's ranks on this machine; None if the launcher doesn't say."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if (text := environment.get(name, "")).isdecimal():
            return int(text)
    counts, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), environment.get("SLURM_NODEID", "")
    if not _is_step(environment) or not node.isdecimal():
        return None
    ranks_by_node = [  # e.g. 2(x3),1
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", counts)
        for _ in range(int(times or 1))
    ]
    return ranks_by_node[int(node)] if int(node) < len(ranks_by_node) else None


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process itself, as one of several tasks, and not only mpirun's helper."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return False
    _read_numbers(environment, "SLURM_PROCID")
    if "OMPI_COMM_WORLD_RANK" in environment:
        return False
    pmi = environment.get("PMI_SIZE", environment.get("SLURM_STEP_NUM_TASKS", "1"))
    return environment.get("SLURM_STEP_NUM_TASKS", "1") == pmi != "1"


def _from_torchrun(environment: Mapping[str, str]) -> ProcessEnvironment:
    rank, world_size = _read_numbers(environment, "RANK", "WORLD_SIZE")
    _read_numbers(environment, *(name for name in TORCHRUN_LOCAL_VARS if name in environment))
    if world_size == 1:
        return ProcessEnvironment("torchrun")
    (local_rank,) = _read_numbers(environment, "LOCAL_RANK")
    port = _read_port(environment)
    return ProcessEnvironment("torchrun", rank, world_size, local_rank, _read_text(environment, "MASTER_ADDR"), port)


def _from_srun(environment: Mapping[str, str]) -> ProcessEnvironment:
    rank, world_size, local_rank = _read_numbers(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    job, step = _read_numbers(environment, "SLURM_JOB_ID", "SLURM_STEP_ID")
    address = environment.get("MASTER_ADDR") or _parse_head_node(_read_text(environment, "SLURM_STEP_NODELIST"))
    port = _read_port(environment) if environment.get("MASTER_PORT") else FIRST_PORT + (31 * job + step) % N_PORTS
    return ProcessEnvironment("srun", rank, world_size, local_rank, address, port)


def _read_port(environment: Mapping[str, str]) -> int:
    (port,) = _read_numbers(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT={port} in the environment: ports are 1 to 65535: set another, or unset it")
    return port


def _parse_head_node(nodes: str) -> str:
    """Return the first host of SLURM's compressed list, e.g. `gpu[07-09,12]`."""
    if re.fullmatch(r"[\w.-]+", nodes):
        return nodes
    try:
        result = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        )
        (first, *_) = result.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MegatfmError(
            f"scontrol can't expand SLURM_STEP_NODELIST={nodes} ({error}): set MASTER_ADDR to the first node's name"
        ) from error
    return first


def _read_numbers(environment: Mapping[str, str], *names: str) -> tuple[int, ...]:
    """Return non-negative integers of the environment. Raises UsageError unless a rank is below its world size."""
    values = []
    for name in names:
        text = _read_text(environment, name)
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise UsageError(f"{name}={text[:40]!r} in the environment is not a number: unset it or mend the launcher")
        values.append(int(text))
    if len(values) > 1 and names[0].endswith(("RANK", "PROCID")) and values[0] >= values[1]:
        raise UsageError(
            f"{names[0]}={values[0]} with {names[1]}={values[1]}: ranks are 0 to {values[1] - 1}; "
            "mend the launcher or unset both"
        )
    return tuple(values)


def _read_text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        hints = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"]
        present = ", ".join(hint for hint in hints if hint in environment)
        raise UsageError(
            f"{name} is not set, although other variables are set as for several processes ({present}): "
            "start with torchrun, srun, mpirun or `megatfm launch`, or unset those"
        )
    return environment[name]
