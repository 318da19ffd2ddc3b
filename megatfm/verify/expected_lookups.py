"""Tokens that context-parallel ranks fetch because theirs look them up: beside masked spans, or in another row."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[Any]


def span_boundaries(left: NDArray[Any], right: NDArray[Any], by_rank: Sequence[Positions]) -> list[Positions]:
    """Return the tokens beside masked spans, by the rank that looks them up.

    left, right: [B, T], distances of masked tokens to them, 0 elsewhere.
    """
    looked_up = []
    for local_positions in by_rank:
        boundaries: set[int] = set()
        for row in range(len(left)):
            for token in local_positions.tolist():
                if left[row, token] > 0:
                    boundaries |= {token - int(left[row, token]), token + int(right[row, token])}
        looked_up.append(_sorted(boundaries))
    return looked_up


def visible_tokens(rows: Mapping[str, NDArray[Any]], by_rank: Sequence[Positions]) -> list[Positions]:
    """Return the encoder's tokens that a masked autoencoder's decoder looks up, by rank.

    rows: fields of a micro-batch; `source` [B, T] is the index among an image's visible tokens, −1 where masked.
    """
    images = rows.get("documents", np.zeros_like(rows["source"]))
    encoder_images = rows.get("encoder_documents", np.zeros_like(rows["encoder_positions"]))
    looked_up = []
    for local_positions in by_rank:
        tokens: set[int] = set()
        for row, sources in enumerate(rows["source"]):
            for token in local_positions[sources[local_positions] >= 0].tolist():
                tokens_of_image = np.flatnonzero(encoder_images[row] == images[row, token])
                tokens.add(int(tokens_of_image[sources[token]]))
        looked_up.append(_sorted(tokens))
    return looked_up


def _sorted(tokens: set[int]) -> Positions:
    return np.array(sorted(tokens), np.int64)
