"""Low-rank adapters to and from PEFT's format: adapter_config.json and adapter_model.safetensors.

The weight mapping of a matrix is linear, so it also converts the columns of its factor B. If transformers holds several
of megatfm's matrices in one (GPT-2's queries, keys and values), the A are stacked and B is block-diagonal.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import file_io
from megatfm.config import ModelConfig
from megatfm.config.lora import LoRAConfig
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import (
    check_is_new,
    config_comment,
    converted_tensors,
    meta_shapes,
    new_folder,
    read_config,
    write_model,
)
from megatfm.convert.electra_pair import ExportedModel, exported_models
from megatfm.convert.hf_checkpoint import HfFolder, is_hf_folder, read_json, write_json
from megatfm.convert.starting_config import starting_config
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.lora import lora_targets
from megatfm.models import MODELS
from megatfm.registry import import_foreign_plugins
from megatfm.train.best_checkpoint import best_checkpoint

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTORS = ".lora.a.weight", ".lora.b.weight"
PREFIX = "base_model.model."  # of tensor names in PEFT's files
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""End of a class's name → PEFT's task_type."""
UNSUPPORTED = {
    "use_dora": False, "bias": "none", "lora_bias": False, "use_qalora": False, "target_parameters": None,
    "layer_replication": None, "trainable_token_indices": None, "megatron_config": None,
    "alora_invocation_tokens": None,
}  # fmt: skip
"""Options of PEFT that change the computation → their neutral value."""

Factors = tuple[Tensor, Tensor]
"""A [rank, d_in] and B [d_out, rank]."""


def is_peft_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with an adapter in PEFT's format."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def to_peft(source: str | Path, target: str | Path, *, trust_plugins: bool = False) -> list[str]:
    """Write the adapters of a run or checkpoint to a new folder in PEFT's format; returns notes for the user.

    trust_plugins: import the packages that its config names. Raises UsageError for a model without adapters, and for
    adapters that PEFT's format can't hold; then there is no target.
    """
    target = Path(target)
    check_is_new(target)
    path = best_checkpoint(source)
    state = checkpoint.read_state(path)
    config = read_config(path, state)
    import_foreign_plugins(config.plugins, path, trusted=trust_plugins)
    options = config.model.lora
    if options is None:
        raise UsageError(
            f"{source}: its model has no adapters (model.lora): use --to hf for all of its weights"
        )
    origin = state.get("origin")
    class_name = origin.get("name") if isinstance(origin, dict) else None
    model, *others = exported_models(config.model.model_copy(update={"lora": None}), class_name)
    if others:
        raise UsageError(f"{source}: ELECTRA's two models have two folders, and an adapter one: use --to hf")
    adapter = _export(source, model, _read_trained(path, options))
    content = {PREFIX + name: tensor.contiguous().clone() for name, tensor in adapter.weights.items()}
    with new_folder(target) as folder:
        file_io.write_file(folder / ADAPTER_WEIGHTS, [memoryview(save(content, {"format": "pt"}))])
        write_json(folder / ADAPTER_CONFIG, _adapter_config(model, adapter, options, state))
    size = sum(tensor.nbytes for tensor in content.values())
    return [f"adapters of {len(adapter.ranks)} matrices of a {model.name}, {size / 1e6:,.1f} MB"]


@dataclass
class _PeftAdapter:
    """Contents of PEFT's files. weights: by name without `PREFIX`. fan_in_fan_out: weights are [d_in, d_out]."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    modules_to_save: list[str] = field(default_factory=list)
    fan_in_fan_out: bool = False


def _export(source: str | Path, model: ExportedModel, trained: Mapping[str, Tensor]) -> _PeftAdapter:
    """Convert trained tensors to PEFT's. Raises UsageError for one that transformers' model has no place for."""
    adapter, unused = _PeftAdapter(), set(trained)
    for rule in model.rules:
        if factors := _factors_of(rule, trained):
            (a, b), is_transposed = _join_factors(rule, factors)
            module = rule.hf[0].removesuffix(".weight")
            adapter.weights |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            adapter.ranks[module] = len(a)
            adapter.fan_in_fan_out |= is_transposed
            unused -= {path + end for path in factors for end in FACTORS}
        if rule.megatfm[0] in trained:
            tensors = rule.to_hf([trained[name] for name in rule.megatfm])
            adapter.weights |= zip(rule.hf, tensors, strict=True)
            adapter.modules_to_save += [name.rpartition(".")[0] for name in rule.hf]
            unused -= set(rule.megatfm)
    if unused:
        raise UsageError(
            f"{source}: transformers' {model.name} has no place for {min(unused)}: use --to hf for a merged model"
        )
    return adapter


def _adapter_config(
    model: ExportedModel, adapter: _PeftAdapter, options: LoRAConfig, state: Mapping[str, JsonValue]
) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    linears = [rule.hf[0].removesuffix(".weight") for rule in model.rules if rule.hf[0].endswith(".weight")]
    other_ranks = {module: rank for module, rank in adapter.ranks.items() if rank != options.rank}
    base = state.get("base")
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in TASK_TYPES.items() if model.name.endswith(end)), None),
        "base_model_name_or_path": str(base["checkpoint"]) if isinstance(base, dict) else None,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": _shorten_names(list(adapter.ranks), linears),
        "rank_pattern": other_ranks,
        "alpha_pattern": {
            module: rank * options.alpha / options.rank for module, rank in other_ranks.items()
        },
        "modules_to_save": list(dict.fromkeys(adapter.modules_to_save)) or None,
        "fan_in_fan_out": adapter.fan_in_fan_out,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _read_trained(path: Path, options: LoRAConfig) -> dict[str, Tensor]:
    """Read the trained tensors of a model with adapters."""
    names = [name.removeprefix("model.") for name in checkpoint.names(path) if name.startswith("model.")]
    trained = {
        f"model.{name}"
        for name in names
        if name.endswith(FACTORS) or any(fnmatchcase(name, pattern) for pattern in options.trained)
    }
    tensors = checkpoint.read_tensors(path, only=trained)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _factors_of(rule: WeightMapping, trained: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return path of a linear layer → its factors, for the matrices of a mapping that have adapters."""
    paths = [name.removesuffix(".weight") for name in rule.megatfm]
    a, b = FACTORS
    return {path: (trained[path + a], trained[path + b]) for path in paths if path + a in trained}


def _join_factors(rule: WeightMapping, factors: Mapping[str, Factors]) -> tuple[Factors, bool]:
    """Return A and B of transformers' matrix, and whether it is stored as [d_in, d_out].

    Raises UsageError if the change of that matrix is no product of such factors.
    """
    paths = [name.removesuffix(".weight") for name in rule.megatfm]
    missing = next((path for path in paths if path not in factors), None)
    if len(rule.hf) > 1 or missing:
        raise UsageError(
            f"model.lora.targets: transformers holds {', '.join(rule.hf[:2])} otherwise than as {', '.join(paths)}, so "
            f"that an adapter of {missing or paths[0]} is none there: use --to hf for a merged model"
        )
    a = torch.cat([factors[path][0] for path in paths])
    blocks, start = [], 0
    for path in paths:
        b = factors[path][1]
        block = b.new_zeros(len(b), len(a))
        block[:, start : start + b.shape[1]] = b
        blocks.append(block)
        start += b.shape[1]
    product = rule.to_hf([block.double() @ a.double() for block in blocks])[0]
    for is_transposed in (False, True):
        try:
            b = rule.to_hf(blocks)[0]
        except (RuntimeError, ValueError):
            break
        b, delta = (b.T, product.T) if is_transposed else (b, product)
        if b.shape[-1] == len(a) and torch.allclose(b.double() @ a.double(), delta, rtol=1e-12, atol=1e-12):
            return (a, b), is_transposed
    raise UsageError(
        f"model.lora.targets: transformers' {rule.hf[0]} is no reordering of rows of {', '.join(paths)}, so that its "
        "adapter is no product of two narrow matrices there: use --to hf for a merged model"
    )


def _shorten_names(modules: Sequence[str], all_modules: Sequence[str]) -> list[str]:
    """Return the last parts of modules' names if these match no other module, else the full names."""
    ends = sorted({name.rpartition(".")[2] for name in modules})
    matched = {name for name in all_modules if name.rpartition(".")[2] in ends}
    return ends if matched == set(modules) else list(modules)


def from_peft(source: str | Path, target: str | Path, base: str | Path | None = None) -> list[str]:
    """Write a PEFT adapter and its base model to a new folder, as a megatfm model with adapters; returns notes.

    base: the base model's Hugging Face folder; None: the one that adapter_config.json names. Raises UsageError for
    features that megatfm's adapters lack, MegatfmError for damaged files; then there is no target.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    adapter_config = read_json(source / ADAPTER_CONFIG)
    for key, neutral in {"peft_type": "LORA", **UNSUPPORTED}.items():
        if (value := adapter_config.get(key, neutral)) not in (neutral, None, False, {}, []):
            raise UsageError(
                f"{source / ADAPTER_CONFIG}: {key} = {value!r}, which adapters here don't have: merge it by PEFT's "
                "merge_and_unload, and convert the merged model"
            )
    base_model = _open_base(source, adapter_config, base)
    factors, saved = _read_factors(source, base_model)
    rank = max(len(a) for a, _, _ in factors.values())
    scales = [scale for _, _, scale in factors.values()]
    scale = max(set(scales), key=scales.count)
    with torch.device("meta"):
        linears = list(lora_targets(MODELS.get(base_model.config.family)(base_model.config), []))
    options = {
        "rank": rank,
        "alpha": scale * rank,
        "dropout": float(adapter_config.get("lora_dropout") or 0.0),
        "targets": [] if set(factors) == set(linears) else _shorten_names(list(factors), linears),
        "trained": list(saved),
    }
    model = base_model.config.with_changes({"lora": options})
    adapters = {
        f"{path}{end}": tensor
        for path, (a, b, module_scale) in factors.items()
        for end, tensor in zip(FACTORS, _pad(a, b * (module_scale / scale), rank), strict=True)
    }
    with new_folder(target) as folder:
        _write(source, base_model, model, {**adapters, **saved}, folder, target)
    return [f"{base_model.name} with adapters of {len(factors)} matrices, rank {rank}", *base_model.notes]


def _open_base(source: Path, adapter_config: Mapping[str, Any], base: str | Path | None) -> HfFolder:
    name = base or adapter_config.get("base_model_name_or_path")
    for path in [Path(str(name)), source / str(name)] if name else []:
        if is_hf_folder(path):
            return HfFolder(path)
    raise UsageError(
        f"{source}: adapts {name}, which is no Hugging Face folder here: give the folder of that model as --base"
    )


def _pad(a: Tensor, b: Tensor, rank: int) -> Factors:
    """Pad A and B with zeros to a higher rank, which leaves their product unchanged."""
    missing = rank - len(a)
    return torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))


def _read_factors(
    source: Path, base_model: HfFolder
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], dict[str, Tensor]]:
    """Return path of a linear layer in megatfm → A, B and scale; and name in megatfm → other trained tensors."""
    adapter_config, tensors = read_json(source / ADAPTER_CONFIG), _read_tensors(source / ADAPTER_WEIGHTS)
    rule_of_tensor = {name: rule for rule in base_model.rules for name in rule.hf}
    rule_of_module = {name.removesuffix(".weight"): rule for name, rule in rule_of_tensor.items()}
    factors: dict[str, tuple[Tensor, Tensor, float]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise MegatfmError(
                f"{source / ADAPTER_WEIGHTS}: {name} doesn't start with {PREFIX}: not PEFT's file"
            )
        module = name.removeprefix(PREFIX)
        if module.endswith(".lora_A.weight"):
            module = module.removesuffix(".lora_A.weight")
            rule = _rule_of(rule_of_module, module, base_model, source)
            b = tensors.get(f"{PREFIX}{module}.lora_B.weight")
            if b is None:
                raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: {name} has no lora_B beside it")
            factors |= _split_factors(rule, tensor, b, _scale(adapter_config, module, len(tensor)), source)
        elif not module.endswith(".lora_B.weight"):
            others[module] = tensor
    saved: dict[str, Tensor] = {}
    for name in others:
        rule = _rule_of(rule_of_tensor, name, base_model, source)
        if all(hf in others for hf in rule.hf):
            saved |= dict(zip(rule.megatfm, rule.from_hf([others[hf] for hf in rule.hf]), strict=True))
    if not factors:
        raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: holds no lora_A and lora_B")
    return factors, saved


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file: adapters are read from safetensors only")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise MegatfmError(f"{path}: can't read it: {error}") from None


def _rule_of(rules: Mapping[str, WeightMapping], name: str, base: HfFolder, source: Path) -> WeightMapping:
    """Return the mapping of a name in PEFT's file. Raises UsageError for an unknown one."""
    rule = rules.get(name) or rules.get(base.architecture.base_model_prefix + name)
    if rule is None:
        raise UsageError(
            f"{source / ADAPTER_WEIGHTS}: {name} is no weight of a {base.name} that megatfm knows: merge the "
            "adapter by PEFT's merge_and_unload, and convert the merged model"
        )
    return rule


def _scale(adapter_config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank of a module, by PEFT's patterns and options."""
    patterns = (adapter_config.get("alpha_pattern") or {}).items()
    matching = (alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = float(next(matching, adapter_config.get("lora_alpha", 8)))
    return alpha / (rank**0.5 if adapter_config.get("use_rslora") else rank)


def _split_factors(
    rule: WeightMapping, a: Tensor, b: Tensor, scale: float, source: Path
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return path → A, rows of B, and scale, for each of megatfm's matrices that transformers' matrix holds."""
    product = (b.double() @ a.double()) if len(rule.hf) == 1 else None
    for is_transposed in (False, True):
        try:
            parts = rule.from_hf([b.T if is_transposed else b])
            deltas = rule.from_hf([product.T if is_transposed else product]) if product is not None else []
        except (RuntimeError, ValueError, IndexError):
            continue
        if len(parts) == len(deltas) == len(rule.megatfm) and all(
            part.shape[-1] == len(a)
            and torch.allclose(part.double() @ a.double(), delta, rtol=1e-12, atol=1e-12)
            for part, delta in zip(parts, deltas, strict=True)
        ):
            return {
                name.removesuffix(".weight"): (a, part.contiguous(), scale)
                for name, part in zip(rule.megatfm, parts, strict=True)
            }
    raise UsageError(
        f"{source}: the adapter of {rule.hf[0]} is no adapter of {', '.join(rule.megatfm)}: merge it by PEFT's "
        "merge_and_unload, and convert the merged model"
    )


def _write(
    source: Path,
    base_model: HfFolder,
    model: ModelConfig,
    trained: Mapping[str, Tensor],
    folder: Path,
    target: Path,
) -> None:
    """Write the base model with its trained tensors as a run directory, with config and tokenizer."""
    shapes = meta_shapes(model)
    for name, tensor in trained.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise MegatfmError(
                f"{source}: would make {name} {list(tensor.shape)}, but the model has {list(shapes.get(name, ()))}"
            )
    tokenizer_file, notes = tokenizer_files.to_megatfm(base_model.path, folder)
    base_model.notes += notes
    length = base_model.json.get(base_model.architecture.max_length_key) or model.position.limit
    config = starting_config(target, model, tokenizer_file, length)
    hf_config = base_model.architecture.config_to_hf(base_model.config)
    origin = tokenizer_files.record_origin(base_model.path, base_model.name, base_model.json, hf_config)
    state: dict[str, JsonValue] = {
        "origin": origin,
        "base": {"checkpoint": str(base_model.path.absolute())},
        "tokenizer": tokenizers.load(folder / tokenizer_file).hash if tokenizer_file else None,
    }
    base_tensors = converted_tensors(base_model, meta_shapes(base_model.config))
    tensors = chain((item for item in base_tensors if item[0] not in trained), trained.items())
    comment = config_comment(f"{base_model.name} and its adapter", family=model.family)
    write_model(folder, config, ((f"model.{name}", tensor) for name, tensor in tensors), state, comment)
