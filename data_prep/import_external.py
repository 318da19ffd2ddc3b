"""Import documents that need no cleaning, token ids or images: split by document, written as shards.

Their sources are in `import_token_ids.py` and `import_images.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.files import AtomicFile
from megatfm.data_prep.documents import SPLITS, StepStats, TokenizedDocument, format_drop_reasons, warn_of_skipped
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.input_files import matches_path
from megatfm.data_prep.tokenize import TokenizeStage, get_members_path, get_tokens_path
from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

EMPTY_SPLIT: StageResult = {
    **dict.fromkeys(("documents", "text_bytes", "tokens", "shards", "bytes"), 0),
    "bytes_per_token": 0.0,
    "fingerprint": "",
}
"""Description of a split that doesn't exist."""


@dataclass(frozen=True, eq=False)
class ImportedDocument:
    """A document: source, ids [n], UTF-8 bytes of their text, and the files beside it by extension."""

    source: str
    ids: NDArray[Any]
    text_bytes: int
    members: Mapping[str, bytes] = dataclass_field(default_factory=lambda: MappingProxyType({}))
    corpus: str = ""
    """Name of its corpus, if there are several."""

    @property
    def size(self) -> int:
        """Bytes of text and files."""
        return self.text_bytes + sum(map(len, self.members.values()))


class ImportSource(Protocol):
    """A source of documents, in parts that don't depend on the executor."""

    parts: int
    bytes: int
    skipped: list[str]
    """Files and records that could not be used so far."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the ids; None if there are none."""
        ...

    def iter_documents(self, part: int, counts: StepStats, advance: UpdateProgress) -> Iterator[ImportedDocument]:
        """Yield the documents of a part; dropped ones are added to `counts`, `advance` is called with the bytes
        read."""
        ...

    def list_notes(self, counts: StepStats) -> list[str]:
        """Return notes for the user. counts: of all parts."""
        ...


class ImportStage:
    """Writes the documents of a source as shards of both splits."""

    def __init__(self, stages: StageRunner, source: ImportSource) -> None:
        self._stages = stages
        self._split = stages.config.split
        self._source = source

    def run(self, basis: StageResult, provenance: Callable[[str], StageResult]) -> StageResult:
        """Import all parts and write the shards. provenance: makes the manifests' fields from a hash of all
        documents."""
        source, self._folder = self._source, self._stages.get_folder(basis)
        return self._stages.run_parts(
            "import",
            basis,
            source.parts,
            self._import_part,
            lambda parts: self._join(parts, provenance),
            total=source.bytes,
            in_out=True,
        )

    def _import_part(self, part: int, advance: UpdateProgress) -> StageResult:
        """Write the documents of a part to intermediate files, from which `_join` writes the shards."""
        counts, digests, n_known_skipped = StepStats("read"), list[str](), len(self._source.skipped)
        with ExitStack() as stack:
            writers = {name: stack.enter_context(_IntermediateFiles(self._folder, name, part)) for name in SPLITS}
            for document in self._source.iter_documents(part, counts, advance):
                counts.count_input(document.size)
                counts.count_kept(document.size)
                digests.append(_hash_document(document))
                writers[SPLITS[self._is_held_out(document.source)]].add(document)
            for writer in writers.values():
                writer.commit()
        return {
            **{name: writer.documents for name, writer in writers.items()},
            "steps": [counts.as_json()],
            "blake3": digests,
            "skipped": self._source.skipped[n_known_skipped:],
        }

    def _join(self, parts: Iterable[StageResult], provenance: Callable[[str], StageResult]) -> StageResult:
        counts = StepStats.merge([part["steps"][0] for part in parts])
        splits = SPLITS if self._split.has_validation_split else SPLITS[:1]
        empty = [name for name in splits if not any(part[name] for part in parts)]
        if empty:
            raise UsageError(
                f"{self._stages.config.read.folder}: no document for {empty[0]} "
                f"({format_drop_reasons([counts])}): add files, or "
                "change split.validation"
            )
        digest = blake3()
        for part in parts:
            digest.update("".join(part["blake3"]).encode())
        manifest_fields = provenance(digest.hexdigest())
        tokenize_stage = TokenizeStage(self._stages, self._folder)
        written_splits = {
            name: tokenize_stage.write_shards(
                self._folder,
                name,
                ({"documents": part[name]} for part in parts),
                self._source.tokenizer,
                manifest_fields,
            )
            for name in splits
        }
        return {
            **{name: written_splits.get(name, EMPTY_SPLIT) for name in SPLITS},
            "provenance": manifest_fields,
            "steps": [counts.as_json()],
            "notes": [*self._source.list_notes(counts), *warn_of_skipped(counts)],
            "skipped_files": [line for part in parts for line in part["skipped"]],
        }

    def _is_held_out(self, source: str) -> bool:
        """Return whether a document is held out: by the user's patterns, else by a fixed random choice."""
        if self._split.validation_files:
            return matches_path(source.partition("#")[0], self._split.validation_files)
        digest = blake3(f"{self._split.seed}:{source}".encode()).digest(8)
        return int.from_bytes(digest, "big") < self._split.validation * 2**64


class _IntermediateFiles:
    """Intermediate files of a part and split: one for ids, one for the files beside the documents."""

    def __init__(self, folder: Path, name: str, part: int) -> None:
        self.documents: list[list[Any]] = []
        self._ids = AtomicFile(get_tokens_path(folder, name, part))
        self._members = AtomicFile(get_members_path(folder, name, part))

    def add(self, document: ImportedDocument) -> None:
        sizes = [(extension, len(data)) for extension, data in document.members.items()]
        tokenized = TokenizedDocument(
            document.source, len(document.ids), document.text_bytes, sizes, corpus=document.corpus
        )
        self.documents.append(tokenized.to_list())
        self._ids.write(document.ids.astype("<i4").tobytes())
        for data in document.members.values():
            self._members.write(data)

    def commit(self) -> None:
        self._ids.commit()
        self._members.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ids.discard()
        self._members.discard()


def _hash_document(document: ImportedDocument) -> str:
    digest = blake3(np.ascontiguousarray(document.ids, "<i8").tobytes())
    for extension, data in document.members.items():
        digest.update(f"{extension}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest(length=16)
