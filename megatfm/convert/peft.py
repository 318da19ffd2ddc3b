"""Low-rank adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, and back.

A and B follow from the rule of their matrix, which is linear: B's columns become what the matrix's columns would.
Where transformers holds several of our matrices in one (GPT-2's queries, keys and values), A are stacked, B are blocks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import file_io
from megatfm.config import ModelConfig, to_toml
from megatfm.config.lora import LoRAConfig
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import (
    check_is_new,
    config_comment,
    converted_tensors,
    meta_shapes,
    new_folder,
    read_config,
)
from megatfm.convert.electra_pair import exported_models
from megatfm.convert.hf_checkpoint import HfFolder, read_json, write_json
from megatfm.convert.starting_config import starting_config
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.lora import FACTORS, lora_targets
from megatfm.models import MODELS
from megatfm.registry import import_foreign_plugins
from megatfm.train.best_checkpoint import best_checkpoint
from megatfm.version import __version__

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of names in PEFT's files
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""End of a class's name → PEFT's name of what it is for."""
UNSUPPORTED = {
    "use_dora": False, "bias": "none", "lora_bias": False, "use_qalora": False, "target_parameters": None,
    "layer_replication": None, "trainable_token_indices": None, "megatron_config": None,
    "alora_invocation_tokens": None,
}  # fmt: skip
"""Options of PEFT that add to, or change, what is computed → their value where they don't."""

Factors = tuple[Tensor, Tensor]
"""A [rank, d_in] and B [d_out, rank]."""


def is_peft_folder(path: str | Path) -> bool:
    """Whether a path is a folder with an adapter in PEFT's format."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def to_peft(source: str | Path, target: str | Path, *, trust_plugins: bool = False) -> list[str]:
    """Write the adapters of a run or checkpoint to a new folder in PEFT's format; returns what is to be said about it.

    Raises UsageError for a model without adapters, and for an adapter that PEFT has no place for.
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
    base = config.model.model_copy(update={"lora": None})
    origin = state.get("origin")
    parts = exported_models(base, origin.get("name") if isinstance(origin, dict) else None)
    if len(parts) > 1:
        raise UsageError(f"{source}: ELECTRA's two models have two folders, and an adapter one: use --to hf")
    part = parts[0]
    trained = _read(path, options)
    weights, ranks, saved, is_transposed = dict[str, Tensor](), dict[str, int](), list[str](), False
    unused = set(trained)
    for rule in part.rules:
        factors = _factors_of(rule, trained)
        if factors:
            joined, transposed = _joined_factors(rule, factors, trained)
            module = rule.hf[0].removesuffix(".weight")
            weights[f"{module}.lora_A.weight"], weights[f"{module}.lora_B.weight"] = joined
            ranks[module], is_transposed = len(joined[0]), is_transposed or transposed
            unused -= {path + end for path in factors for end in FACTORS}
        if rule.megatfm[0] in trained:
            for name, tensor in zip(rule.hf, rule.to_hf([trained[key] for key in rule.megatfm]), strict=True):
                weights[name] = tensor
                saved.append(name.rpartition(".")[0])
            unused -= set(rule.megatfm)
    if unused:
        raise UsageError(
            f"{source}: transformers' {part.name} has no place for {min(unused)}: use --to hf for a merged model"
        )
    linears = [rule.hf[0].removesuffix(".weight") for rule in part.rules if rule.hf[0].endswith(".weight")]
    other = {module: rank for module, rank in ranks.items() if rank != options.rank}
    task_type = next((task for end, task in TASK_TYPES.items() if part.name.endswith(end)), None)
    written = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": _base_of(state),
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": _shortest_names(list(ranks), linears),
        "rank_pattern": other,
        "alpha_pattern": {module: rank * options.alpha / options.rank for module, rank in other.items()},
        "modules_to_save": list(dict.fromkeys(saved)) or None,
        "fan_in_fan_out": is_transposed,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    content = {PREFIX + name: tensor.contiguous().clone() for name, tensor in weights.items()}
    with new_folder(target) as folder:
        file_io.write_file(folder / ADAPTER_WEIGHTS, [memoryview(save(content, {"format": "pt"}))])
        write_json(folder / ADAPTER_CONFIG, written)
    size = sum(tensor.nbytes for tensor in content.values())
    return [f"adapters of {len(ranks)} matrices of a {part.name}, {size / 1e6:,.1f} MB"]


def _read(path: Path, options: LoRAConfig) -> dict[str, Tensor]:
    """Read what is trained of a model with adapters."""
    chosen = [
        name
        for name in checkpoint.names(path)
        if name.startswith("model.")
        and (name.endswith(FACTORS) or any(fnmatchcase(name[6:], pattern) for pattern in options.trained))
    ]
    return {name.removeprefix("model."): t for name, t in checkpoint.read_tensors(path, only=chosen).items()}


def _base_of(state: Mapping[str, JsonValue]) -> str | None:
    base = state.get("base")
    return str(base["checkpoint"]) if isinstance(base, dict) else None


def _factors_of(rule: WeightMapping, trained: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the adapters of a rule's matrices, by the path of their linear layers."""
    paths = [name.removesuffix(".weight") for name in rule.megatfm]
    return {
        path: (trained[path + FACTORS[0]], trained[path + FACTORS[1]])
        for path in paths
        if path + FACTORS[0] in trained
    }


def _joined_factors(
    rule: WeightMapping, factors: Mapping[str, Factors], trained: Mapping[str, Tensor]
) -> tuple[Factors, bool]:
    """Return A and B of their matrix, and whether they store that as [d_in, d_out].

    Raises UsageError where theirs has no such product.
    """
    paths = [name.removesuffix(".weight") for name in rule.megatfm]
    lost = next((path for path in paths if path not in factors), None)
    if len(rule.hf) > 1 or lost:
        raise UsageError(
            f"model.lora.targets: transformers holds {', '.join(rule.hf[:2])} otherwise than as {', '.join(paths)}, so "
            f"that an adapter of {lost or paths[0]} is none there: use --to hf for a merged model"
        )
    a = torch.cat([factors[path][0] for path in paths])
    blocks, first = [], 0
    for path in paths:
        of_path = factors[path][1]
        block = of_path.new_zeros(len(of_path), len(a))
        block[:, first : first + of_path.shape[1]] = of_path
        blocks.append(block)
        first += of_path.shape[1]
    product = rule.to_hf([block.double() @ a.double() for block in blocks])[0]
    for transposed in (False, True):
        try:
            b = rule.to_hf(blocks)[0]
        except (RuntimeError, ValueError):
            break
        b, delta = (b.T, product.T) if transposed else (b, product)
        if b.shape[-1] == len(a) and torch.allclose(b.double() @ a.double(), delta, rtol=1e-12, atol=1e-12):
            return (a, b), transposed
    raise UsageError(
        f"model.lora.targets: transformers' {rule.hf[0]} is no reordering of rows of {', '.join(paths)}, so that its "
        "adapter is no product of two narrow matrices there: use --to hf for a merged model"
    )


def _shortest_names(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return last parts of modules' names that stand for these and no others, or the full names."""
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    matched = {name for name in every if name.rpartition(".")[2] in ends}
    return ends if matched == set(chosen) else list(chosen)


def from_peft(source: str | Path, target: str | Path, base: str | Path | None = None) -> list[str]:
    """Write a PEFT adapter and the model that it is of, in one new folder, as a model of ours with adapters.

    base: the model's Hugging Face folder, where adapter_config.json names none that is on the disk. Raises UsageError
    for what our adapters are not, MegatfmError for damaged files.
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
    opened = _open_base(source, adapter_config, base)
    factors, saved = _read_factors(source, opened)
    rank = max(len(a) for a, _, _ in factors.values())
    scale = _usual([scale for _, _, scale in factors.values()])
    with torch.device("meta"):
        plain = MODELS.get(opened.config.family)(opened.config)
    options = {
        "rank": rank,
        "alpha": scale * rank,
        "dropout": float(adapter_config.get("lora_dropout") or 0.0),
        "targets": [],
        "trained": list(saved),
    }
    linears = list(lora_targets(plain, []))
    if set(factors) != set(linears):
        options["targets"] = _shortest_names(list(factors), linears)
    model = opened.config.with_changes({"lora": options})
    adapters = {
        f"{path}{end}": tensor
        for path, (a, b, of_path) in factors.items()
        for end, tensor in zip(FACTORS, _padded(a, b * (of_path / scale), rank), strict=True)
    }
    with new_folder(target) as folder:
        _write(opened, model, {**adapters, **saved}, folder, target, source)
    return [f"{opened.name} with adapters of {len(factors)} matrices, rank {rank}", *opened.notes]


def _open_base(source: Path, adapter_config: Mapping[str, Any], base: str | Path | None) -> HfFolder:
    named = base or adapter_config.get("base_model_name_or_path")
    places = [Path(str(named)), source / str(named)] if named else []
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None:
        raise UsageError(
            f"{source}: adapts {named}, which is no Hugging Face folder here: give the folder of that model as --base"
        )
    return HfFolder(place)


def _usual(scales: Sequence[float]) -> float:
    return max(set(scales), key=scales.count)


def _padded(a: Tensor, b: Tensor, rank: int) -> Factors:
    """Return A and B of a higher rank, whose product is the same."""
    more = rank - len(a)
    return torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))


def _read_factors(
    source: Path, opened: HfFolder
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], dict[str, Tensor]]:
    """Return A, B and scale by path of our linear layers, and other weights by name."""
    adapter_config, tensors = read_json(source / ADAPTER_CONFIG), _read_tensors(source / ADAPTER_WEIGHTS)
    by_name = {name.removesuffix(".weight"): rule for rule in opened.rules for name in rule.hf}
    whole_names = {name: rule for rule in opened.rules for name in rule.hf}
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
            rule = _rule_of(by_name, module, opened, source)
            b = tensors.get(f"{PREFIX}{module}.lora_B.weight")
            if b is None:
                raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: {name} has no lora_B beside it")
            factors |= _ours(rule, tensor, b, _scale(adapter_config, module, len(tensor)), source)
        elif not module.endswith(".lora_B.weight"):
            others[module] = tensor
    saved: dict[str, Tensor] = {}
    for name in others:
        rule = _rule_of(whole_names, name, opened, source)
        if all(hf in others for hf in rule.hf):
            saved |= dict(zip(rule.megatfm, rule.from_hf([others[hf] for hf in rule.hf]), strict=True))
    if not factors:
        raise MegatfmError(f"{source / ADAPTER_WEIGHTS}: holds no lora_A and lora_B")
    return factors, saved


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file: adapters are read from safetensors only")
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise MegatfmError(f"{path}: can't read it: {error}") from None


def _rule_of(rules: Mapping[str, WeightMapping], name: str, opened: HfFolder, source: Path) -> WeightMapping:
    rule = rules.get(name) or rules.get(opened.architecture.base_model_prefix + name)
    if rule is None:
        raise UsageError(
            f"{source / ADAPTER_WEIGHTS}: {name} is no weight of a {opened.name} that megatfm knows: merge the adapter "
            "by PEFT's merge_and_unload, and convert the merged model"
        )
    return rule


def _scale(adapter_config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank of a module, as PEFT's patterns and options say."""
    alpha = float(adapter_config.get("lora_alpha", 8))
    for pattern, value in (adapter_config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (rank**0.5 if adapter_config.get("use_rslora") else rank)


def _ours(
    rule: WeightMapping, a: Tensor, b: Tensor, scale: float, source: Path
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return the adapters of our matrices that one of theirs holds: rows of B, and A for each."""
    product = (b.double() @ a.double()) if len(rule.hf) == 1 else None
    for transposed in (False, True):
        try:
            parts = rule.from_hf([b.T if transposed else b])
            deltas = rule.from_hf([product.T if transposed else product]) if product is not None else []
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
    opened: HfFolder,
    model: ModelConfig,
    changed: Mapping[str, Tensor],
    folder: Path,
    target: Path,
    source: Path,
) -> None:
    """Write base and adapters as a checkpoint, with config and tokenizer."""
    tokenizer_file, notes = tokenizer_files.to_megatfm(opened.path, folder)
    opened.notes += notes
    shapes = meta_shapes(model)
    length = opened.json.get(opened.architecture.max_length_key) or model.position.limit
    config = starting_config(target, model, tokenizer_file, length)
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

    def all_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in converted_tensors(opened, meta_shapes(opened.config)):
            if name not in changed:
                yield f"model.{name}", tensor
        for name, tensor in changed.items():
            yield f"model.{name}", tensor

    checkpoint.write_checkpoint_from_iterator(folder / "checkpoints", 0, all_tensors(), state)
    header = config_comment(f"{opened.name} and its adapter", family=model.family)
    file_io.write_file(folder / "config.toml", [memoryview((header + to_toml(config)).encode())])
