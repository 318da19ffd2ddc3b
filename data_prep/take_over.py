"""Token ids that were made elsewhere: cut into documents, split, and written as shards; nothing is encoded again."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from data_prep import tokenizer
from data_prep.counts import Counts, why
from data_prep.encode import Encode
from data_prep.files import Listing, TextFile
from data_prep.readers import ids as reader
from data_prep.readers.record import BadFileError
from data_prep.stages import Facts, Stages
from megatfm import tokenizers
from megatfm.data.files import WholeFile
from megatfm.errors import MegatfmError, UsageError

SPLITS = ("train", "validation")
NOTE = "token ids were taken over as they are: no text was looked at for duplicates"


class TakeOver:
    """Reads the files of a listing, one in a part."""

    def __init__(self, stages: Stages, listing: Listing) -> None:
        self._stages = stages
        self._config = stages.config
        self._listing = listing
        self._split = stages.config.split

    def run(self, basis: Facts, provenance: Callable[[str], Facts]) -> Facts:
        """Write the shards of both splits; `provenance` makes, of a hash of all ids, what their manifests say."""
        stages = self._stages
        stages.once("tokenizer", basis, self._tokenizer)
        encode = Encode(stages)
        known = tokenizers.load(stages.out)
        lengths = np.array([len(each) for each in known.token_bytes() or []], np.int64)
        files = self._listing.files
        with stages.reporter.stage("take over", sum(file.size for file in files)) as advance:

            def work(number: int) -> Facts:
                counts, digest, bad = Counts("read"), blake3(), len(self._listing.bad)
                found: dict[str, list[Any]] = {name: [] for name in SPLITS}
                with ExitStack() as stack:
                    outs = {name: WholeFile(encode.tokens(name, number)) for name in SPLITS}
                    for out in outs.values():
                        stack.callback(out.discard)
                    for source, ids in self._documents(files[number], counts, known.vocab_size):
                        size = (
                            int(lengths[ids].sum())
                            if len(lengths)
                            else len(known.decode(ids.tolist()).encode())
                        )
                        counts.take(size)
                        counts.keep(size)
                        digest.update(np.ascontiguousarray(ids, "<i8").tobytes())
                        name = SPLITS[self._holds_out(source)]
                        outs[name].write(ids.astype("<i4").tobytes())
                        found[name].append([source, len(ids), size])
                    for out in outs.values():
                        out.commit()
                advance(files[number].size)
                skipped = [f"{each.path}: {each.reason}" for each in self._listing.bad[bad:]]
                return {
                    **found,
                    "steps": [counts.as_json()],
                    "blake3": digest.hexdigest(),
                    "skipped": skipped,
                }

            def join(parts: list[Facts]) -> Facts:
                counts = Counts.joined([part["steps"][0] for part in parts])
                empty = [name for name in SPLITS if not any(part[name] for part in parts)]
                if empty:
                    raise UsageError(
                        f"{self._listing.root}: no document for {empty[0]} ({why([counts])}): add files, or change "
                        "split.validation"
                    )
                made = provenance(blake3("".join(part["blake3"] for part in parts).encode()).hexdigest())
                written = {
                    name: encode.write_shards(
                        name, [{"documents": part[name]} for part in parts], known, made
                    )
                    for name in SPLITS
                }
                return {
                    **written,
                    "provenance": made,
                    "steps": [counts.as_json()],
                    "skipped_files": [line for part in parts for line in part["skipped"]],
                }

            return stages.parts("take-over", basis, len(files), work, join)

    def _tokenizer(self) -> Facts:
        files = tokenizer.make(self._config.tokenizer, ())
        return tokenizer.write(self._stages.out, files).describe()

    def _documents(
        self, file: TextFile, counts: Counts, vocab_size: int
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        try:
            for number, ids in enumerate(reader.read(file.path, self._listing.config)):
                if not len(ids):
                    counts.take(0)
                    counts.drop("is empty", 0, f"{file.name}#{number}")
                    continue
                if ids.min() < 0 or ids.max() >= vocab_size:
                    wrong = max(int(ids.max()), -int(ids.min()))
                    raise MegatfmError(
                        f"{file.path}: document {number} has id {wrong}, but the tokenizer has {vocab_size:,}: set "
                        "tokenizer.file to the one that made it, or mend read.tokens.dtype"
                    )
                yield f"{file.name}#{number}", ids
        except BadFileError as error:
            self._listing.on_bad(file.path, str(error))
            counts.take(0)
            counts.drop("breaks off", 0, f"{file.name}: {error}")

    def _holds_out(self, source: str) -> bool:
        """A fixed random choice of documents."""
        digest = blake3(f"{self._split.seed}:{source}".encode()).digest(8)
        return int.from_bytes(digest, "big") < self._split.validation * 2**64
