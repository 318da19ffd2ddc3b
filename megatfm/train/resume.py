"""Finds the checkpoint that a run continues from."""

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megatfm import checkpoint
from megatfm.checkpoint.directory import (
    check_checkpoint_on_all_ranks,
    list_checkpoints,
    name_checkpoint,
    step_from_path,
)
from megatfm.checkpoint.local import LocalCheckpoint, NodeTopology, find_latest_local, remove_local_after
from megatfm.config import Config
from megatfm.config.key_migrations import migrate
from megatfm.engines.interface import PRECISIONS
from megatfm.errors import MegatfmError, UsageError
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.decision_log import DecisionLog

log = logging.getLogger("megatfm")

MAX_COUNT = 2**63 - 1
"""Upper bound of a step, a number of tokens or a position: the largest signed 64-bit integer."""
LOCAL_ID = "local-id"
UNEVALUATED = "unevaluated"
"""Key of a state with the metrics of its step, if a signal interrupted the evaluation."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from.

    state: its JSON state, with the config converted to this version's keys (`convert_config`). local: set if the
    checkpoint is on the nodes' local disks.
    """

    path: Path
    state: Mapping[str, Any]
    local: LocalCheckpoint | None = None

    def __post_init__(self) -> None:
        """Raise MegatfmError for a state that no training run wrote; a correct hash doesn't exclude this."""
        data = self.state.get("data")
        counts = {
            "step": self.state.get("step"),
            "tokens": self.state.get("tokens"),
            "data.position": data.get("position") if isinstance(data, Mapping) else None,
        }
        for key, value in counts.items():
            if type(value) is not int or not 0 <= value <= MAX_COUNT:
                raise MegatfmError(
                    f"{self.path}: not a checkpoint of a run: its {key} is {value!r:.80}, not a valid count"
                )
        if not isinstance(self.state.get("precision"), str):
            raise MegatfmError(f"{self.path}: not a checkpoint of a run: it doesn't say its precision")
        config = self.state.get("config")
        if not isinstance(config, Mapping) or not isinstance(config.get("model"), Mapping):
            raise MegatfmError(f"{self.path}: not a checkpoint of a run: it has no config of its model")
        if (part := _find_malformed_part(self.state)) is not None:
            raise MegatfmError(f"{self.path}: not a checkpoint of a run: no run writes its {part} in this form")
        object.__setattr__(self, "state", {**self.state, "config": convert_config(config)})

    @property
    def step(self) -> int:
        """Number of steps done when it was saved."""
        return int(self.state["step"])


def _find_malformed_part(state: Mapping[str, Any]) -> str | None:
    """Return the name of a part, such as "best", that no training run wrote as it is; None if there is none."""

    def are_counts(part: Mapping[str, Any], keys: Sequence[str]) -> bool:
        return all(type(part.get(key, 0)) is int and 0 <= part.get(key, 0) <= MAX_COUNT for key in keys)

    trouble, best, unevaluated = state.get("trouble", {}), state.get("best"), state.get(UNEVALUATED)
    if unevaluated is not None and not (isinstance(unevaluated, Mapping) and unevaluated.get("step") == state["step"]):
        return UNEVALUATED
    if not isinstance(trouble, Mapping) or not are_counts(trouble, ("in_a_row", "skipped")):
        return "trouble"
    losses = trouble.get("losses", [])
    if not isinstance(losses, list) or not all(map(_is_number, losses)):
        return "trouble"
    if best is None:
        return None
    is_best = isinstance(best, Mapping) and "step" in best and are_counts(best, ("step", "evaluations_since"))
    return None if is_best and _is_number(best.get("value")) else "best"


def _is_number(value: object) -> bool:
    """Return whether a value is a number as `to_strict_json` writes it."""
    return type(value) in (int, float) or value in ("NaN", "Infinity", "-Infinity")


def convert_config(stored: Any) -> Any:
    """Convert a stored config to this version's keys, with defaults for keys that are new since.

    A config that this version can't validate is only migrated, so that its differences can still be listed.
    """
    migrated = migrate(stored)
    try:
        return Config.model_validate(migrated).model_dump(mode="json")
    except ValidationError:
        return migrated


def find_resume_point(
    folder: Path, nodes: NodeTopology | None = None, decisions: DecisionLog | None = None
) -> ResumePoint | None:
    """Return the newest intact checkpoint, shared or on the nodes' local disks; None without one. A collective.

    Every byte is verified; each rank reads a part. Removes local checkpoints that a rollback in `decisions` discarded.
    Raises what `checkpoint.find_latest_intact` raises, on every rank.
    """
    path = checkpoint.find_latest_intact(folder)
    shared = run_on_rank_0_raising(lambda: ResumePoint(path, checkpoint.read_state(path)) if path else None)
    local = find_latest_local(nodes) if nodes else None
    if nodes and local and decisions:
        decisions.read()
        data = local.metadata(nodes.folder).state.get("data")
        position = data.get("position") if isinstance(data, Mapping) else None
        rollback_step = decisions.find_discarding_rollback(local.step, position) if isinstance(position, int) else None
        if rollback_step is not None:
            log.warning(
                "the local checkpoint of step %d is not used: the run rolled back to step %d after it was saved",
                local.step,
                rollback_step,
            )
            remove_local_after(nodes, rollback_step)
            local = find_latest_local(nodes)
    if nodes is None or local is None or (shared and shared.step >= local.step):
        return shared
    return ResumePoint(nodes.folder / name_checkpoint(local.step), local.metadata(nodes.folder).state, local)


def choose_stored_precision(config: Config, start: ResumePoint | None) -> str:
    """Return the precision to train in. With "auto", a run that starts from a checkpoint keeps its precision.

    Raises UsageError for a precision of a later version.
    """
    if start is None or config.train.precision != "auto":
        return config.train.precision
    stored = str(start.state["precision"])
    if stored not in PRECISIONS:
        raise UsageError(
            f"{start.path}: was saved with train.precision = {stored!r:.40}, which this version lacks: continue with "
            f"the version that saved it, or set one of {', '.join(PRECISIONS)}"
        )
    return stored


def find_branch_point(branch_from: str) -> ResumePoint:
    """Return the checkpoint `RUN@STEP`, with all files verified. A collective. Raises UsageError, MegatfmError."""

    def find() -> Path:
        run, at, step = branch_from.rpartition("@")
        checkpoints = list_checkpoints(Path(run if at else branch_from) / "checkpoints")
        path = next((path for path in checkpoints if step.isdecimal() and step_from_path(path) == int(step)), None)
        if path is None:
            steps = ", ".join(str(step_from_path(path)) for path in checkpoints) or "none"
            raise UsageError(
                f"train.branch_from = {branch_from!r}: give RUN@STEP, with the step of one of the run's checkpoints; "
                f"there are: {steps}"
            )
        return path

    path = run_on_rank_0_raising(find)
    if (reason := check_checkpoint_on_all_ranks(path)) is not None:
        raise MegatfmError(f"train.branch_from = {branch_from!r}: {path.name} can't be used: {reason}")
    return run_on_rank_0_raising(lambda: ResumePoint(path, checkpoint.read_state(path)))


def discover_nodes(config: Config, run: RunDirectory) -> NodeTopology | None:
    """Return which ranks share a node's local disk; None unless `checkpoint.local_dir` is set. A collective.

    The local folder's name contains a random id, drawn once per run directory, so that runs of equal name don't share
    checkpoints.
    """
    if not config.checkpoint.local_dir:
        return None

    def local_id() -> str:
        path = run.folder / LOCAL_ID
        if not path.exists():
            run.write(LOCAL_ID, secrets.token_hex(8) + "\n")
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if re.fullmatch(r"[0-9a-f]{16}\n", run_id := path.read_text()):
                return run_id.strip()
        raise MegatfmError(
            f"{path}: can't be read, or is damaged: remove it; the run then ignores its checkpoints on local disks"
        )

    folder = Path(os.path.expandvars(config.checkpoint.local_dir))
    if not folder.is_absolute() or "$" in str(folder):
        raise UsageError(
            f"checkpoint.local_dir = {config.checkpoint.local_dir!r} is {folder} here: give an absolute path on the "
            "node's own disk, in which every variable is set"
        )
    return NodeTopology.discover(folder / f"{config.name}-{run_on_rank_0_raising(local_id)}", None)


def read_stored_tensors(point: ResumePoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return a checkpoint's tensors: name → (dtype, shape). A collective.

    Rank 0 reads and broadcasts them, since other machines may see the files only later.
    """
    if point.local:
        return point.local.metadata(point.path).tensor_specs()
    return run_on_rank_0_raising(lambda: checkpoint.read_tensor_specs(point.path))
