"""Shards of a split, one corpus or one for each value of a field; and the statistics of its documents."""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.inspect import MAX_VALUES, select_countable_fields
from megatfm.corpus.manifest import MANIFEST, Manifest, TokenDtype
from megatfm.corpus.writer import ShardWriter
from megatfm.data_prep.documents import Document, TokenizedDocument
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

NO_TOKENIZER: StageResult = {"kind": "none", "blake3": "none", "vocab_size": 0}
"""Description of the tokenizer of a corpus without ids."""
MAX_CORPORA = 100


class SplitWriter(ExitStack):
    """Writes a split's documents into `out/NAME`, or into a folder below it for each value of `split.partition_by`.

    encoder: the tokenizer of the ids; None if there are none.
    """

    def __init__(self, stages: StageRunner, name: str, encoder: Tokenizer | None) -> None:
        super().__init__()
        self._stages, self._encoder = stages, encoder
        self._folder: Path = stages.out / name
        self._partition_by = stages.config.split.partition_by
        self._writers: dict[str, ShardWriter] = {}
        self._statistics: dict[str, SplitStatistics] = {}
        self._number = 0
        # There can be a manifest only if a run was killed between writing it and committing this stage.
        for path in [self._folder / MANIFEST, *self._folder.glob(f"*/{MANIFEST}")]:
            path.unlink(missing_ok=True)
        if not self._partition_by:
            self._get_writer("")

    def add(
        self, ids: NDArray[Any], documents: Sequence[TokenizedDocument], members: Iterator[Mapping[str, bytes]]
    ) -> None:
        """Write the documents of a part. ids: of all documents, concatenated. members: files beside each document."""
        start, by_corpus = 0, dict[str, tuple[list[NDArray[Any]], list[TokenizedDocument]]]()
        for document, document_members in zip(documents, members, strict=True):
            document_ids = ids[start : start + document.n_tokens]
            self._get_writer(document.corpus).add(
                f"{self._number:09d}",
                document_ids,
                document.source,
                document.text_bytes,
                document_members,
                document.fields,
            )
            start, self._number = start + document.n_tokens, self._number + 1
            id_parts, corpus_documents = by_corpus.setdefault(document.corpus, ([], []))
            id_parts.append(document_ids)
            corpus_documents.append(document)
        for corpus, (id_parts, corpus_documents) in by_corpus.items():
            self._statistics[corpus].add(np.concatenate(id_parts), corpus_documents)

    def finish(self, provenance: Mapping[str, Any]) -> StageResult:
        """Commit all corpora. Returns the description of the split, and of each corpus if there are several."""
        results = {name: self._finish(name, provenance) for name in sorted(self._writers)}
        if not self._partition_by:
            return results[""]
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.is_dir() and path.name not in results:
                    shutil.rmtree(path)
        statistics = SplitStatistics(self._encoder)
        for split_statistics in self._statistics.values():
            statistics.merge(split_statistics)
        totals = {
            name: sum(result[name] for result in results.values())
            for name in ("documents", "text_bytes", "tokens", "shards", "bytes")
        }
        fingerprints = "".join(f"{name} {result['fingerprint']}\n" for name, result in results.items())
        return {
            **totals,
            "bytes_per_token": round(totals["text_bytes"] / max(1, totals["tokens"]), 4),
            "fingerprint": blake3(fingerprints.encode()).hexdigest(),
            **statistics.as_json(),
            "corpora": {
                name: {key: result[key] for key in (*totals, "fingerprint")} for name, result in results.items()
            },
        }

    def _finish(self, name: str, provenance: Mapping[str, Any]) -> StageResult:
        statistics = self._statistics[name]
        holds = {"holds": shares} if (shares := statistics.list_token_counts()) else {}
        value = {"value": name} if name else {}
        manifest: Manifest = self._writers[name].finish({**provenance, **value, **holds})
        shards = manifest.shards
        tokens, text_bytes = sum(shard.tokens for shard in shards), sum(shard.text_bytes for shard in shards)
        return {
            "documents": sum(shard.samples for shard in shards),
            "text_bytes": text_bytes,
            "tokens": tokens,
            "bytes_per_token": round(text_bytes / max(1, tokens), 4),
            "shards": len(shards),
            "bytes": sum(shard.bytes for shard in shards),
            "fingerprint": manifest.fingerprint,
            **statistics.as_json(),
        }

    def _get_writer(self, corpus: str) -> ShardWriter:
        if corpus in self._writers:
            return self._writers[corpus]
        if len(self._writers) == MAX_CORPORA:
            raise UsageError(
                f"split.partition_by = {self._partition_by!r}: has over {MAX_CORPORA} values: list those that get a "
                "corpus in split.partition_values"
            )
        compress = self._stages.config.compress
        dtype: TokenDtype = self._encoder.token_dtype if self._encoder else "uint16"
        self._statistics[corpus] = SplitStatistics(self._encoder)
        writer = ShardWriter(
            self._folder / corpus,
            tokenizer_hash=self._encoder.hash if self._encoder else NO_TOKENIZER["kind"],
            token_dtype=dtype,
            compress=compress,
            pack=compress,
            on_file_written=self._stages.upload,
        )
        self._writers[corpus] = self.enter_context(writer)
        return writer


MAX_LISTED = 12
"""Number of sources, values and tokens that a list of the largest has."""
Totals = dict[str, list[int]]
"""Value → its documents, bytes of text and tokens."""


class SplitStatistics:
    """Statistics of the documents of a split: lengths, sources, domains, languages, fields, use of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes() if tokenizer else None
        self._uses = np.zeros(tokenizer.vocab_size if tokenizer else 0, np.int64)
        self._lengths = Counter[int]()
        self._categories: dict[str, Totals] = {"sources": {}, "domains": {}, "languages": {}}
        self._fields: dict[str, Totals] = {}

    def add(self, ids: NDArray[Any], documents: Sequence[TokenizedDocument]) -> None:
        """Count documents. ids: of all documents, concatenated."""
        self._uses += np.bincount(ids, minlength=len(self._uses))
        sources, domains, languages = self._categories.values()
        for document in documents:
            self._lengths[max(0, document.n_tokens - 1).bit_length()] += 1
            fields = select_countable_fields(document.fields)
            if "domain" not in document.fields:  # that of the address, which is counted among the domains
                fields.pop("domain", None)
            for name, totals in (
                (Document(document.source, "").top_level, sources),
                (document.domain, domains),
                (document.language, languages),
                *((value, self._get_field_totals(field)) for field, value in fields.items()),
            ):
                if name and (name in totals or len(totals) <= MAX_VALUES):
                    total = totals.setdefault(name, [0, 0, 0])
                    for column, value in enumerate((1, document.text_bytes, document.n_tokens)):
                        total[column] += value

    def _get_field_totals(self, field: str) -> Totals:
        """Return the totals of a field; of the first MAX_VALUES fields, as hostile records may have any number."""
        if field not in self._fields and len(self._fields) >= MAX_VALUES:
            return {}
        return self._fields.setdefault(field, {})

    def merge(self, other: "SplitStatistics") -> None:
        """Add the counts of another instance."""
        self._uses += other._uses
        self._lengths += other._lengths
        for tables, other_tables in ((self._categories, other._categories), (self._fields, other._fields)):
            for name, other_totals in other_tables.items():
                totals = tables.setdefault(name, {})
                for value, total in other_totals.items():
                    totals[value] = [a + b for a, b in zip(totals.get(value, (0, 0, 0)), total, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON.

        lengths: [maximal tokens, documents]. sources: the largest as [name, documents, bytes, tokens], and the number
        of further ones; likewise domains and languages, if known. vocabulary, if there is a tokenizer: number of ids
        that occur, and the commonest as [piece, uses].
        """
        tables: dict[str, Any] = {}
        for name, totals in self._categories.items():
            if totals or name == "sources":
                tables[name] = _list_largest(totals)
                tables[f"more_{name}"] = max(0, len(totals) - MAX_LISTED)
        if self._fields:
            tables["fields"] = {name: _list_largest(totals) for name, totals in self._iter_countable_fields()}
        vocabulary = {"vocabulary": self._describe_vocabulary(self._tokenizer)} if self._tokenizer else {}
        return {
            "lengths": [[2**bucket, count] for bucket, count in sorted(self._lengths.items())],
            **tables,
            **vocabulary,
        }

    def list_token_counts(self) -> dict[str, Any]:
        """Return tokens in total and of the largest values, by domain, language and fields, for the manifest."""
        _, domains, languages = self._categories.values()
        totals_by_field = {"domain": domains, "language": languages, **dict(self._iter_countable_fields())}
        return {
            name: [sum(total[2] for total in totals.values()), _list_largest(totals)]
            for name, totals in totals_by_field.items()
            if totals
        }

    def _iter_countable_fields(self) -> Iterator[tuple[str, Totals]]:
        """Yield the fields that have few enough values to be counted."""
        return ((name, totals) for name, totals in self._fields.items() if len(totals) <= MAX_VALUES)

    def _describe_vocabulary(self, tokenizer: Tokenizer) -> dict[str, Any]:
        order = np.argsort(-self._uses, kind="stable")[:MAX_LISTED].tolist()
        return {
            "size": len(self._uses),
            "used": int((self._uses > 0).sum()),
            "used_100_times": int((self._uses >= 100).sum()),
            "common": [[self._decode_token(tokenizer, token), int(self._uses[token])] for token in order],
        }

    def _decode_token(self, tokenizer: Tokenizer, token: int) -> str:
        """Return the text of a token if its bytes are known, else its piece."""
        text_bytes = self._bytes[token] if self._bytes else b""
        return text_bytes.decode("utf-8", "backslashreplace") if text_bytes else tokenizer.id_to_piece(token)


def _list_largest(totals: Totals) -> list[list[Any]]:
    largest = sorted(totals.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    return [[value, *total] for value, total in largest[:MAX_LISTED]]
