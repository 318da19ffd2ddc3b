"""The DeepSpeed engine: compiled operators, buffers, files to the bit, and folders that go with it."""

import ast
import errno
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatfm.config import load_config
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.engines.deepspeed import nvme_offload
from megatfm.engines.deepspeed.nvme_offload import (
    MARKER_CONTENT,
    MARKER_FILENAME,
    OffloadDirectory,
    SyncIOHandle,
    add_buffers,
    count_buffers_in_use,
)
from megatfm.errors import MegatfmError, UsageError
from megatfm.models import build
from megatfm.parallel.layout import TensorLayout
from megatfm.parallel.mesh import SHARD

BASE = ["data.tokenizer=t", "data.train=d", "optimizer.name=adamw", "parallel.engine=deepspeed"]
DISK = ["deepspeed.nvme_path=/disk", "deepspeed.offload_parameters=nvme", "deepspeed.offload_optimizer=nvme"]


def model_of(*overrides: str) -> nn.Module:
    with torch.device("meta"):
        return build(load_config("quickstart", [*BASE, "model.vocab_size=1000", "model.n_layers=4", *overrides]).model)


def matrices(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dim() > 1}


def test_two_blocks_and_what_is_outside_of_blocks_can_be_in_use() -> None:
    model = model_of()
    names = matrices(model)
    outside = {name for name in names if ".layers." not in name}
    of_one = {name for name in names if ".layers.0." in name}
    assert len(of_one) >= 6
    assert count_buffers_in_use(model, names) == len(outside) + 2 * len(of_one) < len(names)
    assert count_buffers_in_use(model, outside) == len(outside)
    assert count_buffers_in_use(model, set()) == 1


def test_all_buffers_serve_a_model_with_frozen_weights() -> None:
    model = model_of()
    next(model.parameters()).requires_grad_(False)
    assert count_buffers_in_use(model, matrices(model)) == len(matrices(model))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed")
def test_a_json_may_ask_for_more_buffers_and_never_has_fewer() -> None:
    config = load_config("quickstart", [*BASE, *DISK, "model.vocab_size=30000"])
    model = build(config.model)
    layout = {name: TensorLayout(name, tuple(p.shape)) for name, p in model.named_parameters()}
    mesh = SimpleNamespace(size=lambda axis: 2 if axis == SHARD else 1)
    setup: Any = SimpleNamespace(model=model, layout=layout, mesh=mesh, precision="fp32")
    largest = max(p.numel() for p in model.parameters()) // 2
    derived = make_deepspeed_json(config, "fp32")
    add_buffers(derived, setup)
    place = derived["zero_optimization"]["offload_param"]
    large = {name for name, p in model.named_parameters() if p.numel() * 4 / 2 >= 2**20}
    assert large
    assert (place["buffer_count"], place["buffer_size"]) == (count_buffers_in_use(model, large), largest)
    assert derived["zero_optimization"]["offload_optimizer"]["buffer_count"] == 4
    mesh.size = lambda axis: 1
    with pytest.raises(UsageError, match="weights that one data rank holds whole"):
        add_buffers(derived, setup)
    mesh.size = lambda axis: 2 if axis == SHARD else 1
    place |= {"buffer_count": 1, "buffer_size": 10 * largest}
    derived["zero_optimization"]["offload_optimizer"]["buffer_count"] = 9
    add_buffers(derived, setup)
    assert (place["buffer_count"], place["buffer_size"]) == (count_buffers_in_use(model, large), 10 * largest)
    assert derived["zero_optimization"]["offload_optimizer"]["buffer_count"] == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_of_a_buffer_that_begins_anywhere_goes_out_and_in_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """DeepSpeed's operator reads past the system's cache, which wants addresses of its own, and reports no failure."""
    handle, path = SyncIOHandle(block_size=1, queue_depth=1), str(tmp_path / "a" / "b" / "c" / "weights.swp")
    Path(path).parent.mkdir(parents=True)
    buffer = handle.new_cpu_locked_tensor(5000, torch.zeros(1, dtype=dtype))
    values = torch.randn(4001).to(dtype)
    buffer.zero_()[17 : 17 + 4001] = values
    assert handle.async_pwrite(buffer.narrow(0, 17, 4001), path, 0) == 0
    buffer.zero_()
    assert handle.async_pread(buffer.narrow(0, 31, 4001), path, 0) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    assert torch.equal(buffer[31 : 31 + 4001], values)
    assert not buffer[:31].any()
    assert not buffer[31 + 4001 :].any()


def test_a_mapped_file_shows_what_was_written(tmp_path: Path) -> None:
    handle, path = SyncIOHandle(), str(tmp_path / "weights.swp")
    buffer = handle.new_cpu_locked_tensor(3000, torch.zeros(1)).fill_(1.0)
    handle.async_pwrite(buffer, path, 0)
    mapped = torch.from_file(path, shared=True, size=3000)
    assert torch.equal(mapped, buffer)
    mapped.fill_(2.0)
    handle.async_pread(buffer, path, 0)
    assert torch.equal(mapped, buffer)
    handle.async_pwrite(buffer.fill_(3.0), path, 0)
    assert torch.equal(mapped, buffer)


def test_its_buffers_are_known_whichever_part_of_them_it_is() -> None:
    handle = SyncIOHandle()
    buffer, other = (
        handle.new_cpu_locked_tensor(100, torch.zeros(1)),
        SyncIOHandle().new_cpu_locked_tensor(9, torch.zeros(1)),
    )
    assert handle.is_pinned(buffer)
    assert handle.is_pinned(buffer[40:].detach())
    assert not any(map(handle.is_pinned, (other, torch.zeros(100), torch.Tensor())))
    assert handle.free_cpu_locked_tensor(buffer)
    assert not handle.is_pinned(buffer)


def test_a_file_that_ends_early_and_a_disk_that_is_full_are_errors(tmp_path: Path) -> None:
    handle, path = SyncIOHandle(), tmp_path / "rank0" / "zero" / "optimizer" / "weights.swp"
    path.parent.mkdir(parents=True)
    buffer = handle.new_cpu_locked_tensor(100, torch.zeros(1)).zero_()
    handle.async_pwrite(buffer[:90], str(path), 0)
    with pytest.raises(MegatfmError, match=r"weights.swp, a file of state .*: it ends 40 bytes early: make room"):
        handle.async_pread(buffer, str(path), 0)
    with pytest.raises(MegatfmError, match=r"/dev/full, .*: No space left on device: .*deepspeed.nvme_path"):
        handle.async_pwrite(buffer, "/dev/full", 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from megatfm.engines.deepspeed.nvme_offload import OffloadDirectory
own = OffloadDirectory(Path(sys.argv[1]))
(own.path / "weights.swp").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def list_offload_folders(path: Path) -> set[Path]:
    return set(path.glob(".megatfm-offload-*/*-*/"))


def test_each_engine_has_a_folder_and_removes_it(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    first, second = OffloadDirectory(tmp_path), OffloadDirectory(tmp_path)
    assert list_offload_folders(tmp_path) == {first.path, second.path}
    (first.path / "rank0").mkdir()
    first.remove()
    assert list_offload_folders(tmp_path) == {second.path}
    second.remove()
    assert (tmp_path / "somebody's").exists()


def test_offloaded_files_of_killed_processes_alone_are_removed(tmp_path: Path) -> None:
    folder = OffloadDirectory(tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list_offload_folders(tmp_path)) == 2
    another = OffloadDirectory(tmp_path)
    assert list_offload_folders(tmp_path) == {folder.path, another.path}
    folder.remove()
    another.remove()


def test_only_what_it_made_itself_is_removed(tmp_path: Path) -> None:
    """A user's folder of a similar name, another host's, and the target of a link stay."""
    offload = OffloadDirectory(tmp_path)
    parent, host = offload.path.parent, offload.path.name.rpartition("-")[0]
    offload.remove()
    for name in ("megatfm-data", "megatfm-lock", f"{parent.name}/mine", f"{parent.name}/{host}-abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("precious")
    (tmp_path / "megatfm-data/lock").touch()
    (parent / f"{host}-abcdefgh" / MARKER_FILENAME).write_text("{}")
    elsewhere = tmp_path / "elsewhere"
    other = parent / "other.host-abcdefgh"
    for folder in (elsewhere, other):
        folder.mkdir()
        (folder / MARKER_FILENAME).write_bytes(MARKER_CONTENT)
    (parent / f"{host}-bcdefghi").symlink_to(elsewhere)
    before = sorted(tmp_path.rglob("*"))
    OffloadDirectory(tmp_path).remove()
    assert sorted(tmp_path.rglob("*")) == before
    assert not (tmp_path / "megatfm-lock/lock").exists()


def test_an_engine_s_folder_is_the_user_s_alone(tmp_path: Path) -> None:
    folder = OffloadDirectory(tmp_path)
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.path.parent.rename(tmp_path / "other")
    folder.path.parent.symlink_to(tmp_path / "other")
    with pytest.raises(UsageError, match=r"another user's, or no folder: remove it"):
        OffloadDirectory(tmp_path)


@pytest.mark.parametrize("place", ["nowhere", "file", "/proc"])
def test_a_place_that_can_t_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"deepspeed.nvme_path = '.*name a folder on a local disk"):
        OffloadDirectory(tmp_path / place)


def test_a_full_disk_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run would not remove a folder whose marker is empty."""

    def fail(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UsageError, match=r"can't be written \(No space left on device\): name a folder"):
        OffloadDirectory(tmp_path)
    assert not list_offload_folders(tmp_path)


# ------------------------------------------------------------------------------------------------ internals

FOLDER = Path(nvme_offload.__file__).parent


def private_names(source: str) -> list[str]:
    """Private attributes of anything but `self`, mangled names, and modules of DeepSpeed."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not is_self(node.value)}
    constants = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return sorted(
        {name for name in attributes if re.match("_[a-z]", name)}
        | {text for text in constants if re.match(r"_[A-Z]\w+__|deepspeed\.(runtime|ops|utils|comm|moe)", text)}
    )


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_one_chapter_has_all_of_deepspeed_s_internals() -> None:
    names = {path.name: private_names(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")}
    assert len(names.pop("internals.py")) > 15
    assert not any(names.values()), names


NAMES_OF_OTHERS = {
    *("FLAT_TENSORS", "_engine", "_get_info", "_map", "_mapped", "_optimizer", "_swapped", "data_axes"),
    *("prepare_step", "set_optimizer_state", "view_in"),
    *("cache_clear", "catch_warnings", "from_file", "getclosurevars", "nonlocals", "simplefilter"),
}
"""Ours, and those of Python and torch."""


def test_the_installed_deepspeed_has_every_internal_name() -> None:
    """On an upgrade, the names that are gone."""
    nodes = list(ast.walk(ast.parse((FOLDER / "internals.py").read_text(encoding="utf-8"))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    strings = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    names |= {re.sub(r"^_[A-Z]\w*?__", "__", text) for text in strings if re.fullmatch(r"\w+_\w+", text)}
    (root,) = importlib.util.find_spec("deepspeed").submodule_search_locations
    files = [path.read_text(encoding="utf-8") for path in Path(root).rglob("*.py")]
    words = {word for text in files for word in re.findall(r"\w+", text)}
    assert names - words == NAMES_OF_OTHERS
