"""Corpora on disk, the order in which their documents are read, packing into rows, and the loader."""

from megatfm.data.corpus import Corpus
from megatfm.data.inspect import Checked, check, show
from megatfm.data.loader import Loader, check_batch
from megatfm.data.manifest import Manifest
from megatfm.data.members import Sample
from megatfm.data.order import PackedRows, Place
from megatfm.data.packing import IGNORED_TARGET, NO_DOCUMENT, Objective
from megatfm.data.writer import ShardWriter

__all__ = [
    "IGNORED_TARGET",
    "NO_DOCUMENT",
    "Checked",
    "Corpus",
    "Loader",
    "Manifest",
    "Objective",
    "PackedRows",
    "Place",
    "Sample",
    "ShardWriter",
    "check",
    "check_batch",
    "show",
]
