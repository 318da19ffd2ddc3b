"""Traces of ranks on the imaginary GPU, forked from a process that loads the GPU's guard, then torch, once for all.

A fresh Python takes three to five seconds of a CPU before such a trace. That it traces the same is shown by those tests
of `tests/unit/imaginary` that don't ask for `forked_traces`.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

GPU = ("NVIDIA H100 80GB HBM3", (9, 0))
IMPORTED_LAST = (
    "torch.testing._internal.distributed.fake_pg", "megatfm.imaginary.step",
    "megatfm.train.build", "megatfm.engines.native.engine",
)  # fmt: skip
"""Modules of a trace, which are imported when torch reports a GPU."""


class TraceServer:
    """The process from which traces are forked: started by the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Do as subprocess.run, for `python -m megatfm.imaginary …` alone."""
        assert command[:3] == [sys.executable, "-m", "megatfm.imaginary"]
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked_traces"], cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        outputs = [self._folder / name for name in ("stdout", "stderr")]
        words = [*map(str, outputs), os.environ.get("PYTHONPATH", ""), *command[3:]]
        print(json.dumps(words), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(command, code, *(path.read_text() for path in outputs))

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()  # it ends with its input


@pytest.fixture(scope="session")
def trace_server() -> Iterator[TraceServer]:
    with tempfile.TemporaryDirectory(prefix="megatfm-traces-") as folder:
        server = TraceServer(Path(folder))
        yield server
        server.end()


@pytest.fixture
def forked_traces(trace_server: TraceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_trace` forks."""
    replaced = SimpleNamespace(run=trace_server.run, TimeoutExpired=TimeoutError)
    monkeypatch.setattr(
        "megatfm.estimate.traced.subprocess", replaced
    )  # by name: the process must not import torch here


# ------------------------------------------------------------------------------------------------ in the process


def serve_traces() -> None:
    """Import as a trace does, in the same order, and fork for each line of the input."""
    guard: Any = importlib.import_module("megatfm.imaginary.guard")
    guard.load_guard()
    guard.load_guard = lambda: None
    device: Any = importlib.import_module("megatfm.imaginary.device")
    device.install_torch_stubs(*GPU)
    device.install_torch_stubs = check_gpu
    for name in IMPORTED_LAST:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            run_forked_trace(*json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def check_gpu(*gpu: Any) -> None:
    """Refuse a GPU that is not the installed one."""
    assert gpu == GPU


def run_forked_trace(output: str, errors: str, python_path: str, *words: str) -> NoReturn:
    """Trace as `python -m megatfm.imaginary words` does, into two files."""
    code = 1
    sys.path[:0] = filter(None, python_path.split(os.pathsep))
    try:
        for number, path in enumerate((output, errors), 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = importlib.import_module("megatfm.imaginary.trace").main(words)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve_traces()
