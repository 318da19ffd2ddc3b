"""Import PEFT's low-rank adapters together with their base model in the Hugging Face format."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor

from megatfm import tokenizers
from megatfm.checkpoint.locate import ADAPTER_CONFIG, describe_base, read_adapter_base
from megatfm.config import ModelConfig, make_usage_error
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import (
    check_is_new,
    format_config_comment,
    list_tensor_shapes,
    new_folder,
    read_converted_tensors,
    write_model,
)
from megatfm.convert.hf_checkpoint import HfFolder, is_hf_folder, read_json_object
from megatfm.convert.peft import Factors, shorten_names
from megatfm.convert.peft_adapter import MERGE_ADVICE, PeftAdapter
from megatfm.convert.starting_config import adopt_image_options, make_starting_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.lora import find_lora_targets, list_adaptable_matrices, name_factors
from megatfm.models import MODELS

KNOWN_OPTIONS = {
    "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "target_parameters", "init_lora_weights",
    "base_model_name_or_path", "peft_version",
    # The tensors' shapes and names say these.
    "r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "fan_in_fan_out", "ensure_weight_tying",
    # These change nothing that is computed. VeLoRA saves other activations for the backward pass.
    "auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_ga_config", "megatron_core",
    "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config",
}  # fmt: skip
"""Options of PEFT that are read, or known to change nothing. Others must be off."""
NEUTRAL_VALUES: Mapping[str, object] = {"peft_type": "LORA", "bias": "none"}
"""Values of other options that are neither null nor false, and yet add nothing."""
STARTS_BESIDE_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base as it is. PiSSA and others take the start out of its weights."""


def from_peft(source: str | Path, target: str | Path, base: str | Path | None = None) -> list[str]:
    """Write a PEFT adapter and its base model to a new folder, as a megatfm model with adapters.

    base: the model's Hugging Face folder, if adapter_config.json names none that exists here. Raises UsageError for an
    adapter with features that megatfm lacks, MegatfmError for damaged files.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    options = _read_options(source / ADAPTER_CONFIG)
    opened = _open_base(source, base)
    with torch.device("meta"):
        plain = MODELS.get(opened.config.family)(opened.config)
    matrices = list_adaptable_matrices(plain)
    adapter = PeftAdapter(source, options, opened, matrices.keys())
    factors, saved = adapter.read()
    rank = max(a.shape[-2] for a, _, _ in factors.values())
    scales = [scale for _, _, scale in factors.values()]
    scale = max(set(scales), key=scales.count)
    lora = {
        "rank": rank,
        "alpha": scale * rank,
        "dropout": options.get("lora_dropout") or 0.0,
        "targets": [],
        "trained": list(saved),
    }
    paths = [name.removesuffix(".weight") for name in factors]
    if set(paths) != set(find_lora_targets(plain, [])):
        lora["targets"] = shorten_names(paths, list(matrices))
    try:
        model = opened.config.with_changes({"lora": lora})
    except ValidationError as error:
        raise make_usage_error(f"{source / ADAPTER_CONFIG}: no adapters of megatfm", error) from None
    adapters = {
        name: tensor
        for weight, (a, b, weight_scale) in factors.items()
        for name, tensor in zip(name_factors(weight), _pad_rank(a, b * (weight_scale / scale), rank), strict=True)
    }
    with new_folder(target) as folder:
        _write_adapted_model(opened, model, {**adapters, **saved}, folder, target, source)
    return [f"{opened.name} with adapters of {len(factors)} matrices, rank {rank}", *adapter.notes, *opened.notes]


def _read_options(path: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises UsageError for an option that megatfm's adapters lack."""
    options = read_json_object(path)
    for key, value in options.items():
        if key not in KNOWN_OPTIONS and value not in (NEUTRAL_VALUES.get(key), None, False):
            raise UsageError(f"{path}: {key} = {value!r}, which megatfm's adapters lack: {MERGE_ADVICE}")
    if (start := options.get("init_lora_weights", True)) not in STARTS_BESIDE_BASE:
        raise UsageError(
            f"{path}: init_lora_weights = {start!r}, by which PEFT changes the base's weights when it opens the "
            f"adapter: {MERGE_ADVICE}"
        )
    return options


def _open_base(source: Path, base: str | Path | None) -> HfFolder:
    """Open the base model's folder: `base`, or the one that adapter_config.json names. Raises UsageError."""
    base_name = read_adapter_base(source)
    candidates = [Path(base)] if base else [Path(base_name), source / base_name] if base_name else []
    folder = next((path for path in candidates if is_hf_folder(path)), None)
    if folder is None:
        problem = f"--base {base} is no Hugging Face folder" if base else "its model is in no folder here"
        raise UsageError(f"{source}: {problem}: give --base BASE; {describe_base(base_name)}")
    return HfFolder(folder)


def _pad_rank(a: Tensor, b: Tensor, rank: int) -> Factors:
    """Return A and B of a higher rank, whose product is the same."""
    more = rank - a.shape[-2]
    return torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))


def _write_adapted_model(
    opened: HfFolder, model: ModelConfig, changed: Mapping[str, Tensor], folder: Path, target: Path, source: Path
) -> None:
    """Write base and adapters as a checkpoint, with config and tokenizer."""
    tokenizer_file, notes = tokenizer_files.import_tokenizer(opened.path, folder)
    opened.notes += notes
    shapes = list_tensor_shapes(model)
    starting_config = make_starting_config(target, model, tokenizer_file, opened.max_length)
    config, image_notes = adopt_image_options(starting_config, opened.path)
    opened.notes += image_notes
    state: dict[str, JsonValue] = {
        "origin": tokenizer_files.record_origin(
            opened.path, opened.name, opened.json, opened.architecture.config_to_hf(opened.config)
        ),
        "base": {"checkpoint": str(opened.path.absolute())},
        "tokenizer": tokenizers.load(folder / tokenizer_file).hash if tokenizer_file else None,
    }
    for name, tensor in changed.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise MegatfmError(
                f"{source}: would make {name} {list(tensor.shape)}, but the model has {list(shapes.get(name, ()))}"
            )

    def list_all_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_converted_tensors(opened, list_tensor_shapes(opened.config)):
            if name not in changed:
                yield f"model.{name}", tensor
        for name, tensor in changed.items():
            yield f"model.{name}", tensor

    comment = format_config_comment(f"{opened.name} and its adapter", family=model.family)
    write_model(folder, config, list_all_tensors(), state, comment)
