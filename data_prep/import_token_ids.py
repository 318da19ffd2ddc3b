"""Import token ids: Megatron-LM's `.bin` with `.idx`, and plain files with an id that ends each document."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.documents import StepStats
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.data_prep.import_external import ImportedDocument
from megatfm.data_prep.input_files import InputFile, InputFiles
from megatfm.data_prep.readers.record import BadFileError
from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import Tokenizer

Ids = NDArray[Any]

WITHOUT_EOS = "files_without_eos_id"
"""Event of a plain file in which the id that ends documents never occurs."""


class IdFiles:
    """Files of token ids; each file is a part."""

    def __init__(self, inputs: InputFiles, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.parts = len(inputs.files)
        self.bytes = sum(file.size for file in inputs.files)
        self.skipped: list[str] = []
        self._inputs = inputs
        self._lengths = np.array([len(token_bytes) for token_bytes in tokenizer.token_bytes() or []], np.int64)

    def iter_documents(self, part: int, counts: StepStats, advance: UpdateProgress) -> Iterator[ImportedDocument]:
        file = self._inputs.files[part]
        try:
            with self._inputs.fetch(file, companions=(".idx",)) as path:
                for index, ids in enumerate(read_token_ids(path, self._inputs.config)):
                    if len(ids):
                        if self._inputs.config.format == "tokens" and ids.nbytes == file.size:
                            counts.count_event(WITHOUT_EOS)
                        yield self._to_document(file, index, ids)
                    else:
                        counts.count_input(0)
                        counts.count_dropped("empty", 0, f"{file.name}#{index}")
        except BadFileError as error:
            self._inputs.skip_or_refuse(file.path, str(error))
            self.skipped.append(f"{file.path}: {error}")
            counts.count_input(0)
            counts.count_dropped("unreadable_file", 0, f"{file.name}: {error}")
        advance(file.size)

    def list_notes(self, counts: StepStats) -> list[str]:
        notes = ["token ids were imported as they are: duplicates were not searched for"]
        if n_files := counts.found.get(WITHOUT_EOS):
            notes.append(
                f"read.tokens.eos_id = {self._inputs.config.tokens.eos_id} never occurs in {n_files:,} of "
                f"{self.parts:,} files, each of which became one document: check it, and read.tokens.dtype, against "
                "the tool that wrote them"
            )
        return notes

    def _to_document(self, file: InputFile, index: int, ids: Ids) -> ImportedDocument:
        size = self.tokenizer.vocab_size
        if ids.min() < 0 or ids.max() >= size:
            bad_id = int(ids.max() if ids.max() >= size else ids.min())
            raise MegatfmError(
                f"{file.path}: document {index} has id {bad_id}, but the tokenizer has {size:,}: set "
                "tokenizer.file to the one that made it, or mend read.tokens.dtype"
            )
        if len(self._lengths):
            text_bytes = int(self._lengths[ids].sum())
        else:
            text_bytes = len(self.tokenizer.decode(ids.tolist()).encode())
        return ImportedDocument(f"{file.name}#{index}", ids, text_bytes)


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
# The integer types among the codes of Megatron-LM's indexed_dataset.py.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 2**22
MIN_CHECKED_IDS = 16
"""Ids of a plain file from which zeros in every second place tell that its type is wider."""


def read_token_ids(path: Path, config: ReadConfig) -> Iterator[Ids]:
    """Yield the ids [n] of each document of a file. Raises BadFileError at damage, UsageError for a wrong eos_id."""
    try:
        if config.format == "megatron":
            yield from _read_megatron(path, config.tokens.eos_id)
        else:
            yield from _read_plain(path, np.dtype(config.tokens.dtype).newbyteorder("<"), config.tokens.eos_id or 0)
    except OSError as error:
        raise BadFileError(f"can't be read ({error.strerror})") from None


def _read_megatron(path: Path, eos_id: int | None) -> Iterator[Ids]:
    index = path.with_suffix(".idx")
    if not index.is_file():
        raise BadFileError(f"has no {index.name} beside it")
    dtype, sizes, pointers, edges = _parse_index(index, index.read_bytes())
    item_bytes, length = dtype.itemsize, path.stat().st_size
    if len(sizes) and (
        sizes.min() < 0
        or pointers.min() < 0
        or (pointers % item_bytes).any()
        or pointers.max() > length  # so that the sum below can't overflow
        or (pointers + sizes * item_bytes).max() > length
    ):
        raise BadFileError(f"does not fit {index.name}: it has {length:,} bytes, and a sequence lies outside")
    data = (
        np.memmap(path, dtype, mode="r", shape=(length // item_bytes,)) if length >= item_bytes else np.empty(0, dtype)
    )
    last_ids = Counter[int]()
    for first, last in pairwise(edges):
        parts = [
            data[pointers[sequence] // item_bytes : pointers[sequence] // item_bytes + sizes[sequence]]
            for sequence in range(int(first), int(last))
        ]
        ids = np.array(parts[0]) if len(parts) == 1 else np.concatenate([data[:0], *parts])  # perhaps no sequence
        last_ids.update(ids[-1:].tolist())
        yield ids[:-1] if eos_id is not None and len(ids) and ids[-1] == eos_id else ids
    if eos_id is not None and last_ids and eos_id not in last_ids:
        usual_id, count = last_ids.most_common(1)[0]
        raise UsageError(
            f"{path}: no document ends with read.tokens.eos_id = {eos_id}, and {count:,} of {last_ids.total():,} end "
            f"with {usual_id}: correct eos_id, or leave it out if no id was appended"
        )


def _parse_index(
    path: Path, data: bytes
) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Parse a `.idx`; return the ids' type, length and byte offset of each sequence, and edges of documents.

    The edges [documents + 1] are sequence indices. path: for errors. Raises BadFileError at damage.
    """
    offset = len(_MAGIC)
    if not data.startswith(_MAGIC) or len(data) < offset + _HEADER.itemsize:
        raise BadFileError(f"{path.name} is no index of Megatron-LM")
    header = np.frombuffer(data, _HEADER, 1, offset)[0]
    count, n_edges = int(header["sequences"]), int(header["documents"])
    offset += _HEADER.itemsize
    if int(header["version"]) != 1 or int(header["dtype"]) not in _DTYPES:
        raise BadFileError(f"{path.name} is of version {header['version']}, with ids of type {header['dtype']}")
    # A field of modes may follow, in data of more than one kind.
    if len(data) - offset not in (12 * count + 8 * n_edges, 13 * count + 8 * n_edges):
        raise BadFileError(f"{path.name} is cut off or damaged: it has {len(data):,} bytes for {count:,} sequences")
    sizes = np.frombuffer(data, "<i4", count, offset).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", count, offset + 4 * count)
    documents = np.frombuffer(data, "<i8", n_edges, offset + 12 * count)
    if n_edges < 1 or documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any():
        raise BadFileError(f"{path.name} is damaged: its documents are not all of its sequences in their order")
    return np.dtype(_DTYPES[int(header["dtype"])]), sizes, pointers, documents


def _read_plain(path: Path, dtype: np.dtype[Any], eos_id: int) -> Iterator[Ids]:
    length = path.stat().st_size
    if length % dtype.itemsize:
        raise BadFileError(f"has {length:,} bytes, which is no whole number of {dtype.name} ids")
    data = np.memmap(path, dtype, mode="r") if length else np.empty(0, dtype)
    if dtype.itemsize < 8 and len(data) >= MIN_CHECKED_IDS and not data[1:_CHUNK:2].any():
        raise UsageError(
            f"{path}: every second id is 0, as if wider ones were read as {dtype.name}: mend read.tokens.dtype"
        )
    start = 0
    for chunk_start in range(0, len(data), _CHUNK):
        for stop in np.flatnonzero(data[chunk_start : chunk_start + _CHUNK] == eos_id) + chunk_start:
            yield np.array(data[start:stop])
            start = int(stop) + 1
    if start < len(data):
        yield np.array(data[start:])
