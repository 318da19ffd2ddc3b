"""Import PEFT's low-rank adapters together with their base model in the Hugging Face format.

Where transformers stores several of megatfm's matrices as one, its adapter becomes one for each: rows of B, the same A.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import file_io
from megatfm.checkpoint.locate import ADAPTER_CONFIG, describe_base, read_adapter_base
from megatfm.config import ModelConfig, make_usage_error, to_toml
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import (
    check_is_new,
    format_config_comment,
    list_tensor_shapes,
    new_folder,
    read_converted_tensors,
)
from megatfm.convert.hf_checkpoint import HfFolder, is_hf_folder, read_json_object
from megatfm.convert.peft import (
    ADAPTER_WEIGHTS,
    FIRST_VERSION_OF_LAYOUT,
    PREFIX,
    Factors,
    find_wrapper_names,
    get_module_rules,
    shorten_names,
    unflatten_experts,
)
from megatfm.convert.starting_config import make_starting_config
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.lora import find_lora_targets, list_adaptable_matrices, name_factors
from megatfm.models import MODELS
from megatfm.version import __version__

NEUTRAL_OPTIONS = {
    "use_dora": False, "bias": "none", "lora_bias": False, "use_qalora": False, "layer_replication": None,
    "trainable_token_indices": None, "megatron_config": None, "alora_invocation_tokens": None,
}  # fmt: skip
"""Options of PEFT that add to, or change, what is computed → their value where they don't."""
MERGE_ADVICE = "merge it by PEFT's merge_and_unload, and convert the merged model"


def from_peft(source: str | Path, target: str | Path, base: str | Path | None = None) -> list[str]:
    """Write a PEFT adapter and its base model to a new folder, as a megatfm model with adapters.

    base: the model's Hugging Face folder, if adapter_config.json names none that exists here. Raises UsageError for an
    adapter with features that megatfm lacks, MegatfmError for damaged files.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    adapter_config = read_json_object(source / ADAPTER_CONFIG)
    for key, neutral in {"peft_type": "LORA", **NEUTRAL_OPTIONS}.items():
        if (value := adapter_config.get(key, neutral)) not in (neutral, None, False, {}, []):
            raise UsageError(
                f"{source / ADAPTER_CONFIG}: {key} = {value!r}, which megatfm's adapters lack: {MERGE_ADVICE}"
            )
    opened = _open_base(source, base)
    factors, saved = _read_factors(source, opened)
    rank = max(a.shape[-2] for a, _, _ in factors.values())
    scales = [scale for _, _, scale in factors.values()]
    scale = max(set(scales), key=scales.count)
    with torch.device("meta"):
        plain = MODELS.get(opened.config.family)(opened.config)
    options = {
        "rank": rank,
        "alpha": scale * rank,
        "dropout": adapter_config.get("lora_dropout") or 0.0,
        "targets": [],
        "trained": list(saved),
    }
    paths = [name.removesuffix(".weight") for name in factors]
    if set(paths) != set(find_lora_targets(plain, [])):
        options["targets"] = shorten_names(paths, list(list_adaptable_matrices(plain)))
    try:
        model = opened.config.with_changes({"lora": options})
    except ValidationError as error:
        raise make_usage_error(f"{source / ADAPTER_CONFIG}: no adapters of megatfm", error) from None
    adapters = {
        name: tensor
        for weight, (a, b, weight_scale) in factors.items()
        for name, tensor in zip(name_factors(weight), _pad_rank(a, b * (weight_scale / scale), rank), strict=True)
    }
    with new_folder(target) as folder:
        _write_model(opened, model, {**adapters, **saved}, folder, target, source)
    return [f"{opened.name} with adapters of {len(factors)} matrices, rank {rank}", *opened.notes]


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


def _read_factors(source: Path, opened: HfFolder) -> tuple[dict[str, tuple[Tensor, Tensor, float]], dict[str, Tensor]]:
    """Return A, B and scale by name of our weights, and other weights by name."""
    adapter_config, tensors = (
        read_json_object(source / ADAPTER_CONFIG),
        _read_tensors(source / ADAPTER_WEIGHTS),
    )
    rules = {name: rule for rule in opened.rules for name in rule.hf}
    rules |= {name: rule for rule in _get_module_rules(opened) for name in rule.hf}
    parameters = _map_adapted_parameters(adapter_config, opened)
    factors: dict[str, tuple[Tensor, Tensor, float]] = {}
    other_weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: {name} doesn't start with {PREFIX}: not PEFT's file")
        module = name.removeprefix(PREFIX)
        if module.endswith(".lora_A.weight"):
            module = module.removesuffix(".lora_A.weight")
            b = tensors.get(f"{PREFIX}{module}.lora_B.weight")
            if b is None:
                raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: {name} has no lora_B beside it")
            is_matrix = tensor.dim() == b.dim() == 2 and (module in parameters or tensor.shape[0] == b.shape[1])
            if not is_matrix:
                raise UsageError(
                    f"{source / ADAPTER_WEIGHTS}: A {list(tensor.shape)} and B {list(b.shape)} of {module} are not "
                    f"those of a linear layer: {MERGE_ADVICE}"
                )
            weight = parameters.get(module, f"{module}.weight")
            rule = _find_rule(rules, weight, opened, source)
            pair = _unflatten_pair(tensor, b, rule, opened, source) if module in parameters else (tensor, b)
            try:
                scale = _compute_scale(adapter_config, weight.removesuffix(".weight"), pair[0].shape[-2])
            except (re.error, ArithmeticError, AttributeError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{source / ADAPTER_CONFIG}: lora_alpha and alpha_pattern give no scale for {weight}: {error}"
                ) from None
            factors_by_name, is_transposed = _split_factors(rule, *pair, source)
            if module in parameters and not is_transposed:
                _check_layout(adapter_config, weight, source)
            factors |= {
                weight_name: (*weight_factors, scale) for weight_name, weight_factors in factors_by_name.items()
            }
        elif not module.endswith(".lora_B.weight"):
            other_weights[module] = tensor
    saved: dict[str, Tensor] = {}
    for name in other_weights:
        rule = _find_rule(rules, name, opened, source)
        if all(hf in other_weights for hf in rule.hf):
            saved |= dict(zip(rule.megatfm, rule.from_hf([other_weights[hf] for hf in rule.hf]), strict=True))
    if not factors:
        raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: holds no lora_A and lora_B")
    return factors, saved


def _get_module_rules(opened: HfFolder) -> Sequence[WeightMapping]:
    return get_module_rules(opened.architecture, opened.config) or opened.rules


def _map_adapted_parameters(adapter_config: Mapping[str, Any], opened: HfFolder) -> dict[str, str]:
    """Return the module that PEFT keeps an adapter under → name of the parameter that it is of."""
    targets = adapter_config.get("target_parameters") or []
    adapted = [
        name
        for rule in _get_module_rules(opened)
        for name in rule.hf
        if any(name == target or name.endswith(f".{target}") for target in targets)
    ]
    return {wrapper: name for name, wrapper in find_wrapper_names(adapted).items()}


def _unflatten_pair(a: Tensor, b: Tensor, rule: WeightMapping, opened: HfFolder, source: Path) -> Factors:
    n_experts = list_tensor_shapes(opened.config)[rule.megatfm[0]][0]
    if a.shape[0] % n_experts or b.shape[1:] != a.shape[:1]:
        raise MegatfmError(
            f"{source / ADAPTER_WEIGHTS}: A {list(a.shape)} and B {list(b.shape)} of {rule.hf[0]} are not those of "
            f"{n_experts} experts: export the adapter again"
        )
    return unflatten_experts(a, b, n_experts)


def _check_layout(adapter_config: Mapping[str, Any], name: str, source: Path) -> None:
    """Raise UsageError for an adapter of experts that an older PEFT wrote, in which A and B change places."""
    version = str(adapter_config.get("peft_version") or "0")
    first, second = (
        [int(number) for number in re.findall(r"\d+", text)[:2]] for text in (version, FIRST_VERSION_OF_LAYOUT)
    )
    if first < second:
        raise UsageError(
            f"{source / ADAPTER_CONFIG}: adapts {name}, and was written by a PEFT before {FIRST_VERSION_OF_LAYOUT} "
            f"(peft_version), where A and B of experts stood for something else: {MERGE_ADVICE}"
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


def _find_rule(rules: Mapping[str, WeightMapping], name: str, opened: HfFolder, source: Path) -> WeightMapping:
    rule = rules.get(name) or rules.get(opened.architecture.base_model_prefix + name)
    if rule is None:
        raise UsageError(
            f"{source / ADAPTER_WEIGHTS}: {name} is no weight of a {opened.name} that megatfm knows: {MERGE_ADVICE}"
        )
    return rule


def _compute_scale(adapter_config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank of a module, as PEFT's patterns and options say. Raises ValueError unless it is positive."""
    alpha = float(adapter_config.get("lora_alpha", 8))
    for pattern, value in (adapter_config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    scale = alpha / (rank**0.5 if adapter_config.get("use_rslora") else rank)
    if not 0 < scale < math.inf:
        raise ValueError(f"alpha = {alpha} is no positive number")
    return scale


def _split_factors(rule: WeightMapping, a: Tensor, b: Tensor, source: Path) -> tuple[dict[str, Factors], bool]:
    """Return megatfm's adapters of a matrix of transformers, and whether it is stored as [d_in, d_out]."""
    product = (b.double() @ a.double()) if len(rule.hf) == 1 and b.shape[-1] == a.shape[-2] else None
    for transposed in (False, True):
        try:
            b_by_matrix = rule.from_hf([b.mT if transposed else b])
            deltas = rule.from_hf([product.mT if transposed else product]) if product is not None else []
        except (RuntimeError, ValueError, IndexError):
            continue
        if len(b_by_matrix) == len(deltas) == len(rule.megatfm) and all(
            b_of_matrix.shape[-1] == a.shape[-2]
            and torch.allclose(b_of_matrix.double() @ a.double(), delta, rtol=1e-12, atol=1e-12)
            for b_of_matrix, delta in zip(b_by_matrix, deltas, strict=True)
        ):
            pairs = [(a, b_of_matrix.contiguous()) for b_of_matrix in b_by_matrix]
            return dict(zip(rule.megatfm, pairs, strict=True)), transposed
    raise UsageError(
        f"{source}: the adapter of {rule.hf[0]} is no adapter of {', '.join(rule.megatfm)}: {MERGE_ADVICE}"
    )


def _write_model(
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
    length = opened.json.get(opened.architecture.max_length_key) or model.position.limit
    config = make_starting_config(target, model, tokenizer_file, length)
    state: dict[str, JsonValue] = {
        "origin": tokenizer_files.record_origin(
            opened.path, opened.name, opened.json, opened.architecture.config_to_hf(opened.config)
        ),
        "base": {"checkpoint": str(opened.path.absolute())},
        "step": 0,
        "megatfm": __version__,
        "config": config.model_dump(mode="json"),
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

    checkpoint.write_checkpoint_from_iterator(folder / "checkpoints", 0, list_all_tensors(), state)
    header = format_config_comment(f"{opened.name} and its adapter", family=model.family)
    file_io.write_file(folder / "config.toml", [memoryview((header + to_toml(config)).encode())])
