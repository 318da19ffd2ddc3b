"""The pipeline of `megatfm prep`: five stages, each of which leaves its result committed before the next begins."""

import json
import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blake3 import blake3

from data_prep import tokenizer
from data_prep.counts import Counts
from data_prep.documents import Document, DocumentWriter, read_documents
from data_prep.files import Listing
from data_prep.progress import Advance, Reporter
from data_prep.read import Read
from data_prep.split import NearDuplicates, choose, plan_split
from data_prep.steps import ExactDuplicates, FixUnicode, Step, pass_through
from data_prep.summary import PrepSummary
from data_prep.work import Workspace, identity
from megatfm import tokenizers
from megatfm.config.prep import PrepConfig
from megatfm.data import ShardWriter
from megatfm.data.manifest import MANIFEST
from megatfm.errors import UsageError

BATCH_BYTES = 2**22
LIBRARIES = ("blake3", "ftfy", "rensa", "sentencepiece", "zstandard")
LOSSY = "this tokenizer does not keep every text as it is, so there will be no bits per byte"


def run(config: PrepConfig, reporter: Reporter | None = None) -> PrepSummary:
    """Prepare a corpus: text → repaired, deduplicated, split, tokenized → shards in `config.out`.

    An interrupted run goes on from its last finished stage; a finished one is only reported. Raises UsageError
    for a config that can't be carried out and MegatfmError for bad input or a full disk.
    """
    reporter = reporter or Reporter()
    _check_places(config)
    workspace = Workspace(config)
    with workspace.lock() as locked:
        if not locked:
            reporter.say(f"{workspace.out}: no locks on this file system: let no other prep work here")
        result = workspace.finished()
        if result is not None:
            return PrepSummary(workspace.out, result, already_done=True)
        return PrepSummary(workspace.out, _Prep(config, workspace, reporter).run(), already_done=False)


class _Prep:
    """One preparation: the stages in their order, and the files through which they pass documents on."""

    def __init__(self, config: PrepConfig, workspace: Workspace, reporter: Reporter) -> None:
        self._config = config
        self._workspace = workspace
        self._reporter = reporter
        self._clean = workspace.folder / "clean.jsonl.zst"
        self._splits = {name: workspace.folder / f"{name}.jsonl.zst" for name in ("train", "validation")}

    def run(self) -> dict[str, Any]:
        listing = Listing(self._config.read)
        config = identity(self._config)
        basis = {
            "files": listing.fingerprint(),
            **{name: config[name] for name in ("version", "read", "split")},
        }
        clean = self._stage("clean", basis, lambda: self._read_and_clean(listing))
        basis["near_duplicates"] = config["near_duplicates"]
        split = self._stage("split", basis, lambda: self._split(clean["bytes"]))
        basis["tokenizer"] = config["tokenizer"]
        facts = self._stage("tokenizer", basis, lambda: self._make_tokenizer(split["train_bytes"]))
        used = LIBRARIES if facts["kind"].startswith("sentencepiece") else (*LIBRARIES, "tokenizers")
        provenance = {
            "config": config,
            "input_blake3": clean["blake3"],
            "libraries": {"python": platform.python_version(), **{name: version(name) for name in used}},
        }
        lossy = [] if facts.get("lossless", True) else [LOSSY]
        result = {
            **provenance,
            "notes": clean["notes"] + split["notes"] + lossy,
            "skipped_files": clean["skipped_files"],
            "steps": clean["steps"] + split["steps"],
            "held_out": split["held_out"],
            "tokenizer": facts,
        }
        for name in self._splits:
            result[name] = self._stage(
                f"tokenize-{name}", basis, partial(self._tokenize, name, split[f"{name}_bytes"], provenance)
            )
        self._workspace.finish(result)
        return result

    def _stage(self, name: str, basis: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a stage that depends on `basis`, run unless it is finished."""
        result = self._workspace.stage(name, basis)
        if result is None:
            result = work()
            self._workspace.commit(name, basis, result)
        else:
            self._reporter.say(f"{name}: finished by an earlier run")
        return result

    def _read_and_clean(self, listing: Listing) -> dict[str, Any]:
        limit, notes = self._document_limit(listing)
        read = Read(listing, limit)
        steps: list[Step] = [FixUnicode(), ExactDuplicates()]
        digest = blake3()
        total = sum(file.size for file in listing.files)
        with self._reporter.stage("read and clean", total) as advance, DocumentWriter(self._clean) as writer:
            for document in pass_through(steps, read.documents(advance)):
                digest.update(json.dumps([document.source, document.text]).encode())
                writer.add(document)
            counts = [read.counts, *(step.counts for step in steps)]
            if not counts[-1].documents_out:
                raise UsageError(f"{listing.root}: no document is left: {_why(counts)}")
            writer.commit()
        if listing.left_out:
            notes.append(f"left out by name: {listing.left_out:,} files or folders")
        return {
            "bytes": counts[-1].bytes_out,
            "blake3": digest.hexdigest(),
            "notes": notes,
            "skipped_files": [f"{bad.path}: {bad.reason}" for bad in listing.bad],
            "steps": [each.as_json() for each in counts],
        }

    def _document_limit(self, listing: Listing) -> tuple[int, list[str]]:
        """How long a document may be. The files of a corpus may be too few to hold some of them out: then they
        are cut so finely that parts of them can be."""
        limit = self._config.read.max_document_bytes
        share, seed = self._config.split.validation, self._config.split.seed
        sizes = {file.name: file.size for file in listing.files}
        if choose(sizes, share, seed):
            return limit, []
        finer = max(1024, min(limit, int(sum(sizes.values()) * share / 4)))
        return finer, [f"too few files to hold some out: cut into documents of at most {finer:,} bytes"]

    def _split(self, total: int) -> dict[str, Any]:
        config = self._config.split
        split = plan_split(read_documents(self._clean), config.validation, config.seed)
        if split is None:
            raise UsageError(
                f"too little text to hold {config.validation:.0%} of it out: add text, or change split.validation"
            )
        near = NearDuplicates(self._config.near_duplicates)
        with self._reporter.stage("split", 2 * total) as advance:
            validation_bytes = 0
            with DocumentWriter(self._splits["validation"]) as writer:
                for document in _advancing(read_documents(self._clean), advance):
                    if split.holds_out(document):
                        near.hold_out(document)
                        writer.add(document)
                        validation_bytes += document.text_bytes
                writer.commit()
            with DocumentWriter(self._splits["train"]) as writer:
                documents = _advancing(read_documents(self._clean), advance)
                for document in pass_through(
                    [near], (each for each in documents if not split.holds_out(each))
                ):
                    writer.add(document)
                if not near.counts.documents_out:
                    raise UsageError(f"no training document is left: {_why([near.counts])}")
                writer.commit()
        notes = (
            [] if split.level == "top-level package" else [f"split by {split.level}: too few larger units"]
        )
        return {
            "train_bytes": near.counts.bytes_out,
            "validation_bytes": validation_bytes,
            "held_out": {"level": split.level, "names": sorted(split.held_out)},
            "notes": notes,
            "steps": [near.counts.as_json()],
        }

    def _make_tokenizer(self, total: int) -> dict[str, Any]:
        config = self._config.tokenizer
        share = min(1.0, config.train_bytes / total)
        work = "train the tokenizer" if config.file is None else "copy the tokenizer"
        with self._reporter.stage(work, total) as advance:
            documents = _advancing(read_documents(self._splits["train"]), advance)
            texts = (document.text for document in documents if _in_sample(document, share))
            files = tokenizer.make(config, texts)
        return tokenizer.write(self._workspace.out, files).describe()

    def _tokenize(self, name: str, total: int, provenance: dict[str, Any]) -> dict[str, Any]:
        encoder = tokenizers.load(self._workspace.out)
        folder = self._workspace.out / name
        # There can be a manifest only if a run was killed between writing it and committing this stage.
        (folder / MANIFEST).unlink(missing_ok=True)
        threads = self._config.workers or len(os.sched_getaffinity(0))
        with (
            self._reporter.stage(f"tokenize {name}", total) as advance,
            ShardWriter(folder, tokenizer_hash=encoder.hash, token_dtype=encoder.token_dtype) as writer,
        ):
            number = 0
            for batch in _batches(read_documents(self._splits[name])):
                for document, ids in zip(
                    batch, encoder.encode_batch([each.text for each in batch], threads), strict=True
                ):
                    writer.add(f"{number:09d}", ids, document.source, document.text_bytes)
                    advance(document.text_bytes)
                    number += 1
            manifest = writer.finish({**provenance, "split": name})
        tokens = sum(shard.tokens for shard in manifest.shards)
        return {
            "documents": number,
            "text_bytes": total,
            "tokens": tokens,
            "bytes_per_token": round(total / tokens, 4),
            "shards": len(manifest.shards),
            "bytes": sum(shard.bytes for shard in manifest.shards),
            "fingerprint": manifest.fingerprint,
        }


def _check_places(config: PrepConfig) -> None:
    if config.read.folder is not None and Path(config.out).resolve().is_relative_to(
        Path(config.read.folder).resolve()
    ):
        raise UsageError(
            f"out = {config.out!r}: lies inside read.folder, whose files are read: choose a place outside"
        )


def _advancing(documents: Iterator[Document], advance: Advance) -> Iterator[Document]:
    for document in documents:
        yield document
        advance(document.text_bytes)


def _in_sample(document: Document, share: float) -> bool:
    """A fixed random choice of about `share` of all documents."""
    return int.from_bytes(blake3(document.source.encode()).digest(8), "big") < share * 2**64


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


def _why(counts: list[Counts]) -> str:
    reasons = [
        f"{dropped.documents} dropped, as each {reason}"
        for each in counts
        for reason, dropped in each.dropped.items()
    ]
    return "; ".join(reasons) or "there were none"
