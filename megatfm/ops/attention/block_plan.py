"""Plan attention on a CPU: groups of key blocks that query blocks visit, and bands of tiles.

`plan_blocks` supports any mask. `bands` supports masks under which a query sees a band of keys around it: keys of
neighbouring tiles are overlapping views, so none is copied, and no tile crosses the boundary of a document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.ops.attention.mask import AttentionMask, Band, BandLimits
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
    mask: AttentionMask,
    grid: BlockGrid,
    host_mask: AttentionMask | None = None,
    device: torch.device | None = None,
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
        for chosen, is_shared in _group_by_offset(query_blocks % grid.rows, masked_blocks, shares_mask[query_blocks]):
            examined = chosen[:1] if is_shared else chosen
            group_mask = _make_masks(mask, table, query_blocks[examined], masked_blocks[examined], grid, device)
            groups.append(
                BlockGroup(
                    move_to_device(query_blocks[chosen], device),
                    move_to_device(key_blocks[chosen], device),
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
    mask: AttentionMask,
    table: Tensor,
    query_blocks: Tensor,
    key_blocks: Tensor,
    grid: BlockGrid,
    device: torch.device,
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


# B batch, N query heads, K key-value heads, g = N / K, T queries, S keys, n tiles of b queries and M keys

MAX_CAUSAL_TILE = 2048
"""Longest document that causal attention computes in tiles; the fused kernel takes longer ones as a whole."""

MIN_MEAN_LENGTH = 64
"""Mean length of documents below which tiles cost more than blocks with masks."""


TILE_SIZES = (64, 128, 256)
"""Queries of a tile: larger tiles multiply faster, but compute more hidden pairs (docs/LOG.md, 2026-11-23). The largest
are for documents that are seen fully."""

KEY_ALIGNMENT = 64
"""Tiles have a multiple of this many keys, if there are enough."""


def make_bands(
    limits: BandLimits, documents: Sequence[tuple[int | None, int, int]], device: torch.device, *, fused: bool
) -> list[Band] | None:
    """Return the bands of documents (row, begin, end); None if these are so short that blocks cost less.

    fused: the kernel holds no scores, so that a tile may be as large as its document.
    """
    spans = [span for document in documents for span in _split_into_chunks(document, limits.chunk)]
    if len(spans) * MIN_MEAN_LENGTH > sum(end - begin for _, begin, end in spans):
        return None
    edge_masks: dict[tuple[int, ...], tuple[tuple[int, Tensor], ...]] = {}
    first_queries: dict[tuple[int | None, int, int, int, bool], list[int]] = {}  # by kind of tile
    for row, begin, end in spans:
        for first, last, low, high, causal in _iter_tile_bounds(limits, begin, end, fused):
            kind = row, last - first, high - low, low - first, causal
            first_queries.setdefault(kind, []).append(first)
    result = []
    for (row, queries, keys, offset, causal), firsts in first_queries.items():
        shape = queries, keys, offset
        if shape not in edge_masks:
            edge_masks[shape] = () if causal else _make_edge_masks(limits, *shape, device)
        for first, step, count in _iter_progressions(sorted(firsts), queries):
            result.append(Band(row, first, first + offset, queries, keys, count, step, edge_masks[shape], causal))
    return result + [band for document in documents for band in _iter_global_bands(limits, *document, device)]


def view_tiles(x: Tensor, first: int, size: int, count: int, step: int) -> Tensor:
    """Return […, T, H] as […, n, size, H], a view of `count` tiles, each `step` tokens after the previous one."""
    windows = x.narrow(-2, first, (count - 1) * step + size)
    return windows.unfold(-2, size, step).transpose(-1, -2)


def add_tiles(total: Tensor, parts: Tensor, first: int, step: int) -> None:
    """Add tiles [X, n, size, H] to their tokens of [X, T, H], in place; they may overlap."""
    count, size = parts.shape[1:3]
    width = size if count == 1 else step
    for start in range(0, size, width):
        part = parts[:, :, start : start + width]
        view_tiles(total, first + start, part.shape[2], count, step).add_(part)


def _split_into_chunks(
    document: tuple[int | None, int, int], size: int | None
) -> Iterator[tuple[int | None, int, int]]:
    row, begin, end = document
    for start in range(begin, end, size or end - begin):
        yield row, start, min(start + (size or end - begin), end)


def _iter_tile_bounds(
    limits: BandLimits, begin: int, end: int, fused: bool
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield begin and end of queries, begin and end of keys, and whether the built-in causal mask is the tile's."""
    length = end - begin
    left, right = (length if limit is None else min(limit, length) for limit in (limits.left, limits.right))
    is_full = left >= length - 1
    if fused and is_full and (right >= length - 1 or (right == 0 and length > MAX_CAUSAL_TILE)):
        yield begin, end, begin, end, right < length - 1
        return
    small, medium, large = TILE_SIZES
    size = large if is_full else medium if left + right >= 128 else small
    for first in range(begin, end, size):
        last = min(first + size, end)
        n_before, n_after = (-(-limit // KEY_ALIGNMENT) * KEY_ALIGNMENT for limit in (left, right))
        yield first, last, max(begin, first - n_before), min(end, last + n_after), False


def _iter_global_bands(
    limits: BandLimits, row: int | None, begin: int, end: int, device: torch.device
) -> Iterator[Band]:
    """Yield bands of the pairs with global tokens that lie outside of the band around each query."""
    positions = torch.arange(end - begin, device=device)
    tokens = move_to_device(torch.tensor(limits.global_tokens, dtype=torch.int64), device)
    for low, high in _iter_runs([token for token in limits.global_tokens if token < end - begin]):
        is_outside = ~_is_in_band(limits, positions[:, None], positions[low:high])
        to_global = is_outside & ~torch.isin(positions, tokens)[:, None]
        from_global = ~_is_in_band(limits, positions[low:high, None], positions)
        first, count, length = begin + low, high - low, end - begin
        if to_global.any():
            yield Band(row, begin, first, length, count, partial_columns=((0, to_global),), accumulates=True)
        if from_global.any():
            yield Band(row, first, begin, count, length, partial_columns=((0, from_global),), accumulates=True)


def _iter_runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs (begin, end) of consecutive positions; these are ascending."""
    begin = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield positions[begin], positions[i - 1] + 1
            begin = i


def _is_in_band(limits: BandLimits, q: Tensor, k: Tensor) -> Tensor:
    in_window = q == q if limits.left is None else k >= q - limits.left
    return in_window & (k == k) if limits.right is None else in_window & (k <= q + limits.right)


def _make_edge_masks(
    limits: BandLimits, queries: int, keys: int, offset: int, device: torch.device
) -> tuple[tuple[int, Tensor], ...]:
    """Return (first column, mask) of the keys of a tile that not all of its queries see. offset: first key − first
    query."""
    q = torch.arange(queries, device=device)[:, None]
    begin = 0 if limits.left is None else max(0, min(keys, queries - 1 - limits.left - offset))
    end = keys if limits.right is None else max(begin, min(keys, limits.right - offset + 1))
    unlimited = keys + queries + abs(offset)
    left, right = (unlimited if limit is None else limit for limit in (limits.left, limits.right))
    masks = []
    for low, high in ((0, begin), (end, keys)):
        if low < high:
            k = torch.arange(low, high, device=device) + offset
            masks.append((low, (k >= q - left) & (k <= q + right)))
    return tuple(masks)


def _iter_progressions(firsts: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, step, count) of arithmetic progressions of ascending numbers. size: the step of a single one."""
    start = 0
    while start < len(firsts):
        step = firsts[start + 1] - firsts[start] if start + 1 < len(firsts) else size
        end = start + 1
        while end < len(firsts) and firsts[end] - firsts[end - 1] == step:
            end += 1
        yield firsts[start], step, end - start
        start = end
