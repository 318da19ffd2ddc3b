"""Modules of the plain model by class and by place, without an import of the classes."""

from torch import nn


def is_a(module: nn.Module, name: str) -> bool:
    """Whether a module's class, or one that it is derived from, is ours and has this name."""
    return any(
        kind.__name__ == name and kind.__module__.startswith("megatfm.") for kind in type(module).__mro__
    )


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the layers of all stacks, which are gathered and recomputed one at a time."""
    return [
        path for path, _ in model.named_modules() if path.rpartition(".")[0].rpartition(".")[2] == "layers"
    ]
