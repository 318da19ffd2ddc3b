"""DeepSpeed's compiled operators: loaded as they were compiled, and never compiled here."""

import importlib
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.cpp_extension import _get_build_directory, _import_module_from_library

from megatfm.engines.deepspeed.library import quiet
from megatfm.errors import UsageError

HOW = "python -c 'from deepspeed.ops.op_builder import {name} as B; B().load()' does it, once"


@quiet()
def load_quantizer(package: ModuleType, device: torch.device, what: str) -> None:
    """What rounds to 8 and 4 bits, for these keys. Raises UsageError where there is none."""
    if device.type != "cuda":
        raise UsageError(
            f"{what} on {device.type!r}: its operator is CUDA's alone: leave it out, or run on GPUs"
        )
    _load(package, "QuantizerBuilder", what, "or leave it out")


def _load(package: ModuleType, name: str, what: str, way_out: str) -> None:
    """Let DeepSpeed find an operator: by itself it would compile it, or compile it again under another ninja."""
    builder = getattr(package.ops.op_builder, name)()
    known: Any = importlib.import_module("deepspeed.git_version_info")
    if not known.installed_ops.get(builder.name) and builder.name not in builder._loaded_ops:
        needs = f"{what} needs DeepSpeed's operator {builder.name}"
        builder._loaded_ops[builder.name] = _compiled(builder, needs, f"{HOW.format(name=name)}, {way_out}")
    builder.load(verbose=False)


def _compiled(builder: Any, needs: str, how: str) -> ModuleType:
    """An operator out of the folder where torch compiles extensions."""
    folder = Path(_get_build_directory(builder.name, verbose=False))
    library, lock = folder / f"{builder.name}.so", folder / "lock"
    if lock.exists():
        raise UsageError(
            f"{needs}, and {lock} says that it is being compiled: wait for that, or, if nothing compiles here "
            "(`megatfm doctor` tells), remove that file"
        )
    if library.exists():
        try:
            module: ModuleType = _import_module_from_library(builder.name, str(folder), True)
        except ImportError as error:
            why = f"{library} can't be loaded ({error}): remove {folder}, and compile it for this torch"
            raise UsageError(f"{needs}, but {why}: {how}") from None
        return module
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise UsageError(
            f"{needs}, which isn't compiled, and there is no compiler: apt-get install g++; {how}"
        )
    if not builder.is_compatible(verbose=False):
        raise UsageError(f"{needs}, which doesn't compile here: `megatfm doctor` tells more; {how}")
    raise UsageError(f"{needs}, which isn't compiled yet: {how}")
