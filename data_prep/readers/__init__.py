"""Formats of corpora, one in a file: text, and those whose files hold many records.

A format's module has `read(path, config)`, which yields a Record or a Bad for each record in the order of the file,
and raises BadFileError where the file can't be read on. It is imported when a file needs it.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from data_prep.readers.record import Bad, BadFileError, Record
from megatfm.config.prep import ReadConfig

__all__ = ["FORMATS", "Bad", "BadFileError", "Record", "format_of", "reader"]

FORMATS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "warc": (".warc", ".warc.gz"),
    "mediawiki": (".xml.bz2", ".xml.gz", ".xml.zst"),
    "webdataset": (".tar", ".tar.gz", ".tar.zst", ".tgz"),
}
"""Formats of many records, and the ends of names by which they are known; any other file is text."""


def format_of(name: str, config: ReadConfig, begin: Callable[[int], bytes]) -> str:
    """The name of a file's format: the config's, or as its name (for `.xml` its beginning) says."""
    if config.format is not None:
        return config.format
    name = name.lower()
    if name.endswith(".xml") and begin(100).lstrip(b"\xef\xbb\xbf \r\n").startswith(b"<mediawiki"):
        return "mediawiki"
    return next((format_ for format_, ends in FORMATS.items() if name.endswith(ends)), "text")


def reader(name: str) -> Callable[[Path, ReadConfig], Iterator[Record | Bad]]:
    """The `read` of a format."""
    found: Callable[[Path, ReadConfig], Iterator[Record | Bad]] = import_module(
        f"data_prep.readers.{name}"
    ).read
    return found
