"""Maximal update parametrisation (Yang et al. 2022, table 8): what changes of the initial weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatfm.errors import UsageError
from megatfm.ops.initial import InitDistribution, Normal, TruncatedNormal

EMBEDDING_ROLES = ("embedding", "position", "segment", "relative", "head")


class Narrower:
    """An initialiser under muP: hidden matrices start smaller by √ratio, and learn more slowly by `ratio`; tables and
    the output head, whose width is the vocabulary, don't.

    plain: the initialiser that a config names. ratio: base width / width.
    """

    def __init__(self, plain: Callable[[Any, int, int], InitDistribution], name: str, ratio: float) -> None:
        self.plain, self.name, self.ratio = plain, name, ratio

    def __call__(self, role: Any, d_in: int, d_out: int) -> InitDistribution:
        """Raises UsageError for an initialisation that depends on the width already."""
        initial = self.plain(role, d_in, d_out)
        if role in EMBEDDING_ROLES:
            return initial
        if not isinstance(initial, Normal | TruncatedNormal):
            raise UsageError(
                f"model.mup does not go with model.init.name = {self.name!r}, which follows the width by itself: "
                "choose gpt2, normal or bert"
            )
        return replace(initial, std=initial.std * self.ratio**0.5, width_ratio=self.ratio)


def with_fixed_inputs(
    initial: Callable[[Any, int, int], InitDistribution],
) -> Callable[[Any, int, int], InitDistribution]:
    """Return the initialiser of matrices whose inputs are as many at every width of the model, which muP leaves as they
    are."""
    return initial.plain if isinstance(initial, Narrower) else initial
