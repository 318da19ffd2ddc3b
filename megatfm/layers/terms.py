"""The terms of the loss that a model's blocks add."""

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention import ATTENTIONS
from megatfm.layers.extra import AuxiliaryLoss
from megatfm.layers.ffn import FFNS


def auxiliary_losses(config: ModelConfig) -> dict[str, AuxiliaryLoss]:
    """By name, what the parts of a config's blocks declare by `terms(config)`.

    Raises UsageError where two declare one term differently.
    """
    found: dict[str, AuxiliaryLoss] = {}
    kinds = [config.type_config(kind) for kind in dict.fromkeys(config.layer_types)] or [config]
    parts: list[tuple[ModelConfig, object]] = [(own, FFNS.get(own.ffn.name)) for own in kinds]
    # Some families have an attention of their own.
    named = ATTENTIONS.names()
    parts += [(own, ATTENTIONS.get(own.attention.name)) for own in kinds if own.attention.name in named]
    for own, part in parts:
        declared = getattr(part, "terms", None)
        for name, term in (declared(own) if declared else {}).items():
            if found.setdefault(name, term) != term:
                raise UsageError(
                    f"two parts of the model add a term {name!r} to the loss, one as {found[name]}, one as {term}: "
                    "give both the same weight, or one another name"
                )
    return found
