"""An estimate as files: one self-contained page, of memory by rank, time by cause, the schedule's timeline and scaling
curves; and a config of the layout that extends the estimated one, with the words that launch it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, StrictUndefined

from megatfm.config import load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.estimate.devices import GIB, Cluster
from megatfm.estimate.estimator import Estimate, Estimator, resolve_precision
from megatfm.estimate.stalls import describe_failures
from megatfm.estimate.text import describe_fit, describe_run, describe_speed, list_causes
from megatfm.files import atomic_write, name_write_errors

WIDTH, ROW = 1000.0, 26.0
"""Width of a drawing and height of its rows, in its own units."""
MAX_PASSES = 8000
"""Largest number of passes in a timeline, which shows the first of longer steps."""
PASS_PIXELS = 8
"""Mean width of a pass, below which a narrow window scrolls."""
PASS_KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
"""Kind of pass → its name in the legend."""
SCALES = (0.25, 0.5, 1, 2, 4, 8)
"""GPUs of the scaling curves, as multiples of the estimate's."""


@dataclass(frozen=True)
class Box:
    """Rectangle of a drawing. kind: class in the style sheet; title: text under the pointer."""

    x: float
    y: float
    width: float
    kind: str
    title: str


@dataclass(frozen=True)
class Drawing:
    """Rows of boxes.

    legend: kind of box → its name. limit: x of a vertical line, such as the device's memory. min_width: in pixels.
    """

    rows: Sequence[str]
    boxes: Sequence[Box]
    legend: Mapping[str, str]
    limit: float | None = None
    note: str = ""
    min_width: int = 0

    @property
    def height(self) -> float:
        """Height of all rows."""
        return ROW * len(self.rows)


@dataclass(frozen=True)
class ScalePoint:
    """Estimate with another number of GPUs. refusal: reason why the layout does not allow it."""

    gpus: int
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    gib: float = 0.0
    fits: bool = False
    refusal: str = ""


def write_estimate_page(opened: Estimator, estimate: Estimate, path: Path) -> None:
    """Write the page. Raises UsageError for a file that exists, MegatfmError if it can't be written."""
    if path.exists():
        raise UsageError(f"--html {path}: the file exists: give another name")
    page = render_estimate(estimate, estimate_scaling(opened, estimate))
    with name_write_errors(path):
        atomic_write(path, page)


def render_estimate(estimate: Estimate, points: Sequence[ScalePoint]) -> str:
    """Return the page as HTML."""
    folder = files("megatfm.estimate")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    accepted = [point for point in points if not point.refusal]
    curve, ideal = compute_scaling_lines(accepted)
    return template.render(
        style=files("megatfm.report").joinpath("report.css").read_text(encoding="utf-8"),
        title=estimate.config.name,
        lines=[*describe_run(estimate), describe_fit(estimate), *describe_speed(estimate), describe_failures(estimate)],
        memory=draw_memory(estimate),
        causes=[(name, seconds, 100 * seconds / estimate.time.step) for name, seconds in list_causes(estimate.time)],
        timeline=draw_timeline(estimate),
        points=points,
        curve=curve,
        ideal=ideal,
        ends=[*accepted[:1], *accepted[-1:]],
        row=ROW,
        width=WIDTH,
    )


def draw_memory(estimate: Estimate) -> Drawing:
    """Draw a stacked bar of each pipeline rank's memory, and a line at the device's."""
    device = estimate.cluster.device.memory_bytes
    scale = WIDTH / (1.02 * max(device, estimate.worst.total))
    boxes, rows, legend = list[Box](), list[str](), dict[str, str]()
    for row, rank in enumerate(estimate.memory):
        rows.append(f"rank {rank.pipeline_rank}: {rank.total / GIB:.1f} GiB")
        x = 0.0
        for name, n_bytes in rank.parts.items():
            kind = name.partition(" ")[0]
            boxes.append(Box(x, row * ROW, n_bytes * scale, kind, f"{name}: {n_bytes / GIB:.2f} GiB"))
            legend |= {kind: name} if n_bytes else {}
            x += n_bytes * scale
    return Drawing(rows, boxes, legend, device * scale)


def draw_timeline(estimate: Estimate) -> Drawing | None:
    """Draw the simulated passes of each pipeline rank; None without a pipeline."""
    timeline = estimate.timeline
    if timeline is None:
        return None
    passes = sorted(timeline.passes, key=lambda p: p.start)[:MAX_PASSES]
    end = max(p.end for p in passes)
    boxes = [
        Box(
            p.start / end * WIDTH,
            p.rank * ROW,
            (p.end - p.start) / end * WIDTH,
            f"pass-{p.kind}",
            f"{p.kind} of micro-batch {p.microbatch}, stage {p.stage}: {1e3 * p.start:.1f} to {1e3 * p.end:.1f} ms",
        )
        for p in passes
    ]
    rows = [f"rank {rank}: {100 * (1 - busy / timeline.seconds):.0f} % idle" for rank, busy in enumerate(timeline.busy)]
    is_cut = len(passes) < len(timeline.passes)
    drawn_passes = f"the first {len(passes):,} of {len(timeline.passes):,} passes" if is_cut else "all passes"
    note = f"{drawn_passes} take {end:.3g} s"
    kinds = {p.kind for p in passes}
    legend = {f"pass-{kind}": name for kind, name in PASS_KINDS.items() if kind in kinds}
    return Drawing(rows, boxes, legend, note=note, min_width=PASS_PIXELS * len(passes) // len(rows))


def estimate_scaling(opened: Estimator, estimate: Estimate) -> list[ScalePoint]:
    """Estimate the same batch on other numbers of GPUs; `dp_shard` takes those that the other axes leave."""
    points: list[ScalePoint] = []
    for scale in SCALES:
        gpus = math.ceil(estimate.cluster.gpus * scale)
        if any(point.gpus == gpus for point in points):
            continue
        cluster = Cluster(estimate.cluster.device, estimate.cluster.node, gpus)
        config = estimate.config.model_copy(
            update={"parallel": estimate.config.parallel.model_copy(update={"dp_shard": -1})}
        )
        try:
            scaled = opened.with_cluster(cluster).estimate(config)
        except UsageError as error:
            points.append(ScalePoint(gpus, refusal=str(error).partition(";")[0]))
            continue
        points.append(ScalePoint(gpus, scaled.tokens_per_second, scaled.mfu[0], scaled.worst.total / GIB, scaled.fits))
    return points


def compute_scaling_lines(points: Sequence[ScalePoint]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the curve of tokens per second by GPUs, and the line of perfect scaling from its first point.

    Points are in per cent of a drawing with logarithmic axes.
    """
    if len(points) < 2:
        return [], []
    first, last = points[0], points[-1]
    span = math.log(last.gpus / first.gpus)

    def place(gpus: int, tokens_per_second: float) -> tuple[float, float]:
        growth = math.log(tokens_per_second / first.tokens_per_second)
        return 100 * math.log(gpus / first.gpus) / span, 100 - 100 * growth / span

    curve = [place(point.gpus, point.tokens_per_second) for point in points]
    ideal = [place(p.gpus, first.tokens_per_second * p.gpus / first.gpus) for p in (first, last)]
    return curve, ideal


# ------------------------------------------------------------------------------------------------ layout


def render_layout_config(source: str, estimate: Estimate) -> str:
    """Return a config file's text: the keys in which the estimate differs from `source`, a preset's name or a path."""
    base = resolve_precision(load_config(source, []), estimate.cluster.device)
    changed = _find_changed_keys(base.model_dump(exclude_none=True), estimate.config.model_dump(exclude_none=True))
    extends = str(Path(source).resolve()) if Path(source).exists() else source
    return tomli_w.dumps({"extends": extends, "name": estimate.config.name, **changed})


def _find_changed_keys(base: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a nested table whose values differ from the base's."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        base_value = base.get(key)
        if isinstance(value, dict) and isinstance(base_value, dict):
            if nested := _find_changed_keys(base_value, value):
                changed[key] = nested
        elif value != base_value:
            changed[key] = list(value) if isinstance(value, tuple) else value
    return changed


def write_layout(source: str, estimate: Estimate, path: Path) -> None:
    """Write the config, and load it as a check.

    Raises UsageError for a file that exists, MegatfmError if it can't be written.
    """
    if path.exists():
        raise UsageError(f"--write {path}: the file exists: give another name")
    with name_write_errors(path):
        atomic_write(path, render_layout_config(source, estimate))
    loaded = resolve_precision(load_config(str(path), []), estimate.cluster.device)
    for section in ("parallel", "model", "data", "train"):
        if getattr(loaded, section) != getattr(estimate.config, section):
            raise MegatfmError(
                f"{path}: [{section}] loads with other values than the estimate's: set the layout by hand"
            )


def make_launch_arguments(path: Path, cluster: Cluster) -> list[str]:
    """Return the arguments of `megatfm launch` that start the config.

    Raises UsageError for GPUs that do not divide over the nodes, on each of which SLURM starts as many ranks.
    """
    gpus, nodes = cluster.gpus, cluster.nodes
    if gpus % nodes:
        raise UsageError(
            f"--write: {gpus} GPUs do not divide over {nodes} nodes: choose --gpus {gpus - gpus % nodes} or "
            f"{gpus + -gpus % nodes}, or --gpus-per-node"
        )
    return [str(path), "--slurm", "--nodes", str(nodes), "--gpus-per-node", str(gpus // nodes)]
