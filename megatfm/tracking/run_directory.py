"""The run directory: what a run leaves on disk, and which of it goes again when the run is refused."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from megatfm import tokenizers
from megatfm.config import Config, to_toml
from megatfm.config.section import check_path
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import NewPaths, atomic_write
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.tracking import hardware
from megatfm.tracking.metrics import EVENTS, log_event
from megatfm.tracking.run_lock import RunLock

_log = logging.getLogger("megatfm")


def run_folder(config: Config) -> Path:
    """Return the run directory of a config."""
    return check_path(Path(config.run_dir) if config.run_dir else Path.cwd() / "runs" / config.name)


@dataclass
class RunDirectory:
    """An open run directory. Rank 0 holds a lock on it that dies with the process, and writes the shared files.

    A run that is refused (UsageError) before `keep` was called removes what it made itself, if the folder was not there
    before: what others put there stays.

    new_paths: what the command made for this run before, the folder perhaps among it.
    """

    folder: Path
    rank: int
    new_paths: NewPaths = field(default_factory=NewPaths, repr=False)
    _lock: RunLock = field(init=False, repr=False)
    _is_kept: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._lock = RunLock(self.folder / "lock")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; it does not exist before the first save."""
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        """Log file of this rank's messages and stacks."""
        return self.folder / "logs" / f"rank-{self.rank}.log"

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the files that all ranks share."""
        return self.rank == 0

    def __enter__(self) -> Self:
        """Make the folder and take the lock (rank 0). A collective, where there is a group.

        Raises LockedError on all ranks if another process trains in this folder, MegatfmError if it can't be written.
        """
        try:
            new_folders = run_on_rank_0_raising(lambda: self._open() if self.is_main else [])
            if not self.is_main:
                self.new_paths.folders = new_folders
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self._lock.remember_file()
        except OSError as error:
            raise MegatfmError(f"{self.folder}: can't write the run directory: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, UsageError) and not self._is_kept:
            self._remove_new()
        self._lock.release()

    def _open(self) -> list[Path]:
        """Make the folder and take the lock; returns the folders that are new, the outermost first."""
        self._check_links()
        self.new_paths.make_folder(self.log.parent)
        try:
            self._lock.acquire()
        except BaseException:
            self.new_paths.remove_folders()
            raise
        self.new_paths.files.append(self._lock.path)
        return self.new_paths.folders

    def _check_links(self) -> None:
        """Refuse links that lead nowhere, or into another run: its checkpoints would be purged as this run's own."""
        for folder in (self.checkpoints, self.log.parent):
            if not folder.is_symlink():
                continue
            target = folder.resolve()
            if not target.is_dir():
                raise MegatfmError(
                    f"{folder} is a symbolic link to no folder: make that folder, {target}, or remove the link"
                )
            for run in (target, *target.parents):
                is_run = all((run / name).is_file() for name in ("lock", "config.toml"))
                if is_run and run != self.folder.resolve():
                    raise UsageError(
                        f"{folder} is a symbolic link into another run, {run}, whose files would be purged or "
                        "mixed with this run's: link to a folder of its own, or use train.branch_from"
                    )

    def will_write(self, path: Path) -> None:
        """Note a file that this process is about to write: a refused run removes it if it is new."""
        self.new_paths.will_write(path)

    def keep(self) -> None:
        """Keep everything from now on, however the run ends: the first step is about to be taken."""
        self._is_kept = True
        self.new_paths.keep()

    def _remove_new(self) -> None:
        """Remove this process's files from a folder that is new; the last rank to leave removes the folder.

        Rank 0 removes the lock as its last file: before that, other ranks may still be starting there.
        """
        if not self.new_paths.is_new(self.folder):
            self.new_paths.files.clear()  # the log has the reason
            return
        self.new_paths.remove_files()
        if not self._lock.path.exists():
            self.new_paths.remove_folders()

    def check_not_moved(self) -> None:
        """Raise MegatfmError if this is no longer the folder that was entered: another run may own it now."""
        if not self._lock.is_in_place():
            raise MegatfmError(
                f"{self.folder}: was removed, moved or replaced while it was trained in, so nothing more is written "
                "there: put it back, and start the same command again"
            )

    def announce_links(self) -> None:
        """Log where checkpoints and logs lie if their folders are links to elsewhere."""
        for folder in (self.checkpoints, self.log.parent):
            if folder.is_symlink():
                _log.info("%s is a symbolic link: what it is for lies in %s", folder, folder.resolve())

    def log_event(self, event: str, detail: str, step: int) -> None:
        """Note what happened to the run (rank 0)."""
        if self.is_main:
            self.will_write(self.folder / EVENTS)
            log_event(self.folder, event, detail, step)

    def log_failure(self, text: str, step: int, ranks: list[int], hosts: list[str]) -> None:
        """Record why the run ends and which ranks are to blame, for the launcher; by one rank, not always 0."""
        self.check_not_moved()
        self.will_write(self.folder / EVENTS)
        log_event(self.folder, "failed", text, step, ranks=ranks, hosts=hosts)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file of the run whole, or not at all."""
        path = self.folder / name
        self.will_write(path)
        try:
            atomic_write(path, content)
        except OSError as error:
            raise MegatfmError(f"{path}: can't write it: {error.strerror}") from error

    def write_run_files(
        self, config: Config, plan: str, device: torch.device, facts: Mapping[str, str] | None = None
    ) -> None:
        """Leave the resolved config, the plan, the versions and any tokenizer beside the checkpoints (rank 0).

        device: the one that this process computes on. facts: what else is to be known of the machine.
        """
        self.write("config.toml", to_toml(config.model_copy(update={"run_dir": str(self.folder)})))
        self.write("plan.txt", plan)
        self.write(
            "environment.json", json.dumps({**hardware.environment(device), **(facts or {})}, indent=2) + "\n"
        )
        if config.data.tokenizer is not None:
            self._keep_tokenizer(tokenizers.tokenizer_files(config.data.tokenizer))

    def _keep_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Have the run's tokenizer here, and no other that an earlier run of this name left."""
        for name, content in files.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != content:
                self.write(name, content)
        for name in {*tokenizers.TOKENIZER_FILENAMES, tokenizers.CHAT_TEMPLATE} - files.keys():
            (self.folder / name).unlink(missing_ok=True)
