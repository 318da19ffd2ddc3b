"""A folder in the Hugging Face format as a model of ours."""

import logging
from pathlib import Path

import torch
from torch import nn

from megatfm.convert.convert import meta_shapes, ours_of
from megatfm.convert.pair import open_folder
from megatfm.layers.initialisation import set_buffers
from megatfm.models import build
from megatfm.ops.aligned import aligned

log = logging.getLogger("megatfm")


def load_model(path: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """The model, in float32 and in evaluation mode. Raises UsageError, MegatfmError."""
    opened = open_folder(path)
    for note in opened.notes:
        log.warning("%s: %s", path, note)
    model = build(opened.config)
    set_buffers(model)
    for name, tensor in ours_of(opened, meta_shapes(opened.config)):
        # In place, so that tied modules keep sharing it.
        model.get_parameter(name).data = aligned(tensor.float())
    return model.eval().to(device)
