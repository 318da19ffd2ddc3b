"""The page of a prepared corpus: one file without any outside reference, and the same bytes for the same result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: its name, the value in words, its length as percent of the longest."""

    name: str
    value: str
    percent: float


def render(result: Mapping[str, Any]) -> str:
    """The page of a `prep.json`."""
    # Autoescape: names and examples are other people's text. No script may run at all.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "size": size}
    package, styles = (
        resources.files("megatfm.data_prep.report"),
        resources.files("megatfm") / "report" / "report.css",
    )
    steps, images = result["steps"], of_images(result)
    fields = {name for split in SPLITS for name in result[split].get("fields", {})}
    return environment.from_string((package / "report.html").read_text(encoding="utf-8")).render(
        headline=headline(result),
        unit="Images" if images else "Documents",
        tiles=tiles(result),
        steps=steps,
        flow=bars([(step["step"], step["bytes_out"]) for step in steps], size),
        reasons=list(reasons(steps)),
        titles=[
            ("domains", "Largest domains, by text"),
            ("languages", "Languages, by text"),
            *((name, f"{name}, by text") for name in sorted(fields)),
        ],
        found=[
            (step["step"], bars(sorted(step["found"].items(), key=lambda item: (-item[1], item[0]))[:12]))
            for step in steps
            if step.get("found")
        ],
        splits=[
            (name, result[name], charts(result[name], images)) for name in SPLITS if result[name]["shards"]
        ],
        result=result,
        settings=list(flat(result["config"])),
        style=Markup(
            styles.read_text(encoding="utf-8") + (package / "report.css").read_text(encoding="utf-8")
        ),
    )


def of_images(result: Mapping[str, Any]) -> bool:
    """Whether the corpus is one of images, whose text, if any, is captions."""
    return bool(result["config"]["read"].get("format") == "images")


def headline(result: Mapping[str, Any]) -> str:
    """Say in three words what the corpus is."""
    unit = "documents" if of_images(result) else "tokens"
    count = number(sum(result[name][unit] for name in SPLITS))
    return f"{count} images" if of_images(result) else f"{count} tokens of text"


def tiles(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers that a reader looks for first: label, value, remark."""
    train, validation = (result[name] for name in SPLITS)
    images, read = of_images(result), result["steps"][0]
    documents = train["documents"] + validation["documents"]
    text = train["text_bytes"] + validation["text_bytes"]
    held_out = validation["documents"] / documents if images else validation["text_bytes"] / max(1, text)
    text_bars = [
        (
            "Captions" if images else "Text",
            size(text),
            "" if images else f"{100 * text / max(1, read['bytes_in']):.1f} % of what was read",
        ),
        ("Tokens", number(train["tokens"] + validation["tokens"]), f"{number(train['tokens'])} for training"),
        (
            "Bytes per token",
            f"{train['bytes_per_token']:.2f}",
            f"validation {validation['bytes_per_token']:.2f}",
        ),
    ]
    return [
        ("Images" if images else "Documents", number(documents), f"of {number(read['documents_in'])} read"),
        *(text_bars if text or not images else []),
        (
            "On disk",
            size(train["bytes"] + validation["bytes"]),
            f"{train['shards'] + validation['shards']} shards",
        ),
        ("Held out", f"{100 * held_out:.1f} %", f"by {result['held_out']['level']}"),
    ]


def reasons(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Step, reason, and what was dropped for it, the most documents first."""
    drops = [(step["step"], reason, drop) for step in steps for reason, drop in step["dropped"].items()]
    yield from sorted(drops, key=lambda item: -item[2]["documents"])


def charts(split: Mapping[str, Any], images: bool) -> dict[str, list[Bar]]:
    """The bars of a split; a corpus of an older version has none, and one without tokens few."""
    lengths = split.get("lengths", ()) if split["tokens"] else ()
    fields = split.get("fields", {})

    def largest(category: str) -> list[Bar]:
        rows = fields[category] if category in fields else split.get(category, ())
        totals = [(name, documents if images else text) for name, documents, text, _ in rows]
        more = split.get(f"more_{category}", 0)
        return bars(totals, number if images else size) + (
            [Bar(f"and {number(more)} more", "", 0.0)] if more else []
        )

    return {
        "lengths": bars([(f"up to {number(most)}", count) for most, count in lengths]),
        **{category: largest(category) for category in ("sources", "domains", "languages", *fields)},
        "pieces": bars(
            [(spelled(piece), uses) for piece, uses in split.get("vocabulary", {}).get("common", ())]
        ),
    }


def spelled(piece: str) -> str:
    """A token with its spaces and line breaks to be seen."""
    return repr(piece)[1:-1].replace(" ", "\u2423")


def bars(values: Sequence[tuple[str, float]], spell: Any = None) -> list[Bar]:
    """A bar each, its length in percent of the longest; spell: how a value is written, if not as a plain number."""
    longest = max([value for _, value in values], default=0) or 1
    return [Bar(name, (spell or number)(value), round(100 * value / longest, 2)) for name, value in values]


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and readable values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for at, item in enumerate(value, 1):
                yield from flat(item, f"{prefix}{key} {at}: ")
        elif value not in (None, [], {}):
            yield prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def number(value: float) -> str:
    """12,500; 3.21 M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:,.0f}"


def size(count: float) -> str:
    """Bytes as people write them."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"
