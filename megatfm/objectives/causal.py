"""Next-token prediction."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.objectives.registry import OBJECTIVES, Batch, SpecialTokens, Terms
from megatfm.ops.cross_entropy import IGNORE


@OBJECTIVES.register("causal")
class Causal:
    """Each document is read as [BOS, d…] and predicts [d…, EOS], so every token counts exactly once an epoch."""

    weights: Mapping[str, float] = MappingProxyType({"causal": 1.0})

    def __init__(self, special: SpecialTokens) -> None:
        self.special = special

    def lengths(self, n_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return n_tokens + 1

    def build(self, tokens: NDArray[np.integer], key: tuple[int, int, int]) -> dict[str, NDArray[np.integer]]:
        framed = np.concatenate(([self.special.bos], tokens, [self.special.eos])).astype(np.int64)
        return {"tokens": framed[:-1], "targets": framed[1:]}

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"causal": (batch["targets"] != IGNORE).sum()}

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        output = model(
            batch["tokens"],
            positions=batch["positions"],
            documents=batch.get("documents"),
            targets=batch["targets"],
        )
        return {"causal": output.loss_sum}
