"""Mappings between megatfm's tensors and those of transformers, in both directions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig, TopKRouterConfig
from megatfm.errors import MegatfmError, UsageError

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def identity(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the same tensors, not copies: the transform of a mapping that only renames."""
    return tensors


@dataclass(frozen=True)
class WeightMapping:
    """Names of megatfm's tensors and of transformers' tensors with the same values, and transforms between them.

    to_hf: megatfm → transformers; from_hf: transformers → megatfm; both linear, so that they convert gradients as well.
    tied_names: other names of the (only) tensor in `hf`; copies under these names are compared, never written.
    """

    megatfm: tuple[str, ...]
    hf: tuple[str, ...]
    to_hf: Transform = identity
    from_hf: Transform = identity
    tied_names: tuple[str, ...] = ()


def map_name(megatfm_name: str, hf_name: str, *, copies: Iterable[str] = ()) -> WeightMapping:
    """Map a tensor to another name."""
    return WeightMapping((megatfm_name,), (hf_name,), tied_names=tuple(copies))


def rename_linear(megatfm_name: str, hf_name: str, *, bias: bool = False) -> list[WeightMapping]:
    """Map `weight` and, if there is one, `bias` of a linear layer, norm or table."""
    return [map_name(f"{megatfm_name}.{key}", f"{hf_name}.{key}") for key in ("weight", *["bias"] * bias)]


def rename_modules(names: Mapping[str, str], *, bias: bool = False) -> list[WeightMapping]:
    """Map several modules as `rename_linear` maps one. names: ours → transformers'."""
    return [mapping for pair in names.items() for mapping in rename_linear(*pair, bias=bias)]


def map_tensor(
    megatfm_name: str, hf_name: str, to_hf: Callable[[Tensor], Tensor], from_hf: Callable[[Tensor], Tensor]
) -> WeightMapping:
    """Map one tensor to one of transformers, by a linear function in each direction."""
    return WeightMapping(
        (megatfm_name,), (hf_name,), lambda tensors: [to_hf(tensors[0])], lambda tensors: [from_hf(tensors[0])]
    )


def add_leading_dims(megatfm_name: str, hf_name: str, n: int = 1) -> WeightMapping:
    """Map a tensor to one with `n` more dims of size 1 in front."""
    return map_tensor(megatfm_name, hf_name, lambda x: x[(None,) * n], lambda x: x[(0,) * n])


def transpose(megatfm_name: str, hf_name: str) -> WeightMapping:
    """Map a matrix that transformers stores as [d_in, d_out] (Conv1D)."""
    return map_tensor(megatfm_name, hf_name, torch.t, torch.t)


def concat(
    megatfm_names: Sequence[str], hf_name: str, sizes: Sequence[int], *, dim: int = 0, transpose: bool = False
) -> WeightMapping:
    """Map megatfm tensors of `sizes` along a dim to one concatenated tensor of transformers; transpose: as [d_in,
    d_out]."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(tensors), dim)
        return [joined.T if transpose else joined]

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return (tensors[0].T if transpose else tensors[0]).split(list(sizes), dim)

    return WeightMapping(tuple(megatfm_names), (hf_name,), join, split)


def add_prefix(prefix: str, hf_prefix: str, mappings: Iterable[WeightMapping]) -> list[WeightMapping]:
    """Add prefixes to all names of mappings."""
    return [
        replace(
            mapping,
            megatfm=tuple(prefix + name for name in mapping.megatfm),
            hf=tuple(hf_prefix + name for name in mapping.hf),
            tied_names=tuple(hf_prefix + name for name in mapping.tied_names),
        )
        for mapping in mappings
    ]


def map_layers(n: int, prefix: str, hf_prefix: str, *blocks: Sequence[WeightMapping]) -> list[WeightMapping]:
    """Map `n` blocks by the mappings of `blocks`, repeated in turn; prefixes such as `decoder.layers.`."""
    return [
        mapping
        for i in range(n)
        for mapping in add_prefix(f"{prefix}{i}.", f"{hf_prefix}{i}.", blocks[i % len(blocks)])
    ]


def to_hf(mappings: Iterable[WeightMapping], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert megatfm's tensors (or gradients) to transformers'. Raises MegatfmError for a missing tensor."""
    return {
        name: tensor
        for mapping in mappings
        for name, tensor in zip(mapping.hf, mapping.to_hf(_take(mapping.megatfm, tensors)), strict=True)
    }


def from_hf(mappings: Iterable[WeightMapping], hf_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert transformers' tensors to megatfm's. Raises MegatfmError for a missing tensor."""
    return {
        name: tensor
        for mapping in mappings
        for name, tensor in zip(mapping.megatfm, mapping.from_hf(_take(mapping.hf, hf_tensors)), strict=True)
    }


def _take(names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    for name in names:
        if name not in tensors:
            raise MegatfmError(f"there is no tensor {name}")
    return [tensors[name] for name in names]


@dataclass(frozen=True)
class ExpertNames:
    """Names in transformers of one block's experts, where each expert has tensors of its own."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def map_experts(config: ModelConfig, names: ExpertNames, *, fused: bool) -> list[WeightMapping]:
    """Map a block's router and experts. fused: all experts of a block in one tensor, gate before up projection."""
    experts = require_variant(config.ffn, MoEConfig, "model.ffn")
    if fused:
        gate_up, sizes = ("ffn.experts.w_gate", "ffn.experts.w_up"), [experts.d_ff] * 2
        return [
            map_name("ffn.router.weight", "mlp.gate.weight"),
            concat(gate_up, "mlp.experts.gate_up_proj", sizes, dim=1),
            map_name("ffn.experts.w_down", "mlp.experts.down_proj"),
        ]
    hf_experts = [f"{names.block}.experts.{i}." for i in range(experts.n_experts)]
    return [
        map_name("ffn.router.weight", f"{names.block}.gate.weight"),
        *map_expert_stacks(hf_experts, {"gate": names.gate, "up": names.up, "down": names.down}),
    ]


def map_expert_stacks(hf_experts: Sequence[str], names: Mapping[str, str]) -> list[WeightMapping]:
    """Map the stacked matrices of experts [E, d_out, d_in] to one tensor for each expert.

    hf_experts: prefix of each expert in transformers. names: part of our name, such as "up" → of transformers'.
    """
    return [
        WeightMapping(
            (f"ffn.experts.w_{part}",),
            tuple(f"{prefix}{hf_name}.weight" for prefix in hf_experts),
            lambda tensors: tensors[0].unbind(),
            lambda tensors: [torch.stack(list(tensors))],
        )
        for part, hf_name in names.items()
    ]


def require_dropless(config: ModelConfig) -> MoEConfig:
    """Return the section of a model's experts. Raises UsageError for capacities, which transformers lacks."""
    experts = require_variant(config.ffn, MoEConfig, "model.ffn")
    for key in ("capacity_factor", "expert_capacity"):
        if (capacity := getattr(experts, key)) is not None:
            raise UsageError(
                f"model.ffn.{key} = {capacity}: transformers has no capacity here, and would compute something else"
            )
    return experts


def require_top_k_router(config: ModelConfig) -> TopKRouterConfig:
    """Return the section of a model's top-k router. Raises UsageError for another router."""
    return require_variant(require_dropless(config).router, TopKRouterConfig, "model.ffn.router")
