"""Plan blockwise attention on a CPU, under any mask: groups of query blocks, and the key blocks that they visit."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.ops.attention.mask import AttentionMask
from megatfm.ops.transfer import move_to_device

# B batch, n heads that differ (or 1), T queries, S keys, Q query blocks of b tokens, J key blocks of b tokens
# R query blocks of a group, M key blocks that each of them sees, P of them in part

MAX_MASK_PAIRS = 2**22
"""Number of pairs for which masks are computed at once."""


@dataclass(frozen=True)
class BlockGroup:
    """Query blocks that see equally many key blocks, and equally many of them in part.

    query_blocks: int64 [R], indices in all B · Q. table: int64 [R, n, M], indices of the key blocks that they see.
    mask: boolean [R or 1, n, b, P·b] of the last P of these; None: all of them are seen fully.
    """

    query_blocks: Tensor
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class BlockGrid:
    """Sizes of the attention problem: batch, queries, keys, and tokens in a block."""

    batch: int
    queries: int
    keys: int
    size: int

    @property
    def rows(self) -> int:
        """Number of query blocks of a row of the batch."""
        return -(-self.queries // self.size)

    @property
    def columns(self) -> int:
        """Number of key blocks of a row of the batch."""
        return -(-self.keys // self.size)


def plan_blocks(
    mask: AttentionMask, grid: BlockGrid, host_mask: AttentionMask | None = None, device: torch.device | None = None
) -> list[BlockGroup]:
    """Group query blocks by the number of key blocks that they see; groups with equal masks have one mask.

    Memory is that of the table of blocks, and else linear in T. host_mask: `mask` in host memory if that is on a
    device; the host plans with it, as it would wait for each value from the device, where only the masks are computed.
    """
    host_mask = host_mask or mask
    table = _group_by_query_block(host_mask.block_mask(grid.size), grid)
    device = device or table.device
    partial = table & ~_group_by_query_block(host_mask.full_block_mask(grid.size), grid)
    if grid.keys % grid.size:
        partial[..., -1] = table[..., -1]
    # Fully seen blocks first, then partly seen ones. If heads see different numbers of blocks, the rest is masked.
    order = (partial.to(torch.int8) + 2 * (~table).to(torch.int8)).argsort(dim=-1, stable=True)
    n_seen_by_head = table.sum(-1)
    n_seen = n_seen_by_head.amax(1)
    n_masked = (partial.sum(-1) + n_seen[:, None] - n_seen_by_head).amax(1)
    shares_mask = _shares_mask(host_mask, table, grid)
    groups = []
    for m, p in torch.stack([n_seen, n_masked], 1).unique(dim=0).tolist():
        if not m:
            continue
        query_blocks = ((n_seen == m) & (n_masked == p)).nonzero()[:, 0]
        key_blocks = order[query_blocks][..., :m]
        if not p:
            groups.append(BlockGroup(move_to_device(query_blocks, device), move_to_device(key_blocks, device), None))
            continue
        masked_blocks = key_blocks[..., m - p :]
        for group_indices, is_shared in _group_by_offset(
            query_blocks % grid.rows, masked_blocks, shares_mask[query_blocks]
        ):
            examined = group_indices[:1] if is_shared else group_indices
            group_mask = _make_masks(mask, table, query_blocks[examined], masked_blocks[examined], grid, device)
            groups.append(
                BlockGroup(
                    move_to_device(query_blocks[group_indices], device),
                    move_to_device(key_blocks[group_indices], device),
                    group_mask,
                )
            )
    return groups


def _group_by_query_block(table_BnQJ: Tensor, grid: BlockGrid) -> Tensor:
    """Reshape [B or 1, n, Q, J] → [B · Q, n, J]."""
    return table_BnQJ.expand(grid.batch, -1, -1, -1).transpose(1, 2).flatten(0, 1)


def _shares_mask(mask: AttentionMask, table: Tensor, grid: BlockGrid) -> Tensor:
    """Return booleans [B · Q] of query blocks whose masks depend only on the distances of their key blocks."""
    invariant = mask.find_translation_invariant_blocks(grid.size)
    if invariant is None:
        return table.new_zeros(len(table))
    q_BQ, k_BJ = (x.expand(grid.batch, -1) for x in invariant)
    if grid.keys % grid.size:
        k_BJ = k_BJ & (torch.arange(grid.columns, device=k_BJ.device) < grid.columns - 1)
    is_excluded = (~k_BJ)[:, None].expand(-1, grid.rows, -1).flatten(0, 1)
    return q_BQ.flatten() & ~(table & is_excluded[:, None]).flatten(1).any(1)


def _group_by_offset(query_blocks: Tensor, key_blocks: Tensor, shares_mask: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield the indices of each group of query blocks, and whether they share one mask.

    query_blocks: [R], indices in their rows. key_blocks: [R, n, P]. shares_mask: boolean [R].
    """
    if not shares_mask.all():
        yield (~shares_mask).nonzero()[:, 0], False
    indices = shares_mask.nonzero()[:, 0]
    if len(indices):
        distances = (key_blocks[indices] - query_blocks[indices, None, None]).flatten(1)
        unique, group_of = distances.unique(dim=0, return_inverse=True)
        for group in range(len(unique)):
            yield indices[group_of == group], True


def _make_masks(
    mask: AttentionMask, table: Tensor, query_blocks: Tensor, key_blocks: Tensor, grid: BlockGrid, device: torch.device
) -> Tensor:
    """Return booleans [R, n, b, P·b] on the device: which keys of the blocks [R, n, P] each query sees."""
    offsets = torch.arange(grid.size, device=device)
    n = torch.arange(key_blocks.shape[1], device=device)[None, :, None, None]
    blocks_at_once = max(1, MAX_MASK_PAIRS // (grid.size**2 * key_blocks[0].numel()))
    tensors = query_blocks, key_blocks, table[query_blocks].gather(-1, key_blocks)
    chunks = (move_to_device(x, device).split(blocks_at_once) for x in tensors)
    masks = []
    for q_block, k_block, is_visible in zip(*chunks, strict=True):
        b = (q_block // grid.rows)[:, None, None, None]
        q = (q_block % grid.rows)[:, None] * grid.size + offsets
        q = q.clamp(max=grid.queries - 1)[:, None, :, None]
        k = (k_block[..., None] * grid.size + offsets).flatten(2)[:, :, None]
        is_valid = (k < grid.keys) & is_visible.repeat_interleave(grid.size, -1)[:, :, None]
        masks.append(mask.mask_mod(b, n, q, k.clamp(max=grid.keys - 1)) & is_valid)
    return torch.cat(masks)
