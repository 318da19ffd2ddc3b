"""Which modules of a model are blocks: what is compiled, gathered and recomputed as one."""

from collections.abc import Iterator

from torch import nn


def transformer_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of all stacks, which are compiled, gathered and recomputed one at a time."""
    for path, module in model.named_modules():
        if path.rpartition(".")[0].rpartition(".")[2] == "layers":
            yield module
