"""Every epoch has every token once, in an order that is a pure function of the seed and the position."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.corpus.corpus import Corpus
from megatfm.data.dataset import PackedDataset
from megatfm.data.order import RowAddress, make_row_order
from megatfm.data.sequences import IGNORE_INDEX, PAD_DOCUMENT_ID, DocumentChunk
from megatfm.errors import MegatfmError, UsageError
from megatfm.rng import ChunkKey, permutation
from tests.support.packed_corpora import assert_same_fields, pack_dataset, read_epoch, read_row

BOS, EOS, PAD = 1, 2, 0
FIELDS = {"tokens", "targets", "documents", "positions"}

Row = dict[str, np.ndarray]


def chunks(row: Row) -> list[Row]:
    """The documents' chunks in a row, after checking how the row is built."""
    real = row["documents"] != PAD_DOCUMENT_ID
    n = int(real.sum())
    assert real[:n].all(), "padding is at the end"
    assert (row["tokens"][n:] == PAD).all()
    assert (row["targets"][n:] == IGNORE_INDEX).all()
    assert (row["positions"][n:] == 0).all()
    numbers = row["documents"][:n]
    assert numbers[:1].tolist() == [0][:n]
    assert set(np.diff(numbers).tolist()) <= {0, 1}, "documents are numbered 0, 1, 2 …"
    actual = [{name: row[name][:n][numbers == number] for name in row} for number in np.unique(numbers)]
    for chunk in actual:
        np.testing.assert_array_equal(chunk["positions"], np.arange(len(chunk["positions"])))
    return actual


blocks_of_documents = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(
    blocks=blocks_of_documents,
    length=st.integers(1, 48),
    streams=st.integers(1, 80),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_row_and_every_token_once(
    memory_corpus: Any, causal_type: Any, blocks: Any, length: int, streams: int, seed: int, epoch: int, shuffle: bool
) -> None:
    corpus, causal = memory_corpus(blocks), causal_type()
    total = sum(n + 1 for block in blocks for n in block)
    if total < length:
        with pytest.raises(UsageError, match=f"make {total} tokens"):
            pack_dataset(corpus, causal, sequence_length=length, seed=seed)
        return
    rows = pack_dataset(corpus, causal, sequence_length=length, seed=seed, streams=streams, shuffle=shuffle)
    assert len(rows) == -(-total // length), "all rows are full but for the last"
    assert rows.padding_fraction == pytest.approx(1 - total / (len(rows) * length))

    positions = range(epoch * len(rows), (epoch + 1) * len(rows))
    places = [rows.find_row(position) for position in positions]
    assert {place.epoch for place in places} == {epoch}
    assert len(set(places)) == len(rows)

    pairs: Counter[tuple[int, int]] = Counter()
    for row in read_epoch(rows, epoch):
        assert set(row) == FIELDS
        assert all(field.shape == (length,) and field.dtype == np.int64 for field in row.values())
        for chunk in chunks(row):
            pairs.update(zip(chunk["tokens"].tolist(), chunk["targets"].tolist(), strict=True))
    assert pairs == Counter(
        pair for ids in corpus.documents for pair in zip([BOS, *ids.tolist()], [*ids.tolist(), EOS], strict=True)
    )


def listed(rows: PackedDataset, epoch: int) -> list[np.ndarray]:
    """The tokens of an epoch's rows before streams, as the docstrings say: all blocks, joined, and cut."""
    corpus, length, seed = rows.corpus, rows.sequence_length, rows.seed
    joined: list[int] = []
    begins, actual = [], []
    for block in (blocks := permutation(corpus.n_blocks, seed, "blocks", epoch).tolist()):
        texts = [tokens.tolist() for _, tokens in corpus.read_block(block)]
        begins.append(len(joined))
        for number in permutation(len(texts), seed, "documents", epoch, block).tolist():
            joined += [BOS, *texts[number]]
    ends = [*begins[1:], len(joined)]
    for block, begin, end in zip(blocks, begins, ends, strict=True):
        starts = [at for at in range(0, len(joined), length) if begin <= at < end]
        for number in permutation(len(starts), seed, "rows", epoch, block).tolist():
            row = joined[starts[number] : starts[number] + length]
            actual.append(np.array(row + [PAD] * (length - len(row))))
    return actual


@pytest.mark.parametrize("length", [32, 1500, 5000])
def test_a_corpus_on_disk_gives_the_rows_that_its_documents_make(corpus: Corpus, causal: Any, length: int) -> None:
    """Rows of less than a block, and of several; from documents joined and cut here by plain lists."""
    streams = 4
    rows = pack_dataset(corpus, causal, sequence_length=length, seed=5, streams=streams)
    expected = listed(rows, 3)
    segments = np.array_split(np.arange(len(expected)), streams)
    turns = [segment[turn] for turn in range(len(expected)) for segment in segments if turn < len(segment)]
    for at, number in enumerate(turns):
        np.testing.assert_array_equal(rows.read_row(3 * len(rows) + at)["tokens"], expected[number])
    assert {key[:2] for key in causal.keys} == {(5, 3)}
    assert {key[2:] for key in causal.keys} == {(sample, 0) for sample in range(100)}


def test_without_shuffling_the_order_is_the_stored_one(memory_corpus: Any, causal: Any) -> None:
    corpus = memory_corpus([[5, 9, 0, 3], [1], [30, 2]])
    rows = pack_dataset(corpus, causal, sequence_length=4, seed=1, streams=3, shuffle=False)
    expected = [token for ids in corpus.documents for token in (BOS, *ids.tolist())]
    expected += [PAD] * (-len(expected) % 4)
    for epoch in (0, 3):
        assert [t for row in read_epoch(rows, epoch) for t in row["tokens"].tolist()] == expected


def test_epochs_and_seeds_differ_and_repeat(corpus: Corpus, causal: Any) -> None:
    def epoch(seed: int, number: int) -> bytes:
        rows = pack_dataset(corpus, causal, sequence_length=64, seed=seed)
        return b"".join(row["tokens"].tobytes() for row in read_epoch(rows, number))

    assert epoch(1, 0) == epoch(1, 0)
    assert len({epoch(1, 0), epoch(1, 1), epoch(2, 0), epoch(2, 1)}) == 4


def test_documents_of_a_block_meet_in_another_order_each_epoch(memory_corpus: Any, causal: Any) -> None:
    rows = pack_dataset(memory_corpus([[3, 3, 3, 3]]), causal, sequence_length=16, seed=0)
    orders = {rows.read_row(epoch)["tokens"].tobytes() for epoch in range(300)}
    assert len(orders) == 24


def test_rows_do_not_depend_on_what_was_read_before(corpus: Corpus, causal: Any) -> None:
    how = {"sequence_length": 64, "seed": 1, "streams": 8}
    rows, forgetful = (pack_dataset(corpus, causal, **how, cache_bytes=size) for size in (2**29, 1))
    positions = np.random.default_rng(0).permutation(3 * len(rows))[:150].tolist()
    for position in positions:
        assert_same_fields(rows.read_row(position), forgetful.read_row(position))


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def test_the_order_is_uniform(memory_corpus: Any, causal: Any) -> None:
    """Which block, and which of its rows, comes first is uniform over seeds and over epochs.

    The bound is the 99.99th percentile of χ² with 31 degrees of freedom: 70.
    """
    corpus = memory_corpus([[6] * 4] * 8)
    by_seed, by_epoch = np.zeros((8, 4)), np.zeros((8, 4))
    one = pack_dataset(corpus, causal, sequence_length=7, seed=7)
    for i in range(2000):
        place = pack_dataset(corpus, causal, sequence_length=7, seed=i).find_row(0)
        by_seed[place.block, place.row] += 1
        place = one.find_row(i * len(one))
        by_epoch[place.block, place.row] += 1
    assert chi_square(by_seed) < 70
    assert chi_square(by_epoch) < 70


def test_every_whole_order_is_as_likely_as_any_other() -> None:
    """All 24 orders of 4 blocks, and with one block those of its 4 rows, over seeds and over epochs: χ² with 23
    degrees of freedom, its 99.99th percentile is 58."""
    orders = {order: number for number, order in enumerate(itertools.permutations(range(4)))}
    for rows, column in ((np.ones(4, np.int64), 1), (np.full(1, 4), 2)):
        by_seed, by_epoch = np.zeros(24), np.zeros(24)
        one = make_row_order(rows, seed=7, streams=1, shuffle=True)
        for i in range(1200):
            order = make_row_order(rows, seed=i, streams=1, shuffle=True)
            by_seed[orders[tuple(order.find_row(k)[column] for k in range(4))]] += 1
            by_epoch[orders[tuple(one.find_row(4 * i + k)[column] for k in range(4))]] += 1
        assert chi_square(by_seed) < 58
        assert chi_square(by_epoch) < 58


def test_neighbours_come_from_different_streams(memory_corpus: Any, causal: Any) -> None:
    rows = pack_dataset(memory_corpus([[79]] * 40), causal, sequence_length=8, seed=0, streams=10)
    blocks = [rows.find_row(position).block for position in range(len(rows))]
    for start in range(0, len(blocks), 10):
        assert len(set(blocks[start : start + 10])) == 10, "each stream reads its own blocks"
    for stream in range(10):
        local = blocks[stream::10]
        assert [local[i] for i in range(0, 40, 10)] == list(dict.fromkeys(local)), "and reads each to its end"


def test_the_order_is_the_one_of_the_docstring(memory_corpus: Any, causal: Any) -> None:
    counts = [7, 1, 0, 12, 3]
    corpus = memory_corpus([[8 * n - 1] if n else [0, 0] for n in counts])
    causal.sequence_lengths = lambda n_tokens, keys: n_tokens + (n_tokens > 0)
    for streams in (1, 4, 5, 23, 30):
        rows = pack_dataset(corpus, causal, sequence_length=8, seed=9, streams=streams)
        for epoch in (0, 2):
            listed = [
                RowAddress(epoch, block, row)
                for block in permutation(5, 9, "blocks", epoch).tolist()
                for row in permutation(counts[block], 9, "rows", epoch, block).tolist()
            ]
            segments = np.array_split(np.arange(23), streams)
            turns = [segment[turn] for turn in range(23) for segment in segments if turn < len(segment)]
            actual = [rows.find_row(position) for position in range(epoch * 23, epoch * 23 + 23)]
            assert actual == [listed[i] for i in turns]


@pytest.mark.parametrize("max_units", [7, 100])
def test_runs_are_what_a_stream_reads(max_units: int) -> None:
    counts = np.random.default_rng(0).integers(0, 9, 100)
    order = make_row_order(counts, seed=5, streams=6, shuffle=True, max_units=max_units)
    for epoch in (0, 3):
        for stream in range(6):
            local = range(epoch * len(order) + stream, (epoch + 1) * len(order), 6)
            for turns in (0, 1, 17, len(local) - 1, len(local)):
                runs = order.iter_stream_blocks(stream, epoch, turns)
                actual = [(block, slot) for block, at, stop in runs for slot in range(at, stop)]
                assert actual == [place[1:3] for place in order.find_slots(np.array(local[turns:], np.int64))]


def test_positions_and_seeds_may_be_numpy_integers(corpus: Corpus, causal: Any) -> None:
    """Keys are made of their repr, which differs between `5` and `np.int64(5)`."""
    plain = pack_dataset(corpus, causal, sequence_length=32, seed=5)
    numpy = pack_dataset(corpus, causal, sequence_length=32, seed=np.int64(5))  # type: ignore[arg-type]
    for position in range(40):
        np.testing.assert_array_equal(plain.read_row(position)["tokens"], numpy.read_row(np.int64(position))["tokens"])


def test_the_order_is_pinned(memory_corpus: Any, causal: Any) -> None:
    """A release must not change the order of a run that it resumes."""
    corpus = memory_corpus([[7, 12, 30], [100], [3] * 20, [0, 64]])
    rows = pack_dataset(corpus, causal, sequence_length=16, seed=1234, streams=3)
    first = [f"{place.block}.{place.row}" for place in map(rows.find_row, range(20))]
    assert " ".join(first[:10]) == "3.1 1.4 2.0 3.3 1.1 2.2 3.0 1.3 2.4 3.4"
    assert " ".join(first[10:]) == "1.2 0.2 3.2 2.1 0.1 1.5 2.3 0.0 1.0 2.2"
    tokens = np.concatenate([rows.read_row(position)["tokens"] for position in range(60)])
    pinned = "7c54eb6def0f633487cc56724c24e68aff8f51ca87ffe3f248b78889aeac0622"
    assert blake3(tokens.astype("<i8").tobytes()).hexdigest() == pinned


def test_a_row_of_padding_counts_in_nothing(corpus: Corpus, causal: Any) -> None:
    rows = pack_dataset(corpus, causal, sequence_length=16, seed=0, pad_id=3)
    padding = read_row(rows, None)
    assert set(padding) == set(rows.read_row(0))
    for name, value in {"tokens": 3, "targets": IGNORE_INDEX, "documents": PAD_DOCUMENT_ID, "positions": 0}.items():
        assert padding[name].tolist() == [value] * 16


def test_fields_of_the_objective_come_along(memory_corpus: Any, causal_type: Any) -> None:
    class Marked(causal_type):  # type: ignore[misc]
        def sequence_lengths(self, n_tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
            return n_tokens

        def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> dict[str, np.ndarray]:
            tokens = chunk.tokens
            return {"tokens": tokens, "targets": tokens, "marks": tokens.astype(np.uint8) % 7 + 1}

    rows = pack_dataset(memory_corpus([[5, 0, 0, 4]]), Marked(), sequence_length=4, seed=0)
    for row in [row for epoch in range(10) for row in read_epoch(rows, epoch)]:
        assert chunks(row), "documents of no length take no number"
        real = row["documents"] >= 0
        np.testing.assert_array_equal(row["marks"], np.where(real, row["tokens"] % 7 + 1, 0))


def test_an_objective_that_breaks_its_word_is_named(memory_corpus: Any, causal_type: Any) -> None:
    class Short(causal_type):  # type: ignore[misc]
        def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> dict[str, np.ndarray]:
            return {"tokens": chunk.tokens, "targets": chunk.tokens}

    class Wide(causal_type):  # type: ignore[misc]
        def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> dict[str, np.ndarray]:
            return dict.fromkeys(("tokens", "targets"), np.full(len(chunk.tokens) + 1, 2**31))

    corpus = memory_corpus([[5, 5]])
    with pytest.raises(MegatfmError, match=r"built sample \d with lengths .*'tokens': 5.*, not 6"):
        pack_dataset(corpus, Short(), sequence_length=4, seed=0).read_row(0)
    with pytest.raises(MegatfmError, match="'tokens' has values that do not fit"):
        pack_dataset(corpus, Wide(), sequence_length=4, seed=0).read_row(0)


def test_a_corpus_too_short_for_one_sequence_says_how_much_there_is(write: Any, causal: Any) -> None:
    folder: Path = write([np.ones(10, np.uint16), np.ones(5, np.uint16)])
    with pytest.raises(UsageError) as caught:
        pack_dataset(Corpus.open(folder), causal, sequence_length=18, seed=0)
    message = str(caught.value)
    assert "2 documents make 17 tokens" in message
    assert "data.sequence_length to at most 17" in message
    assert len(pack_dataset(Corpus.open(folder), causal, sequence_length=17, seed=0)) == 1


def test_identities_are_json_and_distinguish_orders(corpus: Corpus, causal: Any) -> None:
    options: dict[str, Any] = {"sequence_length": 64, "seed": 1, "streams": 8}
    same = pack_dataset(corpus, causal, **options).order_config()
    assert same == pack_dataset(corpus, causal, **options, cache_bytes=1).order_config()
    for change in ({"sequence_length": 32}, {"seed": 2}, {"streams": 9}, {"shuffle": False}):
        assert pack_dataset(corpus, causal, **(options | change)).order_config() != same
