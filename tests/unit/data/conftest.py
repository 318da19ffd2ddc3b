"""Small corpora, which rows are made of."""

from tests.support.packed_corpora import (
    causal,
    causal_type,
    corpus,
    folder,
    make_documents,
    memory_corpus,
    packed,
    write,
)

__all__ = ["causal", "causal_type", "corpus", "folder", "make_documents", "memory_corpus", "packed", "write"]
