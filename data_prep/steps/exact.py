"""Identical texts."""

from blake3 import blake3

from data_prep.counts import Counts
from data_prep.documents import Document


class ExactDuplicates:
    """Keeps the first of identical texts, in reading order."""

    def __init__(self) -> None:
        self.counts = Counts("exact duplicates")
        self._seen: dict[bytes, str] = {}

    def __call__(self, document: Document) -> Document | None:
        self.counts.take(document.text_bytes)
        digest = blake3(document.text.encode()).digest(16)
        first = self._seen.setdefault(digest, document.source)
        if first != document.source:
            self.counts.drop("same text", document.text_bytes, f"{document.source} = {first}")
            return None
        self.counts.keep(document.text_bytes)
        return document
