"""Import PEFT's low-rank adapters together with their base model in the Hugging Face format.

Where transformers stores several of megatfm's matrices as one, its adapter becomes one for each: rows of B, the same A.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
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
from megatfm.convert.peft import (
    ADAPTER_WEIGHTS,
    FIRST_VERSION_OF_LAYOUT,
    PREFIX,
    Factors,
    find_wrapper_names,
    get_module_mappings,
    shorten_names,
    unflatten_experts,
)
from megatfm.convert.starting_config import make_starting_config
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.lora import find_lora_targets, list_adaptable_matrices, name_factors
from megatfm.models import MODELS

NEUTRAL_OPTIONS = {
    "use_dora": False, "bias": "none", "lora_bias": False, "use_qalora": False, "layer_replication": None,
    "trainable_token_indices": None, "megatron_config": None, "alora_invocation_tokens": None, "arrow_config": None,
    "kasa_config": None, "monteclora_config": None, "use_bdlora": None,
}  # fmt: skip
"""Options of PEFT that add to, or change, what is computed → their value where they don't."""
STARTS_BESIDE_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base as it is. PiSSA and others take the start out of its weights."""
MERGE_ADVICE = "merge it by PEFT's merge_and_unload, and convert the merged model"
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of A and B in PEFT's files."""

ScaledFactors = tuple[Tensor, Tensor, float]
"""A, B, and the factor of their product."""


def from_peft(source: str | Path, target: str | Path, base: str | Path | None = None) -> list[str]:
    """Write a PEFT adapter and its base model to a new folder, as a megatfm model with adapters.

    base: the model's Hugging Face folder, if adapter_config.json names none that exists here. Raises UsageError for an
    adapter with features that megatfm lacks, MegatfmError for damaged files.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    options = _read_options(source / ADAPTER_CONFIG)
    opened = _open_base(source, base)
    factors, saved = PeftAdapter(source, options, opened).read()
    rank = max(a.shape[-2] for a, _, _ in factors.values())
    scales = [scale for _, _, scale in factors.values()]
    scale = max(set(scales), key=scales.count)
    with torch.device("meta"):
        plain = MODELS.get(opened.config.family)(opened.config)
    lora = {
        "rank": rank,
        "alpha": scale * rank,
        "dropout": options.get("lora_dropout") or 0.0,
        "targets": [],
        "trained": list(saved),
    }
    paths = [name.removesuffix(".weight") for name in factors]
    if set(paths) != set(find_lora_targets(plain, [])):
        lora["targets"] = shorten_names(paths, list(list_adaptable_matrices(plain)))
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
    return [f"{opened.name} with adapters of {len(factors)} matrices, rank {rank}", *opened.notes]


def _read_options(path: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises UsageError for an option that megatfm's adapters lack."""
    options = read_json_object(path)
    for key, neutral in {"peft_type": "LORA", **NEUTRAL_OPTIONS}.items():
        if (value := options.get(key, neutral)) not in (neutral, None, False, {}, []):
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


class PeftAdapter:
    """A folder with a PEFT adapter, which is converted to adapters of megatfm's matrices.

    options: content of adapter_config.json. base: the opened folder of the model.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], base: HfFolder) -> None:
        self._config_path, self._weights_path = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
        self._options, self._base = options, base
        module_mappings = get_module_mappings(base.architecture, base.config) or base.mappings
        self._mappings = {
            name: mapping
            for mapping in (*base.mappings, *module_mappings)
            for name in (*mapping.hf, *mapping.tied_names)
        }
        targets = options.get("target_parameters") or []
        adapted_parameters = [
            name
            for mapping in module_mappings
            for name in mapping.hf
            if any(name == target or name.endswith(f".{target}") for target in targets)
        ]
        self._parameters = {module: name for name, module in find_wrapper_names(adapted_parameters).items()}
        """Module that PEFT keeps an adapter under → name of the parameter (of all experts) that it adapts."""

    def read(self) -> tuple[dict[str, ScaledFactors], dict[str, Tensor]]:
        """Return A, B and scale by name of megatfm's weights, and other trained weights by name.

        Raises UsageError for adapters that megatfm lacks, MegatfmError for a damaged file.
        """
        tensors = _read_tensors(self._weights_path)
        factors: dict[str, ScaledFactors] = {}
        other_weights: dict[str, Tensor] = {}
        for full_name, tensor in tensors.items():
            if not full_name.startswith(PREFIX):
                raise MegatfmError(f"{self._weights_path}: {full_name} doesn't start with {PREFIX}: not PEFT's file")
            name = full_name.removeprefix(PREFIX)
            if name.endswith(A_SUFFIX):
                module = name.removesuffix(A_SUFFIX)
                factors |= self._convert_factors(module, tensor, tensors.get(f"{PREFIX}{module}{B_SUFFIX}"))
            elif not name.endswith(B_SUFFIX):
                other_weights[name] = tensor
            elif f"{full_name.removesuffix(B_SUFFIX)}{A_SUFFIX}" not in tensors:
                raise MegatfmError(f"{self._weights_path}: {full_name} has no lora_A beside it")
        if not factors:
            raise MegatfmError(f"{self._weights_path}: holds no lora_A and lora_B")
        return factors, self._convert_other_weights(other_weights)

    def _convert_factors(self, module: str, a: Tensor, b: Tensor | None) -> dict[str, ScaledFactors]:
        """Return A, B and scale of the matrices of megatfm that a module of transformers holds, by name."""
        if b is None:
            raise MegatfmError(f"{self._weights_path}: {PREFIX}{module}{A_SUFFIX} has no lora_B beside it")
        is_of_experts = module in self._parameters
        if not (a.dim() == b.dim() == 2 and (is_of_experts or a.shape[0] == b.shape[1])):
            raise UsageError(
                f"{self._weights_path}: A {list(a.shape)} and B {list(b.shape)} of {module} are not those of a linear "
                f"layer: {MERGE_ADVICE}"
            )
        weight = self._parameters.get(module, f"{module}.weight")
        mapping = self._find_mapping(weight)
        if is_of_experts:
            a, b = self._unflatten_experts(mapping, a, b)
        scale = self._compute_scale(weight, a.shape[-2])
        factors_by_name, is_transposed = self._split_factors(mapping, a, b)
        if is_of_experts and not is_transposed:
            self._check_layout_of_experts(weight)
        return {name: (*factors, scale) for name, factors in factors_by_name.items()}

    def _convert_other_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of megatfm that PEFT's `modules_to_save` holds, by name.

        Raises UsageError for a part of the weights that make up one of megatfm's.
        """
        by_hf_name = {self._resolve_name(name): tensor for name, tensor in weights.items()}
        converted: dict[str, Tensor] = {}
        for mapping in dict.fromkeys(self._mappings[name] for name in by_hf_name):
            if mapping.tied_names and not self._trains_tied(mapping, by_hf_name):
                continue
            if missing := [name for name in mapping.hf if name not in by_hf_name]:
                stored_name = next(name for name in mapping.hf if name in by_hf_name)
                raise UsageError(
                    f"{self._weights_path}: holds {stored_name} without {missing[0]}, which is in the same matrix of "
                    f"megatfm: {MERGE_ADVICE}"
                )
            tensors = mapping.from_hf([by_hf_name[name] for name in mapping.hf])
            converted |= dict(zip(mapping.megatfm, tensors, strict=True))
        return converted

    def _trains_tied(self, mapping: WeightMapping, by_hf_name: Mapping[str, Tensor]) -> bool:
        """Return whether a tensor with several names is trained; false for mere copies of the base's.

        PEFT copies modules, and so unties them. Raises UsageError where names have different values.
        """
        names = (mapping.hf[0], *mapping.tied_names)
        base = self._base.read_tensor(mapping.hf[0]).double()
        values = [by_hf_name[name].double() if name in by_hf_name else base for name in names]
        for name, value in zip(names, values, strict=True):
            if not torch.equal(value, values[0]):
                raise UsageError(
                    f"{self._weights_path}: {mapping.hf[0]} and {name} differ, and are one matrix in the base: train "
                    "them with ensure_weight_tying = True in PEFT's LoraConfig, or untie them in the base"
                )
        return mapping.hf[0] in by_hf_name

    def _find_mapping(self, name: str) -> WeightMapping:
        """Return the mapping of a weight of transformers. Raises UsageError for an unknown one."""
        return self._mappings[self._resolve_name(name)]

    def _resolve_name(self, name: str) -> str:
        """Return a weight's name in the complete model: an adapter of its base alone leaves the prefix out."""
        for hf_name in (name, self._base.architecture.base_model_prefix + name):
            if hf_name in self._mappings:
                return hf_name
        raise UsageError(
            f"{self._weights_path}: {name} is no weight of a {self._base.name} that megatfm knows: {MERGE_ADVICE}"
        )

    def _unflatten_experts(self, mapping: WeightMapping, a: Tensor, b: Tensor) -> Factors:
        n_experts = list_tensor_shapes(self._base.config)[mapping.megatfm[0]][0]
        if a.shape[0] % n_experts or b.shape[1:] != a.shape[:1]:
            raise MegatfmError(
                f"{self._weights_path}: A {list(a.shape)} and B {list(b.shape)} of {mapping.hf[0]} are not those of "
                f"{n_experts} experts: export the adapter again"
            )
        return unflatten_experts(a, b, n_experts)

    def _check_layout_of_experts(self, weight: str) -> None:
        """Raise UsageError for an adapter of experts that an older PEFT wrote, in which A and B change places."""
        version = str(self._options.get("peft_version") or "0")
        written_by, required = (
            [int(number) for number in re.findall(r"\d+", text)[:2]] for text in (version, FIRST_VERSION_OF_LAYOUT)
        )
        if written_by < required:
            raise UsageError(
                f"{self._config_path}: adapts {weight}, and was written by a PEFT before {FIRST_VERSION_OF_LAYOUT} "
                f"(peft_version), where A and B of experts stood for something else: {MERGE_ADVICE}"
            )

    def _compute_scale(self, weight: str, rank: int) -> float:
        """Return alpha / rank of a weight, as PEFT's patterns and options say. Raises UsageError unless it is
        positive."""
        try:
            alpha = float(self._options.get("lora_alpha", 8))
            for pattern, value in (self._options.get("alpha_pattern") or {}).items():
                if re.match(rf"(.*\.)?({pattern})$", weight.removesuffix(".weight")):
                    alpha = float(value)
                    break
            scale = alpha / (rank**0.5 if self._options.get("use_rslora") else rank)
            if not 0 < scale < math.inf:
                raise ValueError(f"alpha = {alpha} is no positive number")
        except (re.error, ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self._config_path}: lora_alpha and alpha_pattern give no scale for {weight}: {error}"
            ) from None
        return scale

    def _split_factors(self, mapping: WeightMapping, a: Tensor, b: Tensor) -> tuple[dict[str, Factors], bool]:
        """Return megatfm's adapters of a matrix of transformers, and whether it is stored as [d_in, d_out]."""
        product = (b.double() @ a.double()) if len(mapping.hf) == 1 and b.shape[-1] == a.shape[-2] else None
        for transposed in (False, True):
            try:
                b_by_matrix = mapping.from_hf([b.mT if transposed else b])
                deltas = mapping.from_hf([product.mT if transposed else product]) if product is not None else []
            except (RuntimeError, ValueError, IndexError):
                continue
            if len(b_by_matrix) == len(deltas) == len(mapping.megatfm) and all(
                b_of_matrix.shape[-1] == a.shape[-2]
                and torch.allclose(b_of_matrix.double() @ a.double(), delta, rtol=1e-12, atol=1e-12)
                for b_of_matrix, delta in zip(b_by_matrix, deltas, strict=True)
            ):
                pairs = [(a, b_of_matrix.contiguous()) for b_of_matrix in b_by_matrix]
                return dict(zip(mapping.megatfm, pairs, strict=True)), transposed
        raise UsageError(
            f"{self._weights_path}: the adapter of {mapping.hf[0]} is no adapter of {', '.join(mapping.megatfm)}: "
            f"{MERGE_ADVICE}"
        )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises UsageError if there is none, MegatfmError if it is damaged."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file: adapters are read from safetensors only")
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise MegatfmError(f"{path}: can't read it: {error}") from None


def _write_adapted_model(
    opened: HfFolder,
    model: ModelConfig,
    changed: Mapping[str, Tensor],
    folder: Path,
    target: Path,
    source: Path,
) -> None:
    """Write base and adapters as a checkpoint, with config and tokenizer."""
    tokenizer_file, notes = tokenizer_files.import_tokenizer(opened.path, folder)
    opened.notes += notes
    shapes = list_tensor_shapes(model)
    config = make_starting_config(target, model, tokenizer_file, opened.max_length)
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
