"""Directories of checkpoints: find the newest intact one, apply retention, remove leftovers of killed saves."""

import logging
import re
import secrets
from pathlib import Path

from megatfm import object_collectives
from megatfm.checkpoint import file_io, reader
from megatfm.checkpoint.metadata import METADATA_FILENAME, NewerFormatError, parse_metadata, read_metadata
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import name_disk_errors

log = logging.getLogger("megatfm")

_COMMITTED = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.damaged-[0-9a-f]{8}")
"""Name of a damaged checkpoint that `commit` replaced; kept until a later one has been verified."""
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|removed)-[0-9a-f]{8}")


def name_checkpoint(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_from_path(path: Path) -> int:
    """Return the step of a checkpoint, from its folder name."""
    return int(path.name.removeprefix("step-"))


def name_staging_dir(final: Path) -> Path:
    """Return a new path beside `final`, in which a checkpoint is written before it is renamed."""
    return final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")


def find_latest(folder: Path, *, hashes: bool = False) -> Path | None:
    """Return the newest committed and intact checkpoint; None if there are no checkpoints.

    A checkpoint is intact if its metadata matches its hash and every file has its recorded size; with `hashes`, also
    its recorded BLAKE3. Skips damaged ones with a warning. Not a collective: in a run, rank 0 calls it and broadcasts
    the result. Raises MegatfmError if no checkpoint is intact, as a fresh start would bury them.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        if (reason := check_checkpoint(path, hashes=hashes)) is None:
            return path
        log.warning("checkpoint %s is not used: %s", path.name, reason)
    if paths:
        raise _make_no_intact_error(folder, len(paths))
    return None


def find_latest_intact(folder: Path) -> Path | None:
    """Return the newest checkpoint whose files all have their hashes; ranks share the reading. A collective.

    Raises UsageError for symbolic links in place of checkpoints, because the run will also save there.
    """
    paths, links = object_collectives.run_on_rank_0(f"{folder} not read", lambda: _list_with_links(folder))
    if links:
        raise UsageError(f"{links[0]} is a symbolic link: put the checkpoint itself there, or remove the link")
    for path in reversed(paths):
        reason = check_checkpoint_on_all_ranks(path)
        if reason is None:
            return path
        if object_collectives.rank() == 0:
            log.warning("checkpoint %s is not used: %s", path.name, reason)
    if paths:
        raise _make_no_intact_error(folder, len(paths))
    return None


def check_checkpoint_on_all_ranks(path: Path) -> str | None:
    """Return the fault of a checkpoint, or None, on all ranks; ranks share the reading. A collective."""

    def check_and_read() -> tuple[bytes, str | None]:
        reason = check_checkpoint(path)
        return (b"", reason) if reason else (file_io.read_file(path / METADATA_FILENAME), None)

    raw, reason = object_collectives.run_on_rank_0(f"{path} not read", check_and_read)
    return reason or next(filter(None, object_collectives.all_gather_object(_check_share_of_files(path, raw))), None)


def _list_with_links(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints, and those that are symbolic links, on which a run would fail when it saves."""
    if folder.is_symlink() and not folder.is_dir():
        raise MegatfmError(f"{folder} is a symbolic link to no folder: make that folder, or remove the link")
    paths = list_checkpoints(folder)
    return paths, [path for path in paths if path.is_symlink()]


def _check_share_of_files(path: Path, raw: bytes) -> str | None:
    """Check this rank's share of the files. Return the first fault, or None."""
    try:
        metadata = parse_metadata(path, raw)
        files = sorted(metadata.files)[object_collectives.rank() :: object_collectives.world_size()]
        timeout = file_io.NFS_VISIBILITY_SECONDS if object_collectives.world_size() > 1 else 0.0
        reader.verify_files(path, metadata, files, timeout)
    except MegatfmError as error:
        return str(error)
    return None


def _make_no_intact_error(folder: Path, count: int) -> MegatfmError:
    return MegatfmError(
        f"{folder}: none of its {count} checkpoints is intact, see above; move them away to start afresh"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder, oldest first; empty if the folder doesn't exist."""
    if not folder.exists():
        return []
    with name_disk_errors("list", folder):
        steps = {path: match for path in folder.iterdir() if (match := _COMMITTED.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path][1]))


def check_checkpoint(path: Path, *, hashes: bool = False) -> str | None:
    """Return the fault of a committed checkpoint, or None if it is intact.

    Raises NewerFormatError for a checkpoint of a later version.
    """
    try:
        if path.is_symlink():
            raise MegatfmError("it is a symbolic link")
        metadata = read_metadata(path)
        if path.name != name_checkpoint(metadata.step):
            raise MegatfmError(f"it holds step {metadata.step}, so its folder was renamed")
        if hashes:
            reader.verify_checkpoint(path)
        else:
            reader.check_sizes(path, metadata)
    except NewerFormatError:
        raise
    except MegatfmError as error:
        return str(error)
    return None


def check_all_bytes(path: Path) -> None:
    """Read every byte of a checkpoint; raises MegatfmError with the file and its fault."""
    if (reason := check_checkpoint(path, hashes=True)) is not None:
        raise MegatfmError(f"checkpoint {path} is damaged: {reason}")


def purge_old_checkpoints(
    newest: Path, keep: int, *, every: int = 0, verified: Path | None = None, pinned: Path | None = None
) -> None:
    """Remove checkpoints older than the last `keep` intact ones, counted back from the just committed `newest`.

    every: steps that it divides are kept for ever (0: none). verified, pinned: kept as well. Damaged checkpoints don't
    count towards `keep`. A folder that can't be removed is only logged: the new checkpoint is valid anyway.
    Damaged checkpoints that were replaced are removed once one of the same or a later step is verified.
    """
    if verified is not None:
        for path, step in list_replaced(newest.parent):
            if step <= step_from_path(verified):
                try_to_remove(path)
    n_intact = 0
    for path in reversed(list_checkpoints(newest.parent)):
        if step_from_path(path) > step_from_path(newest):
            continue
        if n_intact < keep:
            n_intact += _is_intact(path)
        elif path not in (verified, pinned) and not (every and step_from_path(path) % every == 0):
            try_to_remove(path)


def _is_intact(path: Path) -> bool:
    """Return whether a checkpoint is intact, as far as its sizes tell; one of a later version is."""
    try:
        return check_checkpoint(path) is None
    except NewerFormatError:
        return True


def list_replaced(folder: Path) -> list[tuple[Path, int]]:
    """List damaged checkpoints that were replaced, each with its step."""
    with name_disk_errors("list", folder):
        matches = [(path, _REPLACED.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [(path, int(match[1])) for path, match in matches if match]


def remove(path: Path) -> None:
    """Remove a checkpoint. Renames it first, so that no reader finds it half removed."""
    name = path.name.removeprefix(".").partition(".")[0]
    removed = path.with_name(f".{name}.removed-{secrets.token_hex(4)}")
    file_io.rename(path, removed)
    file_io.remove_tree(removed)


def try_to_remove(path: Path) -> None:
    """Remove a checkpoint; a failure is harmless and only logged."""
    try:
        remove(path)
    except MegatfmError as error:
        log.warning("an old checkpoint could not be removed: %s", error)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove leftovers of killed saves and removals, and return their paths. No save may be running there.

    A leftover that can't be removed is harmless and only logged.
    """
    if not folder.exists():
        return []
    for path, _ in list_replaced(folder):
        log.warning(
            "%s is a damaged checkpoint, kept until a later one is verified; delete it if you need the space", path
        )
    with name_disk_errors("list", folder):
        leftovers = sorted(path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    removed = []
    for path in leftovers:
        try:
            file_io.remove_tree(path)
            removed.append(path)
        except MegatfmError as error:
            log.warning("a leftover of a killed save could not be removed: %s", error)
    return removed
