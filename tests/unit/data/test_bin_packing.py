"""Packing by fitting: every chunk once an epoch, every sequence whole, few rows; which blocks are packed together."""

from collections import Counter
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import describe_corpus
from megatfm.data.bin_packing import best_fit_decreasing, describe_padding, group_blocks, measure_padding
from megatfm.data.chunks import split_documents
from megatfm.data.loader import DataLoader, DataRank
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import IGNORE_INDEX, PAD_DOCUMENT_ID, DocumentChunk, PackingConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.rng import ChunkKey, chunk_keys, random_uint64
from tests.support.packed_corpora import assert_same_fields, pack_dataset, read_epoch, read_row

PAD = 0

Row = dict[str, np.ndarray]


class WholeChunkObjective:
    """A chunk of n ≥ 1 tokens becomes them and one to three zeros, as the planning key says; its "marks" tell epoch,
    sample and chunk at each place. With two sides, the first has the tokens and the second twice as many marks."""

    padding_values = MappingProxyType({"marks": -7})
    fields = None
    needs_other_documents = True
    needs_files = False

    def __init__(self, max_tokens: int, two: bool = False) -> None:
        self.max_tokens = max_tokens
        self.field_prefixes = ("encoder_", "") if two else ("",)

    def sequence_lengths(self, n_tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
        first = np.where(n_tokens > 0, n_tokens + 1 + (keys % np.uint64(3)).astype(np.int64), 0)
        return np.stack([first, 2 * n_tokens], axis=1) if len(self.field_prefixes) > 1 else first

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Row:
        tokens, planned = chunk.tokens, chunk_keys(key.seed, np.array([key.sample]), np.array([key.chunk]))
        lengths = self.sequence_lengths(np.array([len(tokens)]), planned).reshape(-1)
        displayed = np.zeros(lengths[0], np.int64)
        displayed[: len(tokens)] = tokens
        code = int(random_uint64(1, *key)[0] >> np.uint64(40)) * 100 + key.chunk
        marks = np.full(lengths[-1], code % 2**31)
        prefix = self.field_prefixes[0]
        fields = {f"{prefix}tokens": displayed, "marks": marks}
        return fields | {"tokens": marks, "targets": marks} if prefix else fields | {"targets": displayed}


def sequences(row: Row, side: str, length: int) -> list[dict[str, tuple[int, ...]]]:
    """The sequences of a row, after checking numbers, positions and padding of one side."""
    documents, positions = row[f"{side}documents"], row[f"{side}positions"]
    names = ["encoder_tokens"] if side else [name for name in row if not name.startswith("encoder_")]
    assert all(row[name].shape == (length,) and row[name].dtype == np.int64 for name in names)
    n = int((documents != PAD_DOCUMENT_ID).sum())
    assert (documents[n:] == PAD_DOCUMENT_ID).all(), "padding is at the end"
    assert (positions[n:] == 0).all()
    for name, fill in (("tokens", PAD), ("targets", IGNORE_INDEX), ("marks", -7)):
        if f"{side}{name}" in names:
            assert (row[f"{side}{name}"][n:] == fill).all()
    assert sorted(set(documents[:n].tolist())) == list(range(documents[:n].max(initial=-1) + 1))
    assert (np.diff(documents[:n]) >= 0).all()
    actual = []
    for number in range(documents[:n].max(initial=-1) + 1):
        local = documents == number
        assert positions[local].tolist() == list(range(local.sum()))
        actual.append({name: tuple(row[name][local].tolist()) for name in names})
    return actual


blocks_of_documents = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(
    blocks=blocks_of_documents,
    most=st.integers(1, 20),
    slack=st.integers(0, 20),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
    two=st.booleans(),
)
def test_every_chunk_is_whole_and_comes_once_an_epoch(
    memory_corpus: Any, blocks: Any, most: int, slack: int, seed: int, epoch: int, shuffle: bool, two: bool
) -> None:
    corpus, objective = memory_corpus(blocks), WholeChunkObjective(most, two)
    lengths = (most + 3 + slack, 2 * most + slack)
    options = {"sequence_length": lengths[0], "target_length": lengths[1], "seed": seed, "shuffle": shuffle}
    expected: Counter[tuple[int, ...]] = Counter()
    for sample, tokens in enumerate(corpus.documents):
        for chunk in range(-(-len(tokens) // most)):
            part = tokens[chunk * most : (chunk + 1) * most]
            key = chunk_keys(seed, np.array([sample]), np.array([chunk]))
            expected[(*part.tolist(), *[0] * (1 + int(key[0] % np.uint64(3))))] += 1
    if not expected:
        with pytest.raises(UsageError, match=r"none of its .* documents is long enough"):
            pack_dataset(corpus, objective, **options)
        return
    rows = pack_dataset(corpus, objective, **options)
    counts: Counter[tuple[int, ...]] = Counter()
    for row in read_epoch(rows, epoch):
        first = sequences(row, objective.field_prefixes[0], lengths[0])
        assert first, "no row is empty"
        counts.update(one[f"{objective.field_prefixes[0]}tokens"] for one in first)
        if two:
            second = sequences(row, "", lengths[1])
            assert [len(one["tokens"]) for one in second] == [
                2 * sum(token > 0 for token in one["encoder_tokens"]) for one in first
            ], "a sequence has one number on both sides"
    assert counts == expected
    empty = sum(len(tokens) == 0 for tokens in corpus.documents)
    warning = f"{empty:,} of {empty + expected.total():,} chunks of documents are too short"
    assert any(warning in note for note in rows.warnings) == (empty > 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 32), max_size=60), st.integers(32, 40))
def test_best_fit_is_johnsons(lengths: list[int], capacity: int) -> None:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [i for i, left in enumerate(room) if left >= length]
        if not fits:
            room.append(capacity)
            fits = [len(room) - 1]
        room[min(fits, key=lambda i: room[i])] -= length
    rows = best_fit_decreasing(np.array(lengths, np.int64)[:, None], (capacity,))
    loads = np.bincount(rows, lengths) if lengths else np.zeros(0)
    assert sorted(loads.tolist()) == sorted(capacity - left for left in room)
    order = list(dict.fromkeys(rows.tolist()))
    assert order == list(range(len(room))), "rows are numbered by their first sequences"


def test_rows_hold_what_was_planned_in_stored_order(memory_corpus: Any) -> None:
    documents, objective = memory_corpus([[30, 5, 17, 8, 40, 3, 0, 11]]).documents, WholeChunkObjective(20)
    chunks = split_documents(np.array([len(d) for d in documents]), objective, 0, 3).without_empty()
    planned = best_fit_decreasing(chunks.lengths, (48,))
    packed = pack_in_memory(documents, PackingConfig(objective, (48,), 3))
    assert packed.n_rows == planned.max() + 1
    parts = [documents[number][start:end] for number, start, end, _, _ in chunks.iter_chunks()]
    for row in range(packed.n_rows):
        tokens = packed.build_row(row)["tokens"]
        expected = np.concatenate([parts[at] for at in np.flatnonzero(planned == row)])
        assert tokens[tokens > 0].tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 32), st.integers(1, 12)), max_size=50))
def test_two_sides_both_fit(lengths: list[tuple[int, int]]) -> None:
    inputs = np.array(lengths, np.int64).reshape(-1, 2)
    rows = best_fit_decreasing(inputs, (32, 12))
    for side, capacity in enumerate((32, 12)):
        assert np.bincount(rows, inputs[:, side]).max(initial=0) <= capacity
    assert sorted(set(rows.tolist())) == list(range(rows.max(initial=-1) + 1))
    least = max((-(-inputs[:, side].sum() // c) for side, c in enumerate((32, 12))), default=0)
    assert least <= rows.max(initial=-1) + 1 <= len(lengths)


def test_few_rows_are_needed() -> None:
    """Sequences of even lengths up to the row's fill it to more than 97 %."""
    lengths = np.random.default_rng(0).integers(1, 513, 2000)[:, None]
    rows = best_fit_decreasing(lengths, (512,))
    assert lengths.sum() / (512 * (rows.max() + 1)) > 0.97


@pytest.mark.parametrize("mean", [5, 40, 300])
@pytest.mark.parametrize("length", [64, 512, 4096])
def test_rows_are_filled_at_any_lengths(memory_corpus: Any, causal_type: Any, length: int, mean: int) -> None:
    """Blocks of 512 tokens, so rows of an eighth of a block and of eight; of documents cut to chunks where they are
    longer. No group is large."""
    draw = np.random.default_rng(0)
    lengths = np.maximum(1, draw.lognormal(np.log(mean), 0.7, 110 * max(length, 512) // mean)).astype(int)
    owner = np.cumsum(lengths) // 512
    blocks = [part.tolist() for part in np.split(lengths, np.flatnonzero(np.diff(owner)) + 1)]
    corpus, objective = memory_corpus(blocks), WholeChunkObjective(length - 3)
    assert pack_dataset(corpus, causal_type(), sequence_length=length, seed=0).padding_fraction <= 0.01
    rows = pack_dataset(corpus, objective, sequence_length=length, seed=0)
    together = split_documents(corpus.lengths(), objective, 0, 0).without_empty().lengths
    least = 1 - together.sum() / length / (best_fit_decreasing(together, (length,)).max() + 1)
    assert rows.padding_fraction <= max(0.03, least + 0.01), "or the lengths don't let them"
    *sizes, _ = rows._plan.sizes.tolist()
    assert max(sizes, default=0) <= 256 + 2 * 512 / length


def test_rows_are_the_same_in_all_epochs_and_their_content_is_not(memory_corpus: Any) -> None:
    rows = pack_dataset(memory_corpus([[30, 5, 17], [8, 40, 3]]), WholeChunkObjective(20), sequence_length=24, seed=3)
    plans, marks = [], []
    for epoch in range(4):
        read = read_epoch(rows, epoch)
        plans.append(sorted(tuple(row["tokens"].tolist()) for row in read))
        marks.append(sorted(tuple(row["marks"].tolist()) for row in read))
    assert plans[0] == plans[1] == plans[2] == plans[3]
    assert len({str(one) for one in marks}) == 4
    orders = {str([row["tokens"].tolist() for row in read_epoch(rows, epoch)]) for epoch in range(4)}
    assert len(orders) > 1, "rows come in another order"


def joined(step: list[Row]) -> Row:
    return {name: np.concatenate([batch[name] for batch in step]) for name in step[0]}


def test_no_rank_micro_batch_or_resume_changes_a_row_or_its_key(corpus: Corpus) -> None:
    sizes = {"sequence_length": 64, "target_length": 110, "seed": 3, "streams": 8}
    rows = pack_dataset(corpus, WholeChunkObjective(50, two=True), **sizes)
    steps = len(rows) // 8 + 3

    def read(position: int = 0, **options: Any) -> list[Row]:
        fresh = pack_dataset(corpus, WholeChunkObjective(50, two=True), **sizes)
        with DataLoader(fresh, global_batch=8, position=position, **options) as loader:
            return [joined(next(loader)) for _ in range(steps - position // 8)]

    full = read(micro_batch=8)
    assert len({int(key) for step in full for key in step["keys"]}) == 8 * steps
    assert all((step["keys"] >= 0).all() for step in full)
    for resumed in (read(position=16, micro_batch=2), read(position=8 * (steps - 1), micro_batch=4)):
        for expected, actual in zip(full[-len(resumed) :], resumed, strict=True):
            assert_same_fields(actual, expected)
    ranks = [read(micro_batch=1, data_rank=DataRank(rank, 4)) for rank in range(4)]
    for expected, *parts in zip(full, *ranks, strict=True):
        assert_same_fields(joined(parts), expected)


def test_rows_of_padding_have_both_sides(corpus: Corpus) -> None:
    sizes = {"sequence_length": 64, "target_length": 110, "seed": 3}
    rows = pack_dataset(corpus, WholeChunkObjective(50, two=True), **sizes, pad_id=9)
    padding = read_row(rows, None)
    assert padding.keys() == rows.read_row(0).keys()
    expected = {
        "encoder_tokens": 9, "tokens": 9, "targets": IGNORE_INDEX, "marks": -7, "documents": PAD_DOCUMENT_ID,
    }  # fmt: skip
    expected |= {"encoder_documents": PAD_DOCUMENT_ID, "encoder_positions": 0, "positions": 0}
    for name, fill in expected.items():
        assert padding[name].tolist() == [fill] * (64 if name.startswith("encoder_") else 110)
    assert rows.order_config()["target_length"] == 110
    with DataLoader(rows, global_batch=4, micro_batch=2) as loader:
        next(loader)
    assert loader.step_tokens == 4 * (64 + 110), "of both sides"


def test_a_row_as_one_document(memory_corpus: Any) -> None:
    corpus = memory_corpus([[5, 6, 7]])
    rows = pack_dataset(corpus, WholeChunkObjective(20), sequence_length=40, seed=0, attend_across_documents=True)
    row = rows.read_row(0)
    n = int((row["documents"] == 0).sum())
    assert row["documents"].tolist() == [0] * n + [PAD_DOCUMENT_ID] * (40 - n)
    assert row["positions"].tolist() == [*range(n), *[0] * (40 - n)]


def test_partners_are_the_other_documents_of_the_group(memory_corpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    partners: dict[tuple[int, int], list[list[int]]] = {}

    class Looking(WholeChunkObjective):
        def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Row:
            read = [chunk.other_documents.tokens(i).tolist() for i in range(len(chunk.other_documents.lengths))]
            assert [len(one) for one in read] == chunk.other_documents.lengths.tolist()
            partners[key.sample, key.chunk] = read
            return super().build_example(chunk, key)

    corpus = memory_corpus([[30, 0], [5], [7], [4, 4]])
    monkeypatch.setattr("megatfm.data.packing_plan.group_blocks", lambda *_: [(2, 2), (3, 1), (4, 1)])
    rows = pack_dataset(corpus, Looking(20), sequence_length=24, seed=0)
    read_epoch(rows)
    texts = [document.tolist() for document in corpus.documents]
    assert partners[0, 0] == partners[0, 1] == [texts[2]], "whole, and without empty ones"
    assert partners[2, 0] == [texts[0]]
    assert partners[3, 0] == []
    assert any("1 of 6 sequences lie in groups of blocks with no other document" in note for note in rows.warnings)


def test_an_objective_that_says_too_much_is_named(memory_corpus: Any) -> None:
    with pytest.raises(MegatfmError, match=r"lengths \[2\d\] of 20 tokens, for rows of \[20\]: its max_tokens = 20 is"):
        pack_dataset(memory_corpus([[30]]), WholeChunkObjective(20), sequence_length=20, seed=0)


def test_the_plan_is_the_same_however_many_documents_are_planned_at_once(
    corpus: Corpus, causal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for objective in (causal, WholeChunkObjective(50)):
        plans = set()
        for at_once in (1, 7, 2**18):
            monkeypatch.setattr("megatfm.data.packing_plan.SAMPLES_AT_ONCE", at_once)
            rows = pack_dataset(corpus, objective, sequence_length=64, seed=3)
            plans.add(str([rows.find_row(position) for position in range(len(rows))]))
        assert len(plans) == 1


@pytest.mark.parametrize("rows_of_a_block", [3, 50, 400])
def test_no_blocks_are_packed_twice_to_find_a_group(rows_of_a_block: int) -> None:
    """Sequences of a little over half a row, which never fill one, so that all sizes of groups are looked at."""
    volumes = np.arange(41)[:, None] * rows_of_a_block * 60
    tried: list[tuple[int, int]] = []

    def rows_of(begin: int, end: int) -> int:
        tried.append((begin, end))
        return (end - begin) * rows_of_a_block

    actual = list(group_blocks(volumes, (100,), rows_of, is_bin_packed=True))
    assert actual[-1][0] == 40
    assert sum(rows for _, rows in actual) == 40 * rows_of_a_block
    assert len(set(tried)) == len(tried)


def test_padding_is_that_of_the_rows(corpus: Corpus, causal_type: type) -> None:
    class Whole(causal_type):  # type: ignore[misc]
        max_tokens = 599

    lengths = corpus.lengths() + 1
    for row in (64, 600):
        cut, full = measure_padding(lengths, corpus.blocks, row)
        assert cut == pack_dataset(corpus, causal_type(), sequence_length=row, seed=0).padding_fraction
    assert full == pack_dataset(corpus, Whole(), sequence_length=600, seed=0).padding_fraction
    cut, _ = measure_padding(lengths, corpus.blocks, 2048)
    displayed = f"rows of 2,048  {100 * cut:.1f} % padding where documents are cut"
    description = describe_corpus(corpus.folder, describe_rows=describe_padding)
    assert " ".join(displayed.split()) in " ".join(description.split())
