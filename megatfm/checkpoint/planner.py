"""Plan which rank writes which pieces of a checkpoint, before anything is copied.

Layers of a model are sharded alike, so a rank describes its shards by groups. Rank 0 gathers each rank's regions of
each group, one or two kilobytes a rank, and the names of a group from one of the ranks that have it; every rank
receives the full plan. So messages, time and `metadata.json` grow with names + groups × ranks, not with names × ranks.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from blake3 import blake3
from torch import Tensor

from megatfm import object_collectives
from megatfm.checkpoint.file_format import DTYPE_NAMES, DTYPES
from megatfm.checkpoint.metadata import list_positions, make_piece_key
from megatfm.checkpoint.sharded_tensor import Region, ShardedTensor, check_cover
from megatfm.errors import MegatfmError
from megatfm.object_collectives import Group

TensorSpec = tuple[str, tuple[int, ...]]
"""Name of a dtype, and a global shape."""
Regions = tuple[Region, ...]
"""Pieces of each tensor of a group that one rank holds."""


class LocalGroup(NamedTuple):
    """One rank's tensors with the same dtype, global shape and pieces. names: sorted."""

    spec: TensorSpec
    names: tuple[str, ...]


class PlannedPiece(NamedTuple):
    """A piece of each tensor of a group. writers: ranks, and the number of consecutive names that each writes."""

    region: Region
    writers: tuple[tuple[int, int], ...]


class PlannedGroup(NamedTuple):
    """Tensors of all ranks with the same dtype, global shape and sharding. names: sorted."""

    spec: TensorSpec
    names: tuple[str, ...]
    pieces: tuple[PlannedPiece, ...]


class WriteItem(NamedTuple):
    """A piece of one tensor. group, piece: its indices in the plan."""

    name: str
    region: Region
    spec: TensorSpec
    group: int
    piece: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return count_piece_bytes(self.spec, self.region)

    @property
    def key(self) -> str:
        """Its key in a file."""
        return make_piece_key(self.name, self.spec[1], *self.region)


@dataclass(frozen=True)
class WritePlan:
    """The pieces that all ranks write, and those of this one, `rank`."""

    groups: tuple[PlannedGroup, ...]
    rank: int

    @cached_property
    def items(self) -> list[WriteItem]:
        """This rank's pieces, sorted by name and offsets."""
        return sorted(self._iter_items(), key=lambda item: (item.name, item.region[0]))

    def _iter_items(self) -> Iterator[WriteItem]:
        for group_index, group in enumerate(self.groups):
            for piece_index, piece in enumerate(group.pieces):
                for name_index in list_positions(piece.writers, {self.rank}):
                    yield WriteItem(group.names[name_index], piece.region, group.spec, group_index, piece_index)

    def view_pieces(self, shards: Mapping[str, ShardedTensor]) -> dict[WriteItem, Tensor]:
        """Return the pieces as views of the shards' memory."""
        return {item: shards[item.name].view_piece(item.region) for item in self.items}


def plan_save(action: str, shards: Mapping[str, ShardedTensor], group: Group = None) -> WritePlan:
    """Plan a save of all ranks' shards: one holder of each piece writes it, ranks write evenly. A collective.

    action: named in errors. Raises MegatfmError on all ranks if the shards don't make up whole tensors.
    """
    local_groups: list[LocalGroup] = []

    def describe() -> list[tuple[bytes, Regions]]:
        nonlocal local_groups
        local_groups, regions = group_shards(shards)
        return [(hash_group(group), held_regions) for group, held_regions in zip(local_groups, regions, strict=True)]

    descriptions = object_collectives.run_and_gather(action, describe, group)

    def choose_senders() -> dict[int, list[int]]:
        """Return rank → indices of its groups that no lower rank has."""
        known_digests: set[bytes] = set()
        indices: dict[int, list[int]] = defaultdict(list)
        for rank, description in enumerate(descriptions):
            for i, (group_digest, _) in enumerate(description):
                if group_digest not in known_digests:
                    known_digests.add(group_digest)
                    indices[rank].append(i)
        return indices

    senders = object_collectives.run_on_rank_0(action, choose_senders, group)
    to_send = [local_groups[i] for i in senders.get(object_collectives.rank(group), ())]
    received = object_collectives.gather_from(action, to_send, list(senders), group)

    def merge() -> tuple[PlannedGroup, ...]:
        groups = {hash_group(group): group for sent in received for group in sent}
        return merge_plans(
            [[(groups[group_digest], regions) for group_digest, regions in rank] for rank in descriptions]
        )

    return WritePlan(object_collectives.run_on_rank_0(action, merge, group), object_collectives.rank(group))


def hash_group(group: LocalGroup) -> bytes:
    """Return a short hash that identifies a group, in place of its names."""
    return blake3(json.dumps(group).encode()).digest(16)


def group_shards(shards: Mapping[str, ShardedTensor]) -> tuple[list[LocalGroup], list[Regions]]:
    """Group one rank's tensors by dtype, shape and pieces; returns the groups, and the pieces of each. Skips empty
    shards. Raises MegatfmError for names and dtypes that can't be stored."""
    names: dict[tuple[TensorSpec, Regions], list[str]] = defaultdict(list)
    for name, shard in sorted(shards.items()):
        if not name or name == "__metadata__":  # reserved by safetensors
            raise MegatfmError(f"a tensor can't be stored under the name {name!r}")
        if shard.tensor.dtype not in DTYPE_NAMES or shard.tensor.is_meta:
            raise MegatfmError(f"tensor {name}: {shard.tensor.dtype} on {shard.tensor.device} can't be stored")
        if regions := tuple(shard.list_pieces()):
            names[(DTYPE_NAMES[shard.tensor.dtype], tuple(shard.global_shape)), regions].append(name)
    groups = [LocalGroup(spec, tuple(members)) for (spec, _), members in names.items()]
    return groups, [regions for _, regions in names]


def merge_plans(by_rank: Sequence[Sequence[tuple[LocalGroup, Regions]]]) -> tuple[PlannedGroup, ...]:
    """Choose one writer for each piece among the ranks that hold it, so that ranks write about equally much.

    by_rank: the groups of each rank, and its pieces of them. Raises MegatfmError if ranks contradict each other or a
    tensor is incomplete.
    """
    groups = [(spec, names, _find_holders(names[0], spec, held)) for spec, names, held in _iter_common_groups(by_rank)]
    loads = [0] * len(by_rank)
    writers: dict[tuple[int, Region], tuple[tuple[int, int], ...]] = {}
    # Pieces with a single holder come first; replicas then balance the loads, the largest first.
    order = sorted(
        (len(ranks) > 1, -count_piece_bytes(spec, region), i, region)
        for i, (spec, _, holders) in enumerate(groups)
        for region, ranks in holders.items()
    )
    for _, negative_size, i, region in order:
        _, names, holders = groups[i]
        writers[i, region] = assign_evenly(loads, holders[region], len(names), -negative_size)
    return tuple(
        PlannedGroup(spec, names, tuple(PlannedPiece(region, writers[i, region]) for region in sorted(holders)))
        for i, (spec, names, holders) in enumerate(groups)
    )


HeldRegions = list[tuple[int, Regions]]
"""Ranks, and the pieces that each holds of the tensors of a group."""


def _iter_common_groups(
    by_rank: Sequence[Sequence[tuple[LocalGroup, Regions]]],
) -> Iterator[tuple[TensorSpec, tuple[str, ...], HeldRegions]]:
    """Yield groups of tensors that are in one group on each rank that has them, in the order of their first names."""
    groups: dict[int, LocalGroup] = {}  # by identity: ranks with the same names mostly share the object
    held_by_group: dict[int, HeldRegions] = defaultdict(list)
    for rank, rank_groups in enumerate(by_rank):
        for group, regions in rank_groups:
            groups[id(group)] = group
            held_by_group[id(group)].append((rank, regions))
    groups_of_name: dict[str, list[int]] = defaultdict(list)
    for key, group in groups.items():
        for name in group.names:
            groups_of_name[name].append(key)
    names_by_groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, keys in sorted(groups_of_name.items()):
        names_by_groups[tuple(keys)].append(name)
    for group_keys, names in names_by_groups.items():
        specs = [groups[key].spec for key in group_keys]
        for spec in specs:
            if spec != specs[0]:
                a, b = (f"{DTYPES[dtype]} {shape}" for dtype, shape in (specs[0], spec))
                raise MegatfmError(f"tensor {names[0]}: ranks disagree on dtype or shape, {a} or {b}")
        held = [rank_regions for key in group_keys for rank_regions in held_by_group[key]]
        yield specs[0], tuple(names), sorted(held, key=lambda rank_regions: rank_regions[0])


def _find_holders(name: str, spec: TensorSpec, held: HeldRegions) -> dict[Region, list[int]]:
    """Return the ranks that hold each piece. name: of a tensor, for errors."""
    by_offsets: dict[tuple[int, ...], tuple[Region, int]] = {}
    holders: dict[Region, list[int]] = defaultdict(list)
    for rank, regions in held:
        for region in regions:
            first_region, first_rank = by_offsets.setdefault(region[0], (region, rank))
            if first_region != region:
                raise MegatfmError(f"tensor {name}: ranks {first_rank} and {rank} hold different shards at {region[0]}")
            holders[region].append(rank)
    check_cover(name, spec[1], holders)
    return holders


def assign_evenly(loads: list[int], holders: Sequence[int], n_tensors: int, size: int) -> tuple[tuple[int, int], ...]:
    """Divide tensors of `size` bytes among their holders, so that the largest load is smallest; adds to `loads`.

    Returns (rank, number of tensors) of ranks that get any. Loads are filled up to one level (water-filling), so the
    time doesn't depend on the number of tensors.
    """
    ranks = sorted(holders, key=lambda rank: loads[rank])
    counts = dict.fromkeys(ranks, 0)
    if size == 0 or len(ranks) == 1:
        counts[ranks[0]] = n_tensors
    else:
        filled_load, n_filled = 0, 0
        for rank in ranks:  # while the level of the ranks before exceeds this rank's load
            if n_filled and n_tensors * size + filled_load <= n_filled * loads[rank]:
                break
            filled_load, n_filled = filled_load + loads[rank], n_filled + 1
        level = (n_tensors * size + filled_load) // n_filled
        counts |= {rank: (level - loads[rank]) // size for rank in ranks[:n_filled]}
        by_load = sorted(ranks, key=lambda rank: loads[rank] + counts[rank] * size)
        for rank in by_load[: n_tensors - sum(counts.values())]:
            counts[rank] += 1
    for rank, count in counts.items():
        loads[rank] += count * size
    return tuple((rank, count) for rank, count in sorted(counts.items()) if count)


def count_piece_bytes(spec: TensorSpec, region: Region) -> int:
    """Return the bytes of one piece of a tensor."""
    return prod(region[1]) * DTYPES[spec[0]].itemsize
