"""The pipeline of `megatfm prep`: stages, each of which leaves its result committed before the next begins.

What can be divided (cleaning, near duplicates, tokenizing) is done in parts, which depend on the config alone; what
can't (exact duplicates, the tokenizer, writing shards) joins the parts in their order. So the result is the same
whoever does which part, and a part that is committed is never done again.
"""

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from data_prep import tokenizer
from data_prep.counts import Counts
from data_prep.documents import Document, DocumentWriter, PartsWriter, part_path, read_documents, read_parts
from data_prep.files import Listing
from data_prep.progress import Advance, Reporter
from data_prep.read import Read
from data_prep.split import NearDuplicates, Split, choose, plan_split
from data_prep.steps import ExactDuplicates, FixUnicode, pass_through
from data_prep.summary import PrepSummary
from data_prep.team import Alone, Claims, Team
from data_prep.work import Workspace, identity
from megatfm import tokenizers
from megatfm.config.prep import PrepConfig
from megatfm.data import ShardWriter
from megatfm.data.files import WholeFile
from megatfm.data.manifest import MANIFEST
from megatfm.errors import UsageError

BATCH_BYTES = 2**22
SPLITS = ("train", "validation")
LIBRARIES = ("blake3", "ftfy", "rensa", "sentencepiece", "zstandard")
LOSSY = "this tokenizer does not keep every text as it is, so there will be no bits per byte"


def run(
    config: PrepConfig, reporter: Reporter | None = None, team: Callable[[Path], Team] | None = None
) -> PrepSummary:
    """Prepare a corpus: text → repaired, deduplicated, split, tokenized → shards in `config.out`.

    An interrupted run goes on from its last finished part; a finished one is only reported. `team` makes, of the
    folder for work in progress, those who do it together; each of them calls this. Raises UsageError for a config
    that can't be carried out and MegatfmError for bad input or a full disk.
    """
    reporter = reporter or Reporter()
    _check_places(config)
    workspace = Workspace(config)
    members = team(workspace.folder) if team else Alone()
    shared = isinstance(members, Claims)
    with workspace.lock(shared) if shared or members.number == 1 else nullcontext(True) as locked:
        if shared and not locked:
            raise UsageError(
                f"{workspace.out}: no locks on this file system, but --part needs them: use mpirun"
            )
        if not locked:
            reporter.say(f"{workspace.out}: no locks on this file system: let no other prep work here")
        result = members.agreed(lambda: workspace.finished(shared))
        if result is not None:
            return PrepSummary(workspace.out, result, already_done=True)
        result = _Prep(config, workspace, reporter, members).run()
        return PrepSummary(workspace.out, result, already_done=False)


Facts = dict[str, Any]


class _Prep:
    """One preparation: the stages in their order, and the files through which they pass documents on."""

    def __init__(self, config: PrepConfig, workspace: Workspace, reporter: Reporter, team: Team) -> None:
        self._config = config
        self._workspace = workspace
        self._folder = workspace.folder
        self._reporter = reporter
        self._team = team
        self._near: NearDuplicates | None = None

    def run(self) -> Facts:
        listing = Listing(self._config.read)
        config = identity(self._config)
        basis = {
            "files": listing.fingerprint(),
            "part_bytes": self._config.part_bytes,
            **{name: config[name] for name in ("version", "read", "split")},
        }
        clean = self._read_and_clean(listing, basis)
        plan = self._stage("plan", basis, lambda: self._plan_split(clean))
        basis["near_duplicates"] = config["near_duplicates"]
        split = self._split(clean, plan, basis)
        basis["tokenizer"] = config["tokenizer"]
        facts = self._stage("tokenizer", basis, lambda: self._make_tokenizer(split))
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
        for name in SPLITS:
            result[name] = self._tokenize(name, split[name], provenance, basis)
        return self._team.once("finish", self._workspace.result, partial(self._finish, result))

    def _finish(self, result: Facts) -> Facts:
        self._workspace.finish(result, clean=not isinstance(self._team, Claims))
        return result

    def _stage(self, name: str, basis: Facts, work: Callable[[], Facts]) -> Facts:
        """The result of a stage that depends on `basis` and is done by one process, unless it is finished."""
        basis = dict(basis)

        def commit() -> Facts:
            result = work()
            self._workspace.commit(name, basis, result)
            return result

        return self._team.once(name, lambda: self._workspace.stage(name, basis), commit)

    def _parts(
        self,
        name: str,
        basis: Facts,
        count: int,
        work: Callable[[int], Facts],
        join: Callable[[list[Facts]], Facts],
    ) -> Facts:
        """The result of a stage that is done in parts, by all, and then joined by one, unless it is finished."""
        basis = dict(basis)
        if (found := self._team.agreed(lambda: self._workspace.stage(name, basis))) is not None:
            self._reporter.say(f"{name}: finished by an earlier run")
            return found

        def part(number: int) -> Facts | None:
            return self._workspace.stage(f"{name}.{number:05d}", basis)

        def do(number: int) -> None:
            self._workspace.commit(f"{name}.{number:05d}", basis, work(number))

        self._team.share(name, count, lambda number: part(number) is not None, do)
        return self._stage(name, basis, lambda: join([part(number) or {} for number in range(count)]))

    def _read_and_clean(self, listing: Listing, basis: Facts) -> Facts:
        limit, notes = self._document_limit(listing)
        if listing.left_out:
            notes.append(f"left out by name: {listing.left_out:,} files or folders")
        ranges = _ranges([file.size for file in listing.files], self._config.part_bytes)
        found_bad = list(listing.bad)
        total = sum(file.size for file in listing.files)
        with self._reporter.stage("read and clean", total) as advance:

            def work(number: int) -> Facts:
                first, end = ranges[number]
                known = len(listing.bad)
                read = Read(listing, limit, listing.files[first:end], found_bad if number == 0 else ())
                fix = FixUnicode()
                with DocumentWriter(part_path(self._folder, "read", number)) as writer:
                    for document in pass_through([fix], read.documents(advance)):
                        writer.add(document)
                    writer.commit()
                skipped = [f"{bad.path}: {bad.reason}" for bad in listing.bad[known:]]
                return {"skipped_files": skipped, "steps": [read.counts.as_json(), fix.counts.as_json()]}

            def join(parts: list[Facts]) -> Facts:
                skipped = [f"{bad.path}: {bad.reason}" for bad in found_bad]
                skipped += [line for part in parts for line in part["skipped_files"]]
                return {**self._deduplicate(parts, listing), "notes": notes, "skipped_files": skipped}

            return self._parts("clean", basis, len(ranges), work, join)

    def _deduplicate(self, parts: list[Facts], listing: Listing) -> Facts:
        """Join what was read, without exact duplicates."""
        exact, digest = ExactDuplicates(), blake3()
        with PartsWriter(self._folder, "clean", self._config.part_bytes) as writer:
            for document in pass_through([exact], read_parts(self._folder, "read", len(parts))):
                digest.update(json.dumps([document.source, document.text]).encode())
                writer.add(document)
            counts = [
                *(Counts.joined([part["steps"][step] for part in parts]) for step in range(2)),
                exact.counts,
            ]
            if not exact.counts.documents_out:
                raise UsageError(f"{listing.root}: no document is left: {_why(counts)}")
            writer.commit()
        return {
            "bytes": exact.counts.bytes_out,
            "parts": writer.parts,
            "blake3": digest.hexdigest(),
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

    def _plan_split(self, clean: Facts) -> Facts:
        """Choose what is held out, and set it aside."""
        config = self._config.split
        split = plan_split(read_parts(self._folder, "clean", clean["parts"]), config.validation, config.seed)
        if split is None:
            raise UsageError(
                f"too little text to hold {config.validation:.0%} of it out: add text, or change split.validation"
            )
        with PartsWriter(self._folder, "validation", self._config.part_bytes) as writer:
            for document in read_parts(self._folder, "clean", clean["parts"]):
                if split.holds_out(document):
                    writer.add(document)
            writer.commit()
        return {
            "level": split.level,
            "names": sorted(split.held_out),
            "bytes": writer.bytes,
            "parts": writer.parts,
        }

    def _split(self, clean: Facts, plan: Facts, basis: Facts) -> Facts:
        """The rest, without near duplicates of what is held out, is for training."""
        split = Split(plan["level"], frozenset(plan["names"]))
        with self._reporter.stage("split", clean["bytes"]) as advance:

            def work(number: int) -> Facts:
                near = self._near_duplicates(plan)
                documents = _advancing(read_documents(part_path(self._folder, "clean", number)), advance)
                with DocumentWriter(part_path(self._folder, "train", number)) as writer:
                    for document in pass_through(
                        [near], (each for each in documents if not split.holds_out(each))
                    ):
                        writer.add(document)
                    writer.commit()
                return {"steps": [near.counts.as_json()]}

            def join(parts: list[Facts]) -> Facts:
                counts = Counts.joined([part["steps"][0] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no training document is left: {_why([counts])}")
                notes = f"split by {split.level}: too few larger units"
                return {
                    "train": {"bytes": counts.bytes_out, "parts": len(parts)},
                    "validation": {"bytes": plan["bytes"], "parts": plan["parts"]},
                    "held_out": {"level": plan["level"], "names": plan["names"]},
                    "notes": [] if split.level == "top-level package" else [notes],
                    "steps": [counts.as_json()],
                }

            return self._parts("split", basis, clean["parts"], work, join)

    def _near_duplicates(self, plan: Facts) -> NearDuplicates:
        """The step, with all that is held out and fresh counts; each process reads that once."""
        if self._near is None:
            self._near = NearDuplicates(self._config.near_duplicates)
            for document in read_parts(self._folder, "validation", plan["parts"]):
                self._near.hold_out(document)
        self._near.counts = Counts(self._near.counts.step)
        return self._near

    def _make_tokenizer(self, split: Facts) -> Facts:
        config, total = self._config.tokenizer, split["train"]["bytes"]
        share = min(1.0, config.train_bytes / total)
        work = "train the tokenizer" if config.file is None else "copy the tokenizer"
        with self._reporter.stage(work, total) as advance:
            documents = _advancing(read_parts(self._folder, "train", split["train"]["parts"]), advance)
            texts = (document.text for document in documents if _in_sample(document, share))
            files = tokenizer.make(config, texts)
        return tokenizer.write(self._workspace.out, files).describe()

    def _tokenize(self, name: str, documents: Facts, provenance: Facts, basis: Facts) -> Facts:
        encoder = tokenizers.load(self._workspace.out)
        threads = self._config.workers or len(os.sched_getaffinity(0))
        with self._reporter.stage(f"tokenize {name}", documents["bytes"]) as advance:

            def work(number: int) -> Facts:
                found = []
                file = WholeFile(self._tokens(name, number))
                for batch in _batches(read_documents(part_path(self._folder, name, number))):
                    texts = [each.text for each in batch]
                    for document, ids in zip(batch, encoder.encode_batch(texts, threads), strict=True):
                        file.write(np.asarray(ids, "<i4").tobytes())
                        found.append([document.source, len(ids), document.text_bytes])
                        advance(document.text_bytes)
                file.commit()
                return {"documents": found}

            return self._parts(
                f"tokenize-{name}",
                basis,
                documents["parts"],
                work,
                lambda parts: self._write_shards(name, parts, encoder, provenance),
            )

    def _tokens(self, name: str, number: int) -> Path:
        return self._folder / f"{name}.{number:05d}.tokens"

    def _write_shards(
        self, name: str, parts: list[Facts], encoder: tokenizers.Tokenizer, provenance: Facts
    ) -> Facts:
        folder = self._workspace.out / name
        # There can be a manifest only if a run was killed between writing it and committing this stage.
        (folder / MANIFEST).unlink(missing_ok=True)
        with ShardWriter(folder, tokenizer_hash=encoder.hash, token_dtype=encoder.token_dtype) as writer:
            number = text_bytes = 0
            for part, facts in enumerate(parts):
                ids, at = np.fromfile(self._tokens(name, part), "<i4"), 0
                for source, count, size in facts["documents"]:
                    writer.add(f"{number:09d}", ids[at : at + count], source, size)
                    at, number, text_bytes = at + count, number + 1, text_bytes + size
            manifest = writer.finish({**provenance, "split": name})
        tokens = sum(shard.tokens for shard in manifest.shards)
        return {
            "documents": number,
            "text_bytes": text_bytes,
            "tokens": tokens,
            "bytes_per_token": round(text_bytes / tokens, 4),
            "shards": len(manifest.shards),
            "bytes": sum(shard.bytes for shard in manifest.shards),
            "fingerprint": manifest.fingerprint,
        }


def _ranges(sizes: Sequence[int], part_bytes: int) -> list[tuple[int, int]]:
    """Cut a list of files into runs of about `part_bytes`: (first, end) of each, at least one."""
    ends, size = [], 0
    for index, each in enumerate(sizes):
        if size >= part_bytes:
            ends.append(index)
            size = 0
        size += each
    ends.append(len(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


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


def _why(counts: Iterable[Counts]) -> str:
    reasons = [
        f"{dropped.documents} dropped, as each {reason}"
        for each in counts
        for reason, dropped in each.dropped.items()
    ]
    return "; ".join(reasons) or "there were none"
