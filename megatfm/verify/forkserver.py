"""The process that rank processes are forked from, which imports for all of them.

This file imports nothing of megatfm, so that the server can start before the process that asks imports torch: both then
import at the same time.
"""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOAD = ["megatfm.verify.rank_processes", "megatfm.engines.native.engine", "torch._dynamo"]
"""Modules that a rank needs to build an engine and take a step; without them each rank imports the rest itself."""


def context() -> ForkServerContext:
    """The multiprocessing context in which rank processes start."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def start() -> None:
    """Have the server begin to import."""
    context()
    forkserver.ensure_running()
