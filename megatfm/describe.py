"""`megatfm describe CONFIG`: parts, exact parameter counts, FLOPs and state, before anything is allocated."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatfm.config import Config, load_config
from megatfm.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from megatfm.engines import OptimizerGroup

PROBE = (3, 5, 7, 11, 13)
"""Dims of the small tensors on which optimizers are tried: all different, to be known again in their state."""


@dataclass(frozen=True)
class Description:
    """What a config amounts to. Counts are of distinct parameters; bytes are per parameter, over all ranks.

    multiplied: N of the FLOPs; a table that is only looked up costs none, one that is the output head as well does.
    """

    config: Config
    shapes: dict[str, tuple[int, ...]]
    parameters: int
    embedding: int
    multiplied: int
    flops_full: int
    flops_causal: int
    weight_bytes: int
    optimizer_bytes: float

    @property
    def non_embedding(self) -> int:
        return self.parameters - self.embedding

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state, per parameter."""
        return 2 * self.weight_bytes + self.optimizer_bytes

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch * self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.config.train.steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its overrides."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a TOML file, a run directory, or the name of a preset"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model.n_layers=8")


def main(args: argparse.Namespace) -> int:
    """Print the description."""
    found = describe(load_config(args.config, args.overrides))
    for label, text in (*_architecture(found.config), *_counts(found)):
        print(f"{label:<16}  {text}".rstrip())
    return 0


def describe(config: Config) -> Description:
    """Count on the meta device. Raises UsageError where the vocabulary is not known.

    FLOPs per trained token are 6N + 12·L·h·s with L layers, h the heads' joint width and s the sequence length
    (Chowdhery et al. 2022, appendix B: forward and backward, no recomputation); 6N + 6·L·h·s counts only the half of
    the attention matrix that a causal model needs.
    """
    import torch

    from megatfm.layers.table import Table
    from megatfm.models import build
    from megatfm.registry import import_plugins

    import_plugins(config.plugins)
    config = _with_vocabulary(config)
    with torch.device("meta"):
        model = build(config.model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tables = {id(m.weight): (n, m.weight) for n, m in model.named_modules() if isinstance(m, Table)}
    embedding = sum(weight.numel() for _, weight in tables.values())
    tied = [w for n, w in tables.values() if n.endswith(".tokens") and config.model.tie_embeddings]
    multiplied = parameters - embedding + sum(weight.numel() for weight in tied)
    width = config.model.n_heads * config.model.head_width
    attention = 6 * config.model.n_layers * width * config.data.sequence_length
    weight_bytes = 8 if config.train.precision == "fp64" else 4
    return Description(
        config=config,
        shapes=shapes,
        parameters=parameters,
        embedding=embedding,
        multiplied=multiplied,
        flops_full=6 * multiplied + 2 * attention,
        flops_causal=6 * multiplied + attention,
        weight_bytes=weight_bytes,
        optimizer_bytes=_optimizer_bytes(config, model, weight_bytes),
    )


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size is not None:
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
            tried = {dims: _state_shapes(group, options, dims) for dims in {len(shapes[n]) for n in names}}
            for name in names:
                of = dict(zip(PROBE, shapes[name], strict=False))
                values = sum(math.prod(of.get(dim, dim) for dim in state) for state in tried[len(of)])
                size = math.prod(shapes[name])
                total += (values + size * (group.needs == "whole_tensor")) * weight_bytes
                parameters += size
    return total / parameters


def _state_shapes(group: "OptimizerGroup", options: dict[str, Any], dims: int) -> list[tuple[int, ...]]:
    """Of each tensor that an optimizer keeps for a parameter whose dims are the first ones of PROBE."""
    import torch

    probe = torch.ones(PROBE[:dims])
    probe.grad = torch.ones_like(probe)
    optimizer = group.make([{**options, "params": [probe]}])
    optimizer.step()
    values = optimizer.state[probe].values()
    return [tuple(value.shape) for value in values if torch.is_tensor(value) and value.dim()]


def _architecture(config: Config) -> list[tuple[str, str]]:
    model = config.model
    heads = f"{model.n_heads} heads of {model.head_width}, {model.kv_heads} of keys and values"
    position = (
        f"{model.position}, theta {model.rope_theta:,g}" if model.position == "rope" else model.position
    )
    head = "the output head shares the embedding" if model.tie_embeddings else "the output head is apart"
    return [
        ("model", f"{model.family}, {model.n_layers} blocks of width {model.d_model:,}"),
        ("attention", f"{heads}; {position}"),
        ("feed-forward", f"{model.activation}, inner width {model.d_ff:,}"),
        ("norm", f"{model.norm} ({model.norm_position}), epsilon {model.norm_eps:g}"),
        ("vocabulary", f"{model.vocab_size:,}; {head}"),
        ("objective", config.objective.name),
        ("", ""),
    ]


def _counts(found: Description) -> list[tuple[str, str]]:
    config, weight = found.config, found.weight_bytes
    steps, length = config.train.steps, config.data.sequence_length
    tied = config.model.tie_embeddings
    multiplied = "all parameters" if tied else "without the embedding"
    optimizer = f"{found.optimizer_bytes:.3g} {config.optimizer.name}"
    return [
        ("parameters", f"{found.parameters:,}"),
        ("  embedding", f"{found.embedding:,}"),
        ("  non-embedding", f"{found.non_embedding:,}"),
        ("", ""),
        (
            "FLOPs per token",
            f"in training; s = {length:,}, N = {found.multiplied:,} ({multiplied})",
        ),
        ("  6N + 12·L·h·s", f"{found.flops_full:.4g}, attention counted in full"),
        ("  6N + 6·L·h·s", f"{found.flops_causal:.4g}, of attention only its causal half"),
        ("", ""),
        ("tokens", f"{found.tokens_per_step:,} a step, {found.tokens:,} in {steps:,} steps"),
        ("FLOPs", f"{found.flops_causal * found.tokens:.3g} in all, attention's causal half"),
        (
            "state",
            f"{found.state_bytes:.3g} bytes a parameter: {weight} weight, {weight} gradient, {optimizer}",
        ),
        (
            "",
            f"{found.state_bytes * found.parameters / 2**30:,.2f} GiB over all ranks, activations not counted",
        ),
    ]
