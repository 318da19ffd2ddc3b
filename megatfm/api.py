"""What `import megatfm` offers to users; loaded at first use, since it imports torch."""

from pathlib import Path

import torch

from megatfm.convert.folder import is_hf_folder
from megatfm.convert.load import load_model as load_hf
from megatfm.convert.pair import is_pair
from megatfm.generate.load import load_model


def load(path: str | Path, device: str | torch.device = "cpu") -> torch.nn.Module:
    """The model of a run, a checkpoint or a folder in the Hugging Face format, in float32 and evaluation mode.

    Call it with `tokens` [batch, sequence]; it returns `.logits` and `.hidden`. Raises UsageError where nothing can be
    opened, MegatfmError where something is damaged or does not fit.
    """
    if is_hf_folder(path) or is_pair(path):
        return load_hf(path, device)
    return load_model(path, device)
