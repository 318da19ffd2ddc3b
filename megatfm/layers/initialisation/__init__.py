"""How weights start: `initialiser(config)` maps what a matrix is for to a distribution."""

from megatfm.layers.initialisation import bert, gpt2, normal, t5, xavier
from megatfm.layers.initialisation.deepnorm import deepnorm_constants
from megatfm.layers.initialisation.registry import (
    INITIALISATIONS,
    Initialiser,
    Role,
    StackKind,
    depth,
    initialiser,
)
from megatfm.layers.initialisation.walk import checkpoint_tensors, initialise, initialise_buffers, iter_inits

__all__ = [
    "INITIALISATIONS",
    "Initialiser",
    "Role",
    "StackKind",
    "bert",
    "checkpoint_tensors",
    "deepnorm_constants",
    "depth",
    "gpt2",
    "initialise",
    "initialise_buffers",
    "initialiser",
    "iter_inits",
    "normal",
    "t5",
    "xavier",
]
