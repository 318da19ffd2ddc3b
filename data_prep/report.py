"""The report of a prepared corpus: one deterministic HTML file without outside references.

It shows what came in, what was dropped and why, and what came out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from megatfm.data_prep.documents import SPLITS
from megatfm.terminal import format_counted, format_file_size


def format_count(value: float) -> str:
    """Format a number: 12,500 or 3.21 M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: name, formatted value, and length in percent of the longest."""

    name: str
    value: str
    percent: float


@cache
def _load_template() -> Template:
    # Autoescape: names and examples are foreign text, and no script may run.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": format_count, "size": format_file_size}
    text = (resources.files("megatfm.data_prep") / "report.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def render_report(result: Mapping[str, Any]) -> str:
    """Return the HTML page of a `prep.json`."""
    styles = resources.files("megatfm") / "report" / "report.css"
    steps, images = result["steps"], has_images(result)
    fields = {name for split in SPLITS for name in result[split].get("fields", {})}
    return _load_template().render(
        headline=write_headline(result),
        unit="Images" if images else "Documents",
        tiles=make_tiles(result),
        steps=steps,
        flow=make_bars([(step["step"], step["bytes_out"]) for step in steps], format_file_size),
        reasons=list(iter_drop_reasons(steps)),
        titles=[
            ("domains", "Largest domains, by text"),
            ("languages", "Languages, by text"),
            *((f"fields.{name}", f"{name}, by text") for name in sorted(fields)),
        ],
        found=[
            (step["step"], make_bars(sorted(step["found"].items(), key=lambda item: (-item[1], item[0]))[:12]))
            for step in steps
            if step.get("found")
        ],
        splits=[(name, result[name], make_charts(result[name], images)) for name in SPLITS if result[name]["shards"]],
        result=result,
        settings=list(flatten_settings(result["config"])),
        style=Markup(styles.read_text(encoding="utf-8")),
    )


def has_images(result: Mapping[str, Any]) -> bool:
    """Return whether the corpus has images; its text, if any, is captions."""
    return bool(result["config"]["read"].get("format") == "images")


def write_headline(result: Mapping[str, Any]) -> str:
    """Return a headline, such as `3.2 M tokens of text`."""
    key, unit = ("documents", "images") if has_images(result) else ("tokens", "tokens of text")
    return f"{format_count(sum(result[name][key] for name in SPLITS))} {unit}"


def make_tiles(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the main figures as (label, value, remark)."""
    train, validation = (result[name] for name in SPLITS)
    images, read = has_images(result), result["steps"][0]
    documents = train["documents"] + validation["documents"]
    text = train["text_bytes"] + validation["text_bytes"]
    held_out = validation["documents"] / documents if images else validation["text_bytes"] / max(1, text)
    text_bars = [
        (
            "Captions" if images else "Text",
            format_file_size(text),
            "" if images else f"{100 * text / max(1, read['bytes_in']):.1f} % of what was read",
        ),
        (
            "Tokens",
            format_count(train["tokens"] + validation["tokens"]),
            f"{format_count(train['tokens'])} for training",
        ),
        ("Bytes per token", f"{train['bytes_per_token']:.2f}", f"validation {validation['bytes_per_token']:.2f}"),
    ]
    return [
        ("Images" if images else "Documents", format_count(documents), f"of {format_count(read['documents_in'])} read"),
        *(text_bars if text or not images else []),
        (
            "On disk",
            format_file_size(train["bytes"] + validation["bytes"]),
            format_counted(train["shards"] + validation["shards"], "shard"),
        ),
        ("Held out", f"{100 * held_out:.1f} %", f"by {result['held_out']['level']}"),
    ]


def iter_drop_reasons(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (step, reason, dropped documents), the most documents first."""
    drops = [(step["step"], reason, drop) for step in steps for reason, drop in step["dropped"].items()]
    yield from sorted(drops, key=lambda item: -item[2]["documents"])


def make_charts(split: Mapping[str, Any], images: bool) -> dict[str, list[Bar]]:
    """Return the charts of a split by name; without tokens, or from an older version, some are empty."""
    lengths = split.get("lengths", ()) if split["tokens"] else ()
    pieces = split.get("vocabulary", {}).get("common", ())

    def chart_largest(rows: Sequence[tuple[str, int, int, int]], n_more: int = 0) -> list[Bar]:
        totals = [(name, documents if images else text) for name, documents, text, _ in rows]
        more = [Bar(f"and {format_count(n_more)} more", "", 0.0)] if n_more else []
        return make_bars(totals, format_count if images else format_file_size) + more

    return {
        "lengths": make_bars([(f"up to {format_count(max_tokens)}", count) for max_tokens, count in lengths]),
        "pieces": make_bars([(show_whitespace(piece), uses) for piece, uses in pieces]),
        **{
            name: chart_largest(split.get(name, ()), split.get(f"more_{name}", 0))
            for name in ("sources", "domains", "languages")
        },
        **{f"fields.{name}": chart_largest(rows) for name, rows in split.get("fields", {}).items()},
    }


def show_whitespace(piece: str) -> str:
    """Return a piece with visible spaces and line breaks."""
    return repr(piece)[1:-1].replace(" ", "\u2423")


def make_bars(values: Sequence[tuple[str, float]], format_value: Callable[[float], str] = format_count) -> list[Bar]:
    """Return a bar for each (name, value). format_value: value → text."""
    largest = max([value for _, value in values], default=0) or 1
    return [Bar(name, format_value(value), round(100 * value / largest, 2)) for name, value in values]


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and readable values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value, 1):
                yield from flatten_settings(item, f"{prefix}{key} {index}: ")
        elif value not in (None, [], {}):
            yield prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
