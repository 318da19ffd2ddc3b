"""Shards of a split: one corpus, or one for each value of a field; and statistics of what they hold."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.inspect import MOST_VALUES, countable_fields
from megatfm.corpus.manifest import MANIFEST, Manifest, TokenDtype
from megatfm.corpus.writer import ShardWriter
from megatfm.data_prep.documents import Document
from megatfm.data_prep.execution.stages import StageResult, StageRunner
from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

LARGEST = 12


class Statistics:
    """Adds up over the documents of a split."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes() if tokenizer else None
        self._uses = np.zeros(tokenizer.vocab_size if tokenizer else 0, np.int64)
        self._lengths: dict[int, int] = {}
        self._sources: dict[str, list[int]] = {}
        self._domains: dict[str, list[int]] = {}
        self._languages: dict[str, list[int]] = {}
        self._fields: dict[str, dict[str, list[int]]] = {}

    def add(self, ids: NDArray[Any], documents: Sequence[Sequence[Any]]) -> None:
        """The ids of documents, one after the other, and of each its source, tokens and bytes of text, and perhaps what
        belongs to it, its domain, its language and its fields."""
        self._uses += np.bincount(ids, minlength=len(self._uses))
        for source, tokens, size, *more in documents:
            bucket = max(0, tokens - 1).bit_length()
            self._lengths[bucket] = self._lengths.get(bucket, 0) + 1
            domain, language = more[1:3] if len(more) > 2 else ("", "")
            fields = countable_fields(more[3]) if len(more) > 3 else {}
            for name, totals in (
                (Document(source, "").top_level, self._sources),
                (domain, self._domains),
                (language, self._languages),
                *(
                    (value, self._fields.setdefault(field, {}))
                    for field, value in fields.items()
                    if field != "domain"
                ),
            ):
                if name and (name in totals or len(totals) <= MOST_VALUES):
                    total = totals.setdefault(name, [0, 0, 0])
                    for at, value in enumerate((1, size, tokens)):
                        total[at] += value

    def join(self, other: "Statistics") -> None:
        """Add what another one has counted."""
        self._uses += other._uses
        for bucket, count in other._lengths.items():
            self._lengths[bucket] = self._lengths.get(bucket, 0) + count
        pairs = [
            (self._sources, other._sources),
            (self._domains, other._domains),
            (self._languages, other._languages),
            *((self._fields.setdefault(name, {}), totals) for name, totals in other._fields.items()),
        ]
        for mine, other_counts in pairs:
            for name, total in other_counts.items():
                mine[name] = [a + b for a, b in zip(mine.get(name, (0, 0, 0)), total, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """`lengths`: [most tokens, documents]; `sources`: the largest, as [name, documents, bytes, tokens], and
        how many more there are; the same of `domains` and `languages`, where they are known; `vocabulary`, if there is
        one: ids that occur, and the commonest as [piece, times]."""
        tables: dict[str, Any] = {}
        for name, totals in (
            ("sources", self._sources),
            ("domains", self._domains),
            ("languages", self._languages),
        ):
            if totals or name == "sources":
                tables[name] = _largest(totals)
                tables[f"more_{name}"] = max(0, len(totals) - LARGEST)
        if self._fields:
            tables["fields"] = {name: _largest(totals) for name, totals in self._countable()}
        vocabulary = {"vocabulary": self._vocabulary(self._tokenizer)} if self._tokenizer else {}
        return {
            "lengths": [[2**bucket, count] for bucket, count in sorted(self._lengths.items())],
            **tables,
            **vocabulary,
        }

    def token_shares(self) -> dict[str, Any]:
        """For the manifest: by domain, language and the values of fields, all tokens and the largest, as above."""
        totals_by_field = {"domain": self._domains, "language": self._languages, **dict(self._countable())}
        return {
            name: [sum(total[2] for total in totals.values()), _largest(totals)]
            for name, totals in totals_by_field.items()
            if totals
        }

    def _countable(self) -> Iterator[tuple[str, dict[str, list[int]]]]:
        """Fields that have few enough values to be counted."""
        return ((name, totals) for name, totals in self._fields.items() if len(totals) <= MOST_VALUES)

    def _vocabulary(self, tokenizer: Tokenizer) -> dict[str, Any]:
        order = np.argsort(-self._uses, kind="stable")[:LARGEST].tolist()
        return {
            "size": len(self._uses),
            "used": int((self._uses > 0).sum()),
            "used_100_times": int((self._uses >= 100).sum()),
            "common": [[self._spelled(tokenizer, token), int(self._uses[token])] for token in order],
        }

    def _spelled(self, tokenizer: Tokenizer, token: int) -> str:
        """The text that a token stands for, as far as it is known."""
        known = self._bytes[token] if self._bytes else b""
        return known.decode("utf-8", "backslashreplace") if known else tokenizer.id_to_piece(token)


def _largest(totals: dict[str, list[int]]) -> list[list[Any]]:
    largest = sorted(totals.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    return [[value, *total] for value, total in largest[:LARGEST]]


NO_TOKENIZER: StageResult = {"kind": "none", "blake3": "none", "vocab_size": 0}
"""Description of the tokenizer of a corpus without ids."""
MOST_CORPORA = 100


class SplitWriter(ExitStack):
    """Writes a split's documents into `out/NAME`, or those of each value of `split.partition_by` into a folder of
    its own there. Without an encoder there are no ids."""

    def __init__(self, stages: StageRunner, name: str, encoder: Tokenizer | None) -> None:
        super().__init__()
        self._stages, self._encoder = stages, encoder
        self._folder: Path = stages.out / name
        self._by = stages.config.split.partition_by
        self._writers: dict[str, ShardWriter] = {}
        self._statistics: dict[str, Statistics] = {}
        self._number = 0
        # There can be a manifest only if a run was killed between writing it and committing this stage.
        for path in [self._folder / MANIFEST, *self._folder.glob(f"*/{MANIFEST}")]:
            path.unlink(missing_ok=True)
        if not self._by:
            self._writer("")

    def add(
        self, ids: NDArray[Any], documents: Sequence[Sequence[Any]], members: Iterator[Mapping[str, bytes]]
    ) -> None:
        """A part: the ids of its documents one after the other; of each its source, tokens and bytes of text, and
        perhaps what belongs to it, its domain, its language, its fields and its corpus; and the files beside each."""
        at, mine = 0, dict[str, tuple[list[NDArray[Any]], list[Sequence[Any]]]]()
        for document, beside in zip(documents, members, strict=True):
            source, count, size, *more = document
            fields, corpus = more[3:5] if len(more) > 4 else ({}, "")
            of_document = ids[at : at + count]
            self._writer(corpus).add(
                f"{self._number:09d}", of_document, source, size, beside, fields, self._image_size(beside)
            )
            at, self._number = at + count, self._number + 1
            parts, known = mine.setdefault(corpus, ([], []))
            parts.append(of_document)
            known.append(document)
        for corpus, (parts, known) in mine.items():
            self._statistics[corpus].add(np.concatenate(parts), known)

    def _image_size(self, members: Mapping[str, bytes]) -> tuple[int, int] | None:
        """Height and width of an imported image."""
        if self._stages.config.read.format != "images":
            return None
        from megatfm.corpus.image_size import upright_size

        return upright_size(members)

    def finish(self, provenance: Mapping[str, Any]) -> StageResult:
        """Commit all corpora. Returns what describes them together, and each."""
        results = {name: self._finish(name, provenance) for name in sorted(self._writers)}
        if not self._by:
            return results[""]
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.is_dir() and path.name not in results:
                    shutil.rmtree(path)
        statistics = Statistics(self._encoder)
        for split_statistics in self._statistics.values():
            statistics.join(split_statistics)
        totals = {
            name: sum(result[name] for result in results.values())
            for name in ("documents", "text_bytes", "tokens", "shards", "bytes")
        }
        prints = "".join(f"{name} {result['fingerprint']}\n" for name, result in results.items())
        return {
            **totals,
            "bytes_per_token": round(totals["text_bytes"] / max(1, totals["tokens"]), 4),
            "fingerprint": blake3(prints.encode()).hexdigest(),
            **statistics.as_json(),
            "corpora": {
                name: {key: result[key] for key in (*totals, "fingerprint")}
                for name, result in results.items()
            },
        }

    def _finish(self, name: str, provenance: Mapping[str, Any]) -> StageResult:
        statistics = self._statistics[name]
        holds = {"holds": shares} if (shares := statistics.token_shares()) else {}
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

    def _writer(self, corpus: str) -> ShardWriter:
        if corpus in self._writers:
            return self._writers[corpus]
        if len(self._writers) == MOST_CORPORA:
            raise UsageError(
                f"split.partition_by = {self._by!r}: has over {MOST_CORPORA} values: say with "
                "split.partition_values which get a corpus"
            )
        compress = self._stages.config.compress
        dtype: TokenDtype = self._encoder.token_dtype if self._encoder else "uint16"
        self._statistics[corpus] = Statistics(self._encoder)
        writer = ShardWriter(
            self._folder / corpus,
            tokenizer_hash=self._encoder.hash if self._encoder else NO_TOKENIZER["kind"],
            token_dtype=dtype,
            compress=compress,
            pack=compress,
            on_file_written=self._stages.send,
        )
        self._writers[corpus] = self.enter_context(writer)
        return writer
