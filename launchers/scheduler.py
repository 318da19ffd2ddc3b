"""Calls SLURM's commands and parses their output: few fields, since many change between versions (22.05 and later)."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatfm.errors import MegatfmError, UsageError

TIMEOUT_SECONDS = 60.0  # a dead slurmctld would hang its commands for longer
_FACT = re.compile(r"(\w[\w:/]*)=(.*?)(?= \w[\w:/]*=|$)")


def run_slurm_command(*argv: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command of SLURM; return its output. Raises UsageError where there is none, MegatfmError when it refuses.

    environment: all of its variables, in place of ours.
    """
    try:
        result = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            env=environment,
        )
    except FileNotFoundError:
        raise UsageError(f"{argv[0]} is not on PATH: run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise MegatfmError(f"{argv[0]} gave no answer in {TIMEOUT_SECONDS:.0f} s: is slurmctld up?") from None
    if result.returncode:
        output = " ".join((result.stderr or result.stdout).split()) or f"exit code {result.returncode}"
        raise MegatfmError(f"{' '.join(argv[:3])}: {output}")
    return result.stdout


def show_job(job: str) -> dict[str, str]:
    """Fields of `scontrol show job`; empty once SLURM has forgotten the job."""
    try:
        text = run_slurm_command("scontrol", "-o", "show", "job", job)
    except MegatfmError as error:
        if isinstance(error, UsageError) or "Invalid job id" not in str(error):
            raise
        return {}
    return {key: value.strip() for key, value in _FACT.findall(text.splitlines()[0])} if text.strip() else {}


def expand_nodelist(nodes: str) -> list[str]:
    """The hosts of SLURM's compressed list, e.g. `gpu[07-09,12]`."""
    if re.fullmatch(r"[\w.-]+(,[\w.-]+)*", nodes):
        return nodes.split(",")
    if not (names := run_slurm_command("scontrol", "show", "hostnames", nodes).split()):
        raise MegatfmError(f"scontrol show hostnames {nodes}: names no host")
    return names


def parse_time(text: str) -> int | None:
    """A time as SLURM writes and takes it: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].

    None for UNLIMITED and the like.
    """
    if match := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+)", text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return (hours * 60 + minutes) * 60 + seconds
    return int(text) * 60 if text.isdecimal() else None


@dataclass(frozen=True)
class Partition:
    """A partition: UP or why it is closed; longest and default time limit in seconds, None for no limit."""

    name: str
    state: str
    max_time: int | None
    default_time: int | None


def partition(name: str | None) -> Partition | None:
    """A partition, or the one that jobs go to by default; None where SLURM doesn't say, as without its commands."""
    try:
        lines = run_slurm_command(
            "scontrol", "-o", "show", "partition", *([name] if name else [])
        ).splitlines()
    except MegatfmError:
        return None
    for line in lines:
        facts = {key: value.strip() for key, value in _FACT.findall(line)}
        if "PartitionName" in facts and (name or facts.get("Default") == "YES"):
            longest, usual = parse_time(facts.get("MaxTime", "")), parse_time(facts.get("DefaultTime", ""))
            return Partition(facts["PartitionName"], facts.get("State", "UP"), longest, usual or longest)
    return None


def usable_nodes(partition: str) -> set[str]:
    """Nodes of a partition that could run a job now or later: not down, drained or failing."""
    usable = set()
    for line in run_slurm_command("sinfo", "-h", "-N", "-p", partition, "-o", "%N %t").splitlines():
        name, _, state = line.strip().partition(" ")  # a node that is just being added has no state
        if state and not re.match(r"down|drain|drng|fail|unk|maint|.*\*$", state):
            usable.add(name)
    return usable


def submit(script: str, dependency: str = "") -> str:
    """Submit a script and return sbatch's output. A dependency takes the place of the script's own.

    sbatch's variables of this shell (SBATCH_TIMELIMIT and the like) would overrule the script: they are taken out.
    """
    option = [f"--dependency={dependency}"] if dependency else []
    environment = {name: value for name, value in os.environ.items() if name not in overruling()}
    return run_slurm_command("sbatch", "--parsable", *option, script, environment=environment)


def overruling() -> list[str]:
    """Variables of this shell by which sbatch would overrule what a script asks for."""
    return sorted(name for name in os.environ if name.startswith("SBATCH_"))


def requeue(job: str) -> None:
    """Back into the queue, also from within the job: it goes on from its checkpoint when its turn comes."""
    run_slurm_command("scontrol", "requeue", job)


def set_excluded_nodes(job: str, hosts: Sequence[str]) -> None:
    """Keep a pending job off some nodes."""
    run_slurm_command("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(hosts)}")


def cancel(jobs: Sequence[str]) -> None:
    """End jobs, and take those that wait out of the queue."""
    if jobs:
        run_slurm_command("scancel", *jobs)
