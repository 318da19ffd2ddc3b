"""The report of a run: one HTML file of its numbers, curves, samples, data, settings and history."""

import base64
import hashlib
import math
import re
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from megatfm.errors import MegatfmError
from megatfm.files import atomic_write
from megatfm.report.charts import format_number
from megatfm.report.predictions import class_results, galleries
from megatfm.report.run import Run, flatten, non_default_settings, sections, unique_names
from megatfm.report.run_charts import (
    baselines,
    charts,
    expert_load_maps,
    time_shares,
)
from megatfm.report.units import loss_unit, metric_title
from megatfm.version import __version__

MAX_SAMPLES = 24
"""The last so many are shown."""
N_AXIS_SAMPLES = 400
"""So many steps are enough to turn any step into tokens and time, in between by straight lines."""


@dataclass(frozen=True)
class Headline:
    """One headline number."""

    label: str
    value: str
    note: str = ""


def write_report(
    folder: str | Path, compared: Sequence[str | Path] = (), estimated: Sequence[Sequence[str]] = ()
) -> Path:
    """Write `report.html` into a run directory, whatever the run has reached, and return its path.

    compared: runs whose curves lie behind this one's. estimated: rows of a quantity, as recorded, as estimated, and the
    difference. The page is one file without any outside reference. Raises
    UsageError when a folder is not a run.
    """
    run, behind = Run(Path(folder)), [Run(Path(other)) for other in compared]
    path = run.folder / "report.html"
    try:
        atomic_write(path, render(run, behind, estimated))
    except OSError as error:
        raise MegatfmError(f"can't write {path}: {error.strerror}; free space or mend its rights") from error
    return path


def render(run: Run, compared: Sequence[Run] = (), estimated: Sequence[Sequence[str]] = ()) -> str:
    """The page of a run as text."""
    differing = non_default_settings(run.config)
    classes, pictures = class_results(run), galleries(run)
    _, *names = unique_names([run.folder, *(other.folder for other in compared)])
    behind = dict(zip(names, compared, strict=True))
    notes = [*run.notes, *(f"{name}: {note}" for name, other in behind.items() for note in other.notes)]
    return render_page(
        "report.html",
        [run, *compared],
        name=run.config.get("name", run.folder.name),
        subtitle=subtitle(run.config),
        status=status(run),
        headline=headline(run),
        charts=charts(run, behind),
        times=time_shares(run),
        estimated=estimated,
        maps=expert_load_maps(run),
        samples=group_by_prompt(run.samples[-MAX_SAMPLES:]),
        classes=classes,
        galleries=pictures,
        evaluated_step=run.confusion.get("step", run.task_results.get("step", run.pictures.get("step"))),
        corpora=run.corpora(),
        preps=[
            (name, prep_steps(prep), [*prep.get("notes", []), *prep.get("skipped_files", [])])
            for name, prep in run.prep().items()
        ],
        plan=run.plan,
        differing=None if differing is None else sections(differing),
        config=sections(run.config),
        environment=list(flatten(run.environment)),
        events=run.events,
        resume=resume_command(run),
        notes=notes,
    )


def group_by_prompt(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Samples under their prompts, each prompt's in the order of the steps, so that one reads how it went."""
    prompts: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        prompts.setdefault(str(sample.get("prompt", "")), []).append(sample)

    def step(sample: Mapping[str, Any]) -> int:
        return int(sample["step"]) if isinstance(sample.get("step"), int) else 0

    return [(prompt, sorted(under, key=step)) for prompt, under in prompts.items()]


def resume_command(run: Run) -> str:
    """Command that resumes the run, on as many processes and machines as it had."""
    folder, known = shlex.quote(str(run.folder)), run.environment
    # A run of before this was noted: the axes of the plan's mesh that have ranks of their own.
    axes = re.findall(r"\b(?:dp_replicate|dp_shard|tp|pp|cp) (\d+)\b", run.plan.partition("\n")[0])
    processes = _count(known.get("processes")) or math.prod(map(int, axes))
    machines = _count(known.get("machines")) or 1
    per_machine = -(-processes // machines)
    if processes == 1:
        return f"megatfm train {folder}"
    if known.get("launcher") == "srun":
        flag = "--nproc" if known.get("gpu", "none") == "none" else "--gpus-per-node"
        return f"megatfm launch {folder} --slurm --nodes {machines} {flag} {per_machine}"
    if known.get("launcher") == "mpirun":
        return f"mpirun -n {processes} megatfm train {folder}"
    if machines > 1:  # on each of them
        return f"torchrun --nnodes {machines} --nproc-per-node {per_machine} … -m megatfm train {folder}"
    return f"megatfm launch {folder} --nproc {processes}"


def _count(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 10 else 0


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
    """Progress of the run in words."""
    due = run.config.get("train", {}).get("steps")
    if not run.last_step:
        return "no step yet"
    if due is None or run.last_step >= due:
        return f"finished · {run.last_step:,} steps"
    return f"step {run.last_step:,} of {due:,}"


def headline(run: Run) -> list[Headline]:
    """The numbers that a reader looks for first; those that the run has."""
    facts = []
    for name in run.evaluated:
        which = f", {name}" if len(run.evaluated) > 1 else ""
        bits, loss = (run.curve("evaluation", name, key).values for key in ("bits_per_byte", "loss"))
        if bits:
            best = min(baselines(run, name), key=lambda level: level.value, default=None)
            note = f"{best.name}: {best.value:.2f}" if best else "held-out text"
            facts.append(Headline(f"Bits per byte{which}", f"{bits[-1]:.3f}", note))
        if loss:
            facts.append(Headline(f"Held-out loss{which}", f"{loss[-1]:.3f}", loss_unit(run)))
        facts += [
            Headline(f"{metric_title(metric)}{which}", f"{100 * values[-1]:.2f} %", "of the last evaluation")
            for metric in ("top1", "accuracy")
            if (values := run.curve("evaluation", name, "metrics", metric).values)
        ]
    losses = run.curve("loss").finite
    if losses:
        last = losses[-max(1, len(losses) // 50) :]
        facts.append(
            Headline(
                "Training loss",
                f"{statistics.fmean(last):.3f}",
                f"mean of the last {len(last)}" if len(last) > 1 else "last step",
            )
        )
    tokens = run.curve("tokens").finite
    if tokens:
        facts.append(Headline("Tokens seen", format_number(tokens[-1]), f"{run.last_step:,} steps"))
    speed = run.curve("tokens_per_second").finite
    if speed:
        facts.append(Headline("Speed", format_number(statistics.median(speed)), "tokens per second"))
    used, causal = (run.curve(key).finite for key in ("mfu", "mfu_causal"))
    if used and causal:
        note = f"{100 * statistics.median(causal):.3g} % by visible pairs"
        facts.append(Headline("MFU", f"{100 * statistics.median(used):.3g} %", note))
    seconds = run.curve("step_seconds").finite
    if seconds:
        facts.append(Headline("Training time", format_duration(sum(seconds)), "in steps"))
    memory = run.curve("memory_bytes").finite
    if memory:
        facts.append(Headline("Memory", format_bytes(max(memory)), "highest"))
    return facts


def prep_steps(prep: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows of a table: documents and bytes that each step of `megatfm prep` passed on, changed and dropped."""
    return [
        (
            step["step"],
            format_number(step["documents_out"]),
            format_bytes(step["bytes_out"]),
            format_number(step["changed"]),
            "; ".join(
                f"{format_number(drop['documents'])} {reason}" for reason, drop in step["dropped"].items()
            ),
        )
        for step in prep.get("steps", [])
    ]


# --- pages of one file ----------------------------------------------------------------------------------------------


def render_page(template: str, runs: Iterable[Run], **values: Any) -> str:
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
    environment.filters |= {
        "number": format_number,
        "size": format_bytes,
        "duration": format_duration,
        "clock": format_utc,
    }
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
