"""Titles and units of losses and metrics."""

from megatfm.report.run import Run

METRICS = {
    "top1": ("Accuracy", "share of held-out images"),
    "top5": ("Top-5 accuracy", "share of held-out images"),
    "accuracy": ("Accuracy", "share of held-out examples"),
}
"""Metric → (title, unit). Other metrics are shown by their names."""
LOSS_UNITS = {
    "image_classification": "nats per image",
    "text_classification": "mean over labelled examples",
    "masked_image": "mean squared error of masked pixels",
    "simmim": "mean absolute error of masked pixels",
}


def loss_unit(run: Run) -> str:
    """Return the unit of the loss, which depends on the objective."""
    objective = run.config.get("objective") or {}
    return LOSS_UNITS.get(objective.get("name", ""), "nats per token")


def metric_title(metric: str) -> str:
    """Return the title of a metric's chart."""
    return METRICS[metric][0] if metric in METRICS else metric.replace("_", " ").capitalize()
