"""The `[optimizer]` and `[lr_schedule]` sections. Schedules are factors on `optimizer.lr`."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megatfm.config.parts import ByName, PartName
from megatfm.config.section import Fraction, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean."""
Moments = tuple[Decay, Decay]


class OptimizerSection(Section):
    """Keys of every optimizer."""

    name: str
    lr: PositiveFloat = Field(examples=[3e-4])
    """Highest learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices and embeddings; norms, biases and other vectors never decay."""
    decay_embeddings: bool = True
    """Apply weight decay to embedding tables, too."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the rate from each block to the one below it, down to the embeddings; 1: the same rate for all."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Highest global gradient norm; 0: no clipping."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and saved in their place; left out,
    none."""


class AdamWConfig(OptimizerSection):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    betas: Moments = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    moments_dtype: Literal["param", "bf16"] = "param"
    """Precision of AdamW's moments. param: the weights'. bf16: half the memory, with stochastic rounding."""


class MuonConfig(AdamWConfig):
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for all other weights."""

    name: Literal["muon"] = "muon"  # type: ignore[assignment]
    matrix_lr: PositiveFloat = Field(default=0.02, examples=[0.02])
    """Highest learning rate of Muon's matrices."""
    momentum: Decay = 0.95
    """Decay of Muon's momentum."""
    newton_schulz_dtype: Literal["bf16", "param"] = "bf16"
    """Precision of the orthogonalisation. param: the weights'. bf16 is faster and the authors' choice, but amplifies
    rounding: losses of two layouts differ by up to 1e-4."""


class SoapConfig(AdamWConfig):
    """SOAP (Vyas et al. 2024) for the blocks' matrices, AdamW with the same rate and betas for all other weights."""

    name: Literal["soap"] = "soap"  # type: ignore[assignment]
    betas: Moments = (0.95, 0.95)
    """Decay of the first and second moment; the second is also that of the covariances."""
    precondition_frequency: PositiveInt = 10
    """Steps between updates of the eigenbases."""
    max_precond_dim: PositiveInt = 10_000
    """Longest dim of a matrix that is rotated."""


class AdafactorConfig(OptimizerSection):
    """Adafactor (Shazeer & Stern 2018) without momentum; rates are relative to each tensor's root mean square."""

    name: Literal["adafactor"] = "adafactor"
    lr: PositiveFloat = Field(examples=[1e-2])
    """Highest relative rate; at step s never more than s^-1/2."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices and embeddings; norms, biases and other vectors never decay."""
    beta2_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Decay of the second moment at step s: 1 − s^-beta2_decay."""
    eps2: PositiveFloat = 1e-3
    """Smallest root mean square that scales a tensor's rate."""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """Highest root mean square of an update, before the rate."""


class LambConfig(OptimizerSection):
    """LAMB (You et al. 2020): Adam's update, scaled to each tensor's norm; tensors without decay are not scaled."""

    name: Literal["lamb"] = "lamb"
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices and embeddings, inside the scaled update."""
    betas: Moments = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""


class LionConfig(OptimizerSection):
    """Lion (Chen et al. 2023): the sign of a momentum. Use about a fifth of AdamW's rate and five times its decay."""

    name: Literal["lion"] = "lion"
    betas: Moments = (0.9, 0.99)
    """Share of the momentum in an update, and decay of the momentum."""


class ScheduleFreeConfig(OptimizerSection):
    """Schedule-free AdamW (Defazio et al. 2024): averages weights instead of lowering the rate."""

    name: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    betas: Moments = (0.9, 0.999)
    """Position between last and averaged weights at which gradients are taken, and decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class PluginOptimizer(OptimizerSection):
    """An optimizer that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("optimizer")] = Field(examples=["my_optimizer"])
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
    ByName(),
]


class ScheduleSection(Section):
    """Keys of every schedule."""

    name: str
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0."""


class CosineSchedule(ScheduleSection):
    """Half a cosine from the highest rate down."""

    name: Literal["cosine"] = "cosine"
    min_lr_factor: Fraction = 0.1
    """The rate at the last step, as a part of the highest."""


class LinearSchedule(ScheduleSection):
    """A straight line from the highest rate down."""

    name: Literal["linear"] = "linear"
    min_lr_factor: Fraction = 0.1
    """The rate at the last step, as a part of the highest."""


class ConstantSchedule(ScheduleSection):
    """The highest rate to the end."""

    name: Literal["constant"] = "constant"


class InverseSqrtSchedule(ScheduleSection):
    """The highest rate times (warmup_steps / step)^1/2 (Vaswani et al. 2017, equation 3)."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: PositiveInt = Field(examples=[4000])
    """Steps over which the rate rises linearly from 0, and the time unit of its decay."""


class WSDSchedule(ScheduleSection):
    """Warm-up, the highest rate, and a decay at the end (Hu et al. 2024; Hägele et al. 2024)."""

    name: Literal["wsd"] = "wsd"
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the run, at its end, over which the rate decays."""
    decay_type: Literal["linear", "1-sqrt"] = "1-sqrt"
    """Shape of the decay over the fraction t of that time: 1 − t, or 1 − t^1/2."""
    min_lr_factor: Fraction = 0.0
    """The rate at the last step, as a part of the highest."""


class PluginSchedule(ScheduleSection):
    """A schedule that a package in `plugins` registers, with its own keys."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, PartName("schedule")] = Field(examples=["my_schedule"])
    """The name under which it is registered."""


ScheduleConfig = Annotated[
    CosineSchedule | LinearSchedule | ConstantSchedule | InverseSqrtSchedule | WSDSchedule | PluginSchedule, ByName()
]
