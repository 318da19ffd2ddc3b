"""Fork server of rank processes, which imports torch and megatfm once for all of them.

Imports nothing of megatfm itself, so that the server starts before the calling process imports torch, and both import
at the same time.
"""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOAD = ["megatfm.verify.rank_processes", "megatfm.engines.native.engine", "torch._dynamo"]
"""Modules that a rank needs to build an engine and take a step."""


def get_context() -> ForkServerContext:
    """Return the multiprocessing context in which rank processes start."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def start_server() -> None:
    """Start the server, which begins to import."""
    get_context()
    forkserver.ensure_running()
