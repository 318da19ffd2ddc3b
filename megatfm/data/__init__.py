"""Corpora on disk, the order in which their documents are read, packing into rows, and the loader."""

from megatfm.data.batch_schedule import BatchSchedule, Interleave, Stage, choose_interleave
from megatfm.data.corpus import Corpus
from megatfm.data.export import Detokenizer, export
from megatfm.data.foreign import IndexReport, index_folder
from megatfm.data.inspect import CheckReport, check, show
from megatfm.data.loader import DataLoader, ReaderGroup, check_global_batch
from megatfm.data.manifest import Manifest
from megatfm.data.members import Sample
from megatfm.data.mixture import Mixture, Phase, source_seed
from megatfm.data.order import RowAddress, RowOrder
from megatfm.data.packing import IGNORE_INDEX, PAD_DOCUMENT_ID, DocumentChunk, Field, PackingObjective
from megatfm.data.quarantine import Quarantine
from megatfm.data.remote import RemoteFile, RemoteFolder
from megatfm.data.rows import PackedDataset, RowDataset, SizedRowDataset
from megatfm.data.samples import ShuffledDocuments
from megatfm.data.statistics import stats
from megatfm.data.store import ShardCacheConfig
from megatfm.data.writer import ShardWriter

__all__ = [
    "IGNORE_INDEX",
    "PAD_DOCUMENT_ID",
    "BatchSchedule",
    "CheckReport",
    "Corpus",
    "DataLoader",
    "Detokenizer",
    "DocumentChunk",
    "Field",
    "IndexReport",
    "Interleave",
    "Manifest",
    "Mixture",
    "PackedDataset",
    "PackingObjective",
    "Phase",
    "Quarantine",
    "ReaderGroup",
    "RemoteFile",
    "RemoteFolder",
    "RowAddress",
    "RowDataset",
    "RowOrder",
    "Sample",
    "ShardCacheConfig",
    "ShardWriter",
    "ShuffledDocuments",
    "SizedRowDataset",
    "Stage",
    "check",
    "check_global_batch",
    "choose_interleave",
    "export",
    "index_folder",
    "show",
    "source_seed",
    "stats",
]
