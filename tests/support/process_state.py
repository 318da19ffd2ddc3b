"""State of the process around each test: seeds by its name, plugins forgotten, all else as before.

Files of tests stay in the page cache: what a process wrote outlives it there, and no test takes the power away. Waiting
for the disk took a third of the time of tests that write many files, or more. Which files are synced, and in which
order, is shown by tests that replace or record `os.fsync` (`power_loss.py`); fresh Pythons call the real one.
"""

import locale
import logging
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from megatfm import registry
from megatfm.registry import Registry

SIGNALS = sorted(signal.valid_signals() - {signal.SIGALRM})
"""Signals of tests without SIGALRM, which pytest-timeout handles until a test fails."""
OF_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "TOKENIZERS_")
"""Beginnings of the environment variables that libraries set when they are imported or used: these stay."""


def describe_process() -> dict[str, object]:
    """Settings of the process, of Python and of torch, by name."""
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "current directory": os.getcwd(),  # noqa: PTH109
        "umask": umask,
        "locale": locale.setlocale(locale.LC_ALL),
        "signal handlers": [signal.getsignal(number) for number in SIGNALS],
        "logging": (logging.root.level, logging.root.manager.disable, logging.getLogger("megatfm").level),
        "torch's dtype": torch.get_default_dtype(),
        "torch's threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "unwritten memory filled": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }


@contextmanager
def restore_environment() -> Iterator[None]:
    """Restore environment variables and Python's path at the end; both may have been changed by libraries."""
    variables, path = dict(os.environ), [*sys.path]
    try:
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            if not name.startswith(OF_LIBRARIES):
                del os.environ[name]
        os.environ.update(variables)
        sys.path[:] = path


@contextmanager
def assert_unchanged_process() -> Iterator[None]:
    """Assert that the settings are the same at the end."""
    before = describe_process()
    yield
    after = describe_process()
    assert {name: (before[name], after[name]) for name in after if after[name] != before[name]} == {}


@cache
def list_registries(n_modules: int) -> list[Registry[Any]]:
    """All registries of the modules of megatfm, looked for again when there are more modules."""
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "megatfm"]
    values = (value for module in modules for value in vars(module).values() if isinstance(value, Registry))
    return list({id(value): value for value in values}.values())


@contextmanager
def forget_plugins() -> Iterator[None]:
    """At the end, take parts of plugins out of their registries, and the plugins out of Python's modules."""
    modules = set(sys.modules)
    known = {(table.kind, name) for table in list_registries(len(modules)) for name in table._places}
    imported, used = set(registry._imported_plugins), dict(registry._places_of_used_parts)
    try:
        yield
    finally:
        files = set()
        for table in list_registries(len(sys.modules)):
            for name in [name for name in table._places if (table.kind, name) not in known]:
                files.add(table._places.pop(name).rpartition(":")[0])
                del table._parts[name], registry._names_of_plugins[table.kind][name]
        plugins = registry._imported_plugins - imported
        for name in sys.modules.keys() - modules:
            if name.partition(".")[0] in plugins or getattr(sys.modules[name], "__file__", None) in files:
                del sys.modules[name]
        registry._imported_plugins -= plugins
        registry._places_of_used_parts.clear()
        registry._places_of_used_parts.update(used)


def seed_by_name(name: str) -> int:
    """Seed the global generators of torch and NumPy; returns the seed.

    Python's own is left alone: ports are drawn from it, and two runs of a test beside one another need unlike ones.
    """
    seed = zlib.crc32(name.encode())
    if has_gpu():
        torch.manual_seed(seed)
    else:  # `manual_seed` keeps its stack for each kind of device that may yet come: a millisecond, for each fixture
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    return seed


@cache
def has_gpu() -> bool:
    """Whether torch sees a GPU, asked before any test acts as one."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()


def check_descriptor(fd: Any) -> None:
    """Raise as fsync does if a file, or its descriptor, is closed; write nothing."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


def leave_files_in_page_cache() -> None:
    """Replace fsync in this process and its forks."""
    os.fsync = check_descriptor
