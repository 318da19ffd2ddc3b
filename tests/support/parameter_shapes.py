"""Names and shapes of a model's parameters as lines, blocks that are alike on one line each."""

import re
from collections.abc import Mapping
from itertools import groupby

BLOCK = re.compile(r"(?P<before>.*\blayers\.)(?P<number>\d+)(?P<after>\..*)")


def compressed(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """`encoder.layers.0…11.attn.wq.weight [768, 768]`, in the model's order.

    Neighbouring blocks are joined if they have the same names and shapes in the same order.
    """
    lines: list[str] = []
    for before, entries in groupby(shapes.items(), _stack_of):
        if before is None:
            lines += [f"{name} {list(shape)}" for name, shape in entries]
            continue
        runs: list[tuple[list[str], list[str]]] = []
        for number, block in groupby(entries, lambda entry: BLOCK.fullmatch(entry[0])["number"]):
            content = [f"{BLOCK.fullmatch(name)['after']} {list(shape)}" for name, shape in block]
            if runs and runs[-1][1] == content:
                runs[-1][0].append(number)
            else:
                runs.append(([number], content))
        for numbers, content in runs:
            where = numbers[0] if len(numbers) == 1 else f"{numbers[0]}…{numbers[-1]}"
            assert [int(n) for n in numbers] == list(range(int(numbers[0]), int(numbers[-1]) + 1))
            lines += [f"{before}{where}{line}" for line in content]
    return lines


def _stack_of(entry: tuple[str, tuple[int, ...]]) -> str | None:
    match = BLOCK.fullmatch(entry[0])
    return match["before"] if match else None
