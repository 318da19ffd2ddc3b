"""What a run does about machines that break and numbers that go wrong."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatfm.config.base import Section


class ResilienceConfig(Section):
    """Checks before and during training, and what happens when one fails."""

    preflight: bool = True
    """Before the first step, try the disk, the memory and a collective on every axis."""
    elastic: bool = False
    """Where the layout or the micro-batch doesn't fit the processes that are there, take the nearest that does."""
    max_failures: PositiveInt = 3
    """Restarts in a row without a new checkpoint after which a run gives up (exit 76), under torchrun's agent."""
    max_skipped: NonNegativeInt = 10
    """Steps in a row that are skipped because loss or gradient is not finite; one more ends the run."""
    spike: Literal["off", "report", "rollback"] = "report"
    """A loss spike: report it, or also go back to the last checkpoint and skip the data since then."""
    spike_score: PositiveFloat = 10.0
    """What counts as a spike: (loss − median) / (1.4826 · median absolute deviation) of the last steps."""
    spike_window: Annotated[int, Field(ge=16)] = 128
    """Steps that the score looks back on; before a quarter of them are done, nothing counts as a spike."""
    max_rollbacks: PositiveInt = 3
    """Rollbacks to one checkpoint; one more ends the run."""
    replay_every: NonNegativeInt = 0
    """Every so many steps, compute the gradients twice and compare them bit for bit. 0: never."""
    compare_replicas_every: NonNegativeInt = 0
    """Every so many steps, compare hashes of the weights and the optimizer state over dp_replicate. 0: never."""
