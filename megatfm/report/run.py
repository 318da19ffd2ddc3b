"""Reads the directory of a finished or unfinished run, and notes what can't be read."""

import json
import math
import tomllib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config
from megatfm.config.key_migrations import migrate
from megatfm.config.sources import check_is_run
from megatfm.corpus.manifest import MANIFEST, Manifest
from megatfm.corpus.storage import CachedRemoteStorage, ShardCacheConfig, open_storage
from megatfm.errors import MegatfmError, UsageError
from megatfm.terminal import join_first

MAX_STEPS = 2**53
"""Steps from here on are not steps of a run, and a browser's numbers could not hold them."""


MAX_LISTED = 6
"""Largest number of metrics that a note names."""


@dataclass(frozen=True)
class Curve:
    """A metric by step. Values may be NaN or infinite."""

    steps: Sequence[int] = ()
    values: Sequence[float] = ()

    @property
    def finite(self) -> list[float]:
        """Finite values only, so this may be shorter than the steps."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def finite_points(self) -> list[tuple[int, float]]:
        """Pairs of step and finite value."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]


@dataclass(frozen=True)
class CorpusFacts:
    """Statistics from a corpus's manifest; only a `problem` if it can't be read."""

    name: str
    folder: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    shards: int = 0
    problem: str = ""


class Run:
    """The contents of a run directory, read at construction. Raises UsageError if it is not a run directory."""

    def __init__(self, folder: Path) -> None:
        check_is_run(folder)
        self.folder = folder
        self.notes: list[str] = []
        self.config = self._read_config()
        self.samples: list[dict[str, Any]] = []
        self.curves = self._read_curves()
        self.events = list(self.read_lines("events.jsonl"))
        self.samples += self.read_lines("samples.jsonl")
        self.environment = self._read_table("environment.json")
        self.baselines = self._read_table("baselines.json")
        self.confusion = self._read_table("confusion.json")
        self.task_results = self._read_table("task.json")
        self.pictures = self._read_table("pictures.json")
        self.plan = self._read_text("plan.txt")

    def get_section(self, *path: str) -> Mapping[str, Any]:
        """Return a section of the config, e.g. `get_section("data", "mixture")`; empty if it is missing or no table."""
        section: Any = self.config
        for key in path:
            section = section.get(key) if isinstance(section, Mapping) else None
        return section if isinstance(section, Mapping) else {}

    @property
    def last_step(self) -> int:
        """Last recorded step; 0 if there is none."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    def get_curve(self, *path: str) -> Curve:
        """Return a metric's curve by its path, e.g. `get_curve("evaluation", "code", "loss")`; empty if unrecorded."""
        return self.curves.get(path, Curve())

    @property
    def last_losses(self) -> list[float]:
        """Finite training losses of the last 2 % of the steps, at least one; empty if none is recorded."""
        losses = self.get_curve("loss").finite
        return losses[-max(1, len(losses) // 50) :]

    @property
    def validation_sets(self) -> list[str]:
        """Names of the validation sets that have results, in order of appearance."""
        return list(dict.fromkeys(path[1] for path in self.curves if len(path) == 3 and path[0] == "evaluation"))

    @property
    def evaluation_metrics(self) -> list[str]:
        """Names of the evaluations' metrics besides the loss, in order of appearance."""
        return list(
            dict.fromkeys(path[3] for path in self.curves if len(path) == 4 and path[::2] == ("evaluation", "metrics"))
        )

    @property
    def loss_terms(self) -> list[str]:
        """Names of the loss terms, if the loss has several."""
        return list(dict.fromkeys(path[1] for path in self.curves if len(path) == 2 and path[0] == "terms"))

    def read_corpora(self) -> list[CorpusFacts]:
        """Return the statistics of the training and validation corpora."""
        corpora = [*self._list_training_corpora(), *self.get_section("data", "validation").items()]
        return [_read_corpus(name, str(folder)) for name, folder in corpora]

    def read_prep(self) -> dict[str, dict[str, Any]]:
        """Return training corpus → its prep.json, for those that have one."""
        tables: dict[str, dict[str, Any]] = {}
        for name, location in self._list_training_corpora():
            try:
                store = open_storage(location, ShardCacheConfig())
            except UsageError:  # `read_corpora` shows why
                continue
            if isinstance(store, CachedRemoteStorage):
                table = _read_remote_table(replace(store, url=store.url.rpartition("/")[0]), "prep.json")
            else:
                table = self._read_table(Path(location).parent / "prep.json")
            if table:
                tables[name] = table
        return tables

    def _list_training_corpora(self) -> list[tuple[str, str]]:
        """Return name and folder or URL of the training corpus, or of each source of a mixture."""
        sources = [(name, self.get_section("data", "mixture", name)) for name in self.get_section("data", "mixture")]
        locations = [("train", self.get_section("data").get("train"))]
        locations += [(name, source.get("path")) for name, source in sources]
        return [(name, str(location)) for name, location in locations if location]

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / "config.toml"
        try:
            config: dict[str, Any] = migrate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
            return config
        except (OSError, ValueError) as error:
            raise MegatfmError(f"{path}: can't read the run's config: {error}") from error

    def _read_text(self, name: str | Path) -> str:
        path = self.folder / name
        if not path.is_file():
            return ""
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.notes.append(f"{path.name} can't be read: {error.strerror}")
            return ""

    def _read_table(self, name: str | Path) -> dict[str, Any]:
        text = self._read_text(name)
        if not text:
            return {}
        table = _parse_json(text)
        if not isinstance(table, dict):
            self.notes.append(f"{Path(name).name} can't be read: not a JSON object")
            return {}
        return table

    def read_lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of a JSONL file. The last line may be incomplete while the run writes, or after a kill."""
        path, n_unreadable = self.folder / name, 0
        if not path.exists():
            return
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    value = _parse_json(line)
                    if isinstance(value, dict):
                        yield value
                    else:
                        n_unreadable += 1
        except OSError as error:
            self.notes.append(f"{name} can't be read: {error.strerror}")
        if n_unreadable:
            self.notes.append(f"{name}: {n_unreadable} line(s) left out that can't be read")

    def _read_curves(self) -> dict[tuple[str, ...], Curve]:
        """Read `metrics.jsonl`: return every number as a curve, and add its samples to `samples`.

        Curves are arrays, since a run may have a million steps.
        """
        columns: dict[tuple[str, ...], tuple[array[int], array[float]]] = {}
        n_without_step = 0
        for record in self.read_lines("metrics.jsonl"):
            step = record.get("step")
            if not isinstance(step, int) or not 0 <= step < MAX_STEPS:
                n_without_step += 1
                continue
            samples = record.pop("samples", [])
            if isinstance(samples, list):
                self.samples += [{**sample, "step": step} for sample in samples if isinstance(sample, Mapping)]
            for path, value in iter_numbers(record):
                steps, values = columns.setdefault(path, (array("q"), array("d")))
                steps.append(step)
                values.append(value)
        if n_without_step:
            self.notes.append(f"metrics.jsonl: {n_without_step} line(s) left out that have no valid step")
        curves = {path: Curve(*column) for path, column in columns.items()}
        if names := [".".join(path) for path, curve in curves.items() if not curve.finite]:
            self.notes.append(f"not shown, since no value is finite: {join_first(names, MAX_LISTED)}")
        return curves


def make_unique_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are distinct."""
    paths = [folder.absolute().parts for folder in folders]
    for length in count(1):
        names = ["/".join(names_on_path[-length:]) for names_on_path in paths]
        if len(set(names)) == len(set(paths)) or length > max(map(len, paths)):
            return names
    raise AssertionError("unreachable: full paths are distinct")


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def iter_numbers(table: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield path and value of each number in nested objects and lists. NaN and infinities are strings in the file."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from iter_numbers(value, (*prefix, key))
        elif isinstance(value, list):
            yield from iter_numbers({str(index): item for index, item in enumerate(value)}, (*prefix, key))
        elif isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
            yield (*prefix, key), _to_float(value)


def _to_float(value: float | str) -> float:
    """Return a number of a JSON file. An integer beyond the range of floats becomes infinite, as JSON's 1e999 does."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if isinstance(value, int) and value > 0 else -math.inf


def _read_remote_table(store: CachedRemoteStorage, name: str) -> dict[str, Any]:
    """Read a JSON object from a remote corpus; empty if there is none."""
    try:
        table = _parse_json(store.fetch_manifest(name).decode(errors="replace"))
    except MegatfmError:
        return {}
    return table if isinstance(table, dict) else {}


def _read_corpus(name: str, folder: str) -> CorpusFacts:
    try:
        store = open_storage(folder, ShardCacheConfig())
        if isinstance(store, CachedRemoteStorage):
            manifest = Manifest.parse(store.fetch_manifest(MANIFEST), f"{store.url}/{MANIFEST}")
        else:
            manifest = Manifest.load(store.folder)
        shards = manifest.shards
    except MegatfmError as error:
        return CorpusFacts(name, folder, problem=str(error))
    return CorpusFacts(
        name,
        folder,
        documents=sum(shard.samples for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=sum(shard.text_bytes for shard in shards),
        disk_bytes=sum(shard.bytes for shard in shards),
        shards=len(shards),
    )


# --- settings, by section, and those that differ from the defaults ----------------------------------------------------

Settings = list[tuple[str, list[tuple[str, str]]]]


def split_sections(config: Mapping[str, Any]) -> Settings:
    """Return the config as sections, title → (key, value). Keys outside a section come first, under "run"."""
    top_level = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    return [("run", list(flatten(top_level))), *((key, list(flatten(table))) for key, table in tables.items())]


def find_non_default_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a config that differ from the defaults; None if this version can't read the config.

    A section that differs keeps its `name`, without which its other keys can't be understood.
    """
    try:
        validated = Config.model_validate(config)
    except ValidationError:
        return None
    differing = validated.model_dump(mode="json", exclude_defaults=True)
    _restore_names(differing, validated.model_dump(mode="json"))
    return differing


def _restore_names(differing: dict[str, Any], full: Mapping[str, Any]) -> None:
    for key, value in differing.items():
        if isinstance(value, dict) and isinstance(full[key], Mapping):
            _restore_names(value, full[key])
            if value and "name" in full[key] and "name" not in value:
                differing[key] = {"name": full[key]["name"], **value}


def flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and formatted values of nested tables."""
    return ((key, format_setting(value)) for key, value in iter_leaves(table))


def iter_leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from iter_leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def format_setting(value: Any) -> str:
    """Format a setting. Numbers keep all digits, so that different ones look different."""
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, int):
        return f"{value:,}"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def parse_count(text: object) -> int:
    """Return a number of processes or machines from `environment.json`; 0 if it is none."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 10 else 0
