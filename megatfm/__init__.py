"""megatfm: pretraining of transformers under any parallel layout, each proven to be the same computation."""

from typing import TYPE_CHECKING, Any

from megatfm.version import __version__

if TYPE_CHECKING:
    from megatfm.api import load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatfm import api  # at its first use, because importing megatfm must not import torch

    return getattr(api, name)
