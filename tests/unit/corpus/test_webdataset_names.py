"""Which array of a foreign shard is the tokens, and shards that can't be told apart or are too large."""

from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatfm.corpus import webdataset_index as module
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check
from megatfm.corpus.webdataset_index import index_folder
from megatfm.errors import UsageError
from tests.support.webdatasets import GOOD, HASH, IDS, documents, member, npy, tar, write_wds


@pytest.mark.parametrize("packed", [False, True])
def test_the_tokens_are_the_array_of_that_name(tmp_path: Path, packed: bool) -> None:
    """However many arrays lie before or after it, floats and masks among them; which one it is, is not guessed."""
    mask, floats, ones = npy(np.ones(3, np.uint8)), npy([0.5]), npy(np.ones(5, np.uint16))
    samples = [
        [
            member("0.loss_mask.npy", mask),
            member("0.tokens.npy", IDS),
            member("0.tokens.weights.npy", floats),
        ],
        [member("1.a.npy", ones), member("1.TOKENS.npy", IDS), member("1.json", b"{}")],
        [member("2.ids.npy", IDS), member("2.txt", b"one array alone may have any name")],
        [member("3.npy", IDS)],
    ]
    data = tar(*(item for sample in samples for item in sample))
    (tmp_path / ("a.tar.zst" if packed else "a.tar")).write_bytes(
        zstandard.compress(data) if packed else data
    )
    index_folder(tmp_path, HASH)
    in_place = [tokens.tolist() for _, tokens in Corpus.open(tmp_path).read_block(0)]
    assert check(tmp_path).samples == 4
    (tmp_path / "manifest.json").unlink()
    index_folder(tmp_path, HASH, tmp_path / "ours")
    rewritten = [tokens.tolist() for _, tokens in Corpus.open(tmp_path / "ours").read_block(0)]
    assert in_place == rewritten == [[0, 1, 2, 3, 4]] * 4


@pytest.mark.parametrize(
    "names", [("mask.npy", "ids.npy"), ("npy", "mask.npy"), ("tokens.npy", "TOKENS.npy")]
)
def test_arrays_of_which_any_could_be_the_tokens_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "a.tar").write_bytes(tar(GOOD, *(member(f"1.{name}", IDS) for name in names)))
    for out in (None, tmp_path / "ours"):
        with pytest.raises(
            UsageError, match=r"a\.tar: sample '1' at byte 1024 has several arrays \(.*KEY\.tokens"
        ):
            index_folder(tmp_path, HASH, out)


def test_shards_that_would_share_an_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar(GOOD))
    (tmp_path / "a.tar.zst").write_bytes(zstandard.compress(tar(GOOD)))
    for out in (None, tmp_path / "ours"):
        with pytest.raises(UsageError, match=r"a\.tar\.zst: a\.tar lies beside it.*rename one"):
            index_folder(tmp_path, HASH, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.zst"]


def test_a_sample_larger_than_a_frame_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No member is, but all its files are: sizes in an index have 32 bits."""
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 10_000)
    large = [member(f"1.{end}", bytes(6000)) for end in ("jpg", "png")]
    (tmp_path / "a.tar").write_bytes(tar(GOOD, member("1.npy", IDS), *large))
    with pytest.raises(
        UsageError, match=r"a\.tar: sample '1' and its files take more than 10000 bytes.*--to"
    ):
        index_folder(tmp_path, HASH)
    index_folder(tmp_path, HASH, tmp_path / "ours")
    assert check(tmp_path / "ours").samples == 2


def test_frames_of_another_size_are_another_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are the same bytes, but the order of their rows is another."""
    folder, actual = write_wds(tmp_path / "theirs", documents(), "tar"), []
    for size in (2**18, 4000):
        monkeypatch.setattr(module, "FRAME_BYTES", size)
        actual.append(index_folder(folder, HASH).manifest)
        (folder / "manifest.json").unlink()
    assert [one.shards[0].blake3 for one in actual] == [actual[0].shards[0].blake3] * 2
    assert actual[0].fingerprint != actual[1].fingerprint
    assert "frame_bytes" not in actual[0].model_dump()["shards"][0], "as those that were indexed before"
