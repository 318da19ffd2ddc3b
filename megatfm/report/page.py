"""What the report says, and its writing."""

import base64
import hashlib
import json
import math
import re
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatfm.atomic import write_whole
from megatfm.errors import MegatfmError
from megatfm.report.chart import Chart, Level, Line, chart, number, smooth
from megatfm.report.layers import layer_charts
from megatfm.report.run import Curve, Run
from megatfm.version import __version__

SAMPLES = 12
GIB = 2**30


@dataclass(frozen=True)
class Fact:
    """One headline number."""

    label: str
    value: str
    note: str = ""


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run directory, whatever the run has reached, and return its path.

    The page is one file without any outside reference. Raises UsageError when `folder` is not a run.
    """
    run = Run(Path(folder))
    path = run.folder / "report.html"
    try:
        write_whole(path, render(run))
    except OSError as error:
        raise MegatfmError(f"can't write {path}: {error.strerror}; free space or mend its rights") from error
    return path


def render(run: Run) -> str:
    """The page of a run as text."""
    prep = run.prep()
    files = resources.files("megatfm.report")
    script = (files / "report.js").read_text(encoding="utf-8")
    # Autoescape: samples, names and paths are other people's text. Only our own script may run (by its hash).
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "size": size, "clock": clock}
    return environment.from_string((files / "report.html").read_text(encoding="utf-8")).render(
        name=run.config.get("name", run.folder.name),
        subtitle=subtitle(run.config),
        status=status(run),
        headline=headline(run),
        charts=charts(run),
        samples=run.samples[-SAMPLES:],
        corpora=run.corpora(),
        prep=prep_steps(prep),
        prep_notes=[*prep.get("notes", []), *prep.get("skipped_files", [])],
        plan=run.plan,
        config=sections(run.config),
        environment=list(flat(run.environment)),
        events=run.events,
        resume=resume_command(run),
        notes=run.notes,
        version=__version__,
        now=time.time(),
        style=Markup((files / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def resume_command(run: Run) -> str:
    """What to type to go on, on as many processes as the plan's mesh has."""
    processes = math.prod(map(int, re.findall(r" (\d+)\b", run.plan.partition("\n")[0])))
    folder = shlex.quote(str(run.folder))
    return f"megatfm train {folder}" if processes == 1 else f"megatfm launch {folder} --nproc {processes}"


def subtitle(config: Mapping[str, Any]) -> str:
    """The run in one line: architecture, sequence and batch, as far as the config names them."""
    parts = (
        ("model", "family", "{}"),
        ("model", "n_layers", "{} layers"),
        ("model", "d_model", "{} wide"),
        ("data", "sequence_length", "sequences of {} tokens"),
        ("train", "global_batch", "{} per step"),
        ("optimizer", "name", "{}"),
    )
    values = ((form, config.get(section, {}).get(key)) for section, key, form in parts)
    return " · ".join(form.format(value) for form, value in values if value is not None)


def status(run: Run) -> str:
    """How far the run is."""
    due = run.config.get("train", {}).get("steps")
    if not run.last_step:
        return "no step yet"
    if due is None or run.last_step >= due:
        return f"finished · {run.last_step:,} steps"
    return f"step {run.last_step:,} of {due:,}"


def headline(run: Run) -> list[Fact]:
    """The numbers that a reader looks for first; those that the run has."""
    facts = []
    for name in run.evaluated:
        which = f", {name}" if len(run.evaluated) > 1 else ""
        bits, loss = (run.curve("evaluation", name, key).values for key in ("bits_per_byte", "loss"))
        if bits:
            best = min(baselines(run, name), key=lambda level: level.value, default=None)
            note = f"{best.name}: {best.value:.2f}" if best else "held-out text"
            facts.append(Fact(f"Bits per byte{which}", f"{bits[-1]:.3f}", note))
        if loss:
            facts.append(Fact(f"Held-out loss{which}", f"{loss[-1]:.3f}", "nats per token"))
    losses = run.curve("loss").finite
    if losses:
        last = losses[-max(1, len(losses) // 50) :]
        facts.append(
            Fact(
                "Training loss",
                f"{statistics.fmean(last):.3f}",
                f"mean of the last {len(last)}" if len(last) > 1 else "last step",
            )
        )
    tokens = run.curve("tokens").finite
    if tokens:
        facts.append(Fact("Tokens seen", number(tokens[-1]), f"{run.last_step:,} steps"))
    speed = run.curve("tokens_per_second").finite
    if speed:
        facts.append(Fact("Speed", number(statistics.median(speed)), "tokens per second"))
    seconds = run.curve("step_seconds").finite
    if seconds:
        facts.append(Fact("Training time", duration(sum(seconds)), "in steps"))
    memory = run.curve("memory_bytes").finite
    if memory:
        facts.append(Fact("Memory", size(max(memory)), "highest"))
    return facts


def baselines(run: Run, name: str) -> list[Level]:
    """What other compressors reach on a validation set, in bits per byte."""
    table = run.baselines.get(name)
    return [Level(key, value) for key, value in table.items()] if isinstance(table, Mapping) else []


def charts(run: Run) -> list[Chart]:
    """The curves that the run has, the loss first."""

    def evaluated(key: str) -> list[Line]:
        curves = ((name, run.curve("evaluation", name, key)) for name in run.evaluated)
        return [Line(name, curve, 2 + i % 5, "dots") for i, (name, curve) in enumerate(curves)]

    def smoothed(name: str, curve: Curve) -> list[Line]:
        return [Line(name, curve, kind="thin"), Line(name, smooth(curve), kind="smooth")]

    terms = [Line(name, smooth(run.curve("terms", name)), 1 + i % 6) for i, name in enumerate(run.terms)]
    levels = [level for name in run.evaluated for level in baselines(run, name)]
    drawn = (
        chart("Loss", "nats per token", [*smoothed("training", run.curve("loss")), *evaluated("loss")]),
        chart("Terms of the loss", "mean over their targets", terms),
        chart("Bits per byte", "held-out text", evaluated("bits_per_byte"), levels=levels),
        chart("Gradient norm", "before clipping", smoothed("gradient norm", run.curve("grad_norm"))),
        chart("Learning rate", "", [Line("learning rate", run.curve("lr"))], from_zero=True),
        chart(
            "Speed",
            "tokens per second",
            smoothed("speed", run.curve("tokens_per_second")),
            from_zero=True,
        ),
        chart("Waiting for data", "% of the step", smoothed("wait", waiting(run)), from_zero=True),
        chart("Memory", "GiB", [Line("memory", scaled(run.curve("memory_bytes"), 1 / GIB))], from_zero=True),
        *layer_charts(run),
    )
    return [drawing for drawing in drawn if drawing]


def waiting(run: Run) -> Curve:
    """Data wait as a part of the step, in percent."""
    wait, whole = run.curve("data_wait_seconds"), run.curve("step_seconds")
    seconds = dict(zip(whole.steps, whole.values, strict=True))
    parts = [
        (s, 100 * v / seconds[s]) for s, v in zip(wait.steps, wait.values, strict=True) if seconds.get(s)
    ]
    return Curve([step for step, _ in parts], [part for _, part in parts])


def scaled(curve: Curve, factor: float) -> Curve:
    return Curve(curve.steps, [value * factor for value in curve.values])


def prep_steps(prep: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What each step of `megatfm prep` passed on, changed and dropped, as `prep.json` counts it."""
    return [
        (
            step["step"],
            number(step["documents_out"]),
            size(step["bytes_out"]),
            number(step["changed"]),
            "; ".join(f"{number(drop['documents'])} {reason}" for reason, drop in step["dropped"].items()),
        )
        for step in prep.get("steps", [])
    ]


def sections(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The config as titled lists of keys and values; keys outside a section come first."""
    alone = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    return [("run", list(flat(alone))), *((key, list(flat(table))) for key, table in tables.items())]


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and readable values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool | str):
            yield prefix + key, str(value).lower() if isinstance(value, bool) else value
        elif isinstance(value, int):
            yield prefix + key, f"{value:,}"
        elif isinstance(value, float):
            yield prefix + key, number(value)
        else:
            yield prefix + key, json.dumps(value, ensure_ascii=False, default=str)


def size(count: float) -> str:
    """Bytes as people write them."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as people write them: 41 s, 3.3 min, 5.2 h, 3.2 days."""
    for limit, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.0f} s"


def clock(seconds: Any) -> str:
    """A moment in UTC; an empty text when it is not a time."""
    if not isinstance(seconds, int | float):
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
