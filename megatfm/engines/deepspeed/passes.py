"""Forward and backward passes through DeepSpeed's wrapper, and when it reduces gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.interface import Batch, LossFunction
from megatfm.engines.passes import GradientSync, LossScaler, Terms


class ModelWrapper(nn.Module):
    """What DeepSpeed takes for the model: an objective may use a model in more ways than by its forward."""

    def __init__(self, model: nn.Module, sign: nn.Module | None) -> None:
        super().__init__()
        self.model, self.moe_marker = model, sign

    def forward(self, run: Callable[[nn.Module], Tensor]) -> Tensor:
        """Whatever is to be computed of the model."""
        return run(self.model)


class DeepSpeedForwardBackward:
    """Forward and backward of each micro-batch in turn: see `engines.passes.Passes`."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine, self._model = engine, model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        found: list[Terms] = []
        for batch in batches:
            data.begin(is_last=batch is batches[-1])

            def run(model: nn.Module, batch: Batch = batch) -> Tensor:
                terms = objective(model, batch)
                found.append({name: term.detach() for name, term in terms.items()})
                return scale_loss(terms)

            self._engine.backward(self._engine(run), scale_wrt_gas=False)
        return found

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        found: Terms = {}

        def run(model: nn.Module) -> Tensor:
            found.update(objective(model, batch))
            return torch.stack(list(found.values()))

        self._engine(run)
        return found


class AccumulationBoundary:
    """Tells DeepSpeed which pass is a step's last, in or after which it reduces gradients.

    defers_offload: what it would do besides in the last pass, which is to copy gradients that it offloads, waits for
    the step.
    """

    def __init__(self, engine: Any, *, defers_offload: bool) -> None:
        self._engine, self._waits = engine, defers_offload

    def begin(self, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last and not self._waits)

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Gradients add up, whatever the order of the passes."""
        self._engine.set_gradient_accumulation_boundary(False)
        if hasattr(self._engine.optimizer, "set_gradient_accumulation_boundary"):
            self._engine.optimizer.set_gradient_accumulation_boundary(False)

    def reduce(self) -> None:
        """Sum gradients over data ranks, after a pipeline's last backward pass."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()
