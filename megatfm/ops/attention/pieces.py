"""Which blocks of keys each block of queries visits, and the masks of those that are seen in part."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.ops.attention.visible import AttentionMask
from megatfm.ops.moved import moved

# B batch, n heads that differ (or 1), T queries, S keys, Q query blocks of b tokens, J key blocks of b tokens
# R rows (query blocks of a row of the batch) of a piece, M key blocks that a row sees, P of them in part

MASKED = 2**22
"""So many pairs are looked at together when masks are made."""


@dataclass(frozen=True)
class BlockGroup:
    """rows int64 [R]: B · Q numbers of query blocks. table int64 [R, n, M]: the key blocks that they see.

    mask: boolean [R or 1, n, b, P·b] of the last P of those, where not all is seen; None: all is.
    """

    query_blocks: Tensor
    table: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class BlockGrid:
    """Sizes of what is asked: batch, queries, keys, and tokens in a block."""

    batch: int
    queries: int
    keys: int
    size: int

    @property
    def rows(self) -> int:
        """Blocks of queries in one row of the batch."""
        return -(-self.queries // self.size)

    @property
    def columns(self) -> int:
        """Blocks of keys in one row of the batch."""
        return -(-self.keys // self.size)


def plan_blocks(
    seen: AttentionMask,
    grid: BlockGrid,
    host_mask: AttentionMask | None = None,
    device: torch.device | None = None,
) -> list[BlockGroup]:
    """Rows that see equally many blocks, as many of them in part, and where all their masks are the same, one mask.

    Memory is that of the table of blocks, and linear in T besides. host_mask: the same in the host's memory, where
    `seen` is on a device: by it the host plans, since it would wait for each number; masks are made there.
    """
    host_mask = host_mask or seen
    table = _rows(host_mask.block_mask(grid.size), grid)
    device = device or table.device
    partial = table & ~_rows(host_mask.full_block_mask(grid.size), grid)
    if grid.keys % grid.size:
        partial[..., -1] = table[..., -1]
    # Whole blocks come first, those seen in part after them. Where heads see unequally many, the rest is masked.
    order = (partial.to(torch.int8) + 2 * (~table).to(torch.int8)).argsort(dim=-1, stable=True)
    found = table.sum(-1)
    count = found.amax(1)
    masked = (partial.sum(-1) + count[:, None] - found).amax(1)
    alike = _shares_mask(host_mask, table, grid)
    made = []
    for m, p in torch.stack([count, masked], 1).unique(dim=0).tolist():
        rows = ((count == m) & (masked == p)).nonzero()[:, 0]
        if not m:
            continue
        listed = order[rows][..., :m]
        if not p:
            made.append(BlockGroup(moved(rows, device), moved(listed, device), None))
            continue
        for at, shared in _group_by_offset(rows % grid.rows, listed[..., m - p :], alike[rows]):
            asked = at[:1] if shared else at
            mask = _masks(seen, table, rows[asked], listed[asked][..., m - p :], grid, device)
            made.append(BlockGroup(moved(rows[at], device), moved(listed[at], device), mask))
    return made


def _rows(table_BnQJ: Tensor, grid: BlockGrid) -> Tensor:
    """[B · Q, n, J]."""
    return table_BnQJ.expand(grid.batch, -1, -1, -1).transpose(1, 2).flatten(0, 1)


def _shares_mask(seen: AttentionMask, table: Tensor, grid: BlockGrid) -> Tensor:
    """[B · Q]: the rows whose masks depend on the distances of their blocks alone."""
    repeats = seen.translation_invariant_blocks(grid.size)
    if repeats is None:
        return table.new_zeros(len(table))
    q_BQ, k_BJ = (x.expand(grid.batch, -1) for x in repeats)
    if grid.keys % grid.size:
        k_BJ = k_BJ & (torch.arange(grid.columns, device=k_BJ.device) < grid.columns - 1)
    other = (~k_BJ)[:, None].expand(-1, grid.rows, -1).flatten(0, 1)
    return q_BQ.flatten() & ~(table & other[:, None]).flatten(1).any(1)


def _group_by_offset(places: Tensor, blocks: Tensor, alike: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Which of the rows make a piece, and whether they share one mask."""
    if not alike.all():
        yield (~alike).nonzero()[:, 0], False
    at = alike.nonzero()[:, 0]
    if len(at):
        distances, kind = (blocks[at] - places[at, None, None]).flatten(1).unique(dim=0, return_inverse=True)
        for number in range(len(distances)):
            yield at[kind == number], True


def _masks(
    seen: AttentionMask, table: Tensor, rows: Tensor, blocks: Tensor, grid: BlockGrid, device: torch.device
) -> Tensor:
    """[R, n, b, P·b] on the device, true where a query of a row sees a key of the blocks [R, n, P]."""
    inside = torch.arange(grid.size, device=device)
    n = torch.arange(blocks.shape[1], device=device)[None, :, None, None]
    each = max(1, MASKED // (grid.size**2 * blocks[0].numel()))
    of_all = (moved(x, device).split(each) for x in (rows, blocks, table[rows].gather(-1, blocks)))
    made = []
    for row, block, listed in zip(*of_all, strict=True):
        b = (row // grid.rows)[:, None, None, None]
        q = ((row % grid.rows)[:, None] * grid.size + inside).clamp(max=grid.queries - 1)[:, None, :, None]
        k = (block[..., None] * grid.size + inside).flatten(2)[:, :, None]
        held = (k < grid.keys) & listed.repeat_interleave(grid.size, -1)[:, :, None]
        made.append(seen.mask_mod(b, n, q, k.clamp(max=grid.keys - 1)) & held)
    return torch.cat(made)
