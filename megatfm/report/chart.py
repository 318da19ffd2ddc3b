"""Line charts as numbers: ticks, positions and SVG paths. The template draws them, CSS colours them.

Curves live in a 1000 × 1000 box that is stretched to the chart's size; labels are HTML beside it, so text keeps
its size on a phone and on a projector.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from megatfm.report.run import Curve

MAX_POINTS = 1500
BOX = 1000.0


@dataclass(frozen=True)
class Line:
    """One curve to draw: `thin` is raw data behind its `smooth` curve; `dots` marks each point of a line."""

    name: str
    curve: Curve
    colour: int = 1
    kind: Literal["line", "thin", "smooth", "dots"] = "line"
    run: int = 0
    """Which of a page's runs it is of."""


@dataclass(frozen=True)
class Path:
    """A line as the template draws it. colour: number of a CSS class; run: number of the run that it is of."""

    name: str
    colour: int
    kind: str
    d: str
    """SVG path in the box; a step whose value is not finite breaks it."""
    marks: str = ""
    """A dot on each point, for `dots`."""
    run: int = 0
    steps: str = ""
    """How far the step of each point of `d` is behind the last, so that the page shows what was recorded."""
    values: str = ""
    """The value of each, likewise."""


@dataclass(frozen=True)
class Tick:
    """A number written at an axis."""

    at: float
    """Percent of the width from the left, or of the height from the top."""
    label: str


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    name: str
    value: float
    at: float = 0.0
    label: str = ""
    """What is written at the line; levels that lie too close together share the label of the highest."""


@dataclass(frozen=True)
class Mark:
    """Something that happened to the run: a vertical line."""

    at: float
    """Its place in the box."""
    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """All that the template needs to draw one chart."""

    title: str
    unit: str
    paths: list[Path]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    levels: list[Level]
    summary: str
    """What the chart shows, in words, for those who can't see it."""
    broken: int
    """Values that are not finite."""
    x_range: tuple[float, float]
    """Limits of the axis of steps."""
    log: bool
    from_zero: bool = False
    marks: Sequence[Mark] = ()

    @property
    def legend(self) -> list[Path]:
        """Paths to name beside the chart: raw data lie behind a smooth curve of the same name."""
        return [path for path in self.paths if path.kind != "thin"]


def chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    levels: Sequence[Level] = (),
    from_zero: bool = False,
    label: Callable[[float], str] | None = None,
) -> Chart | None:
    """Lay out a chart; None when there is nothing finite to draw. The y axis turns logarithmic for a wide range."""
    lines = [line for line in lines if line.curve.finite]
    if not lines:
        return None
    label = label or format_number
    values = [value for line in lines for value in line.curve.finite] + [level.value for level in levels]
    log = not from_zero and min(values) > 0 and max(values) / min(values) > 50
    scale = math.log10 if log else float
    low, high = _limits(scale(min(values)), scale(max(values)), from_zero)
    first = min(line.curve.steps[0] for line in lines)
    last = max(max(line.curve.steps[-1] for line in lines), first + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        return BOX * (step - first) / (last - first), BOX * (1 - (scale(value) - low) / (high - low))

    def height(value: float) -> float:
        return place(first, value)[1] * 100 / BOX

    ticks = _log_ticks(low, high) if log else round_ticks(low, high, 5)
    steps = [step for step in round_ticks(first, last, 6) if step == int(step)]
    return Chart(
        title=title,
        unit=unit,
        paths=[_draw(line, place) for line in lines],
        x_ticks=[Tick(place(step, values[0])[0] * 100 / BOX, format_number(step)) for step in steps],
        y_ticks=[Tick(height(value), label(value)) for value in ticks],
        levels=_labelled([Level(level.name, level.value, height(level.value)) for level in levels]),
        summary="; ".join(_words(line, label) for line in lines if line.kind != "thin"),
        broken=sum(
            len(line.curve.values) - len(line.curve.finite) for line in lines if line.kind != "smooth"
        ),
        x_range=(first, last),
        log=log,
        from_zero=from_zero,
    )


def _labelled(levels: Sequence[Level]) -> list[Level]:
    """Levels from the top, with labels that don't overlap: a line of text is about a tenth of a small chart."""
    groups: list[list[Level]] = []
    for level in sorted(levels, key=lambda level: level.at):
        if groups and level.at - groups[-1][0].at < 10:
            groups[-1].append(level)
        else:
            groups.append([level])
    return [
        replace(
            level,
            label="" if place else " · ".join(f"{one.name} {format_number(one.value)}" for one in group),
        )
        for group in groups
        for place, level in enumerate(group)
    ]


def smooth(curve: Curve) -> Curve:
    """Mean over about 4 % of the steps around each; what is not finite is stepped over.

    The window is centred, and narrow at the start: a moving average of the past would lag behind a falling loss
    and look worse than it is.
    """
    count = len(curve.values)
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in curve.values)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in curve.values)]
    smoothed = []
    for i, value in enumerate(curve.values):
        reach = min(count // 50, i)
        low, high = i - reach, min(i + reach + 1, count)
        smoothed.append(
            (sums[high] - sums[low]) / (counts[high] - counts[low]) if math.isfinite(value) else value
        )
    return Curve(curve.steps, smoothed)


def thin_out(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """At most `limit` points that look the same: of each stretch its lowest and its highest, so spikes stay."""
    count = len(curve.steps)
    if count <= limit:
        return curve
    chosen: list[int] = []
    stretches = limit // 2
    for stretch in range(stretches):
        part = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        finite = [i for i in part if math.isfinite(curve.values[i])]
        key = curve.values.__getitem__
        chosen += sorted({min(finite, key=key), max(finite, key=key)}) if finite else [part[0]]
    return Curve([curve.steps[i] for i in chosen], [curve.values[i] for i in chosen])


def format_number(value: float) -> str:
    """A number as people write it: 0.003, 1.25, 12,500, 3.2 M."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.3g} {unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _draw(line: Line, place: Callable[[float, float], tuple[float, float]]) -> Path:
    curve = thin_out(line.curve)
    path, marks, steps, values, pen_down = [], [], list[int](), list[str](), False
    for step, value in zip(curve.steps, curve.values, strict=True):
        if not math.isfinite(value):
            pen_down = False
            continue
        x, y = place(step, value)
        dot = f"M{x:.1f},{y:.1f}h0"  # a stroke of no length: under round caps a dot, also for a lone point
        path.append(f"L{x:.1f},{y:.1f}" if pen_down else dot)
        marks.append(dot)
        steps.append(step)
        values.append(f"{value:.7g}".removeprefix("0"))
        pen_down = True
    return Path(
        line.name,
        line.colour,
        line.kind,
        "".join(path),
        "".join(marks) if line.kind == "dots" else "",
        line.run,
        " ".join(str(step - before) for before, step in zip([0, *steps], steps, strict=False)),
        " ".join(values),
    )


def _words(line: Line, label: Callable[[float], str]) -> str:
    points = [(s, v) for s, v in zip(line.curve.steps, line.curve.values, strict=True) if math.isfinite(v)]
    (first, start), (last, end) = points[0], points[-1]
    return f"{line.name}: {label(start)} at step {first:,}, {label(end)} at step {last:,}"


def _limits(low: float, high: float, from_zero: bool) -> tuple[float, float]:
    if from_zero:
        low = min(low, 0.0)
    margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return (low if from_zero and low == 0 else low - margin), high + margin


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two limits, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between 10^low and 10^high, with their 2s and 5s when there are few."""
    factors = (1,) if high - low > 3 else (1, 2, 5)
    every = max(1, round((high - low) / 6))
    exponents = range(math.floor(low), math.floor(high) + 1, every)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]
