"""What DeepSpeed keeps in files, and its compiled operators: what is missing is one line with the way out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatfm.engines.deepspeed import operators
from megatfm.engines.deepspeed.operators import NVME, load_quantizer
from megatfm.engines.deepspeed.swapped import own_folder
from megatfm.errors import UsageError


class Builder:
    """As much of DeepSpeed's as is asked for."""

    name = "async_io"

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles

    def is_compatible(self, verbose: bool) -> bool:
        return self.compiles


def refusal(builder: Builder) -> str:
    with pytest.raises(UsageError) as found:
        operators._compiled(builder, f"{NVME[0]} needs async_io", NVME[1])
    assert "\n" not in str(found.value)
    return str(found.value)


def test_an_operator_that_can_t_be_had_is_refused_and_never_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", None)
    assert "which isn't compiled yet: " in refusal(Builder())
    assert "make deepspeed-nvme" in refusal(Builder())
    assert "apt-get install libaio-dev" in refusal(Builder(compiles=False))
    (tmp_path / "async_io/async_io.so").write_bytes(b"not for this torch")
    assert f"remove {tmp_path / 'async_io'}" in refusal(Builder())
    (tmp_path / "async_io/lock").touch()
    assert f"{tmp_path / 'async_io/lock'} says that it is being compiled" in refusal(Builder())
    (tmp_path / "async_io/lock").unlink()
    (tmp_path / "async_io/async_io.so").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no compiler: apt-get install g++" in refusal(Builder())


def test_rounding_is_for_gpus() -> None:
    with pytest.raises(UsageError, match="leave it out, or run on GPUs"):
        load_quantizer(operators, torch.device("cpu"))


def test_files_go_to_a_folder_of_one_s_own_and_those_of_the_killed_are_removed(tmp_path: Path) -> None:
    first, second = own_folder(tmp_path), own_folder(tmp_path)
    assert first.parent == second.parent == tmp_path
    assert first != second
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    left = tmp_path / first.name.replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-")
    left.mkdir()
    own_folder(tmp_path)
    assert first.exists()
    assert not left.exists()


@pytest.mark.parametrize("place", ["nowhere", "file", "/proc"])
def test_a_place_that_can_t_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"deepspeed.nvme_path = '.*name a folder on a local disk"):
        own_folder(tmp_path / place)
