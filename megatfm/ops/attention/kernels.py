"""Which kernel computes attention: a table of what each can carry and where it is the fastest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatfm.ops.attention.blocks import blocked
from megatfm.ops.attention.distances import by_distance
from megatfm.ops.attention.flex import flex
from megatfm.ops.attention.fused import fused
from megatfm.ops.attention.products import Variant, attention_reference
from megatfm.ops.attention.varlen import carries_heads, varlen
from megatfm.ops.attention.visible import Plain, Visible

MATMUL_SCORES = 2**26
"""On a CPU in bfloat16, up to this many scores at once the written-out form is used: its matrix products run on
oneDNN's bfloat16 kernels, 1.5 to 3 times as fast as the fused kernel (docs/LOG.md, 2026-11-21)."""

LONG = 1024
"""From so many queries on, a mask of T × S costs more than to look at blocks (docs/LOG.md, 2026-11-22)."""

LONG_ON_GPU = 256
"""The same where a mask also means another kernel than FlashAttention; not measured yet."""


@dataclass(frozen=True)
class Case:
    """What is asked of a kernel. scores: B · N · T · S. plain: see `Visible`. drops: probabilities are dropped.

    biased: numbers for all pairs are added to the scores. by_distance: one for each distance. sinks: scores without
    keys take part. compiled: a block is being compiled. in_runs: FlashAttention takes its heads, and a window of whole
    documents says what is seen.
    """

    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    scores: int
    plain: Plain | None
    softcap: bool
    drops: bool
    biased: bool = False
    sinks: bool = False
    compiled: bool = False
    in_runs: bool = False
    by_distance: bool = False

    @classmethod
    def of(
        cls,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        seen: Visible,
        variant: Variant,
        *,
        drops: bool,
        bias: Tensor | None = None,
        sinks: bool = False,
        of_values: int | None = None,
    ) -> Self:
        """The case of queries and keys. of_values: their width, where it is not that of the keys."""
        queries, keys = q_BNTH.shape[2], k_BKSH.shape[2]
        scores = q_BNTH.shape[0] * q_BNTH.shape[1] * queries * keys
        softcap = variant.softcap is not None
        compiled = torch.compiler.is_compiling()
        width, grouped = q_BNTH.shape[-1], q_BNTH.shape[1] != k_BKSH.shape[1]
        in_runs = seen.window is not None and carries_heads(width, of_values or width, grouped=grouped)
        return cls(
            q_BNTH.device.type,
            q_BNTH.dtype,
            queries,
            keys,
            scores,
            seen.plain,
            softcap,
            drops,
            bias is not None and not by_distance(bias),
            sinks,
            compiled,
            in_runs,
            by_distance(bias),
        )

    @property
    def masked(self) -> bool:
        """Whether torch's fused kernels would need all scores, or a mask of all pairs, and those are many."""
        long = LONG_ON_GPU if self.device == "cuda" else LONG
        changed = self.softcap or self.drops or self.sinks or self.by_distance
        return self.queries >= long and (self.plain is None or changed)


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention. run: as `attention_reference`."""

    name: str
    run: Callable[..., Tensor]
    carries: Callable[[Case], bool]
    fastest: Callable[[Case], bool]


def _anything(case: Case) -> bool:
    return True


def _on_cpu_by_blocks(case: Case) -> bool:
    """Which blocks are visited depends on the batch, so that it can't be compiled."""
    return case.device == "cpu" and not (case.biased or case.compiled)


def _on_gpu_by_runs(case: Case) -> bool:
    """FlashAttention computes in half precision, and with nothing between scores and probabilities."""
    changed = case.softcap or case.drops or case.biased or case.by_distance or case.sinks
    half = case.dtype in (torch.bfloat16, torch.float16)
    return case.device == "cuda" and half and case.in_runs and not changed


def _on_gpu_by_blocks(case: Case) -> bool:
    return case.device == "cuda" and not case.biased


def _masked(case: Case) -> bool:
    return case.masked


def _not_plain(case: Case) -> bool:
    return case.plain is None


def _small_on_one_dnn(case: Case) -> bool:
    small = case.device == "cpu" and case.dtype == torch.bfloat16 and case.scores <= MATMUL_SCORES
    return small and not case.masked


def _plain_scores(case: Case) -> bool:
    """No fused kernel has a soft cap, our dropout, sinks, or a causal order that ends at the last key."""
    square = case.plain != "causal" or case.queries == case.keys
    return square and not (case.softcap or case.drops or case.sinks)


KERNELS = (
    # name       function             what it carries  where it is the fastest
    Kernel("products", attention_reference, _anything, _small_on_one_dnn),
    Kernel("blocks", blocked, _on_cpu_by_blocks, _masked),
    Kernel("varlen", varlen, _on_gpu_by_runs, _not_plain),
    Kernel("flex", flex, _on_gpu_by_blocks, _masked),
    Kernel("fused", fused, _plain_scores, _anything),
)
"""In the order of preference."""


def choose(case: Case) -> Kernel:
    """The first kernel that carries a case and is the fastest in it, else the first that carries it."""
    able = [kernel for kernel in KERNELS if kernel.carries(case)]
    return next((kernel for kernel in able if kernel.fastest(case)), able[0])
