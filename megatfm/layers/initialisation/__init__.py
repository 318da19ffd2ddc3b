"""How weights start: `initialiser(config)` maps what a matrix is for to a distribution."""

from megatfm.layers.initialisation import bert, gpt2, normal, t5, xavier
from megatfm.layers.initialisation.deepnorm import alpha_beta
from megatfm.layers.initialisation.registry import (
    INITIALISATIONS,
    Initialiser,
    Role,
    Stack,
    depth,
    initialiser,
)
from megatfm.layers.initialisation.walk import initialise, initials, set_buffers, stored_tensors

__all__ = [
    "INITIALISATIONS",
    "Initialiser",
    "Role",
    "Stack",
    "alpha_beta",
    "bert",
    "depth",
    "gpt2",
    "initialise",
    "initialiser",
    "initials",
    "normal",
    "set_buffers",
    "stored_tensors",
    "t5",
    "xavier",
]
