"""Corpora on disk, the order in which their documents are read, packing into rows, and the loader."""

from megatfm.data.corpus import Corpus
from megatfm.data.foreign import Indexed, index_folder
from megatfm.data.inspect import Checked, check, show
from megatfm.data.loader import Loader, check_batch
from megatfm.data.manifest import Manifest
from megatfm.data.members import Sample
from megatfm.data.mixture import Mixture, Phase, source_seed
from megatfm.data.order import Order, Place
from megatfm.data.packing import IGNORED_TARGET, NO_DOCUMENT, Field, Objective, Piece
from megatfm.data.quarantine import Quarantine
from megatfm.data.rows import CorpusRows, PackedRows, Rows
from megatfm.data.samples import ShuffledSamples
from megatfm.data.steps import Stage, Steps, Streams, streams_for
from megatfm.data.store import Cache
from megatfm.data.writer import ShardWriter

__all__ = [
    "IGNORED_TARGET",
    "NO_DOCUMENT",
    "Cache",
    "Checked",
    "Corpus",
    "CorpusRows",
    "Field",
    "Indexed",
    "Loader",
    "Manifest",
    "Mixture",
    "Objective",
    "Order",
    "PackedRows",
    "Phase",
    "Piece",
    "Place",
    "Quarantine",
    "Rows",
    "Sample",
    "ShardWriter",
    "ShuffledSamples",
    "Stage",
    "Steps",
    "Streams",
    "check",
    "check_batch",
    "index_folder",
    "show",
    "source_seed",
    "streams_for",
]
