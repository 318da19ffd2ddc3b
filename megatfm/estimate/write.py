"""Writes a layout as a config that extends the estimated one, and the words that launch it."""

from pathlib import Path
from typing import Any

import tomli_w

from megatfm.config import Config, load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.estimate.estimator import Estimate
from megatfm.files import atomic_write, name_write_errors


def render_layout_config(source: str, estimate: Estimate) -> str:
    """Return a config file's text: the keys in which the estimate differs from `source`, a preset's name or a path."""
    base = load_config(source, [])
    changed = _find_changed_keys(base.model_dump(exclude_none=True), estimate.config.model_dump(exclude_none=True))
    changed.get("train", {}).pop("precision", None)
    for key in [key for key, value in changed.items() if value == {}]:
        del changed[key]
    extends = str(Path(source).resolve()) if Path(source).exists() else source
    return tomli_w.dumps({"extends": extends, "name": estimate.config.name, **changed})


def _find_changed_keys(base: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a nested table whose values differ from the base's."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        base_value = base.get(key)
        if isinstance(value, dict) and isinstance(base_value, dict):
            if nested := _find_changed_keys(base_value, value):
                changed[key] = nested
        elif value != base_value:
            changed[key] = list(value) if isinstance(value, tuple) else value
    return changed


def write_layout(source: str, estimate: Estimate, path: Path) -> None:
    """Write the config, and load it as a check.

    Raises UsageError for a file that exists, MegatfmError if it can't be written.
    """
    if path.exists():
        raise UsageError(f"--write {path}: the file exists: give another name")
    with name_write_errors(path):
        atomic_write(path, render_layout_config(source, estimate))
    loaded: Config = load_config(str(path), [])
    for section in ("parallel", "model", "data"):
        if getattr(loaded, section) != getattr(estimate.config, section):
            raise MegatfmError(
                f"{path}: [{section}] loads with other values than the estimate's: set the layout by hand"
            )


def make_launch_arguments(path: Path, estimate: Estimate) -> list[str]:
    """Return the arguments of `megatfm launch` that start the config."""
    cluster = estimate.cluster
    per_node = min(cluster.gpus, cluster.node.gpus)
    return [str(path), "--slurm", "--nodes", str(cluster.nodes), "--gpus-per-node", str(per_node)]
