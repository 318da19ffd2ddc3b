"""`slurm/testcluster` itself: up in seconds, down without a trace, whatever happened in between."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.slurm_cluster import TESTCLUSTER, find_missing_requirement, run_command

NAME = f"u{os.getpid()}"
ROOT = Path("/var/lib/megatfm-testcluster")
FOLDER = ROOT / NAME
ENVIRONMENT = {**os.environ, "TESTCLUSTER": NAME, "SLURM_CONF": str(FOLDER / "slurm.conf")}
SMALL = ("--nodes", 2, "--cpus", 1, "--gpus", 2)


def command(program: str, *words: object) -> str:
    return run_command(TESTCLUSTER / program, *words, env=ENVIRONMENT)


def traces() -> list[str]:
    """Traces of this cluster on the machine: processes, namespaces, interfaces, files."""
    actual = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{FOLDER}/" in line:
            actual.append(line)
    actual += [name for name in run_command("ip", "netns", "list").split() if NAME in name]
    actual += [str(path) for path in Path("/sys/class/net").glob(f"*{NAME}*")]
    return actual + [str(path) for path in ROOT.glob(f"{NAME}*")]


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def down_at_the_end() -> Iterator[None]:
    if reason := find_missing_requirement():
        pytest.skip(reason)
    yield
    command("down")


def test_up_and_down_leave_no_trace():
    start = time.monotonic()
    output = command("up", *SMALL)
    assert time.monotonic() - start < 15
    assert output == f"export SLURM_CONF={FOLDER}/slurm.conf\n"
    assert re.search(r"^n2 +runs", command("status"), re.MULTILINE)
    job = ("srun", "--nodes=2", "--gpus-per-node=2", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES")
    assert sorted(run_command(*job, env=ENVIRONMENT).splitlines()) == ["n1 0,1", "n2 0,1"]
    assert command("up", *SMALL) == output, "up again is a fresh one"
    assert "JobId" not in run_command("scontrol", "show", "jobs", env=ENVIRONMENT)
    assert len(traces()) > 5
    command("down")
    assert traces() == []
    command("down")
    completed = subprocess.run([TESTCLUSTER / "status"], env=ENVIRONMENT, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout) == (3, f"testcluster '{NAME}' is down\n")


@pytest.mark.parametrize("seconds", [0.6, *(pytest.param(at, marks=pytest.mark.slow) for at in (0.2, 1.0))])
def test_leftovers_of_a_killed_up_are_cleaned(seconds):
    process = subprocess.Popen([TESTCLUSTER / "up", *map(str, SMALL)], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    process.kill()
    process.wait()
    command("up", *SMALL)
    command("down")
    assert traces() == []


def test_an_interrupted_up_takes_itself_down():
    process = subprocess.Popen([TESTCLUSTER / "up", *map(str, SMALL)], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for((FOLDER / "run" / "n1").exists, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 1
    assert traces() == []


def test_the_cluster_goes_down_with_its_owner():
    owner = subprocess.Popen(["sleep", "300"])
    command("up", *SMALL, "--until", owner.pid)
    os.kill(int((FOLDER / "run" / "watch").read_text()), signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert traces(), "the watch is dead as well"
    other = {**ENVIRONMENT, "TESTCLUSTER": f"v{os.getpid()}"}
    owner = subprocess.Popen(["sleep", "300"])
    run_command(TESTCLUSTER / "up", *SMALL, "--until", owner.pid, env=other)
    assert traces() == [], "the next cluster's start has swept it away"
    owner.kill()
    owner.wait()
    wait_for(lambda: not (ROOT / other["TESTCLUSTER"]).exists(), 20)


def test_only_its_own_processes_are_ended():
    command("up", *SMALL)
    bystander = subprocess.Popen(["sleep", "300"])
    node = int((FOLDER / "run" / "n1").read_text())
    (FOLDER / "run" / "n1").write_text(f"{bystander.pid}\n")  # as if the pid had been given to another process
    command("down")
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    os.kill(node, signal.SIGKILL)
    wait_for(lambda: traces() == [], 5)


def test_without_namespaces_the_nodes_share_the_network():
    rights = "-sys_admin,-net_admin"
    up = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", TESTCLUSTER / "up", *map(str, SMALL)]
    completed = subprocess.run(up, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    assert re.fullmatch(r"testcluster: no namespaces here \(.*\): all nodes share .*\n", completed.stderr)
    assert "export MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo\n" in completed.stdout
    names = run_command("srun", "--nodes=2", "printenv", "SLURMD_NODENAME", env=ENVIRONMENT)
    assert sorted(names.split()) == ["n1", "n2"]
    script = f"srun sh -c 'sleep 300; : {FOLDER}/job'"
    run_command("sbatch", "--nodes=2", "--output=/dev/null", "--wrap", script, env=ENVIRONMENT)
    wait_for(lambda: sum(bool(re.match(r"\S*sh -c sleep", line)) for line in traces()) == 2, 20)
    command("down")
    assert traces() == [], "jobs too have ended"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH."""
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.mark.parametrize("program", ["up", "down", "node kill n1"])
def test_a_user_who_is_not_root_is_refused(program, programs):
    (programs / "id").write_text("#!/bin/sh\necho 1000\n")
    (programs / "id").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    assert refusal(*program.split(), PATH=path).startswith(f"run this as root, for example: sudo {TESTCLUSTER}")


def test_missing_packages_are_named(programs):
    for name in ("bash", "id", "dirname", "readlink", "sed", "munged", "ip"):
        (programs / name).symlink_to(str(shutil.which(name)))
    missing = "slurmctld slurmd munge util-linux"
    expected = f"these packages are missing: apt-get install {missing} (or `make system-deps`)"
    assert refusal("up", PATH=str(programs)) == expected


@pytest.mark.parametrize(("words", "reason"), [
    ("up --nodes", "--nodes : usage: up [--nodes N]"),
    ("up --nodes 0", "it takes 1 to 64 nodes"),
    ("up --nodes 2 --disks 3", "--disks: no such option"),
    ("node kill n1", "n1: no such node"),
])  # fmt: skip
def test_wrong_arguments_are_one_clear_line(words, reason):
    assert refusal(*words.split()).startswith(reason)


def test_a_hostile_name_is_refused():
    assert refusal("down", TESTCLUSTER="../x").startswith("TESTCLUSTER=../x: use up to 9")


def refusal(program: str, *words: str, **environment: str) -> str:
    """The one line of a command that changes nothing."""
    options = {"env": ENVIRONMENT | environment, "capture_output": True, "text": True}
    completed = subprocess.run(["/bin/bash", TESTCLUSTER / program, *words], check=False, **options)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert traces() == []
    (line,) = completed.stderr.splitlines()
    return line.removeprefix("testcluster: ")
