"""A model as a list of named steps over a carry.

Every model's `forward` goes through the whole list. A pipeline stage is a slice of it, with the modules that the slice
uses and no others; what steps read from the batch is there on every stage, and only the carry travels.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from megatfm.layers.attention import KVCache

Made = TypeVar("Made")


class Pass:
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
        self.sentence_logits: Tensor | None = None
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

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What several steps share, e.g. the layout of the batch: made at the first call with `key`."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found


@dataclass(frozen=True)
class Field:
    """The shape of a part of the carry: as the input `like` [B, T], and with a width [B, T, D] of the activations'
    type; without one int64. length: of the batch's inputs, where T is another."""

    like: str
    width: int | None = None
    length: Callable[[Mapping[str, Tensor]], int] | None = None


@dataclass(frozen=True)
class Step:
    """One step. uses: paths of the modules that it runs. reads, writes: parts of the carry.

    tokens: the input over whose tokens it runs, and share: how many of these, to estimate its cost.
    """

    name: str
    run: Callable[[Pass], None]
    uses: Sequence[str]
    reads: Sequence[str] = ()
    writes: Mapping[str, Field] = field(default_factory=lambda: MappingProxyType({}))
    tokens: str = "tokens"
    share: float = 1.0


class Steps(Sequence[Step]):
    """Steps in their order, or a slice of them."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = tuple(steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: Any) -> Any:
        return Steps(self._steps[index]) if isinstance(index, slice) else self._steps[index]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def through(self, batch: Pass) -> Pass:
        """Take a batch through all steps."""
        for step in self._steps:
            step.run(batch)
        return batch

    def start(self, inputs: Mapping[str, Tensor | None], carry: Mapping[str, Tensor]) -> Pass:
        """Take a batch through these steps alone, with what the steps before them left."""
        return self.through(Pass(inputs, carry))

    def alive(self, index: int) -> dict[str, Field]:
        """The parts of the carry that steps from `index` on read and earlier ones have written."""
        wanted: set[str] = set()
        for step in reversed(self._steps[index:]):
            wanted = (wanted - set(step.writes)) | set(step.reads)
        written: dict[str, Field] = {}
        for step in self._steps[:index]:
            written |= step.writes
        return {name: written[name] for name in sorted(wanted) if name in written}
