"""Plans of which rank writes which pieces of a checkpoint, made before anything is copied.

Layers of a model are cut alike, so a rank describes its shards by groups of equal ones. Rank 0 gathers how each rank
cuts each group, a kilobyte or two a rank, and the names of a group from one of the ranks that have it; every rank gets
the plan of all. Messages, time and `metadata.json` so grow with names + groups × ranks, not with names × ranks.
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
from megatfm.checkpoint.metadata import piece_key
from megatfm.checkpoint.sharded_tensor import Region, ShardedTensor, check_cover
from megatfm.errors import MegatfmError
from megatfm.object_collectives import Group

Kind = tuple[str, tuple[int, ...]]
"""The name of a dtype, and a global shape."""
Cuts = tuple[Region, ...]
"""The pieces of each tensor of a group that one rank holds."""


class LocalGroup(NamedTuple):
    """Names of one rank's tensors of one dtype and global shape, of which it holds the same pieces. Names sorted."""

    kind: Kind
    names: tuple[str, ...]


class PlannedPiece(NamedTuple):
    """A piece of each tensor of a group. writers: ranks, and how many of the group's names each of them writes."""

    region: Region
    writers: tuple[tuple[int, int], ...]


class PlannedGroup(NamedTuple):
    """Tensors of all ranks that have the same dtype and global shape and are cut alike. names: sorted."""

    kind: Kind
    names: tuple[str, ...]
    pieces: tuple[PlannedPiece, ...]


class WriteItem(NamedTuple):
    """A piece of one tensor. group, piece: its indices in the plan."""

    name: str
    region: Region
    kind: Kind
    group: int
    piece: int

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return piece_bytes(self.kind, self.region)

    @property
    def key(self) -> str:
        """Its name inside a file."""
        return piece_key(self.name, self.kind[1], *self.region)


@dataclass(frozen=True)
class WritePlan:
    """The tensors that all ranks write together, and the part of rank `rank`."""

    groups: tuple[PlannedGroup, ...]
    rank: int

    @cached_property
    def items(self) -> list[WriteItem]:
        """This rank's pieces, by name and place."""
        return sorted(self._items(), key=lambda item: (item.name, item.region[0]))

    def _items(self) -> Iterator[WriteItem]:
        for number, group in enumerate(self.groups):
            for index, piece in enumerate(group.pieces):
                start = 0
                for rank, count in piece.writers:
                    if rank == self.rank:
                        for name in group.names[start : start + count]:
                            yield WriteItem(name, piece.region, group.kind, number, index)
                    start += count

    def tensors_to_write(self, shards: Mapping[str, ShardedTensor]) -> dict[WriteItem, Tensor]:
        """Return the pieces as views of the shards' memory."""
        return {item: shards[item.name].piece(item.region) for item in self.items}


def plan_save(action: str, shards: Mapping[str, ShardedTensor], group: Group = None) -> WritePlan:
    """Plan a save of all ranks' shards: each piece is written by one of its holders, evenly. A collective.

    Raises MegatfmError on all ranks where the shards don't make up whole tensors.
    """
    local: list[LocalGroup] = []

    def describe() -> list[tuple[bytes, Cuts]]:
        nonlocal local
        local, cuts = group_shards(shards)
        return [(digest(one), its_cuts) for one, its_cuts in zip(local, cuts, strict=True)]

    described = object_collectives.run_and_gather(action, describe, group)

    def choose_senders() -> dict[int, list[int]]:
        """Rank → numbers of its groups whose names no rank before it has."""
        known: set[bytes] = set()
        numbers: dict[int, list[int]] = defaultdict(list)
        for rank, groups in enumerate(described):
            for number, (of_names, _) in enumerate(groups):
                if of_names not in known:
                    known.add(of_names)
                    numbers[rank].append(number)
        return numbers

    senders = object_collectives.run_on_rank_0(action, choose_senders, group)
    mine = [local[number] for number in senders.get(object_collectives.rank(group), ())]
    received = object_collectives.gather_from(action, mine, list(senders), group)

    def merge() -> tuple[PlannedGroup, ...]:
        groups = {digest(one): one for sent in received for one in sent}
        return merge_plans([[(groups[of_names], cuts) for of_names, cuts in one] for one in described])

    return WritePlan(object_collectives.run_on_rank_0(action, merge, group), object_collectives.rank(group))


def digest(group: LocalGroup) -> bytes:
    """Return what tells a group from others, whatever the length of its list of names."""
    return blake3(json.dumps(group).encode()).digest(16)


def group_shards(shards: Mapping[str, ShardedTensor]) -> tuple[list[LocalGroup], list[Cuts]]:
    """Group one rank's tensors, and return the pieces of each group. Tensors of which it has nothing are left out."""
    names: dict[tuple[Kind, Cuts], list[str]] = defaultdict(list)
    for name, shard in sorted(shards.items()):
        if not name or name == "__metadata__":  # the one key that safetensors keeps for itself
            raise MegatfmError(f"a tensor can't be stored under the name {name!r}")
        if shard.tensor.dtype not in DTYPE_NAMES or shard.tensor.is_meta:
            raise MegatfmError(
                f"tensor {name}: {shard.tensor.dtype} on {shard.tensor.device} can't be stored"
            )
        if cuts := tuple(shard.pieces()):
            names[(DTYPE_NAMES[shard.tensor.dtype], tuple(shard.global_shape)), cuts].append(name)
    return [LocalGroup(kind, tuple(members)) for (kind, _), members in names.items()], [
        cuts for _, cuts in names
    ]


def merge_plans(by_rank: Sequence[Sequence[tuple[LocalGroup, Cuts]]]) -> tuple[PlannedGroup, ...]:
    """Plan by each rank's groups and how it cuts them: each piece gets one writer, and ranks write about equally much.

    Raises MegatfmError where tensors contradict each other or are not complete.
    """
    groups = [
        (kind, names, _holders_of_pieces(names[0], kind, parts))
        for kind, names, parts in _common_groups(by_rank)
    ]
    loads = [0] * len(by_rank)
    writers: dict[tuple[int, Region], tuple[tuple[int, int], ...]] = {}
    units = [
        (len(ranks) > 1, -piece_bytes(kind, region), number, region)
        for number, (kind, _, held) in enumerate(groups)
        for region, ranks in held.items()
    ]
    # What only one rank holds is settled first; the replicas then even it out, the largest first.
    for _, minus_size, number, region in sorted(units):
        _, names, held = groups[number]
        writers[number, region] = share_out(loads, held[region], len(names), -minus_size)
    return tuple(
        PlannedGroup(
            kind, names, tuple(PlannedPiece(region, writers[number, region]) for region in sorted(held))
        )
        for number, (kind, names, held) in enumerate(groups)
    )


Parts = list[tuple[int, Cuts]]
"""Ranks, and what each has of the tensors of a group."""


def _common_groups(
    by_rank: Sequence[Sequence[tuple[LocalGroup, Cuts]]],
) -> Iterator[tuple[Kind, tuple[str, ...], Parts]]:
    """Yield groups of tensors that are in one group on each rank that has them, in the order of their first names."""
    groups: dict[int, LocalGroup] = {}  # by identity: ranks that hold the same names mostly share the object
    parts_of: dict[int, Parts] = defaultdict(list)
    for rank, its_groups in enumerate(by_rank):
        for group, cuts in its_groups:
            groups[id(group)] = group
            parts_of[id(group)].append((rank, cuts))
    groups_of_name: dict[str, list[int]] = defaultdict(list)
    for key, group in groups.items():
        for name in group.names:
            groups_of_name[name].append(key)
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, holders in sorted(groups_of_name.items()):
        names[tuple(holders)].append(name)
    for keys, members in names.items():
        kinds = [groups[key].kind for key in keys]
        for kind in kinds:
            if kind != kinds[0]:
                a, b = (f"{DTYPES[dtype]} {shape}" for dtype, shape in (kinds[0], kind))
                raise MegatfmError(f"tensor {members[0]}: ranks disagree on what it is, {a} or {b}")
        parts = [part for key in keys for part in parts_of[key]]
        yield kinds[0], tuple(members), sorted(parts, key=lambda part: part[0])


def _holders_of_pieces(name: str, kind: Kind, parts: Parts) -> dict[Region, list[int]]:
    """Return the ranks that hold each piece. name: of a tensor, for errors."""
    at: dict[tuple[int, ...], tuple[Region, int]] = {}
    holders: dict[Region, list[int]] = defaultdict(list)
    for rank, cuts in parts:
        for region in cuts:
            known, first = at.setdefault(region[0], (region, rank))
            if known != region:
                raise MegatfmError(
                    f"tensor {name}: ranks {first} and {rank} hold different shards at {region[0]}"
                )
            holders[region].append(rank)
    check_cover(name, kind[1], holders)
    return holders


def share_out(loads: list[int], holders: Sequence[int], units: int, size: int) -> tuple[tuple[int, int], ...]:
    """Share equal units of `size` bytes out among their holders, so that the fullest gets least; adds to `loads`.

    Returns (rank, number of units) of those that get any. Filled up to one level, as water does, so the time doesn't
    depend on the number of units.
    """
    ranks = sorted(holders, key=lambda rank: loads[rank])
    counts = dict.fromkeys(ranks, 0)
    if size == 0 or len(ranks) == 1:
        counts[ranks[0]] = units
    else:
        below, n_filled = 0, 0
        for rank in ranks:  # as long as the level over those before is above it
            if n_filled and units * size + below <= n_filled * loads[rank]:
                break
            below, n_filled = below + loads[rank], n_filled + 1
        level = (units * size + below) // n_filled
        counts |= {rank: (level - loads[rank]) // size for rank in ranks[:n_filled]}
        emptiest = sorted(ranks, key=lambda rank: loads[rank] + counts[rank] * size)
        for rank in emptiest[: units - sum(counts.values())]:
            counts[rank] += 1
    for rank, count in counts.items():
        loads[rank] += count * size
    return tuple((rank, count) for rank, count in sorted(counts.items()) if count)


def piece_bytes(kind: Kind, region: Region) -> int:
    """Return the bytes of one piece of a tensor."""
    return prod(region[1]) * DTYPES[kind[0]].itemsize
