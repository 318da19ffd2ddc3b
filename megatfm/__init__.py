"""megatfm: pretraining of transformers under any parallel layout, each checked to be the same computation."""

from typing import TYPE_CHECKING, Any

from megatfm.version import __version__

if TYPE_CHECKING:
    from megatfm.api import Model, fit, load
    from megatfm.config import Config, load_config

__all__ = ["Config", "Model", "__version__", "fit", "load", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("Config", "load_config"):
        from megatfm import config

        return getattr(config, name)
    from megatfm import api  # only at first use: `import megatfm` must not import torch

    return getattr(api, name)
