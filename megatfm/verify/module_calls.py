"""Recorder of the plain model's module calls in a forward pass, from whose shapes traffic is computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import Config
from megatfm.engines.interface import compares_samples
from megatfm.split_points import Splittable
from megatfm.verify.expected_pipeline import ExpectedPipeline
from megatfm.verify.module_shardings import is_a, list_block_paths
from megatfm.verify.shrink import Arrays, objective_for

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Call of a module in the plain forward pass of one micro-batch.

    stage: pipeline stage, 0 without a pipeline. input_numel, output_numel: elements of the first input and output (0:
    no tensor). rows: first dim of the first input. is_loss: the output is a loss or several terms of one.
    has_gradient, input_has_gradient: the output and the first input require gradients. in_layer: the module is in a
    block or is one, and the backward pass reaches this block; is_layer_output: it is the block itself.
    saves_tensors_after: the block saves tensors for the backward pass after this call, so that recomputation repeats
    all of it. inputs: shapes, None for other arguments.
    expert_index: choices [B, T, K] of an experts module, `n_experts` where dropped. n_tokens: tokens of its input.
    """

    path: str
    stage: int
    input_numel: int
    output_numel: int
    rows: int
    is_loss: bool
    has_gradient: bool
    in_layer: bool = False
    saves_tensors_after: bool = False
    is_layer_output: bool = False
    input_has_gradient: bool = False
    expert_index: Tensor | None = None
    n_experts: int = 0
    n_tokens: int = 0
    inputs: tuple[Shape | None, ...] = ()


class ModuleCallRecorder:
    """Records the calls of a model's modules by forward hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.stage = 0
        self._calls: list[tuple[Call, int]] = []
        self._n_saved = 0
        self._block_start: int | None = None
        in_blocks = {model.get_submodule(path) for path in list_block_paths(model)}
        for path, module in model.named_modules():
            if module in in_blocks:
                module.register_forward_pre_hook(lambda *_: self._enter_block())
            module.register_forward_hook(partial(self._record, path))
            if module in in_blocks:
                module.register_forward_hook(lambda *_: self._leave_block())

    def count_saved_tensors(self) -> saved_tensors_hooks:
        """Return the context in which the model must run."""
        return saved_tensors_hooks(self._count_saved, lambda tensor: tensor)

    def pop_calls(self) -> list[Call]:
        """Return the calls recorded so far, and forget them."""
        calls = [call for call, _ in self._calls]
        self._calls = []
        return calls

    def _count_saved(self, tensor: Tensor) -> Tensor:
        self._n_saved += 1
        return tensor.detach()  # a tensor saved by its own node would form a cycle that is never freed

    def _enter_block(self) -> None:
        self._block_start = len(self._calls)

    def _leave_block(self) -> None:
        is_reached = self._calls[-1][0].has_gradient  # the block's own call is the last
        for i in range(self._block_start or 0, len(self._calls)):
            call, n_saved = self._calls[i]
            call = replace(call, in_layer=is_reached, saves_tensors_after=self._n_saved > n_saved)
            self._calls[i] = call, n_saved
        call, n_saved = self._calls[-1]
        self._calls[-1] = replace(call, is_layer_output=True), n_saved
        self._block_start = None

    def _record(self, path: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first, result = _find_tensor((*inputs, None)[0]), _find_tensor(output)
        rows = first.shape[0] if first.dim() else 1
        shapes = first.numel(), result.numel(), rows, result.dim() < 2, result.requires_grad
        input_shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in inputs)
        call = Call(path, self.stage, *shapes, input_has_gradient=first.requires_grad, inputs=input_shapes)
        if is_a(module, "Experts"):
            n_experts: int = module.n_experts  # type: ignore[assignment]
            kept_choices_BTK = inputs[2].where(output[1], n_experts)
            call = replace(call, expert_index=kept_choices_BTK, n_experts=n_experts, n_tokens=first.shape[:-1].numel())
        self._calls.append((call, self._n_saved))


def _find_tensor(value: Any) -> Tensor:
    """Return the first tensor in a value or (nested) tuple, such as a block's output; an empty one if there is none."""
    return next(_iter_tensors(value), torch.empty(0))


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _iter_tensors(item)


@dataclass(frozen=True)
class _StageOutput:
    """Model output with the fields that an objective reads."""

    losses: Mapping[str, Tensor]
    predictions: Any


def record_module_calls(
    config: Config, model: nn.Module, batch: Arrays, pipeline: ExpectedPipeline | None
) -> list[list[Call]]:
    """Run the plain model on the global batch and return the calls of each micro-batch."""
    recorder, objective, rows = ModuleCallRecorder(model), objective_for(config), config.train.micro_batch

    def run_stages(**inputs: Tensor) -> _StageOutput:
        assert pipeline is not None
        carry: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        predictions: Any = None
        for stage in pipeline.stages:
            recorder.stage = stage.index
            view = cast(Splittable, model).stage({point.name for point in stage.split_points})
            output = view.forward(**inputs, **{n: t for n, t in carry.items() if n in stage.inputs})
            carry, predictions = carry | output.carried(), output.predictions
            for term, loss in (output.losses or {}).items():
                losses[term] = losses[term] + loss if term in losses else loss
        return _StageOutput(losses, predictions)

    # The loss of compared samples is no module's: `add_contrastive_loss` counts it.
    run: Any = objective.features if pipeline and compares_samples(objective) else objective

    def iter_microbatches() -> Iterator[list[Call]]:
        for start in range(0, config.train.global_batch, rows):
            inputs = {name: torch.from_numpy(values[start : start + rows]) for name, values in batch.items()}
            with recorder.count_saved_tensors():
                run(cast(nn.Module, run_stages) if pipeline else model, inputs)
            yield recorder.pop_calls()

    return list(iter_microbatches())


def require_shapes(shapes: Sequence[Shape | None]) -> list[Shape]:
    """Return the shapes of arguments that must all be tensors."""
    present = [shape for shape in shapes if shape is not None]
    assert len(present) == len(shapes)
    return present


def get_latent_shapes(call: Call) -> list[Shape]:
    """Return the shapes of queries, and of the keys and values that all heads project from latents."""
    q, values = require_shapes([call.inputs[0], call.inputs[3]])
    return [q, q, (*q[:3], values[0] // q[1])]
