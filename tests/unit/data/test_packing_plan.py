"""Plans of packed rows, read again anywhere in an epoch, and documents in shuffled order."""

import multiprocessing
import os
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

from megatfm.corpus import webdataset_index
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.webdataset_index import index_folder
from megatfm.data import packing_plan
from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import DataLoader
from megatfm.data.packed_rows import PackedBlock, pack_in_memory
from megatfm.data.sequences import PAD_DOCUMENT_ID, PackingConfig
from megatfm.data.shuffled_documents import ShuffledDocuments
from megatfm.errors import MegatfmError
from megatfm.objectives import Causal, Example, SpecialTokens
from tests.support.files import flip_bit
from tests.support.packed_corpora import assert_refused, pack_dataset
from tests.support.text_objectives import make_objective


def open_rows(folder: Path, objective: Any, name: str | None = "causal", **options: Any) -> PackedDataset:
    options = {"sequence_length": 64, "seed": 3, "streams": 4} | options
    return pack_dataset(Corpus.open(folder), objective, plan_cache_key=name, **options)


def places(rows: PackedDataset) -> list[Any]:
    return [rows.find_row(position) for position in range(len(rows))]


def test_a_plan_is_made_once(folder: Path, causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = places(open_rows(folder, causal, None))
    assert not (folder / ".plans").exists(), "without a name nothing is stored"
    assert places(open_rows(folder, causal)) == expected
    result: list[str] = []
    make = packing_plan.build_packing_plan
    monkeypatch.setattr(packing_plan, "build_packing_plan", lambda *args: result.append("") or make(*args))
    assert places(open_rows(folder, causal)) == expected
    assert not result
    for other in ({"seed": 4}, {"sequence_length": 32}, {"name": "other"}):
        open_rows(folder, causal, **other)
    assert len(result) == 3


def test_padding_of_short_targets_is_explained(folder: Path) -> None:
    """Spans of 64 tokens have some 15 tokens of targets, far from 60."""
    objective = make_objective("span_corruption", rows=(64, 60))
    warnings = open_rows(folder, objective, None, target_length=60).warnings
    (note,) = (warning for warning in warnings if "tokens is padding" in warning)
    keys = "data.sequence_length, data.target_length"
    assert note.endswith(f"inputs and targets don't fill their rows alike: choose other lengths ({keys})")


def plan_together(folder: Path, objective: Any, start: Any, plans: Any, out: Any) -> None:
    make = packing_plan.build_packing_plan

    def slowly(*args: Any) -> Any:
        plans.put(os.getpid())
        time.sleep(0.5)
        return make(*args)

    packing_plan.build_packing_plan = slowly
    start.wait()
    out.put(places(open_rows(folder, objective)))


def test_one_of_several_ranks_plans_the_rows(folder: Path, causal: Any) -> None:
    """Forked, since only processes have locks of their own."""
    context = multiprocessing.get_context("fork")
    start, plans, out = context.Barrier(3), context.Queue(), context.Queue()
    ranks = [context.Process(target=plan_together, args=(folder, causal, start, plans, out)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    expected = places(open_rows(folder, causal, None))
    assert [out.get(timeout=60) for _ in ranks] == [expected] * 3
    for rank in ranks:
        rank.join()
    assert plans.get(timeout=60)
    assert plans.empty()
    assert len(list((folder / ".plans").iterdir())) == 1, "the lock is gone"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_plan_is_made_again(folder: Path, causal: Any, damage: str) -> None:
    expected = places(open_rows(folder, causal))
    (path,) = (folder / ".plans").iterdir()
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    other = b'{"key": "0", "notes": [], "blake3": ""}\n'
    changed = {"cut": data[:-4], "flipped": data, "empty": b"", "other": other}[damage]
    path.write_bytes(changed)
    assert places(open_rows(folder, causal)) == expected
    data[-4] ^= 1
    assert path.read_bytes() == data, "it was stored again"


def test_a_plan_that_was_made_by_another_objective_is_named(folder: Path, causal_type: Any) -> None:
    class Longer(causal_type):  # type: ignore[misc]
        def sequence_lengths(self, n_tokens: Any, keys: Any) -> Any:
            return n_tokens + 100

        def build_example(self, chunk: Any, key: Any) -> Any:
            fields = super().build_example(chunk, key)
            return {name: [*field, *[0] * 99] for name, field in fields.items()}

    open_rows(folder, causal_type())
    rows = open_rows(folder, Longer())
    with pytest.raises(MegatfmError, match=r"its packing plan says .* delete the subfolder \.plans"):
        rows.read_row(0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_is_read_only_needs_no_plan(folder: Path, causal: Any) -> None:
    folder.chmod(0o500)
    open_rows(folder, causal)


def test_a_folder_where_no_plan_can_be_stored_is_planned_each_time(folder: Path, causal: Any) -> None:
    (folder / ".plans").write_text("in the way")
    assert places(open_rows(folder, causal)) == places(open_rows(folder, causal, None))


def test_old_plans_are_forgotten(folder: Path, causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_plan, "MAX_STORED_PLANS", 3)
    for seed in range(6):
        open_rows(folder, causal, seed=seed)
    assert len(list((folder / ".plans").iterdir())) == 3


def blocks_of(rows: PackedDataset, positions: range) -> set[tuple[int, int]]:
    """Epoch and number of each block in which a token of one of the rows lies."""
    actual = set()
    for slot in rows.order.find_slots(np.array(positions)):
        begin = slot.begin + rows.order.carry_length(slot.begin) + 64 * rows.order.get_block_order(slot)[slot.row]
        tokens = range(begin, min(begin + 64, rows.order.size))
        actual |= {(slot.epoch, rows.order.find_block(slot.epoch, at)) for at in tokens}
    return actual


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_resume_late_in_an_epoch_costs_what_an_early_one_costs(
    folder: Path, causal: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: nothing is planned, and only the blocks of the next rows are read, once each."""
    open_rows(folder, causal)
    monkeypatch.setattr(packing_plan, "build_packing_plan", lambda *_: pytest.fail("planned again"))
    read: list[int] = []
    block = Corpus.read_block
    monkeypatch.setattr(Corpus, "read_block", lambda self, number: read.append(number) or block(self, number))
    rows = open_rows(folder, causal)
    start = int(share * len(rows)) // 8 * 8
    with DataLoader(rows, global_batch=8, micro_batch=8, position=start) as loader:
        next(loader)
    # A step and the two ahead of it. Late in an epoch they reach into the next, which may begin with a block just read.
    needed = Counter(block for _, block in blocks_of(rows, range(start, start + 24)))
    assert read
    assert Counter(read) <= needed


SPECIAL = SpecialTokens(bos=1, eos=2, pad=0)


class OneByOne(Causal):
    """Plans are equal, and a subclass that changes `build` alone is asked for each document."""

    built = 0

    def build_example(self, *args: Any) -> Example:
        self.built += 1
        return super().build_example(*args)


def texts(dtype: str) -> list[np.ndarray]:
    return [np.arange(10 * i, 10 * i + n, dtype=dtype) for i, n in enumerate((5, 0, 33, 1, 16, 0), start=1)]


@pytest.mark.parametrize("as_one_document", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("special", [SPECIAL, SpecialTokens(bos=70_000, eos=70_001, pad=70_002)])
def test_joined_and_built_one_by_one(dtype: str, special: SpecialTokens, as_one_document: bool) -> None:
    def packed(objective: Causal) -> PackedBlock:
        how = PackingConfig(objective, (7,), 0, special.pad, as_one_document)
        return pack_in_memory(texts(dtype), how, order=lambda n: np.arange(n)[::-1])

    one_by_one = OneByOne(special)
    joined, single = packed(Causal(special)), packed(one_by_one)
    assert one_by_one.built == 6
    assert joined.n_rows == single.n_rows == 9
    for row in range(10):
        np.testing.assert_equal(joined.build_row(row), single.build_row(row))
    assert joined.build_row(0)["tokens"][0] == special.bos
    assert (joined.build_row(9)["tokens"] == special.pad).all()


def test_a_join_of_another_length_than_planned_is_named() -> None:
    class Longer(Causal):
        def build_many(self, documents: Any) -> Example:
            return {name: np.append(field, 0) for name, field in super().build_many(documents).items()}

    with pytest.raises(MegatfmError, match="joined 6 documents to 62 tokens, not 61"):
        pack_in_memory(texts("uint16"), PackingConfig(Longer(SPECIAL), (7,), 0))


def test_ids_over_31_bits_are_refused() -> None:
    with pytest.raises(MegatfmError, match="'tokens' has values that do not fit 32-bit integers"):
        pack_in_memory([np.array([2**31], np.uint32)], PackingConfig(Causal(SPECIAL), (7,), 0))


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("length", [5, 37, 700])
def test_many_short_documents_are_numbered_as_few_are(few: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.data.row_store.LOOP_LIMIT", few)
    lengths = np.random.default_rng(0).integers(0, 9, 150)
    packed = pack_in_memory([np.zeros(n, np.uint16) for n in lengths], PackingConfig(Causal(SPECIAL), (length,), 0))
    owner = np.repeat(np.arange(150), lengths + 1)
    for row in range(packed.n_rows):
        local = owner[row * length : (row + 1) * length].tolist()
        pad = [PAD_DOCUMENT_ID] * (length - len(local))
        assert packed.build_row(row)["documents"].tolist() == [n - local[0] for n in local] + pad
        counted = [local[:at].count(n) for at, n in enumerate(local)]
        assert packed.build_row(row)["positions"].tolist() == counted + [0] * len(pad)


def test_a_packed_block_takes_what_its_fields_take() -> None:
    """Four bytes a token of uint16, so that blocks of very long documents don't push others out of the cache."""
    documents = [np.zeros(n, np.uint16) for n in (5000, 100, 20_000)]
    packed = pack_in_memory(documents, PackingConfig(Causal(SPECIAL), (512,), 0))
    assert packed.nbytes < 4.1 * 25_103


# ----------------------------------------------------------------------------------------- shuffled documents


@pytest.mark.parametrize("streams", [1, 7, 64, 300])
def test_samples_come_in_order_and_each_once_an_epoch(corpus: Corpus, streams: int) -> None:
    samples = ShuffledDocuments(corpus, seed=3, streams=streams)
    read = list(islice(samples, 250))
    assert samples.position == 250
    places = [samples.order.find_row(position) for position in range(250)]
    assert [number for number, _ in read] == [int(corpus.blocks[place.block]) + place.row for place in places]
    for epoch in (read[:100], read[100:200]):
        assert sorted(number for number, _ in epoch) == list(range(100))
    for number, tokens in read[::20]:
        np.testing.assert_array_equal(tokens, corpus.read_sample(number).tokens)


@pytest.mark.parametrize("streams", [1, 7, 64])
def test_shuffling_resumes_at_any_position(corpus: Corpus, streams: int) -> None:
    full = [number for number, _ in islice(ShuffledDocuments(corpus, seed=3, streams=streams), 250)]
    for position in (0, 1, 6, 7, 93, 99, 100, 101, 199):
        resumed = ShuffledDocuments(corpus, seed=3, streams=streams, position=position)
        assert [number for number, _ in islice(resumed, 250 - position)] == full[position:]


def test_damage_is_reported_when_it_is_read(folder: Path) -> None:
    expected = list(islice(ShuffledDocuments(Corpus.open(folder), seed=3, streams=7), 100))
    corpus = Corpus.open(folder)
    samples = ShuffledDocuments(corpus, seed=3, streams=7)
    damaged = samples.order.find_row(40).block
    before = next(k for k in range(100) if samples.order.find_row(k).block == damaged)
    shard, frame = corpus._locate_block(damaged)
    path = folder / corpus.manifest.shards[shard].file
    flip_bit(path, int(corpus.indexes[shard].offsets[frame + 1]) - 1)
    inputs: list[int] = []
    with pytest.raises(MegatfmError, match=rf"{path.name}: samples .* in frame {frame} .* checksum"):
        inputs.extend(number for number, _ in samples)
    assert len(inputs) == samples.position == before > 0
    assert inputs == [number for number, _ in expected[:before]]
    with pytest.raises(MegatfmError, match=f"in frame {frame} "):
        next(ShuffledDocuments(Corpus.open(folder), seed=3, streams=7, position=before))


@pytest.fixture
def plain(tmp_path: Path, make_documents: Any, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """The documents as a plain tar of several frames, by the webdataset library."""
    monkeypatch.setattr(webdataset_index, "FRAME_BYTES", 4000)
    folder = tmp_path / "tars"
    folder.mkdir()
    with wds.TarWriter(str(folder / "a.tar")) as writer:
        for i, tokens in enumerate(make_documents(100)):
            writer.write({"__key__": f"{i:03d}", "tokens.npy": tokens})
    index_folder(folder, "t")
    return Corpus.open(folder)


@pytest.mark.parametrize("streams", [1, 7, 300])
def test_samples_of_verified_plain_tars_are_read_alone(
    plain: Corpus, make_documents: Any, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, samples = make_documents(100), ShuffledDocuments(plain, seed=3, streams=streams)
    frames, frame_bytes = list[int](), Corpus.read_frame
    monkeypatch.setattr(Corpus, "read_frame", lambda self, n: frames.append(n) or frame_bytes(self, n))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for epoch in range(3):
        read = list(islice(samples, 100))
        places = [samples.order.find_row(100 * epoch + k) for k in range(100)]
        assert [number for number, _ in read] == [int(plain.blocks[place.block]) + place.row for place in places]
        for number, tokens in read:
            np.testing.assert_array_equal(tokens, texts[number])
            assert not tokens.flags.writeable
        if epoch == 0:
            assert set(frames) == set(range(plain.n_blocks))
            frames.clear()
    assert not frames
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before + streams


def test_a_plain_tar_that_is_cut_or_gone_meanwhile_is_named(plain: Corpus) -> None:
    samples, path = ShuffledDocuments(plain, seed=3, streams=1), plain.folder / "a.tar"
    list(islice(samples, 100))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert_refused(lambda: list(islice(samples, 100)), "a.tar: ends at byte")
    path.write_bytes(data)
    assert len(list(islice(samples, 200 - samples.position))) > 0, "it goes on where it stopped"
    path.unlink()
    with pytest.raises(MegatfmError, match=r"a\.tar: cannot be read \(No such file"):
        list(islice(samples, 101))


def test_damage_of_a_plain_tar_is_reported_when_it_is_read(plain: Corpus) -> None:
    expected = [number for number, _ in islice(ShuffledDocuments(plain, seed=3, streams=7), 100)]
    corpus = Corpus.open(plain.folder)
    samples, path = ShuffledDocuments(corpus, seed=3, streams=7), plain.folder / "a.tar"
    damaged = samples.order.find_row(3).block  # unpacked together with those of the first three
    before = next(k for k in range(100) if samples.order.find_row(k).block == damaged)
    flip_bit(path, int(corpus.indexes[0].offsets[damaged + 1]) - 1100)
    samples = ShuffledDocuments(corpus, seed=3, streams=7)
    inputs: list[int] = []
    with pytest.raises(MegatfmError, match=f"in frame {damaged} .* its hash is not the index's"):
        inputs.extend(number for number, _ in samples)
    assert inputs == expected[:before]
    assert before > 0
