"""Reads of a step: positions under warm-ups of batch and row length, and how little all ranks read together."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.storage import LocalStorage
from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import DataLoader, DataRank, split_rows
from megatfm.data.mixture import Mixture, Phase
from megatfm.data.order import BatchSchedule, BatchStage, choose_interleave
from megatfm.data.sequences import PAD_DOCUMENT_ID
from megatfm.errors import UsageError
from tests.support.layouts import extend
from tests.support.packed_corpora import pack_dataset

LIMIT = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatfm.corpus.writer import ShardWriter

    folder, draw = tmp_path_factory.mktemp("local") / "corpus", np.random.default_rng(0)
    options: Any = {
        "tokenizer_hash": "t", "token_dtype": "uint16", "shard_bytes": 60_000, "frame_bytes": 4000,
    }  # fmt: skip
    with ShardWriter(folder, **options) as writer:
        for i in range(400):
            writer.add(f"{i}", draw.integers(3, 4000, 700).astype(np.uint16), "", 0)
        writer.finish({})
    return folder


def read_by_all(
    folder: Path, causal_type: Any, monkeypatch: pytest.MonkeyPatch, batch: int, ranks: int, mixed: bool
) -> float:
    """The bytes of frames that loaders with caches of their own read in an epoch, in parts of the corpus's."""
    read: list[int] = []
    frame_bytes = Corpus.read_frame

    def counted(corpus: Corpus, number: int) -> bytes:
        data = frame_bytes(corpus, number)
        read.append(len(data))
        return data

    monkeypatch.setattr(Corpus, "read_frame", counted)
    streams, turn = choose_interleave(batch)
    n = size = 0
    for rank in range(ranks):
        corpus = Corpus.open(folder)
        size = sum(shard.bytes for shard in corpus.manifest.shards)
        options: Any = {"sequence_length": 64, "seed": 1, "streams": streams if mixed else choose_interleave(batch)}
        if mixed:
            sources = {
                name: pack_dataset(Corpus.open(folder), causal_type(), **options | {"seed": seed})
                for seed, name in enumerate("ab")
            }
            phases = [Phase(0, {"a": 1, "b": 1})]
            rows: Any = Mixture(sources, phases, seed=1, streams=streams, turn=turn, block=8)
            n = 2 * len(sources["a"])
        else:
            rows = pack_dataset(corpus, causal_type(), **options)
            n = len(rows)
        place = DataRank(rank, ranks)
        with DataLoader(rows, global_batch=batch, micro_batch=1, data_rank=place, end_position=n) as loader:
            for _ in loader:
                pass
    return sum(read) / (size * (1 + mixed))


@pytest.mark.parametrize(
    ("mixed", "ranks"),
    extend(
        [(mixed, ranks) for mixed in (False, True) for ranks in (1, 2, 3, 4, 6, 8)],
        kept=[(False, 1), (False, 2), (False, 3), (False, 6), (True, 2), (True, 3)],
    ),
)
def test_ranks_read_the_corpus_once(
    folder: Path, causal_type: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, mixed: bool
) -> None:
    reads = read_by_all(folder, causal_type, monkeypatch, 48, ranks, mixed)
    assert 1 <= reads <= LIMIT


class Blocks:
    """A corpus for an order: nothing but blocks, 20 rows in each."""

    folder, fingerprint = Path("simulated"), "simulated"

    def __init__(self, n: int) -> None:
        self.blocks, self.n_samples = np.arange(n + 1), n

    def lengths(self, begin: int, end: int) -> np.ndarray:
        return np.full(end - begin, 20 * 16 - 1)


@pytest.mark.parametrize(
    ("ranks", "batch"),
    extend(
        [(8, 16), (64, 64), (256, 256), (256, 1024), (256, 4096), (3, 48), (1, 4096)],
        kept=[(8, 16), (64, 64), (256, 1024), (3, 48)],
    ),
)
def test_up_to_256_ranks_read_the_corpus_once(causal_type: Any, ranks: int, batch: int) -> None:
    """Simulated: the order's places, cut into the ranks' shares of each step; a rank remembers two blocks for
    each of its streams."""
    streams = choose_interleave(batch).streams
    corpus: Any = Blocks(9 * streams)
    rows = pack_dataset(corpus, causal_type(), sequence_length=16, seed=1, streams=choose_interleave(batch))
    share, reads = batch // ranks, 0
    cached_blocks = 2 * max(1, -(-streams // ranks))
    blocks = np.array([slot.block for slot in rows.order.find_slots(np.arange(len(rows)))])
    for rank in range(ranks):
        cache: OrderedDict[int, None] = OrderedDict()
        rows_of_rank = np.flatnonzero(np.arange(len(rows)) % batch // share == rank)
        for block in blocks[rows_of_rank].tolist():
            if block not in cache:
                reads += 1
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > cached_blocks:
                cache.popitem(last=False)
    assert 1 <= reads / corpus.n_samples <= LIMIT


def test_a_resume_late_in_an_epoch_reads_no_more_than_an_early_one(
    folder: Path, causal_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: everything that is read of the corpus from opening it to the first step of 8 rows."""
    read: list[tuple[str, int]] = []
    plain = LocalStorage.read

    def counted(store: LocalStorage, known: Any, offset: int, size: int) -> bytes:
        read.append((known.file, size))
        return plain(store, known, offset, size)

    monkeypatch.setattr(LocalStorage, "read", counted)
    costs = []
    for share in (0.01, 0.99):
        read.clear()
        rows = pack_dataset(Corpus.open(folder), causal_type(), sequence_length=64, seed=1, plan_cache_key="kept")
        first = int(share * len(rows))
        rows.read_rows(range(first, first + 8))
        frames = [size for file, size in read if file.endswith(".tar.zst")]
        costs.append((len(frames), len(read), sum(size for _, size in read)))
    early, late = costs
    assert all(8 <= frames <= 16 for frames, *_ in costs), "one or two frames for each row of other streams"
    assert late[1] - late[0] == early[1] - early[0]
    assert late[2] / late[0] <= 1.05 * early[2] / early[0]


# --------------------------------------------------------------------------------------------------- warm-ups


WARMUP = BatchSchedule(12, (BatchStage(3, 4, 4), BatchStage(2, 8, 2)))
N_STEPS = 9
POSITIONS = [0, 4, 8, 12, 20, 28, 40, 52, 64]
"""First row of each step."""


@pytest.fixture
def rows(memory_corpus: Any, causal: Any) -> PackedDataset:
    return pack_dataset(memory_corpus([[5, 40, 9, 17]] * 7), causal, sequence_length=16, seed=3, streams=4)


def test_positions_are_a_function_of_the_step(rows: PackedDataset) -> None:
    assert [WARMUP.stage(step)[1:] for step in range(7)] == [(4, 4)] * 3 + [(8, 2)] * 2 + [(12, 1)] * 2
    assert WARMUP.batches == [4, 8, 12]
    tokens = 0
    with DataLoader(rows, global_batch=WARMUP, micro_batch=4) as loader:
        for step in range(N_STEPS):
            assert loader.position == POSITIONS[step]
            next(loader)
            tokens += loader.step_tokens
            assert tokens == 16 * loader.position
        assert loader.state_dict()["warmup"] == "[(3, 4, 4), (2, 8, 2)]"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_step_has_its_length_and_nothing_is_lost(rows: PackedDataset, ranks: int) -> None:
    shares = []
    for rank in range(ranks):
        with DataLoader(rows, global_batch=WARMUP, micro_batch=1, data_rank=DataRank(rank, ranks)) as loader:
            shares.append([next(loader) for _ in range(N_STEPS)])
    keys: list[int] = []
    for step in range(N_STEPS):
        stage = WARMUP.stage(step)
        batches = [batch for share in shares for batch in share[step]]
        assert len(batches) == stage.global_batch
        assert all(batch["tokens"].shape == (stage.splits_per_row, 16 // stage.splits_per_row) for batch in batches)
        read = np.concatenate([batch["tokens"].reshape(-1) for batch in batches])
        first = POSITIONS[step]
        expected = [rows.read_row(first + i)["tokens"] for i in range(stage.global_batch)]
        np.testing.assert_array_equal(read, np.concatenate(expected))
        keys += [key for batch in batches for key in batch["keys"].tolist()]
    assert len(set(keys)) == len(keys)
    assert min(keys) >= 0


@pytest.mark.parametrize("as_one_document", [False, True])
def test_cut_rows_equal_packing_at_that_length(memory_corpus: Any, causal_type: Any, as_one_document: bool) -> None:
    def row(length: int, position: int) -> dict[str, np.ndarray]:
        packed = pack_dataset(
            memory_corpus([[5, 40, 0, 9, 17, 3]]), causal_type(), sequence_length=length, seed=3, shuffle=False,
            attend_across_documents=as_one_document,
        )  # fmt: skip
        return packed.read_row(position)

    for position in range(5):
        full = {name: field[None] for name, field in row(16, position).items()}
        cut = split_rows(full, 4)
        for part in range(4):
            expected = row(4, 4 * position + part)
            if (cut["documents"][part] == PAD_DOCUMENT_ID).all():
                continue  # padding at the end of a block; packing at this length has no such row
            for name, field in cut.items():
                np.testing.assert_array_equal(field[part], expected[name], err_msg=f"{name} {position} {part}")


def test_whole_sequences_are_not_cut(memory_corpus: Any, causal_type: Any) -> None:
    class Whole(causal_type):  # type: ignore[misc]
        max_tokens = 15

    rows = pack_dataset(memory_corpus([[5, 9]]), Whole(), sequence_length=16, seed=0)
    with pytest.raises(UsageError, match=r"data\.rampup: this objective's sequences are whole"):
        DataLoader(rows, global_batch=WARMUP, micro_batch=4)
    with DataLoader(rows, global_batch=BatchSchedule(4, (BatchStage(2, 2),)), micro_batch=2) as loader:
        assert [len(next(loader)) for _ in range(4)] == [1, 1, 2, 2]


def test_a_batch_of_a_stage_that_does_not_divide_is_named(rows: PackedDataset) -> None:
    with pytest.raises(
        UsageError, match=r"data\.rampup: global_batch = 4 is not a multiple of train\.micro_batch = 4 × 2 data ranks"
    ):
        DataLoader(rows, global_batch=WARMUP, micro_batch=4, data_rank=DataRank(0, 2))


@pytest.mark.parametrize(
    ("batch", "streams", "turn"),
    [(1, 64, 1), (16, 64, 1), (6, 66, 1), (96, 96, 1), (512, 256, 2), (4096, 256, 16), (1030, 206, 5)],
)
def test_streams_fit_the_batch(batch: int, streams: int, turn: int) -> None:
    assert choose_interleave(batch) == (streams, turn)
    assert choose_interleave(batch, 10) == (10, batch // 10 if batch % 10 == 0 else 1)
