"""Where XLNet's two streams run, and what their queries see."""

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from megatfm.config.attention import TwoStreamAttentionConfig
from megatfm.layers.attention.patterns import Full
from megatfm.layers.attention.two_stream import Stream
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.cross_entropy import IGNORE

# B batch, T tokens, Q queries, S keys

TOGETHER = TwoStreamAttentionConfig.queries_together
"""Queries come in groups of so many, or as many as divide the row: then the query stream can be cut as the row can."""


class Both(NamedTuple):
    """A field at the tokens that are here, and at all of their rows'."""

    here_BT: Tensor
    row_BS: Tensor


def two_streams(
    sequence: SequenceMetadata, segments: Both, order: Both, numbers_BQ: Tensor, targets_BT: Tensor | None
) -> tuple[Stream, Stream]:
    """The content stream, of all tokens here, and the query stream, of those with the numbers."""
    same_B1TS = sequence.mask(Full())
    allowed_BTS = order.row_BS[:, None, :] <= order.here_BT[:, :, None]
    below_BQS = order.row_BS[:, None, :] < order.here_BT.gather(1, numbers_BQ)[:, :, None]
    allowed_B1TS, below_B1QS = allowed_BTS[:, None], below_BQS[:, None]
    if same_B1TS is not None:
        rows_B1QS = numbers_BQ[:, None, :, None].expand(-1, -1, -1, same_B1TS.shape[-1])
        allowed_B1TS = allowed_B1TS & same_B1TS
        below_B1QS = below_B1QS & same_B1TS.gather(2, rows_B1QS)
    content = stream(sequence, sequence.indices.expand_as(order.here_BT), *segments, allowed_B1TS)
    # What is dropped of a query must not be what is dropped of the content at the same place.
    keys = None if sequence.rng_keys is None else ~sequence.rng_keys
    documents_BQ = sequence.real.long().gather(1, numbers_BQ) - 1
    if targets_BT is not None:  # queries where nothing is predicted only fill the rows up
        documents_BQ = documents_BQ.masked_fill(targets_BT.gather(1, numbers_BQ) == IGNORE, -1)
    at_places = SequenceMetadata(sequence.positions.gather(1, numbers_BQ), documents_BQ, rng_keys=keys)
    places_BQ = sequence.indices[numbers_BQ]
    at_places.once("indices", lambda: places_BQ)
    segments_BQ = segments.here_BT.gather(1, numbers_BQ)
    return content, stream(at_places, places_BQ, segments_BQ, segments.row_BS, below_B1QS)


def stream(
    sequence: SequenceMetadata,
    places_BQ: Tensor,
    of_queries_BQ: Tensor,
    of_keys_BS: Tensor,
    mask_B1QS: Tensor | None,
) -> Stream:
    """Queries at places of their rows, with their segments."""
    n = of_keys_BS.shape[1]
    distances_BQS = places_BQ[:, :, None] - torch.arange(n, device=places_BQ.device) + n - 1
    segments_BQS = (of_queries_BQ[:, :, None] != of_keys_BS[:, None, :]).long()
    return Stream(sequence, mask_B1QS, distances_BQS[:, None], segments_BQS[:, None])


def places(targets_BT: Tensor) -> Tensor:
    """Where the query stream runs [B, Q]: at targets, and at others where a row has fewer than the most of any."""
    first_others_BT = (targets_BT == IGNORE).long().argsort(dim=1, stable=True)
    return first_others_BT[:, : n_queries({"targets": targets_BT})]


def n_queries(inputs: Mapping[str, Tensor]) -> int:
    """Q: the most targets of a row, rounded up to whole groups."""
    targets_BT = inputs["targets"]
    together, most = gcd(targets_BT.shape[1], TOGETHER), max(int((targets_BT != IGNORE).sum(1).max()), 1)
    return -(-most // together) * together
