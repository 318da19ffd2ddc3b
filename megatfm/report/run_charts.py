"""Charts of a run: curves, parts of a step's time, statistics of layers, and load of experts.

A heat map is a PNG with one pixel per expert and bucket of steps, which the page scales up. So it is small for many
experts, too, and is embedded in the page.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from megatfm.report.charts import (
    Chart,
    EventLine,
    Line,
    Tick,
    choose_ticks,
    encode_png,
    format_number,
    make_chart,
    smooth,
)
from megatfm.report.evaluation_charts import (
    describe_metric,
    get_loss_unit,
    list_baselines,
    make_position_charts,
    make_task_charts,
)
from megatfm.report.run import Curve, Run

MAX_EVENTS = 200
"""Largest number of events that are shown: the last ones."""
EVENT_KINDS = ("stopped", "resumed", "skipped", "rolled back", "spike", "failed")
GIB = 2**30
STEP_PARTS = {
    "passes": "forward and backward",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "other": "checks and the like",
}
"""Key of `step_parts` in metrics.jsonl → its name."""
BETWEEN_STEPS = {"evaluation_seconds": "evaluation", "save_seconds": "saving"}
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


@dataclass(frozen=True)
class TimeShare:
    """A part of a run's time: seconds, share of the total (0 to 1), and index of its colour."""

    name: str
    seconds: float
    share: float
    colour: int


@dataclass(frozen=True)
class RunLines:
    """Lines of a run's curves, each with those of other runs behind. compared: name → run."""

    run: Run
    compared: Mapping[str, Run]

    def list_compared(self, *path: str, name: str = "", is_smooth: bool = False) -> list[Line]:
        """Return the curves at a path of the compared runs. name: appended to the names of the runs."""
        curves = [(run_name, run.get_curve(*path)) for run_name, run in self.compared.items()]
        return [
            Line(run_name + name, smooth(curve) if is_smooth else curve, 6 - i % 5, "other", i + 1)
            for i, (run_name, curve) in enumerate(curves)
        ]

    def list_evaluated(self, *key: str) -> list[Line]:
        """Return the curves of a metric on each validation set."""
        names = self.run.validation_sets
        lines = [
            Line(name, self.run.get_curve("evaluation", name, *key), 2 + i % 5, "dots") for i, name in enumerate(names)
        ]
        return lines + [
            line for name in names for line in self.list_compared("evaluation", name, *key, name=f", {name}")
        ]

    def list_smoothed(self, name: str, key: str) -> list[Line]:
        """Return a raw curve and its smooth one."""
        curve = self.run.get_curve(key)
        return [
            Line(name, curve, kind="raw"),
            Line(name, smooth(curve), kind="smooth"),
            *self.list_compared(key, is_smooth=True),
        ]


def make_run_charts(run: Run, compared: Mapping[str, Run] | None = None) -> list[Chart]:
    """Return the charts of the curves that the run has. compared: name → run whose curves are drawn behind."""
    lines = RunLines(run, compared or {})
    terms = [Line(name, smooth(run.get_curve("terms", name)), 1 + i % 6) for i, name in enumerate(run.loss_terms)]
    baselines = [line for name in run.validation_sets for line in list_baselines(run, name)]
    candidates = (
        make_chart(
            "Loss",
            get_loss_unit(run),
            [*lines.list_smoothed("training", "loss"), *lines.list_evaluated("loss")],
        ),
        make_chart("Terms of the loss", "mean over their targets", terms),
        make_source_chart(run),
        make_chart("Bits per byte", "held-out text", lines.list_evaluated("bits_per_byte"), reference_lines=baselines),
        *(
            make_chart(*describe_metric(metric), lines.list_evaluated("metrics", metric))
            for metric in run.evaluation_metrics
        ),
        *make_task_charts(run, lines.compared),
        *make_position_charts(run),
        make_chart("Gradient norm", "before clipping", lines.list_smoothed("gradient norm", "grad_norm")),
        make_chart(
            "Learning rate",
            "",
            [Line("learning rate", run.get_curve("lr")), *lines.list_compared("lr")],
            from_zero=True,
        ),
        make_chart("Speed", "tokens per second", lines.list_smoothed("speed", "tokens_per_second"), from_zero=True),
        make_chart(
            "Utilization (MFU)",
            f"% of {run.environment.get('peak', 'what the devices could do')}",
            list_utilization(run),
            from_zero=True,
        ),
        make_step_time_chart(run),
        make_chart("Memory", "GiB", [Line("memory", scale(run.get_curve("memory_bytes"), 1 / GIB))], from_zero=True),
        make_mixture_chart(run),
        *make_layer_charts(run),
    )
    return [replace(chart, events=list_event_lines(run, *chart.steps)) for chart in candidates if chart]


def list_event_lines(run: Run, first: int, last: int) -> list[EventLine]:
    """Return the events to mark between two steps: stops, resumes, rollbacks, skipped steps and failures."""
    lines: dict[tuple[str, int], EventLine] = {}
    for event in run.events:
        step, kind = event.get("step"), event.get("event")
        if isinstance(step, int) and kind in EVENT_KINDS and first <= step <= last:
            lines[str(kind), step] = EventLine(step, str(kind), str(event.get("detail", "")))
    return list(lines.values())[-MAX_EVENTS:]


def make_mixture_chart(run: Run) -> Chart | None:
    """Return the chart of each corpus's share of the rows, for a mixture."""
    points, phases = run.get_curve("tokens").finite_points, _list_mixture_phases(run)
    sources = phases[0][1] if phases else {}

    def compute_percentage(name: str, n_tokens: float) -> float:
        weights = [weights for begin, weights in phases if begin <= n_tokens][-1]
        return 100 * weights.get(name, 0.0) / sum(weights.values())

    def compute_curve(name: str) -> Curve:
        return Curve([step for step, _ in points], [compute_percentage(name, n_tokens) for _, n_tokens in points])

    lines = [Line(name, compute_curve(name), 1 + i % 6) for i, name in enumerate(sources)]
    return make_chart("Mixture", "% of the rows", lines, from_zero=True)


def _list_mixture_phases(run: Run) -> list[tuple[float, dict[str, float]]]:
    """Return the mixture's phases, (first token, source → weight); none if they are invalid, which is noted."""
    sources = run.get_section("data", "mixture")
    if not sources:
        return []
    try:
        phases = [(-math.inf, {name: float(source["weight"]) for name, source in sources.items()})]
        for change in run.get_section("data").get("mixture_schedule") or []:
            weights = {name: float(weight) for name, weight in change["weights"].items()}
            phases.append((float(change["tokens"]), weights))
    except (KeyError, TypeError, ValueError, AttributeError):
        phases = []
    if not phases or not all(sum(weights.values()) > 0 for _, weights in phases):
        run.notes.append("config.toml: the mixture's weights are not shown, since they are invalid")
        return []
    return phases


def make_source_chart(run: Run) -> Chart | None:
    """Return the chart of the training loss of each corpus of a mixture."""
    names = [path[1] for path in run.curves if len(path) == 2 and path[0] == "loss_by_source"]
    lines = [Line(name, smooth(run.get_curve("loss_by_source", name)), 1 + i % 6) for i, name in enumerate(names)]
    return make_chart("Training loss by source", "nats per token", lines)


def list_utilization(run: Run) -> list[Line]:
    """Return the MFU and, where a causal mask hides half of attention, the MFU without that half."""
    curve, causal = run.get_curve("mfu"), run.get_curve("mfu_causal")
    lines = [Line("with all of attention", smooth(scale(curve, 100)), kind="smooth")]
    if causal.values != curve.values:
        lines.append(Line("without its masked half", smooth(scale(causal, 100)), 2, "smooth"))
    return lines


def make_step_time_chart(run: Run) -> Chart | None:
    """Return the chart of the parts of each step's time; for older runs, of the wait for data only."""
    if not run.get_curve("step_parts", "passes").steps:
        wait = _compute_step_share(run, "data_wait_seconds")
        lines = [Line("wait", wait, kind="raw"), Line("wait", smooth(wait), kind="smooth")]
        return make_chart("Waiting for data", "% of the step", lines, from_zero=True)
    lines = [
        Line(name, smooth(_compute_step_share(run, "step_parts", key)), 1 + i, "smooth")
        for i, (key, name) in enumerate(STEP_PARTS.items())
    ]
    return make_chart("Where a step's time goes", "% of the step", lines, from_zero=True)


def compute_time_shares(run: Run) -> list[TimeShare]:
    """Return the parts of the run's total time; empty if it didn't record them."""
    seconds = {name: sum(run.get_curve("step_parts", key).finite) for key, name in STEP_PARTS.items()}
    seconds |= {name: sum(run.get_curve(key).finite) for key, name in BETWEEN_STEPS.items()}
    total = sum(seconds.values())
    if not run.get_curve("step_parts", "passes").steps or not total:
        return []
    return [
        TimeShare(name, part_seconds, part_seconds / total, 1 + i)
        for i, (name, part_seconds) in enumerate(seconds.items())
        if part_seconds
    ]


def _compute_step_share(run: Run, *path: str) -> Curve:
    """Return a part of each step's time in percent."""
    part_curve, steps = run.get_curve(*path), run.get_curve("step_seconds")
    seconds = dict(zip(steps.steps, steps.values, strict=True))
    percentages = {
        step: 100 * value / seconds[step]
        for step, value in zip(part_curve.steps, part_curve.values, strict=True)
        if seconds.get(step)
    }
    return Curve(list(percentages), list(percentages.values()))


def scale(curve: Curve, factor: float) -> Curve:
    """Return the curve with all values multiplied by a factor, for another unit."""
    return Curve(curve.steps, [value * factor for value in curve.values])


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
            Line(
                shorten_layer_name(path[1]),
                run.get_curve(*path),
                colour,
                "line" if path in colours else "raw",
            )
        )
    selection = f", {len(charted_layers)} of {len(paths)} layers" if len(charted_layers) < len(paths) else ""
    return make_chart(f"{title} by layer", f"{unit}{selection}", lines, from_zero=kind == "dropped")


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

    def column_of(step: float) -> float:
        return (columns - 1) * (step - first) / max(last - first, 1)

    rows = [_compute_means(curve, columns, [round(column_of(step)) for step in curve.steps]) for curve in curves]
    height = len(rows)
    labelled_experts = range(0, height, max(1, math.ceil(height / 8)))
    ticks = choose_ticks(first, max(last, first + 1), 6)
    labelled_steps = [step for step in ticks if step == int(step) and step <= last]
    return HeatMap(
        title=f"Load of experts, {shorten_layer_name(layer)}",
        unit=f"choices, as a multiple of the mean{selection}",
        picture=encode_png([[choose_colour(value) for value in row] for row in rows]),
        x_ticks=[Tick(100 * (column_of(step) + 0.5) / columns, format_number(step)) for step in labelled_steps],
        y_ticks=[Tick(100 * (expert + 0.5) / height, str(expert)) for expert in labelled_experts],
        summary=_summarize_loads(curves),
    )


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
