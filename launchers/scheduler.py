"""Calls SLURM's commands (22.05 and later) and parses their output. It reads few fields: many change with versions."""

import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatfm.errors import MegatfmError, UsageError
from megatfm.terminal import print_to_stderr

NOTICE_SECONDS = 3.0
"""Seconds without an answer after which a user is told what is waited for."""
TIMEOUT_SECONDS = 60.0  # SLURM's commands hang for longer when slurmctld is dead
_FIELD = re.compile(r"(\w[\w:/]*)=(.*?)(?= \w[\w:/]*=|$)")


def run_slurm_command(*argv: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a SLURM command; return its output. Says so on stderr if SLURM takes long to answer.

    environment: the command's environment, if not this process's. Raises UsageError if the command isn't installed,
    MegatfmError if it fails or times out.
    """
    notice = threading.Timer(NOTICE_SECONDS, print_to_stderr, [f"waiting for SLURM: no answer to {argv[0]} yet"])
    notice.daemon = True
    notice.start()
    try:
        result = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, env=environment
        )
    except FileNotFoundError:
        raise UsageError(f"{argv[0]} is not on PATH: run this on a login node of the cluster") from None
    except OSError as error:  # no right to execute it, or no program
        raise UsageError(f"{argv[0]} on PATH can't be run ({error.strerror}): ask for access to SLURM") from None
    except subprocess.TimeoutExpired:
        raise MegatfmError(f"{argv[0]} gave no answer in {TIMEOUT_SECONDS:.0f} s: is slurmctld up?") from None
    finally:
        notice.cancel()
    if result.returncode:
        output = " ".join((result.stderr or result.stdout).split()) or f"exit code {result.returncode}"
        raise MegatfmError(f"{' '.join(argv[:3])}: {output}")
    return result.stdout


def show_job(job: str) -> dict[str, str]:
    """Return the fields of `scontrol show job`; empty once SLURM has forgotten the job."""
    try:
        text = run_slurm_command("scontrol", "-o", "show", "job", job)
    except MegatfmError as error:
        if isinstance(error, UsageError) or "Invalid job id" not in str(error):
            raise
        return {}
    return _parse_fields(text.splitlines()[0]) if text.strip() else {}


def _parse_fields(line: str) -> dict[str, str]:
    """Parse the `Key=value Key=value …` of one line of `scontrol -o`; values may contain blanks."""
    return {key: value.strip() for key, value in _FIELD.findall(line)}


def expand_nodelist(nodes: str) -> list[str]:
    """Return the hosts of a compressed node list such as `gpu[07-09,12]`."""
    if re.fullmatch(r"[\w.-]+(,[\w.-]+)*", nodes):
        return nodes.split(",")
    if not (hosts := run_slurm_command("scontrol", "show", "hostnames", nodes).split()):
        raise MegatfmError(f"scontrol show hostnames {nodes}: names no host")
    return hosts


def parse_time(text: str) -> int | None:
    """Parse a SLURM time into seconds: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]].

    Returns None for UNLIMITED and other words.
    """
    if match := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+)", text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return (hours * 60 + minutes) * 60 + seconds
    return int(text) * 60 if text.isdecimal() else None


@dataclass(frozen=True)
class SlurmPartition:
    """A partition: its state (UP, or why it is closed), and its longest and default time limit in seconds, if any."""

    name: str
    state: str
    max_time: int | None
    default_time: int | None


def find_partition(name: str | None) -> SlurmPartition | None:
    """Return the named partition, without a name SLURM's default one; None if SLURM can't be asked or names none."""
    try:
        output = run_slurm_command("scontrol", "-o", "show", "partition", *([name] if name else []))
    except MegatfmError:
        return None
    for line in output.splitlines():
        fields = _parse_fields(line)
        if "PartitionName" in fields and (name or fields.get("Default") == "YES"):
            max_time, default_time = (parse_time(fields.get(key, "")) for key in ("MaxTime", "DefaultTime"))
            return SlurmPartition(
                fields["PartitionName"], fields.get("State", "UP"), max_time, default_time or max_time
            )
    return None


def list_usable_nodes(partition: str) -> set[str]:
    """Return the nodes of a partition that can run a job now or later: not down, drained or failing."""
    usable = set()
    for line in run_slurm_command("sinfo", "-h", "-N", "-p", partition, "-o", "%N %t").splitlines():
        name, _, state = line.strip().partition(" ")  # the state is empty while a node is being added
        if state and not re.match(r"down|drain|drng|fail|unk|maint|.*\*$", state):
            usable.add(name)
    return usable


def find_jobs_of_script(script: str) -> list[str]:
    """Return the ids of this user's jobs in the queue that run a batch script. Raises MegatfmError, UsageError."""
    rows = [line.split("|", 2) for line in run_slurm_command("squeue", "-h", "--me", "-o", "%F|%T|%o").splitlines()]
    return [row[0] for row in rows if row[-1] == script and row[1] != "COMPLETING"]


def submit_script(script: str, dependency: str = "") -> str:
    """Submit a script and return sbatch's output. `dependency` replaces the script's own.

    Removes sbatch's input variables (SBATCH_TIMELIMIT, …) from the environment, since they would override the script.
    """
    option = [f"--dependency={dependency}"] if dependency else []
    environment = {name: value for name, value in os.environ.items() if name not in list_sbatch_variables()}
    return run_slurm_command("sbatch", "--parsable", *option, script, environment=environment)


def list_sbatch_variables() -> list[str]:
    """Return the names of this shell's variables that sbatch would let override a script's options."""
    return sorted(name for name in os.environ if name.startswith("SBATCH_"))


def requeue(job: str) -> None:
    """Put a job back into the queue. It may be the job that calls this."""
    run_slurm_command("scontrol", "requeue", job)


def set_excluded_nodes(job: str, hosts: Sequence[str]) -> None:
    """Set the nodes that a pending job must not use."""
    run_slurm_command("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(hosts)}")


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Cancel running and pending jobs."""
    if jobs:
        run_slurm_command("scancel", *jobs)
