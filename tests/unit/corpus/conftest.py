"""Small corpora, on disk and behind a URL."""

from tests.support.packed_corpora import causal, causal_type, corpus, folder, make_documents, packed, write
from tests.support.remote_corpora import cache, fetched, memory

__all__ = [
    "cache",
    "causal",
    "causal_type",
    "corpus",
    "fetched",
    "folder",
    "make_documents",
    "memory",
    "packed",
    "write",
]
