"""A sample in quarantine is padding; no address moves, and nothing of it is read or trained on."""

from typing import Any

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.data.dataset import PackedDataset
from megatfm.data.documents import Quarantine
from megatfm.data.loader import DataLoader
from megatfm.data.sequences import IGNORE_INDEX, PAD_DOCUMENT_ID
from megatfm.errors import MegatfmError, UsageError
from tests.support.files import flip_bit
from tests.support.packed_corpora import SHARD, pack_dataset


def test_ranges_are_sorted_and_joined() -> None:
    parsed = Quarantine.parse(["9", "3-5", "5-6", "7", "20-30", "22"], 31)
    assert str(parsed) == "3-7,9-9,20-30"
    assert len(parsed) == 17
    assert np.flatnonzero(parsed.mask(0, 31)).tolist() == [3, 4, 5, 6, 7, 9, *range(20, 31)]
    assert np.flatnonzero(parsed.mask(4, 10)).tolist() == [0, 1, 2, 3, 5]
    assert not Quarantine()
    assert not Quarantine().mask(0, 5).any()


@pytest.mark.parametrize("entry", ["", "x", "-3", "5-3", "31", "3-31", "1e3", "3 - 4", "9" * 40])
def test_entries_that_are_no_range_of_the_corpus_are_refused(entry: str) -> None:
    with pytest.raises(UsageError, match="give a sample such as '17', or a range such as '120-153'"):
        Quarantine.parse([entry], 31)


def padded_except(rows: PackedDataset, healthy: PackedDataset, bad: set[int]) -> None:
    """Every token of a sample that is not bad stands where it stood, and the others' places are padding."""
    owner = {}
    corpus: Any = healthy.corpus
    for number, tokens in enumerate(corpus.documents):
        owner.update(dict.fromkeys(tokens.tolist(), number))
    assert len(rows) == len(healthy)
    blanks = 0
    for position in range(2 * len(rows)):
        first, second = healthy.read_row(position), rows.read_row(position)
        starts = np.append(np.flatnonzero(np.diff(first["documents"]) != 0) + 1, len(first["tokens"]))
        begin = 0
        for end in starts.tolist():
            part = slice(begin, end)
            ids = [*first["tokens"][part].tolist(), *first["targets"][part].tolist()]
            known = [owner[t] for t in ids if t in owner]
            if known and known[0] in bad:
                blanks += end - begin
                assert (second["tokens"][part] == 0).all()
                assert (second["targets"][part] == IGNORE_INDEX).all()
                assert (second["documents"][part] == PAD_DOCUMENT_ID).all()
                assert (second["positions"][part] == 0).all()
            elif known:
                for name in ("tokens", "targets", "positions"):
                    np.testing.assert_array_equal(second[name][part], first[name][part])
                real = second["documents"][part]
                assert (real == real[0]).all()
                assert real[0] >= 0
            begin = end
    assert blanks == 2 * sum(len(corpus.documents[number]) + 1 for number in bad)


@pytest.mark.parametrize("whole_shard", [False, True])
def test_no_address_moves(memory_corpus: Any, causal_type: Any, whole_shard: bool) -> None:
    class Chosen(causal_type):  # type: ignore[misc]
        max_tokens = 15 if whole_shard else None

    blocks = [[5, 9, 3, 14], [2, 2, 8], [12, 1, 6, 4]]
    corpus = memory_corpus(blocks)
    bad = Quarantine.parse(["1", "4-6"], corpus.n_samples)
    options = {"sequence_length": 16, "seed": 3, "streams": 2}
    read: list[int] = []
    block = corpus.read_block
    healthy = pack_dataset(corpus, Chosen(), **options)
    rows = pack_dataset(corpus, Chosen(), quarantine=bad, **options)
    padded_except(rows, healthy, {1, 4, 5, 6})
    corpus.read_block = lambda number: read.append(number) or block(number)
    quarantined = pack_dataset(corpus, Chosen(), quarantine=bad, **options)
    for position in range(len(quarantined)):
        quarantined.read_row(position)
    assert sorted(read) == [0, 2], "block 1 is in quarantine as a whole, so it is not read"
    assert rows.order_config() == healthy.order_config() | {"quarantine": "1-1,4-6"}
    assert rows.warnings == ["memory: 4 samples are in quarantine"]


def test_quarantined_documents_are_no_partners(memory_corpus: Any, causal_type: Any) -> None:
    class Watching(causal_type):  # type: ignore[misc]
        needs_other_documents = True

        def build_example(self, chunk: Any, key: Any) -> Any:
            documents = chunk.other_documents
            partners.append([documents.tokens(i).tolist() for i in range(len(documents.lengths))])
            return super().build_example(chunk, key)

    partners: list[Any] = []
    corpus = memory_corpus([[3, 2, 4]])
    bad = Quarantine.parse(["1"], 3)
    pack_dataset(corpus, Watching(), sequence_length=12, seed=0, shuffle=False, quarantine=bad).read_row(0)
    first, _, last = (tokens.tolist() for tokens in corpus.documents)
    assert partners == [[last], [first, last], [first]]


def test_a_row_as_one_document_has_padding_where_a_sample_was(memory_corpus: Any, causal: Any) -> None:
    corpus = memory_corpus([[3, 2, 4]])
    rows = pack_dataset(
        corpus, causal, sequence_length=12, seed=0, shuffle=False, attend_across_documents=True,
        quarantine=Quarantine.parse(["1"], 3),
    )  # fmt: skip
    row = rows.read_row(0)
    assert row["documents"].tolist() == [0, 0, 0, 0, -1, -1, -1, 0, 0, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 0, 0, 7, 8, 9, 10, 11]


def test_a_damaged_frame_stops_the_run(corpus: Corpus, causal: Any) -> None:
    path = corpus.folder / SHARD
    flip_bit(path, int(corpus.indexes[1].offsets[2]) + 100)
    bad = corpus.shard_blocks(1)[2]
    first, last = int(corpus.blocks[bad]), int(corpus.blocks[bad + 1]) - 1

    def read(entries: list[str]) -> None:
        rows = pack_dataset(
            corpus, causal, sequence_length=64, seed=0, quarantine=Quarantine.parse(entries, corpus.n_samples),
        )  # fmt: skip
        with DataLoader(rows, global_batch=8, micro_batch=8, end_position=len(rows)) as loader:
            for _ in loader:
                pass

    with pytest.raises(
        MegatfmError, match=rf"{SHARD}: samples {first} to {last}.*put \"{first}-{last}\" into .*quarantine"
    ):
        read([])
    with pytest.raises(MegatfmError, match="damaged"):
        read([f"{first}-{last - 1}"])
    read([f"{first}-{last}"])
