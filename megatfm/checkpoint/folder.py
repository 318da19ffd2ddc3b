"""A folder of checkpoints: which is the newest whole one, which may go, and what a killed save left behind."""

import logging
import re
import secrets
from pathlib import Path

from megatfm import ranks
from megatfm.checkpoint import disk, metadata, reader, shard
from megatfm.checkpoint.metadata import FileEntry, NewerFormatError
from megatfm.errors import MegatfmError, UsageError

log = logging.getLogger("megatfm")

_COMMITTED = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"\.step-(\d{8,})\.damaged-[0-9a-f]{8}")
"""What `commit` calls a damaged checkpoint that it replaces: kept until a later one has been verified."""
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|removed)-[0-9a-f]{8}")


def find_latest(folder: Path, *, hashes: bool = False) -> Path | None:
    """Return the newest committed and whole checkpoint, or None where there is none at all.

    Whole means: the metadata has its hash, and every file is there with its size; with `hashes` every byte is
    read and compared. A damaged one is named in a warning, and the one before it is used. Local: on several
    ranks, rank 0 decides and tells the others. Raises MegatfmError if there are checkpoints but none is whole,
    since starting afresh would bury them.
    """
    found = list_checkpoints(folder)
    for path in reversed(found):
        if (reason := check_checkpoint(path, hashes=hashes)) is None:
            return path
        log.warning("checkpoint %s is not used: %s", path.name, reason)
    if found:
        raise _none_is_whole(folder, len(found))
    return None


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Owner and name, as the Hugging Face Hub names a model."""


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of a run directory. Raises UsageError."""
    path = Path(path)
    if (path / "metadata.json").is_file():
        return path
    newest = find_latest(path / "checkpoints") if path.is_dir() else None
    if newest is None and (path / "config.json").is_file():
        raise UsageError(
            f"{path}: in the Hugging Face format: make a folder of ours of it with `megatfm convert {path} NEW --to "
            "megatfm`"
        )
    if newest is None and not path.exists():
        is_hub_name = HUB_NAME.fullmatch(str(path)) and not path.parent.exists()
        hub = f", or fetch it, if it is a model on the Hugging Face Hub: `hf download {path} --local-dir {path.name}`"
        raise UsageError(
            f"{path}: there is no such folder: give one with a run or checkpoint{hub if is_hub_name else ''}"
        )
    if newest is None:
        raise UsageError(
            f"{path}: neither a checkpoint nor a run directory with one: give a folder that megatfm wrote"
        )
    return newest


def find_latest_intact(folder: Path) -> Path | None:
    """`latest` with hashes, the reading of each checkpoint shared out over the ranks. A collective.

    For a run that will save there, too, so links in the place of checkpoints are refused.
    """
    found = ranks.run_on_rank_0(f"{folder} not read", lambda: _without_links(folder))
    for path in reversed(found):
        reason = damage_together(path)
        if reason is None:
            return path
        if ranks.rank() == 0:
            log.warning("checkpoint %s is not used: %s", path.name, reason)
    if found:
        raise _none_is_whole(folder, len(found))
    return None


def damage_together(path: Path) -> str | None:
    """`damage` with hashes, the reading shared out over the ranks, the same answer on all. A collective."""

    def look() -> tuple[bytes, str | None]:
        reason = check_checkpoint(path)
        return (b"", reason) if reason else (disk.read_file(path / metadata.FILENAME), None)

    raw, reason = ranks.run_on_rank_0(f"{path} not read", look)
    return reason or next(filter(None, ranks.all_gather(_damage_of_share(path, raw))), None)


def _without_links(folder: Path) -> list[Path]:
    """What is committed. Refuses what a run would stumble over only when it comes to that step, or saves at all."""
    if folder.is_symlink() and not folder.is_dir():
        raise MegatfmError(f"{folder} is a symbolic link to no folder: make that folder, or remove the link")
    found = list_checkpoints(folder)
    if links := [path for path in found if path.is_symlink()]:
        raise MegatfmError(
            f"{links[0]} is a symbolic link: put the checkpoint itself there, or remove the link"
        )
    return found


def _damage_of_share(path: Path, raw: bytes) -> str | None:
    """What is wrong with the files that fall to this rank, if anything."""
    try:
        content = metadata.parse(path, raw)
        mine = sorted(content.files)[ranks.rank() :: ranks.world_size()]
        reader.verify_files(
            path, content, mine, disk.NFS_VISIBILITY_SECONDS if ranks.world_size() > 1 else 0.0
        )
    except MegatfmError as error:
        return str(error)
    return None


def _none_is_whole(folder: Path, count: int) -> MegatfmError:
    return MegatfmError(
        f"{folder}: none of its {count} checkpoints is whole, see above; move them away to start afresh"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder, the oldest first; none where the folder doesn't exist."""
    if not folder.exists():
        return []
    with disk.naming("list", folder):
        steps = {path: match for path in folder.iterdir() if (match := _COMMITTED.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path][1]))


def check_checkpoint(path: Path, *, hashes: bool = False) -> str | None:
    """Return what is wrong with a committed checkpoint, or None where it is whole.

    Raises NewerFormatError for one that a later version wrote.
    """
    try:
        if path.is_symlink():
            raise MegatfmError("it is a symbolic link")
        content = metadata.read(path)
        if path.name != f"step-{content.step:08d}":
            raise MegatfmError(f"it holds step {content.step}: somebody renamed it")
        if hashes:
            reader.verify(path)
        else:
            reader.check_sizes(path, content)
    except NewerFormatError:
        raise
    except MegatfmError as error:
        return str(error)
    return None


def damage_of_file(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with one file of tensors, every byte of which is read, or None where it is whole."""
    try:
        shard.read(path, entry, {})
    except MegatfmError as error:
        return str(error)
    return None


def verify(path: Path) -> None:
    """Read every byte of a checkpoint; raises MegatfmError that names the file and what is wrong with it."""
    if (reason := check_checkpoint(path, hashes=True)) is not None:
        raise MegatfmError(f"checkpoint {path} is not whole: {reason}")


def purge_old_checkpoints(newest: Path, keep: int, *, every: int = 0, verified: Path | None = None) -> None:
    """Of the checkpoints up to the just committed `newest`, keep the last `keep` whole ones and remove the older.

    every: those whose step it divides stay for ever (0: none do). verified: this one stays, too. A damaged one
    doesn't count, so that the ones kept can be used. What can't be removed is named in a warning: the new
    checkpoint stands all the same. Damaged ones that were put aside go once one of their step or later is verified.
    """
    if verified is not None:
        for path, step in put_aside(newest.parent):
            if step <= step_from_path(verified):
                try_to_remove(path)
    paths = list_checkpoints(newest.parent)
    whole = 0
    for path in reversed(paths[: paths.index(newest) + 1]):
        if whole < keep:
            whole += check_checkpoint(path) is None
            continue
        if path == verified or (every and step_from_path(path) % every == 0):
            continue
        try_to_remove(path)


def put_aside(folder: Path) -> list[tuple[Path, int]]:
    """Damaged checkpoints that were replaced, each with its step."""
    with disk.naming("list", folder):
        found = [(path, _ASIDE.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [(path, int(match[1])) for path, match in found if match]


def remove(path: Path) -> None:
    """Remove a checkpoint: first out of the way, so that nobody ever finds half of it under its name."""
    name = path.name.removeprefix(".").partition(".")[0]
    removed = path.with_name(f".{name}.removed-{secrets.token_hex(4)}")
    disk.rename(path, removed)
    disk.remove_tree(removed)


def try_to_remove(path: Path) -> None:
    """The same for one that does no harm: if it can't be removed, a warning says so."""
    try:
        remove(path)
    except MegatfmError as error:
        log.warning("an old checkpoint stays: %s", error)


def step_from_path(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed saves and removals left in a folder, and return it. No save may be running there.

    What can't be removed is named in a warning: it is in nobody's way.
    """
    if not folder.exists():
        return []
    for path, _ in put_aside(folder):
        log.warning(
            "%s: a damaged checkpoint, kept until a later one is verified; delete it if you need the room",
            path,
        )
    with disk.naming("list", folder):
        leftovers = sorted(path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    removed = []
    for path in leftovers:
        try:
            disk.remove_tree(path)
            removed.append(path)
        except MegatfmError as error:
            log.warning("what a killed save left stays: %s", error)
    return removed
