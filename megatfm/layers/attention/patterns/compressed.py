"""The first token, and stretches of tokens that end before the query: what memory-compressed attention looks at."""

from dataclasses import dataclass

from torch import Tensor

from megatfm.layers.attention.patterns.pattern import AttentionPattern


@dataclass(frozen=True)
class MemoryCompressedPattern(AttentionPattern):
    """A query sees the first token and whole stretches of `factor` tokens before it, each of which is one key."""

    factor: int

    @property
    def has_uneven_work(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        """Whether a token is in what a query sees."""
        return ((k == 0) & (q >= 0)) | ((k // self.factor + 1) * self.factor <= q)

    def pairs(self, length: int, n_heads: int = 1) -> float:
        """Of queries and compressed keys."""
        stretches, rest = divmod(length, self.factor)
        return self.factor * stretches * (stretches + 1) / 2 + rest * (stretches + 1)
