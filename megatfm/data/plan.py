"""How many rows each block of a corpus makes: planned once from the index, and kept beside the corpus."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.atomic import write_whole
from megatfm.data.corpus import Corpus
from megatfm.data.packing import SequenceBuilder
from megatfm.data.pieces import Pieces, pieces_of
from megatfm.data.whole import rows_for
from megatfm.errors import MegatfmError, UsageError

SAMPLES_AT_ONCE = 2**18
"""Documents whose pieces are planned together, so that planning needs little memory."""
PLANS = ".plans"
"""Folder of a corpus for plans; it may be deleted at any time."""
KEPT = 32


@dataclass(frozen=True, eq=False)
class Plan:
    """`rows` [n_blocks] of every block, and notes for the log on what is not read as one would think."""

    rows: NDArray[np.int64]
    notes: tuple[str, ...] = ()

    def encode(self, key: str) -> bytes:
        """Content of a plan file: a JSON line with the key and a hash, then the rows of each block as uint32."""
        content = self.rows.astype("<u4").tobytes()
        facts = {"key": key, "notes": self.notes, "blake3": blake3(content).hexdigest()}
        return json.dumps(facts).encode() + b"\n" + content

    @classmethod
    def decode(cls, data: bytes, key: str, n_blocks: int) -> "Plan":
        """Raises a ValueError, KeyError or TypeError if that is no whole plan of this key."""
        line, _, content = data.partition(b"\n")
        facts = json.loads(line)
        if facts["key"] != key or facts["blake3"] != blake3(content).hexdigest():
            raise ValueError("another plan")
        rows = np.frombuffer(content, "<u4").astype(np.int64)
        if len(rows) != n_blocks:
            raise ValueError("another number of blocks")
        return cls(rows, tuple(map(str, facts["notes"])))


def stored_plan(
    corpus: Corpus, objective: SequenceBuilder, row_lengths: Sequence[int], seed: int, name: str | None
) -> Plan:
    """The plan, from the corpus's folder if it was made before.

    name: tells objectives apart; without it nothing is stored. A plan that is damaged or another's is made again, and
    where the folder can't be written it is made each time.
    """
    if name is None:
        return make_plan(corpus, objective, row_lengths, seed)
    key = blake3(json.dumps([1, corpus.fingerprint, list(row_lengths), seed, name]).encode()).hexdigest()
    path = Path(corpus.folder) / PLANS / key[:32]
    # ValueError covers JSON and NumPy.
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Plan.decode(path.read_bytes(), key, len(corpus.blocks) - 1)
    plan = make_plan(corpus, objective, row_lengths, seed)
    with suppress(OSError):
        _write(path, plan.encode(key))
    return plan


def _write(path: Path, data: bytes) -> None:
    """Ranks may write the same plan at once: the last one's stays."""
    path.parent.mkdir(exist_ok=True)
    write_whole(path, data)
    plans = sorted(path.parent.glob("[0-9a-f]*"), key=lambda p: p.stat().st_mtime)
    for old in plans[:-KEPT]:
        old.unlink(missing_ok=True)


def make_plan(corpus: Corpus, objective: SequenceBuilder, row_lengths: Sequence[int], seed: int) -> Plan:
    """Plan the packing of every block.

    Raises a UsageError if the corpus is too short for one row, a MegatfmError if the objective's sequences don't fit.
    """
    planner = _Planner(corpus, objective, tuple(row_lengths), seed)
    return planner.cut() if objective.max_tokens is None else planner.fitted()


class _Planner:
    def __init__(
        self, corpus: Corpus, objective: SequenceBuilder, row_lengths: tuple[int, ...], seed: int
    ) -> None:
        self.corpus, self.objective, self.row_lengths, self.seed = corpus, objective, row_lengths, seed
        self.n_tokens = corpus.lengths()

    def cut(self) -> Plan:
        built = np.concatenate(
            [np.add.reduceat(pieces.lengths[:, 0], starts[:-1]) for _, starts, pieces in self._planned()]
        )
        total, length = int(built.sum()), self.row_lengths[0]
        if total < length:
            raise UsageError(
                f"{self.corpus.folder}: its {self.corpus.n_samples} documents make {total} tokens, too few for one "
                f"sequence of {length}: prepare more text"
                + (f", or set data.sequence_length to at most {total}" if total else "")
            )
        return Plan(-(-built // length))

    def fitted(self) -> Plan:
        blocks, folder = self.corpus.blocks, self.corpus.folder
        counts, total, dropped, alone = np.zeros(len(blocks) - 1, np.int64), 0, 0, 0
        for block, pieces in self._pieces_by_block():
            kept = pieces.with_sequences()
            self._check_lengths(kept)
            rows = rows_for(self.objective, kept.lengths, self.row_lengths)
            counts[block] = int(rows.max(initial=-1)) + 1
            total, dropped = total + len(kept), dropped + len(pieces) - len(kept)
            texts = np.count_nonzero(self.n_tokens[blocks[block] : blocks[block + 1]])
            alone += len(kept) if texts == 1 else 0
        if not total:
            raise UsageError(
                f"{folder}: none of its {self.corpus.n_samples} documents is long enough for the objective"
            )
        notes = []
        if dropped:
            notes.append(
                f"{folder}: {dropped:,} of {total + dropped:,} pieces of documents are too short for the "
                "objective and are left out"
            )
        if alone and self.objective.needs_partners:
            notes.append(
                f"{folder}: {alone:,} of {total:,} sequences lie in blocks with no other document, so "
                "they have no partner"
            )
        return Plan(counts, tuple(notes))

    def _planned(self) -> Iterator[tuple[int, NDArray[np.int64], Pieces]]:
        """Some blocks at once: the number of the first, where the pieces of each start [n + 1], and the pieces."""
        blocks, begin = self.corpus.blocks, 0
        while begin < len(blocks) - 1:
            end = max(begin + 1, int(np.searchsorted(blocks, blocks[begin] + SAMPLES_AT_ONCE, "right")) - 1)
            first = int(blocks[begin])
            pieces = pieces_of(self.n_tokens[first : blocks[end]], self.objective, first, self.seed)
            yield begin, np.searchsorted(pieces.documents, blocks[begin : end + 1] - first), pieces
            begin = end

    def _pieces_by_block(self) -> Iterator[tuple[int, Pieces]]:
        for begin, starts, pieces in self._planned():
            for number in range(len(starts) - 1):
                yield begin + number, pieces.take(np.arange(*starts[number : number + 2]))

    def _check_lengths(self, pieces: Pieces) -> None:
        unfit = ((pieces.lengths > np.array(self.row_lengths)) | (pieces.lengths == 0)).any(1)
        if unfit.any():
            at = int(unfit.argmax())
            n_tokens = int(pieces.ends[at] - pieces.starts[at])
            raise MegatfmError(
                f"the objective makes sequences of lengths {pieces.lengths[at].tolist()} of {n_tokens} tokens, for "
                f"rows of {list(self.row_lengths)}: its max_tokens = {self.objective.max_tokens} is wrong"
            )
