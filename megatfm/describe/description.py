"""Exact parameter counts, FLOPs and state of a config, counted on the meta device."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatfm.config import Config
from megatfm.describe import flops
from megatfm.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from megatfm.engines.interface import OptimizerGroup

PROBE = (3, 5, 7, 11, 13)
"""Dims of the small tensors on which optimizers are tried: all different, to be known again in their state."""


@dataclass(frozen=True)
class Description:
    """What a config amounts to. Counts are of distinct parameters, active ones those that a token meets; bytes are per
    parameter, over all ranks. Those that are `frozen` are among `parameters`, and have a weight alone.

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
        """Parameters other than the embedding tables', as scaling laws count them."""
        return self.parameters - self.embedding

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state, per parameter that is trained."""
        return 2 * self.weight_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        """Of all parameters."""
        return self.state_bytes * (self.parameters - self.frozen) + self.weight_bytes * self.frozen

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch whose rows are all full."""
        return self.config.train.global_batch * self.tokens_per_row

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, its rows all full."""
        return self.tokens_per_step * self.config.train.steps


def describe(config: Config) -> Description:
    """Count on the meta device. Raises UsageError where the vocabulary is not known.

    FLOPs per trained token of a decoder are 6N + 12·L·h·s with L layers, h the heads' joint width and s the sequence
    length (Chowdhery et al. 2022, appendix B: forward and backward, no recomputation); 6N + 6·L·h·s counts only the
    half of the attention matrix that a causal model needs. Of other families see `flops.py`.
    """
    import torch

    from megatfm.layers.table import Embedding
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
    row = flops.row_cost(config, model)
    weight_bytes = 8 if config.train.precision == "fp64" else 4
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
        optimizer_bytes=_optimizer_bytes(config, model, weight_bytes),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        fp8_parameters=_in_fp8(config, model),
    )


def _in_fp8(config: Config, model: "nn.Module") -> int:
    """Weights whose products are made of 8-bit floats."""
    from megatfm.models.fp8 import fp8_linears

    if not config.train.precision.startswith("fp8"):
        return 0
    return sum(matrix.weight.numel() for matrix in fp8_linears(model).values())


def flops_per_token(config: Config) -> tuple[float, float]:
    """FLOPs of training on a token: in full, and without the half of attention that a causal model masks."""
    found = describe(config)
    return found.flops_full, found.flops_causal


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


def _optimizer_bytes(config: Config, model: "nn.Module", weight_bytes: int) -> float:
    """Optimizer state per parameter, found by one step of each group's optimizer on small tensors.

    An optimizer of whole tensors keeps a copy of its weights besides (see `engines.whole_tensor`).
    """
    from megatfm.train.optimizers import optimizer_groups

    total, parameters = 0, 0
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
                total += values * state_bytes + size * (group.granularity == "whole_tensor") * weight_bytes
                parameters += size
    return total / parameters


def _state_shapes(group: "OptimizerGroup", options: dict[str, Any], dims: int) -> list[tuple[int, ...]]:
    """Of each tensor that an optimizer keeps for a parameter whose dims are the first ones of PROBE."""
    import torch

    probe = torch.ones(PROBE[:dims])
    probe.grad = torch.ones_like(probe)
    optimizer = group.build([{**options, "params": [probe]}])
    optimizer.step()
    values = optimizer.state[probe].values()
    return [tuple(value.shape) for value in values if torch.is_tensor(value) and value.dim()]
