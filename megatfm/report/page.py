"""What the report says, and its writing."""

import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatfm.atomic import atomic_write
from megatfm.errors import MegatfmError
from megatfm.report.chart import Chart, Level, Line, Mark, chart, format_number, smooth
from megatfm.report.heat import expert_load_maps
from megatfm.report.layers import layer_charts
from megatfm.report.run import Curve, Run
from megatfm.report.settings import flatten, non_default_settings, sections
from megatfm.report.template import format_bytes, format_duration, page

SAMPLES, MARKS = 24, 200
"""The last so many are shown."""
EVENT_KINDS = ("stopped", "resumed", "skipped", "rolled back", "spike", "failed")
GIB = 2**30


@dataclass(frozen=True)
class Headline:
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
        atomic_write(path, render(run))
    except OSError as error:
        raise MegatfmError(f"can't write {path}: {error.strerror}; free space or mend its rights") from error
    return path


def render(run: Run) -> str:
    """The page of a run as text."""
    differing = non_default_settings(run.config)
    return page(
        "report.html",
        [run],
        name=run.config.get("name", run.folder.name),
        subtitle=subtitle(run.config),
        status=status(run),
        headline=headline(run),
        charts=charts(run),
        maps=expert_load_maps(run),
        samples=group_by_prompt(run.samples[-SAMPLES:]),
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
        notes=run.notes,
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
    """What to type to go on, on as many processes and machines as the run had."""
    folder, known = shlex.quote(str(run.folder)), run.environment
    # A run of before this was noted: the axes of the plan's mesh that have ranks of their own.
    axes = re.findall(r"\b(?:dp_replicate|dp_shard|tp|pp|cp) (\d+)\b", run.plan.partition("\n")[0])
    processes = _count(known.get("processes")) or math.prod(map(int, axes))
    machines = _count(known.get("machines")) or 1
    each = -(-processes // machines)
    if processes == 1:
        return f"megatfm train {folder}"
    if known.get("launcher") == "srun":
        flag = "--nproc" if known.get("gpu", "none") == "none" else "--gpus-per-node"
        return f"megatfm launch {folder} --slurm --nodes {machines} {flag} {each}"
    if known.get("launcher") == "mpirun":
        return f"mpirun -n {processes} megatfm train {folder}"
    if machines > 1:  # on each of them
        return f"torchrun --nnodes {machines} --nproc-per-node {each} … -m megatfm train {folder}"
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
    """How far the run is."""
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
            facts.append(Headline(f"Held-out loss{which}", f"{loss[-1]:.3f}", "nats per token"))
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
        chart(
            "Utilization (MFU)",
            f"% of {run.environment.get('peak', 'what the devices could do')}",
            [
                Line("with all of attention", smooth(scale(run.curve("mfu"), 100)), kind="smooth"),
                Line("without its masked half", smooth(scale(run.curve("mfu_causal"), 100)), 2, "smooth"),
            ],
            from_zero=True,
        ),
        chart("Waiting for data", "% of the step", smoothed("wait", data_wait_share(run)), from_zero=True),
        chart("Memory", "GiB", [Line("memory", scale(run.curve("memory_bytes"), 1 / GIB))], from_zero=True),
        mixture_chart(run),
        *layer_charts(run),
    )
    return [replace(drawing, marks=marks(run, drawing.x_range)) for drawing in drawn if drawing]


def marks(run: Run, x_range: tuple[float, float]) -> list[Mark]:
    """Where the run was stopped, resumed, went back or left something out."""
    first, last = x_range
    found: dict[tuple[str, int], Mark] = {}
    for event in run.events:
        step, kind = event.get("step"), event.get("event")
        if isinstance(step, int) and kind in EVENT_KINDS and first <= step <= last:
            at = 1000 * (step - first) / (last - first)
            found[str(kind), step] = Mark(at, step, str(kind), str(event.get("detail", "")))
    return list(found.values())[-MARKS:]


def mixture_chart(run: Run) -> Chart | None:
    """Which part of the rows each corpus of a mixture has, over the steps."""
    data, tokens = run.config.get("data", {}), run.curve("tokens")
    sources = data.get("mixture")
    if not isinstance(sources, Mapping) or not tokens.steps:
        return None
    phases = [(0.0, {name: float(source["weight"]) for name, source in sources.items()})]
    phases += [(float(change["tokens"]), change["weights"]) for change in data.get("mixture_changes", [])]

    def share(name: str, seen: float) -> float:
        weights = [weights for begins, weights in phases if begins <= seen][-1]
        return 100 * float(weights.get(name, 0)) / sum(map(float, weights.values()))

    def curve(name: str) -> Curve:
        return Curve(tokens.steps, [share(name, seen) for seen in tokens.values])

    lines = [Line(name, curve(name), 1 + i % 6) for i, name in enumerate(sources)]
    return chart("Mixture", "% of the rows", lines, from_zero=True)


def data_wait_share(run: Run) -> Curve:
    """Data wait as a part of the step, in percent."""
    wait, whole = run.curve("data_wait_seconds"), run.curve("step_seconds")
    seconds = dict(zip(whole.steps, whole.values, strict=True))
    parts = [
        (s, 100 * v / seconds[s]) for s, v in zip(wait.steps, wait.values, strict=True) if seconds.get(s)
    ]
    return Curve([step for step, _ in parts], [part for _, part in parts])


def scale(curve: Curve, factor: float) -> Curve:
    """The curve in another unit: `factor` is how many of that make one of its own."""
    return Curve(curve.steps, [value * factor for value in curve.values])


def prep_steps(prep: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What each step of `megatfm prep` passed on, changed and dropped, as `prep.json` counts it."""
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
