"""Forward and backward passes of a model that is split into pipeline stages, in the order of a schedule.

Schedules are those of torch.distributed.pipelining. Its stages are not used: they fix the shapes of all micro-batches
at the first step, keep a buffer for each micro-batch of a step, return the losses of one stage only, and lose the
gradients of weights that the stage's input doesn't lead to when the backward pass is split (ELECTRA's discriminator,
in the stage that also ends its generator). See docs/internals/design.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.config.layout_checks import explain_split_backward_conflict
from megatfm.engines.interface import Batch, ComparingLoss, Features, LossFunction, compares_samples
from megatfm.engines.passes import (
    FeatureGradients,
    FeatureObjective,
    GradientSync,
    LossScaler,
    Terms,
    WeightBackward,
    backward_input,
    take_feature_term,
)
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.layout import replace_forward
from megatfm.parallel.pipeline_schedule import SPLITS_BACKWARD, Action, add_send_recv, build_schedule
from megatfm.parallel.pipeline_stages import Pipeline, PipelineStage, StageOutput, compute_activation_shape
from megatfm.split_points import CarrySpec, Splittable

Carry = dict[str, Tensor]


def check_split_backward(pipeline: Pipeline | None, recompute_mode: str) -> None:
    """Raise UsageError for selective recomputation under a schedule that takes backward passes in two parts.

    torch hands out each saved result once, and the second part asks again. A config is refused earlier, other modes
    too, which would only waste time; an engine may be made without one.
    """
    if pipeline and pipeline.schedule in SPLITS_BACKWARD and recompute_mode == "selective":
        reason = explain_split_backward_conflict(pipeline.schedule, "train.recompute", recompute_mode, "none")
        raise UsageError(reason)


@dataclass
class MicrobatchState:
    """A micro-batch between its forward and its backward pass through a stage."""

    inputs: Carry
    outputs: Carry
    loss: Tensor | None
    backward_weight: WeightBackward | None = None
    passthrough_gradients: Carry = field(default_factory=dict)
    """Gradients of tensors that the stage only passes on."""


@dataclass
class PendingReceive:
    """Tensors that are being received for a pass."""

    carry: Carry
    works: list[dist.Work]

    def wait(self) -> Carry:
        """Return the tensors once all have arrived. Raises what torch.distributed raises when the sender is gone."""
        for work in self.works:
            work.wait()
        return self.carry


@dataclass
class StepState:
    """State of one step, by (stage, micro-batch). Entries are dropped as soon as they have been used."""

    batches: Sequence[Batch]
    objective: Callable[[nn.Module, Batch], Terms]
    scale_loss: LossScaler
    microbatches: dict[tuple[int, int], MicrobatchState] = field(default_factory=dict)
    inputs: dict[tuple[int, int], PendingReceive] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Carry] = field(default_factory=dict)
    """Outputs of a stage, to be sent to the next one."""
    output_gradients: dict[tuple[int, int], PendingReceive] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Carry] = field(default_factory=dict)
    """Gradients of a stage's inputs, to be sent to the previous one."""
    terms: list[Terms] = field(default_factory=list)
    pending_sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    """Sends in progress, and their tensors, which must live until then."""


def _without_views(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy views: FSDP2 puts its hooks on a model's outputs, and warns if one is a view."""
    return {name: x if x._base is None else x.clone() for name, x in tensors.items()}


class PipelineForwardBackward:
    """Runs this rank's stages of a pipeline.

    model: holds only the modules of these stages; its forward becomes that of one stage, so that wrappers of the
    model's forward stay in place. group, backward_group: the same ranks, for activations and for their gradients, so
    that one direction doesn't queue behind the other. dtype: of activations.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        group: ProcessGroup,
        backward_group: ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model, self._pipeline = model, pipeline
        self._group, self._backward_group = group, backward_group
        self._dtype, self._device = dtype, device
        self._rank = dist.get_rank(group)
        self._stages = {stage.index: stage for stage in pipeline.list_stages(self._rank)}
        self._splits_backward = pipeline.schedule in SPLITS_BACKWARD
        self._plan = cache(self._build_plan)
        self._views = {
            index: cast(Splittable, model).stage({point.name for point in stage.split_points})
            for index, stage in self._stages.items()
        }
        replace_forward(model, self._forward)

    def _build_plan(self, microbatches: int) -> list[Action]:
        """Return this rank's actions in a step of `microbatches` micro-batches, sends and receives included."""
        pipeline = self._pipeline
        orders = build_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, microbatches)
        return add_send_recv(orders, pipeline.stage_to_rank)[self._rank]

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, gradient_sync: GradientSync
    ) -> list[Terms]:
        if not compares_samples(objective):
            return self._run_schedule(batches, objective, scale_loss, gradient_sync)
        features = self.features(batches, objective)
        if not features:  # another rank has the stage that computes them
            self._run_schedule(batches, FeatureObjective(objective, batches), scale_loss, gradient_sync)
            return []
        gradients = FeatureGradients(self._model, features, objective, scale_loss)
        self._run_schedule(batches, FeatureObjective(objective, batches, gradients), take_feature_term, gradient_sync)
        return [gradients.terms]

    def _run_schedule(
        self,
        batches: Sequence[Batch],
        objective: Callable[[nn.Module, Batch], Terms],
        scale_loss: LossScaler,
        gradient_sync: GradientSync,
    ) -> list[Terms]:
        gradient_sync.start_pipeline_step(keep_unsharded=self._splits_backward)
        step = StepState(batches, objective, scale_loss)
        run = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_backward_input,
            "W": self._run_backward_weight,
            "send F": self._send_forward,
            "recv F": self._receive_forward,
            "send B": self._send_backward,
            "recv B": self._receive_backward,
        }
        for action in self._plan(len(batches)):
            step.pending_sends = [(work, x) for work, x in step.pending_sends if not work.is_completed()]
            run[action.kind](step, self._stages[action.stage], action.microbatch)
        for work, _ in step.pending_sends:
            work.wait()
        return step.terms

    def features(self, batches: Iterable[Batch], objective: ComparingLoss) -> list[Features]:
        """Return the features of each micro-batch, without a graph, on the rank whose stage computes them."""
        features: list[Features] = []
        for batch in batches:
            collector = FeatureObjective(objective, [batch])
            self.evaluate(batch, collector)
            if collector.features is not None:
                features.append(collector.features)
        return features

    @torch.no_grad()
    def evaluate(self, batch: Batch, objective: Callable[[nn.Module, Batch], Terms]) -> Terms:
        """Run the stages of one micro-batch in turn. Ranks with one stage each overlap different micro-batches."""
        terms: Terms = {}
        carry: Carry = {}
        for index, stage in sorted(self._stages.items()):
            if index and (index - 1) not in self._stages:
                carry = self._receive(stage.inputs, batch, index - 1, self._group).wait()
            carry, stage_terms = self._run_stage(stage, batch, carry, objective)
            terms |= stage_terms
            if index + 1 < len(self._pipeline.stages) and (index + 1) not in self._stages:
                for work, _ in self._send(stage.outputs, carry, index + 1, self._group):
                    work.wait()
        return terms

    def _forward(
        self, stage: PipelineStage, inputs: Mapping[str, Tensor], carry: Carry
    ) -> tuple[Carry, dict[str, Tensor], dict[str, Tensor]]:
        """Run the view of one stage; returns what it produces for later stages, losses of its heads, and features."""
        received = {name: tensor for name, tensor in carry.items() if name in stage.inputs}
        output = self._views[stage.index].forward(**inputs, **received)
        carried = output.carried()
        outputs = {name: carried[name] for name in stage.outputs if name in stage.produced}
        features = output.predictions if isinstance(output.predictions, dict) else {}
        return _without_views(outputs), output.losses or {}, _without_views(features)

    def _run_stage(
        self, stage: PipelineStage, batch: Batch, carry: Carry, objective: Callable[[nn.Module, Batch], Terms]
    ) -> tuple[Carry, Terms]:
        """Call the objective with a stage as its model; returns the carry to the next stage, and the terms."""
        carried: Carry = {}

        def model(**inputs: Tensor) -> Any:
            outputs, losses, features = self._model(stage, inputs, carry)
            carried.update({name: outputs[name] if name in outputs else carry[name] for name in stage.outputs})
            return StageOutput(losses, features)

        return carried, objective(cast(nn.Module, model), batch)

    def _run_forward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        receive = step.inputs.pop((stage.index, i), None)
        inputs = receive.wait() if receive else {}
        for name in stage.inputs_with_grad:
            inputs[name].requires_grad_()
        outputs, terms = self._run_stage(stage, step.batches[i], inputs, step.objective)
        loss = step.scale_loss(terms) if terms else None
        step.terms.append({name: term.detach() for name, term in terms.items()})
        step.microbatches[stage.index, i] = MicrobatchState(inputs, outputs, loss)
        if stage.index + 1 in self._stages:
            step.inputs[stage.index + 1, i] = PendingReceive({n: t.detach() for n, t in outputs.items()}, [])
        elif stage.outputs:
            step.outputs[stage.index, i] = {name: tensor.detach() for name, tensor in outputs.items()}

    def _run_backward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        microbatch = step.microbatches.pop((stage.index, i))
        roots, gradients = self._backward_roots(step, stage, i, microbatch)
        if roots:  # none if this and all earlier stages are frozen
            torch.autograd.backward(roots, gradients)
        self._queue_input_gradients(step, stage, i, microbatch)

    def _run_backward_input(self, step: StepState, stage: PipelineStage, i: int) -> None:
        microbatch = step.microbatches[stage.index, i]
        roots, gradients = self._backward_roots(step, stage, i, microbatch)
        inputs = [tensor for tensor in microbatch.inputs.values() if tensor.requires_grad]
        microbatch.backward_weight = backward_input(roots, gradients, inputs)
        microbatch.outputs, microbatch.loss = {}, None
        self._queue_input_gradients(step, stage, i, microbatch)

    def _run_backward_weight(self, step: StepState, stage: PipelineStage, i: int) -> None:
        backward_weight = step.microbatches.pop((stage.index, i)).backward_weight
        assert backward_weight is not None
        backward_weight()

    def _backward_roots(
        self, step: StepState, stage: PipelineStage, i: int, microbatch: MicrobatchState
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the outputs of a stage at which its backward pass starts, and their gradients (None: a loss)."""
        receive = step.output_gradients.pop((stage.index, i), None)
        received = receive.wait() if receive else {}
        microbatch.passthrough_gradients = {name: g for name, g in received.items() if name not in stage.produced}
        roots: list[tuple[Tensor, Tensor | None]] = [
            (microbatch.outputs[name], g) for name, g in received.items() if name in stage.produced
        ]
        if microbatch.loss is not None:
            roots.append((microbatch.loss, None))
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        return [root for root, _ in roots], [gradient for _, gradient in roots]

    def _queue_input_gradients(
        self, step: StepState, stage: PipelineStage, i: int, microbatch: MicrobatchState
    ) -> None:
        """Hand the gradients of a stage's inputs to the previous stage, or queue them to be sent there."""
        gradients: Carry = {}
        for name in sorted(stage.inputs_with_grad):
            x = microbatch.inputs[name]
            addends = [g for g in (x.grad, microbatch.passthrough_gradients.get(name)) if g is not None]
            gradients[name] = sum(addends[1:], addends[0]) if addends else torch.zeros_like(x)
        microbatch.inputs = {}
        if stage.index - 1 in self._stages:
            step.output_gradients[stage.index - 1, i] = PendingReceive(gradients, [])
        elif stage.index:
            step.input_gradients[stage.index, i] = gradients

    def _send_forward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        outputs = step.outputs.pop((stage.index, i))
        step.pending_sends += self._send(stage.outputs, outputs, stage.index + 1, self._group)

    def _receive_forward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        step.inputs[stage.index, i] = self._receive(stage.inputs, step.batches[i], stage.index - 1, self._group)

    def _send_backward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        specs = {name: stage.inputs[name] for name in sorted(stage.inputs_with_grad)}
        gradients = step.input_gradients.pop((stage.index, i))
        step.pending_sends += self._send(specs, gradients, stage.index - 1, self._backward_group)

    def _receive_backward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        specs = {name: stage.outputs[name] for name in sorted(stage.outputs_with_grad)}
        step.output_gradients[stage.index, i] = self._receive(
            specs, step.batches[i], stage.index + 1, self._backward_group
        )

    def _get_dtype(self, spec: CarrySpec) -> torch.dtype:
        """Return the dtype in which a tensor is sent between stages."""
        return torch.int64 if spec.d_model is None else self._dtype

    def _send(
        self, specs: Mapping[str, CarrySpec], carry: Carry, target_stage: int, group: ProcessGroup
    ) -> list[tuple[dist.Work, Tensor]]:
        peer, sends = self._pipeline.stages[target_stage].rank, []
        for name, spec in specs.items():
            tensor = carry[name].contiguous()
            if tensor.dtype != (dtype := self._get_dtype(spec)):
                raise MegatfmError(
                    f"{name} is {tensor.dtype}, but the next pipeline stage expects {dtype}: let the module that "
                    f"computes it return {dtype}"
                )
            work = dist.isend(tensor, group=group, group_dst=peer)
            assert work is not None
            sends.append((work, tensor))
        return sends

    def _receive(
        self, specs: Mapping[str, CarrySpec], batch: Batch, source_stage: int, group: ProcessGroup
    ) -> PendingReceive:
        peer, carry, works = self._pipeline.stages[source_stage].rank, Carry(), []
        for name, spec in specs.items():
            shape = compute_activation_shape(spec, batch, self._pipeline.sequence_shards)
            carry[name] = torch.empty(shape, dtype=self._get_dtype(spec), device=self._device)
            work = dist.irecv(carry[name], group=group, group_src=peer)
            assert work is not None
            works.append(work)
        return PendingReceive(carry, works)


def count_max_block_inputs(pipeline: Pipeline | None, rank: int, microbatches: int, n_blocks: int) -> int:
    """Return the largest number of block inputs that a pipeline rank keeps at a time.

    It keeps those of each micro-batch between its forward and its backward pass. n_blocks: on this rank.
    """
    if pipeline is None:
        return n_blocks
    order = build_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, microbatches)[rank]
    in_flight = max_in_flight = 0
    for action in order:
        in_flight += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        max_in_flight = max(max_in_flight, in_flight)
    return max_in_flight * n_blocks // len({action.stage for action in order})
