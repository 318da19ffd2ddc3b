"""The tokenizer of a corpus, trained or brought along, and the ids of all documents."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from megatfm import tokenizers
from megatfm.config.prep import TokenizerConfig
from megatfm.corpus.files import AtomicFile, write_whole
from megatfm.data_prep.documents import Document, DocumentWriter, part_path, read_documents, read_parts
from megatfm.data_prep.execution.progress import track_progress
from megatfm.data_prep.execution.stages import StageResult, StageRunner
from megatfm.data_prep.execution.workspace import OTHER, folder_name
from megatfm.data_prep.fast_encode import FastEncoder
from megatfm.data_prep.shards import NO_TOKENIZER, SplitWriter
from megatfm.tokenizers import Tokenizer

MODEL, JSON, CONFIG = tokenizers.TOKENIZER_FILENAMES

_TRAIN: dict[str, Callable[..., bytes]] = {
    "sentencepiece-bpe": tokenizers.train_sentencepiece,
    "sentencepiece-unigram": partial(tokenizers.train_sentencepiece, model_type="unigram"),
    "byte-bpe": tokenizers.train_byte_bpe,
    "wordpiece": tokenizers.train_wordpiece,
}


def make_tokenizer_files(config: TokenizerConfig, texts: Iterable[str]) -> dict[str, bytes]:
    """Name → content of the tokenizer's files. The texts are not read if there is nothing to train."""
    reserve = {
        "vocab_size": config.vocab_size,
        "sentinels": config.sentinels,
        "modes": config.has_mode_tokens,
    }
    train = partial(_TRAIN[config.kind], texts, **reserve)
    if config.file is not None:
        files = tokenizers.tokenizer_files(config.file)
    elif config.kind == "byte-bpe":
        files = _with_roles(train(pattern=config.pretokenizer))
    elif config.kind == "wordpiece":
        files = _with_roles(train(lowercase=config.lowercase))
    else:
        files = {MODEL: train()}
    if MODEL in files:
        facts = tokenizers.SentencePieceTokenizer(files[MODEL]).describe()
        files[JSON] = f"{json.dumps(facts, indent=2)}\n".encode()
    return files


def write_tokenizer(folder: Path, files: dict[str, bytes]) -> Tokenizer:
    """Put them into a folder in place of any other tokenizer's."""
    for name in tokenizers.TOKENIZER_FILENAMES:
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    return tokenizers.load(folder)


def _with_roles(data: bytes) -> dict[str, bytes]:
    """Add the file from which transformers' AutoTokenizer knows which token plays which role."""
    tokenizer = tokenizers.HuggingFaceTokenizer(data)
    ids = {role: getattr(tokenizer, role) for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep")}
    roles = {
        f"{role}_token": tokenizer.id_to_piece(token) for role, token in ids.items() if token is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    return {CONFIG: f"{json.dumps(config, indent=2)}\n".encode(), JSON: data}


BATCH_BYTES = 2**22


class TokenizeStage:
    """Makes the tokenizer out of the training documents, and ids out of all, which wait in a folder."""

    def __init__(self, stages: StageRunner, folder: Path) -> None:
        self._stages = stages
        self._config = stages.config
        self._folder = folder
        self._by = stages.config.split.partition_by

    def make_tokenizer(self, split: StageResult, basis: StageResult) -> StageResult:
        """Copy or train the tokenizer, unless it was made of this basis before; returns what describes it."""
        config, total, parts = self._config.tokenizer, split["train"]["bytes"], split["train"]["parts"]
        share = min(1.0, config.train_bytes / total)
        if config.file is not None:
            return self._stages.once("tokenizer", basis, self.copy_tokenizer, in_out=True)
        name, folder = "train", self._folder
        if share < 1.0:
            name, folder = "tokenizer-sample", self._stages.at(basis)
            self._sample(share, total, parts, basis)

        def train() -> StageResult:
            with self._stages.reporter.stage("tokenizer", round(share * total)) as advance:
                documents = track_progress(read_parts(folder, name, parts), advance)
                files = make_tokenizer_files(config, (document.text for document in documents))
            return write_tokenizer(self._stages.out, files).describe()

        return self._stages.once("tokenizer", basis, train, in_out=True)

    def _sample(self, share: float, total: int, parts: int, basis: StageResult) -> None:
        """A fixed random choice of documents to train the tokenizer on."""
        with self._stages.reporter.stage("tokenizer-sample", total) as advance:

            def work(number: int) -> StageResult:
                documents = track_progress(read_documents(part_path(self._folder, "train", number)), advance)
                with DocumentWriter(part_path(self._stages.at(basis), "tokenizer-sample", number)) as writer:
                    for document in documents:
                        if _in_sample(document, share):
                            writer.add(document)
                    writer.commit()
                return {}

            self._stages.parts("tokenizer-sample", basis, parts, work, lambda _: {})

    def copy_tokenizer(self) -> StageResult:
        """Copy the tokenizer of `tokenizer.file`, if there is one. Returns what describes it."""
        if self._config.tokenizer.file is None:
            return NO_TOKENIZER
        return write_tokenizer(self._stages.out, make_tokenizer_files(self._config.tokenizer, ())).describe()

    def run(
        self, name: str, documents: StageResult, provenance: StageResult, basis: StageResult
    ) -> StageResult:
        """Tokenize a split's parts and write its shards, but for what is done; documents: its bytes and parts."""
        encoder = tokenizers.load(self._stages.out)
        fast = FastEncoder(encoder, self._stages.out)
        threads = self._config.tokenizer_threads or _cores()
        folder, parts = self._stages.at(basis), documents["parts"]
        with self._stages.reporter.stage(f"tokenize-{name}", documents["bytes"]) as advance:

            def work(number: int) -> StageResult:
                token_counts = []
                file = AtomicFile(tokens_path(folder, name, number))
                for batch in _batches(read_documents(part_path(self._folder, name, number))):
                    texts = [document.text for document in batch]
                    for document, ids in zip(batch, fast.encode_batch(texts, threads), strict=True):
                        file.write(np.asarray(ids, "<i4").tobytes())
                        known: list[Any] = [document.domain, document.language]
                        if document.fields or self._by:
                            known += [dict(document.fields), self._corpus(document)]
                        token_counts.append([document.id, len(ids), document.text_bytes, [], *known])
                        advance(document.text_bytes)
                file.commit()
                return {"documents": token_counts}

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
        value, values = document.get(self._by), self._config.split.partition_values
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
