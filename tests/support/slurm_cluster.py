"""A test cluster, jobs on it, and a Python for jobs whose processes are forked from one that has imported torch."""

import ctypes
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.support.files import read_lines
from tests.support.forked_commands import (
    PR_SET_PDEATHSIG,
    ForkedCommand,
    keep_last_override,
    parse_command,
    run_program,
    set_up_child,
)
from tests.support.workers import start_fork_server

TROUBLE_PLUGIN = Path(__file__).resolve().parents[1] / "e2e" / "slurm" / "plugin"
TESTCLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "testcluster"
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip")
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY",
}  # fmt: skip
POLL_SECONDS = 0.25
"""Between two questions to SLURM, each of which is a process."""
REPORTED = ("JobId", "JobState", "ExitCode", "Restarts", "RunTime", "NodeList")
JOB_REPORT_PROPERTY = "scontrol show job"
"""A property of a test's report whose values are shown at the end."""
JOB_REPORTS: dict[str, str] = {}
"""SLURM's words on each job at its end, for the summary; taken out by the fixture that hands them on."""


def find_missing_requirement() -> str | None:
    """Reason why there can be no test cluster here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root: run `make test` as root for the tests on a SLURM cluster"
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"needs {', '.join(missing)}: run `make system-deps`"
    return None


def run_command(*words: object, **options: Any) -> str:
    """Run a command that has to succeed within a minute; returns what it wrote."""
    command = [str(word) for word in words]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert completed.returncode == 0, f"{words}: exit {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout


class Cluster:
    """`slurm/testcluster`, up; it goes down with this process, however that ends."""

    def __init__(self, name: str, *words: object) -> None:
        self.name = name
        self.jobs: list[Job] = []
        self.environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
        self.environment["TESTCLUSTER"] = name
        output = run_command(TESTCLUSTER / "up", "--until", os.getpid(), *words, env=self.environment)
        self.environment.update(re.findall(r"(\w+)=(\S+)", output))
        self.has_namespaces = "MASTER_ADDR" not in self.environment

    @property
    def folder(self) -> Path:
        return Path(self.environment["SLURM_CONF"]).parent

    def down(self) -> None:
        run_command(TESTCLUSTER / "down", env=self.environment)

    def node(self, command: str, name: str) -> None:
        """Kill or start a node."""
        run_command(TESTCLUSTER / "node", command, name, env=self.environment)

    def wait_until_idle(self, nodes: str = "") -> None:
        """Wait for the last jobs on these nodes, in SLURM's compressed list, or on all of them."""
        end = time.monotonic() + 120
        chosen = ["-n", nodes] if nodes else []
        while set(self.slurm("sinfo", "-h", "-N", *chosen, "-o", "%t").split()) != {"idle"}:
            assert time.monotonic() < end, self.slurm("squeue")
            time.sleep(0.1)

    def slurm(self, *words: object, **options: Any) -> str:
        """Run one of SLURM's commands."""
        return run_command(*words, env=self.environment, **options)

    def hostnames(self, nodes: str) -> list[str]:
        """The hosts of SLURM's compressed list."""
        return self.slurm("scontrol", "show", "hostnames", nodes).split()

    def job(self, number: str, run_dir: Path) -> "Job":
        job = Job(self, number, run_dir)
        self.jobs.append(job)
        return job


@dataclass(eq=False)
class Job:
    """One job, and the run that it trains."""

    cluster: Cluster
    number: str
    run_dir: Path
    seen: list[str] = field(default_factory=list)

    def record(self) -> dict[str, str]:
        """`scontrol show job`, by field."""
        output = self.cluster.slurm("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"([A-Za-z/:]+)=(\S*)", output.splitlines()[0]))

    @property
    def state(self) -> str:
        state = self.record()["JobState"]
        if self.seen[-1:] != [state]:
            self.seen.append(state)
        return state

    @property
    def nodes(self) -> list[str]:
        """The nodes that it runs or ran on."""
        return self.cluster.hostnames(self.record()["NodeList"])

    @property
    def log(self) -> str:
        """All that the batch script and its steps wrote."""
        file = Path(self.record()["StdOut"])
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def steps(self) -> int:
        """Steps in the run's metrics."""
        file = self.run_dir / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_until(self, condition: Callable[[], object], timeout: float = 240) -> None:
        """Wait for something to come true; a job that ends in the meantime, or the timeout, is a failure."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, self.report("waited in vain")
            assert not self._has_ended() or condition(), self.report("it ended in the meantime")
            time.sleep(POLL_SECONDS)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.steps >= step)

    def finish(self, state: str = "COMPLETED", timeout: float = 300) -> dict[str, str]:
        """Wait for the end, show what SLURM reports, and return it. A requeued job has not ended."""
        deadline = time.monotonic() + timeout
        while not self._has_ended(state):
            assert time.monotonic() < deadline, self.report(f"not at an end after {timeout} s")
            time.sleep(POLL_SECONDS)
        record = self.record()
        assert record["JobState"] == state, self.report(f"{state} was expected")
        print(self.cluster.slurm("scontrol", "show", "job", self.number))
        JOB_REPORTS[self.number] = " ".join(f"{key}={record[key]}" for key in REPORTED)
        return record

    def _has_ended(self, expected: str = "COMPLETED") -> bool:
        """Whether the job is over. One that is just being requeued shows an end for a moment, but never COMPLETED."""
        state = self.state
        deadline = time.monotonic() + (1.0 if state == expected else 10.0)
        while state in ENDED - {"COMPLETED"} and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if self.state != state:
                return False
        return state in ENDED

    def report(self, problem: str) -> str:
        output = self.cluster.slurm("scontrol", "show", "job", self.number)
        return f"job {self.number}: {problem}; seen: {' → '.join(self.seen)}\n{output}\n{self.log}"


def read_metrics(run_dir: Path) -> list[dict[str, object]]:
    """Lines of a run's metrics.jsonl."""
    return read_lines(run_dir / "metrics.jsonl")


# The run of these tests: two layers, forty steps, a checkpoint every five; ZeRO-3 where there are two ranks.
STEPS = 40
OVERRIDES = (
    f"train.steps={STEPS}",
    "checkpoint.every=5",
    "evaluate.every=1000",
    "evaluate.max_rows=4",
    "optimizer.name=adamw",  # Muon's roundings grow from step to step
    "train.precision=fp64",  # in float32 a single step can make 1e-4 of them
    'plugins=["trouble"]',
)


@dataclass
class Project:
    """A user's folder before submitting: a config, the description of the site, and files that make trouble."""

    folder: Path
    cluster: Cluster
    python: str
    """Python of its jobs: the one that forks, or `sys.executable`."""
    run_name: str = "run"

    def plant_fault(self, fault: str, text: str = "") -> Path:
        """Make trouble, see plugin/trouble.py; it ends when the file that is returned is deleted."""
        file = self.folder / "trouble" / fault
        file.write_text(text)
        return file

    @property
    def config(self) -> Path:
        return self.folder / "small.toml"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.run_name

    @property
    def small(self) -> list[object]:
        """The small run, as the commands name it."""
        return [self.config, *OVERRIDES, f"run_dir={self.run_dir}"]

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(TROUBLE_PLUGIN), os.environ.get("PYTHONPATH")]))
        return {**self.cluster.environment, "PYTHONPATH": path, "TROUBLE": str(self.folder / "trouble")}

    def megatfm(self, *words: object, code: int = 0) -> str:
        """Run a command in the project's folder, as a fork; returns what it wrote."""
        command = ForkedCommand(
            keep_last_override(words), self.folder / "said", self.folder, self.environment, python=self.python
        )
        assert command.wait() == code, f"{words}\n{command.output}"
        return command.output

    def submit(self, *words: object) -> list[Job]:
        """`megatfm launch … --slurm`; returns the job, or all of a chain."""
        output = self.megatfm("launch", *words, "--slurm")
        (numbers,) = re.findall(r"^jobs? ([\d, ]+) (?:is|are) queued", output, re.MULTILINE)
        return [self.cluster.job(number, self.run_dir) for number in numbers.split(", ")]

    def launch(self, *words: object, nodes: object = 1) -> Job:
        """Submit the small run, one process on each node: each takes seconds to import what it needs."""
        return self.submit(*self.small, "--nodes", nodes, "--nproc", 1, *words)[0]

    def sbatch(self, script: str, *words: object, **environment: str) -> Job:
        """Submit a script of the test's own."""
        file = self.folder / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        log = f"--output={self.folder}/slurm-%j.log"
        output = run_command(
            "sbatch", "--parsable", log, *words, file, cwd=self.folder, env=self.environment | environment
        )
        return self.cluster.job(output.strip(), self.run_dir)

    def command(self, *words: object) -> str:
        """A command of megatfm, for a shell."""
        return shlex.join([self.python, "-m", "megatfm", *map(str, words)])


CLIENT = Path(__file__).with_name("python_client.py")
NAMESPACES = ("uts", "net", "pid", "mnt")
PEER_CREDENTIALS = 12
"""Bytes of a `struct ucred`: pid, uid, gid."""


class PythonServer:
    """The process from which jobs are forked, and the program that asks it.

    `program` stands for Python in a batch script (see `python_client.py`). The server forks a process into the
    namespaces of the node on which the client runs, with the client's outputs, variables and folder: so it dies with
    its node, and it is signalled and ends with its client. A fork can't show that the job's copy of the code is
    imported: a job of `tests/e2e/slurm/test_failures.py` starts a real Python.
    """

    def __init__(self, folder: Path) -> None:
        path, self.program = folder / "socket", folder / "python"
        words = [sys.executable, "-IS", str(CLIENT), str(path), sys.executable]
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.program.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        context = start_fork_server()
        self._process = context.Process(target=serve_clients, args=(listener,), daemon=True)
        self._process.start()
        listener.close()

    def end(self) -> None:
        """End the server, and all that it has forked."""
        self._process.kill()
        self._process.join()


# -------------------------------------------------------------------------------------- in the server's process


def serve_clients(listener: socket.socket) -> NoReturn:
    """Fork a keeper for each client."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that keepers are no zombies
    while True:
        client, _ = listener.accept()
        if not os.fork():
            try:
                listener.close()
                _die_with_parent()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep_process(client)
            finally:
                os._exit(70)
        client.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_process(client: socket.socket) -> None:
    """Fork the client's process; forward its signals, tell it the end, and kill the process if the client is killed."""
    message, outputs, _, _ = socket.recv_fds(client, 8, 3)
    command = json.loads(client.recv(int.from_bytes(message, "big"), socket.MSG_WAITALL))
    pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS)[:4], sys.byteorder)
    _enter_namespaces(pid)
    process = os.fork()
    if not process:
        _run_command(command, outputs)
    for output in outputs:
        os.close(output)
    ended = os.pidfd_open(process)
    while ended not in select.select([ended, client.fileno()], [], [])[0]:
        number = client.recv(1)
        if not number:
            os.kill(process, signal.SIGKILL)
            return
        os.kill(process, number[0])
    _, status = os.waitpid(process, 0)
    client.send(str(os.waitstatus_to_exitcode(status)).encode())


def _enter_namespaces(pid: int) -> None:
    """Enter those namespaces of a process that are not ours; for pids, only what is forked later does."""
    libc = ctypes.CDLL(None, use_errno=True)
    entered = [Path(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES]
    files = [os.open(path, os.O_RDONLY) for path in entered if not path.samefile(f"/proc/self/ns/{path.name}")]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def _run_command(command: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Be the process of the command."""
    try:
        set_up_child((outputs[0], outputs[1], outputs[2]), new_session=False, group=0)
        _die_with_parent()
        words, folder, environment = command["words"], command["folder"], command["environment"]
        for number in command["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        parsed = parse_command(words)
        if parsed is None:
            os.chdir(folder)
            os.execve(sys.executable, [sys.executable, *words], environment)
        module, arguments, safe = parsed
        run_program(module, arguments, folder, environment, safe)
    finally:
        os._exit(71)
