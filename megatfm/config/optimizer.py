"""Optimizers, one section for each: its name says which."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megatfm.config.base import Section


class AdamWConfig(Section):
    """AdamW (Loshchilov & Hutter 2019); matrices decay, norms and other vectors don't."""

    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat = Field(examples=[3e-4])
    """Highest learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the matrices."""
    clip: NonNegativeFloat = 1.0
    """Highest global gradient norm; 0: no clipping."""


class MuonConfig(AdamWConfig):
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW with the fields above for all the rest."""

    name: Literal["muon"] = "muon"  # type: ignore[assignment]
    matrix_lr: PositiveFloat = Field(default=0.02, examples=[0.02])
    """Highest learning rate of the matrices that Muon moves."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's momentum."""


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="name")]
