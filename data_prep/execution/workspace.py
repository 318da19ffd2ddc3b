"""The output folder while it is being made: who works on it, for which config, and which stages are committed; and the
names of the corpora in it."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from blake3 import blake3

from megatfm import tokenizers
from megatfm.config.key_migrations import migrate_prep
from megatfm.config.prep import PrepConfig, ReadConfig, SplitConfig, TokenizerConfig
from megatfm.config.prep_steps import PluginStepConfig
from megatfm.config.section import Section
from megatfm.corpus.files import disk_errors_as_megatfm_errors, write_whole
from megatfm.corpus.manifest import INDEX_NAME, MANIFEST, SHARD_NAME
from megatfm.data_prep.execution.executors import Agreement
from megatfm.data_prep.execution.upload import RESULT_FILE, RemoteOutput, local_folder
from megatfm.data_prep.report.page import render
from megatfm.errors import MegatfmError, UsageError

_OF_CORPORA = re.compile(rf"\.?({SHARD_NAME}|{INDEX_NAME}|{re.escape(MANIFEST)})(\.partial)?")

OTHER = "other"


def folder_name(value: str) -> str:
    """A value as the name of a folder: what a path can't have, or would hide, is spelled `%2F`."""
    name = quote(value, safe=" +,;=@()'")[:200]
    return f"%2E{name[1:]}" if name.startswith(".") else name


def corpus_folders(result: Mapping[str, Any], split: str) -> list[str]:
    """The folders, below `out`, of a split's corpora."""
    split_result = result[split]
    if not split_result["shards"]:
        return []
    return [f"{split}/{name}" for name in split_result["corpora"]] if "corpora" in split_result else [split]


def remove_unlisted(out: Path, result: Mapping[str, Any]) -> None:
    """Remove files of corpora that `result` doesn't list, and a tokenizer if it has none: they are of a preparation
    that was interrupted and went on with other settings. Files by other names stay."""
    with disk_errors_as_megatfm_errors(out):
        for split in ("train", "validation"):
            listed = {out / name for name in corpus_folders(result, split)}
            folders = [path for path in (out / split).rglob("*") if path.is_dir() and not path.is_symlink()]
            for folder in [*sorted(folders, reverse=True), out / split]:
                if folder in listed or not folder.is_dir():
                    continue
                for path in folder.iterdir():
                    if _OF_CORPORA.fullmatch(path.name) and not path.is_dir():
                        path.unlink()
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
        if result["tokenizer"]["kind"] == "none":
            for name in tokenizers.TOKENIZER_FILENAMES:
                (out / name).unlink(missing_ok=True)


VERSION = 5
"""Raised when a change of the code changes what the same config makes."""

WORK_DIR = ".work"
SPLITS = ("train", "validation")
REPORT = "report.html"
OUTPUT_NAMES = (*tokenizers.TOKENIZER_FILENAMES, *SPLITS, REPORT)

# Omit settings at their defaults that came later than the first version, so that corpora of earlier versions still
# compare equal.
OMIT_IF_DEFAULT: tuple[tuple[str, type[Section], tuple[str, ...]], ...] = (
    ("read", ReadConfig, ("format", "text_key", "url_key", "metadata_keys", "tokens", "fix_unicode")),
    ("split", SplitConfig, ("validation_files", "partition_by", "partition_values")),
    ("tokenizer", TokenizerConfig, ("kind", "file", "ul2_modes", "pretokenizer", "lowercase")),
)
LATER = {"plugins": [], "steps": [], "dedup": [], "compress": True}
EXCLUDED = {"out", "scratch", "overwrite", "tokenizer_threads", "task_bytes", "dedup_memory_bytes"}
"""Settings that don't change the result."""


def omit_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the settings that count only where they are set, in place; `values` is a config as JSON."""
    for name, section, keys in OMIT_IF_DEFAULT:
        table = values.get(name, {})
        for key in keys:
            default = section.model_fields[key].default
            if isinstance(default, Section):
                default = default.model_dump(mode="json")
            if key in table and table[key] == ([] if default == () else default):
                del table[key]
    for key, default in LATER.items():
        if values.get(key) == default:
            del values[key]
    return values


def config_identity(config: PrepConfig) -> dict[str, Any]:
    """Return what of a config determines the result."""
    values = omit_defaults(config.model_dump(mode="json", exclude=EXCLUDED))
    for step, section in zip(values.get("steps", ()), config.steps, strict=False):
        if isinstance(section, PluginStepConfig):  # its keys mean what the plugin says
            continue
        # A list is what it says, not where it lies.
        if step.get("word_tokenizer") == "space":
            del step["word_tokenizer"], step["language"]
        if "run" in step:
            step["run"] = _checkpoint(step["run"])
        if "file" in step:
            step["file"] = _content(step["file"])
        if step["name"] == "classifier":
            step["folder"] = _contents(step["folder"])
        if step["name"] == "decontaminate":
            step["files"] = [_content(path) for path in step["files"]]
    if config.tokenizer.file is not None:
        values["tokenizer"]["file"] = tokenizers.load(config.tokenizer.file).hash
    return {"version": VERSION, **values}


class Workspace:
    """`out` while it is being made.

    Every finished stage is committed as `.work/HASH/STAGE.json`, beside the files that it made: the hash is that of
    all that the stage depends on, so that an interrupted prep goes on from the first stage that is missing, and never
    reads what other settings made. A stage that writes into `out` itself is committed as `.work/STAGE.json`, which
    goes before another basis writes there. `prep.json`, written last, commits the whole.

    Where `out` is a URL, all is made in a folder of this machine, sent from there, and committed there.
    """

    def __init__(self, config: PrepConfig) -> None:
        self.out = local_folder(config)
        self.folder = self.out / WORK_DIR
        self._remote = (
            RemoteOutput(config.out, self.out, self.folder / "sent", OUTPUT_NAMES)
            if "://" in config.out
            else None
        )
        self.place: Path | str = self._remote.url if self._remote else self.out
        self._config = config
        self._identity = config_identity(config)
        self._agreement = Agreement(self.folder)

    def agree(self, basis: Mapping[str, Any], shared: bool) -> None:
        """Write down what the work depends on; with `shared`, compare it with that of others who are at work.

        Raises UsageError where theirs differs.
        """
        settings = {**self._identity, **basis, "dedup_memory_bytes": self._config.dedup_memory_bytes}
        recorded = self._agreement.settle(settings, shared)
        if recorded is not None:
            raise UsageError(
                f"{self.place}: other tasks are preparing it with another config "
                f"({_difference(recorded, settings)}): give all tasks the same, or wait until the others have ended"
            )

    def finished(self, shared: bool = False) -> dict[str, Any] | None:
        """The result of a finished prep with this config, or None if there is work to do. A UsageError if `out`
        holds anything else. With `shared`, nothing is removed that others may look at."""
        result = self.result()
        if result is None and self._remote:
            self._remote.start(self._config.overwrite and not shared)
        elif result is None:
            self._check_only_own_files()
        elif self._config.overwrite and shared:
            raise UsageError(
                f"{self.place}: overwrite=true, but several tasks can't replace it at once: delete it first"
            )
        elif self._config.overwrite:
            self._clear()
        elif result["config"]["version"] != VERSION:
            raise UsageError(
                f"{self.place}: was prepared by another version of megatfm, which makes other splits: use it "
                "as it is, choose another out, or replace it with overwrite=true"
            )
        elif result["config"] != self._identity:
            raise UsageError(
                f"{self.place}: was prepared with another config ({_difference(result['config'], self._identity)}): "
                "choose another out, or replace it with overwrite=true"
            )
        else:
            self._check_complete(result)
            if self._remote:
                self._remote.remove_marker()
            shutil.rmtree(self._scratch, ignore_errors=True)
            return result
        self.folder.mkdir(exist_ok=True)
        return None

    @property
    def _scratch(self) -> Path:
        """The folder that only the stages need."""
        return self.out if self._remote else self.folder

    def result(self) -> dict[str, Any] | None:
        """Return what `finish` wrote, if it has, with its config in today's words."""
        result = self._remote.read(RESULT_FILE) if self._remote else _read(self.out / RESULT_FILE)
        if not result or "config" not in result:
            return result
        return {**result, "config": omit_defaults(migrate_prep(result["config"]))}

    def upload(self, path: Path) -> None:
        """A file below `out` is final: where `out` is a URL, it goes there."""
        if self._remote:
            self._remote.send(path)

    def folder_of(self, basis: Mapping[str, Any]) -> Path:
        """The folder for what stages that depend on `basis` leave to later ones, named by a hash of it."""
        name = blake3(json.dumps(basis, sort_keys=True).encode()).hexdigest(8)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def stage(self, name: str, basis: Mapping[str, Any], in_out: bool = False) -> dict[str, Any] | None:
        """The committed result of a stage that depends on `basis`; None if it has to run. in_out: whether it has
        written into `out`, where another basis may have written since."""
        committed = _read(self._commit_path(name, basis, in_out))
        if committed is None or committed["basis"] != basis:
            return None
        result: dict[str, Any] = committed["result"]
        return result

    def commit(
        self, name: str, basis: Mapping[str, Any], result: Mapping[str, Any], in_out: bool = False
    ) -> None:
        """Note that a stage is finished."""
        _write(self._commit_path(name, basis, in_out), {"basis": basis, "result": result}, indent=None)

    def forget(self, name: str) -> None:
        """Note that a stage is about to write into `out`: what was there is no longer whole."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def _commit_path(self, name: str, basis: Mapping[str, Any], in_out: bool = False) -> Path:
        return (self.folder if in_out else self.folder_of(basis)) / f"{name}.json"

    def finish(self, result: Mapping[str, Any], clean: bool = True) -> None:
        """Commit the whole and remove what only the stages needed, unless others may still look at it."""
        write_whole(self.out / REPORT, render(result).encode())
        if self._remote:
            self._send_rest(self._remote, result)
        else:
            remove_unlisted(self.out, result)
            _write(self.out / RESULT_FILE, result)
        if clean:
            shutil.rmtree(self._scratch)

    def _send_rest(self, away: RemoteOutput, result: Mapping[str, Any]) -> None:
        """The small files, and last the one that commits all."""
        names = [path for path in map(self.out.joinpath, OUTPUT_NAMES) if path.is_file()]
        for path in names:
            away.send(path, keep=True)
        shards = [
            f"{name}/{file}"
            for split in SPLITS
            for name in corpus_folders(result, split)
            for shard in away.read(f"{name}/{MANIFEST}")["shards"]
            for file in (MANIFEST, shard["file"], shard["index"]["file"])
        ]
        away.remove_stale([*shards, *(path.name for path in names)])
        _write(self.out / RESULT_FILE, result)
        away.send(self.out / RESULT_FILE)
        away.remove_marker()

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[bool]:
        """Keep other preps out of `out`, or with `shared` only those that don't share the work.

        The lock ends with the process, however it ends. Yields False where the file system has no locks, as some
        network file systems. Of those who share, the last one to leave removes what only the stages needed.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise MegatfmError(f"{self.out}: can't be made ({error.strerror}): choose another out") from error
        try:
            yield _locked(descriptor, self.out, shared)
            if shared and self.result() is not None:
                _remove_if_last(descriptor, self._scratch)
        finally:
            self._agreement.close()
            os.close(descriptor)

    def _check_only_own_files(self) -> None:
        present = {
            path.name for path in self.out.iterdir()
        }  # first, as another task may begin at the same time
        names = (*OUTPUT_NAMES, RESULT_FILE)
        expected = (
            {WORK_DIR, *names, *(f".{name}.partial" for name in names)} if self.folder.is_dir() else set()
        )
        strangers = sorted(present - expected)
        if strangers:
            raise UsageError(
                f"{self.out}: holds {strangers[0]!r}, which no prep made: choose a new or an empty folder as out"
            )

    def _check_complete(self, result: Mapping[str, Any]) -> None:
        model, tokenizer_json, _ = tokenizers.TOKENIZER_FILENAMES
        kind = str(result["tokenizer"]["kind"])
        names = [
            *([model] if kind.startswith("sentencepiece") else []),
            *([tokenizer_json] if kind != "none" else []),
            *(f"{name}/{MANIFEST}" for split in SPLITS for name in corpus_folders(result, split)),
        ]
        there = self._remote.has if self._remote else lambda name: (self.out / name).exists()
        missing = [name for name in names if not there(name)]
        if missing:
            raise MegatfmError(
                f"{self.place}/{missing[0]}: is missing from a finished prep: make all again with overwrite=true"
            )

    def _clear(self) -> None:
        """Remove an earlier result: its commit first, so that no half of it is ever taken for a whole."""
        if self._remote:
            self._remote.remove_all()
            self._remote.write_marker()
        (self.out / RESULT_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in map(self.out.joinpath, OUTPUT_NAMES):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _remove_if_last(descriptor: int, folder: Path) -> None:
    """Remove a folder if nobody shares it any more. Of two who leave at once, one may have to ask again."""
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # gives up its own share, so that the other one is now the last
            time.sleep(0.05)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            return


def _locked(descriptor: int, out: Path, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{out}: another prep is working here: wait for it, or choose another out") from None
    except OSError:
        return False
    return True


def _content(path: str) -> str:
    """The hash of a file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: blake3()).hexdigest()  # type: ignore[arg-type,return-value]
    except OSError as error:
        raise UsageError(
            f"{path}: can't be read ({error.strerror}): mend the path, or leave the step out"
        ) from None


def _contents(folder: str) -> dict[str, str]:
    """The hashes of the files in a folder."""
    return {path.name: _content(str(path)) for path in sorted(Path(folder).glob("*")) if path.is_file()}


def _checkpoint(path: str) -> str:
    """The hash of what says what is in a checkpoint, or in the newest of a run."""
    metadata_files = sorted(Path(path).glob("checkpoints/*/metadata.json"))
    return _content(str(metadata_files[-1] if metadata_files else Path(path) / "metadata.json"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MegatfmError(
            f"{path}: can't be read ({error}): delete {path.parent} and prepare again"
        ) from error
    return value


def _write(path: Path, value: Mapping[str, Any], indent: int | None = 2) -> None:
    write_whole(path, f"{json.dumps(value, indent=indent, ensure_ascii=False)}\n".encode())


def _difference(current: Any, wanted: Any, key: str = "") -> str:
    """The first setting in which two configs differ."""
    if isinstance(current, dict) and isinstance(wanted, dict):
        for name in [*wanted, *(name for name in current if name not in wanted)]:
            if current.get(name) != wanted.get(name):
                return _difference(current.get(name), wanted.get(name), f"{key}.{name}" if key else name)
    was, now = ("not set" if value is None else repr(value) for value in (current, wanted))
    return f"{key} was {was}, is {now}"
