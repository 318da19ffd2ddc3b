"""Inspect a corpus: verify every byte, show its contents, count its lengths, sources, fields and ids."""

import json
import logging
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.manifest import NO_TOKENIZER
from megatfm.corpus.shard_format import Sample
from megatfm.corpus.webdataset_images import parse_class_number
from megatfm.errors import MegatfmError
from megatfm.terminal import ProgressLog, format_counted

log = logging.getLogger("megatfm")

TOKEN_SHARES, MAX_SHARES = "holds", 6
FILE_WIDTH = 120
"""Characters of a line where the output is no terminal."""
MAX_LISTED = 20
MAX_VALUES = 10_000
MAX_FIELDS = 100
"""Fields of metadata that are counted, at most: hostile records have any number of names."""
PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class CheckReport:
    """Counts of what `check` has read and verified. `bytes`: size of all shards on disk."""

    shards: int
    blocks: int
    samples: int
    tokens: int
    text_bytes: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"whole: {format_counted(self.shards, 'shard')}, {format_counted(self.blocks, 'block')}, "
            f"{format_counted(self.samples, 'sample')}, {format_counted(self.tokens, 'token')} of "
            f"{format_counted(self.text_bytes, 'byte')} of text, {format_counted(self.bytes, 'byte')} on disk"
        )


def start_progress(verb: str, corpus: Corpus) -> ProgressLog:
    """Log what a task over all samples of a corpus will read; return its progress. verb: of the finished ones."""
    shards = format_counted(len(corpus.manifest.shards), "shard")
    log.info("%s: %s in %s", corpus.folder, format_counted(corpus.n_samples, "sample"), shards)
    return ProgressLog(verb, corpus.n_samples, "sample")


def check_corpus(folder: str | Path) -> CheckReport:
    """Re-read every sample and re-hash every file. Raises a MegatfmError that locates the first damage."""
    corpus = Corpus.open(folder)  # which checks sizes and the indexes' hashes
    progress = start_progress("checked", corpus)
    samples = tokens = 0
    for shard_index, shard in enumerate(corpus.manifest.shards):
        fingerprint, keys = blake3(), corpus.indexes.complete(shard_index).samples["key"]
        names, counts = np.unique(keys, return_counts=True)
        if counts.max() > 1:
            repeated = names[counts.argmax()].decode("ascii", "replace")
            raise MegatfmError(f"{corpus.store.path(shard)}: sample {repeated!r} is there twice: {corpus.store.remedy}")
        # Samples first: they locate the damage, the hash only detects it.
        for block in corpus.shard_blocks(shard_index):
            fingerprint.update(corpus.read_frame(block))
            for sample in corpus.read_block_samples(block):
                progress.advance()
                samples += 1
                tokens += len(sample.tokens)
        if fingerprint.hexdigest() != shard.blake3:
            raise MegatfmError(
                f"{corpus.store.path(shard)}: its BLAKE3 hash is not the manifest's: {corpus.store.remedy}"
            )
    return CheckReport(
        shards=len(corpus.manifest.shards),
        blocks=corpus.n_blocks,
        samples=samples,
        tokens=tokens,
        text_bytes=corpus.n_text_bytes,
        bytes=sum(shard.bytes for shard in corpus.manifest.shards),
    )


def describe_corpus(
    folder: str | Path,
    sample: int | None = None,
    decode: Callable[[NDArray[Any]], str] | None = None,
    describe_rows: Callable[[Corpus], dict[str, str]] = lambda corpus: {},
    spell: Callable[[Sample], str | None] | None = None,
) -> str:
    """Return printable facts about a corpus, or one sample: its origin and its text (its ids without `decode`).

    describe_rows: returns further facts, on how documents fill rows. spell: returns the text to show for a sample, or
    None for that of `decode`.
    """
    corpus = Corpus.open(folder)
    if sample is not None:
        return _show_sample(corpus, sample, decode, spell)
    disk = sum(shard.bytes for shard in corpus.manifest.shards)
    facts = {
        "corpus": str(corpus.folder),
        "shards": f"{len(corpus.manifest.shards):,} ({disk:,} bytes, {format_counted(corpus.n_blocks, 'block')})",
        "samples": f"{corpus.n_samples:,}",
        **_describe_classes(corpus),
        **(_describe_text(corpus) if corpus.n_tokens or corpus.tokenizer_hash != NO_TOKENIZER else {}),
        **describe_rows(corpus),
        **_describe_token_shares(corpus.manifest.provenance),
        "fingerprint": corpus.fingerprint,
        **_describe_provenance(corpus.manifest.provenance),
    }
    return _format_facts(facts)


def _describe_text(corpus: Corpus) -> dict[str, str]:
    bytes_per_token = corpus.n_text_bytes / max(corpus.n_tokens, 1)
    return {
        "tokens": f"{corpus.n_tokens:,} ({corpus.manifest.token_dtype})",
        "text": f"{corpus.n_text_bytes:,} bytes ({bytes_per_token:.3f} a token)",
        "tokenizer": corpus.tokenizer_hash,
    }


def _describe_classes(corpus: Corpus) -> dict[str, str]:
    """Return the number of classes of images, and the first names."""
    names = corpus.manifest.class_names
    more = ", …" if len(names) > MAX_SHARES else ""
    return {"classes": f"{len(names):,} ({', '.join(names[:MAX_SHARES])}{more})"} if names else {}


def _describe_token_shares(provenance: dict[str, Any]) -> dict[str, str]:
    """Return the largest values of each field that `megatfm prep` counted, with each one's share of all tokens."""
    shares_by_field = {}
    for name, (total, rows) in provenance.get(TOKEN_SHARES, {}).items():
        shares = [f"{value} {100 * tokens / max(1, total):.1f} %" for value, _, _, tokens in rows[:MAX_SHARES]]
        shares_by_field[name] = ", ".join(shares) + (" and others" if len(rows) > MAX_SHARES else "")
    return shares_by_field


def _describe_provenance(provenance: dict[str, Any]) -> dict[str, str]:
    """Return a line for each entry of a manifest's provenance and each section of the config in it."""
    entries = {name: value for name, value in provenance.items() if name not in (TOKEN_SHARES, "classes")}
    if isinstance(config := entries.get("config"), dict):
        del entries["config"]
        entries |= {f"config.{name}": section for name, section in config.items()}
    return {f"made: {name}": _format_entry(value) for name, value in sorted(entries.items())}


def _format_entry(value: Any) -> str:
    """Format JSON; a table as `key = value, …`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} = {json.dumps(child, ensure_ascii=False)}" for key, child in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_sample(
    corpus: Corpus,
    sample_index: int,
    decode: Callable[[NDArray[Any]], str] | None,
    spell: Callable[[Sample], str | None] | None,
) -> str:
    sample = corpus.read_sample(sample_index)
    has_text = len(sample.tokens) > 0 or corpus.tokenizer_hash != NO_TOKENIZER
    facts = {
        "sample": f"{sample_index:,} of {corpus.n_samples:,}",
        "key": sample.key,
        "source": sample.source,
        **_describe_class(corpus, sample),
        **({"tokens": f"{len(sample.tokens):,} of {sample.text_bytes:,} bytes of text"} if has_text else {}),
        **{f".{extension}": format_counted(len(data), "byte") for extension, data in sample.members.items()},
        **{name: json.dumps(value, ensure_ascii=False) for name, value in sample.metadata.items()},
    }
    if not has_text:
        return _format_facts(facts)
    text = spell(sample) if spell else None
    if text is None:
        text = decode(sample.tokens) if decode else _wrap(" ".join(map(str, sample.tokens)))
    return f"{_format_facts(facts)}\n\n{text}"


def _describe_class(corpus: Corpus, sample: Sample) -> dict[str, str]:
    """Return the number and name of an image's class."""
    number, names = parse_class_number(sample.members.get("cls", b"")), corpus.manifest.class_names
    if number is None:
        return {}
    return {"class": f"{number} ({names[number]})" if number < len(names) else str(number)}


def _format_facts(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    lines = {f"{name:<{width}}  {value}": " " in value for name, value in facts.items()}
    return "\n".join(_wrap(line, width + 2) if has_words else line for line, has_words in lines.items())


def _wrap(line: str, indent: int = 0) -> str:
    """Return a line broken at the terminal's width, or at `FILE_WIDTH` in a file; further lines are indented."""
    width = max(shutil.get_terminal_size((FILE_WIDTH, 0)).columns, 2 * indent)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def tabulate_stats(folder: str | Path, decode_id: Callable[[int], str] | None = None) -> str:
    """Return printable tables of a corpus. Reads all of it.

    They count documents by length, by source (its first folder, or its file), by class, by domain and by each field's
    values, and list the most frequent ids. decode_id: returns the text of an id.
    """
    corpus = Corpus.open(folder)
    lengths = corpus.lengths()
    by_source, by_field = _Totals("source"), dict[str, _Totals]()
    uses, has_more_fields = Counter[int](), False
    progress = start_progress("counted", corpus)
    for block in range(corpus.n_blocks):
        samples = corpus.read_block_samples(block)
        ids, counts = np.unique(np.concatenate([sample.tokens for sample in samples]), return_counts=True)
        uses.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        for sample in samples:
            progress.advance()
            name = sample.source.partition("#")[0].partition("/")[0] or "(no name)"
            by_source.add(name, sample)
            fields = _describe_class(corpus, sample) | select_countable_fields(sample.metadata)
            for field, value in fields.items():
                if field in by_field or len(by_field) < MAX_FIELDS:
                    by_field.setdefault(field, _Totals(field)).add(value, sample)
                else:
                    has_more_fields = True
    tables = [
        f"{format_counted(corpus.n_samples, 'document')}, {format_counted(corpus.n_tokens, 'token')}, "
        f"{format_counted(corpus.n_text_bytes, 'byte')} of text",
        *(_tabulate_lengths(lengths) if corpus.n_tokens else []),
        by_source.table(),
        *(field_counts.table() for field_counts in by_field.values()),
        *([f"there are more than {MAX_FIELDS} fields: further ones are not counted"] if has_more_fields else []),
    ]
    if uses:
        common = sorted(uses.items(), key=lambda item: (-item[1], item[0]))[:MAX_LISTED]
        rows = [(str(i), repr(decode_id(i)) if decode_id else "", f"{count:,}") for i, count in common]
        tables.append(f"{len(uses):,} ids occur\n" + _format_table(("id", "piece", "times"), rows))
    return "\n\n".join(tables)


def select_countable_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the values to count a document by: its URL's domain, and fields that are strings, numbers or booleans."""
    values = {name: str(value) for name, value in fields.items() if isinstance(value, str | int | float | bool)}
    return {"domain": get_domain(values.pop("url")), **values} if "url" in values else values


def get_domain(url: str) -> str:
    """Return the host of a URL in lower case, without `www.` and the dot of the root, or "" if it has none."""
    authority = re.split(r"[/?#\\]", url.strip().partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
    host = authority.partition("]")[0].lstrip("[") if authority.startswith("[") else authority.partition(":")[0]
    return host.lower().removesuffix(".").removeprefix("www.")


class _Totals:
    """Counts of documents, tokens and bytes of text by the values of a field, up to `MAX_VALUES` values."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._totals: dict[str, list[int]] = {}
        self._is_full = False

    def add(self, value: str, sample: Sample) -> None:
        self._is_full |= len(self._totals) > MAX_VALUES
        if not self._is_full:
            total = self._totals.setdefault(value, [0, 0, 0])
            for at, n in enumerate((1, len(sample.tokens), sample.text_bytes)):
                total[at] += n

    def table(self) -> str:
        if self._is_full:
            return f"{self._name}: more than {MAX_VALUES:,} values"
        largest = sorted(self._totals.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))[:MAX_LISTED]
        rows = [(name, *(f"{n:,}" for n in total)) for name, total in largest]
        n_more = len(self._totals) - MAX_LISTED
        return _format_table((self._name, "documents", "tokens", "bytes of text"), rows) + (
            f"\nand {n_more:,} more" if n_more > 0 else ""
        )


def _tabulate_lengths(lengths: NDArray[np.int64]) -> list[str]:
    return [
        _format_table(("tokens a document", "at most"), _tabulate_percentiles(lengths)),
        _format_table(("documents of up to", "documents", "tokens", "of all tokens"), _count_by_length(lengths)),
    ]


def _tabulate_percentiles(lengths: NDArray[np.int64]) -> list[Sequence[str]]:
    percentiles = np.percentile(lengths, PERCENTILES, method="higher").astype(int).tolist()
    rows: list[Sequence[str]] = [(f"{p} %", f"{n:,}") for p, n in zip(PERCENTILES, percentiles, strict=True)]
    return [*rows, ("all", f"{lengths.max():,}")]


def _count_by_length(lengths: NDArray[np.int64]) -> list[Sequence[str]]:
    """Count documents and tokens by length, in powers of two."""
    sizes = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    rows: list[Sequence[str]] = []
    for size in np.unique(sizes).tolist():
        group = lengths[sizes == size]
        share = group.sum() / max(1, lengths.sum())
        rows.append((f"{2**size:,}", f"{len(group):,}", f"{group.sum():,}", f"{100 * share:.1f} %"))
    return rows


def _format_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (head, *rows):
        first, *numbers = (cell for cell in row)
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
