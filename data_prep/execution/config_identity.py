"""The settings, and the hashes of files, that determine a preparation's result, and that its tasks must share."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatfm import tokenizers
from megatfm.config.prep import PrepConfig, ReadConfig, SplitConfig, TokenizerConfig
from megatfm.config.prep_steps import PluginStepConfig
from megatfm.config.section import Section
from megatfm.corpus.files import write_whole
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import hash_content

VERSION = 5
"""Increased when a change of the code changes the corpus that a config gives."""

# Omit settings at their defaults that came later than the first version, so that corpora of earlier versions still
# compare equal.
OMIT_IF_DEFAULT: tuple[tuple[str, type[Section], tuple[str, ...]], ...] = (
    ("read", ReadConfig, ("format", "text_key", "url_key", "metadata_keys", "tokens", "fix_unicode", "labels")),
    ("split", SplitConfig, ("validation_files", "partition_by", "partition_values")),
    ("tokenizer", TokenizerConfig, ("kind", "file", "ul2_modes", "pretokenizer", "lowercase")),
)
TOP_LEVEL_DEFAULTS = {"plugins": [], "steps": [], "dedup": [], "compress": True}
EXCLUDED = {"out", "scratch", "overwrite", "tokenizer_threads", "task_bytes", "dedup_memory_bytes"}
"""Settings that don't change the result."""


def omit_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Drop settings at their defaults that came after the first version, in place; `values` is a config as JSON."""
    for name, section, keys in OMIT_IF_DEFAULT:
        table = values.get(name, {})
        for key in keys:
            default = section.model_fields[key].default
            if isinstance(default, Section):
                default = default.model_dump(mode="json")
            if key in table and table[key] == ([] if default == () else default):
                del table[key]
    for key, default in TOP_LEVEL_DEFAULTS.items():
        if values.get(key) == default:
            del values[key]
    return values


def identify_config(config: PrepConfig) -> dict[str, Any]:
    """Return the part of a config that determines the result, with hashes in place of the paths of files."""
    values = omit_defaults(config.model_dump(mode="json", exclude=EXCLUDED))
    for step, section in zip(values.get("steps", ()), config.steps, strict=False):
        if isinstance(section, PluginStepConfig):  # its keys mean what the plugin says
            continue
        # A file counts by its content, not by its path.
        if step.get("word_tokenizer") == "space":
            del step["word_tokenizer"], step["language"]
        if "run" in step:
            step["run"] = _hash_checkpoint(step["run"])
        if "file" in step:
            step["file"] = _hash_file(step["file"])
        if step["name"] == "classifier":
            step["folder"] = _hash_folder(step["folder"])
        if step["name"] == "decontaminate":
            step["files"] = [_hash_file(path) for path in step["files"]]
    if config.tokenizer.file is not None:
        values["tokenizer"]["file"] = tokenizers.load(config.tokenizer.file).hash
    return {"version": VERSION, **values}


def describe_first_difference(recorded: Any, current: Any, key: str = "") -> str:
    """Describe the first setting in which two configs differ."""
    if isinstance(recorded, dict) and isinstance(current, dict):
        for name in [*current, *(name for name in recorded if name not in current)]:
            if recorded.get(name) != current.get(name):
                return describe_first_difference(
                    recorded.get(name), current.get(name), f"{key}.{name}" if key else name
                )
    was, now = ("not set" if value is None else repr(value) for value in (recorded, current))
    return f"{key} was {was}, is {now}"


def _hash_file(path: str) -> str:
    """Return the hash of a file. Raises UsageError if it can't be read."""
    try:
        with open(path, "rb") as file:
            return hash_content(file)
    except OSError as error:
        raise UsageError(f"{path}: can't be read ({error.strerror}): mend the path, or leave the step out") from None


def _hash_folder(folder: str) -> dict[str, str]:
    """Return the hash of each file in a folder."""
    return {path.name: _hash_file(str(path)) for path in sorted(Path(folder).glob("*")) if path.is_file()}


def _hash_checkpoint(path: str) -> str:
    """Return the hash of the metadata of a checkpoint, or of the newest one of a run."""
    metadata_files = sorted(Path(path).glob("checkpoints/*/metadata.json"))
    return _hash_file(str(metadata_files[-1] if metadata_files else Path(path) / "metadata.json"))


CONFIG = "config.json"
_SETTLE_SECONDS = 10.0
"""Seconds that the first of several tasks may take to write its settings."""


class SharedSettings:
    """Settings that all tasks in a work folder must share: the first task writes them, the others compare.

    A lock on a file protects them, since network file systems keep locks on folders to one machine. The lock ends with
    its process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def write_or_compare(self, settings: Mapping[str, Any], shared: bool) -> dict[str, Any] | None:
        """Write `settings` if no other task is at work, else compare. Returns the recorded settings if they differ.

        shared: whether other tasks may be at work. Raises UsageError if they are and mustn't, MegatfmError if the first
        one doesn't write its settings.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "tasks"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        settings = json.loads(json.dumps(settings))
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            if self._lock(fcntl.LOCK_EX):
                write_whole(self._folder / CONFIG, json.dumps(settings, indent=2).encode())
                # Another task may slip in between the two locks: then its settings count.
                if not shared or self._lock(fcntl.LOCK_SH):
                    return None
            elif not shared:
                raise UsageError(
                    f"{self._folder.parent}: another prep is working here: wait for it, or choose another out"
                )
            elif self._lock(fcntl.LOCK_SH):
                recorded: dict[str, Any] = json.loads((self._folder / CONFIG).read_bytes())
                return None if recorded == settings else recorded
            time.sleep(0.02)
        raise MegatfmError(
            f"{path}: another task holds this lock but has written no settings: end it, or start again later"
        )

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, kind: int) -> bool:
        """Return whether the lock was acquired: always on a file system without locks, where tasks share no folder."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True
