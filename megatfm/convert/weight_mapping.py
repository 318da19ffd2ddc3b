"""Rules between our tensors and those of transformers, as plain data that reads both ways, also for experts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatfm.config import ModelConfig, require_variant
from megatfm.config.ffn import MoEConfig, TopKRouterConfig
from megatfm.convert.hf_config import Json
from megatfm.errors import MegatfmError, UsageError

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def identity(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the same tensors, not copies: the transform of a rule that only renames."""
    return tensors


@dataclass(frozen=True)
class WeightMapping:
    """Some megatfm tensors and the same numbers as transformers stores them.

    to_hf: megatfm → transformers; from_hf: transformers → megatfm; both linear, so that they convert gradients as well.
    tied_names: further names under which their files may hold the (only) tensor of `theirs`; they are checked when
    read, never written.
    """

    megatfm: tuple[str, ...]
    hf: tuple[str, ...]
    to_hf: Transform = identity
    from_hf: Transform = identity
    tied_names: tuple[str, ...] = ()


def rename(megatfm_name: str, hf_name: str, *, copies: Iterable[str] = ()) -> WeightMapping:
    """Another name and nothing else."""
    return WeightMapping((megatfm_name,), (hf_name,), tied_names=tuple(copies))


def rename_linear(megatfm_name: str, hf_name: str, *, bias: bool = False) -> list[WeightMapping]:
    """A matrix and its bias, if it has one; norms and tables are named alike."""
    return [rename(f"{megatfm_name}.{part}", f"{hf_name}.{part}") for part in ("weight", *["bias"] * bias)]


def transpose(megatfm_name: str, hf_name: str) -> WeightMapping:
    """A matrix that they store as [d_in, d_out] (transformers' Conv1D)."""
    return WeightMapping((megatfm_name,), (hf_name,), _transpose, _transpose)


def concat(
    megatfm_names: Sequence[str], hf_name: str, sizes: Sequence[int], *, transpose: bool = False
) -> WeightMapping:
    """Megatfm tensors with `sizes` rows each, concatenated in one tensor of transformers; transpose: as [d_in,
    d_out]."""

    def forth(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(tensors), dim=0)
        return [joined.T if transpose else joined]

    def back(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return (tensors[0].T if transpose else tensors[0]).split(list(sizes), dim=0)

    return WeightMapping(tuple(megatfm_names), (hf_name,), forth, back)


def with_prefix(prefix: str, hf_prefix: str, rules: Iterable[WeightMapping]) -> list[WeightMapping]:
    """The rules with a prefix before each name."""
    return [
        replace(
            rule,
            megatfm=tuple(prefix + name for name in rule.megatfm),
            hf=tuple(hf_prefix + name for name in rule.hf),
            tied_names=tuple(hf_prefix + name for name in rule.tied_names),
        )
        for rule in rules
    ]


def per_layer(n: int, prefix: str, hf_prefix: str, rules: Sequence[WeightMapping]) -> list[WeightMapping]:
    """The rules of one block for each of n blocks: `decoder.layers.` and `model.layers.`, then number and dot."""
    return [rule for i in range(n) for rule in with_prefix(f"{prefix}{i}.", f"{hf_prefix}{i}.", rules)]


def to_hf(rules: Iterable[WeightMapping], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map megatfm's tensors (or gradients) to transformers' names. Raises MegatfmError where a rule's tensor is
    missing."""
    return {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.hf, rule.to_hf(_take(rule.megatfm, tensors)), strict=True)
    }


def from_hf(rules: Iterable[WeightMapping], hf_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map transformers' tensors to megatfm's names. Raises MegatfmError where a rule's tensor is missing."""
    return {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.megatfm, rule.from_hf(_take(rule.hf, hf_tensors)), strict=True)
    }


def _take(names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    for name in names:
        if name not in tensors:
            raise MegatfmError(f"there is no tensor {name}")
    return [tensors[name] for name in names]


def _transpose(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors[0].T]


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of one block's experts in transformers' layout of a tensor for each expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_rules(config: ModelConfig, names: ExpertNames, *, fused: bool) -> list[WeightMapping]:
    """Map one block's router and experts. fused: all experts of a block in one tensor, gate above up projection."""
    experts = require_variant(config.ffn, MoEConfig, "model.ffn")
    if fused:
        return [
            rename("ffn.router.weight", "mlp.gate.weight"),
            WeightMapping(
                ("ffn.experts.w_gate", "ffn.experts.w_up"),
                ("mlp.experts.gate_up_proj",),
                concat_gate_up,
                _chunk_gate_up,
            ),
            rename("ffn.experts.w_down", "mlp.experts.down_proj"),
        ]
    parts = [("gate", names.gate), ("up", names.up), ("down", names.down)]
    return [
        rename("ffn.router.weight", f"{names.block}.gate.weight"),
        *(
            WeightMapping(
                (f"ffn.experts.w_{megatfm_name}",),
                tuple(f"{names.block}.experts.{e}.{hf_name}.weight" for e in range(experts.n_experts)),
                unbind_experts,
                stack_experts,
            )
            for megatfm_name, hf_name in parts
        ),
    ]


def require_dropless(config: ModelConfig) -> MoEConfig:
    """Return the section of a model's experts. Raises UsageError for features that these architectures of transformers
    lack."""
    experts = require_variant(config.ffn, MoEConfig, "model.ffn")
    for key in ("capacity_factor", "expert_capacity"):
        if (capacity := getattr(experts, key)) is not None:
            raise UsageError(
                f"model.ffn.{key} = {capacity}: transformers has no capacity here, and would compute otherwise"
            )
    return experts


def require_top_k_router(config: ModelConfig) -> TopKRouterConfig:
    """Return a model's top-k router. Raises UsageError for another one."""
    return require_variant(require_dropless(config).router, TopKRouterConfig, "model.ffn.router")


def top_k_moe_section(
    hf_config: Json, n_experts: int, d_ff: int, activation: str, *, normalise: bool
) -> Json:
    """Our section, without the weights of terms of the loss: transformers' factor means another sum."""
    return {
        "name": "moe",
        "d_ff": d_ff,
        "activation": activation,
        "n_experts": n_experts,
        "top_k": hf_config["num_experts_per_tok"],
        "router": {"name": "top_k", "norm_topk_prob": normalise},
    }


def unbind_experts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the stacked expert weights [E, …] into one matrix for each expert."""
    return tensors[0].unbind()


def stack_experts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Stack the experts' matrices to [E, …]."""
    return [torch.stack(list(tensors))]


def concat_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Join the gate's and the up projection's output channels, experts first."""
    return [torch.cat(list(tensors), dim=1)]


def _chunk_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[0].chunk(2, dim=1)
