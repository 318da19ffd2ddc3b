"""Local checkpointing: frequent checkpoints on node-local disks, which survive the loss of one node.

Every node has a folder of committed checkpoints, with all of the metadata but only some files: those of its ranks, and
copies of those of the previous node. A resume uses the newest checkpoint of which every file is intact on some node,
and fetches the files that a node's ranks need and the node lacks.
"""

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from blake3 import blake3
from pydantic import JsonValue
from torch import Tensor

from megatfm import object_collectives
from megatfm.checkpoint import file_format, file_io
from megatfm.checkpoint.directory import (
    list_checkpoints,
    name_checkpoint,
    name_staging_dir,
    remove,
    remove_leftovers,
    step_from_path,
    try_to_remove,
)
from megatfm.checkpoint.file_format import FileEntry
from megatfm.checkpoint.metadata import METADATA_FILENAME, Metadata, NewerFormatError, encode_metadata, parse_metadata
from megatfm.checkpoint.planner import WriteItem, WritePlan
from megatfm.checkpoint.reader import Reader
from megatfm.checkpoint.sharded_tensor import ShardedTensor
from megatfm.checkpoint.writer import build_metadata, write_rank_files
from megatfm.errors import MegatfmError
from megatfm.object_collectives import Group

log = logging.getLogger("megatfm")

KEEP = 2
"""Checkpoints on each node: the newest, and an intact one while the newest is written."""
MESSAGE_BYTES = 16 * 2**20
"""Bytes of a message between ranks."""


@dataclass(frozen=True)
class NodeTopology:
    """Assignment of ranks to nodes; ranks of a node share a local checkpoint folder. node_of_rank: node by rank."""

    folder: Path
    rank: int
    node_of_rank: tuple[int, ...]
    group: Group

    @classmethod
    def discover(cls, folder: Path, group: Group) -> "NodeTopology":
        """Gather the topology: ranks with the same machine and folder form a node. A collective."""
        names: list[tuple[str, str]] = object_collectives.all_gather_object(
            (object_collectives.get_machine_name(), str(folder)), group
        )
        node_index = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return cls(folder, object_collectives.rank(group), tuple(node_index[name] for name in names), group)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return max(self.node_of_rank) + 1

    def list_ranks_on(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, rank_node in enumerate(self.node_of_rank) if rank_node == node]

    @property
    def replicated_node(self) -> int:
        """The node whose files this one copies."""
        return (self.node_of_rank[self.rank] - 1) % self.n_nodes

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank does the shared work of its node."""
        return self.find_leader(self.node_of_rank[self.rank]) == self.rank

    def find_leader(self, node: int) -> int:
        """Return the lowest rank of a node."""
        return self.list_ranks_on(node)[0]

    def iter_replication_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (sender, receiver) ranks that copy each rank's files to the next node.

        Even nodes send first, then odd ones (an odd last node by itself), so that the pairs of a phase are disjoint.
        """
        if self.n_nodes == 1:
            return
        is_odd = self.n_nodes % 2 == 1
        for phase in range(3):
            for node in range(self.n_nodes):
                if phase == (2 if is_odd and node == self.n_nodes - 1 else node % 2):
                    receivers = self.list_ranks_on((node + 1) % self.n_nodes)
                    for index, rank in enumerate(self.list_ranks_on(node)):
                        yield rank, receivers[index % len(receivers)]


def save_local(
    nodes: NodeTopology,
    step: int,
    state: dict[str, JsonValue],
    plan: WritePlan,
    pieces: Callable[[], Mapping[WriteItem, Tensor]],
) -> Path:
    """Write this node's files of a checkpoint and copies of the previous node's, and return its path. A collective.

    pieces: returns this rank's tensors. Raises MegatfmError on all ranks if anything fails on any. Nodes whose ranks
    are killed before the end lack the checkpoint.
    """
    action, group = f"checkpoint of step {step} not saved on the nodes", nodes.group
    final = nodes.folder / name_checkpoint(step)
    staging_dir = final.with_name(object_collectives.run_on_rank_0(action, lambda: name_staging_dir(final).name, group))
    _make_staging_dir(action, nodes, staging_dir)
    per_rank = object_collectives.run_and_gather(
        action, lambda: write_rank_files(staging_dir, nodes.rank, plan.items, pieces()), group
    )

    def encode() -> tuple[bytes, list[list[str]]]:
        metadata = build_metadata(step, state, plan.groups, per_rank)
        return encode_metadata(metadata), [list(written.files) for written in per_rank]

    raw, files = object_collectives.run_on_rank_0(action, encode, group)
    entries = parse_metadata(staging_dir, raw).files
    sends = [(name, source, target) for source, target in nodes.iter_replication_pairs() for name in files[source]]
    transfer_files(action, nodes.group, staging_dir, staging_dir, entries, sends)

    def finish() -> None:
        if nodes.is_node_leader:  # the other ranks are done with the folder, which is renamed now
            file_io.write_file(staging_dir / METADATA_FILENAME, [memoryview(raw)])
            file_io.sync_folder(staging_dir)
            if final.exists():  # from before the run was rolled back
                remove(final)
            file_io.rename(staging_dir, final)

    object_collectives.run_on_all_ranks(action, finish, group)
    if nodes.is_node_leader:  # now that every node has the new one
        try:
            for path in list_checkpoints(nodes.folder)[:-KEEP]:
                try_to_remove(path)
        except MegatfmError as error:  # only logged: the new checkpoint is valid, and the other ranks go on
            log.warning("old checkpoints could not be removed: %s", error)
    return final


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint whose files are spread over the nodes.

    metadata_bytes: its `metadata.json`. nodes_by_file: file → nodes on which it is intact.
    """

    step: int
    metadata_bytes: bytes
    nodes_by_file: dict[str, list[int]]

    def metadata(self, folder: Path) -> Metadata:
        """Parse the metadata. folder: named in errors. Raises MegatfmError if it is damaged."""
        return parse_metadata(folder, self.metadata_bytes)


def find_latest_local(nodes: NodeTopology) -> LocalCheckpoint | None:
    """Return the newest checkpoint of which every file is intact on some node; None if there is none. A collective.

    Reads every byte. Raises NewerFormatError for a checkpoint of a later version.
    """
    action = "node-local checkpoints not read"
    local = object_collectives.run_on_all_ranks(
        action, lambda: _scan_local_dir(nodes) if nodes.is_node_leader else {}, nodes.group
    )
    # Ranks exchange hashes of metadata; only metadata that is used is broadcast.
    metadata = {(step, blake3(raw).digest()): raw for step, raw in local}
    intact = {(step, blake3(raw).digest()): files for (step, raw), files in local.items()}
    first_holder: dict[tuple[int, bytes], int] = {}
    nodes_by_file: dict[tuple[int, bytes], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, rank_checkpoints in enumerate(object_collectives.all_gather_object(intact, nodes.group)):
        for key, files in rank_checkpoints.items():
            first_holder.setdefault(key, rank)
            for file in files:
                nodes_by_file[key][file].append(nodes.node_of_rank[rank])
    for key in sorted(first_holder, reverse=True):
        raw = object_collectives.broadcast_from(action, metadata.get(key, b""), first_holder[key], nodes.group)
        holders = nodes_by_file[key]
        if missing := sorted(parse_metadata(nodes.folder, raw).files.keys() - holders.keys()):
            log.warning("step %d on the nodes is not used: no node has an intact %s", key[0], ", ".join(missing[:3]))
            continue
        return LocalCheckpoint(key[0], raw, dict(holders))
    return None


def fetch_missing_files(nodes: NodeTopology, local: LocalCheckpoint, shards: Mapping[str, ShardedTensor]) -> Path:
    """Fetch the files that this node's ranks need for their shards; returns the checkpoint's path on this node. A
    collective."""
    action = f"checkpoint of step {local.step} not fetched from the nodes"
    final = nodes.folder / name_checkpoint(local.step)
    staging_dir = name_staging_dir(final)
    metadata = local.metadata(nodes.folder)
    needed = object_collectives.run_on_all_ranks(action, lambda: Reader(final, metadata, shards).files, nodes.group)
    missing = _find_missing_files(nodes, local, object_collectives.all_gather_object(needed, nodes.group))
    sends = [
        (
            file,
            nodes.find_leader(local.nodes_by_file[file][node % len(local.nodes_by_file[file])]),
            nodes.find_leader(node),
        )
        for node, files in sorted(missing.items())
        for file in sorted(files)
    ]

    def finish() -> None:
        if nodes.is_node_leader:
            if not final.exists():
                file_io.write_file(staging_dir / METADATA_FILENAME, [memoryview(local.metadata_bytes)])
                file_io.sync_folder(staging_dir)
                file_io.rename(staging_dir, final)
                return
            for path in staging_dir.iterdir():  # replaces damaged files, too
                file_io.rename(path, final / path.name)
            file_io.remove_tree(staging_dir)

    _make_staging_dir(action, nodes, staging_dir)
    transfer_files(action, nodes.group, final, staging_dir, metadata.files, sends)
    object_collectives.run_on_all_ranks(action, finish, nodes.group)
    return final


def _make_staging_dir(action: str, nodes: NodeTopology, staging_dir: Path) -> None:
    """Create a staging folder on each node. A collective."""

    def make() -> None:
        if nodes.is_node_leader:
            file_io.make_durable_dirs(nodes.folder)
            file_io.make_dir(staging_dir)

    object_collectives.run_on_all_ranks(action, make, nodes.group)


def remove_local_after(nodes: NodeTopology | None, newest: int = -1) -> None:
    """Remove leftovers of killed saves on the nodes, and checkpoints of steps after `newest`. A collective."""
    if nodes is None:
        return

    def clean() -> None:
        if nodes.is_node_leader:
            remove_leftovers(nodes.folder)
            for path in list_checkpoints(nodes.folder):
                if step_from_path(path) > newest:
                    remove(path)

    object_collectives.run_on_all_ranks("node-local checkpoints not cleaned", clean, nodes.group)


def _find_missing_files(nodes: NodeTopology, local: LocalCheckpoint, needed: list[list[str]]) -> dict[int, set[str]]:
    """Return node → files that its ranks need and it lacks. needed: by rank."""
    missing: dict[int, set[str]] = defaultdict(set)
    for rank, files in enumerate(needed):
        node = nodes.node_of_rank[rank]
        missing[node] |= {file for file in files if node not in local.nodes_by_file[file]}
    return missing


def _scan_local_dir(nodes: NodeTopology) -> dict[tuple[int, bytes], list[str]]:
    """Return (step, metadata) of each checkpoint on this node → its intact files."""
    intact_files = {}
    for path in list_checkpoints(nodes.folder):
        try:
            raw = file_io.read_file(path / METADATA_FILENAME)
            metadata = parse_metadata(path, raw)
            if path.name != name_checkpoint(metadata.step):  # its files would be looked for in the folder of that step
                raise MegatfmError(f"it holds step {metadata.step}, so its folder was renamed")
        except NewerFormatError:
            raise
        except MegatfmError as error:
            log.warning("%s is not used: %s", path, error)
            continue
        intact_files[metadata.step, raw] = [
            name for name, entry in metadata.files.items() if _is_intact(path / name, entry)
        ]
    return intact_files


def _is_intact(path: Path, entry: FileEntry) -> bool:
    """Read every byte of a file of tensors; return whether it is intact."""
    try:
        file_format.read_safetensors(path, entry, {})
    except MegatfmError:
        return False
    return True


def transfer_files(
    action: str,
    group: Group,
    source: Path,
    target: Path,
    entries: Mapping[str, FileEntry],
    sends: Collection[tuple[str, int, int]],
) -> None:
    """Send files from the folder `source` of one rank to the folder `target` of another. A collective.

    sends: (file, sender, receiver). After a failure all bytes are still sent, so that the other side doesn't wait; then
    all ranks raise MegatfmError.
    """
    errors: list[MegatfmError] = []
    rank = object_collectives.rank(group)
    with object_collectives.collective_errors(action):
        for name, sender, receiver in sends:
            if sender == rank:
                _send(source / name, entries[name], receiver, group, errors)
            elif receiver == rank:
                _receive(target / name, entries[name], sender, group, errors)

    def check() -> None:
        if errors:
            raise errors[0]

    object_collectives.run_on_all_ranks(action, check, group)


def _send(path: Path, entry: FileEntry, receiver: int, group: Group, errors: list[MegatfmError]) -> None:
    with contextlib.closing(_read_messages(path, entry.bytes, errors)) as messages:
        for message in messages:
            dist.send(message, receiver, group)


def _read_messages(path: Path, size: int, errors: list[MegatfmError]) -> Generator[Tensor, None, None]:
    """Yield the bytes of a file; undefined ones after a read error."""
    buffer, bytes_left = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), size
    try:
        with file_io.HashedFile(path) as file:
            while bytes_left:
                message = buffer[:bytes_left]
                file.read_into(message.numpy().data)
                yield message
                bytes_left -= len(message)
    except MegatfmError as error:
        errors.append(error)
    while bytes_left:
        yield buffer[:bytes_left]
        bytes_left -= min(bytes_left, MESSAGE_BYTES)


def _receive(path: Path, entry: FileEntry, sender: int, group: Group, errors: list[MegatfmError]) -> None:
    bytes_left = entry.bytes

    def receive_messages() -> Iterator[memoryview]:
        nonlocal bytes_left
        while bytes_left:
            message = torch.empty(min(MESSAGE_BYTES, bytes_left), dtype=torch.uint8)
            dist.recv(message, sender, group)
            bytes_left -= len(message)
            yield message.numpy().data

    messages = receive_messages()
    try:
        size, digest = file_io.write_file(path, messages, entry.bytes >= file_format.DIRECT_BYTES)
        if (size, digest) != (entry.bytes, entry.blake3):
            errors.append(MegatfmError(f"{path} is damaged: what came from rank {sender} doesn't have its hash"))
    except MegatfmError as error:
        errors.append(error)
        for _ in messages:  # the sender continues
            pass
