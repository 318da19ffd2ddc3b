"""Numbers that are added to scores by how far a key is from its query (ALiBi, T5): one a distance, and not a pair.

They are a tensor [N, T + S − 1], of which a query at place i of T and a key at place j of S get number j − i + T − 1.
Of queries and keys that are some of a row's L tokens they are those of the row, [N, 2L − 1], and i and j places in it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# N query heads, T queries, S keys, R rows (query blocks), n heads that differ (or 1), b queries and M keys of a tile


def is_relative(bias: Tensor | None) -> bool:
    """Whether it is of this form, and not of all pairs."""
    return bias is not None and bias.dim() == 2


def expand(bias: Tensor, keys: int) -> Tensor:
    """All pairs' [N, T, S], of either form."""
    return bias.unfold(-1, keys, 1).flip(-2) if is_relative(bias) else bias


def for_last_keys(bias: Tensor, queries: int, keys: int) -> Tensor:
    """Biases of the last keys, in the form in which they are."""
    return bias[..., -(queries + keys - 1) :] if is_relative(bias) else bias[..., -keys:]


def for_tile(bias_NL: Tensor, total: int, first: int, queries: int, start: int, keys: int) -> Tensor:
    """Biases of neighbouring queries, from `first` of `total` on, and of keys from `start` on, [N, b, M]."""
    at = start - first - queries + total
    return bias_NL[:, at : at + queries + keys - 1].unfold(-1, keys, 1).flip(-2)


def add_tile(total_NL: Tensor, part_NbM: Tensor, total: int, first: int, start: int) -> None:
    """Adds what `for_tile` gave its gradient to that of all distances."""
    heads, queries, keys = part_NbM.shape
    wide = part_NbM.new_zeros(heads, queries, keys + queries)
    wide[..., :keys] = part_NbM.flip(-2)
    # Read in rows that are one shorter, each is moved on by one: what has one distance lies in one column.
    columns = keys + queries - 1
    at = start - first - queries + total
    total_NL[:, at : at + columns] += (
        wide.flatten(1)[:, : queries * columns].unflatten(1, (queries, -1)).sum(1)
    )


def block_indices(
    length: int, zero: int, size: int, rows: Tensor, table: Tensor, q_places: Tensor | None, k_places: Tensor | None
) -> Tensor:  # fmt: skip
    """Numbers of distances int64 [R, n, b, M·b] of blocks of queries with the numbers [R] and of keys [R, n, M]; those
    of queries and keys beyond the last are some. zero: the number of no distance. places: of queries and keys, where
    they don't stand one after the other from 0."""
    queries, keys = (
        block_positions(q_places, rows, size)[:, None, :, None],
        block_positions(k_places, table, size),
    )
    return (keys.flatten(2)[:, :, None] - queries + zero).clamp_(0, length - 1)


def block_positions(places: Tensor | None, numbers: Tensor, size: int) -> Tensor:
    """Positions [·, b] of the tokens of blocks with these numbers [·]; beyond the last token, any."""
    at = numbers[..., None] * size + torch.arange(size, device=numbers.device)
    return at if places is None else F.pad(places, (0, -len(places) % size))[at]
