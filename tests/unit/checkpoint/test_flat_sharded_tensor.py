"""Elements of a flattened block are stored as the few boxes that they make up, and come back to the bit."""

from math import prod
from pathlib import Path

import pytest
import torch

from megatfm import checkpoint
from megatfm.checkpoint import FlatShardedTensor, ShardedTensor
from megatfm.errors import MegatfmError


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (3, 4, 5), (2, 3, 2, 2), (1, 5), (5, 1)], ids=str)
def test_any_stretch_of_any_shape(sizes: tuple[int, ...]) -> None:
    full = torch.arange(prod(sizes))
    for first in range(len(full) + 1):
        for last in range(first, len(full) + 1):
            box = FlatShardedTensor(full[first:last], sizes, (0,) * len(sizes), sizes, first)
            seen = torch.full(sizes, -1)
            for part in box.blocks:
                place = zip(part.offsets, part.tensor.shape, strict=True)
                seen[tuple(slice(start, start + size) for start, size in place)] = part.tensor
            expected = torch.full((len(full),), -1)
            expected[first:last] = full[first:last]
            assert torch.equal(seen.flatten(), expected)
            assert sum(part.tensor.numel() for part in box.blocks) == last - first
            assert len(box.blocks) <= 2 * len(sizes) - 1


def test_a_flat_shard_is_saved_and_read_like_a_box(tmp_path: Path) -> None:
    """A block of a tensor that tensor parallelism cuts, of which elements 5 to 17 are held here."""
    full = torch.arange(60.0).view(6, 10)
    path = checkpoint.save(tmp_path, 1, {"w": full}, {})
    block = full[:, 4:8]  # [6, 4] at (0, 4)
    held = FlatShardedTensor(torch.zeros(12), (6, 10), (0, 4), (6, 4), 5)
    checkpoint.load(path, {"w": held})
    assert torch.equal(held.tensor, block.reshape(-1)[5:17])
    remaining = [ShardedTensor(full[:, :4], (6, 10), (0, 0)), ShardedTensor(full[:, 8:], (6, 10), (0, 8))]
    further = [
        *remaining,
        FlatShardedTensor(block.reshape(-1)[:5], (6, 10), (0, 4), (6, 4), 0),
        FlatShardedTensor(block.reshape(-1)[17:], (6, 10), (0, 4), (6, 4), 17),
    ]
    pieces = [piece for box in (held, *further) for piece in box.pieces()]
    checkpoint.sharded_tensor.check_cover("w", (6, 10), pieces)


def test_what_lies_outside_is_refused() -> None:
    with pytest.raises(MegatfmError, match=r"^3 elements from 10 on lie outside a block of shape \(3, 4\)$"):
        FlatShardedTensor(torch.zeros(3), (3, 4), (0, 0), (3, 4), 10)
