"""The table of attention kernels: what each supports, where it is preferred, and the choice among them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megatfm.ops.attention.block_sparse import blocked
from megatfm.ops.attention.flex import flex
from megatfm.ops.attention.mask import AttentionMask, BuiltinMask
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.ops.attention.relative_bias import is_relative
from megatfm.ops.attention.sdpa import fused
from megatfm.ops.attention.varlen import supports_head_dims, varlen

MATMUL_SCORES = 2**26
"""On a CPU in bfloat16, up to this many scores at once the written-out form is used: its matrix products run on
oneDNN's bfloat16 kernels, 1.5 to 3 times as fast as the fused kernel (docs/LOG.md, 2026-11-21)."""

LONG = 1024
"""Number of queries from which on a mask of T × S costs more than visiting blocks (docs/LOG.md, 2026-11-22)."""

LONG_ON_GPU = 256
"""The same number on a GPU, where a mask also rules FlashAttention out; not measured yet."""


@dataclass(frozen=True)
class AttentionRequest:
    """Description of one attention call. scores: B · N · T · S. plain: see `AttentionMask.builtin_mask`. has_dropout:
    probabilities are dropped.

    has_dense_bias: numbers for all pairs are added to the scores. has_relative_bias: one for each distance. sinks:
    scores without keys take part. compiled: a block is being compiled. is_varlen: FlashAttention takes its heads,
    and a window of whole documents says what is seen.
    """

    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    scores: int
    plain: BuiltinMask | None
    softcap: bool
    has_dropout: bool
    has_dense_bias: bool = False
    sinks: bool = False
    compiled: bool = False
    is_varlen: bool = False
    has_relative_bias: bool = False

    @classmethod
    def from_inputs(
        cls,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        mask: AttentionMask,
        variant: AttentionOptions,
        *,
        drops: bool,
        bias: Tensor | None = None,
        sinks: bool = False,
        v_width: int | None = None,
    ) -> Self:
        """The case of queries and keys. of_values: their width, where it is not that of the keys."""
        queries, keys = q_BNTH.shape[2], k_BKSH.shape[2]
        scores = q_BNTH.shape[0] * q_BNTH.shape[1] * queries * keys
        softcap = variant.softcap is not None
        compiled = torch.compiler.is_compiling()
        width, grouped = q_BNTH.shape[-1], q_BNTH.shape[1] != k_BKSH.shape[1]
        in_runs = mask.window is not None and supports_head_dims(width, v_width or width, grouped=grouped)
        return cls(
            q_BNTH.device.type,
            q_BNTH.dtype,
            queries,
            keys,
            scores,
            mask.builtin_mask,
            softcap,
            drops,
            bias is not None and not is_relative(bias),
            sinks,
            compiled,
            in_runs,
            is_relative(bias),
        )

    @property
    def needs_dense_mask(self) -> bool:
        """Whether torch's fused kernels would need all scores, or a mask of all pairs, and those are many."""
        long = LONG_ON_GPU if self.device == "cuda" else LONG
        changed = self.softcap or self.has_dropout or self.sinks or self.has_relative_bias
        return self.queries >= long and (self.plain is None or changed)


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention. run: as `attention_reference`."""

    name: str
    run: Callable[..., Tensor]
    supports: Callable[[AttentionRequest], bool]
    is_preferred: Callable[[AttentionRequest], bool]


def _anything(case: AttentionRequest) -> bool:
    return True


def _on_cpu_by_blocks(case: AttentionRequest) -> bool:
    """The blocks visited depend on the batch, so it can't be compiled."""
    return case.device == "cpu" and not (case.has_dense_bias or case.compiled)


def _on_gpu_by_runs(case: AttentionRequest) -> bool:
    """FlashAttention computes in half precision, and with nothing between scores and probabilities."""
    changed = case.softcap or case.has_dropout or case.has_dense_bias or case.has_relative_bias or case.sinks
    half = case.dtype in (torch.bfloat16, torch.float16)
    return case.device == "cuda" and half and case.is_varlen and not changed


def _on_gpu_by_blocks(case: AttentionRequest) -> bool:
    return case.device == "cuda" and not case.has_dense_bias


def _masked(case: AttentionRequest) -> bool:
    return case.needs_dense_mask


def _not_plain(case: AttentionRequest) -> bool:
    return case.plain is None


def _small_on_one_dnn(case: AttentionRequest) -> bool:
    small = case.device == "cpu" and case.dtype == torch.bfloat16 and case.scores <= MATMUL_SCORES
    return small and not case.needs_dense_mask


def _plain_scores(case: AttentionRequest) -> bool:
    """No fused kernel has a soft cap, our dropout, sinks, or a causal order that ends at the last key."""
    square = case.plain != "causal" or case.queries == case.keys
    return square and not (case.softcap or case.has_dropout or case.sinks)


KERNELS = (
    # name       function             what it carries  where it is the fastest
    Kernel("products", attention_reference, _anything, _small_on_one_dnn),
    Kernel("blocks", blocked, _on_cpu_by_blocks, _masked),
    Kernel("varlen", varlen, _on_gpu_by_runs, _not_plain),
    Kernel("flex", flex, _on_gpu_by_blocks, _masked),
    Kernel("fused", fused, _plain_scores, _anything),
)
"""In the order of preference."""


STAND_INS: dict[str, Callable[..., Tensor]] = {}
"""Kernel's name → what runs in its place where tensors have shapes alone, as on an imaginary GPU."""


def choose(case: AttentionRequest) -> Kernel:
    """The first kernel that carries a case and is the fastest in it, else the first that carries it."""
    supporting = [kernel for kernel in KERNELS if kernel.supports(case)]
    kernel = next((kernel for kernel in supporting if kernel.is_preferred(case)), supporting[0])
    stand_in = STAND_INS.get(kernel.name)
    return replace(kernel, run=stand_in) if stand_in else kernel
