"""Load a folder in the Hugging Face format as a megatfm model."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatfm import tokenizers
from megatfm.config import ModelConfig
from megatfm.convert import convert, tokenizer_files
from megatfm.convert.convert import converted_tensors, meta_shapes
from megatfm.convert.electra_pair import open_folder
from megatfm.convert.hf_checkpoint import CONFIG, HfFolder, read_json
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import checkpoint_tensors, initialise_buffers
from megatfm.models import build
from megatfm.models.base import take, working_dtype
from megatfm.ops.transfer import aligned
from megatfm.tokenizers import Tokenizer

log = logging.getLogger("megatfm")


def load_model(
    path: str | Path, device: str | torch.device = "cpu", *, dtype: str | torch.dtype = "float32"
) -> nn.Module:
    """The model, in evaluation mode. dtype: as in `generate.load.load`. Raises UsageError, MegatfmError."""
    folder = open_folder(path)
    first = folder.megatfm_tensors(folder.rules[0]).values() if dtype == "auto" else []
    dtype = working_dtype(dtype, next((tensor.dtype for tensor in first), torch.float32))
    model = build(folder.config)
    initialise_buffers(model)
    stored = checkpoint_tensors(model)
    for name, tensor in converted_tensors(folder, meta_shapes(folder.config)):
        # In place, so that tied modules keep sharing it.
        stored[name].data = aligned(take(stored[name], tensor, dtype))
    for note in folder.notes:
        log.warning("%s: %s", path, note)
    return model.eval().to(device)


def text_generation_fields(path: str | Path) -> dict[str, Any]:
    """Give what `generate.load.TextModel` has besides the model: as it would be after a conversion.

    Raises UsageError where there is no tokenizer, MegatfmError where it doesn't fit the model.
    """
    folder, place = open_folder(path), Path(path)
    source = place if isinstance(folder, HfFolder) else place / "discriminator"
    tokenizer_file = tokenizer_files.tokenizer_path(source)
    try:
        tokenizer = tokenizers.load(tokenizer_file)
    except MegatfmError as error:
        raise UsageError(
            f"{path}: has no tokenizer that megatfm opens, and so makes no text: {error}"
        ) from None
    rows = folder.config.vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise MegatfmError(
            f"{path}: the model has {rows} rows, fewer than its tokenizer's {tokenizer.vocab_size} ids: one of the two "
            "was replaced"
        )
    length = folder.json.get(folder.architecture.max_length_key) or folder.config.position.limit
    return {
        "tokenizer": tokenizer,
        "config": convert.starting_config(place, folder.config, tokenizer_file.name, length),
        "step": 0,
        "run_dir": None,
        "prompt_prefix_ids": tuple(
            tokenizer_files.bos_prefix_ids(source, tokenizers.tokenizer_files(tokenizer_file), tokenizer)
        ),
        "knows_objective": False,
        "eos_token_id": tuple(tokenizer_files.eos_token_id_of(source, folder.json, tokenizer)),
    }


def begins_of(path: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that a folder's own tokenizer puts before a text."""
    place = Path(path)
    return tuple(
        tokenizer_files.bos_prefix_ids(
            place, tokenizers.tokenizer_files(tokenizer_files.tokenizer_path(place)), tokenizer
        )
    )


def pad_token_id_of(path: str | Path) -> int | None:
    """The padding token that a folder's config.json names, of either half of a pair."""
    place = Path(path)
    file = place / CONFIG if (place / CONFIG).is_file() else place / "discriminator" / CONFIG
    return read_json(file).get("pad_token_id")


def sentence_transformer_options(path: str | Path, model: nn.Module) -> dict[str, Any]:
    """Return the pooling of a folder of Sentence Transformers; the unnormalised mean for others. Raises UsageError."""
    place, config = Path(path), model.config
    assert isinstance(config, ModelConfig)
    options: dict[str, Any] = {"max_tokens": config.position.limit}
    file = place / "sentence_bert_config.json"
    if file.is_file() and isinstance(longest := read_json(file).get("max_seq_length"), int):
        options["max_tokens"] = min(longest, options["max_tokens"] or longest)
    if (file := place / "1_Pooling" / CONFIG).is_file():
        pooling_modes = [
            key for key, value in read_json(file).items() if key.startswith("pooling_mode_") and value is True
        ]
        ways = {
            "pooling_mode_mean_tokens": "mean",
            "pooling_mode_cls_token": "first",
            "pooling_mode_lasttoken": "last",
        }
        if len(pooling_modes) != 1 or pooling_modes[0] not in ways:
            raise UsageError(
                f"{file}: {', '.join(pooling_modes) or 'no pooling'}: megatfm has {', '.join(ways)}"
            )
        options["pooling"] = ways[pooling_modes[0]]
    if (file := place / "modules.json").is_file():
        try:
            kinds = [str(module["type"]) for module in json.loads(file.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{file}: not a list of modules: {error}") from None
        supported_modules = ("Transformer", "Pooling", "Normalize")
        if unknown := [kind for kind in kinds if not kind.endswith(supported_modules)]:
            raise UsageError(
                f"{file}: {unknown[0]} is not one that megatfm has: {', '.join(supported_modules)}"
            )
        options["normalize"] = any(kind.endswith("Normalize") for kind in kinds)
    return options
