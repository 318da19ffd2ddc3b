"""`decisions.jsonl`: a write-ahead log of skipped steps and rollbacks, which a resume from any checkpoint repeats."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from megatfm.checkpoint import file_io
from megatfm.errors import MegatfmError
from megatfm.files import open_nofollow
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.tracking.run_directory import RunDirectory

DECISIONS = "decisions.jsonl"


@dataclass
class DecisionLog:
    """Decisions of a run: which steps are skipped, and after which steps the position in the data jumps."""

    path: Path
    is_writer: bool
    skips: set[int] = field(default_factory=set)
    data_resume_positions: dict[int, int] = field(default_factory=dict)
    """Step → position in the data from which training continues after it."""
    rollbacks: dict[int, int] = field(default_factory=dict)
    """Step → number of rollbacks to it."""

    @classmethod
    def from_run(cls, run: RunDirectory) -> "DecisionLog":
        """Return the decision log of a run directory. Only rank 0 writes to it."""
        return cls(run.folder / DECISIONS, run.is_main)

    def read(self) -> None:
        """Read earlier decisions from the file. A collective. Raises MegatfmError for a file that can't be read."""
        self.skips, self.data_resume_positions, self.rollbacks = set(), {}, {}
        for record in run_on_rank_0_raising(lambda: _read_records(self.path)):
            self._apply(record)

    def clear(self) -> None:
        """Delete all decisions, for a run that starts anew."""
        self.skips, self.data_resume_positions, self.rollbacks = set(), {}, {}
        if self.is_writer:
            self.path.unlink(missing_ok=True)

    def skip(self, step: int) -> None:
        """Record that a step leaves the weights unchanged."""
        if step not in self.skips:
            self._write({"decision": "skip", "step": step})

    def retry_after(self, step: int) -> list[int]:
        """Drop the skips of all steps after this one, since changed settings may avoid them; return those steps."""
        dropped = sorted(skipped_step for skipped_step in self.skips if skipped_step > step)
        if dropped:
            self._write({"decision": "retry", "step": step})
        return dropped

    def find_discarding_rollback(self, step: int, position: int) -> int | None:
        """Return the step to which a rollback went that discarded the state (step, position); None if none did."""
        rollback_steps = [resume_step for resume_step in self.data_resume_positions if resume_step < step]
        latest = max(rollback_steps, default=None)
        return latest if latest is not None and position <= self.data_resume_positions[latest] else None

    def record_rollback(self, spike: int, step: int, position: int) -> None:
        """Record a rollback after a loss spike: to the state after `step`, and on to `position` in the data.

        spike: step at which the loss spiked.
        """
        self._write({"decision": "rollback", "leap": spike, "step": step, "position": position})

    def _write(self, record: dict[str, Any]) -> None:
        self._apply(record)
        if self.is_writer:
            try:
                with open(self.path, "ab", opener=open_nofollow) as file:
                    end = self.path.read_bytes().rfind(b"\n") + 1
                    file.truncate(end)  # an earlier process may have been killed within the last line
                    file.write(json.dumps({**record, "check": _compute_checksum(record)}).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                if not end:  # the file may be new, so its directory entry must be synced, too
                    file_io.sync_folder(self.path.parent)
            except OSError as error:
                raise MegatfmError(f"can't write {self.path}: {error.strerror}") from error

    def _apply(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        if record["decision"] == "skip":
            self.skips.add(step)
            return
        if record["decision"] == "retry":
            self.skips = {skipped_step for skipped_step in self.skips if skipped_step <= step}
            return
        # Later steps will now read other data, so decisions about them no longer hold.
        self.skips = {skipped_step for skipped_step in self.skips if skipped_step <= step}
        self.data_resume_positions = {
            earlier: position for earlier, position in self.data_resume_positions.items() if earlier < step
        }
        self.data_resume_positions[step] = int(record["position"])
        self.rollbacks[step] = self.rollbacks.get(step, 0) + 1


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        *lines, unfinished = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise MegatfmError(f"can't read {path}: {error.strerror}") from error
    if b"}" in unfinished[:-1]:  # a whole line, whose line break is damaged
        lines.append(unfinished)
    records = []
    for index, line in enumerate(lines):  # a decision whose line is unfinished was never carried out
        try:
            record = json.loads(line)
            if record.pop("check") != _compute_checksum(record):
                raise ValueError
            records.append({"decision": record["decision"], "step": int(record["step"]), **record})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MegatfmError(
                f"{path}, line {index + 1}: damaged: restore or remove the file; it says which steps the run skips"
            ) from error
    return records


def _compute_checksum(record: Mapping[str, Any]) -> str:
    """Return the checksum of a record, by which damaged lines are detected."""
    return blake3(json.dumps(record).encode()).hexdigest(16)
