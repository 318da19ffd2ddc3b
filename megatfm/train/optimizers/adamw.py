"""AdamW (Loshchilov & Hutter 2019), from torch."""

from functools import partial

from torch import Tensor
from torch.optim import AdamW

from megatfm.config import AdamWConfig
from megatfm.engines import OptimizerGroup
from megatfm.train.optimizers.registry import OPTIMIZERS, Shapes


@OPTIMIZERS.register("adamw")
def adamw(config: AdamWConfig, shapes: Shapes) -> list[OptimizerGroup]:
    """Two groups: matrices with weight decay; norms and other vectors without."""

    def make(weight_decay: float, parameters: list[Tensor]) -> AdamW:
        return AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=weight_decay,
            fused=True,
        )

    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    vectors = [name for name, shape in shapes.items() if len(shape) <= 1]
    groups = [
        OptimizerGroup(matrices, "elementwise", partial(make, config.weight_decay)),
        OptimizerGroup(vectors, "elementwise", partial(make, 0.0)),
    ]
    return [group for group in groups if group.names]
