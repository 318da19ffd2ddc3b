"""torchrun on one node, the signals that pass it by, and a job's own copy of the code."""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatfm.errors import UsageError
from megatfm.launchers import snapshot
from megatfm.launchers.job import MEGATFM_COMMAND
from megatfm.launchers.torchrun import find_common_exit_code, make_torchrun_command, run_worker, signal_workers
from tests.support.forked_commands import wait_until

ROOT = Path(__file__).parents[3]
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2", "MASTER_ADDR": "n1",
}  # fmt: skip

# In the place of torchrun: starts two workers, and returns 1 whatever they return, as torchrun does.
TORCHRUN = """
import os, subprocess, sys
workers = [
    subprocess.Popen([sys.executable, {worker!r}], env={{**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}})
    for rank in range(2)
]
sys.exit(1 if any([worker.wait() for worker in workers]) else 0)
"""
# A rank: saves for longer than any patience and returns what it was told to.
WORKER = """
import os, signal, sys, time
from pathlib import Path
held = {signal.SIGUSR1, signal.SIGTERM}
assert held <= signal.pthread_sigmask(signal.SIG_BLOCK, []), "as inherited from the agent"
code = int(os.environ["TOLD"])
def stop(number, frame):
    time.sleep(0.5)
    (Path(os.environ["MEGATFM_EXIT_CODES"]) / (os.environ["RANK"] + "-75")).touch()
    os._exit(75)
signal.signal(signal.SIGUSR1, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
Path(os.environ["READY"] + os.environ["RANK"]).touch()
if code >= 0:
    (Path(os.environ["MEGATFM_EXIT_CODES"]) / (os.environ["RANK"] + "-" + str(code))).touch()
    sys.exit(code)
time.sleep(60)
"""


def test_the_command_follows_slurms_order() -> None:
    words = make_torchrun_command(STEP, 4, ["train", "config.toml"])
    assert words[-5:] == ["-m", "megatfm.launchers.torchrun", "worker", "train", "config.toml"]
    for word in ("--nnodes=3", "--node-rank=2", "--nproc-per-node=4", "--master-addr=n1", "--max-restarts=0"):
        assert word in words
    commands = [make_torchrun_command({**STEP, "SLURM_JOB_ID": str(job)}, 4, []) for job in range(40)]
    ports = {word for words in commands for word in words if word.startswith("--master-port=")}
    assert len(ports) == 40, "jobs that share a node don't meet"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """`agent(code)`: an agent whose two workers return that code, or wait for a signal if it is negative."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN.format(worker=str(worker)))
    started = []

    def start(code: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ, **STEP, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1", "TOLD": str(code),
            "READY": str(tmp_path / "ready-"), "TMPDIR": str(tmp_path),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "megatfm.launchers.torchrun", "agent", "--processes", "2", "train", "config.toml",
        ]  # fmt: skip
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), 100)
        return process

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "code", [75, 3, *(pytest.param(code, marks=pytest.mark.extended) for code in (0, 2, 76, 77, 1))]
)
def test_the_code_of_the_workers_comes_through(
    code: int, agent: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = agent(code)
    process.communicate(timeout=100)
    assert process.returncode == (1 if code == 3 else code)
    assert not list(tmp_path.glob("megatfm-agent-*")), "no litter"


def test_a_signal_to_all_of_the_step_lets_the_workers_save(agent: Callable[[int], subprocess.Popen[str]]) -> None:
    """SLURM signals every process of a step: what stands for torchrun must not die of it."""
    process = agent(-1)
    (displayed,) = psutil.Process(process.pid).children()
    assert "torch.distributed.run" in displayed.cmdline()
    displayed.send_signal(signal.SIGUSR1)
    displayed.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    _, output = process.communicate(timeout=100)
    assert process.returncode == 75
    assert output == ""


def test_a_worker_that_ends_during_its_stop_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `supervise` would kill the others while they save."""
    ended = subprocess.Popen(["true"], env={**os.environ, "LOCAL_RANK": "0"})
    saves = subprocess.Popen(["sleep", "60"], env={**os.environ, "LOCAL_RANK": "1"})
    workers = [psutil.Process(process.pid) for process in (ended, saves)]
    ended.wait()
    monkeypatch.setattr("megatfm.launchers.torchrun._iter_workers", lambda pid: iter(workers))
    assert signal_workers(os.getpid(), signal.SIGTERM)
    assert saves.wait(10) == -signal.SIGTERM
    monkeypatch.undo()
    assert not signal_workers(ended.pid, signal.SIGTERM), "torchrun itself is gone"


def test_workers_that_left_no_code_go_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk keeps no worker from leaving its code."""
    assert find_common_exit_code(1, tmp_path) == 1
    monkeypatch.setenv("MEGATFM_EXIT_CODES", str(tmp_path))
    for rank, code, common in ((0, 75, 75), (9, 75, 75), (1, 2, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(runpy, "run_module", lambda *_, code=code, **__: sys.exit(code))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            with pytest.raises(SystemExit, match=str(code)):
                run_worker()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert find_common_exit_code(1, tmp_path) == common
    assert find_common_exit_code(0, tmp_path) == 0


# -------------------------------------------------------------------------------------------- whose code runs


def test_copied_code_is_imported_before_the_checkout(tmp_path: Path) -> None:
    place = snapshot.collect_code([]).copy_to(tmp_path)
    assert place.name.startswith("code-")
    assert not list(place.rglob("__pycache__"))
    assert (place / "megatfm" / "slurm" / "pretrain.sbatch").is_file()
    assert (place / "megatfm" / "presets" / "quickstart.toml").is_file()
    code = "from megatfm import cli, data_prep, launchers; print(cli.__file__, data_prep.__file__, launchers.__file__)"
    environment = {"PYTHONPATH": f"{place}:{ROOT}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert [Path(path).is_relative_to(place) for path in process.stdout.split()] == [True] * 3
    origin = json.loads((place / "origin.json").read_text())
    assert origin["copied_from"] == str(ROOT)


def test_the_same_code_is_copied_once_and_other_code_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    plugin = tmp_path / "here" / "my_plugin_of_a_test.py"
    plugin.write_text("x = 1\n")
    first = snapshot.collect_code(["my_plugin_of_a_test"]).copy_to(tmp_path)
    assert snapshot.collect_code(["my_plugin_of_a_test"]).copy_to(tmp_path) == first
    plugin.write_text("x = 2\n")
    place = snapshot.collect_code(["my_plugin_of_a_test"]).copy_to(tmp_path)
    assert (first / "my_plugin_of_a_test.py").read_text() == "x = 1\n"
    assert (place / "my_plugin_of_a_test.py").read_text() == "x = 2\n"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".code")], "no half copies"


def test_a_copy_that_another_submission_makes_at_once_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = snapshot.collect_code([])

    def copy_meanwhile() -> dict[str, object]:
        (tmp_path / code.dir_name).mkdir()
        (tmp_path / code.dir_name / "of-the-other").touch()
        return {}

    monkeypatch.setattr(snapshot, "describe_code_origin", copy_meanwhile)
    assert code.copy_to(tmp_path) == tmp_path / code.dir_name
    assert [path.name for path in tmp_path.rglob("*")] == [code.dir_name, "of-the-other"], "no half copies"


def test_installed_plugins_stay_where_they_are_and_a_missing_one_is_named() -> None:
    assert snapshot.collect_code(["pydantic"]).files == snapshot.collect_code([]).files
    with pytest.raises(UsageError, match="plugins: can't find 'nothing_of_this_name'"):
        snapshot.collect_code(["nothing_of_this_name.part"])


def test_neighbours_that_a_plugin_imports_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job doesn't look into the folder that it was submitted from, where a `queue.py` would hide Python's own."""
    local = tmp_path / "here"
    (local / "helper_of_a_test").mkdir(parents=True)
    (local / "plugin_of_a_test.py").write_text("def later():\n    import queue, helper_of_a_test.deep\n")
    (local / "helper_of_a_test" / "deep.py").write_text("from further_of_a_test import x\nfrom . import x\n")
    (local / "further_of_a_test.py").write_text("import plugin_of_a_test\nx = 1\n")
    (local / "queue.py").write_text("raise ImportError\n")
    (local / "nothing_to_do_with_it.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(local)])
    more = set(snapshot.collect_code(["plugin_of_a_test"]).files) - set(snapshot.collect_code([]).files)
    assert more == {"plugin_of_a_test.py", "helper_of_a_test/deep.py", "further_of_a_test.py"}


def test_a_plugin_with_a_link_to_itself_and_with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "package_of_a_test"
    for folder in ("part", "runs/a", ".git", "part/__pycache__"):
        (local / folder).mkdir(parents=True)
        (local / folder / "file.py").write_text("")
    (local / "part" / "up").symlink_to(local)
    (local / "again").symlink_to(local / "part")
    (local / "table.json").write_text("{}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    more = set(snapshot.collect_code(["package_of_a_test"]).files) - set(snapshot.collect_code([]).files)
    assert more == {f"package_of_a_test/{name}" for name in ("again/file.py", "part/file.py", "table.json")}
    with open(local / "part" / "weights.bin", "wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(UsageError, match=r"holds 136 MB, .*the largest file is package_of_a_test/.*weights\.bin"):
        snapshot.collect_code(["package_of_a_test"])


RAISES = "raise ImportError('a file of the user was imported')\n"


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= variables
    completed = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a user's own `megatfm.data_prep.py`, `launchers/` and `slurm/`."""
    for name in ("megatfm.data_prep.py", "launchers/__init__.py", "slurm/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(RAISES)
    return tmp_path


@pytest.mark.parametrize(
    "words", [["prep", "--help"], ["launch", "quickstart", "--slurm", "--dry-run"]], ids=lambda words: words[0]
)
def test_folders_of_the_user_are_not_imported(folder: Path, words: list[str]) -> None:
    assert run([sys.executable, "-m", "megatfm", *words], folder)


def test_ranks_import_nothing_from_the_working_directory(folder: Path) -> None:
    for name in ("queue.py", "statistics.py", "torch.py", "megatfm.py"):
        (folder / name).write_text(RAISES)
    assert "usage: megatfm train" in run([*MEGATFM_COMMAND, "--help"], folder)


@pytest.mark.parametrize(
    ("directory", "paths", "expected"),
    [(ROOT, [], ROOT), (ROOT, [ROOT], None), (ROOT / "tests", [ROOT], None)],
    ids=["working directory", "both", "PYTHONPATH"],
)
def test_ranks_import_an_uninstalled_checkout(directory: Path, paths: list[Path], expected: Path | None) -> None:
    """Packages on PYTHONPATH have no .pth files read, so that an editable install of megatfm is none."""
    packages = sysconfig.get_path("purelib")
    path = os.pathsep.join(map(str, [*paths, packages]))
    python = os.path.realpath(sys.executable)
    command = [python, "-m", "megatfm", "launch", "quickstart", "--nproc", "1", "--dry-run"]
    output = run(command, directory, PYTHONPATH=path)
    times = [output.count(f"PYTHONPATH={value}") for value in ("", f"{expected}{os.pathsep}{packages} ")]
    assert times == [bool(expected)] * 2
    assert f"{python} -P -m megatfm train quickstart" in output
