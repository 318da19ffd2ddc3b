"""Exact parameter counts, FLOPs and state of a config, counted on the meta device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatfm.config import Config
from megatfm.cost import ENCODER_TOKENS, Cost, TokenCounts, module_cost
from megatfm.errors import UsageError
from megatfm.split_points import SplitPoint

if TYPE_CHECKING:
    from torch import nn

    from megatfm.engines.interface import OptimizerGroup

PROBE = (3, 5, 7, 11, 13)
"""Dims of the small tensors on which optimizers are tried: all different, to be known again in their state."""


@dataclass(frozen=True)
class Description:
    """Sizes and costs of a config. Counts are of distinct parameters, active ones those that a token meets; bytes are
    per parameter. Those that are `frozen` are among `parameters`, and have no gradient and no optimizer state.

    tokens_per_row: of a row, of both sides in an encoder-decoder. matmul_parameters: N of the FLOPs per token; a
    table that is only looked up costs none, one that is the output head as well does, and a block that is used twice
    counts twice.
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
        """Return the parameters other than the embedding tables', as scaling laws count them."""
        return self.parameters - self.embedding

    @property
    def zero(self) -> int:
        """The ZeRO stage: a single data rank takes stage 0."""
        parallel = self.config.parallel
        return 0 if (parallel.dp_shard, parallel.dp_replicate) == (1, 1) else parallel.zero

    @property
    def copy_bytes(self) -> int:
        """Bytes of the weight that the model computes with, where it is not the stored one; stage 3 keeps none."""
        is_mixed = self.config.train.precision in ("bf16", "fp16", "fp8", "fp8-tensorwise")
        return 2 if is_mixed and self.zero < 3 else 0

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state, per parameter that is trained."""
        return self.copy_bytes + 2 * self.weight_bytes + self.optimizer_bytes

    @property
    def unsharded_bytes(self) -> float:
        """The part of `state_bytes` that every data rank holds; ZeRO shards the others over dp_shard."""
        copy, weight = self.copy_bytes, self.weight_bytes
        return (self.state_bytes, copy + weight, copy, 0)[self.zero]

    @property
    def total_bytes(self) -> float:
        """Bytes of all parameters, each shard counted once."""
        frozen = (self.copy_bytes + self.weight_bytes) * self.frozen
        return self.state_bytes * (self.parameters - self.frozen) + frozen

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a global batch whose rows are all full."""
        return self.config.train.global_batch * self.tokens_per_row

    @property
    def tokens(self) -> int:
        """Return the tokens of the run, its rows all full."""
        return self.tokens_per_step * self.config.train.steps


def describe(config: Config) -> Description:
    """Count on the meta device. Raises UsageError where the vocabulary is not known.

    FLOPs per trained token of a decoder are 6N + 12·L·h·s with L layers, h the heads' joint width and s the sequence
    length (Chowdhery et al. 2022, appendix B: forward and backward, no recomputation); 6N + 6·L·h·s counts only the
    half of the attention matrix that a causal model needs. Other families: see `row_cost`.
    """
    import torch

    from megatfm.layers.linear import Embedding
    from megatfm.registry import import_plugins
    from megatfm.train.build import build_model

    import_plugins(config.plugins)
    config = _with_vocabulary(config)
    with torch.device("meta"):
        model = build_model(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tables = {id(m.weight): (n, m.weight) for n, m in model.named_modules() if isinstance(m, Embedding)}
    embedding = sum(weight.numel() for _, weight in tables.values())
    row = row_cost(config, model)
    weight_bytes = 8 if config.train.precision == "fp64" else 4
    optimizer = optimizer_state_bytes(config, model, weight_bytes)
    return Description(
        config=config,
        shapes=shapes,
        parameters=parameters,
        active=parameters - row.idle,
        embedding=embedding,
        tokens_per_row=row.tokens,
        matmul_parameters=round(row.macs / row.tokens),
        flops_full=round((6 * row.macs + row.attention) / row.tokens),
        flops_causal=round((6 * row.macs + row.causal) / row.tokens),
        weight_bytes=weight_bytes,
        optimizer_bytes=sum(optimizer.values()) / sum(math.prod(shapes[name]) for name in optimizer),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        fp8_parameters=_in_fp8(config, model),
    )


TRAINING_FLOPS_PER_MAC = 6
"""FLOPs of a multiplication and the addition after it, forward and, for both factors, backward."""


@dataclass(frozen=True)
class RowCost:
    """Cost of training on one row, by the model's modules.

    A weight costs 6 FLOPs for each token that it is multiplied with, forward and backward (Chowdhery et al. 2022,
    appendix B; nothing is recomputed), and so does each product of attention, of which there are 2 for each channel of
    each pair of tokens.

    tokens: of all sides. macs: the sum over all parameters of their size times the tokens that they see.

    matmul_macs: the part of `macs` that falls on matrices. attention: FLOPs of the scores and what is done with them.
    causal: without the half on tokens that aren't seen. idle: parameters that a token does not meet.
    """

    tokens: int
    macs: float
    matmul_macs: float
    attention: float
    causal: float
    idle: int


def row_cost(config: Config, model: "nn.Module") -> RowCost:
    """Return the cost of a row. Heads of masked models see the masked tokens alone."""
    from megatfm.objectives import target_fraction

    points: Sequence[SplitPoint] = getattr(model, "split_points", ())
    # ELECTRA's generator goes through its head again to sample, without gradients: it counts once.
    used = [(point.token_field, path) for point in points for path in dict.fromkeys(point.modules)]
    used = used or [("tokens", "")]
    s, sides = config.data.sequence_length, {side for side, _ in used}
    lengths = dict.fromkeys(sides, s)
    if ENCODER_TOKENS in sides:
        lengths["tokens"] = config.data.target_length or s
    predicted = target_fraction(config.objective)
    total, idle = Cost(), dict[str, int]()
    for side, path in used:
        tokens = TokenCounts(lengths[side], lengths.get(ENCODER_TOKENS, 0), predicted)
        cost = module_cost(model.get_submodule(path), tokens)
        total, idle[path] = total + cost, cost.inactive_parameters
    return RowCost(
        tokens=sum(lengths.values()),
        macs=total.matmul_macs + total.vector_macs,
        matmul_macs=total.matmul_macs,
        attention=TRAINING_FLOPS_PER_MAC * total.attention_macs,
        causal=TRAINING_FLOPS_PER_MAC * total.visible_attention_macs,
        idle=sum(idle.values()),
    )


def _in_fp8(config: Config, model: "nn.Module") -> int:
    """Count the weights that are multiplied in 8-bit floats."""
    from megatfm.models.float8 import fp8_linears

    if not config.train.precision.startswith("fp8"):
        return 0
    return sum(matrix.weight.numel() for matrix in fp8_linears(model).values())


def flops_per_token(config: Config) -> tuple[float, float]:
    """Return the FLOPs of training on a token: in full, and without the half of attention that a causal model masks."""
    description = describe(config)
    return description.flops_full, description.flops_causal


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size is not None or config.data.tokenizer is None:
        return config
    if not Path(config.data.tokenizer).exists():
        raise UsageError(
            f"model.vocab_size is not set, and there is no tokenizer at {config.data.tokenizer} to take it from: "
            "run `megatfm prep` first, or give e.g. model.vocab_size=4096"
        )
    from megatfm.train.corpora import open_tokenizer

    return open_tokenizer(config)[0]


def optimizer_state_bytes(config: Config, model: "nn.Module", weight_bytes: int) -> dict[str, int]:
    """Return parameter name → bytes of optimizer state, found by one step of each optimizer on small tensors.

    An optimizer of whole tensors keeps a copy of its weights besides (see `engines.optimizers`).
    """
    from megatfm.optim.parameters import optimizer_groups

    state = dict[str, int]()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for group in optimizer_groups(config.optimizer, model):
        for names, options in group.parameter_groups({name: shapes[name] for name in group.names}):
            moved = {n: shapes[n][1:] if n in group.stacked_names else shapes[n] for n in names}
            tried = {dims: _state_shapes(group, options, dims) for dims in map(len, moved.values())}
            state_bytes = group.state_dtype.itemsize if group.state_dtype else weight_bytes
            for name in names:
                of, size = dict(zip(PROBE, moved[name], strict=False)), math.prod(shapes[name])
                values = sum(math.prod(of.get(dim, dim) for dim in state) for state in tried[len(of)])
                values *= size // math.prod(moved[name])
                copy = size * (group.granularity == "whole_tensor")
                state[name] = values * state_bytes + copy * weight_bytes
    return state


def _state_shapes(group: "OptimizerGroup", options: dict[str, Any], dims: int) -> list[tuple[int, ...]]:
    """Return the shapes of what an optimizer keeps for a parameter whose dims are the first ones of PROBE."""
    import torch

    probe = torch.ones(PROBE[:dims])
    probe.grad = torch.ones_like(probe)
    optimizer = group.build([{**options, "params": [probe]}])
    optimizer.step()
    values = optimizer.state[probe].values()
    return [tuple(value.shape) for value in values if torch.is_tensor(value) and value.dim()]
