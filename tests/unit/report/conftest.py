"""A made-up run directory with everything in it."""

from pathlib import Path

import pytest

from tests.support.small_runs import write_reported_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run."""
    return write_reported_run(tmp_path)
