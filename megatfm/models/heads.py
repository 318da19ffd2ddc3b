"""Heads besides the one over the vocabulary, as steps at the end of a model."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from megatfm.config import ModelConfig
from megatfm.layers.boundary import BoundaryHead as BoundaryHead  # so that it is registered
from megatfm.layers.extra import summed
from megatfm.layers.head import HEADS
from megatfm.layers.table import Table
from megatfm.models.steps import ForwardPass, ModelStep


def add_heads(model: nn.Module, config: ModelConfig, tokens: Table | None) -> Iterator[ModelStep]:
    """Give a model the heads of its config under their names, and the step of each. tokens: the table of tokens."""
    for name, section in config.heads.items():
        head = HEADS.get(section.name)(config, section, tokens)
        model.add_module(name, head)
        yield ModelStep(name, partial(_run, name, head), uses=(name,), reads=("hidden",))


def _run(name: str, head: nn.Module, batch: ForwardPass) -> None:
    """The head's loss, or what it predicts where nothing is trained."""
    hidden_BTD, fields = batch.carry["hidden"], [batch.get(field) for field in head.reads]  # type: ignore[union-attr]
    if all(field is not None for field in fields):
        of_row = [batch.get(f"row_{field}") for field in getattr(head, "reads_of_row", ())]
        term = {str(getattr(head, "term", name)): head(hidden_BTD, *fields, *of_row)}
        batch.losses = summed(batch.losses, term)  # heads may share one
    elif getattr(head, "predicts", False) and batch.get("targets") is None:
        batch.predictions[name] = head(hidden_BTD)
