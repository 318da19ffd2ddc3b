"""Numbers that are added to scores by how far a key is from its query (ALiBi, T5): one a distance, and not a pair.

They are a tensor [N, T + S − 1], of which a query at place i of T and a key at place j of S get number j − i + T − 1.
"""

import torch
from torch import Tensor

# N query heads, T queries, S keys, R rows (query blocks), n heads that differ (or 1), b queries and M keys of a tile


def by_distance(bias: Tensor | None) -> bool:
    """Whether it is of this form, and not of all pairs."""
    return bias is not None and bias.dim() == 2


def of_pairs(bias: Tensor, keys: int) -> Tensor:
    """All pairs' [N, T, S], of either form."""
    return bias.unfold(-1, keys, 1).flip(-2) if by_distance(bias) else bias


def of_last(bias: Tensor, queries: int, keys: int) -> Tensor:
    """Biases of the last keys, in the form in which they are."""
    return bias[..., -(queries + keys - 1) :] if by_distance(bias) else bias[..., -keys:]


def of_tile(bias_NL: Tensor, total: int, first: int, queries: int, start: int, keys: int) -> Tensor:
    """Biases of neighbouring queries, from `first` of `total` on, and of keys from `start` on, [N, b, M]."""
    at = start - first - queries + total
    return bias_NL[:, at : at + queries + keys - 1].unfold(-1, keys, 1).flip(-2)


def add_tile(total_NL: Tensor, part_NbM: Tensor, total: int, first: int, start: int) -> None:
    """Adds what `of_tile` gave its gradient to that of all distances."""
    heads, queries, keys = part_NbM.shape
    wide = part_NbM.new_zeros(heads, queries, keys + queries)
    wide[..., :keys] = part_NbM.flip(-2)
    # Read in rows that are one shorter, each is moved on by one: what has one distance lies in one column.
    columns = keys + queries - 1
    at = start - first - queries + total
    total_NL[:, at : at + columns] += (
        wide.flatten(1)[:, : queries * columns].unflatten(1, (queries, -1)).sum(1)
    )


def of_blocks(length: int, total: int, size: int, rows: Tensor, table: Tensor) -> Tensor:
    """Numbers of distances int64 [R, n, b, M·b] of blocks of queries with the numbers [R] and of keys [R, n, M]; those
    of queries and keys beyond the last are some."""
    inside = torch.arange(size, device=rows.device)
    queries = (rows[:, None] * size + inside)[:, None, :, None]
    keys = (table[..., None] * size + inside).flatten(2)[:, :, None]
    return (keys - queries + total - 1).clamp_(0, length - 1)
