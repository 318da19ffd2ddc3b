"""Draws accuracy against the number of labels, with and without pretraining, from `benchmarks/finetuning.py`'s results.

`python docs/draw_results.py` writes docs/images/pretraining-helps.svg anew; a test says when that is due.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FIGURE = Path(__file__).parent / "images" / "pretraining-helps.svg"
ROW = re.compile(r"^\| (encoder|decoder)-\d+ \| topics, (\d+), \d+ \| (.+?) \| ([\d.]+) ± ([\d.]+) \|", re.MULTILINE)
COLOURS = {"pretrained": "#3f51b5", "random weights": "#b5533f", "frozen": "#7a7a7a"}
"""Way to fine-tune → its colour; others are left to the table."""
WIDTH, HEIGHT, LEFT, TOP, GAP = 230, 180, 44, 26, 40
MAX_ACCURACY, LABELS = 0.6, (100, 1000, 10_000)


class Point(NamedTuple):
    """Mean accuracy over seeds and its standard deviation, for a number of labels."""

    n_labels: int
    mean: float
    deviation: float


def read_points(page: str) -> dict[str, dict[str, list[Point]]]:
    """Return model → way to fine-tune → points, from the table of a page."""
    points: dict[str, dict[str, list[Point]]] = {"encoder": {}, "decoder": {}}
    for model, n_labels, arm, mean, deviation in ROW.findall(page):
        if arm in COLOURS:
            point = Point(int(n_labels), float(mean), float(deviation))
            points[model].setdefault(arm, []).append(point)
    return {model: {arm: sorted(at) for arm, at in arms.items()} for model, arms in points.items()}


def get_place(point: Point, left: int) -> tuple[float, float]:
    """Return x and y of a point in a panel that begins at `left`; labels have a logarithmic scale."""
    share = math.log10(point.n_labels / LABELS[0]) / math.log10(LABELS[-1] / LABELS[0])
    return left + 12 + share * (WIDTH - 24), TOP + HEIGHT * (1 - point.mean / MAX_ACCURACY)


def draw_panel(model: str, arms: dict[str, list[Point]], left: int) -> list[str]:
    """Return the elements of one model's panel."""
    lines = [
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + WIDTH / 2}" y="{TOP - 8}" text-anchor="middle" font-weight="bold">{model}</text>',
    ]
    for n_labels in LABELS:
        x, _ = get_place(Point(n_labels, 0, 0), left)
        lines.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{n_labels:,}</text>')
    for percent in range(0, 61, 20):
        _, y = get_place(Point(LABELS[0], percent / 100, 0), left)
        lines.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for arm, points in arms.items():
        places = [get_place(point, left) for point in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        lines.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[arm]}" stroke-width="2"/>')
        for (x, y), point in zip(places, points, strict=True):
            reach = HEIGHT * point.deviation / MAX_ACCURACY
            bar = f"M{x:.1f} {y - reach:.1f}v{2 * reach:.1f}"
            lines.append(f'<path d="{bar}" stroke="{COLOURS[arm]}" stroke-width="5" opacity="0.5"/>')
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[arm]}"/>')
    return lines


def draw() -> str:
    """Return the figure of the newest results, as SVG."""
    page = max(RESULTS.glob("*-tasks-help.md")).read_text(encoding="utf-8")
    width, height = 2 * (LEFT + WIDTH) + GAP // 2, TOP + HEIGHT + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (model, arms) in enumerate(read_points(page).items()):
        lines += draw_panel(model, arms, LEFT + index * (LEFT + WIDTH))
    x = LEFT
    for arm, colour in COLOURS.items():
        lines.append(f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17}" y="{height - 12}">{arm}</text>')
        x += 40 + 7 * len(arm)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
