"""Plans of attention on a CPU: groups of key blocks that query blocks visit, and bands of tiles.

`plan_blocks` serves any mask. `bands` serves masks under which a query sees all keys from so many before it to so many
after: keys of neighbouring tiles are views that overlap, so that none is copied, and tiles begin where documents do, so
that none of them lies in two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm.ops.attention.mask import AttentionMask, Band, BandLimits
from megatfm.ops.transfer import moved

# B batch, n heads that differ (or 1), T queries, S keys, Q query blocks of b tokens, J key blocks of b tokens
# R rows (query blocks of a row of the batch) of a piece, M key blocks that a row sees, P of them in part

MASKED = 2**22
"""Number of pairs examined together when masks are made."""


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
    """Sizes of the attention problem: batch, queries, keys, and tokens in a block."""

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
    mask: AttentionMask,
    grid: BlockGrid,
    host_mask: AttentionMask | None = None,
    device: torch.device | None = None,
) -> list[BlockGroup]:
    """Rows that see equally many blocks, as many of them in part, and where all their masks are the same, one mask.

    Memory is that of the table of blocks, and linear in T besides. host_mask: the same in the host's memory, where
    `mask` is on a device: by it the host plans, since it would wait for each number; masks are made there.
    """
    host_mask = host_mask or mask
    table = _rows(host_mask.block_mask(grid.size), grid)
    device = device or table.device
    partial = table & ~_rows(host_mask.full_block_mask(grid.size), grid)
    if grid.keys % grid.size:
        partial[..., -1] = table[..., -1]
    # Whole blocks come first, those seen in part after them. Where heads see unequally many, the rest is masked.
    order = (partial.to(torch.int8) + 2 * (~table).to(torch.int8)).argsort(dim=-1, stable=True)
    counts = table.sum(-1)
    count = counts.amax(1)
    masked = (partial.sum(-1) + count[:, None] - counts).amax(1)
    shares_mask = _shares_mask(host_mask, table, grid)
    planned = []
    for m, p in torch.stack([count, masked], 1).unique(dim=0).tolist():
        rows = ((count == m) & (masked == p)).nonzero()[:, 0]
        if not m:
            continue
        visible_blocks = order[rows][..., :m]
        if not p:
            planned.append(BlockGroup(moved(rows, device), moved(visible_blocks, device), None))
            continue
        for at, shared in _group_by_offset(rows % grid.rows, visible_blocks[..., m - p :], shares_mask[rows]):
            queried = at[:1] if shared else at
            group_mask = _masks(
                mask, table, rows[queried], visible_blocks[queried][..., m - p :], grid, device
            )
            planned.append(BlockGroup(moved(rows[at], device), moved(visible_blocks[at], device), group_mask))
    return planned


def _rows(table_BnQJ: Tensor, grid: BlockGrid) -> Tensor:
    """[B · Q, n, J]."""
    return table_BnQJ.expand(grid.batch, -1, -1, -1).transpose(1, 2).flatten(0, 1)


def _shares_mask(mask: AttentionMask, table: Tensor, grid: BlockGrid) -> Tensor:
    """[B · Q]: the rows whose masks depend on the distances of their blocks alone."""
    repeats = mask.translation_invariant_blocks(grid.size)
    if repeats is None:
        return table.new_zeros(len(table))
    q_BQ, k_BJ = (x.expand(grid.batch, -1) for x in repeats)
    if grid.keys % grid.size:
        k_BJ = k_BJ & (torch.arange(grid.columns, device=k_BJ.device) < grid.columns - 1)
    is_hidden = (~k_BJ)[:, None].expand(-1, grid.rows, -1).flatten(0, 1)
    return q_BQ.flatten() & ~(table & is_hidden[:, None]).flatten(1).any(1)


def _group_by_offset(places: Tensor, blocks: Tensor, shares_mask: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield the rows of each group, and whether they share one mask."""
    if not shares_mask.all():
        yield (~shares_mask).nonzero()[:, 0], False
    at = shares_mask.nonzero()[:, 0]
    if len(at):
        distances, kind = (blocks[at] - places[at, None, None]).flatten(1).unique(dim=0, return_inverse=True)
        for number in range(len(distances)):
            yield at[kind == number], True


def _masks(
    mask: AttentionMask, table: Tensor, rows: Tensor, blocks: Tensor, grid: BlockGrid, device: torch.device
) -> Tensor:
    """[R, n, b, P·b] on the device, true where a query of a row sees a key of the blocks [R, n, P]."""
    inside = torch.arange(grid.size, device=device)
    n = torch.arange(blocks.shape[1], device=device)[None, :, None, None]
    blocks_at_once = max(1, MASKED // (grid.size**2 * blocks[0].numel()))
    chunks = (moved(x, device).split(blocks_at_once) for x in (rows, blocks, table[rows].gather(-1, blocks)))
    masks = []
    for row, block, listed in zip(*chunks, strict=True):
        b = (row // grid.rows)[:, None, None, None]
        q = ((row % grid.rows)[:, None] * grid.size + inside).clamp(max=grid.queries - 1)[:, None, :, None]
        k = (block[..., None] * grid.size + inside).flatten(2)[:, :, None]
        is_listed = (k < grid.keys) & listed.repeat_interleave(grid.size, -1)[:, :, None]
        masks.append(mask.mask_mod(b, n, q, k.clamp(max=grid.keys - 1)) & is_listed)
    return torch.cat(masks)


# B batch, N query heads, K key-value heads, g = N / K, T queries, S keys, n tiles of b queries and M keys

LONGEST = 2048
"""Tokens of a run that is looked at causally in tiles; longer ones are left to the fused kernel as a whole."""

SHORTEST = 64
"""For documents shorter than this on average, tiles cost more than blocks with masks."""


TILES = (64, 128, 256)
"""Queries of a tile: wider ones multiply faster, and look at more keys that not all of them see (docs/LOG.md,
2026-11-23). The widest are of documents that are seen whole."""

ALIGNED = 64
"""Tiles have multiples of this many keys, if there are enough."""


def bands(
    sides: BandLimits, documents: Sequence[tuple[int | None, int, int]], device: torch.device, *, fused: bool
) -> list[Band] | None:
    """Tiles for documents (row, begin, end); None where they are so short that blocks cost less.

    fused: a kernel serves that holds no scores, so that a tile may be as large as its document.
    """
    runs = [part for document in documents for part in _cut(document, sides.chunk)]
    if len(runs) * SHORTEST > sum(end - begin for _, begin, end in runs):
        return None
    edges: dict[tuple[int, ...], tuple[tuple[int, Tensor], ...]] = {}
    kinds: dict[tuple[int | None, int, int, int, bool], list[int]] = {}
    for row, begin, end in runs:
        for first, last, low, high, causal in _tiles(sides, begin, end, fused):
            kinds.setdefault((row, last - first, high - low, low - first, causal), []).append(first)
    planned = []
    for (row, queries, keys, offset, causal), firsts in kinds.items():
        shape = queries, keys, offset
        if shape not in edges:
            edges[shape] = () if causal else _edges(sides, *shape, device)
        for first, step, count in _progressions(sorted(firsts), queries):
            planned.append(Band(row, first, first + offset, queries, keys, count, step, edges[shape], causal))
    return planned + [band for document in documents for band in _of_tokens(sides, *document, device)]


def tiles(x: Tensor, first: int, size: int, count: int, step: int) -> Tensor:
    """[…, T, H] → […, n, size, H], a view."""
    windows = x.narrow(-2, first, (count - 1) * step + size)
    return windows.unfold(-2, size, step).transpose(-1, -2)


def add_tiles(total: Tensor, parts: Tensor, first: int, step: int) -> None:
    """Adds [X, n, size, H] to where these lie in [X, T, H]; they may overlap."""
    count, size = parts.shape[1:3]
    width = size if count == 1 else step
    for at in range(0, size, width):
        part = parts[:, :, at : at + width]
        tiles(total, first + at, part.shape[2], count, step).add_(part)


def _cut(run: tuple[int | None, int, int], size: int | None) -> Iterator[tuple[int | None, int, int]]:
    row, begin, end = run
    for at in range(begin, end, size or end - begin):
        yield row, at, min(at + (size or end - begin), end)


def _tiles(sides: BandLimits, begin: int, end: int, fused: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    """First and last query and key, not with the last, and whether torch's causal order says what is seen."""
    length = end - begin
    left, right = (length if side is None else min(side, length) for side in (sides.left, sides.right))
    is_full = left >= length - 1
    if fused and is_full and (right >= length - 1 or (right == 0 and length > LONGEST)):
        yield begin, end, begin, end, right < length - 1
        return
    near, middle, far = TILES
    size = far if is_full else middle if left + right >= 128 else near
    for first in range(begin, end, size):
        last = min(first + size, end)
        n_before, n_after = (-(-side // ALIGNED) * ALIGNED for side in (left, right))
        yield first, last, max(begin, first - n_before), min(end, last + n_after), False


def _of_tokens(
    sides: BandLimits, row: int | None, begin: int, end: int, device: torch.device
) -> Iterator[Band]:
    """Yield bands of the pairs with global tokens that tiles leave out."""
    places = torch.arange(end - begin, device=device)
    tokens = moved(torch.tensor(sides.global_tokens, dtype=torch.int64), device)
    for low, high in _neighbours([token for token in sides.global_tokens if token < end - begin]):
        is_far = ~_near(sides, places[:, None], places[low:high])
        is_hidden_for_rows = is_far & ~torch.isin(places, tokens)[:, None]
        is_hidden_for_tokens = ~_near(sides, places[low:high, None], places)
        at, count = begin + low, high - low
        if is_hidden_for_rows.any():
            yield Band(
                row,
                begin,
                at,
                end - begin,
                count,
                partial_columns=((0, is_hidden_for_rows),),
                accumulates=True,
            )
        if is_hidden_for_tokens.any():
            yield Band(
                row,
                at,
                begin,
                count,
                end - begin,
                partial_columns=((0, is_hidden_for_tokens),),
                accumulates=True,
            )


def _neighbours(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs (begin, end) of ascending places."""
    begin = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[begin], places[at - 1] + 1
            begin = at


def _near(sides: BandLimits, q: Tensor, k: Tensor) -> Tensor:
    in_window = q == q if sides.left is None else k >= q - sides.left
    return in_window & (k == k) if sides.right is None else in_window & (k <= q + sides.right)


def _edges(
    sides: BandLimits, queries: int, keys: int, offset: int, device: torch.device
) -> tuple[tuple[int, Tensor], ...]:
    """Masks of the columns that not all queries see, from what the first and the last of them see."""
    q = torch.arange(queries, device=device)[:, None]
    begin = 0 if sides.left is None else max(0, min(keys, queries - 1 - sides.left - offset))
    end = keys if sides.right is None else max(begin, min(keys, sides.right - offset + 1))
    edges = []
    for low, high in ((0, begin), (end, keys)):
        if low < high:
            k = torch.arange(low, high, device=device) + offset
            left, right = (
                keys + queries + abs(offset) if x is None else x for x in (sides.left, sides.right)
            )
            edges.append((low, (k >= q - left) & (k <= q + right)))
    return tuple(edges)


def _progressions(firsts: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """The first, the step and the number of places that are equally far from one another, at least `size`."""
    at = 0
    while at < len(firsts):
        step = firsts[at + 1] - firsts[at] if at + 1 < len(firsts) else size
        beyond = at + 1
        while beyond < len(firsts) and firsts[beyond] - firsts[beyond - 1] == step:
            beyond += 1
        yield firsts[at], step, beyond - at
        at = beyond
