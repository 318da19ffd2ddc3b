"""Base class of model families: the batch fields that one reads, its additional heads, and its pipeline stages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.linear import Embedding
from megatfm.layers.loss_terms import add_by_name
from megatfm.layers.output_head import HEADS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.batch_fields import explain_unknown_field, list_accepted_fields
from megatfm.registry import Registry
from megatfm.split_points import SplitPoint

# B batch, T tokens, S tokens of the encoder, D model width, V vocabulary, C classes

M = TypeVar("M", bound=nn.Module)

MODELS: Registry[Callable[[ModelConfig], nn.Module]] = Registry("model family (model.family)")


class Output(NamedTuple):
    """The result of a forward pass; a tuple, because FSDP looks for tensors in tuples and in no other class."""

    hidden: Tensor
    """After the last norm, [B, T, D]; of the decoder in an encoder-decoder, of the discriminator in ELECTRA."""
    logits: Tensor | None = None
    """[B, T, V], if the batch has no targets of any head; of ELECTRA [B, T], the log-odds that a token was replaced."""
    losses: dict[str, Tensor] | None = None
    """Summed loss in nats of each term, if the batch has targets of a head."""
    predictions: dict[str, Tensor] | None = None
    """Predictions of `model.extra_heads` by name, if the batch has no targets of any head: of "sentence" logits [B, C],
    or [B, T, C] with `token = "all"`; of "span" [B, T, 2]; of "classifier" [images, C], in the order of rows."""
    carry: dict[str, Tensor] | None = None
    """Further hidden vectors that later pipeline stages read, by name, e.g. "encoder_hidden" [B, S, D]."""

    def carried(self) -> dict[str, Tensor]:
        """Return the tensors for later pipeline stages, by the keyword of their forward."""
        return {"hidden": self.hidden, **(self.carry or {})}


class Model(nn.Module):
    """Base class of model families. Subclasses define the modules, `split_points` and `forward`.

    Call `add_heads` and `accept` in the constructor, and `read` at the start of `forward`.
    """

    cp_plan = "local"

    split_points: Sequence[SplitPoint]
    stacks: Sequence[str] = ("encoder", "decoder")
    """Attributes that hold the model's stacks, which pipeline stages divide; a family may lack some."""
    head_split_point = "head"
    """Name of the split point that runs the model's own head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.runs_head = True
        self.extra_heads: list[str] = []
        self.accepted: frozenset[str] = frozenset()
        self.target_fields: tuple[tuple[str, ...], ...] = (("targets",),)

    def add_heads(self, table: Embedding | None, config: ModelConfig | None = None) -> None:
        """Add the heads of `model.extra_heads` as submodules. table: the token embedding. config: that of the hidden
        vectors that heads read; None: the model's."""
        for name, section in self.config.extra_heads.items():
            self.add_module(name, HEADS.get(section.name)(config or self.config, section, table))
        self.extra_heads = list(self.config.extra_heads)

    def list_head_points(self, reads: str = "hidden") -> list[SplitPoint]:
        """Return the split points of the additional heads. reads: name of the carried vectors that heads read."""
        return [SplitPoint(name, (name,), (reads,)) for name in self.extra_heads]

    def accept(self, *fields: str, targets: Sequence[str] = ("targets",)) -> None:
        """Declare the batch fields that `forward` reads, besides those of additional heads and random keys.

        targets: fields of the model's own head. Each field is also accepted with the prefix "full_row_", which context
        parallelism uses.
        """
        head_fields = [tuple(getattr(self, name).input_fields) for name in self.extra_heads]
        self.target_fields = (*((name,) for name in targets), *head_fields)
        known_fields = {*fields, *(name for names in self.target_fields for name in names)}
        for name in self.extra_heads:
            known_fields |= {*getattr(getattr(self, name), "optional_fields", ())}
        self.accepted = list_accepted_fields(known_fields)

    def read(self, **fields: Tensor | None) -> dict[str, Tensor]:
        """Return the fields that are not None. Raises TypeError for a field that the model does not read."""
        batch = {name: field for name, field in fields.items() if field is not None}
        for name in batch.keys() - self.accepted:
            raise TypeError(explain_unknown_field(name, self.accepted, self.config.family))
        return batch

    def make_layer_list(self) -> list[Tensor] | None:
        """Return an empty list to collect the layers' outputs if a head reads several layers, else None."""
        return [] if any(getattr(getattr(self, name), "layers", ()) for name in self.extra_heads) else None

    def stage(self, names: Collection[str]) -> Self:
        """Return a view that runs these split points only, for a pipeline stage."""
        view = make_view(self)
        for path in self.stacks:
            stack: Any = getattr(self, path, None)
            if stack is not None:
                setattr(view, path, stack.stage(filter_names_below(path, names)))
        view.runs_head = self.head_split_point in names
        view.extra_heads = [name for name in self.extra_heads if name in names]
        return view

    def has_targets(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the batch has targets of any head. If so, the model returns losses, otherwise predictions."""
        return any(all(name in batch for name in names) for names in self.target_fields)

    def output(
        self,
        batch: Mapping[str, Tensor],
        hidden_BTD: Any,
        losses: Mapping[str, Tensor],
        logits: Tensor | None = None,
        carry: Mapping[str, Tensor | None] | None = None,
        sequence: SequenceMetadata | None = None,
        layers: Sequence[Tensor] | None = None,
    ) -> Output:
        """Run the additional heads and return the output: losses if the batch has targets, else predictions.

        hidden_BTD: a tensor; None in a pipeline stage before it is computed. carry: see Output. sequence: for heads
        with `takes_sequence`. layers: see `make_layer_list`.
        """
        has_targets, predictions = self.has_targets(batch), dict[str, Tensor]()
        for name in self.extra_heads:
            head: Any = getattr(self, name)
            input_BTX = hidden_BTD
            if (depths := getattr(head, "layers", ())) and layers is not None:
                input_BTX = torch.cat([layers[depth] for depth in depths], -1)
            options: dict[str, Any] = {
                field: batch[field] for field in getattr(head, "optional_fields", ()) if field in batch
            }
            if getattr(head, "takes_sequence", False):
                options["sequence"] = sequence
            if all(field in batch for field in head.input_fields):
                fields = [batch[field] for field in head.input_fields]
                full_rows = [batch.get(f"full_row_{field}") for field in getattr(head, "full_row_fields", ())]
                result = head(input_BTX, *fields, *full_rows, **options)
                terms = result if isinstance(result, dict) else {str(getattr(head, "term", name)): result}
                losses = add_by_name(losses, terms)
            elif getattr(head, "predicts", False) and not has_targets:
                predictions[name] = head(input_BTX, **options)
        carry = {name: tensor for name, tensor in (carry or {}).items() if tensor is not None}
        losses_or_none = dict(losses) if losses and has_targets else None
        return Output(hidden_BTD, logits, losses_or_none, predictions or None, carry or None)  # type: ignore[arg-type]


def make_view(module: M) -> M:
    """Return a shallow copy of a module that shares parameters and submodules.

    Setting attributes of the view does not change the module. Call the view's `forward`: hooks stay with the module.
    """
    view = object.__new__(type(module))  # not copy.copy, which FSDP2's classes override
    vars(view).update(vars(module))
    vars(view)["_modules"] = dict(module._modules)
    vars(view).pop("forward", None)  # the pipeline may have replaced the model's
    return view


def filter_names_below(path: str, names: Collection[str]) -> set[str]:
    """Return the names below a module's path, relative to it."""
    return {name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")}
