"""DeepSpeed's compiled operators: what is missing is one line with the way out."""

import subprocess
from pathlib import Path

import pytest
import torch

from megatfm.engines.deepspeed import library
from megatfm.engines.deepspeed.library import load_quantizer
from megatfm.errors import UsageError


class Builder:
    """As much of DeepSpeed's as is asked for."""

    name = "quantizer"

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles

    def is_compatible(self, verbose: bool) -> bool:
        return self.compiles


def refusal(builder: Builder) -> str:
    with pytest.raises(UsageError) as actual:
        library._compiled(builder, "this needs the quantizer", "compile it")
    assert "\n" not in str(actual.value)
    return str(actual.value)


def test_an_operator_that_can_t_be_had_is_refused_and_never_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", None)
    assert "which isn't compiled yet: " in refusal(Builder())
    assert "compile it" in refusal(Builder())
    assert "doesn't compile here" in refusal(Builder(compiles=False))
    (tmp_path / "quantizer/quantizer.so").write_bytes(b"not for this torch")
    assert f"remove {tmp_path / 'quantizer'}" in refusal(Builder())
    (tmp_path / "quantizer/lock").touch()
    assert f"{tmp_path / 'quantizer/lock'} says that it is being compiled" in refusal(Builder())
    (tmp_path / "quantizer/lock").unlink()
    (tmp_path / "quantizer/quantizer.so").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no compiler: apt-get install g++" in refusal(Builder())


def test_rounding_is_for_gpus() -> None:
    with pytest.raises(UsageError, match=r"deepspeed.quantized_weights on 'cpu': .*, or run on GPUs"):
        load_quantizer(library, torch.device("cpu"), "deepspeed.quantized_weights")
