"""Calibrations that run everything, and measure nothing."""

import pytest

from megatfm.estimate import trials


@pytest.fixture
def equal_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement runs once, and each of its parts takes a second."""
    monkeypatch.setattr(trials, "measure_in_turns", lambda measurements: [[1.0] * len(run()) for run in measurements])
