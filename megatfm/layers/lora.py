"""Low-rank adapters beside matrices (Hu et al. 2022, "LoRA"): which matrices get one, its computation, and merging.

A matrix keeps its module and name. The adapter of a linear layer is the module `lora` in it, with the matrices
`lora.a.weight` [rank, d_in] and `lora.b.weight` [d_out, rank]. Those of experts, whose matrices are stacked as `w_up`
and so on, are `w_up_lora_a` [experts, rank, d_in] and `w_up_lora_b` [experts, d_out, rank].
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from megatfm.config.model_parts import LoRAConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Constant, Uniform
from megatfm.layers.linear import Linear
from megatfm.layers.moe.experts import Experts
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import did_you_mean


def is_factor(name: str) -> bool:
    """Return whether a parameter is an adapter's A or B, by its name."""
    return name.endswith((".lora.a.weight", ".lora.b.weight", "_lora_a", "_lora_b"))


def name_factors(weight: str) -> tuple[str, str]:
    """Return the names of A and B beside a weight; for a weight that can have none, names that no parameter has."""
    if weight.endswith(".weight"):
        path = weight.removesuffix(".weight")
        return f"{path}.lora.a.weight", f"{path}.lora.b.weight"
    return f"{weight}_lora_a", f"{weight}_lora_b"


class LoRA(nn.Module):
    """scale · B A dropout(x), with scale = alpha / rank. B starts at 0, so that the model starts as it was."""

    def __init__(self, linear: Linear, options: LoRAConfig, path: str) -> None:
        super().__init__()
        d_out, d_in = linear.weight.shape
        self.scale = options.alpha / options.rank
        # A starts as PEFT's does, with the usual bound of torch's linear layers.
        self.a = Linear(d_in, options.rank, Uniform(d_in**-0.5))
        self.b = Linear(options.rank, d_out, Constant(0.0), heads=linear.heads)
        self.dropout = InputDropout(options.dropout, f"lora {path}") if options.dropout else None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x if self.dropout is None else self.dropout(x))) * self.scale

    def compute_matrix(self) -> Tensor:
        """Return scale · B A [d_out, d_in], which merging adds to the frozen matrix."""
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
    """Give the chosen matrices of a model their adapters, and freeze all but these and `options.trained`.

    Raises UsageError for a pattern that matches nothing, or something that can't have an adapter.
    """
    targets = find_lora_targets(model, options.targets)
    for path, module in targets.items():
        if isinstance(module, Experts):
            module.add_lora(path.rpartition(".")[2], options.rank, options.alpha / options.rank)
        else:
            module.lora = LoRA(module, options, path)
    if options.dropout:
        _prepare_dropout(model, targets)
    names = [name for name, _ in model.named_parameters()]
    for pattern in options.trained:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"model.lora.trained: {pattern!r} matches no weight of the model{did_you_mean(pattern, names)}; names "
                f"are such as {names[0]!r}"
            )
    for name, parameter in model.named_parameters():
        is_trained = any(fnmatchcase(name, pattern) for pattern in options.trained)
        parameter.requires_grad_(is_trained or is_factor(name))


def find_lora_targets(model: nn.Module, patterns: Sequence[str]) -> dict[str, Linear | Experts]:
    """Return the matrices that patterns choose, by path; without patterns, the linear layers of all blocks.

    The values are the modules: a linear layer, or the experts in which the path's last part names stacked matrices.
    Raises UsageError as `add_lora` does.
    """
    matrices = list_adaptable_matrices(model)
    in_blocks = {path: module for path, module in matrices.items() if ".layers." in f".{path}."}
    if not patterns:
        linears = {path: module for path, module in in_blocks.items() if isinstance(module, Linear)}
        if not linears:
            raise UsageError(
                "model.lora: the model's blocks have no linear layer, so none can have an adapter: leave it out"
            )
        return {**linears}
    chosen = set[str]()
    for pattern in patterns:
        matched = {path for path in matrices if _matches(path, pattern)}
        if not matched:
            raise UsageError(_explain_no_target(pattern, model, list(in_blocks)))
        chosen |= matched
    return {path: module for path, module in matrices.items() if path in chosen}


def list_adaptable_matrices(model: nn.Module) -> dict[str, Linear | Experts]:
    """Return the modules of all matrices that can have an adapter, by the matrix's path; see `find_lora_targets`."""
    matrices: dict[str, Linear | Experts] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            matrices[path] = module
        elif isinstance(module, Experts):
            matrices |= {f"{path}.{key}": module for key in module.matrix_names}
    return matrices


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def _explain_no_target(pattern: str, model: nn.Module, matrices: Sequence[str]) -> str:
    """Return the message for a pattern that chooses no matrix."""
    ends = sorted({path.rpartition(".")[2] for path in matrices})
    for path, module in model.named_modules():
        if _matches(path, pattern):
            return (
                f"model.lora.targets: {pattern!r} is {path}, a {type(module).__name__}, and adapters go beside linear "
                f"layers and experts' matrices: name some of these, such as {', '.join(ends[:4])}"
            )
    return (
        f"model.lora.targets: {pattern!r} matches no linear layer of the model{did_you_mean(pattern, ends)}; there are "
        f"{', '.join(ends)}"
    )


def _prepare_dropout(model: nn.Module, targets: Mapping[str, Linear | Experts]) -> None:
    """Have each block hand its sequence to the adapters in it.

    Raises UsageError for experts, and for a layer whose input is not the tokens of its block: in no block, on a memory,
    or named by its module's `lora_without_dropout`.
    """
    blocks = {path: module for path, module in model.named_modules() if hasattr(module, "input_dropouts")}
    for path, module in targets.items():
        if isinstance(module, Experts):
            raise UsageError(
                f"model.lora.dropout: {path} holds the matrices of several experts, whose inputs can't be dropped: "
                "leave it out of model.lora.targets, or set dropout = 0"
            )
        block = next((block for prefix, block in blocks.items() if path.startswith(f"{prefix}.")), None)
        parent, _, name = path.rpartition(".")
        has_other_input = name in getattr(model.get_submodule(parent), "lora_without_dropout", ())
        if block is None or ".cross." in path or has_other_input:
            raise UsageError(
                f"model.lora.dropout: {path} lies in no block, or reads something else than its block's tokens: leave "
                "it out of model.lora.targets, or set dropout = 0"
            )
        block.input_dropouts.append(module.lora.dropout)


@torch.no_grad()
def merge_lora(tensors: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by name with W + scale · B A, in float64, in place of W, A and B."""
    for name, weight in tensors.items():
        a, b = (tensors.get(factor) for factor in name_factors(name))
        if a is not None and b is not None:
            yield name, weight.double() + b.double() @ a.double() * scale
        elif not is_factor(name):
            yield name, weight
