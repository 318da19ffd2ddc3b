"""Calls of the plain model's modules in a forward pass: the shapes from which traffic is computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import Config
from megatfm.split_points import Splittable
from megatfm.verify.expected_pipeline import Stages
from megatfm.verify.module_cuts import block_paths, is_a
from megatfm.verify.shrink import Arrays, objective_for

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A module's call in the plain forward pass of one micro-batch.

    stage: of the pipeline (0 where there is none). input_numel, output_numel: elements of its first input and output
    (0: no tensor). rows: of the input. is_loss: the output is a loss, or several terms of one. in_layer: it lies in a
    block, is_layer_output: it is one.
    saves_tensors_after: the block keeps something for the backward pass after this call, so that recomputing the
    block goes through all of it.
    given_has_gradient: of its first input. inputs: the shapes of those that are tensors. expert_index: of experts,
    the choices [B, T, K] that are taken, `n_experts` for others; n_tokens: of their input.
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
    given_has_gradient: bool = False
    expert_index: Tensor | None = None
    n_experts: int = 0
    n_tokens: int = 0
    inputs: tuple[Shape | None, ...] = ()


class ModuleCallRecorder:
    """Records the calls of a model's modules until `pop_calls`."""

    def __init__(self, model: nn.Module) -> None:
        self.stage = 0
        self._calls: list[tuple[Call, int]] = []
        self._kept = 0
        self._inside: int | None = None
        in_blocks = {model.get_submodule(path) for path in block_paths(model)}
        for path, module in model.named_modules():
            if module in in_blocks:
                module.register_forward_pre_hook(lambda *_: self._enter())
            module.register_forward_hook(partial(self._record, path))
            if module in in_blocks:
                module.register_forward_hook(lambda *_: self._leave())

    def recording(self) -> saved_tensors_hooks:
        """Context in which the model runs."""
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def pop_calls(self) -> list[Call]:
        """The calls since the last time."""
        calls = [call for call, _ in self._calls]
        self._calls = []
        return calls

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept += 1
        return tensor.detach()  # a tensor kept by its own node would form a cycle that is never freed

    def _enter(self) -> None:
        self._inside = len(self._calls)

    def _leave(self) -> None:
        for i in range(self._inside or 0, len(self._calls)):
            call, references = self._calls[i]
            self._calls[i] = (
                replace(call, in_layer=True, saves_tensors_after=self._kept > references),
                references,
            )
        if self._calls:
            call, references = self._calls[-1]
            self._calls[-1] = replace(call, is_layer_output=True), references
        self._inside = None

    def _record(self, path: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first, result = _tensor((*inputs, None)[0]), _tensor(output)
        rows = first.shape[0] if first.dim() else 1
        shapes = first.numel(), result.numel(), rows, result.dim() < 2, result.requires_grad
        input_shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in inputs)
        call = Call(path, self.stage, *shapes, given_has_gradient=first.requires_grad, inputs=input_shapes)
        if is_a(module, "Experts"):
            n_experts: int = module.n_experts  # type: ignore[assignment]
            taken_BTK = inputs[2].where(output[1], n_experts)
            call = replace(
                call, expert_index=taken_BTK, n_experts=n_experts, n_tokens=first.shape[:-1].numel()
            )
        self._calls.append((call, self._kept))


def _tensor(value: Any) -> Tensor:
    """A tensor, or the first of a tuple, in which there may be others, as a block's output comes first; else an empty
    one."""
    return next(_tensors(value), torch.empty(0))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True)
class _StageOutput:
    """The part of a model's output that an objective reads."""

    losses: Mapping[str, Tensor]


def record_module_calls(
    config: Config, model: nn.Module, batch: Arrays, pipeline: Stages | None
) -> list[list[Call]]:
    """The calls of each micro-batch of the global batch, in its order."""
    recorder, objective, rows = ModuleCallRecorder(model), objective_for(config), config.train.micro_batch

    def through_stages(**inputs: Tensor) -> _StageOutput:
        assert pipeline is not None
        carry: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        for stage in pipeline.stages:
            recorder.stage = stage.index
            view = cast(Splittable, model).stage({point.name for point in stage.split_points})
            output = view.forward(**inputs, **{n: t for n, t in carry.items() if n in stage.takes})
            carry |= output.carried()
            for term, loss in (output.losses or {}).items():
                losses[term] = losses[term] + loss if term in losses else loss
        return _StageOutput(losses)

    def micro_batches() -> Iterator[list[Call]]:
        for start in range(0, config.train.global_batch, rows):
            inputs = {name: torch.from_numpy(values[start : start + rows]) for name, values in batch.items()}
            with recorder.recording():
                objective(cast(nn.Module, through_stages) if pipeline else model, inputs)
            yield recorder.pop_calls()

    return list(micro_batches())


def known_shapes(shapes: Sequence[Shape | None]) -> list[Shape]:
    """Shapes of arguments, each of which is a tensor."""
    present = [shape for shape in shapes if shape is not None]
    assert len(present) == len(shapes)
    return present


def qkv_of_latents(call: Call) -> list[Shape]:
    """Shapes of queries, and of keys and values that are made of latents by matrices of all heads."""
    q, values = known_shapes([call.inputs[0], call.inputs[3]])
    return [q, q, (*q[:3], values[0] // q[1])]
