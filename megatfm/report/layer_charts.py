"""Charts by layer: statistics of weights, gradients and activations, and heat maps of the load of experts.

A heat map is a PNG with one pixel per expert and bucket of steps, which the page scales up. So it is small for many
experts, too, and is embedded in the page.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from megatfm.report.charts import Chart, Line, Tick, choose_ticks, encode_png, format_number, make_chart
from megatfm.report.run import Curve, Run

MAX_LAYERS, MAX_LEGEND = 12, 6
"""Largest number of layers in a chart, evenly spaced, and of those with a colour and legend entry; the others are thin
lines."""
RMS = "root mean square"
LAYER_STATISTICS = {
    "gradient": ("Gradients", RMS),
    "activation": ("Activations", RMS),
    "weight": ("Weights", RMS),
    "load_max": ("Busiest expert", "tokens, as a multiple of the mean"),
    "dropped": ("Choices dropped by capacity", "share of all"),
    "entropy": ("Router's entropy", "nats a token"),
}
COLUMNS = 160
"""Largest number of buckets of steps in a heat map."""
COLOUR_STOPS = (
    (-2.0, (18, 45, 112)),
    (-1.0, (92, 141, 227)),
    (0.0, (228, 230, 233)),
    (1.0, (226, 125, 32)),
    (2.0, (130, 36, 8)),
)
"""Colour scale: log2 of the load → RGB. Loads outside are clamped."""
Item = TypeVar("Item")


def make_layer_charts(run: Run) -> list[Chart | None]:
    """Return one chart for each kind of layer statistics; None for those not recorded (see `log.layer_stats_every`)."""
    return [_make_layer_chart(run, kind, *labels) for kind, labels in LAYER_STATISTICS.items()]


def _make_layer_chart(run: Run, kind: str, title: str, unit: str) -> Chart | None:
    paths = [path for path in run.curves if path[0] == "norms" and len(path) == 3 and path[2] == kind]
    paths.sort(key=lambda path: make_natural_key(path[1]))
    charted_layers = pick_evenly(paths, MAX_LAYERS)
    colours = {path: 1 + i for i, path in enumerate(pick_evenly(charted_layers, MAX_LEGEND))}
    lines, colour = [], 1
    for path in charted_layers:
        colour = colours.get(path, colour)
        lines.append(
            Line(shorten_layer_name(path[1]), run.get_curve(*path), colour, "line" if path in colours else "raw")
        )
    selection = f", {len(charted_layers)} of {len(paths)} layers" if len(charted_layers) < len(paths) else ""
    bounds = (0.0, 1.0) if kind == "dropped" else None
    return make_chart(f"{title} by layer", f"{unit}{selection}", lines, from_zero=kind == "dropped", bounds=bounds)


def pick_evenly(items: Sequence[Item], limit: int) -> list[Item]:
    """Return at most `limit` evenly spaced items, with the first and the last."""
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def make_natural_key(layer: str) -> list[tuple[int, str]]:
    """Return a sort key that orders layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", layer)]


def shorten_layer_name(layer: str) -> str:
    """Return a layer's name in charts."""
    return layer.replace(".layers.", " ")


@dataclass(frozen=True)
class HeatMap:
    """A heat map for the template."""

    title: str
    unit: str
    picture: str
    """A data URI."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    summary: str
    """Text alternative for screen readers."""


def make_expert_load_maps(run: Run) -> list[HeatMap]:
    """Return a heat map for each layer with experts, at most MAX_LAYERS, evenly spaced (`log.layer_stats_every`)."""
    layers = {path[1] for path in run.curves if _is_expert_load(path)}
    charted_layers = pick_evenly(sorted(layers, key=make_natural_key), MAX_LAYERS)
    selection = f" · {len(charted_layers)} of {len(layers)} layers" if len(charted_layers) < len(layers) else ""
    return [_make_load_map(run, layer, selection) for layer in charted_layers]


def _is_expert_load(path: tuple[str, ...]) -> bool:
    """Return whether a curve is the load of an expert: norms, layer, load, index of the expert."""
    return len(path) == 4 and path[::2] == ("norms", "load") and path[3].isdecimal()


def _make_load_map(run: Run, layer: str, selection: str) -> HeatMap:
    """Return the heat map of a layer. selection: appended to the unit."""
    paths = (path for path in run.curves if _is_expert_load(path) and path[1] == layer)
    curves = [run.get_curve(*path) for path in sorted(paths, key=lambda path: int(path[3]))]
    first, last = min(min(curve.steps) for curve in curves), max(max(curve.steps) for curve in curves)
    columns = min(COLUMNS, len(curves[0].steps))

    def get_column(step: float) -> float:
        return (columns - 1) * (step - first) / max(last - first, 1)

    rows = [_compute_means(curve, columns, [round(get_column(step)) for step in curve.steps]) for curve in curves]
    height = len(rows)
    labelled_experts = range(0, height, max(1, math.ceil(height / 8)))
    ticks = choose_ticks(first, max(last, first + 1), 6)
    labelled_steps = [step for step in ticks if step == int(step) and step <= last]
    return HeatMap(
        title=f"Load of experts, {shorten_layer_name(layer)}",
        unit=f"choices, as a multiple of the mean{selection}",
        picture=encode_png([[choose_colour(value) for value in row] for row in rows]),
        x_ticks=[Tick(100 * (get_column(step) + 0.5) / columns, _format_tick(step)) for step in labelled_steps],
        y_ticks=[Tick(100 * (expert + 0.5) / height, str(expert)) for expert in labelled_experts],
        summary=_summarize_loads(curves),
    )


def _format_tick(step: float) -> str:
    """Format a step as the script does below its charts: 9,000, 20K, 1.5M."""
    for limit, factor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if step >= limit:
            return f"{step / factor:g}{unit}"
    return f"{step:,.0f}"


def _compute_means(curve: Curve, columns: int, column_of_value: Sequence[int]) -> list[float]:
    """Return the mean of the finite values in each column; NaN for an empty one."""
    sums, counts = [0.0] * columns, [0] * columns
    for column, value in zip(column_of_value, curve.values, strict=True):
        if math.isfinite(value):
            sums[column] += value
            counts[column] += 1
    return [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]


def _summarize_loads(curves: Sequence[Curve]) -> str:
    def describe_load(label: str, value: float, expert: int, step: int) -> str:
        return f"{label}: expert {expert} with {format_number(value)} at step {step:,}"

    loads = [(value, expert, step) for expert, curve in enumerate(curves) for step, value in curve.finite_points]
    if not loads:
        return "nothing finite"
    return "; ".join((describe_load("Busiest", *max(loads)), describe_load("idlest", *min(loads))))


def choose_colour(load: float) -> tuple[int, int, int, int]:
    """Return a load's colour (RGBA): blue below the mean, grey at it, orange above; transparent if unknown."""
    if not math.isfinite(load):
        return 0, 0, 0, 0
    lowest, highest = COLOUR_STOPS[0][0], COLOUR_STOPS[-1][0]
    power = min(max(math.log2(load), lowest), highest) if load > 0 else lowest
    for (low, dark), (high, light) in pairwise(COLOUR_STOPS):
        if power <= high:
            share = (power - low) / (high - low)
            red, green, blue = (round(a + share * (b - a)) for a, b in zip(dark, light, strict=True))
            return red, green, blue, 255
    raise AssertionError("unreachable: the load is clamped to the colour scale")
