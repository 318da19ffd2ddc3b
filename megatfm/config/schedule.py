"""Learning rates over a run, as factors on `optimizer.lr`, one section for each: its name says which."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

from megatfm.config.base import Section, union_by_name

Ratio = Annotated[float, Field(ge=0, le=1)]


class ScheduleSection(Section):
    """What every schedule has."""

    name: str
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0."""


class CosineSchedule(ScheduleSection):
    """Half a cosine from the highest rate down."""

    name: Literal["cosine"] = "cosine"
    min_lr_factor: Ratio = 0.1
    """The rate at the last step, as a part of the highest."""


class LinearSchedule(ScheduleSection):
    """A straight line from the highest rate down."""

    name: Literal["linear"] = "linear"
    min_lr_factor: Ratio = 0.1
    """The rate at the last step, as a part of the highest."""


class ConstantSchedule(ScheduleSection):
    """The highest rate to the end."""

    name: Literal["constant"] = "constant"


class InverseSqrtSchedule(ScheduleSection):
    """The highest rate times (warmup_steps / step)^1/2 (Vaswani et al. 2017, equation 3)."""

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: PositiveInt = Field(examples=[4000])
    """Steps over which the rate rises linearly from 0, and the unit of its fall."""


class WSDSchedule(ScheduleSection):
    """Warm-up, the highest rate, and a fall at the end (Hu et al. 2024; Hägele et al. 2024)."""

    name: Literal["wsd"] = "wsd"
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of the run, at its end, over which the rate falls."""
    decay_type: Literal["linear", "1-sqrt"] = "1-sqrt"
    """How it falls over the part t of that time: as 1 - t, or as 1 - t^1/2."""
    min_lr_factor: Ratio = 0.0
    """The rate at the last step, as a part of the highest."""


class PluginSchedule(ScheduleSection):
    """A schedule that a package in `plugins` registers, with keys of its own."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(examples=["my_schedule"])
    """The name under which it is registered."""


ScheduleConfig = Annotated[
    CosineSchedule | LinearSchedule | ConstantSchedule | InverseSqrtSchedule | WSDSchedule | PluginSchedule,
    union_by_name(
        CosineSchedule,
        LinearSchedule,
        ConstantSchedule,
        InverseSqrtSchedule,
        WSDSchedule,
        plugin=PluginSchedule,
    ),
]
