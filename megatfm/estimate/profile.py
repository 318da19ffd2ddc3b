"""Profiles a model's parts under tensor parallelism: the operators of both passes, and the tensors that they save.

The real parts run with the real plan on fake tensors, over a process group that sends nothing; one block of a kind
stands for all of it. Attention is recorded as one fused kernel, experts as grouped matmuls.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from megatfm.config import Config
from megatfm.data.loader import without_documents
from megatfm.describe.activation_memory import ACTIVATION_DTYPES, default_dtype, quiet_fake_tensors
from megatfm.errors import UsageError
from megatfm.estimate.devices import DeviceKind
from megatfm.estimate.kernels import ProfiledKernels
from megatfm.estimate.operators import Recording
from megatfm.estimate.part_profile import (
    ModelProfile,
    PartProfile,
    SavedTensor,
    count_kept_gradients,
    list_expert_moments,
    list_weight_gradients,
)
from megatfm.estimate.stand_ins import HostValues, StandInLoss, forward_predicted_tokens, record_shared_tables
from megatfm.estimate.weights import list_expert_names
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.output_head import LMHead
from megatfm.objectives import reads_text, target_fraction
from megatfm.parallel.cp_plans import depends_on_batch
from megatfm.parallel.layout import ModelLayout, iter_blocks, replace_forward
from megatfm.parallel.mesh import Mesh, build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.split_points import CarrySpec, SplitPoint, Splittable
from megatfm.train.build import build_model
from megatfm.verify.shrink import Arrays, draw_batch

DATA_DEPENDENT_FAMILIES = ("electra", "two_towers", "vision_language", "xlnet")
"""Families, beside those of images, whose shapes depend on a batch's values: on predicted tokens, on images."""
DATA_DEPENDENT_HEADS = ("boundary",)
"""Extra heads whose shapes depend on a batch's values: on the masked spans."""
DATA_DEPENDENT_ATTENTIONS = ("longformer",)
"""Attention layers whose shapes depend on a batch's values: on the global tokens of each row."""
LAST_BLOCK_DIFFERS = ("xlnet",)
"""Families whose last block computes less: XLNet's content stream ends before it."""
SHAPE_ONLY_FIELDS = ("keys", "patches")
"""Suffixes of fields whose values no shape depends on. They stay fake: they are large, or much is computed of them."""


class LocalModel:
    """A config's model as tensor-parallel rank 0 has it, ready to be profiled at any micro-batch.

    Use it within `fake_ranks`; `parallel.tp` must divide their number.
    """

    def __init__(self, config: Config, device_kind: DeviceKind = "cuda") -> None:
        self.check(config)
        parallel = config.parallel
        self.config, self.tp, self._device_kind = config, parallel.tp, device_kind
        tp_only = parallel.model_copy(update={"pp": 1, "cp": 1, "ep": 1, "dp_replicate": 1, "dp_shard": -1})
        self._is_data_dependent = depends_on_values(config)
        self._mode = FakeTensorMode(allow_non_fake_inputs=self._is_data_dependent)
        self._dtype = ACTIVATION_DTYPES.get(config.train.precision, torch.bfloat16)
        self._is_in_eager, self._eager_start, self._eager_ranges = False, 0, list[range]()
        with quiet_fake_tensors():
            self._build(build_mesh(tp_only, dist.get_world_size(), "cpu"))

    @staticmethod
    def check(config: Config) -> None:
        """Raise UsageError for a model whose parts can't be profiled with this layout."""
        if depends_on_values(config) and config.parallel.cp > 1:
            raise UsageError(
                f"{config.name}: its passes depend on the values of a batch, so it can't be estimated with "
                f"parallel.cp = {config.parallel.cp}: trace a rank instead: python -m megatfm.imaginary CONFIG "
                "--world GPUS --rank 0"
            )

    def _build(self, mesh: Mesh) -> None:
        config, parallel = self.config, self.config.parallel
        predicted_share = target_fraction(config.objective) or 1.0
        with self._mode, default_dtype(self._dtype):
            self.model = build_model(config).train()
            if not hasattr(self.model, "split_points"):
                raise UsageError(
                    f"model.family = {config.model.family!r} has no split points, so its parts can't be profiled"
                )
            for module in self.model.modules():
                if isinstance(module, LMHead) and module.sparse and not self._is_data_dependent:
                    replace_forward(module, partial(forward_predicted_tokens, module, predicted_share))
            self._expert_names = list_expert_names(self.model)
            self._kernels = ProfiledKernels(config, self.model, self._device_kind)
            self.layout: ModelLayout = parallelize(self.model, mesh, sequence_parallel=parallel.sequence_parallel)
            self._parameters = dict(self.model.named_parameters())
            for module in self.model.modules():
                if not getattr(module, "is_compiled", True) or depends_on_batch(module):
                    module.register_forward_pre_hook(self._enter_eager)
                    module.register_forward_hook(self._leave_eager)
            self._kernels.install(self.model)

    def _stays_eager(self, module: nn.Module) -> bool:
        return not getattr(module, "is_compiled", True) or self._kernels.cp > 1

    def _enter_eager(self, module: nn.Module, _: Any) -> None:
        if self._stays_eager(module):
            self._eager_start = len(self._kernels.recorder.recording.operators)
            self._is_in_eager = True

    def _leave_eager(self, module: nn.Module, *_: Any) -> None:
        if not self._stays_eager(module):
            return
        self._eager_ranges.append(range(self._eager_start, len(self._kernels.recorder.recording.operators)))
        self._is_in_eager = False

    def profile(self, micro_batch: int, cp: int) -> ModelProfile:
        """Run each kind of part once, forward and backward. cp: ranks that share a row's tokens."""
        self._rows, self._kernels.cp, self._samples = micro_batch, cp, 0
        splittable, model = cast(Splittable, self.model), self.config.model
        blocks = {id(block) for block in iter_blocks(self.model)}
        parts: dict[Hashable, PartProfile] = {}
        order: list[PartProfile] = []
        host_values = HostValues() if self._is_data_dependent else nullcontext()
        with quiet_fake_tensors(), self._mode, host_values, self._kernels.experts_by_shapes():
            if self._is_data_dependent:
                fields, lengths = self._draw_fields(micro_batch), dict[str, int]()
            else:
                fields, lengths = self._make_fields(splittable.split_points, micro_batch, cp)
            written: dict[str, CarrySpec] = {}
            last_block = f"encoder.layers.{model.n_layers - 1}" if model.family in LAST_BLOCK_DIFFERS else ""
            for point in splittable.split_points:
                module = self.model.get_submodule(point.modules[0]) if point.modules else None
                is_block = id(module) in blocks
                carry = self._make_carry(splittable, point, written, fields, lengths)
                trained = tuple(p.requires_grad for p in module.parameters()) if module is not None else ()
                key = (
                    is_block and model.drop_path > 0 and point.name.endswith(".0"),  # stochastic depth spares it
                    trained,
                    point.name.rpartition(".")[0] if is_block and point.name != last_block else point.name,
                    type(module),
                    len(point.modules),
                    getattr(module, "kind", None),
                    repr(getattr(module, "pattern", None)),
                    tuple((name, tensor.shape) for name, tensor in carry.items()),
                )
                if key not in parts:
                    parts[key] = self._profile_part(splittable, point, fields, carry, is_block)
                order.append(parts[key])
                written |= point.writes
        return ModelProfile(order, self._samples, sum(field.nbytes for field in fields.values()))

    def _profile_part(
        self,
        model: Splittable,
        point: SplitPoint,
        fields: Mapping[str, Tensor],
        carry: Mapping[str, Tensor],
        is_block: bool,
    ) -> PartProfile:
        """Run a split point forward and backward. carry: what it reads from earlier ones."""
        recorder = self._kernels.start_part()
        weights = frozenset(map(recorder.number, self._parameters.values()))
        forward, output, saved = self._run_forward(model, point, fields, carry, weights)
        losses, predictions = (output.losses or {}).values(), (getattr(output, "predictions", None) or {}).values()
        written = {name: x for name, x in output.carried().items() if name in point.writes} if point.writes else {}
        self._samples = max([self._samples, *map(len, predictions)])
        backward = self._run_backward([*losses, *written.values(), *predictions])
        self._mark_eager(forward, backward, saved)
        gradients, experts = self._list_gradients(point)
        listed_gradients, peak_after_gradients = list_weight_gradients(backward, gradients, experts)
        for parameter in self._parameters.values():
            parameter.grad = None
        read = {name: tensor for name, tensor in carry.items() if name in point.reads}
        saved_in_forward = sum(forward.created[number][1] for number in saved if number in forward.created)
        return PartProfile(
            name=point.name,
            forward=forward.operators,
            backward=backward.operators,
            saved=list(saved.values()),
            input_bytes=sum(tensor.nbytes for tensor in read.values()),
            output_bytes=sum(tensor.nbytes for tensor in written.values()),
            forward_peak=max(0, forward.peak() - saved_in_forward),
            backward_peak=max(backward.live_without(gradients), default=0),
            gradients=listed_gradients,
            is_block=is_block,
            weight_numbers=weights,
            whole_backward_peak=backward.peak(),
            peak_after_gradients=peak_after_gradients,
            expert_moments=list_expert_moments(backward, sorted(experts), self._kernels.experts_complete),
            shared_input_bytes=sum(tensor.nbytes for name, tensor in read.items() if name not in point.writes),
            waiting_gradients={n: x.nbytes for n, x in read.items() if n not in point.writes and x.requires_grad},
            writes=frozenset(point.writes),
            unsaved_input_bytes=sum(x.nbytes for x in read.values() if recorder.number(x) not in saved),
            kept_gradients=count_kept_gradients(backward, gradients, weights | saved.keys()),
        )

    def _run_forward(
        self,
        model: Splittable,
        point: SplitPoint,
        fields: Mapping[str, Tensor],
        carry: Mapping[str, Tensor],
        weights: frozenset[int],
    ) -> tuple[Recording, Any, dict[int, SavedTensor]]:
        """Run a split point forward. Return the recording, the output, and what the pass saves, by storage."""
        recorder, saved = self._kernels.recorder, dict[int, SavedTensor]()

        def pack(tensor: Tensor) -> Tensor:
            number = recorder.number(tensor)
            if number not in weights and (number not in saved or self._is_in_eager):
                saved[number] = SavedTensor(number, tensor.untyped_storage().nbytes(), self._is_in_eager)
            return tensor

        tables = record_shared_tables()
        with recorder.record() as forward, saved_tensors_hooks(pack, lambda tensor: tensor), tables as table_by_key:
            self._tables = table_by_key  # live in the backward pass, too: earlier blocks have saved them
            output = model.stage({point.name}).forward(**fields, **carry)
        predictions = (getattr(output, "predictions", None) or {}).values()
        outputs = [*(output.losses or {}).values(), *output.carried().values(), *predictions]
        output_numbers = {recorder.number(x) for x in outputs if x is not None}
        for number, n_bytes in recorder.live_storages(forward).items():  # saved for a recomputation
            if number not in output_numbers:
                saved.setdefault(number, SavedTensor(number, n_bytes))
        stack = point.name.rpartition(".")[0]
        shared_names = {recorder.number(x): name for name, x in carry.items() if name not in point.writes}
        shared_names |= {recorder.number(x): f"{stack} {key}" for key, x in table_by_key.items()}
        for number in shared_names.keys() & saved.keys():
            saved[number] = replace(saved[number], shared_input=shared_names[number])
        return forward, output, saved

    def _run_backward(self, outputs: Sequence[Tensor]) -> Recording:
        """Run backward from some outputs, those that depend on weights or inputs with gradients."""
        roots = [output for output in outputs if output.requires_grad]
        total = StandInLoss.apply(*roots) if roots else None
        gradient = torch.ones(())
        with self._kernels.recorder.record() as backward:
            if total is not None:
                torch.autograd.backward(total, gradient)
        backward.operators = [op for op in backward.operators if op.name != "ones"]  # gradients of the roots
        self._kernels.mark_fused_backward(backward.operators)
        return backward

    def _mark_eager(self, forward: Recording, backward: Recording, saved: Mapping[int, SavedTensor]) -> None:
        """Mark the operators of modules that stay eager in compiled blocks, and all those of the backward pass."""
        for index in (index for indices in self._eager_ranges for index in indices):
            forward.operators[index] = replace(forward.operators[index], is_eager=True)
        self._eager_ranges.clear()
        eager_numbers = {tensor.number for tensor in saved.values() if tensor.is_eager}
        backward.operators = [
            replace(op, is_backward=True, is_eager=not eager_numbers.isdisjoint(op.reads)) for op in backward.operators
        ]

    def _list_gradients(self, point: SplitPoint) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
        """Return the gradients of weights as storage → (place among the part's trained weights, bytes), and the
        storages of experts' gradients."""
        members = {p for path in point.modules for p in self.model.get_submodule(path).parameters()}
        trained = [name for name, p in self._parameters.items() if p in members and p.requires_grad]
        gradients, experts = {}, set()
        for place, name in enumerate(trained):
            if (gradient := self._parameters[name].grad) is not None:
                number = self._kernels.recorder.number(gradient)
                gradients[number] = place, gradient.untyped_storage().nbytes()
                if name in self._expert_names:
                    experts.add(number)
        return gradients, frozenset(experts)

    def _make_carry(
        self,
        model: Splittable,
        point: SplitPoint,
        written: Mapping[str, CarrySpec],
        fields: Mapping[str, Tensor],
        lengths: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Return the tensors that a split point reads from earlier ones. written: their specs.

        Tokens that the model itself draws go to all later points, as its forward passes them on.
        """
        token_fields = {name: p.token_field for p in reversed(model.split_points) for name in p.writes}
        parts = self.tp if self.config.parallel.sequence_parallel else 1
        carry = {}
        for name, spec in written.items():
            if name in point.reads or spec.d_model is None:
                length = _get_carry_length(spec, fields) if self._is_data_dependent else lengths[token_fields[name]]
                size = (self._rows, length) if spec.d_model is None else (self._rows, length // parts, spec.d_model)
                dtype = torch.int64 if spec.d_model is None else self._dtype
                carry[name] = torch.zeros(size, dtype=dtype, requires_grad=spec.d_model is not None)
        return carry

    def _make_fields(
        self, points: Sequence[SplitPoint], rows: int, cp: int
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return a batch's fields, and a rank's tokens by the field that a split point processes."""
        data, model = self.config.data, self.model
        lengths = {point.token_field: data.sequence_length for point in points}
        if len(lengths) > 1:
            lengths["tokens"] = data.target_length or data.sequence_length
        lengths = {name: -(-length // cp) for name, length in lengths.items()}  # of the fullest rank
        read = {module.input_field for module in model.modules() if isinstance(module, InputEmbedding)}
        accepted = getattr(model, "accepted", frozenset(lengths) | read | {"targets"})
        read |= {"tokens", "targets", "positions"} | ({"original"} & accepted)
        names = {side.removesuffix("tokens") + name: n for side, n in lengths.items() for name in read}
        padded = self._has_padding(rows) if self._device_kind == "cpu" and cp == 1 else False
        names |= {side.removesuffix("tokens") + "documents": n for side, n in lengths.items() if padded}
        zeros = {n: torch.zeros(rows, size, dtype=torch.int64) for n, size in names.items() if n in accepted}
        return {**zeros, "keys": torch.zeros(rows, dtype=torch.int64)}, lengths

    def _has_padding(self, rows: int) -> bool:
        """Return whether rows of one document keep their documents, of which a CPU makes a mask of all pairs."""
        with _disable_current_modes():
            return any(name.endswith("documents") for name in without_documents(self._draw_batch(rows)))

    def _draw_batch(self, rows: int) -> Arrays:
        train = self.config.train.model_copy(update={"global_batch": rows})
        return draw_batch(self.config.model_copy(update={"train": train}), "one")

    def _draw_fields(self, rows: int) -> dict[str, Tensor]:
        """Return a batch of full rows whose values the host can read; fields of `SHAPE_ONLY_FIELDS` are fake.

        Documents are left out where each row holds one and no padding.
        """
        with _disable_current_modes():
            arrays = self._draw_batch(rows)
            fields = {name: torch.from_numpy(values) for name, values in arrays.items()}
        for name in [name for name in fields if name.endswith("documents") and not arrays[name].any()]:
            del fields[name]
        return {
            name: torch.empty(values.shape, dtype=values.dtype, device="cpu")
            if name.endswith(SHAPE_ONLY_FIELDS)
            else values
            for name, values in fields.items()
        }


def depends_on_values(config: Config) -> bool:
    """Return whether shapes in a model's passes depend on the values of a batch."""
    model = config.model
    if model.family in DATA_DEPENDENT_FAMILIES or model.attention.name in DATA_DEPENDENT_ATTENTIONS:
        return True
    return bool(model.extra_heads.keys() & set(DATA_DEPENDENT_HEADS)) or not reads_text(config.objective.name)


def _get_carry_length(spec: CarrySpec, fields: Mapping[str, Tensor]) -> int:
    return spec.length_of(fields) if spec.length_of else fields[spec.shape_of].shape[1]
