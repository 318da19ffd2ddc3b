"""Reads a run directory, finished or not: whatever is there, with a note on what could not be read."""

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
from megatfm.corpus.manifest import MANIFEST, Manifest
from megatfm.corpus.storage import CachedRemoteStorage, ShardCacheConfig, open_storage
from megatfm.errors import MegatfmError, UsageError


@dataclass(frozen=True)
class Curve:
    """One number over the steps. Values may be NaN or infinite."""

    steps: Sequence[int] = ()
    values: Sequence[float] = ()

    @property
    def finite(self) -> list[float]:
        """Values without NaN and infinities, so it may be shorter than the steps."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class CorpusFacts:
    """Facts of a corpus folder's manifest; `problem` instead where it can't be read now."""

    name: str
    folder: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0
    shards: int = 0
    problem: str = ""


class Run:
    """A run directory, read once. Raises UsageError when it is not one."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.toml").is_file():
            raise UsageError(
                f"{folder}: not a run directory (it has no config.toml); give one such as runs/NAME"
            )
        self.folder = folder
        self.notes: list[str] = []
        self.config = self._config()
        self.samples: list[dict[str, Any]] = []
        self.curves = self._curves()
        self.events = list(self.lines("events.jsonl"))
        self.samples += self.lines("samples.jsonl")
        self.environment = self._table("environment.json")
        self.baselines = self._table("baselines.json")
        self.confusion = self._table("confusion.json")
        self.task_results = self._table("task.json")
        self.pictures = self._table("pictures.json")
        self.plan = self._text("plan.txt")

    @property
    def last_step(self) -> int:
        """The last step that is recorded, 0 when none is."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    def curve(self, *path: str) -> Curve:
        """A number of the records by its path, e.g. `curve("evaluation", "code", "loss")`; empty if never there."""
        return self.curves.get(path, Curve())

    @property
    def evaluated(self) -> list[str]:
        """The names of the validation sets that have results, in order of appearance."""
        return list(
            dict.fromkeys(path[1] for path in self.curves if len(path) == 3 and path[0] == "evaluation")
        )

    @property
    def metrics(self) -> list[str]:
        """The metrics of evaluations, in order of appearance."""
        return list(
            dict.fromkeys(
                path[3] for path in self.curves if len(path) == 4 and path[::2] == ("evaluation", "metrics")
            )
        )

    @property
    def terms(self) -> list[str]:
        """The terms of a loss that has several."""
        return list(dict.fromkeys(path[1] for path in self.curves if len(path) == 2 and path[0] == "terms"))

    def corpora(self) -> list[CorpusFacts]:
        """The training corpora and the validation corpora that the config names."""
        validation = self.config.get("data", {}).get("validation") or {}
        named = [*self._trained_on(), *validation.items()]
        return [_corpus(name, str(folder)) for name, folder in named]

    def prep(self) -> dict[str, dict[str, Any]]:
        """prep.json of each training corpus, where it is still there."""
        noted: dict[str, dict[str, Any]] = {}
        for name, place in self._trained_on():
            store = open_storage(place, ShardCacheConfig())
            if isinstance(store, CachedRemoteStorage):
                table = _remote_table(replace(store, url=store.url.rpartition("/")[0]), "prep.json")
            else:
                table = self._table(Path(place).parent / "prep.json")
            if table:
                noted[name] = table
        return noted

    def _trained_on(self) -> list[tuple[str, str]]:
        """Name and folder or URL of the training corpus, or of each source of a mixture."""
        data = self.config.get("data", {})
        mixture = data.get("mixture") or {}
        sources = [(name, source.get("path")) for name, source in mixture.items()]
        return [(name, str(place)) for name, place in [("train", data.get("train")), *sources] if place]

    def _config(self) -> dict[str, Any]:
        path = self.folder / "config.toml"
        try:
            config: dict[str, Any] = migrate(tomllib.loads(path.read_text(encoding="utf-8")))
            return config
        except (OSError, ValueError) as error:
            raise MegatfmError(f"{path}: can't read the run's config: {error}") from error

    def _text(self, name: str | Path) -> str:
        path = self.folder / name
        if not path.is_file():
            return ""
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.notes.append(f"{path.name} can't be read: {error.strerror}")
            return ""

    def _table(self, name: str | Path) -> dict[str, Any]:
        text = self._text(name)
        if not text:
            return {}
        table = _json(text)
        if not isinstance(table, dict):
            self.notes.append(f"{Path(name).name} can't be read: not a JSON object")
            return {}
        return table

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The objects of a JSON-lines file. A run that is writing, or was killed, may leave a torn last line."""
        path, torn = self.folder / name, 0
        if not path.exists():
            return
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    value = _json(line)
                    if isinstance(value, dict):
                        yield value
                    else:
                        torn += 1
        except OSError as error:
            self.notes.append(f"{name} can't be read: {error.strerror}")
        if torn:
            self.notes.append(f"{name}: {torn} line(s) left out that can't be read")

    def _curves(self) -> dict[tuple[str, ...], Curve]:
        """Every number of `metrics.jsonl` as a curve, in arrays, since a run may have a million steps; the samples that
        stand there are added to `samples`."""
        columns: dict[tuple[str, ...], tuple[array[int], array[float]]] = {}
        for record in self.lines("metrics.jsonl"):
            step = record.get("step")
            if not isinstance(step, int):
                continue
            samples = record.pop("samples", [])
            if isinstance(samples, list):
                self.samples += [
                    {**sample, "step": step} for sample in samples if isinstance(sample, Mapping)
                ]
            for path, value in _numbers(record):
                steps, values = columns.setdefault(path, (array("q"), array("d")))
                steps.append(step)
                values.append(value)
        return {path: Curve(*column) for path, column in columns.items()}


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    paths = [folder.absolute().parts for folder in folders]
    for length in count(1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(set(paths)) or length > max(map(len, paths)):
            return names
    raise AssertionError("some length is enough")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _numbers(
    table: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers of nested tables and lists by path; "NaN" and "Infinity" are strings there, since JSON lacks them."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*prefix, key))
        elif isinstance(value, list):
            yield from _numbers({str(place): one for place, one in enumerate(value)}, (*prefix, key))
        elif isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
            yield (*prefix, key), float(value)


def _remote_table(store: CachedRemoteStorage, name: str) -> dict[str, Any]:
    """A JSON object behind a URL; empty where there is none."""
    try:
        table = _json(store.manifest(name).decode(errors="replace"))
    except MegatfmError:
        return {}
    return table if isinstance(table, dict) else {}


def _corpus(name: str, folder: str) -> CorpusFacts:
    try:
        store = open_storage(folder, ShardCacheConfig())
        if isinstance(store, CachedRemoteStorage):
            manifest = Manifest.parse(store.manifest(MANIFEST), f"{store.url}/{MANIFEST}")
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


# --- settings: as sections for people, those that differ from the defaults apart --------------------------------------

Settings = list[tuple[str, list[tuple[str, str]]]]


def sections(config: Mapping[str, Any]) -> Settings:
    """The config as titled lists of keys and values; keys outside a section come first."""
    alone = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in config.items() if isinstance(value, Mapping) and value}
    return [("run", list(flatten(alone))), *((key, list(flatten(table))) for key, table in tables.items())]


def non_default_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings of a resolved config that differ from the defaults; None where this version can't read it.

    A section that differs keeps its `name`, without which its keys say little.
    """
    try:
        read = Config.model_validate(config)
    except ValidationError:
        return None
    differing = read.model_dump(mode="json", exclude_defaults=True)
    _restore_names(differing, read.model_dump(mode="json"))
    return differing


def _restore_names(kept: dict[str, Any], full: Mapping[str, Any]) -> None:
    for key, value in kept.items():
        if isinstance(value, dict) and isinstance(full[key], Mapping):
            _restore_names(value, full[key])
            if value and "name" in full[key] and "name" not in value:
                kept[key] = {"name": full[key]["name"], **value}


def flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Dotted keys and readable values of nested tables."""
    return ((key, text(value)) for key, value in leaves(table))


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def text(value: Any) -> str:
    """A setting as people read it; of numbers every digit, so that unlike ones look unlike."""
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, int):
        return f"{value:,}"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
