"""The run directory: what a run leaves on disk, and who may write there."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from megatfm import tokenizers
from megatfm.atomic import atomic_write
from megatfm.config import Config, to_toml
from megatfm.config.base import check_path
from megatfm.errors import MegatfmError
from megatfm.ranks import run_on_rank_0_raising
from megatfm.train.record import machine
from megatfm.train.record.decisions import DECISIONS, DecisionLog
from megatfm.train.record.lock import RunLock
from megatfm.train.record.metrics import log_event
from megatfm.version import __version__


def run_folder(config: Config) -> Path:
    """Where a config's run lives."""
    return check_path(Path(config.run_dir) if config.run_dir else Path.cwd() / "runs" / config.name)


def environment() -> dict[str, str]:
    """Versions and machine of this process, for whoever reads the run later."""
    packages = ("numpy", "safetensors", "sentencepiece", "tokenizers")
    return {
        "megatfm": __version__,
        **commit(Path(__file__).parents[3]),
        "python": platform.python_version(),
        **machine.libraries(),
        **{package: metadata.version(package) for package in packages},
        "system": platform.platform(),
        "cpu cores": str(os.cpu_count()),
        **machine.processor(),
        **machine.gpu(),
    }


def commit(root: Path) -> dict[str, str]:
    """The git commit of the code, and whether files of it were changed; nothing where it is no checkout.

    A job's copy of the code brings a note of where it came from (`origin.json`).
    """
    origin = root / "origin.json"
    found, changed = "", False
    try:
        if (root / ".git").exists():
            found, changed = (
                _git(root, "rev-parse", "HEAD"),
                bool(_git(root, "status", "--porcelain", "-uno")),
            )
        elif origin.is_file():
            said = json.loads(origin.read_text(encoding="utf-8"))
            found, changed = str(said.get("commit", "")), bool(said.get("changed"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {"commit": found + " with changes" * changed} if found else {}


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


@dataclass
class RunDirectory:
    """An open run directory. Rank 0 holds a lock on it that dies with the process, and writes the shared files."""

    folder: Path
    rank: int
    decisions: DecisionLog = field(init=False, repr=False)
    _lock: RunLock = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.decisions = DecisionLog(self.folder / DECISIONS, self.is_main)
        self._lock = RunLock(self.folder / "lock")

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are; there is no such folder before the first save."""
        return self.folder / "checkpoints"

    @property
    def log(self) -> Path:
        """Where this rank's messages and stacks go."""
        return self.folder / "logs" / f"rank-{self.rank}.log"

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that all ranks share."""
        return self.rank == 0

    def __enter__(self) -> Self:
        """Make the folder and take the lock (rank 0). A collective, where there is a group.

        Raises LockedError on all ranks if another process trains in this folder, MegatfmError if it can't be written.
        """
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            run_on_rank_0_raising(lambda: self._lock.take() if self.is_main else None)
            if not self.is_main:
                self._lock.note()
        except OSError as error:
            raise MegatfmError(f"{self.folder}: can't write the run directory: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def check_not_moved(self) -> None:
        """Raise MegatfmError if this is no longer the folder that was entered: another run may own it now."""
        if not self._lock.is_in_place():
            raise MegatfmError(
                f"{self.folder}: was removed, moved or replaced while it was trained in, so nothing more is written "
                "there: put it back, and start the same command again"
            )

    def log_event(self, event: str, detail: str, step: int) -> None:
        """Note what happened to the run (rank 0)."""
        if self.is_main:
            log_event(self.folder, event, detail, step)

    def log_failure(self, text: str, step: int, ranks: list[int], hosts: list[str]) -> None:
        """Note why the run ends and which ranks are to blame, for whoever restarts it; by one rank, not always 0."""
        self.check_not_moved()
        log_event(self.folder, "failed", text, step, ranks=ranks, hosts=hosts)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a small file of the run whole, or not at all."""
        path = self.folder / name
        try:
            atomic_write(path, content)
        except OSError as error:
            raise MegatfmError(f"{path}: can't write it: {error.strerror}") from error

    def write_run_files(self, config: Config, plan: str, facts: Mapping[str, str] | None = None) -> None:
        """Leave the resolved config, the plan, the versions and any tokenizer beside the checkpoints (rank 0).

        facts: what else is to be known of the machine.
        """
        self.write("config.toml", to_toml(config.model_copy(update={"run_dir": str(self.folder)})))
        self.write("plan.txt", plan)
        self.write("environment.json", json.dumps({**environment(), **(facts or {})}, indent=2) + "\n")
        if config.data.tokenizer is not None:
            self._keep_tokenizer(tokenizers.tokenizer_files(config.data.tokenizer))

    def _keep_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Have the run's tokenizer here, and no other that an earlier run of this name left."""
        for name, content in files.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != content:
                self.write(name, content)
        for name in set(tokenizers.TOKENIZER_FILENAMES) - files.keys():
            (self.folder / name).unlink(missing_ok=True)
