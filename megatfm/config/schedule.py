"""Learning-rate schedules, one section for each."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from megatfm.config.base import Section


class ScheduleConfig(Section):
    """The learning rate over the run, as a factor on `optimizer.lr`."""

    name: str = "cosine"
    """Registered schedule."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The rate at the last step, as a part of the highest."""
