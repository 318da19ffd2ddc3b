"""Finds the checkpoint that a run continues from, and checks which settings may differ from the saved ones."""

import contextlib
import logging
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megatfm import checkpoint
from megatfm.checkpoint.directory import check_checkpoint_on_all_ranks, list_checkpoints, step_from_path
from megatfm.checkpoint.local import LocalCheckpoint, NodeTopology, find_latest_local, remove_local_after
from megatfm.config import Config
from megatfm.config.foreign_keys import reject_renamed_keys
from megatfm.config.key_migrations import migrate
from megatfm.config.model import compute_factor
from megatfm.config.model_parts import WIDTH_POWERS
from megatfm.data.mixture import changes_past_rows
from megatfm.engines.interface import PRECISIONS
from megatfm.errors import MegatfmError, UsageError
from megatfm.object_collectives import all_gather_object, run_on_rank_0_raising
from megatfm.parallel.layout import ModelLayout
from megatfm.tracking.hardware import HardwareByRank, diff_hardware
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.resilience import DecisionLog

log = logging.getLogger("megatfm")

MAX_COUNT = 2**63 - 1
"""Upper bound of a step, a number of tokens or a position: the largest signed 64-bit integer."""
LOCAL_ID = "local-id"
ALLOWABLE_CHANGES = {
    "data": ("data.", "config.data.images."),
    "tokenizer": ("tokenizer",),
    "seed": ("config.train.seed",),
    "schedule": ("config.lr_schedule.", "config.train.steps"),
    "optimizer": ("config.optimizer.",),
    "model": ("config.model.", "config.objective.", "config.train.freeze"),
    "batch": ("config.train.global_batch",),
}
"""Group of `resume.allow` → prefixes of the state keys that it covers. State keys in no group may change freely.

A checkpoint without any key of a group's first prefix, such as a converted one, has no value for the group."""
CONFIG_KEYS = {
    "data.warmup": "data.rampup",
    "data.streams": "data.read_streams",
    "data.mixture_block": "data.mixture_block_rows",
}
"""State key → config key, for state keys that still have an old name of their config key."""


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
    """Return the name of a part, "trouble" or "best", that no training run wrote as it is; None if there is none."""

    def are_counts(part: Mapping[str, Any], keys: Sequence[str]) -> bool:
        return all(type(part.get(key, 0)) is int and 0 <= part.get(key, 0) <= MAX_COUNT for key in keys)

    trouble, best = state.get("trouble", {}), state.get("best")
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
    return ResumePoint(nodes.folder / f"step-{local.step:08d}", local.metadata(nodes.folder).state, local)


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
        path = next((path for path in checkpoints if step.isdecimal() and path.name == f"step-{int(step):08d}"), None)
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


def check_compatible(
    point: ResumePoint,
    current: Mapping[str, Any],
    allow: list[str],
    shape_mismatch: str = "",
    *,
    same_run: bool = True,
) -> list[str]:
    """Compare a checkpoint's state with that of the run that resumes from it; return the allowed differences.

    allow: groups of `resume.allow`. shape_mismatch: description of weights that don't fit the model, or "". same_run:
    False for a checkpoint of another run, from which this one branches.

    Raises UsageError with the differences if one is in a group outside `allow`. Another optimizer, another type of
    stored weights, and weights that don't fit are always errors.
    """
    way_out = "give the run another name" if same_run else "leave train.branch_from out"
    try:
        reject_renamed_keys(point.state["config"]["model"])
    except ValueError as error:
        raise UsageError(
            f"{point.path}: was saved by a version with another [model] section ({error}): continue with that version, "
            f"or {way_out}, and start from these weights with train.init_from={point.path}"
        ) from None
    saved_values, current_values = _flatten(point.state), _flatten(current)
    for values in (saved_values, current_values):
        _resolve_width_factors(values)
        for key in ("data.position", "data.epoch", "data.seed"):  # config.train.seed is compared instead
            values.pop(key, None)
    old_name, new_name = (values.get("config.optimizer.name") for values in (saved_values, current_values))
    if old_name != new_name:
        raise UsageError(
            f"{point.path}: holds the state of optimizer.name = {old_name!r}, which {new_name!r} can't use: {way_out}, "
            f"and start from these weights with {shlex.quote(f'train.init_from={point.path}')}"
        )
    precision = _describe_precision_change(point, current, way_out)
    changes_by_group = _group_changes(saved_values, current_values)
    mixtures = (values.get("data.mixture") for values in (saved_values, current_values))
    if changes_past_rows(*mixtures, point.state["data"]["position"]):
        changes_by_group["data"].append(
            "the new weights count from the first row on, so some rows are read again and others never "
            "(data.mixture_schedule changes them from a later row on)"
        )
    allowed = [line for group, lines in changes_by_group.items() if group in allow for line in lines]
    refused_changes = {group: lines for group, lines in changes_by_group.items() if group not in allow}
    refused_lines = [line for lines in refused_changes.values() for line in lines]
    if shape_mismatch:
        raise UsageError(
            f"{point.path}: was saved by a run that differs: {'; '.join([*refused_lines, *allowed])}. Its weights "
            f"don't fit ({shape_mismatch}), and resume.allow can't change that: {way_out}"
        )
    if refused_changes:
        raise UsageError(
            f"{point.path}: was saved by a run that differs: {'; '.join(refused_lines)}. "
            f"{'Give the run another name, or accept' if same_run else 'Accept'} the change with "
            f"resume.allow={','.join(sorted([*allow, *refused_changes]))}"
        )
    return [*allowed, *precision]


def _group_changes(saved_values: Mapping[str, Any], current_values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return a line for each value that differs, by its group in `ALLOWABLE_CHANGES`; other values are ignored.

    A group without any value in the checkpoint has a single line.
    """
    groups_without_value = {
        name
        for name, prefixes in ALLOWABLE_CHANGES.items()
        if not any(key.startswith(prefixes[0]) and value is not None for key, value in saved_values.items())
    }
    changes_by_group: dict[str, list[str]] = {}
    for key in sorted(saved_values.keys() | current_values.keys()):
        group = next((name for name, prefixes in ALLOWABLE_CHANGES.items() if key.startswith(prefixes)), None)
        if group is None or saved_values.get(key) == current_values.get(key):
            continue
        if group in groups_without_value:
            changes_by_group[group] = [f"{group}: none there"]
        else:
            name = CONFIG_KEYS.get(key, key).removeprefix("config.")
            line = f"{name}: {saved_values.get(key)!s:.200} → {current_values.get(key)!s:.200}"
            changes_by_group.setdefault(group, []).append(line)
    return changes_by_group


def _describe_precision_change(point: ResumePoint, current: Mapping[str, Any], way_out: str) -> list[str]:
    """Describe a change of precision for the log. Raises UsageError if weights would have another type."""
    old, new = point.state["precision"], current["precision"]
    if old == new:
        return []
    if old in PRECISIONS and PRECISIONS[old].param_dtype != PRECISIONS[new].param_dtype:
        old_dtype, new_dtype = (str(PRECISIONS[name].param_dtype).removeprefix("torch.") for name in (old, new))
        raise UsageError(
            f"{point.path}: was saved with train.precision = {old!r}, whose weights and optimizer state are "
            f"{old_dtype}; those of {new!r} are {new_dtype}: continue with train.precision={old}, or {way_out}, and "
            f"start from these weights with {shlex.quote(f'train.init_from={point.path}')}"
        )
    return [f"precision: {old} → {new}"]


def find_changes_that_may_fix_skips(allowed: Sequence[str]) -> list[str]:
    """Return those of the allowed changes with which a step that was skipped may succeed: optimizer and precision."""
    return [line for line in allowed if line.startswith(("optimizer.", "precision:"))]


def read_stored_tensors(point: ResumePoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return a checkpoint's tensors: name → (dtype, shape). A collective.

    Rank 0 reads and broadcasts them, since other machines may see the files only later.
    """
    if point.local:
        return point.local.metadata(point.path).tensor_specs()
    return run_on_rank_0_raising(lambda: checkpoint.read_tensor_specs(point.path))


def describe_shape_mismatch(point: ResumePoint, layout: ModelLayout) -> str:
    """Describe the first of a checkpoint's weights that doesn't fit the model; "" if all fit. A collective."""
    shapes = {name: tuple(tensor.shape) for name, tensor in {**layout, **layout.state}.items()}
    stored = {
        name.removeprefix("model."): shape
        for name, (_, shape) in read_stored_tensors(point).items()
        if name.startswith("model.")
    }
    all_shapes = {name: shape for rank_shapes in all_gather_object(shapes) for name, shape in rank_shapes.items()}
    return find_shape_mismatch(stored, all_shapes)


def find_shape_mismatch(stored: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str:
    """Describe the first tensor whose shapes differ, or that only one of the two has; "" if all fit."""
    for name in [*expected, *stored]:
        model_shape, stored_shape = expected.get(name), stored.get(name)
        if model_shape is None or stored_shape is None or list(model_shape) != list(stored_shape):
            shapes = [
                f"{list(shape)} {location}"
                for shape, location in ((stored_shape, "there"), (model_shape, "here"))
                if shape is not None
            ]
            return f"{name} is {' and '.join(shapes)}" + (" alone" if len(shapes) == 1 else "")
    return ""


def describe_hardware_changes(point: ResumePoint, machines: HardwareByRank) -> list[str]:
    """Return a line for the log if processors, threads or libraries differ from those recorded in the checkpoint."""
    changes = diff_hardware(point.state.get("machines", machines), machines)
    return [f"other hardware or libraries ({'; '.join(changes)}): results will not be bit-identical"] if changes else []


def _resolve_width_factors(values: dict[str, Any]) -> None:
    """Replace scales that are powers of the width by their numbers, which earlier versions stored."""
    width = values.get("config.model.d_model")
    for key in ("config.model.embedding.scale", "config.model.lm_head.scale"):
        factor = values.get(key)
        if isinstance(factor, str) and factor in WIDTH_POWERS and isinstance(width, int) and width > 0:
            values[key] = compute_factor(factor, width)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries into one with dotted keys."""
    if isinstance(value, Mapping):
        return {
            path: leaf
            for key, item in value.items()
            for path, leaf in _flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: value}
