"""Merge the low-rank adapters of a megatfm model into its matrices."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from megatfm import checkpoint, tokenizers
from megatfm.config import Config
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import (
    check_is_new,
    list_tensor_shapes,
    new_folder,
    open_best_checkpoint,
    write_model,
)
from megatfm.layers.lora import merge_lora, name_factors


def merge_adapters(source: str | Path, target: str | Path, *, trust_plugins: bool = False) -> list[str]:
    """Write a megatfm model with its adapters merged to a new folder; returns notes for the user.

    trust_plugins: import the packages that its config names. Raises UsageError, MegatfmError; then there is no target.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    path, state, config = open_best_checkpoint(source, trust_plugins=trust_plugins)
    options = config.model.lora
    assert options is not None
    plain: Config = config.with_changes(
        {"model.lora": None, "train.init_from": str(target.absolute()), "train.branch_from": None}
    )
    scale, shapes = options.alpha / options.rank, list_tensor_shapes(plain.model)

    def merge_tensors() -> Iterator[tuple[str, Tensor]]:
        stored = checkpoint.read_tensor_specs(path)
        for name in shapes:
            factors = {f"model.{factor}" for factor in name_factors(name)} & stored.keys()
            tensors = checkpoint.read_tensors(path, only={f"model.{name}", *factors})
            yield f"model.{name}", merge_lora(tensors, scale)[f"model.{name}"]

    kept_state: dict[str, JsonValue] = {
        key: state[key] for key in ("tokenizer", "begins", "stop", "origin") if key in state
    }
    tokenizer_file = tokenizers.find_tokenizer_file(path.absolute().parent.parent) or config.data.tokenizer
    comment = f"# Made by `megatfm convert --to megatfm` from {source}, whose adapters are merged.\n\n"
    with new_folder(target) as folder:
        if tokenizer_file and Path(tokenizer_file).exists():
            tokenizer_files.copy_tokenizer(Path(tokenizer_file), folder)
        write_model(folder, plain, merge_tensors(), kept_state, comment)
    return [f"adapters of {path} merged, {len(shapes)} tensors"]
