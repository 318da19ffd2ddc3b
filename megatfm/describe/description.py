"""Exact parameter counts, FLOPs and state of a config, counted on the meta device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatfm.config import Config
from megatfm.cost import ENCODER_TOKENS, Cost, TokenCounts, compute_module_cost
from megatfm.errors import UsageError
from megatfm.split_points import SplitPoint

if TYPE_CHECKING:
    from torch import nn

    from megatfm.engines.interface import OptimizerGroup

PROBE = (3, 5, 7, 11, 13)
"""Shape of the small tensors that optimizers are tried on. All dims differ, so that state shapes can be matched."""

TRAINING_FLOPS_PER_MAC = 6
"""FLOPs of one multiply-accumulate: two in the forward pass, and two per factor in the backward pass."""


@dataclass(frozen=True)
class Description:
    """Sizes and costs of a config. `*_bytes` are bytes per parameter; shared parameters count once.

    active: parameters that one token uses. frozen: those of `parameters` without gradient and optimizer state.
    tokens_per_row: an encoder-decoder's has both sides. matmul_parameters: N of the FLOPs per token: a lookup table
    counts only if it is the output head too, and a block that runs twice counts twice.
    """

    config: Config
    shapes: dict[str, tuple[int, ...]]
    parameters: int
    active: int
    embedding: int
    tokens_per_row: int
    matmul_parameters: int
    flops_full: int
    flops_causal: int
    weight_bytes: int
    optimizer_bytes: float
    frozen: int = 0
    fp8_parameters: int = 0

    @property
    def non_embedding(self) -> int:
        """Parameters outside embedding tables, as scaling laws count them."""
        return self.parameters - self.embedding

    @property
    def zero(self) -> int:
        """See `ParallelConfig.effective_zero`."""
        return self.config.parallel.effective_zero

    @property
    def copy_bytes(self) -> int:
        """Bytes of the low-precision copy of a weight; ZeRO 3 keeps none."""
        is_mixed = self.config.train.precision in ("bf16", "fp16", "fp8", "fp8-tensorwise")
        return 2 if is_mixed and self.zero < 3 else 0

    @property
    def state_bytes(self) -> float:
        """Bytes of weight, gradient and optimizer state per trained parameter."""
        return self.copy_bytes + 2 * self.weight_bytes + self.optimizer_bytes

    @property
    def unsharded_bytes(self) -> float:
        """Bytes of `state_bytes` that every rank of dp_shard × cp holds; ZeRO shards the others over them."""
        copy, weight = self.copy_bytes, self.weight_bytes
        return (self.state_bytes, copy + weight, copy, 0)[self.zero]

    @property
    def total_bytes(self) -> float:
        """Bytes of all parameters, each shard counted once."""
        frozen = (self.copy_bytes + self.weight_bytes) * self.frozen
        return self.state_bytes * (self.parameters - self.frozen) + frozen

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch without padding."""
        return self.config.train.global_batch * self.tokens_per_row

    @property
    def tokens(self) -> int:
        """Tokens of the run without padding."""
        return self.tokens_per_step * self.config.train.steps


def describe(config: Config, model: "nn.Module | None" = None) -> Description:
    """Count parameters, FLOPs and bytes on the meta device. Raises UsageError where the vocabulary is not known.

    model: the config's on the meta device, if there is one already.

    FLOPs per trained token of a decoder are 6N + 12·L·h·s with L layers, h the total width of all heads and s the
    sequence length (Chowdhery et al. 2022, appendix B: forward and backward, no recomputation). 6N + 6·L·h·s counts
    only the half of the attention matrix that a causal model needs. Other families: see `compute_row_cost`.
    """
    import torch

    from megatfm.layers.linear import Embedding
    from megatfm.registry import import_plugins
    from megatfm.train.build import build_model

    import_plugins(config.plugins)
    config = resolve_vocabulary(config)
    if model is None:
        with torch.device("meta"):
            model = build_model(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tables = {module.weight for module in model.modules() if isinstance(module, Embedding)}
    embedding = sum(weight.numel() for weight in tables)
    row = compute_row_cost(config, model)
    weight_bytes = 8 if config.train.precision == "fp64" else 4
    optimizer = count_optimizer_state(config, model, weight_bytes)
    return Description(
        config=config,
        shapes=shapes,
        parameters=parameters,
        active=parameters - row.inactive_parameters,
        embedding=embedding,
        tokens_per_row=row.tokens,
        matmul_parameters=round(row.macs / row.tokens),
        flops_full=round((TRAINING_FLOPS_PER_MAC * row.macs + row.attention_flops) / row.tokens),
        flops_causal=round((TRAINING_FLOPS_PER_MAC * row.macs + row.visible_attention_flops) / row.tokens),
        weight_bytes=weight_bytes,
        optimizer_bytes=sum(optimizer.values()) / sum(math.prod(shapes[name]) for name in optimizer),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        fp8_parameters=_count_fp8(config, model),
    )


@dataclass(frozen=True)
class RowCost:
    """Cost of training on one row, summed over the model's modules.

    A weight costs 6 FLOPs for each token that it multiplies, forward and backward without recomputation (Chowdhery et
    al. 2022, appendix B). So does each multiplication in attention: 2 for each channel of each pair of tokens.

    tokens: of all sides. macs: multiply-accumulates of weights in one forward pass. matmul_macs: those of matrices.
    attention_flops: FLOPs of scores and weighted sums over all pairs of tokens. visible_attention_flops: without the
    pairs that a causal mask hides. inactive_parameters: parameters that one token does not use.
    """

    tokens: int
    macs: float
    matmul_macs: float
    attention_flops: float
    visible_attention_flops: float
    inactive_parameters: int


def compute_row_cost(config: Config, model: "nn.Module") -> RowCost:
    """Compute the cost of a row. The output head of a masked model runs only on masked tokens."""
    from megatfm.objectives import target_fraction

    points: Sequence[SplitPoint] = getattr(model, "split_points", ())
    # ELECTRA's generator uses its head again to sample, without gradients: the head counts once.
    runs = [(point.token_field, path) for point in points for path in dict.fromkeys(point.modules)]
    runs = runs or [("tokens", "")]
    length, sides = config.data.sequence_length, {side for side, _ in runs}
    lengths = dict.fromkeys(sides, length)
    if ENCODER_TOKENS in sides:
        lengths["tokens"] = config.data.target_length or length
    predicted_share = target_fraction(config.objective)
    total, inactive = Cost(), dict[str, int]()
    for side, path in runs:
        tokens = TokenCounts(lengths[side], lengths.get(ENCODER_TOKENS, 0), predicted_share)
        cost = compute_module_cost(model.get_submodule(path), tokens)
        total, inactive[path] = total + cost, cost.inactive_parameters
    return RowCost(
        tokens=sum(lengths.values()),
        macs=total.matmul_macs + total.vector_macs,
        matmul_macs=total.matmul_macs,
        attention_flops=TRAINING_FLOPS_PER_MAC * total.attention_macs,
        visible_attention_flops=TRAINING_FLOPS_PER_MAC * total.visible_attention_macs,
        inactive_parameters=sum(inactive.values()),
    )


def _count_fp8(config: Config, model: "nn.Module") -> int:
    """Count the weights whose matmuls run in 8-bit floats."""
    from megatfm.models.dtypes import find_fp8_linears

    if not config.train.precision.startswith("fp8"):
        return 0
    return sum(linear.weight.numel() for linear in find_fp8_linears(model).values())


def flops_per_token(config: Config) -> tuple[float, float]:
    """Return training FLOPs per token: with all attention, and without the half that a causal mask hides."""
    description = describe(config)
    return description.flops_full, description.flops_causal


def resolve_vocabulary(config: Config) -> Config:
    """Return the config with the tokenizer's vocabulary if it sets none. Raises UsageError if there is no tokenizer."""
    if config.model.vocab_size is not None or config.data.tokenizer is None:
        return config
    if not Path(config.data.tokenizer).exists():
        raise UsageError(
            f"model.vocab_size is not set, and there is no tokenizer at {config.data.tokenizer} to take it from: "
            "run `megatfm prep` first, or give e.g. model.vocab_size=4096"
        )
    from megatfm.train.corpora import open_tokenizer

    return open_tokenizer(config)[0]


def count_optimizer_state(config: Config, model: "nn.Module", weight_bytes: int) -> dict[str, int]:
    """Return parameter name → bytes of optimizer state, measured by one step of each optimizer on small tensors.

    An optimizer that needs whole tensors also keeps a copy of its weights (see `engines.optimizers`).
    """
    from megatfm.optim.parameters import build_optimizer_groups

    state = dict[str, int]()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for group in build_optimizer_groups(config.optimizer, model):
        for names, options in group.make_param_groups({name: shapes[name] for name in group.names}):
            # A stack is optimized matrix by matrix.
            tensor_shapes = {n: shapes[n][1:] if n in group.stacked_names else shapes[n] for n in names}
            ndims = {len(shape) for shape in tensor_shapes.values()}
            state_shapes = {ndim: _get_state_shapes(group, options, ndim) for ndim in ndims}
            state_bytes = group.state_dtype.itemsize if group.state_dtype else weight_bytes
            for name, shape in tensor_shapes.items():
                n_stacked = math.prod(shapes[name]) // math.prod(shape)
                n_values = n_stacked * _count_state_values(state_shapes[len(shape)], shape)
                copy = math.prod(shapes[name]) * (group.granularity == "whole_tensor")
                state[name] = n_values * state_bytes + copy * weight_bytes
    return state


def _count_state_values(state_shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> int:
    """Count the state's values for a tensor of `shape`. state_shapes: those of a tensor of shape `PROBE[:ndim]`."""
    size_of = dict(zip(PROBE, shape, strict=False))
    return sum(math.prod(size_of.get(size, size) for size in state_shape) for state_shape in state_shapes)


def _get_state_shapes(group: "OptimizerGroup", options: dict[str, Any], ndim: int) -> list[tuple[int, ...]]:
    """Return the shapes of an optimizer's state tensors for a parameter of shape `PROBE[:ndim]`."""
    import torch

    probe = torch.ones(PROBE[:ndim])
    probe.grad = torch.ones_like(probe)
    optimizer = group.build([{**options, "params": [probe]}])
    optimizer.step()
    values = optimizer.state[probe].values()
    return [tuple(value.shape) for value in values if torch.is_tensor(value) and value.dim()]
