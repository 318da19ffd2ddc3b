"""Compares a run's settings with those of the checkpoint that it resumes from: which may differ, and how."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatfm.config.foreign_keys import reject_renamed_keys
from megatfm.config.model import compute_factor
from megatfm.config.model_parts import WIDTH_POWERS
from megatfm.data.mixture import changes_past_rows
from megatfm.engines.interface import PRECISIONS
from megatfm.errors import UsageError
from megatfm.object_collectives import all_gather_object
from megatfm.parallel.layout import ModelLayout
from megatfm.tracking.hardware import HardwareByRank, diff_hardware
from megatfm.train.resume import ResumePoint, read_stored_tensors

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


def check_compatible(
    point: ResumePoint, current: Mapping[str, Any], allow: list[str], shape_mismatch: str = "", *, same_run: bool = True
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
    old_mixture, new_mixture = (values.get("data.mixture") for values in (saved_values, current_values))
    if changes_past_rows(old_mixture, new_mixture, point.state["data"]["position"]):
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
