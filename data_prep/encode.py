"""The last stages: the tokenizer, the ids of all documents; and the shards that `written` makes of them."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from megatfm import tokenizers
from megatfm.data.files import AtomicFile
from megatfm.data_prep import tokenizer
from megatfm.data_prep.documents import Document, DocumentWriter, part_path, read_documents, read_parts
from megatfm.data_prep.fast import FastEncoder
from megatfm.data_prep.folders import OTHER, folder_name
from megatfm.data_prep.progress import track_progress
from megatfm.data_prep.stages import StageResult, StageRunner
from megatfm.data_prep.written import NO_TOKENIZER, SplitWriter

BATCH_BYTES = 2**22


class TokenizeStage:
    """Makes the tokenizer out of the training documents, and ids out of all, which wait in a folder."""

    def __init__(self, stages: StageRunner, folder: Path) -> None:
        self._stages = stages
        self._config = stages.config
        self._folder = folder
        self._by = stages.config.split.by

    def make_tokenizer(self, split: StageResult, basis: StageResult) -> StageResult:
        """Copy or train the tokenizer, unless it was made of this basis before; returns what describes it."""
        config, total, parts = self._config.tokenizer, split["train"]["bytes"], split["train"]["parts"]
        share = min(1.0, config.train_bytes / total)
        if config.file is not None:
            return self._stages.once("tokenizer", basis, self.copy_tokenizer, in_out=True)
        name, folder = "train", self._folder
        if share < 1.0:
            name, folder = "sample", self._stages.at(basis)
            self._sample(share, total, parts, basis)

        def train() -> StageResult:
            with self._stages.reporter.stage("train the tokenizer", round(share * total)) as advance:
                documents = track_progress(read_parts(folder, name, parts), advance)
                files = tokenizer.make(config, (document.text for document in documents))
            return tokenizer.write(self._stages.out, files).describe()

        return self._stages.once("tokenizer", basis, train, in_out=True)

    def _sample(self, share: float, total: int, parts: int, basis: StageResult) -> None:
        """A fixed random choice of documents to train the tokenizer on."""
        with self._stages.reporter.stage("choose text for the tokenizer", total) as advance:

            def work(number: int) -> StageResult:
                documents = track_progress(read_documents(part_path(self._folder, "train", number)), advance)
                with DocumentWriter(part_path(self._stages.at(basis), "sample", number)) as writer:
                    for document in documents:
                        if _in_sample(document, share):
                            writer.add(document)
                    writer.commit()
                return {}

            self._stages.parts("sample", basis, parts, work, lambda _: {})

    def copy_tokenizer(self) -> StageResult:
        """The tokenizer of what is taken over, if there is one."""
        if self._config.tokenizer.file is None:
            return NO_TOKENIZER
        return tokenizer.write(self._stages.out, tokenizer.make(self._config.tokenizer, ())).describe()

    def run(
        self, name: str, documents: StageResult, provenance: StageResult, basis: StageResult
    ) -> StageResult:
        """Tokenize a split's parts and write its shards, but for what is done; documents: its bytes and parts."""
        encoder = tokenizers.load(self._stages.out)
        fast = FastEncoder(encoder, self._stages.out)
        threads = self._config.workers or _cores()
        folder, parts = self._stages.at(basis), documents["parts"]
        with self._stages.reporter.stage(f"tokenize {name}", documents["bytes"]) as advance:

            def work(number: int) -> StageResult:
                found = []
                file = AtomicFile(tokens_path(folder, name, number))
                for batch in _batches(read_documents(part_path(self._folder, name, number))):
                    texts = [each.text for each in batch]
                    for document, ids in zip(batch, fast.encode_batch(texts, threads), strict=True):
                        file.write(np.asarray(ids, "<i4").tobytes())
                        known: list[Any] = [document.domain, document.language]
                        if document.fields or self._by:
                            known += [dict(document.fields), self._corpus(document)]
                        found.append([document.id, len(ids), document.text_bytes, [], *known])
                        advance(document.text_bytes)
                file.commit()
                return {"documents": found}

            def tidy() -> None:
                for number in range(parts):  # first what says that the ids are there
                    (folder / f"tokenize-{name}.{number:05d}.json").unlink(missing_ok=True)
                    tokens_path(folder, name, number).unlink(missing_ok=True)

            return self._stages.parts(
                f"tokenize-{name}",
                basis,
                parts,
                work,
                lambda parts: self.write_shards(folder, name, parts, encoder, provenance),
                in_out=True,
                tidy=tidy,
            )

    def _members(self, path: Path, documents: list[list[Any]]) -> Iterator[dict[str, bytes]]:
        """The files beside each document."""
        with ExitStack() as stack:
            file = None
            for _, _, _, *more in documents:
                sizes = more[0] if more else []
                if sizes and file is None:
                    file = stack.enter_context(open(path, "rb"))
                yield {extension: file.read(size) for extension, size in sizes} if sizes and file else {}

    def write_shards(
        self,
        folder: Path,
        name: str,
        parts: Iterable[StageResult],
        encoder: tokenizers.Tokenizer | None,
        provenance: StageResult,
    ) -> StageResult:
        """Shards of the ids that wait in a folder; without an encoder there are no ids."""
        with SplitWriter(self._stages, name, encoder) as written:
            for part, facts in enumerate(parts):
                ids = np.fromfile(tokens_path(folder, name, part), "<i4")
                beside = self._members(members_path(folder, name, part), facts["documents"])
                written.add(ids, facts["documents"], beside)
            return written.finish({**provenance, "split": name})

    def _corpus(self, document: Document) -> str:
        """The name of the corpus that a document belongs to; empty if there is but one."""
        if not self._by:
            return ""
        value, values = document.get(self._by), self._config.split.values
        name = "" if value is None else str(value)
        return folder_name(name) if name and (not values or name in values) else OTHER


def tokens_path(folder: Path, name: str, number: int) -> Path:
    """Where the ids of a part wait, as int32, one document after the other."""
    return folder / f"{name}.{number:05d}.tokens"


def members_path(folder: Path, name: str, number: int) -> Path:
    """Where the files that belong to the documents of a part wait, one after the other."""
    return folder / f"{name}.{number:05d}.members"


def _cores() -> int:
    """The cores that this process may run on; all, where the system doesn't say, as macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_sample(document: Document, share: float) -> bool:
    """A fixed random choice of about `share` of all documents."""
    return int.from_bytes(blake3(document.id.encode()).digest(8), "big") < share * 2**64


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.text_bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
