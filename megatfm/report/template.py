"""A page of one file: its template, its style and its script, which alone may run."""

import base64
import hashlib
import time
from collections.abc import Iterable
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from megatfm.report.chart import format_number
from megatfm.report.run import Run
from megatfm.version import __version__

N_AXIS_SAMPLES = 400
"""So many steps are enough to turn any step into tokens and time, in between by straight lines."""


def page(template: str, runs: Iterable[Run], **values: Any) -> str:
    """A template of this room filled in. runs: those whose curves it shows, in the order of `Line.run`.

    Everything is escaped: samples, names and paths are other people's text. Only our own script may run, by its hash.
    """
    script = _file("report.js")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_file),
    )
    environment.filters |= {"number": format_number, "size": format_bytes, "clock": format_utc}
    return environment.get_template(template).render(
        axes=[axis_samples(run) for run in runs],
        version=__version__,
        now=time.time(),
        style=Markup(_file("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def _file(name: str) -> str:
    return (resources.files("megatfm.report") / name).read_text(encoding="utf-8")


def axis_samples(run: Run) -> list[list[float]]:
    """Steps, tokens and hours of training at some steps of a run, evenly spread; the script joins them."""
    tokens = dict(zip(*_columns(run, "tokens"), strict=True))
    hours, total = dict[int, float](), 0.0
    for step, seconds in zip(*_columns(run, "step_seconds"), strict=True):
        total += seconds / 3600
        hours[step] = total
    steps = sorted(tokens.keys() & hours.keys())
    chosen = steps[:: max(1, len(steps) // N_AXIS_SAMPLES)]
    chosen += steps[-1:] if chosen and chosen[-1] != steps[-1] else []
    return [[0, *chosen], [0, *(tokens[step] for step in chosen)], [0, *(round(hours[s], 6) for s in chosen)]]


def _columns(run: Run, name: str) -> tuple[list[int], list[float]]:
    curve = run.curve(name)
    pairs = [pair for pair in zip(curve.steps, curve.values, strict=True) if pair[1] < float("inf")]
    return [step for step, _ in pairs], [value for _, value in pairs]


def format_bytes(count: float) -> str:
    """Bytes as people write them."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """Seconds as people write them: 41 s, 3.3 min, 5.2 h, 3.2 days."""
    for limit, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.0f} s"


def format_utc(seconds: Any) -> str:
    """A moment in UTC; an empty text when it is not a time."""
    if not isinstance(seconds, int | float):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
