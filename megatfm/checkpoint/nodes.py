"""Checkpoints on node-local disks, each node's files also on the next node: for frequent saves, and one lost node.

Every node has a folder of committed checkpoints as the shared disk has, with all of the metadata but only some files:
those of its own ranks and those of the node before it. A resume takes the newest one whose files are all whole
somewhere, and fetches what its ranks need and its node lacks.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatfm import ranks
from megatfm.checkpoint import disk, metadata
from megatfm.checkpoint.box import ShardedTensor
from megatfm.checkpoint.folder import (
    damage_of_file,
    list_checkpoints,
    remove,
    remove_leftovers,
    step_from_path,
    try_to_remove,
)
from megatfm.checkpoint.metadata import Metadata
from megatfm.checkpoint.reader import Reader
from megatfm.checkpoint.share import WritePlan
from megatfm.checkpoint.transfer import transfer_files
from megatfm.checkpoint.writer import build_metadata, write_rank_files
from megatfm.errors import MegatfmError
from megatfm.ranks import Group

log = logging.getLogger("megatfm")

KEEP = 2
"""Checkpoints of each node: the newest, and one that is whole while the newest is written."""


@dataclass(frozen=True)
class NodeTopology:
    """Who shares a node-local folder with whom. node_of_rank: the node of each rank."""

    folder: Path
    rank: int
    node_of_rank: tuple[int, ...]
    group: Group

    @classmethod
    def discover(cls, folder: Path, group: Group) -> "NodeTopology":
        """Find out. A collective. Ranks with the same machine and the same folder are of one node."""
        names: list[tuple[str, str]] = ranks.all_gather((ranks.machine(), str(folder)), group)
        order = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(folder, ranks.rank(group), tuple(order[name] for name in names), group)

    @property
    def n_nodes(self) -> int:
        """Number of nodes that hold ranks."""
        return max(self.node_of_rank) + 1

    def ranks_on(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, its in enumerate(self.node_of_rank) if its == node]

    @property
    def replicated_node(self) -> int:
        """The node whose files this one keeps, too."""
        return (self.node_of_rank[self.rank] - 1) % self.n_nodes

    @property
    def is_node_leader(self) -> bool:
        """Whether this is the rank that does what its node does once."""
        return self.ranks_on(self.node_of_rank[self.rank])[0] == self.rank

    def leader_of(self, node: int) -> int:
        """The lowest rank on a node."""
        return self.ranks_on(node)[0]

    def replication_pairs(self) -> Iterator[tuple[int, int]]:
        """(from, to) such that every rank's files get to the next node; those of one phase run side by side."""
        if self.n_nodes == 1:
            return
        last_alone = self.n_nodes % 2 == 1
        for phase in range(3):
            for node in range(self.n_nodes):
                if phase == (2 if last_alone and node == self.n_nodes - 1 else node % 2):
                    takers = self.ranks_on((node + 1) % self.n_nodes)
                    for place, rank in enumerate(self.ranks_on(node)):
                        yield rank, takers[place % len(takers)]


def save_local(
    nodes: NodeTopology,
    step: int,
    state: dict[str, JsonValue],
    share: WritePlan,
    pieces: Callable[[], Mapping[MetadataIndex, Tensor]],
) -> Path:
    """Write this node's part of a checkpoint and a copy of the part of the node before. A collective.

    Raises MegatfmError on all ranks if anything fails on any. A node whose ranks are killed in between lacks it.
    """
    what, group = f"checkpoint of step {step} not saved on the nodes", nodes.group
    token = ranks.run_on_rank_0(what, lambda: secrets.token_hex(4), group)
    final = nodes.folder / f"step-{step:08d}"
    draft = final.with_name(f".{final.name}.partial-{token}")

    def make() -> None:
        if nodes.is_node_leader:
            disk.make_durable_dirs(nodes.folder)
            disk.make_dir(draft)

    ranks.run_on_all_ranks(what, make, group)
    per_rank = ranks.run_and_gather(
        what, lambda: write_rank_files(draft, nodes.rank, share.items, pieces()), group
    )

    def encode() -> tuple[bytes, list[list[str]]]:
        assert share.global_metadata is not None
        content = build_metadata(step, state, share.global_metadata, per_rank)
        return metadata.encode(content), [list(written.files) for written in per_rank]

    raw, files = ranks.run_on_rank_0(what, encode, group)
    entries = metadata.parse(draft, raw).files
    sends = [(name, source, target) for source, target in nodes.replication_pairs() for name in files[source]]
    transfer_files(what, nodes.group, draft, draft, entries, sends)

    def finish() -> None:
        if nodes.is_node_leader:  # the others have no more to do there: it is about to get another name
            disk.write_file(draft / metadata.FILENAME, [memoryview(raw)])
            disk.sync_folder(draft)
            if final.exists():  # of a future that the run went back from
                remove(final)
            disk.rename(draft, final)

    ranks.run_on_all_ranks(what, finish, group)
    if nodes.is_node_leader:  # only now does every node have the new one
        for path in list_checkpoints(nodes.folder)[:-KEEP]:
            try_to_remove(path)
    return final


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint that the nodes hold together. metadata_bytes: its metadata. nodes_by_file: file → the nodes that
    have it whole."""

    step: int
    metadata_bytes: bytes
    nodes_by_file: dict[str, list[int]]

    def metadata(self, folder: Path) -> Metadata:
        """Metadata parsed from `raw`; folder: what errors name. Raises MegatfmError where `raw` is damaged."""
        return metadata.parse(folder, self.metadata_bytes)


def find_latest_local(nodes: NodeTopology) -> LocalCheckpoint | None:
    """The newest checkpoint of which every file is whole on some node; each byte is read. A collective."""
    mine = ranks.run_on_all_ranks(
        "node-local checkpoints not read",
        lambda: _scan_local_dir(nodes) if nodes.is_node_leader else {},
        nodes.group,
    )
    found: dict[tuple[int, bytes], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, theirs in enumerate(ranks.all_gather(mine, nodes.group)):
        for key, files in theirs.items():
            for file in files:
                found[key][file].append(nodes.node_of_rank[rank])
    for step, raw in sorted(found, key=lambda key: (key[0], blake3(key[1]).digest()), reverse=True):
        holders = found[step, raw]
        if missing := sorted(metadata.parse(nodes.folder, raw).files.keys() - holders.keys()):
            log.warning(
                "step %d on the nodes is not used: no node has %s whole", step, ", ".join(missing[:3])
            )
            continue
        return LocalCheckpoint(step, raw, {file: list(on) for file, on in holders.items()})
    return None


def fetch_missing_files(
    nodes: NodeTopology, held: LocalCheckpoint, boxes: Mapping[str, ShardedTensor]
) -> Path:
    """Bring what this node's ranks need for these boxes to its folder; returns the checkpoint there. A collective."""
    what = f"checkpoint of step {held.step} not fetched from the nodes"
    final = nodes.folder / f"step-{held.step:08d}"
    draft = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
    content = held.metadata(nodes.folder)
    needed = ranks.run_on_all_ranks(what, lambda: Reader(final, content, boxes).files, nodes.group)
    missing = _missing_files(nodes, held, ranks.all_gather(needed, nodes.group))
    sends = [
        (
            file,
            nodes.leader_of(held.nodes_by_file[file][node % len(held.nodes_by_file[file])]),
            nodes.leader_of(node),
        )
        for node, files in sorted(missing.items())
        for file in sorted(files)
    ]

    def make() -> None:
        if nodes.is_node_leader:
            disk.make_durable_dirs(nodes.folder)
            disk.make_dir(draft)

    def finish() -> None:
        if nodes.is_node_leader:
            if not final.exists():
                disk.write_file(draft / metadata.FILENAME, [memoryview(held.metadata_bytes)])
                disk.sync_folder(draft)
                disk.rename(draft, final)
                return
            for path in draft.iterdir():  # takes the place of a damaged one, too
                disk.rename(path, final / path.name)
            disk.remove_tree(draft)

    ranks.run_on_all_ranks(what, make, nodes.group)
    transfer_files(what, nodes.group, final, draft, content.files, sends)
    ranks.run_on_all_ranks(what, finish, nodes.group)
    return final


def remove_local_after(nodes: NodeTopology, newest: int = -1) -> None:
    """Remove what killed saves left on the nodes, and checkpoints of steps after `newest`. A collective."""

    def work() -> None:
        if nodes.is_node_leader:
            remove_leftovers(nodes.folder)
            for path in list_checkpoints(nodes.folder):
                if step_from_path(path) > newest:
                    remove(path)

    ranks.run_on_all_ranks("node-local checkpoints not cleaned", work, nodes.group)


def _missing_files(
    nodes: NodeTopology, held: LocalCheckpoint, needed: list[list[str]]
) -> dict[int, set[str]]:
    """By node: what its ranks need and it doesn't have."""
    missing: dict[int, set[str]] = defaultdict(set)
    for rank, files in enumerate(needed):
        missing[nodes.node_of_rank[rank]] |= {
            f for f in files if nodes.node_of_rank[rank] not in held.nodes_by_file[f]
        }
    return missing


def _scan_local_dir(nodes: NodeTopology) -> dict[tuple[int, bytes], list[str]]:
    """What this node has: (step, metadata) → files that are whole."""
    found = {}
    for path in list_checkpoints(nodes.folder):
        try:
            raw = disk.read_file(path / metadata.FILENAME)
            content = metadata.parse(path, raw)
        except metadata.NewerFormatError:
            raise
        except MegatfmError as error:
            log.warning("%s is not used: %s", path, error)
            continue
        found[content.step, raw] = [
            name for name, entry in content.files.items() if damage_of_file(path / name, entry) is None
        ]
    return found
