"""What queries see of keys, as kernels ask for it."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

# B batch, N query heads, T queries, S keys

Plain = Literal["all", "causal"]
"""Words that kernels have: all keys, or those up to the query itself, where the last query is also the last key."""


class Visible(Protocol):
    """What is seen. Each form of it is made when a kernel asks for it: most do without a mask of T × S."""

    @property
    def plain(self) -> Plain | None:
        """The word that says all of it, where there is one."""

    def mask(self) -> Tensor | None:
        """Boolean [B or 1, N or 1, T, S], true where a query looks; None where `plain` says it."""

    def blocks(self, size: int) -> Tensor:
        """Boolean [B or 1, N or 1, ⌈T/size⌉, ⌈S/size⌉], true where a block of queries may see a key of a block."""


@dataclass(frozen=True)
class Given:
    """What is seen, by a word or by a mask."""

    plain: Plain | None = None
    dense: Tensor | None = None

    def mask(self) -> Tensor | None:
        return self.dense

    def blocks(self, size: int) -> Tensor:
        """Of a mask."""
        assert self.dense is not None
        padded = self.dense.new_zeros(
            *self.dense.shape[:2], *(-(-length // size) * size for length in self.dense.shape[2:])
        )
        padded[..., : self.dense.shape[2], : self.dense.shape[3]] = self.dense
        return padded.unflatten(3, (-1, size)).unflatten(2, (-1, size)).any(5).any(3)


ALL, CAUSAL = Given("all"), Given("causal")
