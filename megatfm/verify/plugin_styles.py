"""Styles of plugins, of which nobody but their author knows what they send: what they promise in `sends` is held."""

from megatfm.parallel.styles import STYLES, ParallelStyle


def promised(name: str) -> ParallelStyle:
    """The style of a plan that a plugin registered under a name."""
    return STYLES.get(name)
