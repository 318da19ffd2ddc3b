"""Formats of input files: text, and formats whose files hold many records.

A format's module has `read_FORMAT(path, config)`, which yields a Record or a BadRecord for each record in the order of
the file, and raises BadFileError at damage. The module is imported when a file needs it.
"""

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from megatfm.config.prep import READ_FORMATS, ReadConfig
from megatfm.data_prep.readers.record import BadRecord, Record
from megatfm.errors import UsageError
from megatfm.registry import Registry

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""
_LINES, _TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv")
FORMATS: dict[str, tuple[str, ...]] = {
    "jsonl": (*_LINES, *(name + end for name in (*_LINES, ".json") for end in COMPRESSED)),
    "json": (),
    "csv": (*_TABLES, *(name + end for name in _TABLES for end in COMPRESSED)),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "warc": (".warc", ".warc.gz", ".warc.zst"),
    "mediawiki": tuple(f".xml{end}" for end in COMPRESSED),
    "webdataset": (".tar", ".tgz", *(f".tar{end}" for end in COMPRESSED)),
}
"""Format of records → suffixes of its files. Other files are text, perhaps compressed; a `.json` may be any."""


_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
_TWO_OBJECT_LINES = re.compile(rb"(\xef\xbb\xbf)?\s*\{[^\n]*\}[ \t\r]*\n\s*\{")
_JSON_HEAD_BYTES = 2**18
"""Bytes of a `.json` in which its first two lines are looked for."""
_MODULES = {
    "jsonl": "text",
    "json": "text",
    "csv": "tables",
    "parquet": "tables",
    "arrow": "tables",
    "warc": "web",
    "mediawiki": "web",
    "webdataset": "webdataset",
}
"""The module of each format, which has a function `read_FORMAT`."""
Reader = Callable[[Path, ReadConfig], Iterator[Record | BadRecord]]
READERS: Registry[Reader] = Registry("format")
"""Formats of plugins."""


def find_format(name: str, config: ReadConfig, begin: Callable[[int], bytes]) -> str:
    """Return the name of a file's format: the config's, else by its suffix, and for `.xml` and `.json` its content.

    begin: returns as many bytes of the beginning of the file.
    """
    if config.format is not None:
        return config.format
    name = name.lower()
    if name.endswith(".xml") and begin(100).lstrip(b"\xef\xbb\xbf \r\n").startswith(b"<mediawiki"):
        return "mediawiki"
    if name.endswith(".json"):
        head = begin(_JSON_HEAD_BYTES)
        if _ARRAY.match(head):
            return "json"
        if _TWO_OBJECT_LINES.match(head):
            return "jsonl"
    return next((format_ for format_, suffixes in FORMATS.items() if name.endswith(suffixes)), "text")


def get_reader(name: str) -> Reader:
    """Return the reader of a format. Raises UsageError with the known formats."""
    if name in _MODULES:
        module = import_module(f"megatfm.data_prep.readers.{_MODULES[name]}")
        read: Reader = getattr(module, f"read_{name}")
        return read
    return READERS.get(name)


def register(name: str, *suffixes: str) -> Callable[[Reader], Reader]:
    """Register the reader of a plugin's format, and the suffixes of its files, as a decorator."""

    def enter(read: Reader) -> Reader:
        if name in READ_FORMATS:
            raise UsageError(f"format {name!r} is one of megatfm's: give the plugin's another name")
        FORMATS[name] = suffixes
        return READERS.register(name)(read)

    return enter
