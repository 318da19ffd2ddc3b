"""Tensors of a PEFT adapter, converted to adapters of megatfm's matrices.

If transformers stores several matrices of megatfm as one, its adapter becomes one for each: rows of B, the same A.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatfm.checkpoint.locate import ADAPTER_CONFIG
from megatfm.convert.convert import list_tensor_shapes
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.peft import (
    ADAPTER_WEIGHTS,
    FIRST_VERSION_OF_LAYOUT,
    PREFIX,
    Factors,
    find_wrapper_names,
    get_module_mappings,
    unflatten_experts,
)
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError

MERGE_ADVICE = "merge it by PEFT's merge_and_unload, and convert the merged model"
EMBEDDING_SUFFIX = ".lora_embedding_A"
SUFFIXES = {".lora_A.weight": ".lora_B.weight", EMBEDDING_SUFFIX: ".lora_embedding_B"}
"""Ends of the names of A → of B in PEFT's files: beside a linear layer, and beside a table [ids, width], whose A is
[rank, ids] and B [width, rank]."""
BASE_LAYER = ".base_layer.weight"
"""End of the name of an adapted table itself, which PEFT's files hold, too."""

ScaledFactors = tuple[Tensor, Tensor, float]
"""A, B, and the factor of their product."""


class PeftAdapter:
    """A folder with a PEFT adapter, which is converted to adapters of megatfm's matrices.

    options: content of adapter_config.json. base: the opened folder of the model. adaptable: paths of its matrices that
    can have an adapter here.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], base: HfFolder, adaptable: Collection[str]) -> None:
        self._config_path, self._weights_path = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
        self._options, self._base, self._adaptable = options, base, adaptable
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
        self.notes: list[str] = []
        """Messages for users."""

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
            suffix = next((end for pair in SUFFIXES.items() for end in pair if name.endswith(end)), "")
            module = name.removesuffix(suffix)
            if suffix in SUFFIXES:
                b = tensors.get(f"{PREFIX}{module}{SUFFIXES[suffix]}")
                if b is None:
                    raise MegatfmError(f"{self._weights_path}: {full_name} has no lora_B beside it")
                if tensor.dim() != 2 or b.dim() != 2:
                    raise UsageError(
                        f"{self._weights_path}: A {list(tensor.shape)} and B {list(b.shape)} of {module} are not those "
                        f"of a linear layer: {MERGE_ADVICE}"
                    )
                a, b = (b.T, tensor.T) if suffix == EMBEDDING_SUFFIX else (tensor, b)
                if self._is_adaptable(module):
                    factors |= self._convert_factors(module, a, b)
                else:
                    base = tensors.get(f"{PREFIX}{module}{BASE_LAYER}")
                    other_weights[f"{module}.weight"] = self._merge_table(module, a, b, base)
            elif suffix and not any(f"{PREFIX}{module}{a_suffix}" in tensors for a_suffix in SUFFIXES):
                raise MegatfmError(f"{self._weights_path}: {full_name} has no lora_A beside it")
            elif not suffix and not name.endswith(BASE_LAYER):
                other_weights[name] = tensor
        if not factors:
            raise UsageError(f"{self._weights_path}: holds no lora_A and lora_B of a linear layer: {MERGE_ADVICE}")
        return factors, self._convert_other_weights(other_weights)

    def _is_adaptable(self, module: str) -> bool:
        """Return whether a module's weight can have an adapter here: tables and a language model's head can't."""
        mapping = self._find_mapping(self._parameters.get(module, f"{module}.weight"))
        return any(name.removesuffix(".weight") in self._adaptable for name in mapping.megatfm)

    def _merge_table(self, module: str, a: Tensor, b: Tensor, table: Tensor | None) -> Tensor:
        """Return a table [d_out, d_in] with its adapter merged, at least in float32. table: None: the base's.

        Raises MegatfmError if they don't fit.
        """
        weight = f"{module}.weight"
        table = self._base.read_tensor(self._resolve_name(weight)) if table is None else table
        if (b.shape[0], a.shape[0], a.shape[1]) != (len(table), b.shape[1], table[0].numel()):
            raise MegatfmError(
                f"{self._weights_path}: A {list(a.shape)} and B {list(b.shape)} of {module} do not fit its table "
                f"{list(table.shape)}"
            )
        self.notes.append(
            f"the adapter of {module} is merged into it: here such a matrix is trained whole (model.lora.trained)"
        )
        merged = table.double() + b.double() @ a.double() * self._compute_scale(weight, len(a))
        return merged.to(torch.promote_types(table.dtype, torch.float32))

    def _convert_factors(self, module: str, a: Tensor, b: Tensor) -> dict[str, ScaledFactors]:
        """Return A, B and scale of the matrices of megatfm that a module of transformers holds, by name."""
        is_of_experts = module in self._parameters
        if not is_of_experts and a.shape[0] != b.shape[1]:
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
