"""Files of a chosen layout: a config that extends the one that was asked about, and the job script."""

from pathlib import Path
from typing import Any

import tomli_w

from megatfm.config import Config, load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.estimate.estimator import Estimate
from megatfm.files import atomic_write


def layout_config(source: str, estimate: Estimate) -> str:
    """Return a config file's text: what the estimate's config changes of `source`, a preset's name or a path."""
    base = load_config(source, [])
    changed = _differences(base.model_dump(exclude_none=True), estimate.config.model_dump(exclude_none=True))
    changed.get("train", {}).pop("precision", None)
    for key in [key for key, value in changed.items() if value == {}]:
        del changed[key]
    extends = str(Path(source).resolve()) if Path(source).exists() else source
    return tomli_w.dumps({"extends": extends, "name": estimate.config.name, **changed})


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Keys of a nested table whose values differ."""
    changed: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := _differences(old, value):
                changed[key] = inner
        elif value != old:
            changed[key] = list(value) if isinstance(value, tuple) else value
    return changed


def write_layout(source: str, estimate: Estimate, path: Path) -> None:
    """Write the config, and read it again as a check. Raises UsageError for a file that is there already."""
    if path.exists():
        raise UsageError(f"--write {path}: there is such a file: give another name")
    try:
        atomic_write(path, layout_config(source, estimate))
    except OSError as error:
        raise MegatfmError(f"--write {path}: can't be written: {error.strerror}") from error
    written: Config = load_config(str(path), [])
    for section in ("parallel", "model", "data"):
        if getattr(written, section) != getattr(estimate.config, section):
            raise MegatfmError(f"{path}: [{section}] did not come out as chosen: {section}")


def launch_words(path: Path, estimate: Estimate) -> list[str]:
    """Return the words after `megatfm launch` that run the config."""
    cluster = estimate.cluster
    per_node = min(cluster.gpus, cluster.node.gpus)
    return [str(path), "--slurm", "--nodes", str(cluster.nodes), "--gpus-per-node", str(per_node)]
