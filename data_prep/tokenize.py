"""The tokenizer of a corpus, trained or copied, and the ids of all documents."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3

from megatfm import tokenizers
from megatfm.config.prep import TokenizerConfig
from megatfm.corpus.files import AtomicFile, write_whole
from megatfm.data_prep.documents import (
    Document,
    DocumentWriter,
    TokenizedDocument,
    batch_by_bytes,
    get_part_path,
    read_documents,
    read_parts,
)
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress, track_progress
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.execution.workspace import OTHER, remove_tokenizer, to_folder_name
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
    """Return name → content of the tokenizer's files. The texts are read only to train a tokenizer."""
    reserve = {"vocab_size": config.vocab_size, "sentinels": config.sentinels, "modes": config.has_mode_tokens}
    train = partial(_TRAIN[config.kind], texts, **reserve)
    if config.file is not None:
        files = tokenizers.read_tokenizer_files(config.file)
    elif config.kind == "byte-bpe":
        files = _make_transformers_files(train(pattern=config.pretokenizer))
    elif config.kind == "wordpiece":
        files = _make_transformers_files(train(lowercase=config.lowercase))
    else:
        files = {MODEL: train()}
    if MODEL in files:
        description = tokenizers.SentencePieceTokenizer(files[MODEL]).describe()
        files[JSON] = f"{json.dumps(description, indent=2)}\n".encode()
    return files


def write_tokenizer(folder: Path, files: dict[str, bytes]) -> Tokenizer:
    """Write a tokenizer's files into a folder, in place of any other tokenizer's."""
    remove_tokenizer(folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_whole(folder / name, content)
    return tokenizers.load(folder)


def _make_transformers_files(data: bytes) -> dict[str, bytes]:
    """Return a tokenizer.json and the config from which transformers' AutoTokenizer reads its special tokens."""
    tokenizer = tokenizers.HuggingFaceTokenizer(data)
    ids = {role: getattr(tokenizer, role) for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep")}
    roles = {f"{role}_token": tokenizer.id_to_piece(token) for role, token in ids.items() if token is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    return {CONFIG: f"{json.dumps(config, indent=2)}\n".encode(), JSON: data}


BATCH_BYTES = 2**22


class TokenizeStage:
    """Trains the tokenizer on the training documents of a folder, and tokenizes all its documents."""

    def __init__(self, stages: StageRunner, folder: Path) -> None:
        self._stages = stages
        self._config = stages.config
        self._folder = folder
        self._partition_by = stages.config.split.partition_by

    def make_tokenizer(self, split: StageResult, basis: StageResult) -> StageResult:
        """Copy or train the tokenizer, unless that is committed for this basis. Returns its description."""
        config, total, parts = self._config.tokenizer, split["train"]["bytes"], split["train"]["parts"]
        share = min(1.0, config.train_bytes / total)
        if config.file is not None:
            return self._stages.run_once("tokenizer", basis, self.copy_tokenizer, in_out=True)
        name, folder = "train", self._folder
        if share < 1.0:
            name, folder = "tokenizer-sample", self._stages.get_folder(basis)
            self._sample(share, total, parts, basis)

        def train() -> StageResult:
            with self._stages.reporter.stage("tokenizer", round(share * total)) as advance:
                documents = track_progress(read_parts(folder, name, parts), advance)
                files = make_tokenizer_files(config, (document.text for document in documents))
            return write_tokenizer(self._stages.out, files).describe()

        return self._stages.run_once("tokenizer", basis, train, in_out=True)

    def _sample(self, share: float, total: int, parts: int, basis: StageResult) -> None:
        """Write a fixed random sample of documents to train the tokenizer on."""

        def work(part: int, advance: UpdateProgress) -> StageResult:
            documents = track_progress(read_documents(get_part_path(self._folder, "train", part)), advance)
            with DocumentWriter(get_part_path(self._stages.get_folder(basis), "tokenizer-sample", part)) as writer:
                for document in documents:
                    if _in_sample(document, share):
                        writer.add(document)
                writer.commit()
            return {}

        self._stages.run_parts("tokenizer-sample", basis, parts, work, lambda _: {}, total=total)

    def copy_tokenizer(self) -> StageResult:
        """Copy the tokenizer of `tokenizer.file`, if there is one. Returns its description."""
        if self._config.tokenizer.file is None:
            return NO_TOKENIZER
        return write_tokenizer(self._stages.out, make_tokenizer_files(self._config.tokenizer, ())).describe()

    def run(self, name: str, split: StageResult, provenance: StageResult, basis: StageResult) -> StageResult:
        """Tokenize a split and write its shards, unless that is committed. split: its bytes and parts."""
        encoder = tokenizers.load(self._stages.out)
        fast = FastEncoder(encoder, self._stages.out)
        threads = self._config.tokenizer_threads or _count_cores()
        folder, parts = self._stages.get_folder(basis), split["parts"]

        def work(part: int, advance: UpdateProgress) -> StageResult:
            tokenized_documents = []
            documents = read_documents(get_part_path(self._folder, name, part))
            with AtomicFile(get_tokens_path(folder, name, part)) as file:
                for batch in batch_by_bytes(documents, BATCH_BYTES):
                    batch_ids = fast.encode_batch([document.text for document in batch], threads)
                    for document, ids in zip(batch, batch_ids, strict=True):
                        file.write(np.asarray(ids, "<i4").tobytes())
                        tokenized_documents.append(self._describe(document, len(ids)).to_list())
                        advance(document.text_bytes)
                file.commit()
            return {"documents": tokenized_documents}

        def tidy() -> None:
            for part in range(parts):
                # The commit goes first: without its ids it must not be seen.
                (folder / f"tokenize-{name}.{part:05d}.json").unlink(missing_ok=True)
                get_tokens_path(folder, name, part).unlink(missing_ok=True)

        return self._stages.run_parts(
            f"tokenize-{name}",
            basis,
            parts,
            work,
            lambda parts: self.write_shards(folder, name, parts, encoder, provenance),
            total=split["bytes"],
            in_out=True,
            tidy=tidy,
        )

    def _read_members(self, path: Path, documents: Sequence[TokenizedDocument]) -> Iterator[dict[str, bytes]]:
        """Yield the files beside each document, by extension."""
        with open(path, "rb") if any(document.member_sizes for document in documents) else io.BytesIO() as file:
            for document in documents:
                yield {extension: file.read(size) for extension, size in document.member_sizes}

    def write_shards(
        self,
        folder: Path,
        name: str,
        parts: Iterable[StageResult],
        encoder: tokenizers.Tokenizer | None,
        provenance: StageResult,
    ) -> StageResult:
        """Write shards of the ids in a folder; without an encoder there are no ids."""
        with SplitWriter(self._stages, name, encoder) as writer:
            for part, result in enumerate(parts):
                ids = np.fromfile(get_tokens_path(folder, name, part), "<i4")
                documents = [TokenizedDocument(*entry) for entry in result["documents"]]
                members = self._read_members(get_members_path(folder, name, part), documents)
                writer.add(ids, documents, members)
            return writer.finish({**provenance, "split": name})

    def _describe(self, document: Document, n_tokens: int) -> TokenizedDocument:
        return TokenizedDocument(
            document.id,
            n_tokens,
            document.text_bytes,
            domain=document.domain,
            language=document.language,
            fields=document.fields,
            corpus=self._choose_corpus(document),
        )

    def _choose_corpus(self, document: Document) -> str:
        """Return the corpus that a document belongs to; empty if there is only one."""
        if not self._partition_by:
            return ""
        value, values = document.get(self._partition_by), self._config.split.partition_values
        name = "" if value is None else str(value)
        return to_folder_name(name) if name and (not values or name in values) else OTHER


def get_tokens_path(folder: Path, name: str, part: int) -> Path:
    """Return the path of the ids of a part: int32, one document after the other."""
    return folder / f"{name}.{part:05d}.tokens"


def get_members_path(folder: Path, name: str, part: int) -> Path:
    """Return the path of the files beside the documents of a part, concatenated."""
    return folder / f"{name}.{part:05d}.members"


def _count_cores() -> int:
    """Count the cores that this process may run on; all cores if the system doesn't say, like macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_sample(document: Document, share: float) -> bool:
    """Return whether a document is in a fixed random sample of about `share` of all documents."""
    return int.from_bytes(blake3(document.id.encode()).digest(8), "big") < share * 2**64
