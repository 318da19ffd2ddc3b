"""A dilated window (Beltagy et al. 2020, section 3.1): every `step`-th token, `width` of them, on each side."""

from dataclasses import dataclass

from megatfm.layers.attention.patterns import PATTERNS, AttentionPattern


@dataclass(frozen=True)
class Dilated(AttentionPattern):
    """The query's own token and `width` others before it, `step` apart; not causal, as many after it."""

    width: int
    step: int
    causal: bool

    @property
    def is_relative(self):
        return True

    @property
    def cache_window(self):
        return self.width * self.step if self.causal else None

    def mask_mod(self, q, k, heads):
        back = q - k
        near = (back >= 0 if self.causal else back >= -self.width * self.step) & (back <= self.width * self.step)
        return near & (back % self.step == 0)

    def block_mask(self, q, k, heads):
        far = self.width * self.step
        return (k.last >= q.first - far) & (k.first <= (q.last if self.causal else q.last + far))


@PATTERNS.register("dilated")
def dilated(config, causal):
    """From `[model.attention.pattern]`."""
    options = config.attention.pattern
    return Dilated(options.width, getattr(options, "step", 2), causal)
