"""Initial values of whole models: every parameter and buffer as the `initial` of its module says."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatfm.ops.initial import InitDistribution, draw


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Set all parameters and buffers of a whole model; a tied parameter has one name, that of its first module."""
    for name, tensor, init in iter_inits(model):
        shape = tuple(tensor.shape)
        tensor.copy_(draw(init, seed, name, shape, (0,) * tensor.dim(), shape))


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is stored of a model, by name: parameters, a tied one once, and buffers that were made persistent."""
    stored = model.state_dict(keep_vars=True).items()
    return {
        **dict(model.named_parameters()),
        **{name: tensor for name, tensor in stored if not isinstance(tensor, nn.Parameter)},
    }


@torch.no_grad()
def initialise_buffers(model: nn.Module) -> None:
    """Set the buffers of a whole model, as they begin; most are not stored with it, but follow from the config."""
    for _, tensor, init in iter_inits(model):
        if not isinstance(tensor, nn.Parameter):
            shape = tuple(tensor.shape)
            tensor.copy_(draw(init, 0, "", shape, (0,) * len(shape), shape))


def iter_inits(model: nn.Module) -> Iterator[tuple[str, Tensor, InitDistribution]]:
    """Name, tensor and initial value of every parameter and buffer, from the `initial` of the modules."""
    for path, module in model.named_modules():
        for key, init in getattr(module, "initial", {}).items():
            yield f"{path}.{key}", getattr(module, key), init
