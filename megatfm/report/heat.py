"""Heat maps: how experts are loaded over the steps, a picture for each layer.

A picture is a PNG of one pixel for each expert and stretch of steps, which the page stretches: of 256 experts as small
as of 8, and the page stays one file.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatfm.report.chart import Tick, format_number, round_ticks
from megatfm.report.layers import MAX_LAYERS, evenly_spaced, natural_key, short_name
from megatfm.report.run import Curve, Run

COLUMNS = 160
"""Stretches of steps, at most."""
COLOUR_STOPS = (
    (-2.0, (18, 45, 112)),
    (-1.0, (92, 141, 227)),
    (0.0, (228, 230, 233)),
    (1.0, (226, 125, 32)),
    (2.0, (130, 36, 8)),
)
"""By the logarithm to base 2 of the load; beyond the ends, as at them."""
Picture = Sequence[Sequence[float]]
"""Rows of values from the top; NaN where nothing is known."""


@dataclass(frozen=True)
class HeatMap:
    """All that the template needs to draw one."""

    title: str
    unit: str
    picture: str
    """A data URI."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    summary: str
    """What it shows, in words."""


def expert_load_maps(run: Run) -> list[HeatMap]:
    """One for each layer with experts, or for some of many, evenly spread (see `log.layer_stats_every`)."""
    layers = {path[1] for path in run.curves if path[0] == "norms" and len(path) == 4 and path[2] == "load"}
    drawn = evenly_spaced(sorted(layers, key=natural_key), MAX_LAYERS)
    some = f" · {len(drawn)} of {len(layers)} layers" if len(drawn) < len(layers) else ""
    return [_map(run, layer, some) for layer in drawn]


def _map(run: Run, layer: str, some: str) -> HeatMap:
    keys = sorted(
        (path for path in run.curves if path[:3] == ("norms", layer, "load")), key=lambda path: int(path[3])
    )
    curves = [run.curve(*key) for key in keys]
    first, last = curves[0].steps[0], curves[0].steps[-1]
    columns = min(COLUMNS, len(curves[0].steps))

    def across(step: float) -> float:
        return (columns - 1) * (step - first) / max(last - first, 1)

    rows = [_means(curve, columns, [round(across(step)) for step in curve.steps]) for curve in curves]
    height = len(rows)
    named = range(0, height, max(1, math.ceil(height / 8)))
    steps = [
        step for step in round_ticks(first, max(last, first + 1), 6) if step == int(step) and step <= last
    ]
    return HeatMap(
        title=f"Load of experts, {short_name(layer)}",
        unit=f"choices, as a multiple of the mean{some}",
        picture=png([[colour(value) for value in row] for row in rows]),
        x_ticks=[Tick(100 * (across(step) + 0.5) / columns, format_number(step)) for step in steps],
        y_ticks=[Tick(100 * (place + 0.5) / height, str(place)) for place in named],
        summary=_words(curves),
    )


def _means(curve: Curve, columns: int, places: Sequence[int]) -> list[float]:
    """Of the values in each column."""
    sums, counts = [0.0] * columns, [0] * columns
    for place, value in zip(places, curve.values, strict=True):
        if math.isfinite(value):
            sums[place] += value
            counts[place] += 1
    return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]


def _words(curves: Sequence[Curve]) -> str:
    def said(which: str, value: float, expert: int, step: int) -> str:
        return f"{which}: expert {expert} with {format_number(value)} at step {step:,}"

    every = [
        (value, expert, step)
        for expert, curve in enumerate(curves)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if math.isfinite(value)
    ]
    if not every:
        return "nothing finite"
    return "; ".join((said("Busiest", *max(every)), said("idlest", *min(every))))


def colour(load: float) -> tuple[int, int, int, int]:
    """Of a load: blue where it is below the mean, grey at it, orange above; transparent where it is not known."""
    if not math.isfinite(load):
        return 0, 0, 0, 0
    power = (
        min(max(math.log2(load), COLOUR_STOPS[0][0]), COLOUR_STOPS[-1][0]) if load > 0 else COLOUR_STOPS[0][0]
    )
    for (low, dark), (high, light) in pairwise(COLOUR_STOPS):
        if power <= high:
            share = (power - low) / (high - low)
            red, green, blue = (round(a + share * (b - a)) for a, b in zip(dark, light, strict=True))
            return red, green, blue, 255
    raise AssertionError("a load is within the colours' ends")


def png(pixels: Sequence[Sequence[tuple[int, int, int, int]]]) -> str:
    """Rows of red, green, blue and opacity as a data URI (ISO/IEC 15948, colour type 6)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 6, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in pixels)
    file = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
