"""NCCL's flight recorder is switched on by environment variables, only where there are GPUs."""

import json
import os
from pathlib import Path

import pytest
import torch

from megatfm.train.profiling import FLIGHT_RECORDER_VARS, dump_flight_recorder, start_flight_recorder


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (old_name, _) in FLIGHT_RECORDER_VARS.items():
        for item in (name, old_name or name):
            monkeypatch.setenv(item, "")  # so that it is put back afterwards
            monkeypatch.delenv(item)


def recorded() -> dict[str, str]:
    return {name: os.environ[name] for name in FLIGHT_RECORDER_VARS if name in os.environ}


def test_on_gpus_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_flight_recorder(Path("/runs/a"), "auto")
    assert recorded() == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/logs/nccl-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_is_set_stays_under_its_old_name_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(name, "7")
    start_flight_recorder(Path("/runs/a"), "cuda")
    assert os.environ[name] == "7"
    assert recorded().get("TORCH_FR_BUFFER_SIZE", "7") == "7"


def test_on_a_cpu_there_is_nothing_to_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_flight_recorder(tmp_path, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start_flight_recorder(tmp_path, "auto")
    assert recorded() == {}
    with (tmp_path / "log").open("wb") as file:
        dump_flight_recorder(file.fileno(), 0)
    assert (tmp_path / "log").read_bytes() == b""


def test_what_nccl_recorded_is_read_from_nccl_s_own_recorder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one of other backends, which every build of torch has, knows nothing of NCCL's collectives."""
    requested: list[dict[str, bool]] = []

    def dump(**options: bool) -> bytes:
        requested.append(options)
        return b'{"entries": [{"profiling_name": "nccl:all_reduce"}]}'

    for name, value in (
        ("is_initialized", True),
        ("is_nccl_available", True),
        ("get_backend_config", "cuda:nccl"),
    ):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    with (tmp_path / "log").open("wb") as file:
        dump_flight_recorder(file.fileno(), 3)
    written = (tmp_path / "log").read_text()
    assert written.startswith("Unfinished collectives of rank 3: ")
    assert json.loads(written.partition(": ")[2])["entries"][0]["profiling_name"] == "nccl:all_reduce"
    assert requested == [{"includeCollectives": True, "onlyActive": True}]
