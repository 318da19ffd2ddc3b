"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2): gradients too small for it are lifted into
its range, and a step whose gradients leave the range at the other end is left out."""

from collections.abc import Mapping

import torch
from torch import Tensor

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 1.0
PATIENCE = 2000
"""Steps without an overflow after which the scale is doubled (that of torch.amp.GradScaler)."""
SCALE, STEPS = "engine.loss_scale", "engine.loss_scale_steps"


class LossScale:
    """The factor on the loss. All ranks see the same norm of the gradients, so they hold the same scale."""

    def __init__(self, first: float = FIRST, patience: int = PATIENCE) -> None:
        self.value, self._patience, self._steps = first, patience, 0

    def update(self, finite: bool) -> None:
        """After each step: whether its gradients were finite."""
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, SMALLEST)
        elif self._steps == self._patience:
            self.value, self._steps = min(self.value * 2, LARGEST), 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be the scale's fault: it isn't settled, or the gradients have grown."""
        return self.value > SMALLEST

    def state(self) -> dict[str, Tensor]:
        """The scale and the finite steps since it last changed, as scalars, so that a resume scales alike."""
        return {
            SCALE: torch.tensor(self.value, dtype=torch.float64),
            STEPS: torch.tensor(self._steps, dtype=torch.int64),
        }

    def load(self, state: Mapping[str, object]) -> None:
        """A checkpoint of another precision has no scale: then this one stays."""
        value, steps = state.get(SCALE), state.get(STEPS)
        if isinstance(value, Tensor) and isinstance(steps, Tensor):
            self.value, self._steps = value.item(), int(steps)
