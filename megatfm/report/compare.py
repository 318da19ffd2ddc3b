"""Comparison of runs: differences of their configs, their results, and their curves in common charts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatfm.errors import UsageError
from megatfm.report.charts import Chart, Line, format_number, make_chart, smooth
from megatfm.report.page import format_duration, render_page, write_page
from megatfm.report.run import Curve, Run, format_setting, iter_leaves, make_unique_names
from megatfm.report.run_charts import describe_metric, get_bounds, get_loss_unit

IGNORED_SETTINGS = ("name", "run_dir", "log.", "resume.", "checkpoint.")
"""Settings that don't affect what a run computes."""
MISSING = "–"
COLUMNS = {"bits_per_byte": "bits/byte"}
"""Key of an evaluation → its column, where that has another name."""
Evaluation = tuple[str, tuple[str, ...]]
"""Validation set, and the path of a figure in its results."""


@dataclass(frozen=True)
class Results:
    """Table of results with one row per run."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class RunComparison:
    """Runs to compare, with distinct names."""

    runs: Sequence[Run]
    names: Sequence[str]

    @classmethod
    def read(cls, folders: Sequence[str | Path]) -> "RunComparison":
        """Read the run directories. Raises UsageError for fewer than two, or for a folder that is not a run."""
        if len(folders) < 2:
            raise UsageError("give two runs or more, for example runs/a runs/b")
        runs = [Run(Path(folder)) for folder in folders]
        return cls(runs, make_unique_names([run.folder for run in runs]))

    def list_differences(self) -> list[tuple[str, list[str]]]:
        """Return the settings that differ between runs: key, and its value in each run."""
        settings = [dict(iter_leaves(run.config)) for run in self.runs]
        keys = dict.fromkeys(
            key for run_settings in settings for key in run_settings if not key.startswith(IGNORED_SETTINGS)
        )
        rows = [
            (key, [[run_settings[key]] if key in run_settings else [] for run_settings in settings]) for key in keys
        ]
        return [
            (key, [format_setting(cell[0]) if cell else MISSING for cell in cells])
            for key, cells in rows
            if any(cell != cells[0] for cell in cells)
        ]

    def collect_results(self) -> Results:
        """Return steps, tokens, losses, metrics, speed and time of each run, as far as they are recorded."""
        evaluations = self._list_evaluations()
        columns = ["steps", "tokens", "training loss"]
        columns += [f"{name} {COLUMNS.get(key[-1], key[-1])}" for name, key in evaluations]
        columns += ["tokens/s", "MFU", "time", "commit"]
        return Results(columns, [self._make_row(run, evaluations) for run in self.runs])

    def _list_evaluations(self) -> list[Evaluation]:
        """Return what was evaluated in any run: validation set, and path of the loss or metric."""
        sets = dict.fromkeys(name for run in self.runs for name in run.validation_sets)
        metrics = dict.fromkeys(metric for run in self.runs for metric in run.evaluation_metrics)
        keys = [("loss",), ("bits_per_byte",), *(("metrics", metric) for metric in metrics)]
        return [
            (name, key)
            for name in sets
            for key in keys
            if any(run.get_curve("evaluation", name, *key).finite for run in self.runs)
        ]

    def list_notes(self) -> list[str]:
        """Return notes on files that can't be read, and on columns that are left out."""
        notes = [f"{name}: {note}" for name, run in zip(self.names, self.runs, strict=True) for note in run.notes]
        if self._has_different_peaks:
            peaks = "; ".join(
                f"{name}: {run.environment.get('peak', 'not recorded')}"
                for name, run in zip(self.names, self.runs, strict=True)
            )
            notes.append(f"MFU is left out, since it is relative to different peaks: {peaks}")
        return notes

    @property
    def _has_different_peaks(self) -> bool:
        """Whether the runs' MFU is relative to different peaks, and so not comparable."""
        return len({str(run.environment.get("peak")) for run in self.runs if run.get_curve("mfu").finite}) > 1

    def _make_row(self, run: Run, evaluations: Sequence[Evaluation]) -> list[str]:
        speeds, seconds = run.get_curve("tokens_per_second").finite, run.get_curve("step_seconds").finite
        cells = [
            f"{run.last_step:,}",
            format_number(max(run.get_curve("tokens").finite, default=0)),
            f"{statistics.fmean(run.last_losses):.4f}" if run.last_losses else MISSING,
        ]
        for name, key in evaluations:
            values = run.get_curve("evaluation", name, *key).finite
            cells.append(f"{values[-1]:.4f}" if values else MISSING)
        cells.append(format_number(statistics.median(speeds)) if speeds else MISSING)
        mfu = run.get_curve("mfu").finite
        is_comparable = mfu and not self._has_different_peaks
        cells.append(f"{100 * statistics.median(mfu):.3g} %" if is_comparable else MISSING)
        cells.append(format_duration(sum(seconds)) if seconds else MISSING)
        return [*cells, str(run.environment.get("commit", MISSING))[:12]]

    def make_charts(self) -> list[Chart]:
        """Return the charts, each with one line per run."""
        unit = " or ".join(dict.fromkeys(map(get_loss_unit, self.runs)))
        titles = {"loss": ("Held-out loss", unit), "bits_per_byte": ("Bits per byte", "held-out text")}
        charts = [
            self._make_chart("Training loss", f"{unit}, smoothed", ["loss"], smoothed=True),
            *(
                self._make_chart(f"{title}, {name}", measure, ["evaluation", name, *key])
                for name, key in self._list_evaluations()
                for title, measure in [titles.get(key[-1], describe_metric(key[-1]))]
            ),
            self._make_chart("Gradient norm", "before clipping, smoothed", ["grad_norm"], smoothed=True),
            self._make_chart("Learning rate", "", ["lr"], from_zero=True),
            self._make_chart("Speed", "tokens per second, smoothed", ["tokens_per_second"], True, from_zero=True),
        ]
        return [chart for chart in charts if chart]

    def _make_chart(
        self, title: str, unit: str, path: Sequence[str], smoothed: bool = False, *, from_zero: bool = False
    ) -> Chart | None:
        lines = []
        for index, run in enumerate(self.runs):
            curve: Curve = run.get_curve(*path)
            kind = "smooth" if smoothed else "dots" if path[0] == "evaluation" else "line"
            curve = smooth(curve) if smoothed else curve
            lines.append(Line(self.names[index], curve, 1 + index % 6, kind, index))  # type: ignore[arg-type]
        bounds = get_bounds(path[-1]) if path[0] == "evaluation" else None
        return make_chart(title, unit, lines, from_zero=from_zero, bounds=bounds)


def write_comparison(comparison: RunComparison, path: str | Path) -> Path:
    """Write the page, one file without external references. Raises MegatfmError if it can't be written."""
    content = render_page(
        "compare.html",
        comparison.runs,
        names=comparison.names,
        results=comparison.collect_results(),
        differences=comparison.list_differences(),
        charts=comparison.make_charts(),
        notes=comparison.list_notes(),
    )
    return write_page(Path(path), content, "choose another with --out")
