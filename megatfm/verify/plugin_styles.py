"""Parallel styles of plugins, whose expected traffic is the one that they declare in `communication`."""

from megatfm.parallel.styles import STYLES, ParallelStyle


def get_plugin_style(name: str) -> ParallelStyle:
    """Return the parallel style that a plugin registered under a name."""
    return STYLES.get(name)
