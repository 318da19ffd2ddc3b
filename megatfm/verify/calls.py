"""What the plain model's modules see in a forward pass: the shapes from which traffic is computed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import Config
from megatfm.verify.batch import Arrays, objective_of
from megatfm.verify.expected_pipeline import Stages
from megatfm.verify.modules import block_paths, is_a


@dataclass(frozen=True)
class Call:
    """A module's call in the plain forward pass of one micro-batch.

    stage: of the pipeline (0 where there is none). given, made: elements of its first input and its output (0: no
    tensor). rows: of the input. in_block: it lies in a block, is_block: it is one. keeps_more: the block keeps
    something for the backward pass after this call, so that recomputing the block goes through all of it.
    given_has_gradient: of its first input. inputs: the shapes of those that are tensors. taken: of experts, the choices
    [B, T, K] that are taken, `n_experts` for others; tokens: of their input.
    """

    path: str
    stage: int
    given: int
    made: int
    rows: int
    is_scalar: bool
    has_gradient: bool
    in_block: bool = False
    keeps_more: bool = False
    is_block: bool = False
    given_has_gradient: bool = False
    taken: Tensor | None = None
    n_experts: int = 0
    tokens: int = 0
    inputs: tuple[tuple[int, ...] | None, ...] = ()


class Watcher:
    """Notes the calls of a model's modules until `take` is called."""

    def __init__(self, model: nn.Module) -> None:
        self.stage = 0
        self._calls: list[tuple[Call, int]] = []
        self._kept = 0
        self._inside: int | None = None
        in_blocks = {model.get_submodule(path) for path in block_paths(model)}
        for path, module in model.named_modules():
            if module in in_blocks:
                module.register_forward_pre_hook(lambda *_: self._enter())
            module.register_forward_hook(partial(self._note, path))
            if module in in_blocks:
                module.register_forward_hook(lambda *_: self._leave())

    def watching(self) -> saved_tensors_hooks:
        """In which the model is to run."""
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def take(self) -> list[Call]:
        """The calls since the last time."""
        calls = [call for call, _ in self._calls]
        self._calls = []
        return calls

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept += 1
        return tensor.detach()  # a tensor kept by its own node would form a cycle that nobody frees

    def _enter(self) -> None:
        self._inside = len(self._calls)

    def _leave(self) -> None:
        for i in range(self._inside or 0, len(self._calls)):
            call, kept = self._calls[i]
            self._calls[i] = replace(call, in_block=True, keeps_more=self._kept > kept), kept
        if self._calls:
            call, kept = self._calls[-1]
            self._calls[-1] = replace(call, is_block=True), kept
        self._inside = None

    def _note(self, path: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first, made = _tensor((*inputs, None)[0]), _tensor(output)
        rows = first.shape[0] if first.dim() else 1
        shapes = first.numel(), made.numel(), rows, made.dim() == 0, made.requires_grad
        given = tuple(tuple(one.shape) if isinstance(one, Tensor) else None for one in inputs)
        call = Call(path, self.stage, *shapes, given_has_gradient=first.requires_grad, inputs=given)
        if is_a(module, "Experts"):
            n_experts: int = module.n_experts  # type: ignore[assignment]
            taken_BTK = inputs[2].where(output[1], n_experts)
            call = replace(call, taken=taken_BTK, n_experts=n_experts, tokens=first.shape[:-1].numel())
        self._calls.append((call, self._kept))


def _tensor(value: Any) -> Tensor:
    """A tensor, or the first of a tuple, in which there may be others, as a block's output comes first; else an empty
    one."""
    return next(_tensors(value), torch.empty(0))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)


@dataclass(frozen=True)
class _StageOutput:
    """What an objective reads of a model's output."""

    losses: Mapping[str, Tensor]


def observe(config: Config, model: nn.Module, batch: Arrays, pipeline: Stages | None) -> list[list[Call]]:
    """The calls of each micro-batch of the global batch, in its order."""
    watcher, objective, rows = Watcher(model), objective_of(config), config.train.micro_batch

    def through_stages(**inputs: Tensor) -> _StageOutput:
        assert pipeline is not None
        carry: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        for stage in pipeline.stages:
            watcher.stage = stage.index
            done = stage.steps.start(inputs, carry)
            carry = done.carry
            for term, loss in done.losses.items():
                losses[term] = losses[term] + loss if term in losses else loss
        return _StageOutput(losses)

    def found() -> Iterator[list[Call]]:
        for start in range(0, config.train.global_batch, rows):
            mine = {name: torch.from_numpy(values[start : start + rows]) for name, values in batch.items()}
            with watcher.watching():
                objective(cast(nn.Module, through_stages) if pipeline else model, mine)
            yield watcher.take()

    return list(found())
