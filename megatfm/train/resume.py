"""The checkpoint that a run continues from: which one, and which settings may differ from the saved ones."""

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
from megatfm.checkpoint.directory import check_checkpoint_on_all_ranks, list_checkpoints
from megatfm.checkpoint.local import LocalCheckpoint, NodeTopology, find_latest_local, remove_local_after
from megatfm.config import Config
from megatfm.config.foreign_keys import reject_renamed_keys
from megatfm.config.key_migrations import migrate
from megatfm.config.model import factor_at
from megatfm.config.model_parts import WIDTH_POWERS
from megatfm.engines.interface import PRECISIONS
from megatfm.errors import MegatfmError, UsageError
from megatfm.object_collectives import all_gather, run_on_rank_0_raising
from megatfm.parallel.layout import ModelLayout
from megatfm.tracking.hardware import HardwareByRank, diff_hardware
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.resilience import DecisionLog

log = logging.getLogger("megatfm")

LARGEST = 2**63 - 1
"""Upper bound of a step, a count of tokens or a position: what 64 bits hold."""
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
"""Group of `resume.allow` → prefixes of the facts that it covers. Facts in no group may change freely. A checkpoint
without any of the first prefix, such as a converted one, never had the group."""
KEY_OF_FACT = {
    "data.warmup": "data.rampup",
    "data.streams": "data.read_streams",
    "data.mixture_block": "data.mixture_block_rows",
}
"""Fact, by its name in checkpoints → config key, where that has another name now."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from; local: set if the nodes hold it among themselves.

    The state's config is as this version would have saved it, whatever version did (`current_config`).
    """

    path: Path
    state: Mapping[str, Any]
    local: LocalCheckpoint | None = None

    def __post_init__(self) -> None:
        """Raise MegatfmError for a state that megatfm didn't write, though its hash may be right."""
        data = self.state.get("data")
        counts = {
            "step": self.state.get("step"),
            "tokens": self.state.get("tokens"),
            "data.position": data.get("position") if isinstance(data, Mapping) else None,
        }
        for key, value in counts.items():
            if type(value) is not int or not 0 <= value <= LARGEST:
                raise MegatfmError(
                    f"{self.path}: not a checkpoint of a run: its {key} is {value!r:.80}, no number that can be"
                )
        if not isinstance(self.state.get("precision"), str):
            raise MegatfmError(f"{self.path}: not a checkpoint of a run: it doesn't say its precision")
        if "config" in self.state:
            state = {**self.state, "config": current_config(self.state["config"])}
            object.__setattr__(self, "state", state)

    @property
    def step(self) -> int:
        """Steps done when it was saved, at least 0: training goes on with the next."""
        return int(self.state["step"])


def current_config(stored: Any) -> Any:
    """Return a stored config with today's keys, and the defaults of those that its version didn't have.

    Values that this version can't read stay as stored, so that the differences can be listed.
    """
    migrated = migrate(stored)
    try:
        return Config.model_validate(migrated).model_dump(mode="json")
    except ValidationError:
        return migrated


def find_resume_point(
    folder: Path, nodes: NodeTopology | None = None, decisions: DecisionLog | None = None
) -> ResumePoint | None:
    """Return the newest checkpoint whose every byte is right; each rank reads a part of it. A collective.

    Where the nodes have folders of their own, these are looked into, too; what they hold of a future that a rollback of
    `decisions` has left is removed. Raises what `checkpoint.find_latest_intact` raises, on every rank.
    """

    path = checkpoint.find_latest_intact(folder)
    shared = run_on_rank_0_raising(lambda: ResumePoint(path, checkpoint.read_state(path)) if path else None)
    local = find_latest_local(nodes) if nodes else None
    if nodes and local and decisions:
        decisions.read()
        data = local.metadata(nodes.folder).state.get("data")
        position = data.get("position") if isinstance(data, Mapping) else None
        back = decisions.left_behind(local.step, position) if isinstance(position, int) else None
        if back is not None:
            log.warning(
                "step %d on the nodes is not used: the run went back to step %d after it was saved",
                local.step,
                back,
            )
            remove_local_after(nodes, back)
            local = find_latest_local(nodes)
    if nodes is None or local is None or (shared and shared.step >= local.step):
        return shared
    return ResumePoint(nodes.folder / f"step-{local.step:08d}", local.metadata(nodes.folder).state, local)


def precision(config: Config, start: ResumePoint | None) -> str:
    """Return the precision to train in: "auto" is that of the checkpoint that the run starts from."""
    name = config.train.precision
    return str(start.state["precision"]) if start and name == "auto" else name


def branch_point(words: str) -> ResumePoint:
    """Return the checkpoint that `RUN@STEP` means, all files verified. A collective. Raises as `find_resume_point`."""

    def look() -> Path:
        run, _, step = words.rpartition("@")
        checkpoints = list_checkpoints(Path(run) / "checkpoints")
        path = next(
            (path for path in checkpoints if step.isdecimal() and path.name == f"step-{int(step):08d}"), None
        )
        if path is None:
            source_checkpoint = (
                ", ".join(str(int(path.name.removeprefix("step-"))) for path in checkpoints) or "none"
            )
            raise UsageError(
                f"train.branch_from = {words!r}: give RUN@STEP, with a step of which the run has a checkpoint; there "
                f"are: {source_checkpoint}"
            )
        return path

    path = run_on_rank_0_raising(look)
    if (reason := check_checkpoint_on_all_ranks(path)) is not None:
        raise MegatfmError(f"train.branch_from = {words!r}: {path.name} can't be used: {reason}")
    return run_on_rank_0_raising(lambda: ResumePoint(path, checkpoint.read_state(path)))


def discover_nodes(config: Config, run: RunDirectory) -> NodeTopology | None:
    """Return which ranks share a node-local folder, if the run has such. A collective.

    The folder bears a name that is drawn once per run directory: what another run left there is not this one's.
    """
    if not config.checkpoint.local_dir:
        return None

    def name() -> str:
        path = run.folder / LOCAL_ID
        if not path.exists():
            run.write(LOCAL_ID, secrets.token_hex(8) + "\n")
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if re.fullmatch(r"[0-9a-f]{16}\n", run_id := path.read_text()):
                return run_id.strip()
        raise MegatfmError(
            f"{path}: can't be read, or is damaged: remove it; what the nodes hold of this run is then not found"
        )

    folder = Path(os.path.expandvars(config.checkpoint.local_dir))
    if not folder.is_absolute() or "$" in str(folder):
        raise UsageError(
            f"checkpoint.local_dir = {config.checkpoint.local_dir!r} is {folder} here: give an absolute path "
            f"on the node's own "
            "disk, in which every variable is set"
        )
    return NodeTopology.discover(folder / f"{config.name}-{run_on_rank_0_raising(name)}", None)


def check_compatible(
    point: ResumePoint,
    current: Mapping[str, Any],
    allow: list[str],
    unfit: str = "",
    *,
    same_run: bool = True,
) -> list[str]:
    """Compare a checkpoint's state with the run that resumes from it; returns the differences that are allowed.

    Raises UsageError with the diff when something differs whose group is not in `resume.allow`, and for another
    optimizer, precision of what is stored, or weights that don't fit (`unfit` says which), in any case: no allowance
    makes them go on. same_run: whether it is the run's own checkpoint, and not that of a run which it branches from.
    """
    instead = "give the run another name" if same_run else "leave train.branch_from out"
    try:
        reject_renamed_keys(point.state["config"]["model"])
    except ValueError as error:
        raise UsageError(
            f"{point.path}: was saved by a version whose [model] was one section ({error}): go on with that version, "
            f"or {instead}, and start from these weights with train.init_from={point.path}"
        ) from None
    saved, current_values = _flat(point.state), _flat(current)
    for facts in (saved, current_values):
        _put_numbers(facts)
        for moving in ("data.position", "data.epoch", "data.seed"):  # the seed is compared separately
            facts.pop(moving, None)
    was, now_is = (facts.get("config.optimizer.name") for facts in (saved, current_values))
    if was != now_is:
        raise UsageError(
            f"{point.path}: holds the state of optimizer.name = {was!r}, with which {now_is!r} can't go on: {instead}, "
            f"and start from these weights with {shlex.quote(f'train.init_from={point.path}')}"
        )
    precision = _precision_change(point, current, instead)
    unknown = {
        name
        for name, prefixes in ALLOWABLE_CHANGES.items()
        if not any(key.startswith(prefixes[0]) and saved[key] is not None for key in saved)
    }
    changed: dict[str, list[str]] = {}
    for key in sorted(saved.keys() | current_values.keys()):
        group = next((name for name, prefixes in ALLOWABLE_CHANGES.items() if key.startswith(prefixes)), None)
        if group is None or saved.get(key) == current_values.get(key):
            continue
        if group in unknown:
            changed[group] = [f"{group}: none there"]
        else:
            name = KEY_OF_FACT.get(key, key).removeprefix("config.")
            line = f"{name}: {saved.get(key)!s:.200} → {current_values.get(key)!s:.200}"
            changed.setdefault(group, []).append(line)
    allowed = [line for group, lines in changed.items() if group in allow for line in lines]
    refused_changes = {group: lines for group, lines in changed.items() if group not in allow}
    if unfit:
        changes = "; ".join([*(line for lines in refused_changes.values() for line in lines), *allowed])
        raise UsageError(
            f"{point.path}: was saved by a run that differs: {changes}, so that its weights don't fit ({unfit}), and "
            f"no resume.allow makes them: {instead}"
        )
    if refused_changes:
        changes = "; ".join(line for lines in refused_changes.values() for line in lines)
        raise UsageError(
            f"{point.path}: was saved by a run that differs: {changes}. "
            f"{'Give the run another name, or accept' if same_run else 'Accept'} the change with "
            f"resume.allow={','.join(sorted([*allow, *refused_changes]))}"
        )
    return [*allowed, *precision]


def _precision_change(point: ResumePoint, now: Mapping[str, Any], instead: str) -> list[str]:
    """Describe another precision for the log. Raises UsageError where its weights and state have another type."""
    was, now_is = point.state["precision"], now["precision"]
    if was == now_is:
        return []
    if was in PRECISIONS and PRECISIONS[was].param_dtype != PRECISIONS[now_is].param_dtype:
        stored, current = (str(PRECISIONS[name].param_dtype).removeprefix("torch.") for name in (was, now_is))
        raise UsageError(
            f"{point.path}: was saved with train.precision = {was!r}, whose weights and optimizer state are {stored}; "
            f"those of {now_is!r} are {current}: go on with train.precision={was}, or {instead}, and start from these "
            f"weights with {shlex.quote(f'train.init_from={point.path}')}"
        )
    return [f"precision: {was} → {now_is}"]


def settings_of_skips_changed(allowed: Sequence[str]) -> list[str]:
    """Return those of the changes that `check_compatible` allowed that may mend a step which was skipped as not
    finite."""
    return [line for line in allowed if line.startswith(("optimizer.", "precision:"))]


def stored_tensors(point: ResumePoint) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return a checkpoint's tensors by name. A collective: rank 0 sends it to the others, whose machines may see it
    later."""
    if point.local:
        return point.local.metadata(point.path).names()
    return run_on_rank_0_raising(lambda: checkpoint.names(point.path))


def shape_mismatch(point: ResumePoint, layout: ModelLayout) -> str:
    """Return which of a checkpoint's weights don't fit into a model that was changed. A collective."""
    shapes = {name: tuple(tensor.shape) for name, tensor in {**layout, **layout.state}.items()}
    stored = {
        name.removeprefix("model."): shape
        for name, (_, shape) in stored_tensors(point).items()
        if name.startswith("model.")
    }
    all_shapes = {name: shape for rank_shapes in all_gather(shapes) for name, shape in rank_shapes.items()}
    return first_shape_mismatch(stored, all_shapes)


def first_shape_mismatch(stored: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str:
    """Describe the first tensor whose shapes differ, or that only one of the two has; empty if all fit."""
    for name in [*expected, *stored]:
        model, source_checkpoint = expected.get(name), stored.get(name)
        if model is None or source_checkpoint is None or list(model) != list(source_checkpoint):
            shapes = [
                f"{list(shape)} {place}"
                for shape, place in ((source_checkpoint, "there"), (model, "here"))
                if shape is not None
            ]
            return f"{name} is {' and '.join(shapes)}" + (" alone" if len(shapes) == 1 else "")
    return ""


def hardware_changes(point: ResumePoint, machines: HardwareByRank) -> list[str]:
    """List for the log other processors, threads or libraries than a checkpoint was saved with, if it tells them."""
    changes = diff_hardware(point.state.get("machines", machines), machines)
    if not changes:
        return []
    return [
        f"on another kind of machine ({'; '.join(changes)}): it goes on, but not to the bit as it would have there"
    ]


def _put_numbers(facts: dict[str, Any]) -> None:
    """Put the number in place of a factor that follows the width: earlier versions stored numbers."""
    width = facts.get("config.model.d_model")
    for key in ("config.model.embedding.scale", "config.model.lm_head.scale"):
        factor = facts.get(key)
        if isinstance(factor, str) and factor in WIDTH_POWERS and isinstance(width, int) and width > 0:
            facts[key] = factor_at(factor, width)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            path: leaf
            for key, item in value.items()
            for path, leaf in _flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: value}
