"""Charts of what happens inside the model, layer by layer: root mean squares, and what routers do."""

import re
from collections.abc import Sequence
from typing import TypeVar

from megatfm.report.chart import Chart, Line, chart
from megatfm.report.run import Run

MAX_LAYERS, MAX_LEGEND = 12, 6
"""Layers that are drawn, evenly spread, and those among them that get a colour and a place in the legend; the others
are thin lines."""
Path = TypeVar("Path")
RMS = "root mean square"
KINDS = {
    "gradient": ("Gradients", RMS),
    "activation": ("Activations", RMS),
    "weight": ("Weights", RMS),
    "load_max": ("Busiest expert", "tokens, as a multiple of the mean"),
    "dropped": ("Choices dropped by capacity", "share of all"),
    "entropy": ("Router's entropy", "nats a token"),
}


def layer_charts(run: Run) -> list[Chart | None]:
    """One chart for each kind; None where the run has recorded none (see `log.layer_stats_every`)."""
    return [_chart(run, kind, *said) for kind, said in KINDS.items()]


def _chart(run: Run, kind: str, title: str, unit: str) -> Chart | None:
    paths = [path for path in run.curves if path[0] == "norms" and len(path) == 3 and path[2] == kind]
    paths.sort(key=lambda path: natural_key(path[1]))
    drawn = evenly_spaced(paths, MAX_LAYERS)
    colours = {path: 1 + i for i, path in enumerate(evenly_spaced(drawn, MAX_LEGEND))}
    lines, colour = [], 1
    for path in drawn:
        colour = colours.get(path, colour)
        lines.append(
            Line(short_name(path[1]), run.curve(*path), colour, "line" if path in colours else "thin")
        )
    some = f", {len(drawn)} of {len(paths)} layers" if len(drawn) < len(paths) else ""
    return chart(f"{title} by layer", f"{unit}{some}", lines, from_zero=kind == "dropped")


def evenly_spaced(paths: Sequence[Path], most: int) -> list[Path]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(paths) <= most:
        return list(paths)
    return [paths[round(i * (len(paths) - 1) / (most - 1))] for i in range(most)]


def natural_key(layer: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", layer)]


def short_name(layer: str) -> str:
    """As a chart names it."""
    return layer.replace(".layers.", " ")
