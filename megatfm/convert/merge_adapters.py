"""A model of ours whose low-rank adapters are added to its matrices."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import file_io
from megatfm.config import Config, to_toml
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import check_is_new, meta_shapes, new_folder, read_config
from megatfm.layers.lora import factor_names, merge_lora
from megatfm.registry import import_foreign_plugins
from megatfm.train.best_checkpoint import best_checkpoint
from megatfm.version import __version__


def merge(source: str | Path, target: str | Path, *, trust_plugins: bool = False) -> list[str]:
    """Write a model of ours whose adapters are added to its matrices, to a new folder. Raises UsageError."""
    source, target = Path(source), Path(target)
    check_is_new(target)
    path = best_checkpoint(source)
    state = checkpoint.read_state(path)
    config = read_config(path, state)
    import_foreign_plugins(config.plugins, path, trusted=trust_plugins)
    options = config.model.lora
    assert options is not None
    plain: Config = config.with_changes(
        {"model.lora": None, "train.init_from": str(target.absolute()), "train.branch_from": None}
    )
    scale, shapes = options.alpha / options.rank, meta_shapes(plain.model)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        stored = checkpoint.names(path)
        for name in shapes:
            factors = [f"model.{factor}" for factor in factor_names(name)]
            read = checkpoint.read_tensors(
                path, only={f"model.{name}", *(factor for factor in factors if factor in stored)}
            )
            yield f"model.{name}", merge_lora(read, scale)[f"model.{name}"]

    provenance: dict[str, JsonValue] = {
        key: state[key] for key in ("tokenizer", "begins", "stop", "origin") if key in state
    }
    written = {**provenance, "step": 0, "megatfm": __version__, "config": plain.model_dump(mode="json")}
    place = tokenizers.find_tokenizer_file(path.absolute().parent.parent) or config.data.tokenizer
    with new_folder(target) as folder:
        if place and Path(place).exists():
            tokenizer_files.copy_tokenizer(Path(place), folder)
        checkpoint.write_checkpoint_from_iterator(folder / "checkpoints", 0, tensors(), written)
        header = f"# Made by `megatfm convert --to megatfm` from {source}, whose adapters are merged.\n\n"
        file_io.write_file(folder / "config.toml", [memoryview((header + to_toml(plain)).encode())])
    return [f"adapters of {path} merged, {len(shapes)} tensors"]
