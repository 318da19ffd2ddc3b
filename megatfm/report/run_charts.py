"""Charts of a run by step: curves of the loss and of evaluations, speed, memory, and where the time goes; titles and
units of metrics."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from megatfm.report.charts import Bounds, Chart, EventLine, Line, ReferenceLine, make_chart, smooth
from megatfm.report.layer_charts import make_layer_charts
from megatfm.report.run import Curve, Run, iter_numbers

MAX_EVENTS = 200
"""Largest number of events that are shown: the last ones."""
EVENT_KINDS = ("stopped", "resumed", "skipped", "rolled back", "spike", "failed")
GIB = 2**30
PERCENT = (0.0, 100.0)
STEP_PARTS = {
    "passes": "forward and backward",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "other": "checks and the like",
}
"""Key of `step_parts` in metrics.jsonl → its name."""
BETWEEN_STEPS = {"evaluation_seconds": "evaluation", "save_seconds": "saving"}
METRICS = {
    "top1": ("Accuracy", "share of held-out images"),
    "top5": ("Top-5 accuracy", "share of held-out images"),
    "accuracy": ("Accuracy", "share of held-out examples"),
}
"""Metric → (title, unit). Other metrics are shown by their names."""
BOUNDS: Mapping[str, Bounds] = {
    r"(top\d+|accuracy|f1|exact_match|recall|reciprocal_rank)(_\w+)?": (0.0, 1.0),
    r"matthews|pearson|spearman": (-1.0, 1.0),
    "r2": (None, 1.0),
}
"""Pattern of metrics → their least and largest possible value; None where there is none."""
LOSS_UNITS = {
    "image_classification": "nats per image",
    **dict.fromkeys(("text_classification", "multiple_choice", "span_extraction"), "mean over labelled examples"),
    "preference": "nats per pair",
    "contrastive": "mean over pairs",
    "masked_image": "mean squared error of masked pixels",
    "simmim": "mean absolute error of masked pixels",
}
"""Objective → unit of its loss. That of the others is nats per token."""
TASK_METRICS = {
    "bits_per_byte": ("Right answers of tasks", "bits per byte"),
    "accuracy": ("Accuracy on tasks", "share of questions"),
    "accuracy_per_byte": ("Accuracy on tasks, by likelihood per byte", "share of questions"),
}


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
            "Loss", get_loss_unit(run), [*lines.list_smoothed("training", "loss"), *lines.list_evaluated("loss")]
        ),
        make_chart("Terms of the loss", "mean over their targets", terms),
        make_source_chart(run),
        make_chart("Bits per byte", "held-out text", lines.list_evaluated("bits_per_byte"), reference_lines=baselines),
        *(
            make_chart(*describe_metric(metric), lines.list_evaluated("metrics", metric), bounds=get_bounds(metric))
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
            bounds=PERCENT,
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
    return make_chart("Mixture", "% of the rows", lines, from_zero=True, bounds=PERCENT)


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
        return make_chart("Waiting for data", "% of the step", lines, from_zero=True, bounds=PERCENT)
    lines = [
        Line(name, smooth(_compute_step_share(run, "step_parts", key)), 1 + i, "smooth")
        for i, (key, name) in enumerate(STEP_PARTS.items())
    ]
    return make_chart("Where a step's time goes", "% of the step", lines, from_zero=True, bounds=PERCENT)


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


# ------------------------------------------------------------------------------------------------ evaluations


def make_task_charts(run: Run, compared: Mapping[str, Run]) -> list[Chart | None]:
    """Return the charts of the tasks of `evaluate.tasks`, one for each metric."""
    tasks = list(dict.fromkeys(path[1] for path in run.curves if len(path) == 3 and path[0] == "tasks"))

    def make_lines(metric: str) -> list[Line]:
        lines = [Line(task, run.get_curve("tasks", task, metric), 1 + i % 6, "dots") for i, task in enumerate(tasks)]
        return lines + [
            Line(f"{name}, {task}", compared_run.get_curve("tasks", task, metric), 6 - i % 5, "other", i + 1)
            for i, (name, compared_run) in enumerate(compared.items())
            for task in tasks
        ]

    return [
        make_chart(title, unit, make_lines(metric), bounds=get_bounds(metric))
        for metric, (title, unit) in TASK_METRICS.items()
    ]


def make_position_charts(run: Run) -> list[Chart | None]:
    """Return charts of the loss by position in the row, one per validation set (see `evaluate.position_buckets`)."""
    length = run.get_section("data").get("sequence_length")
    if not isinstance(length, int):
        return []
    charts = []
    for name in run.validation_sets:
        n_buckets = sum(path[:3] == ("evaluation", name, "loss_by_position") for path in run.curves)
        edges = [-(-length * i // n_buckets) for i in range(n_buckets + 1)] if n_buckets else []
        lines = [
            Line(
                f"tokens {first + 1:,} to {end:,}",
                run.get_curve("evaluation", name, "loss_by_position", str(i)),
                1 + i % 6,
                "dots",
            )
            for i, (first, end) in enumerate(pairwise(edges))
        ]
        charts.append(make_chart("Loss by position in the row", f"nats per token, {name}", lines))
    return charts


def list_baselines(run: Run, name: str) -> list[ReferenceLine]:
    """Return the bits per byte of file compressors on a validation set."""
    table = run.baselines.get(name)
    if not isinstance(table, Mapping):
        return []
    return [ReferenceLine(" ".join(path), value) for path, value in iter_numbers(table) if math.isfinite(value)]


def get_loss_unit(run: Run) -> str:
    """Return the unit of the loss, which depends on the objective."""
    return LOSS_UNITS.get(str(run.get_section("objective").get("name")), "nats per token")


def get_bounds(metric: str) -> Bounds | None:
    """Return the least and the largest possible value of a metric; None if it has none."""
    return next((bounds for pattern, bounds in BOUNDS.items() if re.fullmatch(pattern, metric)), None)


def describe_metric(metric: str) -> tuple[str, str]:
    """Return the title and the unit of a metric's chart."""
    return METRICS.get(metric, (metric.replace("_", " ").capitalize(), "held-out examples"))
