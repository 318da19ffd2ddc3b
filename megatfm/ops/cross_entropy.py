"""Cross-entropy over a vocabulary as a sum, so that a global mean is taken once, over the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.torch_private import is_fake, keeps_graph

IGNORE = -100
"""Target of tokens without a loss."""

LOGITS_BYTES = 2**30
"""Size of the logits that are in memory at once on a GPU."""

ROW_ALIGNMENT = 64
"""Rows of the logits buffer are padded to a multiple of this many elements, for tensor cores."""

CPU_CHUNK_ELEMENTS = 2**20
"""On a CPU, logits that are turned into gradients together, so that they fit the caches (docs/LOG.md, 2026-11-22)."""

# M tokens of all rows, D model width, V vocabulary, W rows of this vocabulary shard


@dataclass(frozen=True)
class VocabularyShard:
    """Rows of the vocabulary that this rank holds.

    start: first row. vocabulary: rows of all P shards. all_gather: function that gathers a tensor [...] of this shard
    from all shards, [P, ...].
    """

    start: int
    vocabulary: int
    all_gather: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LogitOptions:
    """softcap: c, logits l become c·tanh(l/c). smoothing: label smoothing, uniform over the vocabulary."""

    softcap: float | None = None
    smoothing: float = 0.0


def cross_entropy_reference(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    bias_V: Tensor | None = None,
    options: LogitOptions = LogitOptions(),
) -> Tensor:
    """Return Σ −log softmax(h Wᵀ + b)[target] over tokens with a target, in nats, from all logits at once."""
    logits_MV = F.linear(hidden_MD, weight_VD, bias_V).to(_widen_dtype(hidden_MD))
    if options.softcap:
        logits_MV = options.softcap * torch.tanh(logits_MV / options.softcap)
    return F.cross_entropy(
        logits_MV, targets_M, ignore_index=IGNORE, reduction="sum", label_smoothing=options.smoothing
    )


def cross_entropy(
    hidden_MD: Tensor,
    weight_WD: Tensor,
    targets_M: Tensor,
    bias_W: Tensor | None = None,
    options: LogitOptions = LogitOptions(),
    *,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
    losses_M: Tensor | None = None,
    weights_M: Tensor | None = None,
) -> Tensor:
    """Compute cross-entropy in chunks of tokens, so that tokens × vocabulary logits never exist at once.

    The forward pass overwrites the logits with their gradients and computes the needed gradients of the inputs (as in
    Liger, Hsu et al. 2024); the backward pass only scales them. Returns the sum of the losses, in nats.

    chunk: tokens at a time; None: as memory allows. shard: of the vocabulary, whose rows weight_WD holds; each shard
    returns the full loss and a partial gradient of hidden_MD. losses_M: output buffer for the tokens' losses, 0 for
    ignored targets. weights_M: factors on the tokens' losses in the sum, without gradients.
    """
    chunk = chunk or choose_chunk(hidden_MD, len(weight_WD))
    # ctx.needs_input_grad is true for parameters even under no_grad.
    needs_grad = tuple(
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden_MD, weight_WD, bias_W)
    )
    return _ChunkedCrossEntropy.apply(
        hidden_MD, weight_WD, bias_W, targets_M, options, chunk, shard, needs_grad, losses_M, weights_M
    )


def choose_chunk(hidden_MD: Tensor, rows: int) -> int:
    """Return the number of tokens whose logits over `rows` vocabulary rows are in memory at once.

    Every chunk reads and writes the full weight gradient, so few large chunks are cheaper. On a CPU, that cost is
    negligible from 1,024 tokens on.
    """
    return 1024 if hidden_MD.device.type == "cpu" else choose_gpu_chunk(rows, hidden_MD.element_size())


def choose_gpu_chunk(rows: int, itemsize: int) -> int:
    """Return the number of tokens whose logits, of `itemsize` bytes, are in a GPU's memory at once."""
    chunk = LOGITS_BYTES // (pad_row_length(rows) * itemsize)
    return max(chunk // ROW_ALIGNMENT * ROW_ALIGNMENT, ROW_ALIGNMENT)


def pad_row_length(rows: int) -> int:
    """Return the padded row length of the logits buffer."""
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        targets_M: Tensor,
        options: LogitOptions,
        chunk: int,
        shard: VocabularyShard | None,
        needs_grad: tuple[bool, bool, bool],
        losses_M: Tensor | None,
        weights_M: Tensor | None,
    ) -> Tensor:
        if weights_M is not None and losses_M is None:
            losses_M = torch.empty_like(weights_M)
        precise, vocabulary = _widen_dtype(hidden_MD), len(weight_WD)
        buffer = hidden_MD.new_empty(min(chunk, len(hidden_MD)), pad_row_length(vocabulary))
        # oneDNN's bf16 matmuls with AMX read beyond a row's end and multiply by zero, which NaN would survive.
        buffer[:, vocabulary:] = 0
        total = hidden_MD.new_zeros((), dtype=precise)
        needs_hidden_grad, needs_weight_grad, needs_bias_grad = needs_grad
        hidden_gradient = torch.empty_like(hidden_MD) if needs_hidden_grad else None
        weight_gradient = None
        bias_gradient = torch.zeros_like(bias_W, dtype=precise) if bias_W is not None and needs_bias_grad else None
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden = hidden_MD[rows]
            logits = buffer[: len(hidden), :vocabulary]
            if bias_W is None:
                torch.mm(hidden, weight_WD.T, out=logits)
            else:
                torch.addmm(bias_W, hidden, weight_WD.T, out=logits)
            losses = None if losses_M is None else losses_M[rows]
            chunk_loss = _to_gradient(logits, targets_M[rows], options, shard, losses)
            gradient = logits
            if weights_M is not None and losses is not None:
                chunk_loss = (weights_M[rows] * losses).sum()
                gradient *= weights_M[rows, None].to(gradient.dtype)
            total += chunk_loss
            if hidden_gradient is not None:
                hidden_gradient[rows] = gradient @ weight_WD
            if needs_weight_grad:
                weight_gradient = _add_product(weight_gradient, gradient.T, hidden)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=precise)
        if needs_weight_grad and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight_WD)
        ctx.save_for_backward(
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight_WD.dtype),
            None if bias_gradient is None or bias_W is None else bias_gradient.to(bias_W.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The loss is one sum, so scaling its gradient afterwards is exact up to rounding. Scale in place unless the
        # graph is kept for another backward pass: on a CPU, new memory would cost more than the multiplication.
        is_graph_kept = keeps_graph()
        scaled = (
            None if saved is None else torch.mul(saved, gradient.to(saved.dtype), out=None if is_graph_kept else saved)
            for saved in ctx.saved_tensors
        )
        return *scaled, None, None, None, None, None, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right, accumulated in float32 or better, in place where dtypes allow.

    bfloat16 products are rounded to bfloat16 before they are added. The first product is returned unconverted.
    """
    if total is None:
        return left @ right
    if total.dtype == right.dtype == _widen_dtype(right):
        return total.addmm_(left, right)
    return total.to(_widen_dtype(right)).add_(left @ right)


def _to_gradient(
    logits: Tensor, targets_M: Tensor, options: LogitOptions, shard: VocabularyShard | None, losses_M: Tensor | None
) -> Tensor:
    """Return the loss of a chunk, and overwrite its logits [M, W] with their gradient.

    A GPU runs Triton kernels. A CPU processes a few rows at a time, so that intermediate results stay in its cache.
    Vocabulary shards communicate once a chunk.
    """
    if kernels := _choose_kernels(logits):
        losses = _run_kernels(kernels, logits, targets_M, options, shard)
        if losses_M is not None:
            losses_M.copy_(losses)
        return losses.sum()
    all_at_once = shard is not None or logits.device.type != "cpu"
    step = len(logits) if all_at_once else max(1, CPU_CHUNK_ELEMENTS // logits.shape[1])
    shard = shard or VocabularyShard(0, logits.shape[1], lambda values: values[None])
    sums = []
    for start in range(0, len(logits), step):
        rows, targets = logits[start : start + step], targets_M[start : start + step]
        values = rows.to(_widen_dtype(rows))
        losses_M1, gradient = _compute_chunk(values, targets[:, None], options, shard)
        if gradient is not rows:
            rows.copy_(gradient)
        if losses_M is not None:
            losses_M[start : start + step] = losses_M1[:, 0]
        sums.append(losses_M1.sum())
    return torch.stack(sums).sum()


def _choose_kernels(logits: Tensor) -> Any:
    """Return the module of Triton kernels, if the logits are on a GPU and Triton is installed; None otherwise."""
    if logits.device.type == "cuda" and is_fake(logits):
        return _FakeKernels
    if logits.device.type != "cuda" or logits.dtype == torch.float64 or not has_triton():
        return None
    from megatfm.ops import cross_entropy_triton

    return cross_entropy_triton


class _FakeKernels:
    """Stand-ins for the Triton kernels on fake tensors."""

    @staticmethod
    def to_gradients(logits: Tensor, targets_M: Tensor, options: LogitOptions) -> Tensor:
        return logits.new_empty(len(logits), dtype=torch.float32)

    @staticmethod
    def reduce_rows(logits: Tensor, targets_M: Tensor, options: LogitOptions, first: int) -> Tensor:
        return logits.new_empty(3 + (options.smoothing > 0), len(logits), 1, dtype=torch.float32)

    @staticmethod
    def write_gradients(*args: Any) -> None:
        pass


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; torch's GPU builds come with it."""
    return find_spec("triton") is not None


def _run_kernels(
    kernels: Any, logits: Tensor, targets_M: Tensor, options: LogitOptions, shard: VocabularyShard | None
) -> Tensor:
    """Return the losses [M] of a chunk, and overwrite its logits [M, W] with the gradient of their sum."""
    if shard is None:
        losses: Tensor = kernels.to_gradients(logits, targets_M, options)
        return losses
    statistics = kernels.reduce_rows(logits, targets_M, options, shard.start)
    softmax = combine_shards(statistics, targets_M[:, None], options, shard)
    kernels.write_gradients(logits, targets_M, options, shard.start, softmax.max_logit, softmax.sum_exp, softmax.spread)
    return softmax.losses[:, 0]


class Softmax(NamedTuple):
    """Softmax of a chunk over the full vocabulary.

    losses: 0 for ignored targets. max_logit: largest logit. sum_exp: of exp(logit − largest). All are [M, 1].
    spread: label smoothing of each entry of the vocabulary.
    """

    losses: Tensor
    max_logit: Tensor
    sum_exp: Tensor
    spread: float


def combine_shards(
    statistics_SM1: Tensor, targets_M1: Tensor, options: LogitOptions, shard: VocabularyShard
) -> Softmax:
    """Combine the statistics of all shards.

    statistics_SM1: this shard's largest logit m; Σ exp(logit − m); the target's logit − m, or −∞ if another shard has
    it; with label smoothing, also Σ logit. Each shard subtracts its own m, so that a single all-gather is enough.
    """
    max_P, sum_exp_P, target_logit_P, *sum_of_logits_P = shard.all_gather(statistics_SM1).unbind(1)
    max_logit = max_P.amax(0)
    difference_P = max_P - max_logit
    sum_exp = (difference_P.exp() * sum_exp_P).sum(0)
    target_logit = (target_logit_P + difference_P).amax(0)
    spread = options.smoothing / shard.vocabulary
    if options.smoothing:
        mean_logit = sum_of_logits_P[0].sum(0) / shard.vocabulary - max_logit
        target_logit = (1 - options.smoothing) * target_logit + options.smoothing * mean_logit
    # No shard has a target beyond the vocabulary: return NaN rather than a wrong loss.
    is_valid = (targets_M1 >= 0) & (targets_M1 < shard.vocabulary)
    losses = (sum_exp.log() - target_logit).where(is_valid, torch.nan).where(targets_M1 != IGNORE, 0)
    return Softmax(losses, max_logit, sum_exp, spread)


def _compute_chunk(
    logits: Tensor, targets_M1: Tensor, options: LogitOptions, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """Return the losses [M, 1] of a chunk and the gradient of their sum by the logits [M, W]; overwrites the logits."""
    has_target = targets_M1 != IGNORE
    local = targets_M1 - shard.start
    is_local = (local >= 0) & (local < logits.shape[1])
    local = local.where(is_local, 0)
    slope = None
    if options.softcap:
        logits = torch.tanh(logits / options.softcap)
        slope = 1 - logits.square()
        logits *= options.softcap
    sum_of_logits = [logits.sum(1, keepdim=True)] if options.smoothing else []
    max_logit = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)  # also if all are −∞
    logits -= max_logit
    target_logit = logits.gather(1, local).where(is_local, -torch.inf)
    exponentials = logits.exp_()
    statistics = [max_logit, exponentials.sum(1, keepdim=True), target_logit, *sum_of_logits]
    softmax = combine_shards(torch.stack(statistics), targets_M1, options, shard)
    gradient = exponentials.mul_(has_target * (max_logit - softmax.max_logit).exp() / softmax.sum_exp)
    if options.smoothing:
        gradient -= softmax.spread * has_target.to(gradient.dtype)
    gradient.scatter_add_(1, local, (options.smoothing - 1) * (is_local & has_target).to(gradient.dtype))
    if slope is not None:
        gradient *= slope
    return softmax.losses, gradient


def _widen_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def shift_targets(targets_BT: Tensor, documents_BT: Tensor | None, n: int) -> Tensor:
    """Return the targets `n` tokens further on in the same document, −100 where there is none, [B, T]."""
    shifted = torch.full_like(targets_BT, IGNORE)
    shifted[:, :-n] = targets_BT[:, n:]
    if documents_BT is not None:
        shifted[:, :-n][documents_BT[:, n:] != documents_BT[:, :-n]] = IGNORE
    return shifted
