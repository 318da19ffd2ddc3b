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
from megatfm.checkpoint.box import Box
from megatfm.checkpoint.folder import clean, committed, damage_of_file, remove, step_of, try_to_remove
from megatfm.checkpoint.metadata import Metadata
from megatfm.checkpoint.reader import Reader
from megatfm.checkpoint.share import Share
from megatfm.checkpoint.transfer import send_all
from megatfm.checkpoint.writer import describe, write_share
from megatfm.errors import MegatfmError
from megatfm.ranks import Group

log = logging.getLogger("megatfm")

KEEP = 2
"""Checkpoints of each node: the newest, and one that is whole while the newest is written."""


@dataclass(frozen=True)
class Nodes:
    """Who shares a node-local folder with whom. node: the node of each rank."""

    folder: Path
    rank: int
    node: tuple[int, ...]
    group: Group

    @classmethod
    def meet(cls, folder: Path, group: Group) -> "Nodes":
        """Find out. A collective. Ranks with the same machine and the same folder are of one node."""
        names: list[tuple[str, str]] = ranks.gather((ranks.machine(), str(folder)), group)
        order = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(folder, ranks.rank(group), tuple(order[name] for name in names), group)

    @property
    def count(self) -> int:
        """Number of nodes that hold ranks."""
        return max(self.node) + 1

    def of(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, its in enumerate(self.node) if its == node]

    @property
    def before(self) -> int:
        """The node whose files this one keeps, too."""
        return (self.node[self.rank] - 1) % self.count

    @property
    def leads(self) -> bool:
        """Whether this is the rank that does what its node does once."""
        return self.of(self.node[self.rank])[0] == self.rank

    def leader(self, node: int) -> int:
        """The lowest rank on a node."""
        return self.of(node)[0]

    def transfers(self) -> Iterator[tuple[int, int]]:
        """(from, to) such that every rank's files get to the next node; those of one phase run side by side."""
        if self.count == 1:
            return
        last_alone = self.count % 2 == 1
        for phase in range(3):
            for node in range(self.count):
                if phase == (2 if last_alone and node == self.count - 1 else node % 2):
                    takers = self.of((node + 1) % self.count)
                    for place, rank in enumerate(self.of(node)):
                        yield rank, takers[place % len(takers)]


def write_to_nodes(
    nodes: Nodes,
    step: int,
    state: dict[str, JsonValue],
    share: Share,
    pieces: Callable[[], Mapping[MetadataIndex, Tensor]],
) -> Path:
    """Write this node's part of a checkpoint and a copy of the part of the node before. A collective.

    Raises MegatfmError on all ranks if anything fails on any. A node whose ranks are killed in between lacks it.
    """
    what, group = f"checkpoint of step {step} not saved on the nodes", nodes.group
    token = ranks.by_rank_0(what, lambda: secrets.token_hex(4), group)
    final = nodes.folder / f"step-{step:08d}"
    draft = final.with_name(f".{final.name}.partial-{token}")

    def make() -> None:
        if nodes.leads:
            disk.make_folder(nodes.folder)
            disk.make_new_folder(draft)

    ranks.together(what, make, group)
    everyone = ranks.gathered(what, lambda: write_share(draft, nodes.rank, share.items, pieces()), group)

    def encode() -> tuple[bytes, list[list[str]]]:
        assert share.tensors is not None
        content = describe(step, state, share.tensors, everyone)
        return metadata.encode(content), [list(written.files) for written in everyone]

    raw, files = ranks.by_rank_0(what, encode, group)
    entries = metadata.parse(draft, raw).files
    sends = [(name, source, target) for source, target in nodes.transfers() for name in files[source]]
    send_all(what, nodes.group, draft, draft, entries, sends)

    def finish() -> None:
        if nodes.leads:  # the others have no more to do there: it is about to get another name
            disk.write_file(draft / metadata.FILENAME, [memoryview(raw)])
            disk.sync_folder(draft)
            if final.exists():  # of a future that the run went back from
                remove(final)
            disk.rename(draft, final)

    ranks.together(what, finish, group)
    if nodes.leads:  # only now does every node have the new one
        for path in committed(nodes.folder)[:-KEEP]:
            try_to_remove(path)
    return final


@dataclass(frozen=True)
class NodeCheckpoint:
    """A checkpoint that the nodes hold together. raw: its metadata. holders: file → the nodes that have it whole."""

    step: int
    raw: bytes
    holders: dict[str, list[int]]

    def content(self, folder: Path) -> Metadata:
        """Metadata parsed from `raw`; folder: what errors name. Raises MegatfmError where `raw` is damaged."""
        return metadata.parse(folder, self.raw)


def newest_on_nodes(nodes: Nodes) -> NodeCheckpoint | None:
    """The newest checkpoint of which every file is whole on some node; each byte is read. A collective."""
    mine = ranks.together(
        "node-local checkpoints not read", lambda: _survey(nodes) if nodes.leads else {}, nodes.group
    )
    found: dict[tuple[int, bytes], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, theirs in enumerate(ranks.gather(mine, nodes.group)):
        for key, files in theirs.items():
            for file in files:
                found[key][file].append(nodes.node[rank])
    for step, raw in sorted(found, key=lambda key: (key[0], blake3(key[1]).digest()), reverse=True):
        holders = found[step, raw]
        if missing := sorted(metadata.parse(nodes.folder, raw).files.keys() - holders.keys()):
            log.warning(
                "step %d on the nodes is not used: no node has %s whole", step, ", ".join(missing[:3])
            )
            continue
        return NodeCheckpoint(step, raw, {file: list(on) for file, on in holders.items()})
    return None


def fetch(nodes: Nodes, held: NodeCheckpoint, boxes: Mapping[str, Box]) -> Path:
    """Bring what this node's ranks need for these boxes to its folder; returns the checkpoint there. A collective."""
    what = f"checkpoint of step {held.step} not fetched from the nodes"
    final = nodes.folder / f"step-{held.step:08d}"
    draft = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
    content = held.content(nodes.folder)
    needed = ranks.together(what, lambda: Reader(final, content, boxes).files, nodes.group)
    lacking = _lacking(nodes, held, ranks.gather(needed, nodes.group))
    sends = [
        (file, nodes.leader(held.holders[file][node % len(held.holders[file])]), nodes.leader(node))
        for node, files in sorted(lacking.items())
        for file in sorted(files)
    ]

    def make() -> None:
        if nodes.leads:
            disk.make_folder(nodes.folder)
            disk.make_new_folder(draft)

    def finish() -> None:
        if nodes.leads:
            if not final.exists():
                disk.write_file(draft / metadata.FILENAME, [memoryview(held.raw)])
                disk.sync_folder(draft)
                disk.rename(draft, final)
                return
            for path in draft.iterdir():  # takes the place of a damaged one, too
                disk.rename(path, final / path.name)
            disk.remove_tree(draft)

    ranks.together(what, make, nodes.group)
    send_all(what, nodes.group, final, draft, content.files, sends)
    ranks.together(what, finish, nodes.group)
    return final


def forget_nodes(nodes: Nodes, newest: int = -1) -> None:
    """Remove what killed saves left on the nodes, and checkpoints of steps after `newest`. A collective."""

    def work() -> None:
        if nodes.leads:
            clean(nodes.folder)
            for path in committed(nodes.folder):
                if step_of(path) > newest:
                    remove(path)

    ranks.together("node-local checkpoints not cleaned", work, nodes.group)


def _lacking(nodes: Nodes, held: NodeCheckpoint, needed: list[list[str]]) -> dict[int, set[str]]:
    """By node: what its ranks need and it doesn't have."""
    lacking: dict[int, set[str]] = defaultdict(set)
    for rank, files in enumerate(needed):
        lacking[nodes.node[rank]] |= {f for f in files if nodes.node[rank] not in held.holders[f]}
    return lacking


def _survey(nodes: Nodes) -> dict[tuple[int, bytes], list[str]]:
    """What this node has: (step, metadata) → files that are whole."""
    found = {}
    for path in committed(nodes.folder):
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
