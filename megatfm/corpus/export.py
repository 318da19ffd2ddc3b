"""Export a corpus: as text in JSON lines or Parquet, as ids for Megatron-LM, or as plain tars."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.files import AtomicFile, check_local, write_whole
from megatfm.corpus.inspect import start_progress
from megatfm.corpus.shard_format import Sample
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import NewPaths, fsync_directory, name_write_errors, to_strict_json
from megatfm.terminal import format_counted

TEXT_SUFFIXES = (".jsonl", ".jsonl.zst", ".parquet")
IDS_SUFFIX, INDEX_SUFFIX = ".bin", ".idx"
ROWS_PER_GROUP = 1024
"""Documents in a row group of Parquet."""
_FILE_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")
"""Matches the suffix of a file name, but not the end of a folder name such as `v1.5`."""

# https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_MEGATRON_DTYPES = {"uint16": ("<u2", 8), "uint32": ("<i4", 4)}
"""Our token type → Megatron-LM's type and its code there."""


class Detokenizer(NamedTuple):
    """The parts of a tokenizer that exports need."""

    decode: Callable[[NDArray[Any]], str]
    eos: int


def export_corpus(folder: str | Path, out: str | Path, detokenizer: Detokenizer | None) -> str:
    """Write a corpus in the format that the suffix of `out` names; return a summary line.

    - `.jsonl`, `.jsonl.zst`, `.parquet`: one record per document, with its "text", "id", "source", and "fields" if it
      has any (in Parquet as JSON). Numbers that are not finite become strings, as in all of megatfm's JSON. Raises a
      MegatfmError if decoding gives another number of bytes than were encoded.
    - `.bin`: the ids, with `detokenizer.eos` after each document, and an `.idx` file beside it.
    - No suffix, or a slash at the end: a folder of plain tars, which is a corpus too, with one sample per document.

    detokenizer: None if no tokenizer is known; then only tars can be written. Existing files are not overwritten, and
    an interrupted export leaves nothing under the name `out`. Raises UsageError and MegatfmError.
    """
    check_local(out)
    is_folder = str(out).endswith("/")
    out = Path(out)
    suffixes = f"{', '.join(TEXT_SUFFIXES)} or {IDS_SUFFIX}"
    needs_tokenizer = out.name.endswith((*TEXT_SUFFIXES, IDS_SUFFIX)) and not is_folder
    if not needs_tokenizer and not is_folder and (suffix := _FILE_SUFFIX.search(out.name)):
        raise UsageError(
            f"{out}: {suffix[0]} is no format that is written: give a name that ends in {suffixes}, or "
            f"{out}/ for a folder of plain .tar shards"
        )
    corpus = Corpus.open(folder)
    for path in (out, out.with_suffix(INDEX_SUFFIX)) if out.name.endswith(IDS_SUFFIX) and not is_folder else (out,):
        if os.path.lexists(path):
            raise UsageError(f"{path}: is there already: choose another name")
    if needs_tokenizer and detokenizer is None:
        raise UsageError(f"{folder}: there is no tokenizer beside it: give the one that made the ids, --tokenizer FILE")
    new_paths = NewPaths()
    try:
        with name_write_errors(out):
            new_paths.make_folder(out.parent)
        return _write(corpus, out, detokenizer if needs_tokenizer else None)
    except BaseException:
        new_paths.remove_folders()
        raise


def _write(corpus: Corpus, out: Path, detokenizer: Detokenizer | None) -> str:
    """Write a corpus in the format of `out`, as tars without a detokenizer; return a summary line."""
    if detokenizer is None:
        return _write_tars(corpus, out)
    if out.name.endswith(IDS_SUFFIX):
        return _write_megatron(corpus, out, detokenizer.eos)
    records = _iter_records(corpus, detokenizer)
    if out.name.endswith(".parquet"):
        _write_parquet(records, out)
    else:
        _write_json_lines(records, out)
    return f"{out}: the text of {format_counted(corpus.n_samples, 'document')}"


def _iter_samples(corpus: Corpus) -> Iterator[Sample]:
    progress = start_progress("exported", corpus)
    for block in range(corpus.n_blocks):
        for sample in corpus.read_block_samples(block):
            progress.advance()
            yield sample


def _iter_records(corpus: Corpus, detokenizer: Detokenizer) -> Iterator[dict[str, Any]]:
    for sample in _iter_samples(corpus):
        text = detokenizer.decode(sample.tokens)
        if (size := len(text.encode())) != sample.text_bytes and sample.text_bytes:
            raise MegatfmError(
                f"{corpus.folder}: sample {sample.index} ({sample.source}) decodes to {size} bytes, but had "
                f"{sample.text_bytes}: this tokenizer is not lossless, or not the one that made the ids"
            )
        metadata = {"fields": dict(sample.metadata)} if sample.metadata else {}
        yield {"text": text, "id": sample.key, "source": sample.source, **metadata}


def _write_json_lines(records: Iterator[dict[str, Any]], out: Path) -> None:
    zstd = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    is_compressed = out.name.endswith(".zst")
    with AtomicFile(out) as file:
        for record in records:
            line = f"{_to_json(record)}\n".encode()
            file.write(zstd.compress(line) if is_compressed else line)
        file.write(zstd.flush() if is_compressed else b"")
        file.commit()


def _write_parquet(records: Iterator[dict[str, Any]], out: Path) -> None:
    try:
        import pyarrow  # by name, since it takes a while to import
        import pyarrow.parquet
    except ImportError:
        raise MegatfmError(
            f"{out}: Parquet is written by pyarrow: `pip install megatfm[prep]`, or export .jsonl"
        ) from None
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in ("text", "id", "source", "fields")])
    partial = out.with_name(f".{out.name}.partial")
    try:
        with name_write_errors(out):
            with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
                for rows in _iter_row_groups(records):
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema))
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            partial.replace(out)
            fsync_directory(out.parent)
    finally:
        partial.unlink(missing_ok=True)


def _iter_row_groups(records: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield up to `ROWS_PER_GROUP` records at a time, with their fields as JSON."""
    while records_of_group := list(islice(records, ROWS_PER_GROUP)):
        yield [
            {
                **record,
                "source": _escape_surrogates(record["source"]),
                "fields": _to_json(record["fields"]) if "fields" in record else None,
            }
            for record in records_of_group
        ]


def _to_json(value: Any) -> str:
    """Return strict JSON, in Unicode."""
    return _escape_surrogates(to_strict_json(value, ensure_ascii=False))


def _escape_surrogates(text: str) -> str:
    """Spell lone surrogates (bytes of file names that are no UTF-8) as JSON does, for example `caf\\udce9`."""
    return text.encode(errors="backslashreplace").decode()


def _write_megatron(corpus: Corpus, out: Path, eos: int) -> str:
    dtype, code = _MEGATRON_DTYPES[corpus.manifest.token_dtype]
    lengths = corpus.lengths() + 1
    if lengths.max() >= 2**31 or eos > np.iinfo(dtype).max:
        raise UsageError(f"{corpus.folder}: has documents or ids that are too large for Megatron-LM's index")
    index = _make_megatron_index(lengths, np.dtype(dtype).itemsize, code)
    with AtomicFile(out) as file:
        for sample in _iter_samples(corpus):
            if int(sample.tokens.max(initial=0)) > np.iinfo(dtype).max:
                raise MegatfmError(f"{corpus.folder}: sample {sample.index} has ids over {np.iinfo(dtype).max}")
            file.write(np.append(sample.tokens, eos).astype(dtype).tobytes())
        # Before the ids get their name, since neither is of use without the other.
        write_whole(out.with_suffix(INDEX_SUFFIX), index)
        try:
            file.commit()
        except BaseException:
            out.with_suffix(INDEX_SUFFIX).unlink(missing_ok=True)
            raise
    ids, documents = format_counted(int(lengths.sum()), "id"), format_counted(len(lengths), "document")
    return f"{out} and {INDEX_SUFFIX}: {ids} of {documents}, each ended by {eos}"


def _make_megatron_index(lengths: NDArray[np.int64], width: int, code: int) -> bytes:
    """Return the bytes of an `.idx` file. lengths [D]: ids in each document; width: bytes of an id."""
    n = len(lengths)
    return b"".join(
        (
            *(_MAGIC, np.array([_VERSION], "<u8").tobytes(), bytes([code])),
            np.array([n, n + 1], "<u8").tobytes(),
            lengths.astype("<i4").tobytes(),
            ((np.cumsum(lengths) - lengths) * width).astype("<i8").tobytes(),
            np.arange(n + 1, dtype="<i8").tobytes(),
        )
    )


def _write_tars(corpus: Corpus, out: Path) -> str:
    """Write the folder under a name of its own, and rename it when it is complete."""
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    try:
        with name_write_errors(out):
            n_shards = _write_tar_shards(corpus, partial)
            partial.replace(out)
            fsync_directory(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    documents = format_counted(corpus.n_samples, "document")
    return f"{out}: {format_counted(n_shards, 'plain tar')}, with a sample for each of {documents}"


def _iter_side_lengths(corpus: Corpus) -> Iterator[tuple[int, int] | None]:
    """Yield the two numbers that the indexes hold of each sample: size of its image, or tokens of both sides."""
    for shard in range(len(corpus.manifest.shards)):
        index = corpus.indexes.complete(shard)
        if index.has_image_sizes:
            yield from zip(index.samples["height"].tolist(), index.samples["width"].tolist(), strict=True)
        else:
            yield from repeat(None, len(index.samples))


def _write_tar_shards(corpus: Corpus, folder: Path) -> int:
    """Write a corpus as plain tars into a new folder; return the number of tars."""
    dtype, tokenizer_hash = corpus.manifest.token_dtype, corpus.tokenizer_hash
    with ShardWriter(folder, tokenizer_hash=tokenizer_hash, token_dtype=dtype, compress=False, pack=False) as writer:
        for sample, sides in zip(_iter_samples(corpus), _iter_side_lengths(corpus), strict=True):
            # Unique in a shard of the corpus; several of its shards may fit into one tar.
            key = f"sample-{sample.index:012d}" if writer.has_key(sample.key) else sample.key
            writer.add(key, sample.tokens, sample.source, sample.text_bytes, sample.members, sample.metadata, sides)
        manifest = writer.finish({**corpus.manifest.provenance, "exported": "megatfm data export"})
    return len(manifest.shards)
