"""Dask's workers make the same bytes, over TLS, and any of them may die."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import LocalCluster
from distributed.security import Security

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.cli import cli
from megatfm.data_prep.execution.dask import _DaskPreparation, dask_workers
from megatfm.data_prep.execution.executors import LockExecutor
from megatfm.data_prep.execution.workspace import Workspace
from megatfm.errors import MegatfmError
from tests.support.prep_files import file_hashes

Make = Callable[..., PrepConfig]
ALL: dict[str, Any] = {
    "steps": [{"name": "pii"}],
    "dedup": [{"name": "lines"}, {"name": "minhash"}],
    "task_bytes": 20_000,
    "tokenizer_threads": 1,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A scheduler and two workers, with keys of their own, which Dask's config names."""
    keys, folder = Security.temporary(), tmp_path_factory.mktemp("keys")
    tls: dict[str, Any] = {"distributed.comm.tls.ca-file": _written(folder / "ca.pem", keys.tls_ca_file)}
    for role in ("scheduler", "worker", "client"):
        key = getattr(keys, f"tls_{role}_key") + getattr(keys, f"tls_{role}_cert")
        for kind in ("cert", "key"):
            tls[f"distributed.comm.tls.{role}.{kind}"] = _written(folder / f"{role}.pem", key)
    with (
        dask.config.set({**tls, "distributed.comm.require-encryption": True}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, security=Security(), host="127.0.0.1"
        ) as cluster,
    ):
        yield cluster


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_what_is_wrong_is_told_as_by_one_process(config: Make, cluster: LocalCluster, corpus: Path) -> None:
    (corpus / "zz_binary.txt").write_bytes(b"\xff\x00\xfe")
    wrong = config(**ALL)
    with pytest.raises(MegatfmError) as alone:
        data_prep.run(wrong)
    with pytest.raises(MegatfmError) as together, dask_workers(cluster.scheduler_address, wrong) as team:
        data_prep.run(wrong, make_executor=team)
    with Workspace(wrong).lock():
        pass  # as all have left
    assert str(together.value) == str(alone.value)


def test_workers_make_the_same_and_one_that_dies_is_made_up_for(
    config: Make, cluster: LocalCluster, tmp_path: Path
) -> None:
    full = file_hashes(data_prep.run(config(**ALL)).out)
    assert cluster.scheduler_address.startswith("tls://")
    pids = [nanny.pid for nanny in cluster.workers.values()]
    together = config("together", **ALL)
    work = tmp_path / "together" / ".work"

    def kill() -> None:
        while not list(work.glob("*/dedup-0-lines-keys.*.json")):
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with dask_workers(cluster.scheduler_address, together) as team:
        data_prep.run(together, make_executor=team)
    killer.join(1)
    assert [nanny.pid for nanny in cluster.workers.values()] != pids
    assert file_hashes(tmp_path / "together") == full


def test_an_open_scheduler_elsewhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scheduler.json").write_text('{"address": "tcp://node7:8786"}')
    for where, what in (
        ("tcp://10.1.2.3:8786", "is open to whoever reaches it: start scheduler and workers with TLS"),
        (str(tmp_path / "scheduler.json"), "tcp://node7:8786 is open"),
        (str(tmp_path / "nothing.json"), "neither an address"),
    ):
        assert cli(["quickstart-data", f"out={tmp_path / 'out'}", "--dask", where]) == 2
        assert what in capsys.readouterr().err
    assert cli(["quickstart-data", f"out={tmp_path / 'out'}", "--dask", "x", "--task", "1/2"]) == 2


def test_a_worker_leaves_a_folder_whose_client_is_gone(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a stage that it waits to be asked for, and in one that only the client does; else it would lock others out."""
    monkeypatch.setattr("megatfm.data_prep.execution.dask.CLIENT_SECONDS", 0.05)
    member = _DaskPreparation(config(**ALL))
    member._thread.join(60)
    assert member.has_ended
    monkeypatch.setattr("megatfm.data_prep.execution.dask._DaskPreparation.run_parts", LockExecutor.run_parts)
    member = _DaskPreparation(config(**ALL))
    member._thread.join(60)
    assert member.has_ended
    assert not data_prep.run(config(**ALL)).already_done
