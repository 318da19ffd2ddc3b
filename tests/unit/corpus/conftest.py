"""Small corpora, as those that rows are made of in `tests/unit/data`."""

from tests.unit.data.conftest import causal, causal_type, corpus, folder, make_documents, packed, write

__all__ = ["causal", "causal_type", "corpus", "folder", "make_documents", "packed", "write"]
