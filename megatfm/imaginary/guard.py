"""The device guard of the imaginary GPU: built with g++ on first use, kept in the user's cache, loaded before torch.

A CPU build of torch aborts when a "cuda" tensor needs a gradient, as it has no guard for that device. This one does
nothing. This module must not import torch.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from megatfm.errors import MegatfmError

log = logging.getLogger("megatfm")

SOURCE = Path(__file__).with_name("guard.cpp")
WITHOUT_GUARD = "leave --traced out: the modelled estimate needs no compiler"


def load_guard() -> None:
    """Load the guard, and build it first if necessary. Raises MegatfmError if that fails, or if torch is imported."""
    if "torch" in sys.modules:
        raise MegatfmError("the imaginary GPU must be loaded before torch: start it in a process of its own")
    library = build_guard()
    try:
        ctypes.CDLL(str(library))
    except OSError as error:  # damaged, of another machine's architecture, or on a disk mounted without execution
        raise MegatfmError(
            f"the imaginary GPU's guard can't be loaded ({error}): remove {library}, or set XDG_CACHE_HOME to a folder "
            f"from which libraries may be loaded, or {WITHOUT_GUARD}"
        ) from error


def build_guard(folder: Path | None = None) -> Path:
    """Return the library for this torch, and build it if it does not exist."""
    folder = folder or get_cache_folder()
    version, torch = metadata.version("torch"), _find_torch_folder()
    # The library has the path of torch's libraries built in.
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version} {torch}".encode()).hexdigest()[:16]
    library = folder / f"imaginary-{key}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise MegatfmError(
            f"the imaginary GPU needs a C++ compiler, and there is no g++: install it, or {WITHOUT_GUARD}"
        )
    log.info("building the imaginary GPU's device guard for torch %s (once, seconds): %s", version, library)
    try:
        _compile_guard(compiler, torch, library)
    except OSError as error:
        raise MegatfmError(
            f"the imaginary GPU's guard can't be built with {compiler} in {folder}: {error.strerror}: set CXX or "
            f"XDG_CACHE_HOME, or {WITHOUT_GUARD}"
        ) from error
    return library


def _compile_guard(compiler: str, torch: Path, library: Path) -> None:
    """Compile the guard beside its final name, and rename it. Raises OSError, and MegatfmError for a compiler error."""
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        process = subprocess.run(
            _make_compile_command(compiler, torch, Path(temporary)), capture_output=True, text=True, check=False
        )
        if process.returncode:
            stderr = process.stderr
            line = next((line for line in stderr.splitlines() if "error" in line), stderr[:200])
            raise MegatfmError(f"the imaginary GPU's guard does not build with {compiler}: {line}; {WITHOUT_GUARD}")
        Path(temporary).replace(library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def get_cache_folder() -> Path:
    """Return the folder of built libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatfm"


def _find_torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise MegatfmError("the imaginary GPU needs torch, which is not installed here")
    return Path(spec.origin).parent


def _make_compile_command(compiler: str, torch: Path, target: Path) -> list[str]:
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{torch}/include", str(SOURCE), "-o", str(target)]
    return [*shlex.split(compiler), *flags, f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
