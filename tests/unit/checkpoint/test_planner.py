"""Boxes against counting every cell, replicas against a brute-force best, flattened blocks as the boxes they make."""

import itertools
from collections import defaultdict
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm import checkpoint
from megatfm.checkpoint import FlatShardedTensor, ShardedTensor
from megatfm.checkpoint.planner import PlannedGroup, WritePlan, assign_evenly, group_shards, merge_plans
from megatfm.checkpoint.sharded_tensor import check_cover
from megatfm.errors import MegatfmError

Piece = tuple[tuple[int, ...], tuple[int, ...]]


def fills(shape: tuple[int, ...], pieces: list[Piece]) -> bool:
    """Whether every cell is in exactly one piece and no piece leaves the tensor, by looking at each cell."""
    inside = all(o + s <= n for offsets, sizes in pieces for o, s, n in zip(offsets, sizes, shape, strict=True))
    cells = [
        cell
        for offsets, sizes in pieces
        for cell in itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    ]
    return inside and sorted(cells) == sorted(itertools.product(*map(range, shape)))


@st.composite
def pieces_of(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A tensor cut at random, again and again, and then perhaps one piece lost, doubled, moved or stretched."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    pieces: list[Piece] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, size in ((0, at), (at, sizes[dim] - at)):
            if size:
                moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                pieces.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
    fault = draw(st.sampled_from(["none", "lost", "doubled", "moved", "stretched"]))
    if fault != "none":
        offsets, sizes = pieces.pop()
        change = tuple(draw(st.integers(0, 1)) for _ in shape)
        if fault == "doubled":
            pieces += [(offsets, sizes)] * 2
        elif fault == "moved":
            pieces.append((tuple(map(sum, zip(offsets, change, strict=True))), sizes))
        elif fault == "stretched":
            pieces.append((offsets, tuple(map(sum, zip(sizes, change, strict=True)))))
    return shape, pieces


@settings(max_examples=300, deadline=None)
@given(pieces_of())
def test_cover_is_what_counting_cells_says(case: tuple[tuple[int, ...], list[Piece]]) -> None:
    shape, pieces = case
    if fills(shape, pieces):
        check_cover("w", shape, pieces)
    else:
        with pytest.raises(MegatfmError, match="tensor w: "):
            check_cover("w", shape, pieces)


CELLS = [((row, column), (1, 1)) for row in range(2) for column in range(2)]


@pytest.mark.parametrize(("shape", "pieces", "second"), [
    ((4, 2), [((0, 0), (2, 2)), ((1, 1), (2, 1)), ((3, 0), (1, 2))], "1, 1"),
    ((2, 2), [CELLS[0], *CELLS[:3]], "0, 0"),
])  # fmt: skip
def test_overlap_made_good_by_a_gap(shape: tuple[int, ...], pieces: list[Piece], second: str) -> None:
    with pytest.raises(MegatfmError, match=rf"the pieces at \(0, 0\) and \({second}\) overlap"):
        check_cover("w", shape, pieces)


def planned(by_rank: list[dict[str, ShardedTensor]]) -> tuple[PlannedGroup, ...]:
    return merge_plans([list(zip(*group_shards(shards), strict=True)) for shards in by_rank])


def loads(groups: tuple[PlannedGroup, ...], ranks: int) -> list[int]:
    return [sum(prod(item.region[1]) for item in WritePlan(groups, rank).items) for rank in range(ranks)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.sets(st.integers(0, 2), min_size=1)), min_size=1, max_size=6))
def test_shares_are_complete_and_near_the_best(tensors: list[tuple[int, set[int]]]) -> None:
    names = {
        f"t{i}": (ShardedTensor.from_tensor(torch.zeros(size, dtype=torch.int8)), ranks)
        for i, (size, ranks) in enumerate(tensors)
    }
    shared = planned([{n: box for n, (box, ranks) in names.items() if rank in ranks} for rank in range(3)])
    written = [(item.name, rank) for rank in range(3) for item in WritePlan(shared, rank).items]
    assert sorted(name for name, _ in written) == sorted(names)
    assert all(rank in names[name][1] for name, rank in written)
    best = min(
        max(sum(size for (size, _), chosen in zip(tensors, choice, strict=True) if chosen == rank) for rank in range(3))
        for choice in itertools.product(*(sorted(ranks) for _, ranks in tensors))
    )
    # List scheduling: nobody ends later than the best by more than one piece (R. L. Graham, 1966, Theorem 1),
    # here with restricted holders, where the factor is 1 + log2(ranks) (Azar, Naor, Rom, 1995).
    assert max(loads(shared, 3)) <= 2.6 * best


def test_many_equal_replicas_are_shared_evenly() -> None:
    tensors = {f"layer.{i}": ShardedTensor.from_tensor(torch.zeros(1000)) for i in range(20)}
    assert loads(planned([tensors] * 4), 4) == [5000] * 4


def test_tensors_of_one_rank_count_towards_its_load() -> None:
    shared = {f"layer.{i}": ShardedTensor.from_tensor(torch.zeros(1000)) for i in range(6)}
    alone = {"own": ShardedTensor.from_tensor(torch.zeros(3000))}
    assert loads(planned([{**shared, **alone}, shared, shared]), 3) == [3000, 3000, 3000]


def test_a_box_inside_a_larger_tensor_weighs_what_it_holds() -> None:
    """torch's own deduplication would weigh both with the whole tensor of 8000."""
    halves = [{"w": ShardedTensor(torch.zeros(size), (8000,), (at,))} for at, size in ((0, 7000), (7000, 1000))]
    layers = {f"layer.{i}": ShardedTensor.from_tensor(torch.zeros(1000)) for i in range(6)}
    assert loads(planned([{**half, **layers} for half in halves]), 2) == [7000, 7000]


@st.composite
def shards_by_rank(draw: st.DrawFn) -> list[dict[str, ShardedTensor]]:
    """Tensors of a few shapes, cut by rows over some ranks, in an order of their own, with or without replicas."""
    ranks = draw(st.integers(1, 5))
    shards: list[dict[str, ShardedTensor]] = [{} for _ in range(ranks)]
    for number in range(draw(st.integers(1, 7))):
        rows, dtype = draw(st.sampled_from([(4, torch.float32), (5, torch.float32), (4, torch.int8)]))
        n_parts = draw(st.integers(1, ranks))
        per_part = -(-rows // n_parts)
        for rank in draw(st.permutations(range(ranks))):
            first = min(rank % n_parts * per_part, rows)
            block = torch.zeros(min(per_part, rows - first), 3, dtype=dtype)
            if draw(st.booleans()) or rank < n_parts:
                shards[rank][f"t{number}"] = ShardedTensor(block, (rows, 3), (first, 0))
    return shards


@settings(max_examples=200, deadline=None)
@given(shards_by_rank())
def test_each_piece_is_written_once_by_one_that_holds_it(by_rank: list[dict[str, ShardedTensor]]) -> None:
    holders = defaultdict(set)
    for rank, shards in enumerate(by_rank):
        for name, shard in shards.items():
            for region in shard.list_pieces():
                holders[name, region].add(rank)
    groups = planned(by_rank)
    written = [(item.name, item.region, rank) for rank in range(len(by_rank)) for item in WritePlan(groups, rank).items]
    assert sorted((name, region) for name, region, _ in written) == sorted(holders)
    assert all(rank in holders[name, region] for name, region, rank in written)
    assert all(list(group.names) == sorted(group.names) for group in groups)


def layers(ranks: int, n_layers: int) -> list[dict[str, ShardedTensor]]:
    """Two kinds of tensors a layer, each cut over all ranks."""
    return [
        {
            f"layers.{layer:03d}.{key}": ShardedTensor(torch.zeros(1, width), (ranks, width), (rank, 0))
            for layer in range(n_layers)
            for key, width in (("up", 3), ("down", 2))
        }
        for rank in range(ranks)
    ]


def test_a_plan_grows_with_names_and_with_ranks_but_not_with_both() -> None:
    few, more_layers, more_ranks = (planned(layers(ranks, n_layers)) for ranks, n_layers in ((8, 4), (8, 64), (64, 4)))
    assert [len(groups) for groups in (few, more_layers, more_ranks)] == [2, 2, 2]
    runs = [sum(len(piece.writers) for group in groups for piece in group.pieces) for groups in (few, more_layers)]
    assert runs == [2 * 8, 2 * 8]
    assert sum(len(piece.writers) for group in more_ranks for piece in group.pieces) == 2 * 64
    assert sum(len(group.names) for group in more_layers) == 2 * 64


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(0, 30), st.sampled_from([0, 1, 3, 7]))
def test_units_are_shared_out_as_one_by_one_to_the_emptiest(loads_before: list[int], units: int, size: int) -> None:
    expected = list(loads_before)
    for _ in range(units):
        expected[expected.index(min(expected))] += size
    loads = list(loads_before)
    shares = assign_evenly(loads, range(len(loads)), units, size)
    assert sum(count for _, count in shares) == units
    assert sorted(loads) == sorted(expected)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (3, 4, 5), (2, 3, 2, 2), (1, 5), (5, 1)], ids=str)
def test_any_stretch_of_any_shape(sizes: tuple[int, ...]) -> None:
    full = torch.arange(prod(sizes))
    for first in range(len(full) + 1):
        for last in range(first, len(full) + 1):
            box = FlatShardedTensor(full[first:last], sizes, (0,) * len(sizes), sizes, first)
            covered = torch.full(sizes, -1)
            for part in box.blocks:
                place = zip(part.offsets, part.tensor.shape, strict=True)
                covered[tuple(slice(start, start + size) for start, size in place)] = part.tensor
            expected = torch.full((len(full),), -1)
            expected[first:last] = full[first:last]
            assert torch.equal(covered.flatten(), expected)
            assert sum(part.tensor.numel() for part in box.blocks) == last - first
            assert len(box.blocks) <= 2 * len(sizes) - 1


def test_a_flat_shard_is_saved_and_read_like_a_box(tmp_path: Path) -> None:
    """A block of a tensor that tensor parallelism cuts, of which elements 5 to 17 are held here."""
    full = torch.arange(60.0).view(6, 10)
    path = checkpoint.save(tmp_path, 1, {"w": full}, {})
    block = full[:, 4:8]  # [6, 4] at (0, 4)
    shard = FlatShardedTensor(torch.zeros(12), (6, 10), (0, 4), (6, 4), 5)
    checkpoint.load(path, {"w": shard})
    assert torch.equal(shard.tensor, block.reshape(-1)[5:17])
    remaining = [ShardedTensor(full[:, :4], (6, 10), (0, 0)), ShardedTensor(full[:, 8:], (6, 10), (0, 8))]
    further = [
        *remaining,
        FlatShardedTensor(block.reshape(-1)[:5], (6, 10), (0, 4), (6, 4), 0),
        FlatShardedTensor(block.reshape(-1)[17:], (6, 10), (0, 4), (6, 4), 17),
    ]
    pieces = [piece for box in (shard, *further) for piece in box.list_pieces()]
    checkpoint.sharded_tensor.check_cover("w", (6, 10), pieces)


def test_a_flat_shard_outside_its_block_is_refused() -> None:
    with pytest.raises(MegatfmError, match=r"^3 elements from 10 on lie outside a block of shape \(3, 4\)$"):
        FlatShardedTensor(torch.zeros(3), (3, 4), (0, 0), (3, 4), 10)
