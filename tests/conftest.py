"""What all tests share: an environment without network and noise, and the worker processes."""

import os
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


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """`workers.run(fn, world_size, *args)`: see tests/workers.py."""
    with Workers() as team:
        yield team
