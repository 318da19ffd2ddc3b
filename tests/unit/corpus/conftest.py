"""Small corpora, on disk and behind a URL."""

from tests.support.packed_corpora import (
    cache,
    causal,
    causal_type,
    corpus,
    fetched,
    folder,
    make_documents,
    memory,
    packed,
    write,
)

__all__ = [
    "cache", "causal", "causal_type", "corpus", "fetched", "folder", "make_documents", "memory", "packed", "write",
]  # fmt: skip
