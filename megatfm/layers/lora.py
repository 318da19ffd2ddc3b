"""Low-rank adapters beside linear layers (Hu et al. 2022, "LoRA"): which get one, what it computes, merging it.

The layer stays what it is, under its name; its adapter is the module `lora` in it, with the matrices `lora.a.weight`
[rank, d_in] and `lora.b.weight` [d_out, rank].
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from megatfm.config.lora import LoRAConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Constant, Uniform
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import did_you_mean

FACTORS = (".lora.a.weight", ".lora.b.weight")
"""Ends of the names of an adapter's matrices; before them stands the linear layer's path."""


class LoRA(nn.Module):
    """scale · B A dropout(x), with scale = alpha / rank. B starts at 0, so that the model starts as it was."""

    def __init__(self, linear: Linear, options: LoRAConfig, path: str) -> None:
        super().__init__()
        d_out, d_in = linear.weight.shape
        self.scale = options.alpha / options.rank
        # As PEFT starts A: the usual bound of torch's linear layers.
        self.a = Linear(d_in, options.rank, Uniform(d_in**-0.5))
        self.b = Linear(options.rank, d_out, Constant(0.0), heads=linear.heads)
        self.dropout = InputDropout(options.dropout, f"lora {path}") if options.dropout else None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x if self.dropout is None else self.dropout(x))) * self.scale

    def matrix(self) -> Tensor:
        """scale · B A [d_out, d_in], which merging adds to the frozen matrix."""
        return self.b.weight @ self.a.weight * self.scale


class InputDropout(Dropout):
    """Dropout in a linear layer, which isn't given the sequence: the block sets it before it runs its parts."""

    sequence: SequenceMetadata | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:  # type: ignore[override]
        if not self.active:
            return x_BTD
        assert self.sequence is not None
        return super().forward(x_BTD, self.sequence)


def add_lora(model: nn.Module, options: LoRAConfig) -> None:
    """Give the chosen linear layers of a model their adapters, and freeze all but these and `options.trained`.

    Raises UsageError for a pattern that matches nothing, or something that can't have an adapter.
    """
    chosen = lora_targets(model, options.targets)
    for path, linear in chosen.items():
        linear.lora = LoRA(linear, options, path)
    if options.dropout:
        _prepare_dropout(model, chosen)
    names = [name for name, _ in model.named_parameters()]
    for pattern in options.trained:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"model.lora.trained: {pattern!r} matches no weight of the model{did_you_mean(pattern, names)}; names "
                f"are such as {names[0]!r}"
            )
    for name, parameter in model.named_parameters():
        is_trained = any(fnmatchcase(name, pattern) for pattern in options.trained)
        parameter.requires_grad_(is_trained or name.endswith(FACTORS))


def lora_targets(model: nn.Module, patterns: list[str]) -> dict[str, Linear]:
    """Return the linear layers that patterns choose, by path; without patterns, all in blocks.

    Raises UsageError as `add_lora` does.
    """
    modules = dict(model.named_modules())
    in_blocks = {
        path: module
        for path, module in modules.items()
        if isinstance(module, Linear) and ".layers." in f".{path}."
    }
    if not patterns:
        if not in_blocks:
            raise UsageError(
                "model.lora: the model's blocks have no linear layer, so adapters have no place: leave it out"
            )
        return in_blocks
    chosen: dict[str, Linear] = {}
    for pattern in patterns:
        matched = {
            path: module
            for path, module in modules.items()
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
        }
        linears = {path: module for path, module in matched.items() if isinstance(module, Linear)}
        if not linears:
            raise UsageError(_no_target(pattern, matched, model, list(in_blocks)))
        chosen |= linears
    return {path: module for path, module in modules.items() if path in chosen and isinstance(module, Linear)}


def _no_target(pattern: str, matched: Mapping[str, nn.Module], model: nn.Module, linears: list[str]) -> str:
    """Say why a pattern chooses no linear layer."""
    ends = sorted({path.rpartition(".")[2] for path in linears})
    weights = [
        name
        for name, parameter in model.named_parameters()
        if (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")) and parameter.dim() > 2
    ]
    if weights:
        return (
            f"model.lora.targets: {weights[0]} holds the matrices of several experts, for which there are no adapters: "
            f"name linear layers, such as {', '.join(ends[:4])}, or train it by model.lora.trained"
        )
    if matched:
        path, module = next(iter(matched.items()))
        return (
            f"model.lora.targets: {pattern!r} is {path}, a {type(module).__name__}, and adapters go beside linear "
            f"layers: name some of these, such as {', '.join(ends[:4])}"
        )
    return (
        f"model.lora.targets: {pattern!r} matches no linear layer of the model{did_you_mean(pattern, ends)}; there are "
        f"{', '.join(ends)}"
    )


def _prepare_dropout(model: nn.Module, chosen: Mapping[str, Linear]) -> None:
    """Have each block hand its sequence to the adapters in it. Raises UsageError for one in none, or on a memory."""
    blocks = {path: module for path, module in model.named_modules() if hasattr(module, "input_dropouts")}
    for path, linear in chosen.items():
        block = next((block for place, block in blocks.items() if path.startswith(f"{place}.")), None)
        if block is None or ".cross." in path:
            raise UsageError(
                f"model.lora.dropout: {path} lies in no block, or reads another sequence than its block: leave it out "
                "of model.lora.targets, or set dropout = 0"
            )
        block.input_dropouts.append(linear.lora.dropout)


@torch.no_grad()
def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return a model's tensors by name with W + scale · B A in place of W, A and B; the product in float64."""
    merged = {name: tensor for name, tensor in tensors.items() if not name.endswith(FACTORS)}
    for name, a in tensors.items():
        if name.endswith(FACTORS[0]):
            path = name.removesuffix(FACTORS[0])
            product = tensors[path + FACTORS[1]].double() @ a.double() * scale
            weight = merged[f"{path}.weight"]
            merged[f"{path}.weight"] = (weight.double() + product).to(weight.dtype)
    return merged
