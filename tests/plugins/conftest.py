"""Plugins of the manual's pages, which configs name as if they were installed."""

import pytest

from tests.support.documentation import PLUGINS


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugins on the path of every test here."""
    monkeypatch.syspath_prepend(PLUGINS)
