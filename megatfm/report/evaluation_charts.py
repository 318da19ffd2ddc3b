"""Charts of evaluations during training (tasks, loss by position in the row), and titles and units of their metrics."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise

from megatfm.report.charts import Bounds, Chart, Line, ReferenceLine, make_chart
from megatfm.report.run import Run, iter_numbers

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
    "text_classification": "mean over labelled examples",
    "masked_image": "mean squared error of masked pixels",
    "simmim": "mean absolute error of masked pixels",
}
"""Objective → unit of its loss. That of the others is nats per token."""
TASK_METRICS = {
    "bits_per_byte": ("Right answers of tasks", "bits per byte"),
    "accuracy": ("Accuracy on tasks", "share of questions"),
    "accuracy_per_byte": ("Accuracy on tasks, by likelihood per byte", "share of questions"),
}


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
