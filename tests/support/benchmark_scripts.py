"""Benchmark scripts, loaded as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """Load a script, which finds those beside it; none stays importable by its bare name, which may be a library's."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(module)
    for path in BENCHMARKS.glob("*.py"):
        if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
            del sys.modules[path.stem]
    return module
