"""Near duplicates of validation documents, dropped from training: an index of signatures on disk, and the search."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep import NearDuplicatesConfig
from megatfm.corpus.files import AtomicFile
from megatfm.data_prep.dedup.hashing import Signatures, hash_bands, sign_documents
from megatfm.data_prep.dedup.key_table import write_keys
from megatfm.data_prep.documents import Document, StepStats

HASHES = 128
# 32 bands of 4: two documents with similarity 0.6 meet in some band in 98.8 % of cases, with 0.7 in 99.98 %.
BANDS = 32
_WIDTH = HASHES // BANDS


class ValidationNearDuplicates:
    """Drops training documents that are near duplicates of a held-out one.

    Validation keeps the documents, so that split depends on names alone and stays the same when the training data
    grows. The index covers held-out documents only: a kilobyte a document, in memory-mapped files.
    """

    def __init__(self, config: NearDuplicatesConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder

    def scan(self, part: int, documents: Iterable[Document]) -> None:
        """Write the signatures and sources of a part of the held-out documents."""
        write_keys(self._get_path(f"signatures.{part:05d}"), self._scan(part, documents))

    def index(self, parts: int) -> int:
        """Write the index, as files `held-out.*` of the folder. Returns the number of documents."""
        ends = [0]
        with AtomicFile(self._get_path("sources")) as sources:
            for part in range(parts):
                for line in self._get_path(f"sources.{part:05d}").read_bytes().splitlines():
                    sources.write(line)
                    ends.append(sources.size)
            sources.commit()
        write_keys(self._get_path("lines"), [np.array(ends, "<i8")])
        part_signatures = (np.fromfile(self._get_path(f"signatures.{part:05d}"), "<u4") for part in range(parts))
        write_keys(self._get_path("signatures"), part_signatures)
        rows, count = self._map_file("signatures", "<u4", HASHES), len(ends) - 1
        orders = (np.argsort(hash_bands(rows, band, _WIDTH), kind="stable") for band in range(BANDS))
        write_keys(self._get_path("places"), (order[None] for order in orders))
        documents_by_hash = self._map_file("places", "<i8", count)
        hashes = (hash_bands(rows, band, _WIDTH)[documents_by_hash[band]] for band in range(BANDS))
        write_keys(self._get_path("bands"), (sorted_hashes[None] for sorted_hashes in hashes))
        return count

    def drop_near(self, documents: Iterable[Document], counts: StepStats) -> Iterator[Document]:
        """Yield the documents that are near duplicates of no held-out one."""
        for batch, signatures in sign_documents(documents, self._config.n_grams, HASHES):
            near_duplicates = self._find_nearest(signatures)
            for index, document in enumerate(batch):
                counts.count_input(document.text_bytes)
                if index in near_duplicates:
                    held_out, similarity = near_duplicates[index]
                    example = f"{document.id} ~ {self._read_source(held_out)} ({similarity:.2f})"
                    counts.count_dropped("near_validation_document", document.text_bytes, example)
                else:
                    counts.count_kept(document.text_bytes)
                    yield document

    def _scan(self, part: int, documents: Iterable[Document]) -> Iterator[Signatures]:
        """Yield the documents' signatures, and write their sources."""
        with AtomicFile(self._get_path(f"sources.{part:05d}")) as sources:
            for batch, signatures in sign_documents(documents, self._config.n_grams, HASHES):
                sources.write("".join(f"{json.dumps(document.id)}\n" for document in batch).encode())
                yield signatures
            sources.commit()

    def _find_nearest(self, signatures: Signatures) -> dict[int, tuple[int, float]]:
        """Return, by the number of each near duplicate, the first similar held-out document and the similarity."""
        candidates_by_query: dict[int, set[int]] = defaultdict(set)
        for band, (hashes, documents_by_hash) in enumerate(zip(*self._index, strict=True)):
            query_hashes = hash_bands(signatures, band, _WIDTH)
            firsts, ends = (np.searchsorted(hashes, query_hashes, side) for side in ("left", "right"))
            for query in np.flatnonzero(ends > firsts).tolist():
                candidates_by_query[query].update(documents_by_hash[firsts[query] : ends[query]].tolist())
        nearest = {}
        for query, candidate_set in candidates_by_query.items():
            candidates = np.array(sorted(candidate_set))
            similarities = (self._signatures[candidates] == signatures[query]).mean(axis=1)
            similar = np.flatnonzero(similarities >= self._config.similarity)
            if len(similar):
                nearest[query] = int(candidates[similar[0]]), float(similarities[similar[0]])
        return nearest

    @cached_property
    def _signatures(self) -> NDArray[Any]:
        return self._map_file("signatures", "<u4", HASHES)

    @cached_property
    def _index(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """[bands, documents]: the sorted hashes of each band, and the document of each hash."""
        count = len(self._signatures)
        return self._map_file("bands", "<u8", count), self._map_file("places", "<i8", count)

    def _read_source(self, document: int) -> str:
        begin, end = self._map_file("lines", "<i8", 1)[document : document + 2, 0].tolist()
        with open(self._get_path("sources"), "rb") as file:
            file.seek(begin)
            return str(json.loads(file.read(end - begin)))

    def _get_path(self, name: str) -> Path:
        return self._folder / f"held-out.{name}"

    def _map_file(self, name: str, dtype: str, columns: int) -> NDArray[Any]:
        return np.memmap(self._get_path(name), dtype, mode="r").reshape(-1, columns)
