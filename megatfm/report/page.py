"""The report of a run: one HTML file with its results, curves, samples, data, settings and events."""

import base64
import hashlib
import math
import re
import shlex
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from megatfm.files import atomic_write, name_disk_errors
from megatfm.report.charts import format_number
from megatfm.report.layer_charts import make_expert_load_maps
from megatfm.report.predictions import compute_class_results, read_galleries
from megatfm.report.run import Run, find_non_default_settings, flatten, make_unique_names, parse_count, split_sections
from megatfm.report.run_charts import (
    MAX_EVENTS,
    compute_time_shares,
    describe_metric,
    get_loss_unit,
    list_baselines,
    make_run_charts,
)
from megatfm.terminal import format_counted, format_file_size
from megatfm.version import __version__

MAX_SAMPLES = 24
"""Largest number of samples that are shown: the last ones."""
N_AXIS_SAMPLES = 400
"""Number of steps whose tokens and times the page stores; its script interpolates between them."""


@dataclass(frozen=True)
class Headline:
    """A key result at the top of the report."""

    label: str
    value: str
    note: str = ""


def write_report(
    folder: str | Path,
    compared: Sequence[str | Path] = (),
    estimated: Sequence[Sequence[str]] = (),
    out: Path | None = None,
) -> Path:
    """Write the report of a finished or unfinished run; return its path.

    compared: runs whose curves are drawn behind this one's. estimated: table rows with a quantity, its recorded value,
    its estimate and the difference. out: file to write; None: `report.html` in the run directory. The page is one file
    without external references. Raises UsageError if a folder is not a run directory, MegatfmError if the page can't
    be written.
    """
    run = Run(Path(folder))
    distinct_folders = {path.resolve(): path for path in map(Path, compared)}
    page = render(run, [Run(path) for path in distinct_folders.values()], estimated)
    return write_page(
        out or run.folder / "report.html",
        page,
        "choose another file with --out, in a folder that exists, or free space",
    )


def render(run: Run, compared: Sequence[Run] = (), estimated: Sequence[Sequence[str]] = ()) -> str:
    """Return the report of a run as HTML."""
    non_default = find_non_default_settings(run.config)
    _, *names = make_unique_names([run.folder, *(compared_run.folder for compared_run in compared)])
    compared_by_name = dict(zip(names, compared, strict=True))
    # Before the notes are collected, since these add to the notes of the run.
    classes, galleries, preps = compute_class_results(run), read_galleries(run), summarize_preps(run)
    charts = make_run_charts(run, compared_by_name)
    compared_notes = [f"{name}: {note}" for name, other_run in compared_by_name.items() for note in other_run.notes]
    return render_page(
        "report.html",
        [run, *compared],
        name=run.config.get("name", run.folder.name),
        subtitle=format_subtitle(run),
        status=describe_progress(run),
        headlines=list_headlines(run),
        charts=charts,
        times=compute_time_shares(run),
        estimated=estimated,
        maps=make_expert_load_maps(run),
        samples=group_by_prompt(run.samples[-MAX_SAMPLES:]),
        classes=classes,
        galleries=galleries,
        evaluated_step=run.confusion.get("step", run.task_results.get("step", run.pictures.get("step"))),
        corpora=run.read_corpora(),
        preps=preps,
        plan=run.plan,
        non_default=None if non_default is None else split_sections(non_default),
        config=split_sections(run.config),
        environment=list(flatten(run.environment)),
        events=run.events[-MAX_EVENTS:],
        n_earlier_events=max(0, len(run.events) - MAX_EVENTS),
        resume=make_resume_command(run),
        notes=[*run.notes, *compared_notes],
    )


def group_by_prompt(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Group samples by prompt, in order of their steps, so that the page shows how each continuation developed."""
    samples_by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        samples_by_prompt.setdefault(str(sample.get("prompt", "")), []).append(sample)

    def get_step(sample: Mapping[str, Any]) -> int:
        return int(sample["step"]) if isinstance(sample.get("step"), int) else 0

    return [(prompt, sorted(group, key=get_step)) for prompt, group in samples_by_prompt.items()]


def make_resume_command(run: Run) -> str:
    """Return the command that resumes the run, on as many processes and machines as before."""
    folder, environment = shlex.quote(str(run.folder)), run.environment
    # For runs of older versions, which didn't record the number of processes: the axes in the layout table.
    axes = re.findall(r"\b(?:dp_replicate|dp_shard|tp|pp|cp) (\d+)\b", run.plan.partition("\n")[0])
    processes = parse_count(environment.get("processes")) or math.prod(map(int, axes))
    machines = parse_count(environment.get("machines")) or 1
    per_machine = -(-processes // machines)
    if processes == 1:
        return f"megatfm train {folder}"
    if environment.get("launcher") == "srun":
        flag = "--nproc" if environment.get("gpu", "none") == "none" else "--gpus-per-node"
        return f"megatfm launch {folder} --slurm --nodes {machines} {flag} {per_machine}"
    if environment.get("launcher") == "mpirun":
        return f"mpirun -n {processes} megatfm train {folder}"
    if machines > 1:  # to be run on each machine
        return f"torchrun --nnodes {machines} --nproc-per-node {per_machine} … -m megatfm train {folder}"
    return f"megatfm launch {folder} --nproc {processes}"


def format_subtitle(run: Run) -> str:
    """Describe the run in one line: architecture, sequence length, batch size and optimizer."""
    layers = "{} layer" if run.get_section("model").get("n_layers") == 1 else "{} layers"
    templates = (
        ("model", "family", "{}"),
        ("model", "n_layers", layers),
        ("model", "d_model", "{} wide"),
        ("data", "sequence_length", "sequences of {} tokens"),
        ("train", "global_batch", "global batch {}"),
        ("optimizer", "name", "{}"),
    )
    values = ((template, run.get_section(section).get(key)) for section, key, template in templates)
    return " · ".join(template.format(value) for template, value in values if value is not None)


def describe_progress(run: Run) -> str:
    """Return the run's progress as text: "finished · 1,000 steps" or "step 500 of 1,000"."""
    steps = run.get_section("train").get("steps")
    if not run.last_step:
        return "no step yet"
    if not isinstance(steps, int) or run.last_step >= steps:
        return f"finished · {format_counted(run.last_step, 'step')}"
    return f"step {run.last_step:,} of {steps:,}"


def list_headlines(run: Run) -> list[Headline]:
    """Return the key results that the run has."""
    headlines = []
    for name in run.validation_sets:
        suffix = f", {name}" if len(run.validation_sets) > 1 else ""
        bits, loss = (run.get_curve("evaluation", name, key).values for key in ("bits_per_byte", "loss"))
        if bits:
            best = min(list_baselines(run, name), key=lambda level: level.value, default=None)
            note = f"{best.name}: {best.value:.2f}" if best else "held-out text"
            headlines.append(Headline(f"Bits per byte{suffix}", f"{bits[-1]:.3f}", note))
        if loss:
            headlines.append(Headline(f"Held-out loss{suffix}", f"{loss[-1]:.3f}", get_loss_unit(run)))
        headlines += [
            Headline(f"{describe_metric(metric)[0]}{suffix}", f"{100 * values[-1]:.2f} %", "of the last evaluation")
            for metric in ("top1", "accuracy")
            if (values := run.get_curve("evaluation", name, "metrics", metric).values)
        ]
    if losses := run.last_losses:
        note = f"mean of the last {len(losses):,} steps" if len(losses) > 1 else "last step"
        headlines.append(Headline("Training loss", f"{statistics.fmean(losses):.3f}", note))
    tokens = run.get_curve("tokens").finite
    if tokens:
        headlines.append(Headline("Tokens seen", format_number(tokens[-1]), format_counted(run.last_step, "step")))
    speed = run.get_curve("tokens_per_second").finite
    if speed:
        headlines.append(Headline("Speed", format_number(statistics.median(speed)), "tokens per second"))
    mfu, causal_mfu = (run.get_curve(key).finite for key in ("mfu", "mfu_causal"))
    if mfu and causal_mfu:
        note = f"{100 * statistics.median(causal_mfu):.3g} % without masked attention"
        headlines.append(Headline("MFU", f"{100 * statistics.median(mfu):.3g} %", note))
    seconds = run.get_curve("step_seconds").finite
    if seconds:
        headlines.append(Headline("Training time", format_duration(sum(seconds)), "in steps"))
    memory = run.get_curve("memory_bytes").finite
    if memory:
        headlines.append(Headline("Memory", format_memory(max(memory)), "highest"))
    return headlines


def summarize_preps(run: Run) -> list[tuple[str, list[tuple[str, ...]], list[str]]]:
    """Return training corpus, its rows of `list_prep_steps`, and the notes of `megatfm prep`; notes invalid files."""
    summaries = []
    for name, prep in run.read_prep().items():
        try:
            notes = [str(note) for key in ("notes", "skipped_files") for note in prep.get(key, [])]
            summaries.append((name, list_prep_steps(prep), notes))
        except (KeyError, TypeError, ValueError, AttributeError):
            run.notes.append(f"prep.json of {name} is not shown: it is not as `megatfm prep` writes it")
    return summaries


def list_prep_steps(prep: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return table rows: documents and bytes that each step of `megatfm prep` passed on, changed and dropped."""
    return [
        (
            str(step["step"]),
            format_number(step["documents_out"]),
            format_file_size(step["bytes_out"]),
            format_number(step["changed"]),
            "; ".join(f"{format_number(drop['documents'])} {reason}" for reason, drop in step["dropped"].items()),
        )
        for step in prep.get("steps", [])
    ]


# --- pages of one file ----------------------------------------------------------------------------------------------


def write_page(path: Path, content: str, way_out: str) -> Path:
    """Write a page atomically and return its path. Raises MegatfmError that ends with `way_out`."""
    with name_disk_errors("write", path, way_out):
        atomic_write(path, content)
    return path


@cache
def _load_template(name: str) -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_read_file),
    )
    environment.filters |= {
        "number": format_number,
        "size": format_file_size,
        "duration": format_duration,
        "clock": format_utc,
        "step": format_step,
    }
    return environment.get_template(name)


def render_page(template: str, runs: Iterable[Run], **values: Any) -> str:
    """Render a template of this package. runs: runs whose curves the page shows, in the order of `Line.run`.

    Escapes all values, since samples, names and paths are untrusted. Only report.js may run, by its hash.
    """
    script = _read_file("report.js")
    return _load_template(template).render(
        axes=[sample_axes(run) for run in runs],
        version=__version__,
        now=time.time(),
        style=Markup(_read_file("report.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def _read_file(name: str) -> str:
    return (resources.files("megatfm.report") / name).read_text(encoding="utf-8")


def sample_axes(run: Run) -> list[list[float]]:
    """Return steps, tokens and hours of training at evenly spaced steps; the page's script interpolates."""
    tokens = dict(run.get_curve("tokens").finite_points)
    hours, total = dict[int, float](), 0.0
    for step, seconds in run.get_curve("step_seconds").finite_points:
        total += seconds / 3600
        hours[step] = total
    steps = sorted(tokens.keys() & hours.keys())
    sampled_steps = steps[:: max(1, len(steps) // N_AXIS_SAMPLES)]
    sampled_steps += steps[-1:] if sampled_steps and sampled_steps[-1] != steps[-1] else []
    return [
        [0, *sampled_steps],
        [0, *(tokens[step] for step in sampled_steps)],
        [0, *(round(hours[s], 6) for s in sampled_steps)],
    ]


def format_memory(count: float) -> str:
    """Format bytes of memory: 812 B, 1.5 GiB."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit * 999.5 / 1024:  # so that no unit has four digits
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """Format a duration: 41 s, 3.3 min, 5.2 h, 3.2 days."""
    for limit, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.0f} s"


def format_step(step: Any) -> str:
    """Format a step with commas; what a damaged file has in its place stays as it is."""
    return f"{step:,}" if isinstance(step, int) else str(step)


def format_utc(seconds: Any) -> str:
    """Format seconds since 1970 as a time in UTC; "" for anything but a number, or beyond the calendar."""
    if not isinstance(seconds, int | float):
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""
