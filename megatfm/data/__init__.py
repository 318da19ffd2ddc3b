"""Corpora on disk, the order in which their documents are read, packing into rows, and the loader."""

from megatfm.data.batch_schedule import BatchSchedule, Stage, Streams, streams_for
from megatfm.data.corpus import Corpus
from megatfm.data.export import Codec, export
from megatfm.data.foreign import Indexed, index_folder
from megatfm.data.inspect import Checked, check, show
from megatfm.data.loader import Loader, Readers, check_batch
from megatfm.data.manifest import Manifest
from megatfm.data.members import Sample
from megatfm.data.mixture import Mixture, Phase, source_seed
from megatfm.data.order import Order, RowAddress
from megatfm.data.packing import IGNORED_TARGET, NO_DOCUMENT, Field, Piece, SequenceBuilder
from megatfm.data.quarantine import Quarantine
from megatfm.data.remote import Remote, RemoteFile
from megatfm.data.rows import CorpusRows, PackedRows, Rows
from megatfm.data.samples import ShuffledSamples
from megatfm.data.statistics import stats
from megatfm.data.store import Cache
from megatfm.data.writer import ShardWriter

__all__ = [
    "IGNORED_TARGET",
    "NO_DOCUMENT",
    "BatchSchedule",
    "Cache",
    "Checked",
    "Codec",
    "Corpus",
    "CorpusRows",
    "Field",
    "Indexed",
    "Loader",
    "Manifest",
    "Mixture",
    "Order",
    "PackedRows",
    "Phase",
    "Piece",
    "Quarantine",
    "Readers",
    "Remote",
    "RemoteFile",
    "RowAddress",
    "Rows",
    "Sample",
    "SequenceBuilder",
    "ShardWriter",
    "ShuffledSamples",
    "Stage",
    "Streams",
    "check",
    "check_batch",
    "export",
    "index_folder",
    "show",
    "source_seed",
    "stats",
    "streams_for",
]
