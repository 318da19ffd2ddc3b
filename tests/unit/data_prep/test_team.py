"""However many prepare a corpus together, also by Dask, and whoever of them dies, the result is that of one."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import LocalCluster
from distributed.security import Security

from megatfm import data_prep
from megatfm.config import to_toml
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.cli import cli
from megatfm.data_prep.execution.dask import _DaskPreparation, connect_dask_workers
from megatfm.data_prep.execution.executors import LockExecutor, get_mpi_rank, get_mpi_world, parse_task, supports_flock
from megatfm.data_prep.execution.progress import PrepSummary
from megatfm.data_prep.execution.workspace import Workspace
from megatfm.errors import MegatfmError, UsageError
from tests.support.forked_commands import ForkedCommand
from tests.support.prep_files import SIGNAL_SCRIPT, file_hashes, make_prep_config

Make = Callable[..., PrepConfig]
ROOT = Path(__file__).parents[3]
PART = 8000  # the corpus has 20 parts of this size
ALL: dict[str, Any] = {  # one step of each kind: what sees a document, a line, the whole corpus
    "steps": [{"name": "language"}, {"name": "pii"}],
    "dedup": [{"name": "lines"}, {"name": "minhash"}],
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, str]:
    """The hashes of the corpus of one process that works alone, in one part."""
    return file_hashes(data_prep.run(make_prep_config(tmp_path_factory.mktemp("alone"), corpus, **ALL)).out)


@pytest.fixture
def together(config: Make, tmp_path: Path) -> PrepConfig:
    """A config for many parts, which is also in `prep.toml`."""
    config_ = config("together", task_bytes=PART, tokenizer_threads=1, **ALL)
    (tmp_path / "prep.toml").write_text(to_toml(config_))
    return config_


def test_the_size_of_parts_changes_nothing(config: Make, prepared_hashes: dict[str, str]) -> None:
    assert file_hashes(data_prep.run(config(task_bytes=PART)).out) == prepared_hashes


def test_tasks_share_the_work_and_take_over_from_one_that_is_killed(
    together: PrepConfig, full: dict[str, str], tmp_path: Path
) -> None:
    words = ["SIGSTOP", 9, "-", tmp_path / "prep.toml", "--task", "2/2"]
    victim = ForkedCommand(words, tmp_path / "victim", program=str(SIGNAL_SCRIPT))
    work = tmp_path / "together" / ".work"
    deadline = time.monotonic() + 60
    while psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list(work.glob("*/.clean.*.partial")), "in the middle of a part, which it holds"
    words = [tmp_path / "prep.toml", "--task", "1/2"]
    other = ForkedCommand(words, tmp_path / "other", program="megatfm.data_prep")
    while len(list(work.glob("*/clean.*.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    victim.end()
    assert other.wait() == 0, other.output
    assert file_hashes(tmp_path / "together") == full
    assert data_prep.run(together, make_executor=lambda folder: LockExecutor(2, 2, folder)).already_done


def run_two_ranks(*command: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command of Python under mpirun, whoever runs the tests and however few cores there are."""
    if not shutil.which("mpirun"):
        pytest.skip("needs MPI: run `make system-deps`")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    return subprocess.run(
        ["mpirun", "-n", "2", *options, sys.executable, *map(str, command)],
        env={**os.environ, **dict.fromkeys(names, "1"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.usefixtures("together")
def test_ranks_under_mpirun_make_the_same(full: dict[str, str], prepared: PrepSummary, tmp_path: Path) -> None:
    command = ("-m", "megatfm.data_prep", tmp_path / "prep.toml", "overwrite=true")
    shutil.copytree(prepared.out, tmp_path / "together")
    ended = run_two_ranks(*command)  # to replace a corpus they take turns, which needs MPI
    assert ended.returncode == 0, ended.stderr
    assert file_hashes(tmp_path / "together") == full
    assert ended.stderr.count("clean | done") == 1, "rank 0 speaks for all"
    (tmp_path / "together" / "prep.json").unlink()
    (tmp_path / "together" / "a stranger").touch()
    failing = run_two_ranks(*command)
    assert failing.returncode == 2, "a mistake that one rank sees ends all"
    assert "'a stranger', which no prep made" in failing.stderr


@pytest.mark.extended
@pytest.mark.usefixtures("together")
def test_a_rank_that_dies_costs_its_part_only(full: dict[str, str], tmp_path: Path) -> None:
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip("another mpirun ends all ranks when one dies")
    command = (SIGNAL_SCRIPT, "SIGKILL", 3, 1, tmp_path / "prep.toml")
    ended = run_two_ranks(*command, options=("--enable-recovery",))
    assert file_hashes(tmp_path / "together") == full, ended.stderr
    assert (tmp_path / "fallen").exists()


@pytest.mark.parametrize("begin", ["OMPI_COMM_WORLD", "PMI"])
def test_ranks_are_known_from_the_environment(begin: str) -> None:
    names = (f"{begin}_RANK", f"{begin}_SIZE")
    assert get_mpi_rank(dict(zip(names, ("2", "4"), strict=True))) == (3, 4)
    assert get_mpi_rank(dict(zip(names, ("0", "1"), strict=True))) is None
    assert get_mpi_rank({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2"}) == (2, 2)
    assert get_mpi_rank({"PMIX_RANK": "0"}) is None
    assert get_mpi_rank({}) is None


def test_a_part_is_done_by_one_of_many(tmp_path: Path) -> None:
    done: list[int] = []
    parts: list[int] = []

    def work(part: int) -> None:
        time.sleep(0.002)
        done.append(part)

    def member(number: int) -> None:
        team = LockExecutor(number, 4, tmp_path)
        team.run_parts("stage", 30, lambda part: part in done, work)
        parts.append(len(set(done) - {99}))
        team.run_once("rest", lambda: {"x": 1} if 99 in done else None, lambda: done.append(99) or {"x": 1})  # type: ignore[func-returns-value]

    threads = [threading.Thread(target=member, args=(number,)) for number in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [*range(30), 99]
    assert parts == [30] * 4


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/2/3", "-1/3", "1/0", ""])
def test_a_part_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="counted from 1, for example 3/8"):
        parse_task(text)
    assert parse_task("3/8") == (3, 8)


def test_several_tasks_replace_nothing(config: Make, prepared: PrepSummary, tmp_path: Path) -> None:
    out = shutil.copytree(prepared.out, tmp_path / "out")
    with pytest.raises(UsageError, match="delete it first"):
        data_prep.run(config(overwrite=True), make_executor=lambda folder: LockExecutor(1, 2, folder))
    assert file_hashes(out) == file_hashes(prepared.out)


def test_tasks_need_locks(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError("no locks")

    assert supports_flock(Path(config().out))
    monkeypatch.setattr("fcntl.flock", flock)
    assert not supports_flock(Path(config().out))
    with pytest.raises(UsageError, match="--task needs them: use mpirun"):
        data_prep.run(config(), make_executor=lambda folder: LockExecutor(1, 2, folder))


def test_an_mpi_that_does_not_match_mpirun_is_named() -> None:
    with pytest.raises(MegatfmError, match="mpi4py sees 1"):
        get_mpi_world(2)


# ------------------------------------------------------------------------------------------------------- Dask


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Start a scheduler and two workers, whose keys Dask's config names."""
    keys, folder = Security.temporary(), tmp_path_factory.mktemp("keys")
    tls: dict[str, Any] = {"distributed.comm.tls.ca-file": _written(folder / "ca.pem", keys.tls_ca_file)}
    for role in ("scheduler", "worker", "client"):
        key = getattr(keys, f"tls_{role}_key") + getattr(keys, f"tls_{role}_cert")
        for kind in ("cert", "key"):
            tls[f"distributed.comm.tls.{role}.{kind}"] = _written(folder / f"{role}.pem", key)
    settings = {**tls, "distributed.comm.require-encryption": True, "temporary-directory": str(folder)}
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, security=Security(), host="127.0.0.1"
        ) as cluster,
    ):
        yield cluster


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_errors_of_a_team_are_those_of_one_process(
    config: Make, cluster: LocalCluster, changeable_corpus: Path
) -> None:
    (changeable_corpus / "zz_binary.txt").write_bytes(b"\xff\x00\xfe")
    wrong = config(read={"folder": str(changeable_corpus)}, task_bytes=PART, tokenizer_threads=1, **ALL)
    with pytest.raises(MegatfmError) as alone:
        data_prep.run(wrong)
    with pytest.raises(MegatfmError) as together, connect_dask_workers(cluster.scheduler_address, wrong) as team:
        data_prep.run(wrong, make_executor=team)
    with Workspace(wrong).lock():
        pass  # as all have left
    assert str(together.value) == str(alone.value)


def test_workers_make_the_same_and_one_that_dies_is_made_up_for(
    together: PrepConfig, full: dict[str, str], cluster: LocalCluster, tmp_path: Path
) -> None:
    assert cluster.scheduler_address.startswith("tls://")
    pids = [nanny.pid for nanny in cluster.workers.values()]
    work = tmp_path / "together" / ".work"

    def kill() -> None:
        while not list(work.glob("*/dedup-0-lines-keys.*.json")):
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with connect_dask_workers(cluster.scheduler_address, together) as team:
        data_prep.run(together, make_executor=team)
    killer.join(1)
    assert [nanny.pid for nanny in cluster.workers.values()] != pids
    assert file_hashes(tmp_path / "together") == full


def test_an_open_scheduler_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scheduler.json").write_text('{"address": "tcp://node7:8786"}')
    (tmp_path / "list.json").write_text("[]")
    for where, message in (
        ("tcp://10.1.2.3:8786", "is open to anyone who reaches it: start scheduler and workers with TLS"),
        (str(tmp_path / "scheduler.json"), "tcp://node7:8786 is open"),
        (str(tmp_path / "nothing.json"), "neither an address"),
        (str(tmp_path / "list.json"), "neither an address"),
    ):
        assert cli(["quickstart-data", f"out={tmp_path / 'out'}", "--dask", where]) == 2
        assert message in capsys.readouterr().err
    assert cli(["quickstart-data", f"out={tmp_path / 'out'}", "--dask", "x", "--task", "1/2"]) == 2


def test_workers_leave_when_their_client_is_gone(together: PrepConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stage that it waits to be asked for, and in one that only the client does; else it would lock others out."""
    monkeypatch.setattr("megatfm.data_prep.execution.dask.CLIENT_SECONDS", 0.05)
    member = _DaskPreparation(together)
    member._thread.join(60)
    assert member.has_ended
    monkeypatch.setattr("megatfm.data_prep.execution.dask._DaskPreparation.run_parts", LockExecutor.run_parts)
    member = _DaskPreparation(together)
    member._thread.join(60)
    assert member.has_ended
    assert not data_prep.run(together).already_done
