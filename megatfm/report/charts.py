"""Charts as data: downsampled and smoothed curves, which the page's script (report.js) draws; and pictures as PNG."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from megatfm.report.run import Curve

MAX_POINTS = 1500
"""Largest number of points of a curve in the page."""

Bounds = tuple[float | None, float]
"""Least and largest possible value of a quantity; None without a least one."""


@dataclass(frozen=True)
class Line:
    """A curve to draw.

    Kinds: `raw` values are drawn behind their `smooth` curve; `dots` marks each point; `other` is another run's curve,
    drawn behind this run's.
    """

    name: str
    curve: Curve
    colour: int = 1
    kind: Literal["line", "raw", "smooth", "dots", "other"] = "line"
    run: int = 0
    """Index of the curve's run on the page."""


@dataclass(frozen=True)
class Tick:
    """A tick of an axis."""

    at: float
    """Position in percent of the width from the left, or of the height from the top."""
    label: str


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line for comparison."""

    name: str
    value: float


@dataclass(frozen=True)
class EventLine:
    """A vertical line for an event of the run."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart: the texts that the template writes, and the data that the page's script draws."""

    title: str
    unit: str
    lines: Sequence[Line]
    reference_lines: Sequence[ReferenceLine]
    summary: str
    """Text alternative for screen readers."""
    n_nonfinite: int
    is_log: bool
    from_zero: bool = False
    bounds: Bounds | None = None
    """End of a linear axis, unless a value lies outside."""
    events: Sequence[EventLine] = ()

    @property
    def legend(self) -> list[Line]:
        """Lines for the legend: all but raw ones, whose smooth curves have the same names."""
        return [line for line in self.lines if line.kind != "raw"]

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step."""
        first = min(line.curve.steps[0] for line in self.lines)
        return first, max(line.curve.steps[-1] for line in self.lines)

    @property
    def data(self) -> dict[str, Any]:
        """Data for report.js as JSON types. `steps`: differences to the previous step; `values`: null if not finite."""
        return {
            "log": self.is_log,
            "zero": self.from_zero,
            "bounds": self.bounds,
            "lines": [_make_line_data(line) for line in self.lines],
            "levels": [[line.name, line.value, format_number(line.value)] for line in self.reference_lines],
            "events": [[event.step, event.kind, event.text] for event in self.events],
        }


def _make_line_data(line: Line) -> dict[str, Any]:
    curve = downsample(line.curve)
    steps, values = list(curve.steps), [float(f"{value:.7g}") for value in curve.values]
    return {
        "name": line.name,
        "colour": line.colour,
        "kind": line.kind,
        "run": line.run,
        "steps": [step - before for before, step in zip([0, *steps], steps, strict=False)],
        "values": [value if math.isfinite(value) else None for value in values],
    }


def make_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    reference_lines: Sequence[ReferenceLine] = (),
    from_zero: bool = False,
    bounds: Bounds | None = None,
) -> Chart | None:
    """Build a chart; None if no value is finite. The y axis is logarithmic if the values span a wide range."""
    lines = [line for line in lines if line.curve.finite]
    if not lines:
        return None
    values = [value for line in lines for value in line.curve.finite] + [line.value for line in reference_lines]
    return Chart(
        title=title,
        unit=unit,
        lines=lines,
        reference_lines=reference_lines,
        summary="; ".join(_summarize(line) for line in lines if line.kind != "raw"),
        n_nonfinite=sum(len(line.curve.values) - len(line.curve.finite) for line in lines if line.kind != "smooth"),
        is_log=not from_zero and min(values) > 0 and max(values) / min(values) > 50,
        from_zero=from_zero,
        bounds=bounds,
    )


def smooth(curve: Curve) -> Curve:
    """Smooth a curve by a moving average over about 4 % of the steps; ignores values that are not finite.

    The window is centred, and narrower at the start: an average over past values would lag behind a falling loss.
    """
    count = len(curve.values)
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in curve.values)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in curve.values)]
    smoothed = []
    for i, value in enumerate(curve.values):
        reach = min(count // 50, i)
        low, high = i - reach, min(i + reach + 1, count)
        mean = (sums[high] - sums[low]) / max(counts[high] - counts[low], 1)
        smoothed.append(mean if math.isfinite(value) else value)
    return Curve(curve.steps, smoothed)


def downsample(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """Reduce a curve to at most `limit` points: its ends, and the lowest and the highest of each bucket."""
    count = len(curve.steps)
    if count <= limit:
        return curve
    indices_kept = {0, count - 1}
    n_buckets = limit // 2 - 1
    for bucket in range(n_buckets):
        indices = range(bucket * count // n_buckets, (bucket + 1) * count // n_buckets)
        finite = [i for i in indices if math.isfinite(curve.values[i])]
        key = curve.values.__getitem__
        indices_kept |= {min(finite, key=key), max(finite, key=key)} if finite else {indices[0]}
    in_order = sorted(indices_kept)
    return Curve([curve.steps[i] for i in in_order], [curve.values[i] for i in in_order])


def format_number(value: float) -> str:
    """Format a number: 0.003, 1.25, 12,500, 3.2 M."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size >= limit * 0.9995:  # so that no unit has four digits
            return f"{value / limit:.3g} {unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _summarize(line: Line) -> str:
    points = line.curve.finite_points
    (first, start), (last, end) = points[0], points[-1]
    return f"{line.name}: {format_number(start)} at step {first:,}, {format_number(end)} at step {last:,}"


def choose_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between two limits, spaced by 1, 2 or 5 times a power of ten."""
    min_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= min_step)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def encode_png(pixels: Sequence[Sequence[tuple[int, int, int, int]]]) -> str:
    """Encode rows of RGBA pixels as a PNG data URI (ISO/IEC 15948, colour type 6)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 6, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in pixels)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"
