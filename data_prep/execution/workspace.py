"""The output folder of a preparation in progress: lock, config, committed stages, and names of corpora."""

import fcntl
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
from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import write_whole
from megatfm.corpus.manifest import INDEX_NAME, MANIFEST, SHARD_NAME
from megatfm.data_prep.documents import SPLITS
from megatfm.data_prep.execution.config_identity import (
    SharedSettings,
    describe_first_difference,
    identify_config,
    omit_defaults,
)
from megatfm.data_prep.execution.upload import RESULT_FILE, RemoteOutput
from megatfm.data_prep.report import render_report
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import name_write_errors

_CORPUS_FILE = re.compile(rf"\.?({SHARD_NAME}|{INDEX_NAME}|{re.escape(MANIFEST)})(\.partial)?")

OTHER = "other"
MAX_FOLDER_NAME = 200
"""Characters of the longest name of a corpus's folder."""


def to_folder_name(value: str) -> str:
    """Turn a value into the name of a folder: characters that a path can't have, or would hide, become `%2F`.

    A name that would be too long ends in a hash of the value, so that no two values share a folder.
    """
    name = quote(value, safe=" +,;=@()'")
    if len(name) > MAX_FOLDER_NAME:
        name = f"{name[: MAX_FOLDER_NAME - 17]}~{blake3(value.encode()).hexdigest(8)}"
    return f"%2E{name[1:]}" if name.startswith(".") else name


def list_corpus_folders(result: Mapping[str, Any], split: str) -> list[str]:
    """Return the folders, below `out`, of a split's corpora."""
    split_result = result[split]
    if not split_result["shards"]:
        return []
    return [f"{split}/{name}" for name in split_result["corpora"]] if "corpora" in split_result else [split]


def remove_unlisted(out: Path, result: Mapping[str, Any]) -> None:
    """Remove files of corpora that `result` doesn't list, and a tokenizer if it has none. They come from an interrupted
    preparation that went on with other settings. Files by other names stay."""
    with name_write_errors(out):
        for split in SPLITS:
            corpus_paths = {out / name for name in list_corpus_folders(result, split)}
            folders = [path for path in (out / split).rglob("*") if path.is_dir() and not path.is_symlink()]
            for folder in [*sorted(folders, reverse=True), out / split]:
                if folder not in corpus_paths and folder.is_dir():
                    _remove_corpus(folder)
        if result["tokenizer"]["kind"] == "none":
            remove_tokenizer(out)


def _remove_corpus(folder: Path) -> None:
    """Remove the files of a corpus, and its folder if no other file is in it."""
    for path in folder.iterdir():
        if _CORPUS_FILE.fullmatch(path.name) and not path.is_dir():
            path.unlink()
    with suppress(OSError):  # something else is in it
        folder.rmdir()


WORK_DIR = ".work"
REPORT = "report.html"
CHAT_TEMPLATE_NAMES = (tokenizers.CHAT_TEMPLATE, tokenizers.CHAT_TEMPLATES_FOLDER)
OUTPUT_NAMES = (*tokenizers.TOKENIZER_FILENAMES, *CHAT_TEMPLATE_NAMES, *SPLITS, REPORT)


def remove_tokenizer(folder: Path) -> None:
    """Remove the files of a tokenizer, and its chat templates."""
    for name in (*tokenizers.TOKENIZER_FILENAMES, *tokenizers.list_chat_templates(folder)):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it, or it doesn't exist
        (folder / tokenizers.CHAT_TEMPLATES_FOLDER).rmdir()


class Workspace:
    """The folder `out` of a preparation in progress.

    A finished stage is committed as `.work/HASH/STAGE.json`, beside its files. The hash covers everything that the
    stage depends on: an interrupted prep goes on from the first missing stage, and never reads files of other
    settings. A stage that writes into `out` itself is committed as `.work/STAGE.json`, which is removed before another
    basis writes there. `prep.json`, written last, commits the corpus.

    If `out` is a URL, the files are written to a folder of this machine, sent from there, and committed there.
    """

    def __init__(self, config: PrepConfig) -> None:
        self.out = config.local_folder
        self.folder = self.out / WORK_DIR
        self._remote = (
            RemoteOutput(config.out, self.out, self.folder / "sent", OUTPUT_NAMES) if config.has_remote_out else None
        )
        self.location: Path | str = self._remote.url if self._remote else self.out
        self._config = config
        self._identity = identify_config(config)
        self._shared_settings = SharedSettings(self.folder)

    def check_settings(self, basis: Mapping[str, Any], shared: bool) -> None:
        """Record everything that the result depends on; with `shared`, compare it with the record of other tasks.

        Raises UsageError if the two differ.
        """
        settings = {**self._identity, **basis, "dedup_memory_bytes": self._config.dedup_memory_bytes}
        recorded = self._shared_settings.write_or_compare(settings, shared)
        if recorded is not None:
            difference = describe_first_difference(recorded, settings)
            raise UsageError(
                f"{self.location}: other tasks are preparing it with another config ({difference}): give all tasks the "
                "same, or wait until the others have ended"
            )

    def read_finished(self, shared: bool = False) -> dict[str, Any] | None:
        """Return the result of a finished prep with this config, or None if there is work to do.

        With `shared`, files that other tasks may read stay. Raises UsageError if `out` holds anything else.
        """
        result = self.read_result()
        if result is None and self._remote:
            self._remote.start(self._config.overwrite and not shared)
        elif result is None:
            self._check_only_own_files()
        elif self._config.overwrite and shared:
            raise UsageError(
                f"{self.location}: overwrite=true, but several tasks can't replace it at once: delete it first"
            )
        elif self._config.overwrite:
            self._clear()
        elif result["config"]["version"] != self._identity["version"]:
            raise UsageError(
                f"{self.location}: was prepared by another version of megatfm, which makes other splits: use it "
                "as it is, choose another out, or replace it with overwrite=true"
            )
        elif result["config"] != self._identity:
            difference = describe_first_difference(result["config"], self._identity)
            raise UsageError(
                f"{self.location}: was prepared with another config ({difference}): "
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
        """The folder that is removed with the last stage."""
        return self.out if self._remote else self.folder

    def read_result(self) -> dict[str, Any] | None:
        """Return what `finish` wrote, with its config under today's keys; None before."""
        result = self._remote.read(RESULT_FILE) if self._remote else _read_json(self.out / RESULT_FILE)
        if not result or "config" not in result:
            return result
        return {**result, "config": omit_defaults(migrate_prep(result["config"]))}

    def upload(self, path: Path) -> None:
        """Send a final file below `out` to its URL, if `out` is one."""
        if self._remote:
            self._remote.upload(path)

    def get_folder(self, basis: Mapping[str, Any]) -> Path:
        """Return the folder for intermediate files of stages with this basis, named by a hash of it; it is created."""
        name = blake3(json.dumps(basis, sort_keys=True).encode()).hexdigest(8)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def read_stage(self, name: str, basis: Mapping[str, Any], in_out: bool = False) -> dict[str, Any] | None:
        """Return the committed result of a stage that depends on `basis`; None if it has to run.

        in_out: whether it writes into `out`, where another basis may have written since.
        """
        committed = _read_json(self._get_commit_path(name, basis, in_out))
        if committed is None or committed["basis"] != basis:
            return None
        result: dict[str, Any] = committed["result"]
        return result

    def commit(self, name: str, basis: Mapping[str, Any], result: Mapping[str, Any], in_out: bool = False) -> None:
        """Record that a stage is finished."""
        _write_json(self._get_commit_path(name, basis, in_out), {"basis": basis, "result": result}, indent=None)

    def forget(self, name: str) -> None:
        """Record that a stage is about to write into `out`, whose files are incomplete from now on."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def _get_commit_path(self, name: str, basis: Mapping[str, Any], in_out: bool = False) -> Path:
        return (self.folder if in_out else self.get_folder(basis)) / f"{name}.json"

    def finish(self, result: Mapping[str, Any], clean: bool = True) -> None:
        """Commit the corpus, and remove intermediate files. clean: False if other tasks may still read those."""
        write_whole(self.out / REPORT, render_report(result).encode())
        if self._remote:
            self._send_last_files(self._remote, result)
        else:
            remove_unlisted(self.out, result)
            _write_json(self.out / RESULT_FILE, result)
        if clean:  # a network file system keeps files that are still mapped, under other names
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _send_last_files(self, remote: RemoteOutput, result: Mapping[str, Any]) -> None:
        """Send the small files, and last the one that commits the corpus."""
        all_names = dict.fromkeys((*OUTPUT_NAMES, *tokenizers.list_chat_templates(self.out)))
        names = [name for name in all_names if (self.out / name).is_file()]
        for name in names:
            remote.upload(self.out / name, keep=True)
        shards = [
            f"{name}/{file}"
            for split in SPLITS
            for name in list_corpus_folders(result, split)
            for shard in remote.read(f"{name}/{MANIFEST}")["shards"]
            for file in (MANIFEST, shard["file"], shard["index"]["file"])
        ]
        remote.remove_stale([*shards, *names])
        _write_json(self.out / RESULT_FILE, result)
        remote.upload(self.out / RESULT_FILE)
        remote.remove_marker()

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[bool]:
        """Keep other preps out of `out`, or with `shared` only those that don't share the work.

        The lock ends with the process, however that ends. Yields False if the file system has no locks, like some
        network file systems. The last of several tasks to leave removes the intermediate files.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise MegatfmError(f"{self.out}: can't be made ({error.strerror}): choose another out") from error
        try:
            yield _acquire_lock(descriptor, self.out, shared)
            if shared and self.read_result() is not None:
                _remove_if_last(descriptor, self._scratch)
        finally:
            self._shared_settings.close()
            os.close(descriptor)

    @contextmanager
    def name_write_errors(self) -> Iterator[None]:
        """Turn an OSError at a file or folder below `out` into a MegatfmError that says the way out."""
        try:
            yield
        except OSError as error:
            path = Path(os.fsdecode(error.filename or "/"))
            if isinstance(error, FileNotFoundError) or not path.is_relative_to(self.out):
                raise
            with name_write_errors(path):
                raise

    def _check_only_own_files(self) -> None:
        # Listed first, since another task may begin at the same time.
        present = {path.name for path in self.out.iterdir()}
        names = (*OUTPUT_NAMES, RESULT_FILE)
        expected = {WORK_DIR, *names, *(f".{name}.partial" for name in names)} if self.folder.is_dir() else set()
        foreign = sorted(present - expected)
        if foreign:
            raise UsageError(
                f"{self.out}: holds {foreign[0]!r}, which no prep made: choose a new or an empty folder as out"
            )

    def _check_complete(self, result: Mapping[str, Any]) -> None:
        model, tokenizer_json, _ = tokenizers.TOKENIZER_FILENAMES
        kind = str(result["tokenizer"]["kind"])
        names = [
            *([model] if kind.startswith("sentencepiece") else []),
            *([tokenizer_json] if kind != "none" else []),
            *(f"{name}/{MANIFEST}" for split in SPLITS for name in list_corpus_folders(result, split)),
        ]
        exists = self._remote.has if self._remote else lambda name: (self.out / name).exists()
        missing = [name for name in names if not exists(name)]
        if missing:
            raise MegatfmError(
                f"{self.location}/{missing[0]}: is missing from a finished prep: make all again with overwrite=true"
            )

    def _clear(self) -> None:
        """Remove an earlier result: its commit first, so that no partial corpus ever looks complete."""
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
    """Remove a folder if no task shares it any more. If two leave at once, one may have to try again."""
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # this attempt gave up our shared lock, so the other task is now the last
            time.sleep(0.05)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            return


def _acquire_lock(descriptor: int, out: Path, shared: bool) -> bool:
    """Lock a folder. Returns False if its file system has no locks. Raises UsageError if another prep holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{out}: another prep is working here: wait for it, or choose another out") from None
    except OSError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MegatfmError(f"{path}: can't be read ({error}): delete {path.parent} and prepare again") from error
    return value


def _write_json(path: Path, value: Mapping[str, Any], indent: int | None = 2) -> None:
    write_whole(path, f"{json.dumps(value, indent=indent, ensure_ascii=False)}\n".encode())
