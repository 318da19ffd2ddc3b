"""Keys that a rank fetches are those that its queries see, by a mask that looks at every pair."""

import itertools

import numpy as np
import pytest
import torch

from megatfm.layers.attention.patterns import (
    BigBird,
    Chunked,
    Longformer,
    Pattern,
    Window,
    reached,
    wide_queries,
)
from megatfm.layers.sequence import SequenceMetadata
from megatfm.parallel.context_exchange import places

LENGTH, ROWS, HEADS = 61, 2, 4

EXACT: dict[str, Pattern] = {
    "window": Window(15),
    "window, first": Window(15, 0, 1, 2),
    "window of both sides": Window(8, 8),
    "window of one": Window(0),
    "chunked, causal": Chunked(21, causal=True),
    "chunked": Chunked(7, causal=False),
    "bigbird without random blocks, causal": BigBird(3, 0, 0, HEADS, causal=True),
}
"""Of these not one key too many is fetched."""

MORE: dict[str, tuple[Pattern, float]] = {
    "window, step": (Window(21, 0, 3), 1.5),
    "bigbird": (BigBird(4, 2, 0, HEADS), 1.5),
    "bigbird, extra": (BigBird(4, 1, 5, HEADS), 1.5),
    "bigbird, causal": (BigBird(4, 1, 0, HEADS, causal=True), 1.5),
    "longformer": (Longformer(3, (0, 7)), 1.5),
}
"""And of these so many times those that are seen."""


def rows(kind: str, random: np.random.Generator) -> SequenceMetadata:
    """Of documents of up to so many tokens, a third of them padding at the end."""
    longest = {"one": LENGTH, "short": 10, "long": 45}[kind]
    documents = np.zeros((ROWS, LENGTH), np.int64)
    for row in range(ROWS):
        starts = np.cumsum(random.integers(longest // 2, longest + 1, LENGTH))
        documents[row] = np.searchsorted(starts, np.arange(LENGTH), "right") if kind != "one" else 0
        if kind == "short":
            documents[row, LENGTH * 2 // 3 :] = -1
    sequence = SequenceMetadata(torch.zeros(ROWS, LENGTH, dtype=torch.int64), torch.from_numpy(documents))
    return SequenceMetadata(sequence.document_places()[0], sequence.documents)


@pytest.mark.parametrize("name", [*EXACT, *MORE])
def test_what_is_fetched_is_what_is_seen(name: str) -> None:
    pattern, bound = (EXACT[name], 1.0) if name in EXACT else MORE[name]
    pattern = pattern.within(LENGTH)
    fetched = wanted = 0
    for kind, ranks, folded, unit in itertools.product(
        ("one", "short", "long"), (2, 3, 4), (False, True), (1, 2)
    ):
        row = rows(kind, np.random.default_rng(ranks))
        mask = pattern.mask(row, 0, HEADS if pattern.differs_by_head else 1)
        assert mask is not None
        seen = mask.expand(ROWS, -1, -1, -1).flatten(0, 1).any(0)
        dealt = places(LENGTH, ranks, folded, unit)
        assert torch.equal(torch.cat(dealt).sort().values, torch.arange(LENGTH))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 2 * unit
        narrow = torch.ones(LENGTH, dtype=torch.bool)
        narrow[wide_queries(pattern, row, dealt)] = False
        for here in dealt:
            found, own = (torch.zeros(LENGTH, dtype=torch.bool) for _ in range(2))
            own[here] = True
            looked_at = reached(pattern, row, here)
            assert looked_at is not None
            found[looked_at] = True
            needed = seen[here[narrow[here]]].any(0)
            assert not (needed & ~found).any(), f"{kind}, {ranks} ranks: keys that are seen are not fetched"
            fetched += int((found & ~own).sum())
            wanted += int((needed & ~own).sum())
    assert wanted <= fetched <= bound * wanted
