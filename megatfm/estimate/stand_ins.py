"""Stand-ins for a profile: attention, norms, the vocabulary's loss and experts by shapes.

A stand-in for a kernel saves and allocates as much as the real one, and notes the kernels that a GPU would run.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.moe import experts as experts_module
from megatfm.layers.moe.experts import Experts, SortedRows
from megatfm.layers.output_head import LMHead
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.cross_entropy import choose_gpu_chunk, pad_row_length
from megatfm.parallel.context_parallel import compute_token_indices
from megatfm.parallel.expert_parallel import install_exchange

Note = Callable[..., None]
"""Called with (name, kind, flops, inputs, outputs, dims=None) for each kernel."""


class AttentionStandIn(torch.autograd.Function):
    """Attention as a fused kernel: saves q, k, v, the output and a float32 for each query."""

    @staticmethod
    def forward(ctx, note, q_BNTH, k_BKSH, v_BKSH, bias):  # type: ignore[no-untyped-def]
        output = q_BNTH.new_empty(q_BNTH.shape[0], q_BNTH.shape[2], q_BNTH.shape[1], v_BKSH.shape[-1])
        output = output.transpose(1, 2)  # kernels store a token's heads side by side
        sums_BNT = q_BNTH.new_empty(q_BNTH.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BNTH, k_BKSH, v_BKSH, output, sums_BNT)
        ctx.note, ctx.bias = note, bias
        note(False, (q_BNTH, k_BKSH, v_BKSH), (output, sums_BNT))
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        gradients = tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
        ctx.note(True, (*ctx.saved_tensors, gradient), gradients)
        into_bias = torch.empty_like(ctx.bias) if ctx.needs_input_grad[4] else None
        return None, *gradients, into_bias


def count_fetched_tokens(core: DotProductAttention, length: int, ranks: int, unit: int, *, is_zigzag: bool) -> int:
    """Return the most tokens whose keys a context-parallel rank sends for local attention in a row of one document.

    0 if attention is not local, so that all keys go around. unit: chunks are multiples of it.
    """
    if ranks == 1 or not core.is_local(length):
        return 0
    with _disable_current_modes():
        row = SequenceMetadata(torch.arange(length)[None])
        tokens_by_rank = compute_token_indices(length, ranks, is_zigzag, unit)
        needed_by_rank = [core.find_reachable_keys(row, tokens) for tokens in tokens_by_rank]
        counts = [
            sum(int(torch.isin(local_tokens, needed).sum()) for r, needed in enumerate(needed_by_rank) if r != rank)
            for rank, local_tokens in enumerate(tokens_by_rank)
        ]
    return max(counts)


class RMSNormStandIn(torch.autograd.Function):
    """RMSNorm as a GPU runs it: one kernel a pass, which saves its input and a float32 for each token."""

    @staticmethod
    def forward(ctx, note, x_BTD, weight_D):  # type: ignore[no-untyped-def]
        output, scales = torch.empty_like(x_BTD), x_BTD.new_empty(*x_BTD.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x_BTD, weight_D, scales)
        ctx.note = note
        note("rms_norm", "pointwise", 0, (x_BTD,), (output, scales))
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x_BTD, weight_D, scales = ctx.saved_tensors
        into_x = torch.empty_like(x_BTD) if ctx.needs_input_grad[1] else None
        into_weight = torch.empty_like(weight_D) if ctx.needs_input_grad[2] else None
        ctx.note("rms_norm", "pointwise", 0, (gradient, x_BTD, scales), (x_BTD if into_x is None else into_x,))
        return None, into_x, into_weight


VOCAB_PARALLEL_STATISTICS = 3
"""Numbers of a token that ranks exchange between the kernels of a vocabulary-parallel loss; one more with label
smoothing."""


class CrossEntropyStandIn(torch.autograd.Function):
    """`ops.cross_entropy` as a GPU runs it: chunks of a gigabyte of logits, read for statistics of their rows, then
    read again and overwritten by gradients: by one kernel, or by two where ranks exchange statistics in between."""

    @staticmethod
    def forward(ctx, note, n_statistics, hidden_MD, weight_WD, bias_W):  # type: ignore[no-untyped-def]
        rows = len(weight_WD)
        chunk = choose_gpu_chunk(rows, hidden_MD.element_size())
        buffer = hidden_MD.new_empty(min(chunk, len(hidden_MD)), pad_row_length(rows))
        needs_hidden, needs_weight = ctx.needs_input_grad[2:4]
        into_hidden, into_weight = torch.empty_like(hidden_MD) if needs_hidden else None, None
        for start in range(0, len(hidden_MD), chunk):
            hidden = hidden_MD[start : start + chunk]
            logits = buffer[: len(hidden), :rows]
            torch.mm(hidden, weight_WD.T, out=logits)
            inputs = logits, logits
            if n_statistics:
                precise = torch.promote_types(logits.dtype, torch.float32)
                statistics = logits.new_empty(n_statistics, len(logits), dtype=precise)
                note("cross_entropy", "pointwise", 0, (logits,), (statistics,))
                note("all_gather", "collective", 0, (statistics,), ())
                inputs = logits, statistics
            note("cross_entropy", "pointwise", 0, inputs, (logits,))
            if into_hidden is not None:
                into_hidden[start : start + chunk] = logits @ weight_WD
            if needs_weight:
                product = logits.T @ hidden
                into_weight = product if into_weight is None else into_weight.float().add_(product)
        into_weight = None if into_weight is None else into_weight.to(weight_WD.dtype)
        ctx.save_for_backward(into_hidden, into_weight)
        ctx.bias = bias_W
        return hidden_MD.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        into_hidden, into_weight = (
            None if saved is None else saved.mul_(gradient.to(saved.dtype)) for saved in ctx.saved_tensors
        )
        into_bias = torch.empty_like(ctx.bias) if ctx.needs_input_grad[4] else None
        return None, None, into_hidden, into_weight, into_bias


ROWS = 0
"""In the dims of a grouped matmul, the rows of a group."""


class GroupedMatmulStandIn(torch.autograd.Function):
    """Grouped matmul of experts with as many rows as they get on average."""

    @staticmethod
    def forward(ctx, note, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI, ends_G)
        ctx.note = note
        output_MO = x_MI.new_empty(len(x_MI), weight_GOI.shape[1])
        groups, outer, inner = weight_GOI.shape
        _note_groups(note, x_MI, weight_GOI, output_MO, (groups, ROWS, outer, inner))
        return output_MO

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x_MI, weight_GOI, _ = ctx.saved_tensors
        into_x = into_weight = None
        groups, outer, inner = weight_GOI.shape
        if ctx.needs_input_grad[1]:
            into_x = torch.empty_like(x_MI)
            _note_groups(ctx.note, gradient, weight_GOI, into_x, (groups, ROWS, inner, outer))
        if ctx.needs_input_grad[2]:
            into_weight = torch.empty_like(weight_GOI)
            _note_groups(ctx.note, gradient, x_MI, into_weight, (groups, outer, inner, ROWS))
        return None, into_x, into_weight, None


def _note_groups(note: Note, left: Tensor, right: Tensor, output: Tensor, dims: tuple[int, int, int, int]) -> None:
    """Note a grouped matmul. dims: groups, m, n and k, with ROWS for a group's rows, whose number `note` knows."""
    note("_grouped_mm", "matmul", 0.0, (left, right), (output,), dims)


class EvenRows(SortedRows):
    """Rows of experts as a CPU has them: those of other ranks' experts are cut off. share: of all choices."""

    def __init__(self, share: float, order_M: Tensor, ends_E: Tensor, top_k: int, **options: bool) -> None:
        super().__init__(order_M, ends_E, top_k, **options)
        self.order = order_M[: round(share * len(order_M))]
        self._bags = self._is_defined_M = None


@contextmanager
def dispatch_evenly(share: float) -> Iterator[None]:
    """Have experts dispatch tokens as on a CPU, evenly. share: of all choices, those of a rank's experts."""
    original = vars(experts_module)["SortedRows"]
    vars(experts_module)["SortedRows"] = partial(EvenRows, share)
    try:
        yield
    finally:
        vars(experts_module)["SortedRows"] = original


class StandInLoss(torch.autograd.Function):
    """A scalar from which a backward pass can start. The gradients of its inputs, ones, are made in the pass, as by a
    later part of the model, and autograd frees them once they are used."""

    @staticmethod
    def forward(ctx, *outputs):  # type: ignore[no-untyped-def]
        ctx.kinds = [(output.shape, output.dtype) for output in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return tuple(torch.ones(shape, dtype=dtype) for shape, dtype in ctx.kinds)


class _GradientsComplete(torch.autograd.Function):
    """Returns a module's inputs, and calls a function when their gradients exist, as FSDP2 does to reduce those of
    weights."""

    @staticmethod
    def forward(ctx, on_complete, *inputs):  # type: ignore[no-untyped-def]
        ctx.on_complete = on_complete
        return inputs

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        ctx.on_complete()
        return None, *gradients


def exchange_tokens(experts: Experts, reached_share: float, on_complete: Callable[[], None]) -> None:
    """Have experts exchange tokens as on several ranks, each of which gets as many rows as it sends.

    The group has one rank: the buffers are those of any number. reached_share: of all choices, those of the group's
    experts; on_complete: called when a backward pass has the gradients of the experts' weights.
    """
    install_exchange(experts, 2, dist.new_group([0]), reached_share)

    def watch(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, weights_BTK, *routing = inputs
        return *_GradientsComplete.apply(on_complete, x_BTD, weights_BTK), *routing

    experts.register_forward_pre_hook(watch)


def forward_predicted_tokens(head: LMHead, fraction: float, hidden_BTD: Tensor, targets_BT: Tensor, **_: Any) -> Tensor:
    """Stand-in for a sparse head's forward. fraction: of the tokens that have a target."""
    tokens = max(1, round(fraction * targets_BT.shape[1]))
    hidden_ND = head._transform_and_scale(hidden_BTD[:, :tokens].flatten(0, 1))
    loss: Tensor = head.loss(hidden_ND, head.weight, targets_BT[:, :tokens].flatten(), head.bias)
    return loss


class HostValues(TorchDispatchMode):
    """Runs operators on real tensors for real, so that the host can branch on a batch's values.

    Enter it within a FakeTensorMode, which gets all other operators.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_index = func._schema.name == "aten::arange"
        if (tensors or is_index) and not any(isinstance(x, FakeTensor) for x in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def record_shared_tables() -> Iterator[dict[str, Tensor]]:
    """Yield a dict that receives the tensors that layers share by `SequenceMetadata.cached`, such as rotary tables."""
    tables: dict[str, Tensor] = {}
    cached = SequenceMetadata.cached

    def record(sequence: SequenceMetadata, key: Hashable, make: Callable[[], Any]) -> Any:
        value = cached(sequence, key, make)
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        tables.update({f"{key} {index}": tensor for index, tensor in enumerate(tensors)})
        return value

    SequenceMetadata.cached = record  # type: ignore[method-assign, assignment]
    try:
        yield tables
    finally:
        SequenceMetadata.cached = cached  # type: ignore[method-assign]
