"""Forward and backward passes of a model that is cut into pipeline stages, in the order of a schedule.

The orders are those of torch.distributed.pipelining; what carries them out is here, because its stages fix the shapes
of all micro-batches at the first step, keep a buffer for each micro-batch of a step, give the losses of one stage only,
and lose the gradients of weights that don't lie behind a stage's input (ELECTRA's discriminator, in the stage that
also has the end of its generator) when the backward pass is split. See docs/internals/design.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm.engines.interface import Batch, LossFunction
from megatfm.engines.passes import GradientSync, LossScaler, Terms, WeightBackward, backward_input
from megatfm.errors import MegatfmError
from megatfm.parallel.layout import replace_forward
from megatfm.parallel.pipeline_schedule import SPLITS_BACKWARD, Action, add_send_recv, build_schedule
from megatfm.parallel.pipeline_stages import Pipeline, PipelineStage, StageOutput, activation_shape
from megatfm.split_points import CarrySpec, Splittable

Carry = dict[str, Tensor]


@dataclass
class MicrobatchState:
    """A micro-batch between its forward and its backward pass through a stage."""

    takes: Carry
    gives: Carry
    loss: Tensor | None
    backward_weight: WeightBackward | None = None
    passthrough_gradients: Carry = field(default_factory=dict)
    """Gradients of tensors that the stage only passed on."""


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
    """The state of one step. All of it goes as soon as it has been used."""

    batches: Sequence[Batch]
    objective: LossFunction
    weigh: LossScaler
    microbatches: dict[tuple[int, int], MicrobatchState] = field(default_factory=dict)
    inputs: dict[tuple[int, int], PendingReceive] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Carry] = field(default_factory=dict)
    """To be sent forward: outputs of a stage."""
    gradients: dict[tuple[int, int], PendingReceive] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Carry] = field(default_factory=dict)
    """To be sent backward: gradients of a stage's inputs."""
    terms: list[Terms] = field(default_factory=list)
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)


class PipelineForwardBackward:
    """Runs this rank's stages of a pipeline.

    model: holds the modules of these stages alone; its forward becomes that of one stage, so that wrappers of the
    model's forward stay in place. group, backward_group: of the same ranks, for activations and for their gradients, so
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
        self._group, self._back = group, backward_group
        self._dtype, self._device = dtype, device
        self._rank = dist.get_rank(group)
        self._stages = {stage.index: stage for stage in pipeline.stages_of(self._rank)}
        self.splits = pipeline.schedule in SPLITS_BACKWARD
        self._plan = cache(self._planned)
        self._views = {
            index: cast(Splittable, model).stage({point.name for point in stage.split_points})
            for index, stage in self._stages.items()
        }
        replace_forward(model, self._forward)

    def _planned(self, microbatches: int) -> list[Action]:
        pipeline = self._pipeline
        order_of = build_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, microbatches)
        return add_send_recv(order_of, pipeline.stage_to_rank)[self._rank]

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        data.start_pipeline_step(keep_unsharded=self.splits)
        step = StepState(batches, objective, scale_loss)
        run = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_backward_of_input,
            "W": self._run_backward_weight,
            "send F": self._send_forward,
            "recv F": self._receive_forward,
            "send B": self._send_backward,
            "recv B": self._receive_backward,
        }
        for action in self._plan(len(batches)):
            step.sent = [(work, tensor) for work, tensor in step.sent if not work.is_completed()]
            run[action.kind](step, self._stages[action.stage], action.microbatch)
        for work, _ in step.sent:
            work.wait()
        return step.terms

    @torch.no_grad()
    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        """Forward through the stages one after another; ranks work at different micro-batches at a time, while each
        has one stage."""
        terms: Terms = {}
        carry: Carry = {}
        for index, stage in sorted(self._stages.items()):
            if index and (index - 1) not in self._stages:
                carry = self._receive(stage.inputs, batch, index - 1, self._group).wait()
            carry, stage_terms = self._call(stage, batch, carry, objective)
            terms |= stage_terms
            if index + 1 < len(self._pipeline.stages) and (index + 1) not in self._stages:
                for work, _ in self._send(stage.outputs, carry, index + 1, self._group):
                    work.wait()
        return terms

    def _forward(
        self, stage: PipelineStage, inputs: Mapping[str, Tensor], carry: Carry
    ) -> tuple[Carry, dict[str, Tensor]]:
        """Run the view of one stage; returns the carry to later stages, and the losses of its heads."""
        received = {name: tensor for name, tensor in carry.items() if name in stage.inputs}
        output = self._views[stage.index].forward(**inputs, **received)
        carried = output.carried()
        outputs = {name: carried[name] for name in stage.outputs if name in stage.produced}
        # FSDP2 puts its hooks on a model's outputs, and warns if one is a view.
        return {n: t if t._base is None else t.clone() for n, t in outputs.items()}, output.losses or {}

    def _call(
        self, stage: PipelineStage, batch: Batch, carry: Carry, objective: LossFunction
    ) -> tuple[Carry, Terms]:
        """A stage's pass as the objective's model."""
        gives: Carry = {}

        def model(**inputs: Tensor) -> Any:
            outputs, losses = self._model(stage, inputs, carry)
            gives.update({name: outputs[name] if name in outputs else carry[name] for name in stage.outputs})
            return StageOutput(losses)

        return gives, objective(cast(nn.Module, model), batch)

    def _run_forward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        inbox = step.inputs.pop((stage.index, i), None)
        inputs = inbox.wait() if inbox else {}
        for name in stage.inputs_with_grad:
            inputs[name].requires_grad_()
        gives, terms = self._call(stage, step.batches[i], inputs, step.objective)
        loss = step.weigh(terms) if terms else None
        step.terms.append({name: term.detach() for name, term in terms.items()})
        step.microbatches[stage.index, i] = MicrobatchState(inputs, gives, loss)
        if stage.index + 1 in self._stages:
            step.inputs[stage.index + 1, i] = PendingReceive({n: t.detach() for n, t in gives.items()}, [])
        elif stage.outputs:
            step.outputs[stage.index, i] = {name: tensor.detach() for name, tensor in gives.items()}

    def _run_backward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        passing = step.microbatches.pop((stage.index, i))
        roots, gradients = self._roots(step, stage, i, passing)
        if roots:  # none where all that lies so far down is frozen
            torch.autograd.backward(roots, gradients)
        self._queue_input_gradients(step, stage, i, passing)

    def _run_backward_of_input(self, step: StepState, stage: PipelineStage, i: int) -> None:
        passing = step.microbatches[stage.index, i]
        roots, gradients = self._roots(step, stage, i, passing)
        inputs = [tensor for tensor in passing.takes.values() if tensor.requires_grad]
        passing.backward_weight = backward_input(roots, gradients, inputs)
        passing.gives, passing.loss = {}, None
        self._queue_input_gradients(step, stage, i, passing)

    def _run_backward_weight(self, step: StepState, stage: PipelineStage, i: int) -> None:
        later = step.microbatches.pop((stage.index, i)).backward_weight
        assert later is not None
        later()

    def _roots(
        self, step: StepState, stage: PipelineStage, i: int, passing: MicrobatchState
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs of a pass from which gradients flow back, and theirs."""
        inbox = step.gradients.pop((stage.index, i), None)
        received = inbox.wait() if inbox else {}
        passing.passthrough_gradients = {
            name: g for name, g in received.items() if name not in stage.produced
        }
        roots: list[tuple[Tensor, Tensor | None]] = [
            (passing.gives[name], gradient) for name, gradient in received.items() if name in stage.produced
        ]
        if passing.loss is not None:
            roots.append((passing.loss, None))
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        return [root for root, _ in roots], [gradient for _, gradient in roots]

    def _queue_input_gradients(
        self, step: StepState, stage: PipelineStage, i: int, passing: MicrobatchState
    ) -> None:
        """Gradients of what came in, to the stage before."""
        backward_group: Carry = {}
        for name in sorted(stage.inputs_with_grad):
            field_names = passing.takes[name]
            shares = [g for g in (field_names.grad, passing.passthrough_gradients.get(name)) if g is not None]
            backward_group[name] = sum(shares[1:], shares[0]) if shares else torch.zeros_like(field_names)
        passing.takes = {}
        if stage.index - 1 in self._stages:
            step.gradients[stage.index - 1, i] = PendingReceive(backward_group, [])
        elif stage.index:
            step.input_gradients[stage.index, i] = backward_group

    def _send_forward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        step.sent += self._send(
            stage.outputs, step.outputs.pop((stage.index, i)), stage.index + 1, self._group
        )

    def _receive_forward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        step.inputs[stage.index, i] = self._receive(
            stage.inputs, step.batches[i], stage.index - 1, self._group
        )

    def _send_backward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        fields = {name: stage.inputs[name] for name in sorted(stage.inputs_with_grad)}
        step.sent += self._send(
            fields, step.input_gradients.pop((stage.index, i)), stage.index - 1, self._back
        )

    def _receive_backward(self, step: StepState, stage: PipelineStage, i: int) -> None:
        fields = {name: stage.outputs[name] for name in sorted(stage.outputs_with_grad)}
        step.gradients[stage.index, i] = self._receive(fields, step.batches[i], stage.index + 1, self._back)

    def _dtype_of(self, field: CarrySpec) -> torch.dtype:
        """In which type a field travels between stages."""
        return torch.int64 if field.d_model is None else self._dtype

    def _send(
        self, fields: Mapping[str, CarrySpec], carry: Carry, target_stage: int, group: ProcessGroup
    ) -> list[tuple[dist.Work, Tensor]]:
        peer, works = self._pipeline.stages[target_stage].rank, []
        for name, spec in fields.items():
            tensor = carry[name].contiguous()
            if tensor.dtype != (dtype := self._dtype_of(spec)):
                raise MegatfmError(
                    f"{name} goes to the next pipeline stage in {tensor.dtype}, and that takes it in {dtype}: have "
                    f"the part that makes it return {dtype}"
                )
            work = dist.isend(tensor, group=group, group_dst=peer)
            assert work is not None
            works.append((work, tensor))
        return works

    def _receive(
        self, fields: Mapping[str, CarrySpec], batch: Batch, origin: int, group: ProcessGroup
    ) -> PendingReceive:
        peer, carry, works = self._pipeline.stages[origin].rank, Carry(), []
        for name, spec in fields.items():
            shape = activation_shape(spec, batch, self._pipeline.sequence_shards)
            carry[name] = torch.empty(shape, dtype=self._dtype_of(spec), device=self._device)
            work = dist.irecv(carry[name], group=group, group_src=peer)
            assert work is not None
            works.append(work)
        return PendingReceive(carry, works)


def max_block_inputs(pipeline: Pipeline | None, rank: int, microbatches: int, n_blocks: int) -> int:
    """Most inputs of blocks that a pipeline rank keeps at a time: of each micro-batch between its two passes."""
    if pipeline is None:
        return n_blocks
    order = build_schedule(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, microbatches)[rank]
    in_flight = max_in_flight = 0
    for action in order:
        in_flight += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        max_in_flight = max(max_in_flight, in_flight)
    return max_in_flight * n_blocks // len({action.stage for action in order})
