"""What a run decided about steps that went wrong: written down before it is carried out, and repeated by a resume.

The file is `decisions.jsonl`; a resume from any checkpoint, on any layout, takes the same decisions again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from megatfm.atomic import open_nofollow
from megatfm.checkpoint import disk
from megatfm.errors import MegatfmError
from megatfm.ranks import run_on_rank_0_raising

DECISIONS = "decisions.jsonl"


@dataclass
class DecisionLog:
    """What was decided in this run: steps that are skipped, and steps after which the data goes on elsewhere."""

    path: Path
    is_writer: bool
    skips: set[int] = field(default_factory=set)
    data_resume_positions: dict[int, int] = field(default_factory=dict)
    """After this step the data goes on from this position."""
    rollbacks: dict[int, int] = field(default_factory=dict)
    """How often the run came back to this step."""

    def read(self) -> None:
        """Take up what was decided before; all ranks together. Raises MegatfmError for a file that can't be read."""
        self.skips, self.data_resume_positions, self.rollbacks = set(), {}, {}
        for record in run_on_rank_0_raising(lambda: _read(self.path)):
            self._apply(record)

    def clear(self) -> None:
        """A run from the start has decided nothing yet."""
        self.skips, self.data_resume_positions, self.rollbacks = set(), {}, {}
        if self.is_writer:
            self.path.unlink(missing_ok=True)

    def skip(self, step: int) -> None:
        """This step changes no weights."""
        if step not in self.skips:
            self._write({"decision": "skip", "step": step})

    def retry_after(self, step: int) -> list[int]:
        """Skip none of the steps after this one any more, as they may go well with other settings; returns them."""
        dropped = sorted(other for other in self.skips if other > step)
        if dropped:
            self._write({"decision": "retry", "step": step})
        return dropped

    def left_behind(self, step: int, position: int) -> int | None:
        """The step that the run went back to, if a state of a step and a position is of the future that it left."""
        came = [other for other in self.data_resume_positions if other < step]
        return max(came) if came and position <= self.data_resume_positions[max(came)] else None

    def record_rollback(self, spike: int, step: int, position: int) -> None:
        """Because of a loss spike, the run goes back to the end of a step, and on from a later position of the data."""
        self._write({"decision": "rollback", "leap": spike, "step": step, "position": position})

    def _write(self, record: dict[str, Any]) -> None:
        self._apply(record)
        if self.is_writer:
            try:
                with open(self.path, "ab", opener=open_nofollow) as file:
                    whole = self.path.read_bytes().rfind(b"\n") + 1
                    file.truncate(whole)  # a kill may have torn the last line
                    file.write(json.dumps({**record, "check": _check(record)}).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                if not whole:  # the file's name may be new
                    disk.sync_folder(self.path.parent)
            except OSError as error:
                raise MegatfmError(f"can't write {self.path}: {error.strerror}") from error

    def _apply(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        if record["decision"] == "skip":
            self.skips.add(step)
            return
        if record["decision"] == "retry":
            self.skips = {other for other in self.skips if other <= step}
            return
        # What was decided about later steps was decided about other data.
        self.skips = {other for other in self.skips if other <= step}
        self.data_resume_positions = {
            other: at for other, at in self.data_resume_positions.items() if other < step
        }
        self.data_resume_positions[step] = int(record["position"])
        self.rollbacks[step] = self.rollbacks.get(step, 0) + 1


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        *lines, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise MegatfmError(f"can't read {path}: {error.strerror}") from error
    if b"}" in torn[:-1]:  # a whole line, but for its end
        lines.append(torn)
    records = []
    for number, line in enumerate(lines):  # what a kill tore was never carried out
        try:
            record = json.loads(line)
            if record.pop("check") != _check(record):
                raise ValueError
            records.append({"decision": record["decision"], "step": int(record["step"]), **record})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MegatfmError(
                f"{path}, line {number + 1}: damaged: restore or remove the file; it says which steps the run skips"
            ) from error
    return records


def _check(record: Mapping[str, Any]) -> str:
    """Tells a line that was changed: its decision would be another."""
    return blake3(json.dumps(record).encode()).hexdigest(16)
