"""A disk that loses power: the operations of a save are recorded, and replayed with what was not synced lost.

What POSIX promises, and no more: written bytes are on the disk once the file was synced, and a name (made, renamed,
removed) once its folder was. Everything else may be there or not, in any order, and a write may be torn.
"""

import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from megatfm.checkpoint import check_all_bytes, find_latest, read_state, read_tensors
from megatfm.checkpoint.directory import list_checkpoints

OPERATIONS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
Choice = Literal["nothing", "everything", "names", "data", "some"]
CHOICES: tuple[Choice, ...] = ("nothing", "everything", "names", "data")


@dataclass(frozen=True)
class Operation:
    """One change of the disk, or a sync. path: the file or folder; when: on a clock that all processes share."""

    kind: str
    path: str
    when: int
    data: bytes = b""
    new: str = ""


@contextmanager
def replace_operations(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace each operation of this process on the disk by `wrap(name, operation)`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield


@contextmanager
def record_operations(into: list[Operation]) -> Iterator[None]:
    """Record what this process, in any of its threads, does to the disk."""
    lock = threading.Lock()

    def wrap(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            with lock:  # so that the order that is written down is the one that happened
                fresh = name != "open" or (bool(args[1] & os.O_CREAT) and not os.path.lexists(args[0]))
                path = _resolve_path(args[0], kwargs.get("dir_fd"))
                result = genuine(*args, **kwargs)
                if fresh:
                    data = bytes(args[1][:result]) if name == "write" else b""
                    new = str(args[1]) if name == "rename" else ""
                    kind = "create" if name == "open" else name
                    into.append(Operation(kind, path, time.monotonic_ns(), data, new))
                return result

        return operation

    with replace_operations(wrap):
        yield


def _resolve_path(first: Any, folder: int | None) -> str:
    if isinstance(first, int):
        return str(Path(f"/proc/self/fd/{first}").readlink())
    return str(Path(f"/proc/self/fd/{folder}").readlink() / first) if folder is not None else str(first)


@dataclass(eq=False)
class Node:
    """A file (with its bytes) or a folder (with its names)."""

    data: bytearray = field(default_factory=bytearray)
    names: "dict[str, Node] | None" = None


@dataclass(frozen=True)
class Change:
    """One thing that is on the disk or not: bytes of a file, or names in a folder."""

    on: Node
    is_name: bool
    apply: Callable[[], None]
    torn: Callable[[], None] | None = None


class Disk:
    """Contents of a disk at first, and the operations since then."""

    def __init__(self, root: Path, operations: Sequence[Operation]) -> None:
        self.root, self.operations = root, sorted(operations, key=lambda operation: operation.when)
        self._before = _read_tree(root)

    def tree_after_power_cut(self, count: int, choice: Choice, draw: random.Random) -> dict[str, bytes | None]:
        """The tree (path → bytes, None for a folder) that a power cut after `count` operations leaves behind."""
        top = _copy_tree(self._before)
        changes, synced = self._replay(top, self.operations[:count])
        for number, change in enumerate(changes):
            survivors = (
                number in synced
                or {
                    "nothing": False,
                    "everything": True,
                    "names": change.is_name,
                    "data": not change.is_name,
                    "some": draw.random() < 0.5,
                }[choice]
            )
            if survivors:
                change.apply()
            elif choice == "some" and change.torn and draw.random() < 0.5:
                change.torn()
        return dict(_list_tree(top, ""))

    def _replay(self, top: Node, operations: Iterable[Operation]) -> tuple[list[Change], set[int]]:
        """All changes in order, and the numbers of those that were synced. `top` itself stays as it is."""
        visible = dict(_walk_tree(top, str(self.root)))  # what the kernel would show
        changes: list[Change] = []
        synced: set[int] = set()
        offsets: dict[Node, int] = {}
        for operation in operations:
            folder = visible.get(str(Path(operation.path).parent))
            name = Path(operation.path).name
            if operation.kind == "fsync":
                node = visible.get(operation.path, top)
                synced |= {number for number, change in enumerate(changes) if change.on is node}
            elif operation.kind == "write":
                node = visible[operation.path]
                start = offsets.get(node, 0)
                offsets[node] = start + len(operation.data)
                changes.append(_write_change(node, start, operation.data))
            elif folder is None:  # outside: not what is looked at
                continue
            elif operation.kind in ("mkdir", "create"):
                node = Node(names={} if operation.kind == "mkdir" else None)
                visible[operation.path] = node
                changes.append(_name_change(folder, {name: node}))
            elif operation.kind in ("unlink", "rmdir"):
                del visible[operation.path]
                changes.append(_name_change(folder, {name: None}))
            else:  # a rename, in one folder
                new = Path(operation.new).name
                node = visible[operation.path]
                changes.append(_name_change(folder, {name: None, new: node}))
                visible = {_rename_path(path, operation.path, operation.new): node for path, node in visible.items()}
        return changes, synced


def _write_change(node: Node, start: int, data: bytes) -> Change:
    def put(count: int) -> None:
        node.data.extend(bytes(max(0, start + count - len(node.data))))
        node.data[start : start + count] = data[:count]

    def torn() -> None:  # the size is there, and half of the bytes
        put(len(data))
        node.data[start + len(data) // 2 : start + len(data)] = bytes(len(data) - len(data) // 2)

    return Change(node, False, lambda: put(len(data)), torn)


def _name_change(folder: Node, entries: dict[str, Node | None]) -> Change:
    def apply() -> None:
        assert folder.names is not None
        for name, node in entries.items():
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node

    return Change(folder, True, apply)


def _rename_path(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + "/") else path


def _read_tree(path: Path) -> Node:
    if stat.S_ISDIR(path.lstat().st_mode):
        return Node(names={child.name: _read_tree(child) for child in path.iterdir()})
    return Node(bytearray(path.read_bytes()))


def _copy_tree(node: Node) -> Node:
    names = None if node.names is None else {name: _copy_tree(child) for name, child in node.names.items()}
    return Node(bytearray(node.data), names)


def _walk_tree(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, child in (node.names or {}).items():
        yield from _walk_tree(child, f"{path}/{name}")


def _list_tree(node: Node, path: str) -> Iterator[tuple[str, bytes | None]]:
    if node.names is None:
        yield path, bytes(node.data)
        return
    yield path, None
    for name, child in sorted(node.names.items()):
        yield from _list_tree(child, f"{path}/{name}")


def write_tree(tree: dict[str, bytes | None], folder: Path) -> None:
    """Make the files of a tree."""
    for path, data in tree.items():
        if data is None:
            (folder / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path.lstrip("/")).write_bytes(data)


def find_newest_intact_step(folder: Path) -> int:
    """The step that the next start would go on from, every value of which must be right.

    Whatever else bears a checkpoint's name is whole, too.
    """
    for path in list_checkpoints(folder):
        check_all_bytes(path)
    newest = find_latest(folder, hashes=True)
    assert newest is not None
    step = read_state(newest)["step"]
    assert isinstance(step, int)
    assert newest.name == f"step-{step:08d}"
    assert all(bool((tensor == step).all()) for tensor in read_tensors(newest).values())
    return step
