"""A recommended layout of every preset, traced on the imaginary GPU and tabulated beside the estimate.

    python benchmarks/imaginary_walk.py walk.jsonl [--shard 0/2]   # resumes: recorded layouts are skipped
    python benchmarks/imaginary_walk.py walk.jsonl --table >> docs/internals/imaginary-walk.md

`walk.jsonl` gets one line a layout. `tests/unit/imaginary/test_walk.py` asserts the same quantities.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common

from tests.support.recommended_layouts import Recommended, TracedLayout, recommended, traced_layout


def make_name(layout: Recommended) -> str:
    """Return the name of a layout: its preset, and its row length where that is not the preset's."""
    length = next((x for x in layout.overrides if x.startswith("data.sequence_length=")), "")
    return " ".join([layout.preset, *([f"rows of {int(length.partition('=')[2]):,}"] if length else [])])


def trace(layout: Recommended) -> dict[str, Any]:
    """Trace one layout. Returns a JSON object; `error` where the estimate or the trace failed."""
    start = time.perf_counter()
    row: dict[str, Any] = {"name": make_name(layout), "gpus": layout.gpus, "overrides": list(layout.overrides)}
    try:
        traced = traced_layout(layout)
    except Exception as error:  # a crash is a result, too
        return {**row, "error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - start}
    return {**row, **describe_trace(traced), "seconds": time.perf_counter() - start}


def describe_trace(traced: TracedLayout) -> dict[str, Any]:
    """Return what a table says of a traced layout."""
    facts = traced.traced.facts
    described = {
        "layout": facts["layout"],
        "differences": traced.differences,
        "traced_peak": traced.traced.peak,
        "waits": traced.waits,
        "microbatches": facts["microbatches"],
        "all_pairs": facts["all_pairs"],
    }
    if traced.full is not None:
        described["fits"] = traced.full.fits
        described["full_share"] = traced.full.worst.total / traced.full.cluster.device.memory_bytes
    return described


def compute_error(row: dict[str, Any], quantity: str) -> float | None:
    """Return the relative error of "peak" or "saved by blocks"; None where the model is traced alone."""
    pairs = {name: (modelled, traced) for name, modelled, traced in row.get("differences", [])}
    return pairs[quantity][0] / pairs[quantity][1] - 1 if quantity in pairs else None


def compute_traffic_error(row: dict[str, Any]) -> float | None:
    """Return the largest relative error of traffic by axis and collective, of flows of a mebibyte or more."""
    flows = [
        (a, b) for name, a, b in row.get("differences", []) if name not in ("peak", "saved by blocks", "stored weights")
    ]
    return max((abs(a - b) / max(a, b) for a, b in flows), default=0.0) if row.get("differences") else None


def format_percent(share: float | None, digits: int = 1, sign: str = "") -> str:
    """Format a share for a narrow cell, as 12.5 %; with sign "+" as +1.9 %, −0.1 % or 0.0 %."""
    if share is None:
        return "–"
    percent = round(100 * share, digits)
    text = f"{percent:{sign if percent else ''}.{digits}f}".replace("-", "−" if percent else "")
    return f"{text}\u00a0%"


def format_layout(layout: str) -> str:
    """Leave out axes of one rank, as "dp_replicate 1 × "."""
    sizes, comma, experts = layout.partition(",")
    return " × ".join(axis for axis in sizes.split(" × ") if not axis.endswith(" 1")) + comma + experts


def format_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, with a summary above it."""
    errors = [abs(error) for row in rows if (error := compute_error(row, "peak")) is not None]
    yield (
        f"{len(rows)} layouts, {sum('error' in row for row in rows)} failed. Error of the modelled peak: median "
        f"{format_percent(median(errors))}, 90 % of layouts below "
        f"{format_percent(sorted(errors)[int(0.9 * (len(errors) - 1))])}, largest {format_percent(max(errors))}. "
        f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes in all."
    )
    yield ""
    columns = ["Preset", "GPUs", "Layout", "Memory used", "Error of peak", "Saved by blocks", "Error of traffic"]
    columns += ["Host waits a step", "All pairs"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in sorted(rows, key=lambda row: str(row["name"])):
        cells = [row["name"], f"{row['gpus']:,}"]
        if "error" in row:
            yield f"| {' | '.join(cells)} | **{row['error']}** | | | | | | |"
            continue
        peak, saved = compute_error(row, "peak"), compute_error(row, "saved by blocks")
        traffic = compute_traffic_error(row)
        waits = ", ".join(f"{times} `{path}`" for path, times in row["waits"].items())
        cells += [
            format_layout(row["layout"]),
            format_percent(row.get("full_share"), 0),
            format_percent(peak, sign="+"),
            format_percent(saved, sign="+"),
            format_percent(traffic, 2),
            waits or "none",
            ", ".join(row["all_pairs"]) or "none",
        ]
        yield f"| {' | '.join(cells)} |"


@common.argument("results", type=Path)
@common.argument("--shard", default="0/1", help="I/N: every N-th layout, from the I-th on")
@common.argument("--only", nargs="*", help="presets to trace")
@common.argument("--table", action="store_true", help="print the table of recorded results")
def main(args: argparse.Namespace) -> None:
    rows = common.read_rows(args.results) if args.results.exists() else []
    if args.table:
        print("\n".join(format_table(rows)))
        return
    recorded = {row["name"] for row in rows}
    index, n_shards = map(int, args.shard.split("/"))
    for layout in recommended()[index::n_shards]:
        if make_name(layout) in recorded or (args.only is not None and layout.preset not in args.only):
            continue
        with args.results.open("a") as file:
            file.write(json.dumps(trace(layout)) + "\n")


if __name__ == "__main__":
    common.run_script(__doc__, main)
