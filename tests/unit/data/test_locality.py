"""All ranks together read little more than the corpus, whatever their number: counted in compressed bytes."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.storage import LocalStorage
from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import DataLoader
from megatfm.data.mixture import Mixture, Phase
from megatfm.data.order import choose_interleave

LIMIT = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatfm.corpus.writer import ShardWriter

    folder, draw = tmp_path_factory.mktemp("local") / "corpus", np.random.default_rng(0)
    options: Any = {
        "tokenizer_hash": "t",
        "token_dtype": "uint16",
        "shard_bytes": 60_000,
        "frame_bytes": 4000,
    }
    with ShardWriter(folder, **options) as writer:
        for i in range(700):
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
        options: Any = {
            "sequence_length": 64,
            "seed": 1,
            "streams": streams if mixed else choose_interleave(batch),
        }
        if mixed:
            sources = {
                name: PackedDataset(Corpus.open(folder), causal_type(), **options | {"seed": seed})
                for seed, name in enumerate("ab")
            }
            phases = [Phase(0, {"a": 1, "b": 1})]
            rows: Any = Mixture(sources, phases, seed=1, streams=streams, turn=turn, block=8)
            n = 2 * len(sources["a"])
        else:
            rows = PackedDataset(corpus, causal_type(), **options)
            n = len(rows)
        with DataLoader(
            rows, global_batch=batch, micro_batch=1, data_rank=rank, data_ranks=ranks, end_position=n
        ) as loader:
            for _ in loader:
                pass
    return sum(read) / (size * (1 + mixed))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_read_the_corpus_once(
    folder: Path, causal_type: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, mixed: bool
) -> None:
    reads = read_by_all(folder, causal_type, monkeypatch, 48, ranks, mixed)
    assert 1 <= reads <= LIMIT


class Blocks:
    """What an order needs of a corpus: nothing but blocks, 20 rows in each."""

    folder, fingerprint = Path("simulated"), "simulated"

    def __init__(self, n: int) -> None:
        self.blocks, self.n_samples = np.arange(n + 1), n

    def lengths(self, begin: int, end: int) -> np.ndarray:
        return np.full(end - begin, 20 * 16 - 1)


@pytest.mark.parametrize(
    ("ranks", "batch"), [(8, 16), (64, 64), (256, 256), (256, 1024), (256, 4096), (3, 48), (1, 4096)]
)
def test_up_to_256_ranks_read_the_corpus_once(causal_type: Any, ranks: int, batch: int) -> None:
    """Simulated: the order's places, cut into the ranks' shares of each step; a rank remembers two blocks for
    each of its streams."""
    streams = choose_interleave(batch).streams
    corpus: Any = Blocks(9 * streams)
    rows = PackedDataset(corpus, causal_type(), sequence_length=16, seed=1, streams=choose_interleave(batch))
    share, reads = batch // ranks, 0
    held = 2 * max(1, -(-streams // ranks))
    blocks = np.array([rows.find_row(position).block for position in range(len(rows))])
    for rank in range(ranks):
        cache: OrderedDict[int, None] = OrderedDict()
        mine = np.flatnonzero(np.arange(len(rows)) % batch // share == rank)
        for block in blocks[mine].tolist():
            if block not in cache:
                reads += 1
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > held:
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
        rows = PackedDataset(
            Corpus.open(folder), causal_type(), sequence_length=64, seed=1, plan_cache_key="kept"
        )
        first = int(share * len(rows))
        rows.read_rows(range(first, first + 8))
        frames = [size for file, size in read if file.endswith(".tar.zst")]
        costs.append((len(frames), len(read), sum(size for _, size in read)))
    early, late = costs
    assert all(8 <= frames <= 16 for frames, *_ in costs), "one or two frames for each row of other streams"
    assert late[1] - late[0] == early[1] - early[0]
    assert late[2] / late[0] <= 1.05 * early[2] / early[0]
