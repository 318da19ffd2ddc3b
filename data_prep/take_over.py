"""What needs no cleaning: taken over as it is, split document by document, and written as shards.

There are two kinds, each with a class of its own: token ids that were made elsewhere, and images.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import field as field_of
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.data.files import AtomicFile
from megatfm.data_prep.counts import StepStats, format_drop_reasons
from megatfm.data_prep.encode import TokenizeStage, members_path, tokens_path
from megatfm.data_prep.files import matches_path
from megatfm.data_prep.progress import UpdateProgress
from megatfm.data_prep.stages import StageResult, StageRunner
from megatfm.errors import UsageError
from megatfm.tokenizers import Tokenizer

SPLITS = ("train", "validation")
EMPTY_SPLIT: StageResult = {
    **dict.fromkeys(("documents", "text_bytes", "tokens", "shards", "bytes"), 0),
    "bytes_per_token": 0.0,
    "fingerprint": "",
}
"""What is said of a split that is not made."""


@dataclass(frozen=True, eq=False)
class ImportedDocument:
    """A document: where it was read, its ids [n], the bytes of the text that they stand for, and files beside it."""

    source: str
    ids: NDArray[Any]
    text_bytes: int
    members: Mapping[str, bytes] = field_of(default_factory=lambda: MappingProxyType({}))

    @property
    def size(self) -> int:
        """Bytes of all that it holds."""
        return self.text_bytes + sum(map(len, self.members.values()))


class ImportSource(Protocol):
    """Where documents are taken from, in parts that don't depend on who reads which."""

    warning: str
    """What the user should know."""
    parts: int
    bytes: int
    skipped: list[str]
    """Files and records that could not be used so far."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the ids; None if there are none."""
        ...

    def documents(self, part: int, counts: StepStats, advance: UpdateProgress) -> Iterator[ImportedDocument]:
        """The documents of a part; `counts` is told of those that are left out, `advance` of the bytes read."""
        ...


class ImportStage:
    """Writes the documents of a source as shards of both splits."""

    def __init__(self, stages: StageRunner, source: ImportSource) -> None:
        self._stages = stages
        self._split = stages.config.split
        self._source = source

    def run(self, basis: StageResult, provenance: Callable[[str], StageResult]) -> StageResult:
        """`provenance` makes, of a hash of all documents, what the manifests say."""
        source, self._folder = self._source, self._stages.at(basis)
        with self._stages.reporter.stage("take over", source.bytes) as advance:
            return self._stages.parts(
                "take-over",
                basis,
                source.parts,
                lambda part: self._work(part, advance),
                lambda parts: self._join(parts, provenance),
                in_out=True,
            )

    def _work(self, part: int, advance: UpdateProgress) -> StageResult:
        """Documents of a part wait for the shards to be written."""
        counts, digests, known = StepStats("read"), list[str](), len(self._source.skipped)
        with ExitStack() as stack:
            outs = {name: stack.enter_context(_PendingDocuments(self._folder, name, part)) for name in SPLITS}
            for document in self._source.documents(part, counts, advance):
                counts.count_input(document.size)
                counts.count_kept(document.size)
                digests.append(_digest(document))
                outs[SPLITS[self._holds_out(document.source)]].add(document)
            for out in outs.values():
                out.commit()
        return {
            **{name: out.documents for name, out in outs.items()},
            "steps": [counts.as_json()],
            "blake3": digests,
            "skipped": self._source.skipped[known:],
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
        made, encode = provenance(digest.hexdigest()), TokenizeStage(self._stages, self._folder)
        written = {
            name: encode.write_shards(
                self._folder,
                name,
                ({"documents": part[name]} for part in parts),
                self._source.tokenizer,
                made,
            )
            for name in splits
        }
        return {
            **{name: written.get(name, EMPTY_SPLIT) for name in SPLITS},
            "provenance": made,
            "steps": [counts.as_json()],
            "skipped_files": [line for part in parts for line in part["skipped"]],
        }

    def _holds_out(self, source: str) -> bool:
        """A fixed random choice of documents, or those of the files that the user names."""
        if self._split.files:
            return matches_path(source.partition("#")[0], self._split.files)
        digest = blake3(f"{self._split.seed}:{source}".encode()).digest(8)
        return int.from_bytes(digest, "big") < self._split.validation * 2**64


class _PendingDocuments:
    """The documents of a part and split while they wait: ids in one file, what lies beside them in another."""

    def __init__(self, folder: Path, name: str, part: int) -> None:
        self.documents: list[list[Any]] = []
        self._ids = AtomicFile(tokens_path(folder, name, part))
        self._members = AtomicFile(members_path(folder, name, part))

    def add(self, document: ImportedDocument) -> None:
        sizes = [[extension, len(data)] for extension, data in document.members.items()]
        self.documents.append(
            [document.source, len(document.ids), document.text_bytes, *([sizes] if sizes else [])]
        )
        self._ids.write(document.ids.astype("<i4").tobytes())
        for data in document.members.values():
            self._members.write(data)

    def commit(self) -> None:
        self._ids.commit()
        self._members.commit()

    def __enter__(self) -> "_PendingDocuments":
        return self

    def __exit__(self, *_: object) -> None:
        self._ids.discard()
        self._members.discard()


def _digest(document: ImportedDocument) -> str:
    digest = blake3(np.ascontiguousarray(document.ids, "<i8").tobytes())
    for extension, data in document.members.items():
        digest.update(f"{extension}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest(length=16)
