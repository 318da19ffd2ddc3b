"""A model as a list of named steps over a carry.

The list is made once, with the model. Every model's `forward` is a loop over it, and a pipeline stage is a slice of it,
with the modules that the slice uses and no others. What steps read from the batch is there on every stage; only the
carry travels.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from megatfm.layers.attention import KVCache
from megatfm.layers.extra import Extra, summed
from megatfm.models.output import Output

Made = TypeVar("Made")


class OfRow(NamedTuple):
    """Where tokens stand in their rows, int64 [T], and positions, documents and prefix of all tokens of these."""

    places: Tensor
    positions: Tensor
    documents: Tensor | None
    prefix: Tensor | None


class ForwardPass:
    """A batch on its way through a model, or through one stage of it.

    inputs: what the batch brought, None for what it didn't. carry: what earlier steps made for later ones. losses:
    the summed loss of each term that these steps made.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor | None],
        carry: Mapping[str, Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> None:
        self.inputs, self.cache = inputs, cache
        self.carry: dict[str, Tensor] = dict(carry or {})
        self.losses: dict[str, Tensor] = {}
        self.logits: Tensor | None = None
        self.predictions: dict[str, Tensor] = {}
        self._made: dict[Hashable, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        """An input without which there is no pass."""
        found = self.inputs.get(name)
        if found is None:
            raise TypeError(f"the model needs {name}")
        return found

    def get(self, name: str) -> Tensor | None:
        """An input that may be missing."""
        return self.inputs.get(name)

    def of_row(self, side: str = "") -> OfRow | None:
        """Of the whole rows, where the inputs of a side are some of their tokens."""
        places = self.inputs.get(f"{side}places")
        if places is None:
            return None
        return OfRow(
            places,
            self[f"{side}row_positions"],
            self.get(f"{side}row_documents"),
            self.get(f"{side}row_prefix"),
        )

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What several steps share, e.g. the sequence of the batch: made at the first call with `key`."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def keep(self, step: "ModelStep", made: Any) -> None:
        """Put what a step made where later steps find it: in its parts of the carry, one after another."""
        if isinstance(made, Extra):
            made = self.take(step.run, made)
        for part, tensor in zip(step.writes, made if isinstance(made, tuple) else (made,), strict=False):
            if tensor is not None:
                self.carry[part] = tensor

    def take(self, block: Any, made: Any) -> Any:
        """A block's output; what it gave besides becomes terms of the loss and, in training, is told to its parts."""
        if not isinstance(made, Extra):
            return made
        self.losses = summed(self.losses, made.losses)
        if block.training:
            for part, counts in made.counts.items():
                block.get_submodule(part).observe(counts)
        return made.y

    def output(self, hidden: str = "hidden") -> Output:
        """What the model returns. hidden: the part of the carry that holds the hidden vectors."""
        losses = self.losses if self.losses and self.logits is None else None
        return Output(self.carry[hidden], self.logits, losses, self.predictions or None)


@dataclass(frozen=True)
class Field:
    """The shape of a part of the carry: as the input `like` [B, T, …], and with a width [B, T, D] of the activations'
    type; without one int64. length: of the batch's inputs, where T is another."""

    like: str
    width: int | None = None
    length: Callable[[Mapping[str, Tensor]], int] | None = None


def whole_pass(batch: ForwardPass) -> tuple[Any, ...]:
    """Inputs of a step that takes what it needs from the pass."""
    return (batch,)


@dataclass(frozen=True)
class ModelStep:
    """One step: `batch.keep(step, step.run(*step.inputs(batch)))`.

    run: a module, or a method of the model that also says what becomes of losses and logits. inputs: what it is given.
    uses: paths of the modules that it runs. reads, writes: parts of the carry. tokens: the input over whose tokens it
    runs.
    """

    name: str
    run: Callable[..., Any]
    inputs: Callable[[ForwardPass], Sequence[Any]] = whole_pass
    uses: Sequence[str] = ()
    reads: Sequence[str] = ()
    writes: Mapping[str, Field] = field(default_factory=lambda: MappingProxyType({}))
    tokens: str = "tokens"


class ModelSteps(Sequence[ModelStep]):
    """Steps in their order, or a slice of them."""

    def __init__(self, steps: Iterable[ModelStep]) -> None:
        self._steps = tuple(steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Any:
        return ModelSteps(self._steps[index]) if isinstance(index, slice) else self._steps[index]

    def __iter__(self) -> Iterator[ModelStep]:
        return iter(self._steps)

    def start(self, inputs: Mapping[str, Tensor | None], carry: Mapping[str, Tensor]) -> ForwardPass:
        """Take a batch through these steps alone, with what the steps before them left."""
        batch = ForwardPass(inputs, carry)
        for step in self._steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch

    def alive(self, index: int) -> dict[str, Field]:
        """The parts of the carry that steps from `index` on read and earlier ones have written."""
        wanted: set[str] = set()
        for step in reversed(self._steps[index:]):
            wanted = (wanted - set(step.writes)) | set(step.reads)
        written: dict[str, Field] = {}
        for step in self._steps[:index]:
            written |= step.writes
        return {name: written[name] for name in sorted(wanted) if name in written}
