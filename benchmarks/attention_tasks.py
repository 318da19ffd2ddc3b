"""Tasks that are made by rule, as batches: ListOps (Nangia & Bowman 2018) and key–value recall; and pieces of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""Inputs of a model by name, and its targets: −100 where nothing is asked."""

IGNORED = -100
LISTOPS = 17
"""Tokens: MIN, MAX, MED, SM, the closing bracket, ten digits, a token before the expression and one after it."""

CLOSE, DIGIT, BEFORE, AFTER = 4, 5, 15, 16


@dataclass(frozen=True)
class Expressions:
    """Which expressions are drawn; by default those of Long Range Arena (Tay et al. 2021, its published generator)."""

    longer_than: int = 500
    shorter_than: int = 2000
    depth: int = 10
    arguments: int = 10
    operator: float = 0.25
    """Share of nested items that are operators and not digits."""

    def draw(self, random: Random) -> tuple[list[int], int]:
        """Tokens of one, with a token before and one after it, and its value."""
        while True:
            tokens: list[int] = []
            value = self._grow(random, 1, tokens)
            if self.longer_than < len(tokens) < self.shorter_than:
                return [BEFORE, *tokens, AFTER], value

    def _grow(self, random: Random, depth: int, tokens: list[int]) -> int:
        if depth >= self.depth or random.random() > self.operator:
            value = random.randrange(10)
            tokens.append(DIGIT + value)
            return value
        operator = random.randrange(4)
        tokens.append(operator)
        values = [
            # Once it is too long it is thrown away: nothing of it matters any more.
            self._grow(random, depth + 1 if len(tokens) < self.shorter_than else self.depth, tokens)
            for _ in range(random.randint(2, self.arguments))
        ]
        tokens.append(CLOSE)
        return self._evaluate(operator, sorted(values))

    @staticmethod
    def _evaluate(operator: int, values: list[int]) -> int:
        middle = (values[len(values) // 2] + values[(len(values) - 1) // 2]) // 2
        return (values[0], values[-1], middle, sum(values) % 10)[operator]


@dataclass(frozen=True)
class ListOps:
    """Rows of `length` tokens, packed with whole expressions; asked is the value, where all of it has been read
    (decoders), or at its front (encoders)."""

    length: int
    expressions: Expressions = Expressions()

    def iter_batches(self, seed: int, *, encoder: bool) -> Iterator[Batch]:
        """Yield batches of one row without end, the same for every model."""
        random = Random(seed)
        waiting: tuple[list[int], int] | None = None
        while True:
            tokens = torch.full((1, self.length), AFTER)
            documents, targets = torch.full_like(tokens, -1), torch.full_like(tokens, IGNORED)
            positions, filled, number = torch.arange(self.length)[None].clone(), 0, 0
            while True:
                text, value = waiting or self.expressions.draw(random)
                end = filled + len(text)
                if end > self.length:
                    waiting = text, value
                    break
                tokens[0, filled:end] = torch.tensor(text)
                documents[0, filled:end], positions[0, filled:end] = number, torch.arange(len(text))
                targets[0, filled if encoder else end - 1] = value
                waiting, filled, number = None, end, number + 1
            positions[0, filled:] = torch.arange(self.length - filled) % (self.expressions.shorter_than + 1)
            yield {"tokens": tokens, "documents": documents, "positions": positions, "targets": targets}

    def measure_guesses(self, count: int, seed: int) -> dict[str, float]:
        """Return the accuracy of guessing one value, and of guessing by the outermost operator."""
        random = Random(seed)
        drawn = [self.expressions.draw(random) for _ in range(count)]
        table = torch.zeros(LISTOPS, 10)
        for text, value in drawn:
            table[text[1], value] += 1
        return {
            "one value": round(float(table.sum(0).max()) / count, 3),
            "by the first operator": round(float(table.max(1).values.sum()) / count, 3),
        }


@dataclass(frozen=True)
class Recall:
    """Rows of facts, each a key and its value in one token, at random places among fillers, and at the end a question
    for each key. Facts within a question's reach can be answered, whatever lies further back can't."""

    facts: int = 8
    values: int = 8
    fillers: int = 8

    @property
    def vocabulary(self) -> int:
        return self.facts * self.values + self.facts + self.fillers

    def draw_batch(self, count: int, length: int, seed: int) -> Batch:
        """Draw a batch [count, length]."""
        random = torch.Generator().manual_seed(seed)
        keys = torch.stack([torch.randperm(self.facts, generator=random) for _ in range(count)])
        values = torch.randint(self.values, (count, self.facts), generator=random)
        free = length - self.facts
        places = torch.stack([torch.randperm(free, generator=random)[: self.facts] for _ in range(count)])
        fillers = self.vocabulary - self.fillers, self.vocabulary
        tokens = torch.randint(*fillers, (count, length), generator=random)
        tokens.scatter_(1, places, keys * self.values + values)
        asked = torch.stack([torch.randperm(self.facts, generator=random) for _ in range(count)])
        tokens[:, -self.facts :] = self.facts * self.values + keys.gather(1, asked)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -self.facts :] = values.gather(1, asked)
        return {"tokens": tokens, "targets": targets}

    def find_distances(self, batch: Batch) -> Tensor:
        """Return the distance in tokens from the fact to each question of a batch's first row, int64 [facts]."""
        row = batch["tokens"][0]
        places = (row < self.facts * self.values).nonzero()[:, 0]
        of_key = torch.empty(self.facts, dtype=torch.int64)
        of_key[row[places] // self.values] = places
        asked = row[-self.facts :] - self.facts * self.values
        return torch.arange(len(row) - self.facts, len(row)) - of_key[asked]


class Text:
    """Bytes of files (each a document of its own, those that are too short left out), for models to go on with."""

    def __init__(self, folder: Path, length: int, *, held_out: int = 20) -> None:
        files = [folder] if folder.is_file() else sorted(folder.rglob("*.py")) + sorted(folder.rglob("*.txt"))
        read = [torch.tensor(list(file.read_bytes()), dtype=torch.uint8) for file in files]
        long_enough = [text for text in read if len(text) > length]
        if len(long_enough) == 1:
            cut = len(long_enough[0]) * (held_out - 1) // held_out
            long_enough = [long_enough[0][:cut], long_enough[0][cut:]]
        self.length = length
        self.training, self.held_out = (
            long_enough[: -max(len(long_enough) // held_out, 1)],
            long_enough[-max(len(long_enough) // held_out, 1) :],
        )

    def draw_batch(self, count: int, seed: int, *, held_out: bool = False) -> Batch:
        """Draw a batch [count, length] of spans of files, each from a random offset."""
        random = torch.Generator().manual_seed(seed)
        files = self.held_out if held_out else self.training
        sizes = torch.tensor([float(len(file)) for file in files])
        pieces = []
        for which in torch.multinomial(sizes, count, replacement=True, generator=random).tolist():
            start = int(torch.randint(len(files[which]) - self.length, (), generator=random))
            pieces.append(files[which][start : start + self.length + 1].long())
        piece = torch.stack(pieces)
        return {"tokens": piece[:, :-1], "targets": piece[:, 1:]}
