"""Low-rank adapters in PEFT's format: what its files hold, adapter_config.json and adapter_model.safetensors.

A and B follow from the mapping of their matrix, which is linear: B's columns become what the matrix's columns would.
Where transformers holds several of our matrices in one (GPT-2's queries, keys and values), A are stacked, B are blocks.

All experts of a block are one parameter in transformers, [experts, d_out, d_in], and PEFT adapts it by
`target_parameters`: A [experts · rank, d_in], experts outermost, and B [d_out, rank · experts], experts innermost. It
wraps the module of the experts once for each adapted parameter, so that the first one's is behind `base_layer`.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from megatfm import checkpoint
from megatfm.checkpoint import file_io
from megatfm.checkpoint.locate import ADAPTER_CONFIG
from megatfm.config import ModelConfig
from megatfm.config.model_parts import LoRAConfig
from megatfm.convert.architecture import Architecture
from megatfm.convert.convert import check_is_new, new_folder, open_best_checkpoint
from megatfm.convert.electra_pair import choose_exported_models
from megatfm.convert.hf_checkpoint import stamp_weights, write_json
from megatfm.convert.hf_config import Json
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import UsageError
from megatfm.layers.lora import is_factor, name_factors
from megatfm.terminal import format_file_size

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of names in PEFT's files
FIRST_VERSION_OF_LAYOUT = "0.19.0"
"""PEFT's release since which A of experts reads a matrix's inputs where transformers stores [experts, d_out, d_in]."""
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""End of a class's name → PEFT's name of what it is for."""

Factors = tuple[Tensor, Tensor]
"""A [rank, d_in] and B [d_out, rank]; of experts [experts, rank, d_in] and [experts, d_out, rank]."""


def to_peft(source: str | Path, target: str | Path, *, trust_plugins: bool = False) -> list[str]:
    """Write the adapters of a run or checkpoint to a new folder in PEFT's format; returns notes for the user.

    Raises UsageError for a model without adapters, and for an adapter that PEFT's format can't hold.
    """
    target = Path(target)
    check_is_new(target)
    path, state, config = open_best_checkpoint(source, trust_plugins=trust_plugins)
    options = config.model.lora
    if options is None:
        raise UsageError(f"{source}: its model has no adapters (model.lora): use --to hf for all of its weights")
    base = config.model.model_copy(update={"lora": None})
    origin, base_model = state.get("origin"), state.get("base")
    exported_models = choose_exported_models(base, origin.get("name") if isinstance(origin, dict) else None)
    if len(exported_models) > 1:
        raise UsageError(f"{source}: ELECTRA's two models have two folders, and an adapter one: use --to hf")
    exported = exported_models[0]
    mappings = get_module_mappings(exported.architecture, base) or exported.mappings
    factors, saved, is_transposed = _convert_trained(exported.name, mappings, _read_trained(path, options), source)
    saved |= _read_rest_of_modules(path, mappings, saved)
    adapter_config = _make_adapter_config(
        options, factors, saved, [name for mapping in mappings for name in mapping.hf]
    ) | {
        "base_model_name_or_path": _find_base(base_model) if isinstance(base_model, dict) else None,
        "task_type": next((task for end, task in TASK_TYPES.items() if exported.name.endswith(end)), None),
        "fan_in_fan_out": is_transposed,
    }
    content = {PREFIX + name: t.contiguous().clone() for name, t in {**_name_factors(factors), **saved}.items()}
    with new_folder(target) as folder:
        file_io.write_file(folder / ADAPTER_WEIGHTS, [memoryview(save(content, {"format": "pt"}))])
        write_json(folder / ADAPTER_CONFIG, adapter_config)
    size = format_file_size(sum(tensor.nbytes for tensor in content.values()))
    return [f"adapters of {len(factors)} matrices of a {exported.name}, {size}"]


def _find_base(base_model: Mapping[str, Any]) -> str:
    """Return the Hugging Face folder of the base model, which PEFT opens, or its checkpoint if the folder changed."""
    hf_folder = base_model.get("hf_folder")
    if hf_folder is not None and stamp_weights(Path(hf_folder["path"])) == hf_folder["weights"]:
        return str(hf_folder["path"])
    return str(base_model["checkpoint"])


def _convert_trained(
    name: str, mappings: Sequence[WeightMapping], trained: Mapping[str, Tensor], source: str | Path
) -> tuple[dict[str, Factors], dict[str, Tensor], bool]:
    """Return A and B by the name of transformers' matrix, other weights, and whether matrices are [d_in, d_out] there.

    name: transformers' class. Raises UsageError for a trained tensor that the class lacks.
    """
    factors, saved, unused, is_transposed = dict[str, Factors](), dict[str, Tensor](), set(trained), False
    for mapping in mappings:
        if mapping_factors := _collect_factors(mapping, trained):
            joined, transposed = _join_factors(mapping, mapping_factors)
            factors[mapping.hf[0].removesuffix(".weight")] = joined
            is_transposed |= transposed and joined[0].dim() == 2
            unused -= {factor for weight in mapping_factors for factor in name_factors(weight)}
        # PEFT stores other weights by whole modules, which have no other parameters.
        if trained.keys() >= set(mapping.megatfm) and mapping.hf[0].endswith((".weight", ".bias")):
            tensors = mapping.to_hf([trained[key] for key in mapping.megatfm])
            saved |= dict(zip(mapping.hf, tensors, strict=True))
            saved |= dict.fromkeys(mapping.tied_names, tensors[0])  # PEFT copies each module, and so unties them
            unused -= set(mapping.megatfm)
    if unused:
        raise UsageError(
            f"{source}: transformers' {name} has no place for {min(unused)}: use --to hf for a merged model"
        )
    return factors, saved, is_transposed


def _read_rest_of_modules(
    path: Path, mappings: Sequence[WeightMapping], saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the other weights of the modules that `saved` is of, by transformers' names: PEFT reads whole modules."""
    modules, others = _list_outermost_modules(saved), dict[str, Tensor]()
    for mapping in mappings:
        names = [*mapping.hf, *mapping.tied_names]
        missing = [n for n in names if n not in saved and any(n.startswith(f"{module}.") for module in modules)]
        if missing:
            stored = checkpoint.read_tensors(path, only=[f"model.{key}" for key in mapping.megatfm])
            tensors = mapping.to_hf([stored[f"model.{key}"] for key in mapping.megatfm])
            values = dict(zip(mapping.hf, tensors, strict=True)) | dict.fromkeys(mapping.tied_names, tensors[0])
            others |= {name: values[name] for name in missing}
    return others


def _list_outermost_modules(names: Iterable[str]) -> list[str]:
    """Return the modules of weights, without those that lie in another one."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [module for module in modules if not any(module.startswith(f"{other}.") for other in modules)]


def _make_adapter_config(
    options: LoRAConfig, factors: Mapping[str, Factors], saved: Mapping[str, Tensor], all_names: Sequence[str]
) -> Json:
    """Return what follows from the adapters in adapter_config.json. all_names: of the model's tensors."""
    modules, parameters = _split_names(factors)
    ranks = {name: a.shape[-2] for name, (a, _) in factors.items() if a.shape[-2] != options.rank}
    module_names = [name.removesuffix(".weight") for name in all_names if name.endswith(".weight")]
    return {
        "peft_type": "LORA",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": shorten_names(modules, module_names),
        "target_parameters": shorten_names(parameters, all_names) or None,
        "rank_pattern": ranks,
        "alpha_pattern": {name: rank * options.alpha / options.rank for name, rank in ranks.items()},
        "modules_to_save": _list_outermost_modules(saved) or None,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        **({"peft_version": FIRST_VERSION_OF_LAYOUT} if parameters else {}),
    }


def _split_names(factors: Mapping[str, Factors]) -> tuple[list[str], list[str]]:
    """Divide names into those of linear layers and those of parameters that hold all experts."""
    return [n for n, (a, _) in factors.items() if a.dim() == 2], [n for n, (a, _) in factors.items() if a.dim() > 2]


def _name_factors(factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Return A and B by their names in PEFT's file."""
    _, parameters = _split_names(factors)
    wrappers = find_wrapper_names(parameters)
    return {
        f"{wrappers.get(name, name)}.lora_{letter}.weight": tensor
        for name, pair in factors.items()
        for letter, tensor in zip("AB", flatten_experts(*pair) if name in wrappers else pair, strict=True)
    }


def get_module_mappings(architecture: Architecture, config: ModelConfig) -> Sequence[WeightMapping] | None:
    """Return the mappings to the names that tensors have in transformers' modules, where files have others."""
    return architecture.map_fused_weights(config) if architecture.map_fused_weights else None


def find_wrapper_names(parameters: Sequence[str]) -> dict[str, str]:
    """Return the names under which PEFT keeps the adapters of parameters, which are in the order of their modules.

    The first parameter of a module is wrapped first, and is the innermost.
    """
    by_module: dict[str, list[str]] = {}
    for name in parameters:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * (len(names) - 1 - index)
        for module, names in by_module.items()
        for index, name in enumerate(names)
    }


def flatten_experts(a_ErI: Tensor, b_EOr: Tensor) -> Factors:
    """Return A [experts · rank, d_in] and B [d_out, rank · experts] as PEFT stores them."""
    return a_ErI.flatten(0, 1), b_EOr.permute(1, 2, 0).flatten(1, 2)


def unflatten_experts(a: Tensor, b: Tensor, n_experts: int) -> Factors:
    """Return A [experts, rank, d_in] and B [experts, d_out, rank]. Raises RuntimeError for another number of rows."""
    return a.unflatten(0, (n_experts, -1)), b.unflatten(1, (-1, n_experts)).permute(2, 0, 1)


def _read_trained(path: Path, options: LoRAConfig) -> dict[str, Tensor]:
    """Read what is trained of a model with adapters."""
    names = [
        name
        for name in checkpoint.read_tensor_specs(path)
        if name.startswith("model.")
        and (is_factor(name) or any(fnmatchcase(name[6:], pattern) for pattern in options.trained))
    ]
    return {name.removeprefix("model."): t for name, t in checkpoint.read_tensors(path, only=names).items()}


def _collect_factors(mapping: WeightMapping, trained: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the adapters of a mapping's matrices, by their names."""
    return {name: (trained[a], trained[b]) for name in mapping.megatfm for a, b in [name_factors(name)] if a in trained}


def _join_factors(mapping: WeightMapping, factors: Mapping[str, Factors]) -> tuple[Factors, bool]:
    """Return A and B of the matrix of transformers, and whether it is stored as [d_in, d_out].

    Raises UsageError where no A and B have the same product there.
    """
    paths = [name.removesuffix(".weight") for name in mapping.megatfm]
    missing = next((name.removesuffix(".weight") for name in mapping.megatfm if name not in factors), None)
    if len(mapping.hf) > 1 or missing:
        raise UsageError(
            f"model.lora.targets: transformers holds {', '.join(mapping.hf[:2])} otherwise than as {', '.join(paths)}, "
            f"so that an adapter of {missing or paths[0]} is none there: use --to hf for a merged model"
        )
    a = torch.cat([factors[name][0] for name in mapping.megatfm], dim=-2)
    blocks, first = [], 0
    for name in mapping.megatfm:
        b_of_matrix = factors[name][1]
        block = b_of_matrix.new_zeros(*b_of_matrix.shape[:-1], a.shape[-2])
        block[..., first : first + b_of_matrix.shape[-1]] = b_of_matrix
        blocks.append(block)
        first += b_of_matrix.shape[-1]
    product = mapping.to_hf([block.double() @ a.double() for block in blocks])[0]
    for transposed in (False, True):
        try:
            b = mapping.to_hf(blocks)[0]
        except (RuntimeError, ValueError):
            break
        b, delta = (b.mT, product.mT) if transposed else (b, product)
        if b.shape[-1] == a.shape[-2] and torch.allclose(b.double() @ a.double(), delta, rtol=1e-12, atol=1e-12):
            return (a, b), transposed
    raise UsageError(
        f"model.lora.targets: transformers' {mapping.hf[0]} is no reordering of rows of {', '.join(paths)}, so that "
        "its adapter is no product of two narrow matrices there: use --to hf for a merged model"
    )


def shorten_names(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return last parts of modules' names that stand for these and no others, or the full names."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    matched = {name for name in all_names if name.rpartition(".")[2] in ends}
    return ends if matched == set(names) else list(names)
