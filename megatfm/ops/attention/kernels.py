"""Attention kernels: what each supports, where it is preferred, and the choice among them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from megatfm.ops.attention.block_sparse import block_sparse_attention
from megatfm.ops.attention.flex import MIN_HEAD_WIDTH, flex
from megatfm.ops.attention.fused import sdpa_attention, supports_device, supports_head_dims, varlen
from megatfm.ops.attention.mask import AttentionMask, BuiltinMask, is_relative
from megatfm.ops.attention.reference import AttentionOptions, attend_by_document, attention_reference

MATMUL_SCORES = 2**26
"""Largest number of scores for which a CPU in bfloat16 uses `attention_reference`: its matmuls run on oneDNN's bfloat16
kernels, 1.5 to 3 times as fast as the fused kernel (docs/LOG.md, 2026-11-21)."""

LONG = 1024
"""Number of queries above which a mask of T × S costs more than block-sparse attention (docs/LOG.md, 2026-11-22)."""

LONG_ON_GPU = 256
"""Same on a GPU, where a mask also excludes FlashAttention; not measured yet."""


@dataclass(frozen=True)
class AttentionRequest:
    """Description of one attention call.

    scores: number of scores, B · N · T · S. builtin_mask: as in `AttentionMask`. has_dense_bias: a bias of all pairs.
    trains_dense_bias: and it needs a gradient. has_relative_bias: a bias by distance. compiled: a block is being
    compiled. is_varlen: the mask is a window within documents, and FlashAttention supports the heads and the
    device. is_flex: FlexAttention supports the heads and the dtype.
    """

    device: str
    dtype: torch.dtype
    queries: int
    keys: int
    scores: int
    builtin_mask: BuiltinMask | None
    softcap: bool
    has_dropout: bool
    has_dense_bias: bool = False
    sinks: bool = False
    compiled: bool = False
    is_varlen: bool = False
    has_relative_bias: bool = False
    trains_dense_bias: bool = False
    is_flex: bool = True

    @classmethod
    def from_inputs(
        cls,
        q_BNTH: Tensor,
        k_BKSH: Tensor,
        mask: AttentionMask,
        options: AttentionOptions,
        *,
        has_dropout: bool,
        bias: Tensor | None = None,
        sinks: bool = False,
        v_width: int | None = None,
    ) -> Self:
        """Describe a call. v_width: head width of values; None: that of the keys."""
        queries, keys = q_BNTH.shape[2], k_BKSH.shape[2]
        scores = q_BNTH.shape[0] * q_BNTH.shape[1] * queries * keys
        is_relative_bias = is_relative(bias)
        is_dense_bias = bias is not None and not is_relative_bias
        width, grouped = q_BNTH.shape[-1], q_BNTH.shape[1] != k_BKSH.shape[1]
        # Its kernel sums in float32, and multiplies no narrower matrices.
        is_flex = min(width, v_width or width) >= MIN_HEAD_WIDTH and q_BNTH.dtype != torch.float64
        is_varlen = mask.window is not None and supports_head_dims(width, v_width or width, grouped=grouped)
        is_varlen = is_varlen and supports_device(q_BNTH.device, width)
        return cls(
            device=q_BNTH.device.type,
            dtype=q_BNTH.dtype,
            queries=queries,
            keys=keys,
            scores=scores,
            builtin_mask=mask.builtin_mask,
            softcap=options.softcap is not None,
            has_dropout=has_dropout,
            has_dense_bias=is_dense_bias,
            sinks=sinks,
            compiled=torch.compiler.is_compiling(),
            is_varlen=is_varlen,
            has_relative_bias=is_relative_bias,
            trains_dense_bias=bias is not None and is_dense_bias and bias.requires_grad,
            is_flex=is_flex,
        )

    @property
    def needs_dense_mask(self) -> bool:
        """Whether torch's fused kernels would need many scores at once, or a large mask of all pairs."""
        min_queries = LONG_ON_GPU if self.device == "cuda" else LONG
        has_score_changes = self.softcap or self.has_dropout or self.sinks or self.has_relative_bias
        return self.queries >= min_queries and (self.builtin_mask is None or has_score_changes)


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention. run: has the signature of `attention_reference`."""

    name: str
    run: Callable[..., Tensor]
    supports: Callable[[AttentionRequest], bool]
    is_preferred: Callable[[AttentionRequest], bool]


def _supports_by_document(request: AttentionRequest) -> bool:
    """Not compiled, since the documents depend on the batch."""
    has_score_changes = request.softcap or request.sinks or request.has_dense_bias or request.has_relative_bias
    return request.device == "cpu" and request.has_dropout and not (has_score_changes or request.compiled)


def _supports_block_sparse(request: AttentionRequest) -> bool:
    """Is not compiled, since the visited blocks depend on the batch."""
    return request.device == "cpu" and not (request.has_dense_bias or request.compiled)


def _supports_varlen(request: AttentionRequest) -> bool:
    """FlashAttention needs half precision, and changes nothing between scores and probabilities."""
    has_bias = request.has_dense_bias or request.has_relative_bias
    has_score_changes = request.softcap or request.has_dropout or has_bias or request.sinks
    is_half = request.dtype in (torch.bfloat16, torch.float16)
    return request.device == "cuda" and is_half and request.is_varlen and not has_score_changes


def _supports_flex(request: AttentionRequest) -> bool:
    return request.device == "cuda" and request.is_flex and not request.has_dense_bias


def _prefers_matmuls(request: AttentionRequest) -> bool:
    """For bfloat16, and for biases that need gradients, with which torch fuses nothing and looks for blind queries."""
    is_unfused = request.dtype == torch.bfloat16 or request.trains_dense_bias
    fits = request.scores <= MATMUL_SCORES and not request.needs_dense_mask
    return request.device == "cpu" and is_unfused and fits


def _supports_sdpa(request: AttentionRequest) -> bool:
    """SDPA has no soft cap, keyed dropout or sinks, and no causal mask aligned to the last key."""
    is_aligned = request.builtin_mask != "causal" or request.queries == request.keys
    return is_aligned and not (request.softcap or request.has_dropout or request.sinks)


KERNELS = (
    # name, function, what it supports, where it is preferred
    Kernel(
        "documents", attend_by_document, _supports_by_document,
        lambda request: request.builtin_mask is None and not request.needs_dense_mask,
    ),
    Kernel("products", attention_reference, lambda _: True, _prefers_matmuls),
    Kernel("blocks", block_sparse_attention, _supports_block_sparse, lambda request: request.needs_dense_mask),
    Kernel("varlen", varlen, _supports_varlen, lambda request: request.builtin_mask is None),
    Kernel("flex", flex, _supports_flex, lambda request: request.needs_dense_mask),
    Kernel("fused", sdpa_attention, _supports_sdpa, lambda _: True),
)  # fmt: skip
"""Kernels in order of preference."""


STAND_INS: dict[str, Callable[..., Tensor]] = {}
"""Kernel's name → replacement for fake tensors, as on an imaginary GPU."""


def choose_kernel(request: AttentionRequest) -> Kernel:
    """Return the first supporting kernel that is preferred for a request, else the first supporting one."""
    supporting = [kernel for kernel in KERNELS if kernel.supports(request)]
    kernel = next((kernel for kernel in supporting if kernel.is_preferred(request)), supporting[0])
    stand_in = STAND_INS.get(kernel.name)
    return replace(kernel, run=stand_in) if stand_in else kernel
