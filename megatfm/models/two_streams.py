"""Where XLNet's two streams run, and what their queries see."""

from collections.abc import Mapping
from math import gcd

from torch import Tensor

from megatfm.config.attention import TwoStreamAttentionConfig
from megatfm.layers.attention.two_stream import Both, Stream
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.cross_entropy import IGNORE

# B batch, T tokens, Q queries, S keys

TOGETHER = TwoStreamAttentionConfig.queries_together
"""Queries come in groups of so many, or as many as divide the row: then the query stream can be cut as the row can."""


def two_streams(
    sequence: SequenceMetadata, segments: Both, order: Both, numbers_BQ: Tensor, targets_BT: Tensor | None
) -> tuple[Stream, Stream]:
    """The content stream, of all tokens here, which sees up to their own ranks, and the query stream, of those with
    the numbers, which sees lower ones."""
    of_queries = Both(order.here_BT.gather(1, numbers_BQ) - 1, order.row_BS)
    # What is dropped of a query must not be what is dropped of the content at the same place.
    keys = None if sequence.rng_keys is None else ~sequence.rng_keys
    filled_BQ = sequence.real.long().gather(1, numbers_BQ) - 1
    if targets_BT is not None:  # queries where nothing is predicted only fill the rows up
        filled_BQ = filled_BQ.masked_fill(targets_BT.gather(1, numbers_BQ) == IGNORE, -1)
    at_places = SequenceMetadata(sequence.positions.gather(1, numbers_BQ), filled_BQ, rng_keys=keys)
    places_BQ = sequence.indices[numbers_BQ]
    at_places.once("indices", lambda: places_BQ)
    documents = documents_of(sequence)
    if documents is not None:
        documents = Both(documents.here_BT.gather(1, numbers_BQ), documents.row_BS)
    segments_BQ = segments.here_BT.gather(1, numbers_BQ)
    query = Stream(at_places, places_BQ, Both(segments_BQ, segments.row_BS), documents, of_queries)
    return everywhere(sequence, segments, order), query


def everywhere(sequence: SequenceMetadata, segments: Both, order: Both | None = None) -> Stream:
    """The content stream, of all tokens here. order: None: tokens see one another."""
    places_BT = sequence.indices.expand_as(segments.here_BT)
    return Stream(sequence, places_BT, segments, documents_of(sequence), order)


def documents_of(sequence: SequenceMetadata) -> Both | None:
    """The documents of tokens here and of their rows; None where all see all."""
    numbers = sequence.document_numbers()
    return None if numbers is None else Both(*numbers)


def places(targets_BT: Tensor) -> Tensor:
    """Where the query stream runs [B, Q]: at targets, and at others where a row has fewer than the most of any."""
    first_others_BT = (targets_BT == IGNORE).long().argsort(dim=1, stable=True)
    return first_others_BT[:, : n_queries({"targets": targets_BT})]


def n_queries(inputs: Mapping[str, Tensor]) -> int:
    """Q: the most targets of a row, rounded up to whole groups."""
    targets_BT = inputs["targets"]
    together, most = gcd(targets_BT.shape[1], TOGETHER), max(int((targets_BT != IGNORE).sum(1).max()), 1)
    return -(-most // together) * together
