"""Load a folder in the Hugging Face format as a megatfm model."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatfm import tokenizers
from megatfm.config import ModelConfig
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import list_tensor_shapes, read_converted_tensors
from megatfm.convert.electra_pair import open_folder
from megatfm.convert.hf_checkpoint import CONFIG, HfFolder, is_hf_folder, read_json_object
from megatfm.convert.starting_config import adopt_image_options, make_starting_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import initialise_buffers, list_checkpoint_tensors
from megatfm.models import build
from megatfm.models.dtypes import choose_dtype, convert_loaded
from megatfm.ops.transfer import align
from megatfm.tokenizers import Tokenizer

log = logging.getLogger("megatfm")


def load_hf_model(
    path: str | Path, device: str | torch.device = "cpu", *, dtype: str | torch.dtype = "float32"
) -> nn.Module:
    """Load a model in evaluation mode. dtype: as in `open_text_model`. Raises UsageError, MegatfmError."""
    folder = open_folder(path)
    first_tensors = folder.megatfm_tensors(folder.mappings[0]).values() if dtype == "auto" else []
    dtype = choose_dtype(dtype, next((tensor.dtype for tensor in first_tensors), torch.float32))
    model = build(folder.config)
    initialise_buffers(model)
    stored = list_checkpoint_tensors(model)
    for name, tensor in read_converted_tensors(folder, list_tensor_shapes(folder.config)):
        # In place, so that tied weights stay tied.
        stored[name].data = align(convert_loaded(stored[name], tensor, dtype))
    for note in folder.notes:
        log.warning("%s: %s", path, note)
    return model.eval().to(device)


def load_generation_fields(path: str | Path) -> dict[str, Any]:
    """Return the fields of `inference.text.TextModel` besides the model, as after a conversion.

    Raises UsageError without a tokenizer, MegatfmError if it doesn't fit the model.
    """
    folder, folder_path = open_folder(path), Path(path)
    source = folder_path if isinstance(folder, HfFolder) else folder_path / "discriminator"
    tokenizer_file = tokenizer_files.find_tokenizer_path(source)
    try:
        tokenizer = tokenizers.load(tokenizer_file)
    except MegatfmError as error:
        raise UsageError(f"{path}: can't generate text, since megatfm can't open its tokenizer: {error}") from None
    vocab_size = folder.config.vocab_size or 0
    if tokenizer.vocab_size > vocab_size:
        raise MegatfmError(
            f"{path}: the model's vocabulary has {vocab_size} entries, its tokenizer's {tokenizer.vocab_size}: one "
            "of the two was replaced"
        )
    starting_config = make_starting_config(folder_path, folder.config, tokenizer_file.name, folder.max_length)
    config, notes = adopt_image_options(starting_config, folder_path)
    for note in notes:
        log.warning("%s: %s", path, note)
    return {
        "tokenizer": tokenizer,
        "config": config,
        "step": 0,
        "run_dir": None,
        "prompt_prefix_ids": read_bos_prefix_ids(source, tokenizer),
        "knows_objective": False,
        "tokenizer_file": tokenizer_file,
        "eos_token_id": tuple(tokenizer_files.find_eos_token_ids(source, folder.json, tokenizer)),
    }


def read_bos_prefix_ids(path: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that a folder's tokenizer puts before a text."""
    folder_path = Path(path)
    files = tokenizers.read_tokenizer_files(tokenizer_files.find_tokenizer_path(folder_path))
    return tuple(tokenizer_files.find_bos_prefix_ids(folder_path, files, tokenizer))


def read_pad_token_id(path: str | Path) -> int | None:
    """Return the padding id in a folder's config.json; of an ELECTRA pair, the discriminator's."""
    folder_path = Path(path)
    folder = folder_path if is_hf_folder(folder_path) else folder_path / "discriminator"
    return read_json_object(folder / CONFIG).get("pad_token_id")


def read_sentence_transformer_options(path: str | Path, model: nn.Module) -> dict[str, Any]:
    """Return the pooling options of a Sentence Transformers folder; none for other folders. Raises UsageError."""
    folder_path, config = Path(path), model.config
    assert isinstance(config, ModelConfig)
    options: dict[str, Any] = {"max_tokens": config.position.limit}
    file = folder_path / "sentence_bert_config.json"
    if file.is_file() and isinstance(max_tokens := read_json_object(file).get("max_seq_length"), int):
        options["max_tokens"] = min(max_tokens, options["max_tokens"] or max_tokens)
    if (file := folder_path / "1_Pooling" / CONFIG).is_file():
        pooling_modes = [
            key for key, value in read_json_object(file).items() if key.startswith("pooling_mode_") and value is True
        ]
        pooling_by_mode = {
            "pooling_mode_mean_tokens": "mean",
            "pooling_mode_cls_token": "first",
            "pooling_mode_lasttoken": "last",
        }
        if len(pooling_modes) != 1 or pooling_modes[0] not in pooling_by_mode:
            raise UsageError(
                f"{file}: {', '.join(pooling_modes) or 'no pooling'}: megatfm has {', '.join(pooling_by_mode)}"
            )
        options["pooling"] = pooling_by_mode[pooling_modes[0]]
    if (file := folder_path / "modules.json").is_file():
        try:
            kinds = [str(module["type"]) for module in json.loads(file.read_text(encoding="utf-8-sig"))]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(f"{file}: not a list of modules: {error}") from None
        supported_modules = ("Transformer", "Pooling", "Normalize")
        if unknown := [kind for kind in kinds if not kind.endswith(supported_modules)]:
            raise UsageError(f"{file}: megatfm has no module {unknown[0]}, only {', '.join(supported_modules)}")
        options["normalize"] = any(kind.endswith("Normalize") for kind in kinds)
    return options
