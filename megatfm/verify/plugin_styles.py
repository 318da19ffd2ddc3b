"""Styles of plugins, whose traffic only their authors know: what they promise in `sends` is held."""

from megatfm.parallel.styles import STYLES, ParallelStyle


def promised(name: str) -> ParallelStyle:
    """The style of a plan that a plugin registered under a name."""
    return STYLES.get(name)
