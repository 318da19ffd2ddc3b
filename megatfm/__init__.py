"""megatfm: pretraining of transformers under any parallel layout, each proven to be the same computation."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatfm.generate.load import load_model as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`megatfm.load`, looked up at its first use: importing megatfm must not import torch."""
    if name == "load":
        from megatfm.generate.load import load_model

        return load_model
    raise AttributeError(f"module 'megatfm' has no attribute {name!r}")
