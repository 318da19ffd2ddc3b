"""megatfm: pretraining of transformers under any parallel layout, each proven to be the same computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | Path, device: str | torch.device = "cpu") -> torch.nn.Module:
    """The model of a run, a checkpoint or a folder in the Hugging Face format, in float32 and evaluation mode.

    Call it with `tokens` [batch, sequence]; it returns `.logits` and `.hidden`. Raises UsageError where nothing can be
    opened, MegatfmError where something is damaged or does not fit.
    """
    # Imported here, because importing megatfm must not import torch.
    from megatfm.convert.folder import is_hf_folder
    from megatfm.convert.pair import is_pair

    if is_hf_folder(path) or is_pair(path):
        from megatfm.convert.load import load_model as load_hf

        return load_hf(path, device)
    from megatfm.generate.load import load_model

    return load_model(path, device)
