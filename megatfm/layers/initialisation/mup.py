"""Maximal update parametrisation (Yang et al. 2022, table 8): what changes of the initial weights."""

from megatfm.errors import UsageError
from megatfm.ops.initial import Initial, Normal, TruncatedNormal

TABLES = ("embedding", "position", "segment", "relative", "head")


def narrower(initial: Initial, role: str, name: str, factor: float) -> Initial:
    """Hidden matrices start smaller by `factor`; tables and the output head, whose width is the vocabulary, don't.

    Raises UsageError for an initialisation that depends on the width already.
    """
    if role in TABLES:
        return initial
    match initial:
        case Normal(std):
            return Normal(std * factor)
        case TruncatedNormal(std):
            return TruncatedNormal(std * factor)
        case _:
            raise UsageError(
                f"model.mup does not go with model.init.name = {name!r}, which follows the width by itself: choose "
                "gpt2, normal or bert"
            )
