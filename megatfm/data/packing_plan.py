"""Packing plans: the token count of each block of a corpus, or the row count of each group of blocks.

A plan is computed once, from the index alone, and stored in the corpus folder.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.images import ImageColumns, ImageIndex
from megatfm.data.bin_packing import MUCH_PADDING, assign_rows, group_blocks
from megatfm.data.chunks import ChunkTable, split_documents
from megatfm.data.sequences import PackingObjective, needs_own_row
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import atomic_write, lock_path

SAMPLES_AT_ONCE = 2**18
"""Documents planned per pass, which bounds the memory of planning."""
PLANS = ".plans"
"""Subfolder of a corpus that holds plans; it may be deleted at any time."""
MAX_STORED_PLANS = 32
CountTruncated = Callable[[NDArray[np.int64], ImageIndex], int]
"""Counts the texts of n tokens [D], and of images, that lose their ends."""


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Block sizes that the row order is computed from, and notes for the log on data that is left out or cut.

    sizes [n]: tokens of each block, to be cut into rows; or rows of each group of blocks, if bin-packed.
    groups [n + 1]: first block of each group; None if documents are cut at row ends.
    padding: share of padding in all rows.
    """

    sizes: NDArray[np.int64]
    groups: NDArray[np.int64] | None
    padding: float
    notes: tuple[str, ...] = ()

    def encode(self, key: str) -> bytes:
        """Encode as a plan file: a JSON line with the key and a hash, then sizes as uint32 and groups as uint64."""
        groups = b"" if self.groups is None else self.groups.astype("<u8").tobytes()
        content = self.sizes.astype("<u4").tobytes() + groups
        header = {
            "key": key,
            "sizes": len(self.sizes),
            "padding": self.padding,
            "notes": self.notes,
            "blake3": blake3(content).hexdigest(),
        }
        return json.dumps(header).encode() + b"\n" + content

    @classmethod
    def decode(cls, data: bytes, key: str) -> "PackingPlan":
        """Decode a plan file. Raises a ValueError, KeyError or TypeError if it is damaged or has another key."""
        line, _, content = data.partition(b"\n")
        header = json.loads(line)
        if header["key"] != key or header["blake3"] != blake3(content).hexdigest():
            raise ValueError("another plan")
        sizes = np.frombuffer(content, "<u4", header["sizes"])
        groups = np.frombuffer(content, "<u8", offset=sizes.nbytes)
        if len(groups) not in (0, len(sizes) + 1):
            raise ValueError("another number of groups")
        notes = tuple(map(str, header["notes"]))
        return cls(
            sizes.astype(np.int64), groups.astype(np.int64) if len(groups) else None, float(header["padding"]), notes
        )


def load_or_build_packing_plan(
    corpus: Corpus, objective: PackingObjective, row_lengths: Sequence[int], seed: int, name: str | None
) -> PackingPlan:
    """Load the plan from the corpus folder, or build and store it.

    If several processes need it at once, one builds it while the others wait. A damaged or foreign plan is rebuilt; if
    the folder is read-only, every process builds its own. name: identifies the objective's lengths; None: nothing is
    stored.
    """
    if name is None:
        return build_packing_plan(corpus, objective, row_lengths, seed)
    key = blake3(json.dumps([2, corpus.fingerprint, list(row_lengths), seed, name]).encode()).hexdigest()
    path = Path(corpus.folder) / PLANS / key[:32]
    if (stored := _read_plan(path, key)) is not None:
        return stored
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
    with lock_path(path):  # one process builds it
        if (stored := _read_plan(path, key)) is not None:
            return stored
        plan = build_packing_plan(corpus, objective, row_lengths, seed)
        with suppress(OSError):
            _write_plan(path, plan.encode(key))
    return plan


def _read_plan(path: Path, key: str) -> PackingPlan | None:
    # ValueError covers JSON and NumPy.
    with suppress(OSError, ValueError, KeyError, TypeError):
        return PackingPlan.decode(path.read_bytes(), key)
    return None


def _write_plan(path: Path, data: bytes) -> None:
    """Write a plan atomically and drop the oldest ones. The last of concurrent writers without locks wins."""
    atomic_write(path, data)
    plans = sorted(path.parent.glob("[0-9a-f]*"), key=lambda p: p.stat().st_mtime)
    for old in plans[:-MAX_STORED_PLANS]:
        old.unlink(missing_ok=True)


def build_packing_plan(
    corpus: Corpus, objective: PackingObjective, row_lengths: Sequence[int], seed: int
) -> PackingPlan:
    """Plan the packing of every block.

    Raises a UsageError if the corpus is too short for one row, a MegatfmError if the objective's sequences don't fit.
    """
    planner = _Planner(corpus, objective, tuple(row_lengths), seed)
    return planner.plan_chunked() if objective.max_tokens is None else planner.plan_bin_packed()


class _Planner:
    def __init__(self, corpus: Corpus, objective: PackingObjective, row_lengths: tuple[int, ...], seed: int) -> None:
        self.corpus, self.objective, self.row_lengths, self.seed = corpus, objective, row_lengths, seed

    def plan_chunked(self) -> PackingPlan:
        chunk_rows = np.concatenate(
            [np.add.reduceat(chunks.lengths[:, 0], starts[:-1]) for _, starts, chunks in self._iter_planned()]
        )
        total, length = int(chunk_rows.sum()), self.row_lengths[0]
        if total < length:
            raise UsageError(
                f"{self.corpus.folder}: its {self.corpus.n_samples} documents make {total} tokens, too few for one "
                f"sequence of {length}: prepare more text"
                + (f", or set data.sequence_length to at most {total}" if total else "")
            )
        padding = 1 - total / (-(-total // length) * length)
        return PackingPlan(chunk_rows, None, padding, tuple(self._warn_of_padding(padding)))

    def plan_bin_packed(self) -> PackingPlan:
        blocks, folder = self.corpus.blocks, self.corpus.folder
        volumes = np.zeros((len(blocks), len(self.row_lengths)), np.int64)
        texts = np.zeros(len(blocks), np.int64)
        total = dropped = truncated = without_partner = 0
        count_truncated: CountTruncated = getattr(self.objective, "count_truncated", lambda n_tokens, images: 0)
        for begin, starts, chunks in self._iter_planned():
            end = begin + len(starts) - 1
            truncated += count_truncated(self.corpus.lengths(begin, end), ImageColumns(self.corpus, begin, end))
            is_filled = chunks.lengths.any(axis=1)
            self._check_lengths(chunks.take(np.flatnonzero(is_filled)))
            volumes[begin + 1 : begin + len(starts)] = np.add.reduceat(chunks.lengths, starts[:-1])
            texts[begin + 1 : begin + len(starts)] = _count_texts(starts, chunks)
            total, dropped = total + int(is_filled.sum()), dropped + int((~is_filled).sum())
        if not total:
            raise UsageError(
                f"{folder}: none of its {self.corpus.n_samples} documents is long enough for the objective"
            )
        packed_groups = list(
            group_blocks(np.cumsum(volumes, axis=0), self.row_lengths, self._count_rows, self._is_bin_packed)
        )
        groups = np.array([0, *(end for end, _ in packed_groups)])
        sizes = np.array([rows for _, rows in packed_groups])
        if self.objective.needs_other_documents:
            without_partner = self._count_without_partner(groups, np.cumsum(texts))
        room = int(sizes.sum()) * sum(self.row_lengths)
        padding = 1 - float(volumes.sum()) / room
        notes = []
        if dropped:
            notes.append(
                f"{folder}: {dropped:,} of {total + dropped:,} chunks of documents are too short for the "
                "objective and are left out"
            )
        if truncated:
            notes.append(
                f"{folder}: {truncated:,} of {total:,} texts are truncated at data.target_length = "
                f"{self.row_lengths[-1]:,}, or at the model's positions for a text"
            )
        if without_partner:
            notes.append(
                f"{folder}: {without_partner:,} of {total:,} sequences lie in groups of blocks with no other "
                "document, so they have no partner"
            )
        return PackingPlan(sizes, groups, padding, (*notes, *self._warn_of_padding(padding)))

    @property
    def _is_bin_packed(self) -> bool:
        return not needs_own_row(self.objective)

    def _count_rows(self, begin: int, end: int) -> int:
        """Count the rows that these blocks make together."""
        rows = assign_rows(self.objective, self._make_sequences(begin, end).lengths, self.row_lengths)
        return int(rows.max(initial=-1)) + 1

    def _make_sequences(self, begin: int, end: int) -> ChunkTable:
        first, n_tokens = int(self.corpus.blocks[begin]), self.corpus.lengths(begin, end)
        images = ImageColumns(self.corpus, begin, end)
        return split_documents(n_tokens, self.objective, first, self.seed, images).without_empty()

    def _count_without_partner(self, groups: NDArray[np.int64], texts: NDArray[np.int64]) -> int:
        """Count the sequences whose document is the only non-empty one of its group.

        texts [n_blocks + 1]: number of non-empty documents before each block.
        """
        return sum(
            len(self._make_sequences(*groups[at : at + 2].tolist()))
            for at in np.flatnonzero(np.diff(texts[groups]) == 1)
        )

    def _warn_of_padding(self, share: float) -> Iterator[str]:
        if share > MUCH_PADDING:
            rows = " and ".join(f"{length:,}" for length in self.row_lengths)
            keys = ", ".join(["data.sequence_length", "data.target_length"][: len(self.row_lengths)])
            reason = "each sequence has a row of its own" if needs_own_row(self.objective) else "that is few rows"
            advice = f"choose shorter rows ({keys}), or prepare more text"
            reads_images = getattr(self.objective, "reads_images", False)
            if reads_images and not getattr(self.objective, "reads_text", True):
                reason, advice = "its images don't fill such rows", f"choose other lengths ({keys})"
            elif len(self.row_lengths) > 1:
                sides = "images and texts" if reads_images else "inputs and targets"
                reason, advice = f"{sides} don't fill their rows alike", f"choose other lengths ({keys})"
            elif self._is_bin_packed and self.objective.max_tokens is not None:
                reason = "whole documents don't fill such rows"
                advice = f"choose longer rows ({keys}), which hold several documents"
            yield (
                f"{self.corpus.folder}: {100 * share:.1f} % of its rows of {rows} tokens is padding, which costs time: "
                f"{reason}: {advice}"
            )

    def _iter_planned(self) -> Iterator[tuple[int, NDArray[np.int64], ChunkTable]]:
        """Yield runs of n blocks: first block, offsets [n + 1] of each block's chunks, and the chunks."""
        blocks, begin = self.corpus.blocks, 0
        while begin < len(blocks) - 1:
            end = max(begin + 1, int(np.searchsorted(blocks, blocks[begin] + SAMPLES_AT_ONCE, "right")) - 1)
            first = int(blocks[begin])
            images = ImageColumns(self.corpus, begin, end)
            chunks = split_documents(self.corpus.lengths(begin, end), self.objective, first, self.seed, images)
            yield begin, np.searchsorted(chunks.documents, blocks[begin : end + 1] - first), chunks
            begin = end

    def _check_lengths(self, chunks: ChunkTable) -> None:
        is_unfit = ((chunks.lengths > np.array(self.row_lengths)) | (chunks.lengths == 0)).any(1)
        if is_unfit.any():
            at = int(is_unfit.argmax())
            n_tokens = int(chunks.ends[at] - chunks.starts[at])
            raise MegatfmError(
                f"the objective makes sequences of lengths {chunks.lengths[at].tolist()} of {n_tokens} tokens, for "
                f"rows of {list(self.row_lengths)}: its max_tokens = {self.objective.max_tokens} is wrong"
            )


def _count_texts(starts: NDArray[np.int64], chunks: ChunkTable) -> NDArray[np.int64]:
    """Count the non-empty documents of each block [n]. starts [n + 1]: offsets of each block's chunks."""
    is_text = (chunks.numbers == 0) & (chunks.ends > 0)
    return np.add.reduceat(is_text, starts[:-1], dtype=np.int64)
