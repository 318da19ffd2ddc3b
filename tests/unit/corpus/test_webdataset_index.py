"""Shards of others become a corpus where they lie, or written again: which array is tokens, what is refused."""

import argparse
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from megatfm.commands import data as command
from megatfm.corpus import safe_tar
from megatfm.corpus import webdataset_index as module
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus, describe_corpus
from megatfm.corpus.shard_index import ShardIndex
from megatfm.corpus.webdataset_index import index_folder
from megatfm.data.loader import DataLoader
from megatfm.errors import MegatfmError, UsageError
from tests.support.files import flip_bit
from tests.support.packed_corpora import assert_refused, edit_manifest, pack_dataset
from tests.support.webdatasets import (
    GOOD,
    HASH,
    IDS,
    draw_documents,
    encode_npy,
    forge_header,
    make_member,
    make_sparse_tar,
    make_tar,
    write_wds,
)

FOLDER = make_member("sub/", type=tarfile.DIRTYPE)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_BYTES", 4000)


@pytest.mark.parametrize("kind", ["tar", "frames", "frames of a pipe"])
def test_foreign_shards_are_indexed_where_they_lie(tmp_path: Path, kind: str, small_frames: None, causal: Any) -> None:
    texts = draw_documents()
    folder = write_wds(tmp_path / "theirs", texts, kind)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = index_folder(folder, HASH)
    assert f"2 shards with 40 samples, {sum(map(len, texts)):,} tokens, indexed where they are" in str(done)
    assert {name: (folder / name).read_bytes() for name in before} == before
    corpus = Corpus.open(folder)
    corpus.check_tokenizer(HASH)
    assert corpus.n_blocks >= 4
    all_tokens = [tokens for number in range(corpus.n_blocks) for _, tokens in corpus.read_block(number)]
    for actual, expected in zip(all_tokens, texts, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert check_corpus(folder).samples == 40
    assert corpus.read_sample(30).source.startswith(f"some-1.tar{'' if kind == 'tar' else '.zst'}/sub/005.")
    assert "40" in describe_corpus(folder)
    rows = pack_dataset(corpus, causal, sequence_length=64, seed=1)
    with DataLoader(rows, global_batch=4, micro_batch=4) as loader:
        next(loader)
    with pytest.raises(UsageError, match="so it is indexed"):
        index_folder(folder, HASH)


@pytest.mark.parametrize("kind", ["tar", "frames", "one frame"])
def test_foreign_shards_are_written_again(tmp_path: Path, kind: str) -> None:
    texts = [tokens.astype(np.int64) for tokens in draw_documents()]
    folder = write_wds(tmp_path / "theirs", texts, kind)
    with pytest.raises(UsageError, match=r"int64 or has an unusual header.*megatfm data index .*theirs --to FOLDER"):
        index_folder(folder, HASH)
    assert not (folder / "manifest.json").exists()
    done = index_folder(folder, HASH, tmp_path / "ours")
    assert done.rewritten
    assert done.manifest.token_dtype == "uint16"
    corpus = Corpus.open(tmp_path / "ours")
    assert check_corpus(tmp_path / "ours").samples == 40
    for number, text in enumerate(texts):
        np.testing.assert_array_equal(corpus.read_sample(number).tokens, text)
    assert corpus.read_sample(27).source.endswith("/sub/002")


def test_one_frame_can_not_be_read_at_random(tmp_path: Path, small_frames: None) -> None:
    folder = write_wds(tmp_path / "theirs", draw_documents(80), "one frame")
    with pytest.raises(UsageError, match=r"some-0\.tar\.zst: it is one zstd frame, in which nothing can be found"):
        index_folder(folder, HASH)


def test_frames_that_cut_samples_are_named(tmp_path: Path) -> None:
    data = make_tar(*(make_member(f"{i}.npy", encode_npy(tokens)) for i, tokens in enumerate(draw_documents())))
    frames = [zstandard.compress(data[a : a + 5000]) for a in range(0, len(data), 5000)]
    (tmp_path / "a.tar.zst").write_bytes(b"".join(frames))
    with pytest.raises(UsageError, match=r"frame 0 is no tar by itself .*--to FOLDER"):
        index_folder(tmp_path, HASH)
    index_folder(tmp_path, HASH, tmp_path / "ours")
    assert check_corpus(tmp_path / "ours").samples == 40


@pytest.mark.parametrize(("shards", "reason"), [
    ([[make_tar(GOOD)[:-1024], bytes(1024), make_tar(GOOD)]], r"a-0\.tar\.zst: frame 1 is empty"),
    ([[make_tar(FOLDER)]], r"a-0\.tar\.zst: frame 0 holds no sample"),
    ([[make_tar(GOOD)], [make_tar(make_member("0.npy", encode_npy(np.arange(3, dtype="<u4"))))]],
     r"shards hold <u2 and <u4"),
])  # fmt: skip
def test_frames_that_no_index_can_describe_are_written_again(
    tmp_path: Path, shards: list[list[bytes]], reason: str
) -> None:
    for number, frames in enumerate(shards):
        (tmp_path / f"a-{number}.tar.zst").write_bytes(b"".join(map(zstandard.compress, frames)))
    with pytest.raises(UsageError, match=f"{reason}: write it again with .*--to FOLDER"):
        index_folder(tmp_path, HASH)


def test_a_flipped_bit_of_a_plain_tar_is_found_by_reading_and_by_checking(tmp_path: Path, small_frames: None) -> None:
    folder = write_wds(tmp_path / "theirs", draw_documents(), "tar")
    index_folder(folder, HASH)
    corpus = Corpus.open(folder)
    path = folder / "some-1.tar"
    flip_bit(path, int(corpus.indexes[1].offsets[1]) + 1000)
    bad = corpus.shard_blocks(1)[1]
    for read in (lambda: corpus.read_block(bad), lambda: check_corpus(folder)):
        assert_refused(read, "some-1.tar", "in frame 1 at byte", "damaged", "its hash is not the index's")
    corpus.read_block(bad - 1)


def assert_not_indexed(folder: Path, error: type[MegatfmError], message: str) -> None:
    """Neither where it lies nor as a corpus of its own."""
    for out in (None, folder.with_name("ours")):
        with pytest.raises(error, match=message):
            index_folder(folder, HASH, out)


def test_a_key_that_is_there_again_in_another_frame_is_refused(tmp_path: Path) -> None:
    frames = [make_tar(GOOD)[:-1024], make_tar(make_member("1.npy", IDS))[:-1024], make_tar(GOOD)]
    (tmp_path / "a.tar.zst").write_bytes(b"".join(map(zstandard.compress, frames)))
    assert_not_indexed(tmp_path, MegatfmError, r"a\.tar\.zst: sample '0' is there twice")


def test_later_reads_of_a_plain_tar_trust_the_first_and_checking_does_not(
    tmp_path: Path, small_frames: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_wds(tmp_path / "theirs", draw_documents(), "tar")
    index_folder(folder, HASH)
    corpus, hashed = Corpus.open(folder), list[int]()
    real = module.hash_frame
    monkeypatch.setattr("megatfm.corpus.corpus.hash_frame", lambda data: hashed.append(len(data)) or real(data))
    for _ in range(3):
        for block in range(corpus.n_blocks):
            corpus.read_block(block)
    assert len(hashed) == corpus.n_blocks
    corpus.read_block_samples(0)
    assert len(hashed) == corpus.n_blocks + 1
    Corpus.open(folder).read_block(0)
    assert len(hashed) == corpus.n_blocks + 2


def test_a_frame_of_a_plain_tar_has_one_size(tmp_path: Path, small_frames: None) -> None:
    """Frames of two sizes could place samples behind the end of what is read."""
    folder = write_wds(tmp_path / "theirs", draw_documents(), "tar")
    index_folder(folder, HASH)
    index = Corpus.open(folder).indexes.complete(0)
    frames = index.frames.copy()
    frames["uncompressed"][0] += 512
    data = ShardIndex(frames, index.samples, index.frame_hashes).encode()
    (folder / "some-0.index.zst").write_bytes(data)
    entry = {"file": "some-0.index.zst", "bytes": len(data), "blake3": blake3(data).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["shards"][0].update(index=entry))
    assert_refused(lambda: Corpus.open(folder), "some-0.index.zst", "two sizes")


HOSTILE = {
    "leads up": (make_tar(make_member("../up.npy", IDS)), "'../up.npy' at byte 0: its name leads out of the folder"),
    "absolute": (make_tar(GOOD, make_member("/etc/x.npy", IDS)), "'/etc/x.npy' at byte 1024: its name leads out"),
    "link": (make_tar(make_member("1.npy", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "is a link"),
    "hard link": (make_tar(GOOD, make_member("1.npy", type=tarfile.LNKTYPE, linkname="0.npy")), "is a link"),
    "device": (make_tar(make_member("1.npy", type=tarfile.CHRTYPE, devmajor=1, devminor=3)), "a device"),
    "fifo": (make_tar(make_member("1.npy", type=tarfile.FIFOTYPE)), "special file"),
    "absurd size": (make_tar(make_member("1.npy", IDS, size=2**40)), "claims 1099511627776 bytes"),
    "pickle": (make_tar(GOOD, make_member("0.pkl", pickle.dumps([1]))), "'0.pkl' at byte 1024: is a pickle"),
    "pickled array": (make_tar(make_member("0.npy", encode_npy(np.array([{}], object)))), "no array of token ids"),
    "twice": (make_tar(GOOD, make_member("0.json", b"{}"), GOOD), "'0.npy' at byte 2048 is there twice"),
    "twice apart": (make_tar(GOOD, make_member("1.npy", IDS), GOOD), "sample '0' is there twice"),
    "no tokens": (make_tar(GOOD, make_member("1.txt", b"text")), "sample '1' at byte 1024 has no .npy"),
    "floats": (make_tar(make_member("0.npy", encode_npy([1.5]))),
               "no array of token ids, which are integers [n]: \"{'descr': '<f8'"),
    "a matrix": (make_tar(make_member("0.npy", encode_npy([[1]]))),
                 "no array of token ids, which are integers [n]: \"{'descr': '<i8'"),
    "a short array": (make_tar(make_member("0.npy", IDS[:-2])), "its size is not what its header says"),
    "no array": (make_tar(make_member("0.npy", b"what?")), "no array of token ids"),
    "long header": (make_tar(make_member("0.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535)),
                    "no array of token ids"),
    "cut off": (make_tar(GOOD)[:600], "unexpected end of data"),
    "two tars": (make_tar(GOOD) + make_tar(make_member("1.npy", IDS)), "data follows its end"),
    "cut between": (make_tar(GOOD)[:1024], "is cut off: no mark of a tar's end"),
    "header cut": (make_tar(GOOD, GOOD)[:1200], "a.tar"),
    "no tar": (b"x" * 4000, "not a whole tar"),
    "a header that is no Python": (make_tar(make_member("0.npy", IDS[:30] + bytes(98) + IDS[128:])),
                               "no array of token ids"),
    "an odd integer": (make_tar(make_member("0.npy", IDS.replace(b"'<u2'", b"'<i24'"))), "no array of token ids"),
    "a sparse file, continued": (forge_header("0.npy", 0, tarfile.GNUTYPE_SPARSE, at_482=b"\1"), "a sparse file:"),
    "a sparse file of POSIX": (make_sparse_tar("0.npy", "1.0"), "a sparse file: '0.npy': write the tar again without"),
    "huge pax header": (forge_header("././@PaxHeader", 2**33, tarfile.XHDTYPE) + bytes(2048),
                        "a header of 8,589,934,592 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("to", [False, True])
def test_hostile_tars_are_refused_by_name(tmp_path: Path, case: str, to: bool) -> None:
    data, reason = HOSTILE[case]
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.tar").write_bytes(data)
    for words in (("a.tar",), ("a.tar.zst",)):
        if words[0] == "a.tar.zst":
            (folder / "a.tar").unlink()
            (folder / "a.tar.zst").write_bytes(zstandard.compress(data))
        with pytest.raises(MegatfmError) as caught:
            index_folder(folder, HASH, tmp_path / "ours" if to else None)
        message = str(caught.value)
        assert words[0] in message
        assert "\n" not in message
        if words[0] == "a.tar" or to:
            assert reason in message
        assert not (tmp_path / "ours/manifest.json").exists()
        assert sorted(p.name for p in folder.iterdir()) == [words[0]]


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve times as large as a frame may be, though small on disk."""
    for holder in (module, safe_tar):
        monkeypatch.setattr(holder, "MAX_FRAME_BYTES", 2**25)
    info = tarfile.TarInfo("0.npy")
    info.size = 2**30
    frame = zstandard.ZstdCompressor().compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(2**24))
    (tmp_path / "a.tar.zst").write_bytes(frame + zstandard.compress(bytes(12 * 2**25)))
    assert (tmp_path / "a.tar.zst").stat().st_size < 2**17
    tracemalloc.start()
    assert_not_indexed(tmp_path, MegatfmError, r"a\.tar\.zst")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 2**25


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_zstd_is_named(tmp_path: Path, damage: str) -> None:
    folder = write_wds(tmp_path / "theirs", draw_documents(), "frames")
    path = folder / "some-1.tar.zst"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[40] ^= 255
    path.write_bytes(data[: len(data) - 7 if damage == "cut" else None])
    assert_not_indexed(folder, MegatfmError, r"some-1\.tar\.zst: .*(damaged|no whole tar|cut off|not a whole tar)")


def test_links_to_shards_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.tar").write_bytes(make_tar(GOOD))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.tar").symlink_to(tmp_path / "elsewhere.tar")
    with pytest.raises(MegatfmError, match=r"a\.tar: is a link"):
        index_folder(folder, HASH)
    (folder / "a.tar").unlink()
    os.mkfifo(folder / "a.tar")
    with pytest.raises(MegatfmError, match=r"a\.tar: is a link or a special file"):
        index_folder(folder, HASH)


def test_folders_without_shards(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        index_folder(tmp_path / "none", HASH)
    with pytest.raises(UsageError, match=r"has no shards .*`megatfm prep` reads"):
        index_folder(tmp_path, HASH)


def test_index_command_writes_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("megatfm.tokenizers.load", lambda path: SimpleNamespace(hash=HASH, path=path))
    folder = write_wds(tmp_path / "theirs", draw_documents(), "tar")
    parser = argparse.ArgumentParser()
    command.add_data_arguments(parser)
    assert command.data_command(parser.parse_args(["index", str(folder), "--tokenizer", "x"])) == 0
    assert "40 samples" in capsys.readouterr().out
    assert command.data_command(parser.parse_args(["check", str(folder)])) == 0
    assert Corpus.open(folder).tokenizer_hash == HASH


@pytest.mark.parametrize("packed", [False, True])
def test_the_tokens_are_the_array_of_that_name(tmp_path: Path, packed: bool) -> None:
    """However many arrays lie before or after it, floats and masks among them; which one it is, is not guessed."""
    mask, floats, ones = encode_npy(np.ones(3, np.uint8)), encode_npy([0.5]), encode_npy(np.ones(5, np.uint16))
    samples = [
        [make_member("0.loss_mask.npy", mask), make_member("0.tokens.npy", IDS),
         make_member("0.tokens.weights.npy", floats)],
        [make_member("1.a.npy", ones), make_member("1.TOKENS.npy", IDS), make_member("1.json", b"{}")],
        [make_member("2.ids.npy", IDS), make_member("2.txt", b"one array alone may have any name")],
        [make_member("3.npy", IDS)],
    ]  # fmt: skip
    data = make_tar(*(item for sample in samples for item in sample))
    (tmp_path / ("a.tar.zst" if packed else "a.tar")).write_bytes(zstandard.compress(data) if packed else data)
    index_folder(tmp_path, HASH)
    in_place = [tokens.tolist() for _, tokens in Corpus.open(tmp_path).read_block(0)]
    assert check_corpus(tmp_path).samples == 4
    (tmp_path / "manifest.json").unlink()
    index_folder(tmp_path, HASH, tmp_path / "ours")
    rewritten = [tokens.tolist() for _, tokens in Corpus.open(tmp_path / "ours").read_block(0)]
    assert in_place == rewritten == [[0, 1, 2, 3, 4]] * 4


@pytest.mark.parametrize("names", [("mask.npy", "ids.npy"), ("npy", "mask.npy"), ("tokens.npy", "TOKENS.npy")])
def test_arrays_of_which_any_could_be_the_tokens_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "a.tar").write_bytes(make_tar(GOOD, *(make_member(f"1.{name}", IDS) for name in names)))
    assert_not_indexed(tmp_path, UsageError, r"a\.tar: sample '1' at byte 1024 has several arrays \(.*KEY\.tokens")


def test_shards_that_would_share_an_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make_tar(GOOD))
    (tmp_path / "a.tar.zst").write_bytes(zstandard.compress(make_tar(GOOD)))
    assert_not_indexed(tmp_path, UsageError, r"a\.tar\.zst: a\.tar lies beside it.*rename one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.zst"]


def test_a_sample_larger_than_a_frame_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member is smaller, but all files together are larger: sizes in an index have 32 bits."""
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 10_000)
    large = [make_member(f"1.{end}", bytes(6000)) for end in ("jpg", "png")]
    (tmp_path / "a.tar").write_bytes(make_tar(GOOD, make_member("1.npy", IDS), *large))
    message = r"a\.tar: sample '1', its files and other members after it take over 10000 bytes.*--to"
    with pytest.raises(UsageError, match=message):
        index_folder(tmp_path, HASH)
    index_folder(tmp_path, HASH, tmp_path / "ours")
    assert check_corpus(tmp_path / "ours").samples == 2


def test_frames_of_another_size_are_another_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are the same bytes, but the order of their rows is another."""
    folder, actual = write_wds(tmp_path / "theirs", draw_documents(), "tar"), []
    for size in (2**18, 4000):
        monkeypatch.setattr(module, "FRAME_BYTES", size)
        actual.append(index_folder(folder, HASH).manifest)
        (folder / "manifest.json").unlink()
    assert [one.shards[0].blake3 for one in actual] == [actual[0].shards[0].blake3] * 2
    assert actual[0].fingerprint != actual[1].fingerprint
    assert "frame_bytes" not in actual[0].model_dump()["shards"][0], "as those that were indexed before"
