"""Shards of a split: one corpus, or one for each value of a field."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.data import Manifest, ShardWriter
from megatfm.data.manifest import MANIFEST, TokenDtype
from megatfm.data_prep.stages import StageResult, StageRunner
from megatfm.data_prep.statistics import Statistics
from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

NO_TOKENIZER: StageResult = {"kind": "none", "blake3": "none", "vocab_size": 0}
"""What is said of the tokenizer of a corpus without ids."""
MOST_CORPORA = 100


class SplitWriter(ExitStack):
    """Writes a split's documents into `out/NAME`, or those of each value of `split.by` into a folder of its own there.
    Without an encoder there are no ids."""

    def __init__(self, stages: StageRunner, name: str, encoder: Tokenizer | None) -> None:
        super().__init__()
        self._stages, self._encoder = stages, encoder
        self._folder: Path = stages.out / name
        self._by = stages.config.split.by
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
            self._writer(corpus).add(f"{self._number:09d}", of_document, source, size, beside, fields)
            at, self._number = at + count, self._number + 1
            parts, known = mine.setdefault(corpus, ([], []))
            parts.append(of_document)
            known.append(document)
        for corpus, (parts, known) in mine.items():
            self._statistics[corpus].add(np.concatenate(parts), known)

    def finish(self, provenance: Mapping[str, Any]) -> StageResult:
        """Commit all corpora. Returns what describes them together, and each."""
        found = {name: self._finish(name, provenance) for name in sorted(self._writers)}
        if not self._by:
            return found[""]
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.is_dir() and path.name not in found:
                    shutil.rmtree(path)
        whole = Statistics(self._encoder)
        for each in self._statistics.values():
            whole.join(each)
        totals = {
            name: sum(each[name] for each in found.values())
            for name in ("documents", "text_bytes", "tokens", "shards", "bytes")
        }
        prints = "".join(f"{name} {each['fingerprint']}\n" for name, each in found.items())
        return {
            **totals,
            "bytes_per_token": round(totals["text_bytes"] / max(1, totals["tokens"]), 4),
            "fingerprint": blake3(prints.encode()).hexdigest(),
            **whole.as_json(),
            "corpora": {
                name: {key: each[key] for key in (*totals, "fingerprint")} for name, each in found.items()
            },
        }

    def _finish(self, name: str, provenance: Mapping[str, Any]) -> StageResult:
        statistics = self._statistics[name]
        holds = {"holds": found} if (found := statistics.token_shares()) else {}
        value = {"value": name} if name else {}
        manifest: Manifest = self._writers[name].finish({**provenance, **value, **holds})
        shards = manifest.shards
        tokens, text_bytes = sum(each.tokens for each in shards), sum(each.text_bytes for each in shards)
        return {
            "documents": sum(each.samples for each in shards),
            "text_bytes": text_bytes,
            "tokens": tokens,
            "bytes_per_token": round(text_bytes / max(1, tokens), 4),
            "shards": len(shards),
            "bytes": sum(each.bytes for each in shards),
            "fingerprint": manifest.fingerprint,
            **statistics.as_json(),
        }

    def _writer(self, corpus: str) -> ShardWriter:
        if corpus in self._writers:
            return self._writers[corpus]
        if len(self._writers) == MOST_CORPORA:
            raise UsageError(
                f"split.by = {self._by!r}: has over {MOST_CORPORA} values: say with split.values which get a corpus"
            )
        plain = self._stages.config.plain_tars
        dtype: TokenDtype = self._encoder.token_dtype if self._encoder else "uint16"
        self._statistics[corpus] = Statistics(self._encoder)
        writer = ShardWriter(
            self._folder / corpus,
            tokenizer_hash=self._encoder.hash if self._encoder else NO_TOKENIZER["kind"],
            token_dtype=dtype,
            compress=not plain,
            pack=not plain,
            on_file_written=self._stages.send,
        )
        self._writers[corpus] = self.enter_context(writer)
        return writer
