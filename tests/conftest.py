"""Shared by all tests: an environment without network and noise, seeds, signals, and the worker processes."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Set while pytest loads this file, so before any test module imports torch, wandb or transformers.
os.environ.update(
    GLOO_SOCKET_IFNAME="lo",  # whatever the machine calls itself need not resolve
    HF_HUB_OFFLINE="1",
    # The numbers of a single process must not depend on the machine's cores; `make test-cpus` takes two threads, too.
    OMP_NUM_THREADS=os.environ.get("MEGATFM_TEST_THREADS", "1"),
    TORCHINDUCTOR_COMPILE_THREADS="1",  # in the process itself: helpers of its own would each import torch first
    WANDB_MODE="offline",
)

from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

gc.disable()  # until libraries and test modules are imported: they make much and drop little
pytest.register_assert_rewrite("tests.support")  # so that its assertions show their values, too

from megatfm import terminal  # noqa: E402
from tests.support.process_state import (  # noqa: E402
    assert_unchanged_process,
    forget_plugins,
    leave_files_in_page_cache,
    restore_environment,
    seed_by_name,
)
from tests.support.slurm_cluster import JOB_REPORT_PROPERTY  # noqa: E402
from tests.support.workers import GARBAGE_THRESHOLD, Workers  # noqa: E402

gc.set_threshold(GARBAGE_THRESHOLD)
leave_files_in_page_cache()
atexit.register(gc.unfreeze)  # libraries say so where any of their objects is left

# Busy machines are slow, not wrong; and CI is to say the same twice.
settings.register_profile("megatfm", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("megatfm")


SIGNAL_MASK = signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""Signals that the process blocked at its start: fixtures of a module may block more before a test begins."""
CLUSTER = "tests/e2e/slurm/"
INDEPENDENT = {
    "tests/parity/test_combinations.py", "tests/unit/imaginary/test_walk.py", "tests/unit/verify/test_expected.py"
}  # fmt: skip
"""Files of many small tests that any process may run: the last ones, so that all processes end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put independent tests last."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] in INDEPENDENT)


class FileScheduling(LoadScopeScheduling):
    """Tests share what is made once for their file, those on a SLURM cluster the cluster; some share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in INDEPENDENT:
            return nodeid
        return CLUSTER if file.startswith(CLUSTER) else file


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:  # after the collection, in the process that starts those of `-n` too
    """Leave what a session keeps to its end out of each search for garbage."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """(xdist_group marks have no effect with pytest 9.2 and xdist 3.8.)"""
    return FileScheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded for the summary, with or without pytest-xdist."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    lines = [
        f"{report.nodeid.partition('::')[2]}: {value}"
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == JOB_REPORT_PROPERTY
    ]
    if lines:
        terminalreporter.section(JOB_REPORT_PROPERTY)
        for line in dict.fromkeys(lines):
            terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Seed a fixture by the test's name, or by its own place where it is made once for several tests."""
    owner = request.node.nodeid if fixturedef.scope == "function" else fixturedef.baseid
    seed_by_name(f"{owner} {fixturedef.argname}")


@pytest.fixture(autouse=True)
def unchanged_signal_mask() -> Iterator[None]:
    """Restore the signals that a command in this process blocks: processes of later tests would inherit that."""
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, SIGNAL_MASK)


@pytest.fixture(autouse=True, scope="module")
def restored_environment() -> Iterator[None]:
    """Variables that fixtures of a module set, or libraries for them, reach no other module."""
    with restore_environment():
        yield


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Lines are logged once in each test, plugins that it imports are forgotten, and it changes nothing else."""
    terminal._LOGGED.clear()
    with assert_unchanged_process(), restore_environment(), forget_plugins():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed a test by its name, whatever its fixtures drew."""
    seed_by_name(item.nodeid)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """`workers.run(fn, world_size, *args)`: see tests/support/workers.py."""
    with Workers() as team:
        yield team
