"""A mixture has its weights in every block and reads each source once an epoch; quarantined samples are padding."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megatfm.config.data import MixtureSource
from megatfm.corpus.corpus import Corpus
from megatfm.data.dataset import PackedDataset, join_rows
from megatfm.data.documents import Quarantine
from megatfm.data.loader import DataLoader
from megatfm.data.mixture import EpochCounter, Mixture, Phase, compute_quotas, make_source_seed
from megatfm.data.sequences import IGNORE_INDEX, PAD_DOCUMENT_ID
from megatfm.errors import MegatfmError, UsageError
from tests.support.files import flip_bit
from tests.support.packed_corpora import SHARD, pack_dataset

STREAMS, BLOCK = 4, 20
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
LATER = {"a": 0.1, "b": 0.0, "c": 0.9}
CHANGE = 130  # in the second block of the first phase: positions 80 … 159; begins at 132, with the next turn


@pytest.fixture(scope="module")
def make_mixture(memory_corpus: Any, causal_type: Any) -> Any:
    def make(seed: int = 1, phases: Any = ((0, WEIGHTS), (CHANGE, LATER)), block: int = BLOCK) -> Mixture:
        sources = {
            name: pack_dataset(
                memory_corpus([[7, 9, 3]] * n), causal_type(), sequence_length=8, seed=make_source_seed(seed, name),
                streams=STREAMS,
            )
            for name, n in (("a", 9), ("b", 5), ("c", 11))
            if name in phases[0][1]
        }  # fmt: skip
        return Mixture(sources, [Phase(*phase) for phase in phases], seed=seed, streams=STREAMS, block=block)

    return make


def test_every_block_of_every_stream_has_its_quotas(make_mixture: Any) -> None:
    mixture = make_mixture()
    start = 132
    for first, weights in ((0, WEIGHTS), (start, LATER), (start + STREAMS * BLOCK, LATER)):
        for stream in range(STREAMS):
            turns = range(first // STREAMS, first // STREAMS + BLOCK)
            counts = Counter(mixture.find_source(turn * STREAMS + stream)[0] for turn in turns)
            assert counts == Counter({name: round(BLOCK * share) for name, share in weights.items()})


def test_sources_of_many_rows_are_those_of_each(make_mixture: Any) -> None:
    mixture, names = make_mixture(), ["a", "b", "c"]
    positions = np.random.default_rng(1).permutation(400)
    expected = [names.index(mixture.find_source(int(position))[0]) for position in positions]
    assert mixture.find_source_indices(positions).tolist() == expected
    assert mixture.find_source_indices(positions[:0]).tolist() == []


def test_any_stretch_comes_close_to_the_weights(make_mixture: Any) -> None:
    mixture = make_mixture(phases=((0, WEIGHTS),))
    places = [mixture.find_source(position)[0] for position in range(4000)]
    for begin in (0, 37, 1001):
        for length in (40, 400, 2000):
            counts = Counter(places[begin : begin + length])
            for name, share in WEIGHTS.items():
                assert abs(counts[name] - share * length) <= 2 * STREAMS, (begin, length, name)


@pytest.mark.parametrize("turn", [1, 4])
@pytest.mark.parametrize("streams", [64, 60, 8])
@pytest.mark.parametrize("weights", [(0.75, 0.25), (0.5, 0.3, 0.2), (0.9, 0.06, 0.04)])
def test_shares_of_batches_vary_less_than_those_of_independent_draws(
    memory_corpus: Any, causal_type: Any, weights: tuple[float, ...], streams: int, turn: int
) -> None:
    """Shares over seeds are as asked; and no prefix is off by more than a few rows."""
    errors = {64: [], 256: []}  # type: ignore[var-annotated]
    worst = 0.0
    for seed in range(3):
        sources = {
            name: pack_dataset(memory_corpus([[7]]), causal_type(), sequence_length=8, seed=seed, streams=streams)
            for name, _ in zip("abc", weights, strict=False)
        }
        mixture = Mixture(
            sources, [Phase(0, dict(zip(sources, weights, strict=True)))], seed=seed, streams=streams, turn=turn,
        )  # fmt: skip
        names = np.array([*"abc"])[mixture.find_source_indices(np.arange(4096))]
        for name, share in zip(sources, weights, strict=True):
            is_here = names == name
            prefixes = np.cumsum(is_here) - share * np.arange(1, 4097)
            worst = max(worst, np.abs(prefixes[streams * turn - 1 :: streams * turn]).max())
            for batch, message in errors.items():
                independent = np.sqrt(share * (1 - share) / batch)
                message += ((is_here.reshape(-1, batch).mean(axis=1) - share) / independent).tolist()
    assert np.std(errors[64]) < 0.7
    assert np.std(errors[256]) < 0.4
    assert worst < 5


def test_every_source_is_read_in_its_own_order_each_row_once(make_mixture: Any) -> None:
    mixture = make_mixture()
    read: dict[str, list[int]] = {name: [] for name in WEIGHTS}
    for position in range(700):
        name, at = mixture.find_source(position)
        read[name].append(at)
        pair = (row["tokens"] for row in (mixture.read_row(position), mixture.sources[name].read_row(at)))
        np.testing.assert_array_equal(*pair)
    for name, positions in read.items():
        assert len(set(positions)) == len(positions)
        for stream in range(STREAMS):
            local = [at for at in positions if at % STREAMS == stream]
            assert local == list(range(stream, stream + STREAMS * len(local), STREAMS)), name
    assert mixture.count_consumed_rows(700) == {name: len(positions) for name, positions in read.items()}
    assert mixture.count_consumed_rows(131) == Counter(mixture.find_source(p)[0] for p in range(131))


def test_the_mixture_is_a_pure_function_of_seed_and_position(make_mixture: Any) -> None:
    first, second = make_mixture(), make_mixture()
    positions = np.random.default_rng(0).integers(0, 3000, 200)
    backwards = [second.find_source(position) for position in positions[::-1]][::-1]
    assert [first.find_source(position) for position in positions] == backwards
    assert [make_mixture(seed=2).find_source(p) for p in range(100)] != [first.find_source(p) for p in range(100)]


@pytest.mark.parametrize("added", ["a", "b", "c"])
def test_a_source_may_join_and_leave(make_mixture: Any, added: str) -> None:
    """The rows before are those of the mixture without it, wherever it stands among the sources."""
    assert MixtureSource(path="corpora/a", weight=0).weight == 0
    before = {name: share for name, share in WEIGHTS.items() if name != added}
    alone = make_mixture(phases=((0, before),))
    without, end = {**before, added: 0.0}, 252  # a multiple of the streams
    mixture = make_mixture(phases=((0, {name: without[name] for name in WEIGHTS}), (CHANGE, WEIGHTS), (end, without)))
    places = [mixture.find_source(position) for position in range(400)]
    assert places[:132] == [alone.find_source(position) for position in range(132)]
    assert {name for name, _ in places[132:end]} == {*WEIGHTS}
    assert {name for name, _ in places[end:]} == {*before}
    assert len({*places}) == 400, "each row once"


def test_identities_are_json_and_distinguish_mixtures(make_mixture: Any) -> None:
    plain = make_mixture().order_config()
    assert json.loads(json.dumps(plain)) == plain
    assert len([key for key in plain if key.startswith("fingerprint of ")]) == 3
    remaining = [make_mixture(phases=((0, LATER),)), make_mixture(seed=2), make_mixture(block=40)]
    assert all(other.order_config() != plain for other in remaining)
    with DataLoader(make_mixture(), global_batch=4, micro_batch=4) as loader:
        next(loader)
        epoch = loader.state_dict()["epoch"]
    assert isinstance(epoch, str)
    assert epoch.startswith("a 0.")
    assert any("mixture from row 132 on: a 10.00 %, b 0.00 %, c 90.00 %" in n for n in make_mixture().warnings)


def test_quotas_are_of_largest_remainders() -> None:
    assert compute_quotas({"a": 1, "b": 1, "c": 1}, ["a", "b", "c"], 10).tolist() == [4, 3, 3]
    assert compute_quotas({"a": 6.4, "b": 2.9, "c": 0.7}, ["a", "b", "c"], 10).tolist() == [6, 3, 1]
    with pytest.raises(UsageError, match=r"data\.mixture\.b: .* no row in a block of 10.*mixture_block_rows = 1001"):
        compute_quotas({"a": 1.0, "b": 0.001}, ["a", "b"], 10)
    with pytest.raises(UsageError, match="all weights are 0"):
        compute_quotas({"a": 0.0}, ["a"], 10)


class FixedRows:
    """A source of rows of ones with these fields."""

    warnings, can_split_rows, seed = (), True, 0

    def __init__(self, width: int = 8, **fields: Any) -> None:
        self.row_tokens, self._fields = 8, {"tokens": ((width,), np.int64), **fields}

    def __len__(self) -> int:
        return 5

    def order_config(self) -> dict[str, Any]:
        return {}

    def read_rows(self, positions: Any) -> dict[str, np.ndarray]:
        return {name: np.ones((len(positions), *shape), kind) for name, (shape, kind) in self._fields.items()}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "other",
    [FixedRows(weights=((8,), np.float32)), FixedRows(width=1), FixedRows(tokens=((8,), np.float32))],
)  # fmt: skip
def test_sources_of_unlike_rows_are_refused(other: FixedRows, order: int) -> None:
    sources: Any = dict([("a", FixedRows()), ("b", other)][::order])
    mixture = Mixture(sources, [Phase(0, {"a": 1, "b": 1})], seed=0, streams=2, block=4)
    with pytest.raises(UsageError, match=r"data\.mixture\.[ab]: its rows have fields {.*: give all sources the same"):
        mixture.read_rows(range(8))
    with pytest.raises(UsageError, match=r"data\.mixture: its rows have fields {"):  # of two workers, or readers
        join_rows([source.read_rows(range(2)) for source in sources.values()])


def test_sources_of_other_lengths_are_refused(memory_corpus: Any, causal_type: Any) -> None:
    sources = {
        name: pack_dataset(memory_corpus([[70]]), causal_type(), sequence_length=length, seed=0)
        for name, length in (("a", 8), ("b", 16))
    }
    with pytest.raises(UsageError, match=r"data\.mixture\.b: its rows have 16 tokens, those of a 8"):
        Mixture(sources, [Phase(0, {"a": 1, "b": 1})], seed=0, streams=2)


def test_blocks_of_a_mixture_stay_within_64_bits() -> None:
    """The largest that is taken has its quotas exactly; one row more is refused with what works."""
    sources: Any = {"a": FixedRows(), "b": FixedRows()}
    options: Any = {"phases": [Phase(0, {"a": 3, "b": 1})], "seed": 7}
    block = 2**13
    mixture = Mixture(sources, streams=2**18, block=block, **options)
    turns = np.arange(block) * mixture.streams
    assert sum(mixture.find_source(int(position) + 12_345)[0] == "a" for position in turns) == block * 3 // 4
    with pytest.raises(UsageError, match=r"data\.mixture_block_rows = 8193: .* choose at most 8192"):
        Mixture(sources, streams=2**18, block=block + 1, **options)


@pytest.mark.parametrize("first", [0, 57])
@pytest.mark.parametrize("batch", [1, 12])
def test_each_source_begins_its_epochs_when_its_rows_are_read_again(make_mixture: Any, first: int, batch: int) -> None:
    """Also one whose weight becomes 0, and beyond the change of weights; and a single corpus."""
    mixture = make_mixture()
    lengths = {name: len(source) for name, source in mixture.sources.items()}
    counter, single = EpochCounter(mixture, first), EpochCounter(mixture.sources["a"], first)
    read = Counter(mixture.find_source(position)[0] for position in range(first))
    for position in range(first, 600, batch):
        before = {name: max(0, read[name] - 1) // lengths[name] for name in lengths}
        read.update(mixture.find_source(at)[0] for at in range(position, position + batch))
        after = {name: max(0, read[name] - 1) // lengths[name] for name in lengths}
        assert counter.advance(position + batch) == {
            name: number + 1 for name, number in after.items() if number > before[name]
        }
        numbers = {at // lengths["a"] + 1 for at in range(max(0, position - 1), position + batch)}
        assert single.advance(position + batch) == ({"": max(numbers)} if len(numbers) > 1 else {})


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
