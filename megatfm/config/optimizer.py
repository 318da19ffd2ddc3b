"""Optimizers, one section for each: its name says which."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megatfm.config.base import Section, union_by_name

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean."""
Moments = tuple[Decay, Decay]


class OptimizerSection(Section):
    """What every optimizer has."""

    name: str
    lr: PositiveFloat = Field(examples=[3e-4])
    """Highest learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices and embeddings; norms, biases and other vectors never decay."""
    decay_embeddings: bool = True
    """Let embedding tables decay, too."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the rate from each block to the one below it, down to the embeddings; 1: the same rate for all."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Highest global gradient norm; 0: no clipping."""


class AdamWConfig(OptimizerSection):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    betas: Moments = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    moments_dtype: Literal["param", "bf16"] = "param"
    """Precision of AdamW's moments; full: the weights' own. bf16: half the memory, rounded up or down by chance."""


class MuonConfig(AdamWConfig):
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for all the rest."""

    name: Literal["muon"] = "muon"  # type: ignore[assignment]
    matrix_lr: PositiveFloat = Field(default=0.02, examples=[0.02])
    """Highest learning rate of the matrices that Muon moves."""
    momentum: Decay = 0.95
    """Decay of Muon's momentum."""
    newton_schulz_dtype: Literal["bf16", "param"] = "bf16"
    """Precision of the iteration that orthogonalises; full: the weights' own. bf16 takes less time and is the authors',
    but makes much of rounding, so that losses of two layouts differ by up to 1e-4."""


class SoapConfig(AdamWConfig):
    """SOAP (Vyas et al. 2024) for the blocks' matrices, AdamW with the same rate and moments for all the rest."""

    name: Literal["soap"] = "soap"  # type: ignore[assignment]
    betas: Moments = (0.95, 0.95)
    """Decay of the first and second moment; the second is that of the covariances, too."""
    precondition_frequency: PositiveInt = 10
    """Steps between updates of the eigenbases."""
    max_precond_dim: PositiveInt = 10_000
    """A longer dim of a matrix is left unrotated."""


class AdafactorConfig(OptimizerSection):
    """Adafactor (Shazeer & Stern 2018) without momentum; rates are relative to each tensor's root mean square."""

    name: Literal["adafactor"] = "adafactor"
    lr: PositiveFloat = Field(examples=[1e-2])
    """Highest relative rate; at step s never more than s^-1/2."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices and embeddings; norms, biases and other vectors never decay."""
    beta2_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """At step s the second moment keeps 1 - s^-beta2_decay of its past."""
    eps2: PositiveFloat = 1e-3
    """Tensors with a smaller root mean square move as if they had this one."""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """Highest root mean square of an update, before the rate."""


class LambConfig(OptimizerSection):
    """LAMB (You et al. 2020): Adam's update, scaled to the norm of each tensor; what doesn't decay isn't scaled."""

    name: Literal["lamb"] = "lamb"
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices and embeddings, inside the scaled update."""
    betas: Moments = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""


class LionConfig(OptimizerSection):
    """Lion (Chen et al. 2023): the sign of a momentum; wants about a fifth of AdamW's rate and five times its decay."""

    name: Literal["lion"] = "lion"
    betas: Moments = (0.9, 0.99)
    """Share of the momentum in an update, and decay of the momentum."""


class ScheduleFreeConfig(OptimizerSection):
    """Schedule-free AdamW (Defazio et al. 2024): averages weights instead of lowering the rate."""

    name: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    betas: Moments = (0.9, 0.999)
    """Where gradients are taken between last and averaged weights, and decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class PluginOptimizer(OptimizerSection):
    """An optimizer that a package in `plugins` registers, with keys of its own."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(examples=["my_optimizer"])
    """The name under which it is registered."""


OptimizerConfig = Annotated[
    AdamWConfig
    | MuonConfig
    | SoapConfig
    | AdafactorConfig
    | LambConfig
    | LionConfig
    | ScheduleFreeConfig
    | PluginOptimizer,
    union_by_name(
        AdamWConfig,
        MuonConfig,
        SoapConfig,
        AdafactorConfig,
        LambConfig,
        LionConfig,
        ScheduleFreeConfig,
        plugin=PluginOptimizer,
    ),
]
