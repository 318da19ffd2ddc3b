"""The run directory: the files of a run, and their removal if the run is refused."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from megatfm import tokenizers
from megatfm.config import Config, to_toml
from megatfm.errors import LockedError, MegatfmError, UsageError
from megatfm.files import NewPaths, atomic_write
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.tracking import hardware
from megatfm.tracking.metrics import EVENTS, log_event
from megatfm.tracking.run_lock import RunLock

_log = logging.getLogger("megatfm")

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""


@dataclass
class RunDirectory:
    """Context manager for a run directory. Rank 0 locks it and writes the files that ranks share.

    If the run is refused (UsageError) before `keep` is called, and the folder is new, removes the files and folders
    that this run has created.

    new_paths: files and folders that the command has created for this run, perhaps with the run directory.
    """

    folder: Path
    rank: int
    new_paths: NewPaths = field(default_factory=NewPaths, repr=False)
    is_saving: Callable[[], bool] = field(init=False, repr=False)
    """Function that returns whether a save goes on. After an error one may be left alone: the lock then ends with the
    process, as another run would find the folder changing."""
    _lock: RunLock = field(init=False, repr=False)
    _is_kept: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._lock = RunLock(self.folder / "lock")
        self.is_saving = lambda: False

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints. It doesn't exist before the first save."""
        return self.folder / CHECKPOINTS

    @property
    def log_path(self) -> Path:
        """Log file of this rank."""
        return self.folder / "logs" / f"rank-{self.rank}.log"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files that ranks share."""
        return self.rank == 0

    def __enter__(self) -> Self:
        """Create the folder and take the lock, on rank 0. A collective.

        Raises LockedError on all ranks if another process trains in this folder, MegatfmError if it is not writable.
        """
        try:
            new_folders = run_on_rank_0_raising(lambda: self._open() if self.is_main else [])
            if not self.is_main:
                self.new_paths.folders = new_folders
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                self._lock.remember_file()
        except OSError as error:
            reason = f"{error.strerror}: make room there, or give another name or run_dir"
            raise MegatfmError(f"{self.folder}: can't write the run directory: {reason}") from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UsageError) and not self._is_kept:
            self._remove_new()
        if not self.is_saving():
            self._lock.release()

    def _open(self) -> list[Path]:
        """Create the folder and take the lock; return the new folders, outermost first."""
        self._check_links()
        self.new_paths.make_folder(self.log_path.parent)
        try:
            self._lock.acquire()
        except LockedError:
            self.new_paths.folders.clear()  # they are another run's by now
            raise
        except BaseException:
            self.new_paths.remove_folders()
            raise
        self.new_paths.files.append(self._lock.path)
        return self.new_paths.folders

    def _check_links(self) -> None:
        """Refuse dangling links, and links into another run, whose checkpoints would be deleted as this run's own."""
        for folder in (self.checkpoints, self.log_path.parent):
            if not folder.is_symlink():
                continue
            target = folder.resolve()
            if not target.is_dir():
                raise MegatfmError(
                    f"{folder} is a symbolic link to a missing folder: create that folder, {target}, or remove the link"
                )
            for run in (target, *target.parents):
                is_run = all((run / name).is_file() for name in ("lock", "config.toml"))
                if is_run and run != self.folder.resolve():
                    raise UsageError(
                        f"{folder} is a symbolic link into another run, {run}, whose files would be deleted or mixed "
                        "with this run's: link to a folder of its own, or use train.branch_from"
                    )

    def will_write(self, path: Path) -> None:
        """Register a file that this process is about to write. If the run is refused, it is removed if it is new."""
        self.new_paths.will_write(path)

    def keep(self) -> None:
        """Keep all files from now on, however the run ends. Called before the first step."""
        self._is_kept = True
        self.new_paths.keep()

    def _remove_new(self) -> None:
        """Remove this process's files if the run directory is new. The last rank to exit removes the folder.

        Rank 0 removes the lock as its last file: while it exists, other ranks may still be starting there.
        """
        if not self.new_paths.is_new(self.folder):
            self.new_paths.files.clear()  # keep the log, which has the error
            return
        self.new_paths.remove_files()
        if not self._lock.path.exists():
            self.new_paths.remove_folders()

    def check_not_moved(self) -> None:
        """Raise MegatfmError if the folder was removed, moved or replaced: it may belong to another run now."""
        if not self._lock.is_in_place():
            raise MegatfmError(
                f"{self.folder}: was removed, moved or replaced during training, so nothing more is written there: put "
                "it back, and start the same command again"
            )

    def announce_links(self) -> None:
        """Log where checkpoints and logs are stored if their folders are symbolic links."""
        for folder in (self.checkpoints, self.log_path.parent):
            if folder.is_symlink():
                _log.info("%s is a symbolic link to %s, where its files are stored", folder, folder.resolve())

    def log_event(self, event: str, detail: str, step: int) -> None:
        """Append an event to events.jsonl, on rank 0."""
        if self.is_main:
            self.will_write(self.folder / EVENTS)
            log_event(self.folder, event, detail, step)

    def log_failure(self, text: str, step: int, ranks: list[int], hosts: list[str], is_refusal: bool = False) -> None:
        """Append a "failed" event, with the ranks to blame, for the launcher. One rank calls it, not always rank 0.

        is_refusal: whether a UsageError is the cause. Before the first step the event is "refused", which leaves the
        state that an earlier start of the run has reached.
        """
        self.check_not_moved()
        self.will_write(self.folder / EVENTS)
        event = "refused" if is_refusal and not self._is_kept else "failed"
        log_event(self.folder, event, text, step, ranks=ranks, hosts=hosts)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file of the run atomically. Raises MegatfmError."""
        path = self.folder / name
        self.will_write(path)
        try:
            self.new_paths.make_folder(path.parent)
            atomic_write(path, content)
        except OSError as error:
            raise MegatfmError(f"{path}: can't write it: {error.strerror}") from error

    def write_run_files(
        self, config: Config, plan: str, device: torch.device, launch_info: Mapping[str, str] | None = None
    ) -> None:
        """Write the resolved config, the layout table, the environment and the tokenizer, on rank 0.

        plan: table of the model's layout. device: device of this process. launch_info: further fields of
        environment.json.
        """
        self.write("config.toml", to_toml(config.model_copy(update={"run_dir": str(self.folder)})))
        self.write("plan.txt", plan)
        environment = {**hardware.describe_environment(device), **(launch_info or {})}
        self.write("environment.json", json.dumps(environment, indent=2) + "\n")
        if config.data.tokenizer is not None:
            self._write_tokenizer(tokenizers.read_tokenizer_files(config.data.tokenizer))

    def _write_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Write the files of the run's tokenizer, and remove those of another one that an earlier run has left."""
        for name, content in files.items():
            path = self.folder / name
            try:
                is_present = path.is_file() and path.read_bytes() == content
            except OSError as error:
                raise MegatfmError(f"{path}: can't be read: {error.strerror}: remove it") from error
            if not is_present:
                self.write(name, content)
        present = {*tokenizers.TOKENIZER_FILENAMES, *tokenizers.list_chat_templates(self.folder)}
        for name in sorted(present - files.keys()):
            path = self.folder / name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise MegatfmError(
                    f"{path}: belongs to another tokenizer, and can't be removed: {error.strerror}: remove it"
                ) from error
