"""Shards of a split: one corpus, or one for each value of a field."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.manifest import MANIFEST, Manifest, TokenDtype
from megatfm.corpus.writer import ShardWriter, measure_members
from megatfm.data_prep.documents import TokenizedDocument
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.split_statistics import SplitStatistics
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
                *measure_members(document_members),
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
