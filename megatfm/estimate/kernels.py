"""Kernels of a profiled model: stand-ins for those that a GPU runs, and the real ones where a CPU build composes them.

A GPU has one kernel for attention, RMSNorm and the vocabulary's loss, and grouped matmuls for experts. On a CPU, torch
composes RMSNorm of several operators, and the loss takes other chunks: there the operators themselves are recorded.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megatfm.config import Config
from megatfm.cost import TokenCounts
from megatfm.describe.activation_memory import replace_grouped_matmul
from megatfm.estimate.devices import DeviceKind
from megatfm.estimate.operators import Operator, OperatorRecorder, count_tensor_bytes
from megatfm.estimate.stand_ins import (
    ROWS,
    VOCAB_PARALLEL_STATISTICS,
    AttentionStandIn,
    CrossEntropyStandIn,
    GroupedMatmulStandIn,
    RMSNormStandIn,
    count_fetched_tokens,
    dispatch_evenly,
    exchange_tokens,
)
from megatfm.estimate.weights import find_experts_section
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.moe.experts import Experts
from megatfm.layers.norm import RMSNorm
from megatfm.layers.output_head import CrossEntropy
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.kernels import LONG_ON_GPU, choose_kernel
from megatfm.ops.attention.mask import AttentionMask
from megatfm.parallel.context_parallel import make_zigzag_predicate
from megatfm.parallel.layout import replace_forward

FUSED_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
"""torch's fused attention on a CPU, as it is dispatched."""
BACKWARD_MATMULS = 2.5
"""Matmuls of attention's backward pass for each of the forward's: five for two (Dao 2023)."""


class ProfiledKernels:
    """Kernels of one model, noted in the recording of its current part.

    recorder: of the current part; cp: ranks that share a row's tokens; experts_complete: operator of the backward pass
    before which the experts' gradients are all computed.
    """

    recorder: OperatorRecorder

    def __init__(self, config: Config, model: nn.Module, device_kind: DeviceKind) -> None:
        self.config, self.tp, self.device_kind, self.cp = config, config.parallel.tp, device_kind, 1
        self.experts_complete = 0
        self._exchanges_tokens = config.parallel.ep > 1
        self._is_zigzag = make_zigzag_predicate(model)
        self._flops_by_output: dict[int, float] = {}

    def install(self, model: nn.Module) -> None:
        """Replace the kernels of a parallelized model."""
        is_gpu = self.device_kind == "cuda"
        for module in model.modules():
            if isinstance(module, DotProductAttention):
                module.attend_head_shard = partial(self._attend, module)  # type: ignore[method-assign]
            elif isinstance(module, RMSNorm) and is_gpu:
                replace_forward(module, partial(self._rms_norm, module))
            elif isinstance(module, CrossEntropy) and is_gpu:
                replace_forward(module, partial(self._cross_entropy, module))
            elif isinstance(module, Experts) and self._exchanges_tokens:
                exchange_tokens(module, self._reached_share if is_gpu else 1.0, self._note_complete_experts)

    @property
    def _reached_share(self) -> float:
        """Share of all choices that are of this rank's experts, or of those of its peers on other data ranks."""
        return 1 / self.tp if self.config.parallel.expert_tp == "by_expert" else 1.0

    def experts_by_shapes(self) -> AbstractContextManager[object]:
        """Run experts on as many rows as they get on average. Rows that a CPU doesn't reach, it cuts off at once."""
        stack = ExitStack()
        stack.enter_context(replace_grouped_matmul(partial(GroupedMatmulStandIn.apply, self.note)))
        if self.device_kind == "cpu":
            stack.enter_context(dispatch_evenly(self._reached_share))
        return stack

    def start_part(self) -> OperatorRecorder:
        """Return the recorder of another part, in which kernels are noted from now on."""
        self.recorder, self.experts_complete, self._flops_by_output = OperatorRecorder(), 0, {}
        return self.recorder

    def _find_attention_kernel(
        self,
        core: DotProductAttention,
        head_shard: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        sequence: SequenceMetadata,
        bias: Tensor | None = None,
        mask: AttentionMask | None = None,
    ) -> str:
        """Return the name of the kernel by which the device computes attention: "fused" for any that a GPU has for long
        rows, and "products" where it computes all scores by matmuls, as for short rows with dropout."""
        heads, queries = qkv[0].shape[1:3]
        if self.device_kind == "cuda" and queries >= LONG_ON_GPU:
            return "fused"
        mask = mask or PatternMask(core.pattern, sequence, head_shard * heads, heads)
        return choose_kernel(replace(core.describe_call(*qkv, mask, bias), device=self.device_kind)).name

    def _attend(
        self, core: DotProductAttention, head_shard: int, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Stand-in for `DotProductAttention.attend_head_shard`."""
        rows, heads, queries, _ = q.shape
        tokens = TokenCounts(queries * self.cp, k.shape[2] * self.cp)
        with _disable_current_modes():  # patterns may count pairs with tensors
            macs = core.cost(tokens).visible_attention_macs
        macs *= rows * heads / core.n_heads / self.cp
        kernel = self._find_attention_kernel(core, head_shard, (q, k, v), *args, **kwargs)
        if kernel == "products" or (self.device_kind == "cpu" and kernel == "documents"):
            return type(core).attend_head_shard(core, head_shard, q, k, v, *args, **kwargs)
        unit = self.tp if self.config.parallel.sequence_parallel else 1
        fetched = count_fetched_tokens(
            core, queries * self.cp, self.cp, unit, is_zigzag=self._is_zigzag(queries * self.cp)
        )
        if self.device_kind == "cpu" and kernel == "fused":
            start = len(self.recorder.recording.operators)
            output: Tensor = type(core).attend_head_shard(core, head_shard, q, k, v, *args, **kwargs)
            self._mark_fused(start, 2 * macs, fetched)
            return self._exchange(output)
        bias = args[1] if len(args) > 1 else kwargs.get("bias")
        bias = bias if isinstance(bias, Tensor) and bias.requires_grad else None
        note = partial(self._note_attention, 2 * macs, fetched)
        return self._exchange(AttentionStandIn.apply(note, q, k, v, bias))

    def _exchange(self, heads_BNTH: Tensor) -> Tensor:
        """Return an output as context-parallel ranks exchange it: a copy in which a head's tokens are neighbours."""
        return heads_BNTH if self.cp == 1 else heads_BNTH.contiguous()

    def _mark_fused(self, start: int, flops: float, fetched_tokens: int) -> None:
        """Give a CPU's fused kernel, recorded since operator `start`, its FLOPs."""
        operators = self.recorder.recording.operators
        for index in range(start, len(operators)):
            if operators[index].name == FUSED_ON_CPU:
                operators[index] = _as_attention(operators[index], flops, fetched_tokens)
                self._flops_by_output.update(dict.fromkeys(operators[index].writes, flops))

    def mark_fused_backward(self, operators: list[Operator]) -> None:
        """Give a CPU's fused kernels in a backward pass the FLOPs of those whose outputs they read."""
        for index, operator in enumerate(operators):
            if operator.name == f"{FUSED_ON_CPU}_backward":
                flops = max((self._flops_by_output.get(number, 0.0) for number in operator.reads), default=0.0)
                operators[index] = _as_attention(operator, BACKWARD_MATMULS * flops, 0)

    def _rms_norm(self, module: RMSNorm, x: Tensor) -> Tensor:
        """Stand-in for `RMSNorm.forward`."""
        if not module.zero_centered:
            return self._apply_rms_norm(x, module.weight)
        precise = torch.promote_types(x.dtype, torch.float32)
        return self._apply_rms_norm(x.to(precise), 1 + module.weight.to(precise)).to(x.dtype)

    def _apply_rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = RMSNormStandIn.apply(self.note, x, weight)
        return output

    def _cross_entropy(
        self, module: CrossEntropy, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Stand-in for `CrossEntropy.forward`."""
        n_statistics = VOCAB_PARALLEL_STATISTICS + bool(module.options.smoothing) if self.tp > 1 else 0
        loss: Tensor = CrossEntropyStandIn.apply(self.note, n_statistics, hidden, weight, bias)
        return loss

    def _note_complete_experts(self) -> None:
        self.experts_complete = len(self.recorder.recording.live)

    def _note_attention(
        self, flops: float, fetched_tokens: int, is_backward: bool, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Record a fused kernel."""
        self.note("attention", "attention", flops * (BACKWARD_MATMULS if is_backward else 1), inputs, outputs)
        operators = self.recorder.recording.operators
        operators[-1] = replace(operators[-1], fetched_tokens=fetched_tokens)

    def note(
        self,
        name: str,
        kind: Any,
        flops: float,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        dims: tuple[int, int, int, int] | None = None,
    ) -> None:
        """Record a kernel (see `stand_ins.Note`)."""
        number = self.recorder.number
        reads, writes = Counter[int](), Counter[int]()  # tensors may share a storage, and be read twice
        for counter, tensors in ((reads, inputs), (writes, outputs)):
            for x in tensors:
                counter[number(x)] += count_tensor_bytes(x)
        if name == "_grouped_mm" and dims:
            section = find_experts_section(self.config.model)
            rows = float(inputs[0].shape[0])
            has_other_rows = not self._exchanges_tokens and self.device_kind == "cuda"
            if section and has_other_rows:  # tensor-parallel ranks hold rows of each other's experts
                rows *= dims[0] / section.n_experts
            flops = 2 * rows * math.prod(size for size in dims[1:] if size != ROWS)
            group_rows = max(1, round(rows / dims[0]))
            m, n, k = (group_rows if size == ROWS else size for size in dims[1:])
            dims = dims[0], m, n, k
        operator = Operator(name, kind, flops, dict(reads), dict(writes), dims, inputs[0].element_size())
        if kind == "collective":
            operator = replace(operator, collective=name, sent_bytes=(self.tp - 1) * inputs[0].nbytes)
        self.recorder.recording.operators.append(operator)


def _as_attention(operator: Operator, flops: float, fetched_tokens: int) -> Operator:
    return replace(operator, name="attention", kind="attention", flops=flops, fetched_tokens=fetched_tokens)
