"""Starting from the weights of another run."""

from pathlib import Path

from megatfm import checkpoint
from megatfm.engines.interface import Engine
from megatfm.errors import UsageError


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of a run directory. Raises UsageError."""
    path = Path(path)
    if (path / "metadata.json").is_file():
        return path
    newest = checkpoint.latest(path / "checkpoints") if path.is_dir() else None
    if newest is None and (path / "config.json").is_file():
        raise UsageError(
            f"{path}: in the Hugging Face format: make a folder of ours of it with `megatfm convert {path} NEW --to "
            "megatfm`"
        )
    if newest is None:
        raise UsageError(
            f"{path}: neither a checkpoint nor a run directory with one: give a folder that megatfm wrote"
        )
    return newest


def load_weights(engine: Engine, path: str | Path) -> Path:
    """Fill the engine's weights, and nothing else, from a run or checkpoint of any layout and precision."""
    source = find_checkpoint(path)
    weights = {f"model.{name}": box for name, box in engine.weights().items()}
    checkpoint.load(source, weights, cast=True)
    engine.weights_changed()
    return source
