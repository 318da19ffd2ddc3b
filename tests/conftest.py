"""What all tests share: an environment without network and noise, and the worker processes."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

# Set while pytest loads this file, so before any test module imports torch, wandb or transformers.
os.environ.update(
    GLOO_SOCKET_IFNAME="lo",  # whatever the machine calls itself need not resolve
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",  # the numbers of a single process must not depend on the machine's cores
    WANDB_MODE="offline",
)

from hypothesis import settings

from tests.workers import Workers

# Busy machines are slow, not wrong; and CI is to say the same twice.
settings.register_profile("megatfm", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("megatfm")


SPLIT_FROM = 200
"""Tests of a file with so many are spread over processes one by one."""
SUMMARY = "scontrol show job"
"""A property of a test's report whose values are shown at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In parallel the tests of a file stay together, since they share what is made once for it, unless they are many;
    so do all those on a SLURM cluster."""
    sizes = Counter(item.path for item in items)
    for item in items:
        if sizes[item.path] < SPLIT_FROM:
            together = item.path.parent if item.path.parent.name == "slurm" else item.path
            item.add_marker(pytest.mark.xdist_group(str(together)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests recorded for the end, as a process of its own or through pytest-xdist."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    lines = [
        f"{report.nodeid.partition('::')[2]}: {value}"
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == SUMMARY
    ]
    if lines:
        terminalreporter.section(SUMMARY)
        for line in dict.fromkeys(lines):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """`workers.run(fn, world_size, *args)`: see tests/workers.py."""
    with Workers() as team:
        yield team
