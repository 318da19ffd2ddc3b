"""Relative biases: added to scores by the distance of key and query (ALiBi, T5), one value a distance, not a pair.

A relative bias is [N, T + S − 1]: query i of T and key j of S get value j − i + T − 1. For queries and keys that are
some of a row's L tokens it is that of the row, [N, 2L − 1], and i and j are indices in the row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# N query heads, T queries, S keys, R query blocks, n heads that differ (or 1), b queries and M keys of a tile


def is_relative(bias: Tensor | None) -> bool:
    """Return whether a bias is relative, not one of all pairs."""
    return bias is not None and bias.dim() == 2


def expand_bias(bias: Tensor, keys: int) -> Tensor:
    """Return a bias of all pairs [N, T, S] from either form."""
    return bias.unfold(-1, keys, 1).flip(-2) if is_relative(bias) else bias


def slice_last_keys(bias: Tensor, queries: int, keys: int) -> Tensor:
    """Return the bias of the last keys, in either form."""
    return bias[..., -(queries + keys - 1) :] if is_relative(bias) else bias[..., -keys:]


def slice_tile(bias_NL: Tensor, total: int, first: int, queries: int, start: int, keys: int) -> Tensor:
    """Return the bias [N, b, M] of queries from `first` of `total` on and keys from `start` on."""
    column = start - first - queries + total
    return bias_NL[:, column : column + queries + keys - 1].unfold(-1, keys, 1).flip(-2)


def add_tile_gradient(total_NL: Tensor, part_NbM: Tensor, total: int, first: int, start: int) -> None:
    """Add the gradient of `slice_tile`'s result to that of the relative bias, in place."""
    heads, queries, keys = part_NbM.shape
    padded = part_NbM.new_zeros(heads, queries, keys + queries)
    padded[..., :keys] = part_NbM.flip(-2)
    # Viewed with rows one shorter, each row is shifted by one, so that equal distances share a column.
    columns = keys + queries - 1
    shifted = padded.flatten(1)[:, : queries * columns].unflatten(1, (queries, -1))
    column = start - first - queries + total
    total_NL[:, column : column + columns] += shifted.sum(1)


def compute_block_indices(
    length: int,
    zero_distance: int,
    size: int,
    query_blocks: Tensor,
    key_blocks: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
) -> Tensor:
    """Return indices int64 [R, n, b, M·b] in a relative bias of `length`, for query blocks [R] and key blocks [R, n,
    M].

    zero_distance: index of distance 0. q_positions [T], k_positions [S]: indices in the row; None: from 0 on. Indices
    of padding tokens are arbitrary.
    """
    q = find_block_positions(q_positions, query_blocks, size)[:, None, :, None]
    k = find_block_positions(k_positions, key_blocks, size).flatten(2)[:, :, None]
    return (k - q + zero_distance).clamp_(0, length - 1)


def find_block_positions(positions: Tensor | None, blocks: Tensor, size: int) -> Tensor:
    """Return the positions [·, b] of the tokens of blocks with indices [·]; arbitrary ones beyond the last token."""
    tokens = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    return tokens if positions is None else F.pad(positions, (0, -len(positions) % size))[tokens]
