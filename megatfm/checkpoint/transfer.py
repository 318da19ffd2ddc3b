"""Files from rank to rank, for disks that only one machine sees."""

import contextlib
from collections.abc import Collection, Generator, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatfm import ranks
from megatfm.checkpoint import disk, shard
from megatfm.checkpoint.metadata import FileEntry
from megatfm.errors import MegatfmError
from megatfm.ranks import Group

MESSAGE_BYTES = 16 * 2**20


def transfer_files(
    what: str,
    group: Group,
    source: Path,
    target: Path,
    entries: Mapping[str, FileEntry],
    sends: Collection[tuple[str, int, int]],
) -> None:
    """Send files (name, from rank, to rank) out of one folder into another. A collective.

    A failure must not leave the other side waiting: bytes flow to the end, and then all ranks raise it.
    """
    problems: list[MegatfmError] = []
    me = ranks.rank(group)
    for name, sender, receiver in sends:
        if sender == me:
            _send(source / name, entries[name], receiver, group, problems)
        elif receiver == me:
            _receive(target / name, entries[name], sender, group, problems)

    def check() -> None:
        if problems:
            raise problems[0]

    ranks.run_on_all_ranks(what, check, group)


def _send(path: Path, entry: FileEntry, receiver: int, group: Group, problems: list[MegatfmError]) -> None:
    with contextlib.closing(_messages(path, entry.bytes, problems)) as messages:
        for message in messages:
            dist.send(message, receiver, group)


def _messages(path: Path, size: int, problems: list[MegatfmError]) -> Generator[Tensor, None, None]:
    """The bytes of a file; from where it can't be read on, anything."""
    chunk, left = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), size
    try:
        with disk.HashedFile(path) as file:
            while left:
                message = chunk[:left]
                file.read_into(message.numpy().data)
                yield message
                left -= len(message)
    except MegatfmError as error:
        problems.append(error)
    while left:
        yield chunk[:left]
        left -= min(left, MESSAGE_BYTES)


def _receive(path: Path, entry: FileEntry, sender: int, group: Group, problems: list[MegatfmError]) -> None:
    left = entry.bytes

    def parts() -> Iterator[memoryview]:
        nonlocal left
        while left:
            part = torch.empty(min(MESSAGE_BYTES, left), dtype=torch.uint8)
            dist.recv(part, sender, group)
            left -= len(part)
            yield part.numpy().data

    arriving = parts()
    try:
        size, digest = disk.write_file(path, arriving, entry.bytes >= shard.DIRECT_BYTES)
        if (size, digest) != (entry.bytes, entry.blake3):
            problems.append(
                MegatfmError(f"{path} is damaged: what came from rank {sender} doesn't have its hash")
            )
    except MegatfmError as error:
        problems.append(error)
        for _ in arriving:  # the sender goes on
            pass
