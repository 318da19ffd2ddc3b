"""A run that asks for symmetric memory is refused by name if ranks can't read one another's. What is sent, and the
gradients through it: tests/parity/test_compiled_layouts.py."""

import socket
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatfm.config import load_config
from megatfm.engines.native.compile import enable_symmetric_memory
from megatfm.engines.registry import build_native
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.mesh import Mesh, build_mesh
from megatfm.train import build
from tests.support.workers import Workers

GPU, CPU = torch.device("cuda"), torch.device("cpu")
CONFIG = load_config("quickstart", ["model.vocab_size=96", "parallel.tp=2", "parallel.async_tp=true"])


def mesh(*hosts: str) -> Mesh:
    stand_in: Any = SimpleNamespace(
        size=lambda axis: 2,
        group=lambda axis: SimpleNamespace(group_name="of tensors"),
        gather_objects=lambda entry, axes: [(f"boot of {host}", host) for host in hosts] or [entry, entry],
    )
    return stand_in


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of symmetric memory."""
    from torch.distributed import _symmetric_memory as memory

    called: list[object] = []

    def enable(name: str) -> None:
        warnings.warn("deprecated", FutureWarning, stacklevel=2)  # as torch 2.13 does
        called.append(name)

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", enable)
    monkeypatch.setattr(memory, "get_symm_mem_workspace", lambda name, min_size: called.append(min_size))
    return called


def test_ranks_of_one_machine_open_it_once(opened: list[object]) -> None:
    enable_symmetric_memory(mesh(), GPU)
    assert opened == ["of tensors", 1]


def test_a_cpu_has_none() -> None:
    with pytest.raises(UsageError, match=r"but the device is cpu: set parallel.async_tp = false"):
        enable_symmetric_memory(mesh(), CPU)
    setup: Any = SimpleNamespace(config=CONFIG, mesh=mesh(), device=CPU)
    with pytest.raises(UsageError, match=r"the device is cpu"):
        build_native(setup)


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match=r"torch .* without NCCL, .* install torch 2\.11 or newer for CUDA, or set"):
        enable_symmetric_memory(mesh(), GPU)


def test_several_machines_are_refused(opened: list[object]) -> None:
    host = socket.gethostname()
    with pytest.raises(MegatfmError, match=rf"ranks spans .*{host}.*set parallel.async_tp = false"):
        enable_symmetric_memory(mesh(host, "another"), GPU)
    assert not opened


def test_symmetric_memory_that_cannot_be_opened_is_named(opened: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory as memory

    def fail(name: str, min_size: int) -> None:
        raise RuntimeError("no peer access\nC++ stack")

    monkeypatch.setattr(memory, "get_symm_mem_workspace", fail)
    with pytest.raises(MegatfmError, match=r"read one another's memory here \(no peer access\): set"):
        enable_symmetric_memory(mesh(), GPU)


def plan() -> str:
    """The config of a run whose engine is never made."""
    with pytest.MonkeyPatch.context() as patch:
        engine = SimpleNamespace(build=lambda name, setup: setup.layout.table, check=lambda config, precision: None)
        patch.setattr(build, "ENGINES", engine)
        result: Any = build.build_engine(CONFIG, build_mesh(CONFIG.parallel, 2, "cpu"), CPU, "fp32")
    return str(result)


def test_the_plan_lists_async_tp(workers: Workers) -> None:
    assert workers.run(plan, 2)[0].endswith(f"\n{build.ASYNC_TP}")
