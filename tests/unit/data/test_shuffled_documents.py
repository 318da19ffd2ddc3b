"""Samples one by one come in the order that is written down, from anywhere in it."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

from megatfm.corpus import webdataset_index
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.webdataset_index import index_folder
from megatfm.data.shuffled_documents import ShuffledDocuments
from megatfm.errors import MegatfmError
from tests.support.damaged_corpora import assert_refused


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
def test_shuffling_goes_on_from_any_position(corpus: Corpus, streams: int) -> None:
    full = [number for number, _ in islice(ShuffledDocuments(corpus, seed=3, streams=streams), 250)]
    for position in (0, 1, 6, 7, 93, 99, 100, 101, 199):
        again = ShuffledDocuments(corpus, seed=3, streams=streams, position=position)
        assert [number for number, _ in islice(again, 250 - position)] == full[position:]


def test_damage_is_told_when_its_turn_comes(folder: Path) -> None:
    expected = list(islice(ShuffledDocuments(Corpus.open(folder), seed=3, streams=7), 100))
    corpus = Corpus.open(folder)
    samples = ShuffledDocuments(corpus, seed=3, streams=7)
    damaged = samples.order.find_row(40).block
    before = next(k for k in range(100) if samples.order.find_row(k).block == damaged)
    shard, frame = corpus._locate_block(damaged)
    path = folder / corpus.manifest.shards[shard].file
    data = bytearray(path.read_bytes())
    data[int(corpus.indexes[shard].offsets[frame + 1]) - 1] ^= 1
    path.write_bytes(data)
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
    """Samples are read by themselves once their frames were verified."""
    texts, samples = make_documents(100), ShuffledDocuments(plain, seed=3, streams=streams)
    frames, frame_bytes = list[int](), Corpus.read_frame
    monkeypatch.setattr(Corpus, "read_frame", lambda self, n: frames.append(n) or frame_bytes(self, n))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for epoch in range(3):
        read = list(islice(samples, 100))
        places = [samples.order.find_row(100 * epoch + k) for k in range(100)]
        assert [number for number, _ in read] == [
            int(plain.blocks[place.block]) + place.row for place in places
        ]
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


def test_damage_of_a_plain_tar_is_told_when_its_turn_comes(plain: Corpus) -> None:
    expected = [number for number, _ in islice(ShuffledDocuments(plain, seed=3, streams=7), 100)]
    corpus = Corpus.open(plain.folder)
    samples, path = ShuffledDocuments(corpus, seed=3, streams=7), plain.folder / "a.tar"
    damaged = samples.order.find_row(3).block  # unpacked together with those of the first three
    before = next(k for k in range(100) if samples.order.find_row(k).block == damaged)
    data = bytearray(path.read_bytes())
    data[int(corpus.indexes[0].offsets[damaged + 1]) - 1100] ^= 1
    path.write_bytes(data)
    samples = ShuffledDocuments(corpus, seed=3, streams=7)
    inputs: list[int] = []
    with pytest.raises(MegatfmError, match=f"in frame {damaged} .* its hash is not the index's"):
        inputs.extend(number for number, _ in samples)
    assert inputs == expected[:before]
    assert before > 0
