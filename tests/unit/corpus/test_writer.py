"""Shards are plain WebDataset tars in plain zstd, reproducible, and appear as a whole or not at all."""

import io
import json
import resource
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from webdataset.gopen import gopen_schemes

from megatfm.corpus import files
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus
from megatfm.corpus.shard_format import _make_header
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import MegatfmError, UsageError

Write = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of another user")
    (tmp_path / ".a.bin.partial").symlink_to("other")
    with pytest.raises(MegatfmError, match=r"can't write .*a\.bin: .*symbolic link"):
        files.write_whole(tmp_path / "a.bin", b"new")
    assert (tmp_path / "other").read_text() == "of another user"


def test_a_corpus_has_several_shards_of_several_frames(corpus: Corpus) -> None:
    """The other tests of this corpus depend on it."""
    assert len(corpus.indexes) > 2
    assert all(len(index.frames) > 3 for index in list(corpus.indexes)[:-1])
    assert (corpus.lengths() == 0).any()


def test_webdataset_reads_the_same_samples(folder: Path, make_documents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_framed(url: str, *_: Any) -> Any:
        raw = Path(url.removeprefix("framed:")).read_bytes()
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
            return io.BytesIO(stream.read())

    monkeypatch.setitem(gopen_schemes, "framed", open_framed)
    urls = [f"framed:{path}" for path in sorted(folder.glob("*.tar.zst"))]
    read = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    expected = make_documents(100)
    assert [sample["__key__"] for sample in read] == [f"{i:06d}" for i in range(100)]
    for i, (sample, tokens) in enumerate(zip(read, expected, strict=True)):
        np.testing.assert_array_equal(sample["tokens.npy"], tokens)
        assert sample["tokens.npy"].dtype == tokens.dtype
        assert sample["meta.json"] == {"source": f"folder/file {i} ä.txt", "bytes": 3 * len(tokens)}


@pytest.mark.parametrize("compress", [True, False], ids=["zst", "tar"])
def test_many_documents_of_a_member_are_read_by_webdataset_and_by_us(
    packed: Path, write: Write, make_documents: Any, compress: bool, tmp_path: Path
) -> None:
    """By its own opener, with the documented lines that tell the documents apart."""
    folder, expected = packed, make_documents(100)
    if not compress:
        options = {"pack": True, "shard_bytes": 20_000, "frame_bytes": 4000}
        folder = write(expected, "plain", compress=False, **options)
    program = "zstd -dcq" if compress else "cat"
    if not shutil.which("zstd"):
        pytest.skip("there is no zstd program")
    urls = [f"pipe:{program} {path}" for path in sorted(folder.glob("shard-*.tar*"))]
    actual = []
    for sample in webdataset.WebDataset(urls, shardshuffle=False).decode():
        meta, tokens = sample["meta.json"], sample["tokens.npy"]
        if "keys" in meta:
            parts = np.split(tokens, np.cumsum(meta["tokens"])[:-1])
            actual += zip(meta["keys"], meta["sources"], meta["bytes"], parts, strict=True)
        else:
            actual.append((sample["__key__"], meta["source"], meta["bytes"], tokens))
    for i, (key, source, text_bytes, tokens) in enumerate(actual):
        assert (key, source, text_bytes) == (f"{i:06d}", f"folder/file {i} ä.txt", 3 * len(tokens))
        np.testing.assert_array_equal(tokens, expected[i])
    corpus = Corpus.open(folder)
    assert len(actual) == corpus.n_samples == 100
    assert len(corpus.indexes) > 1
    assert all(len(index.frames) > 2 for index in list(corpus.indexes)[:-1])
    assert corpus.n_blocks < 15, "many documents a frame"
    for block in range(corpus.n_blocks):
        for sample, (number, tokens) in zip(corpus.read_block_samples(block), corpus.read_block(block), strict=True):
            assert (sample.index, sample.key, sample.source) == (number, *actual[number][:2])
            np.testing.assert_array_equal(sample.tokens, expected[number])
            np.testing.assert_array_equal(tokens, expected[number])
    check_corpus(folder)


def test_documents_with_and_without_files_have_separate_frames(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "c", tokenizer_hash="t", token_dtype="uint16") as writer:
        for i in range(12):
            files = {"cls": b"%d" % i} if 4 <= i < 7 else {}
            writer.add(f"k{i}", np.full(i, i, np.uint16), f"s{i}", i, files)
        writer.finish({})
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.blocks.tolist() == [0, 4, 7, 12]
    actual = [sample for block in range(3) for sample in corpus.read_block_samples(block)]
    assert [(sample.key, sample.source, len(sample.tokens), dict(sample.members)) for sample in actual] == [
        (f"k{i}", f"s{i}", i, {"cls": b"%d" % i} if 4 <= i < 7 else {}) for i in range(12)
    ]
    check_corpus(tmp_path / "c")


@given(name=st.text("abcXYZ0189-_.", min_size=1, max_size=100), size=st.integers(0, 2**33 - 1))
def test_headers_are_those_of_tarfile(name: str, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    assert _make_header(name.encode(), size) == member.tobuf(tarfile.USTAR_FORMAT)


def test_tar_reads_the_same_samples(folder: Path, make_documents: Any, tmp_path: Path) -> None:
    probe = subprocess.run(["tar", "--zstd", "-cf", "/dev/null", "-C", tmp_path, "corpus"], capture_output=True)
    if probe.returncode:
        pytest.skip("tar cannot read zstd here: install GNU tar ≥ 1.31 and zstd")
    names = []
    for path in sorted(folder.glob("*.tar.zst")):
        command = ["tar", "--zstd", "-xvf", path, "-C", tmp_path]
        completed = subprocess.run(command, capture_output=True, text=True, check=True)
        assert completed.stderr == ""
        names += completed.stdout.split()
    assert names == [f"{i:06d}.{part}" for i in range(100) for part in ("tokens.npy", "meta.json")]
    for i, tokens in enumerate(make_documents(100)):
        np.testing.assert_array_equal(np.load(tmp_path / f"{i:06d}.tokens.npy"), tokens)


def test_frames_are_independent_and_cut_between_samples(corpus: Corpus) -> None:
    for number in range(corpus.n_blocks):
        data = zstandard.ZstdDecompressor().decompress(corpus.read_frame(number))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            assert len(tar.getnames()) == 2 * (corpus.blocks[number + 1] - corpus.blocks[number])
        assert len(data) <= 8_000 + 1024


def test_the_same_samples_give_the_same_bytes(write: Write, make_documents: Any) -> None:
    first, second = (contents(write(make_documents(100), name)) for name in ("one", "two"))
    assert first == second


@pytest.mark.parametrize(("pack", "pinned"), [
    (False, "514c22775e613c511a5c9124290c1133d1d19a1a4511ab624f56b23191c913b8"),
    (True, "614469c0d150a2fbf133dfca4a57bbfc3feb3b917af1a16eef1d4cc7d4fad294"),
])  # fmt: skip
def test_the_tar_is_pinned(write: Write, pack: bool, pinned: str) -> None:
    """Another release must not change the hash of a corpus (the compressed bytes may change with zstd)."""
    folder = write([np.arange(n, dtype=np.uint16) for n in (0, 1, 70, 700)], pack=pack)
    data = zstandard.ZstdDecompressor().decompress((folder / "shard-000000.tar.zst").read_bytes())
    assert blake3(data).hexdigest() == pinned


def test_wide_tokens_survive(write: Write) -> None:
    tokens = np.array([0, 2**16, 2**32 - 1])
    corpus = Corpus.open(write([tokens], token_dtype="uint32"))
    np.testing.assert_array_equal(corpus.read_sample(0).tokens, tokens)
    assert corpus.read_sample(0).tokens.dtype == np.uint32


def test_a_large_sample_gets_its_own_frame(write: Write) -> None:
    sizes = [10, 50_000, 10, 10]
    corpus = Corpus.open(write([np.ones(n, np.uint16) for n in sizes], shard_bytes=2**20))
    assert corpus.blocks.tolist() == [0, 1, 2, 4]
    assert [len(tokens) for i in range(3) for _, tokens in corpus.read_block(i)] == sizes


@pytest.mark.parametrize(("key", "tokens", "reason"), [
    ("../key", np.ones(1, np.uint16), "sample key"),
    ("a.b", np.ones(1, np.uint16), "sample key"),
    ("", np.ones(1, np.uint16), "sample key"),
    ("k" * 81, np.ones(1, np.uint16), "sample key"),
    ("used", np.ones(1, np.uint16), "used twice"),
    ("key", np.array([1, 65_536]), "65536 does not fit uint16"),
    ("key", np.array([-1, 5]), "-1 does not fit uint16"),
    ("key", np.ones(3), "float64[3], not integers"),
    ("key", np.ones((2, 2), np.uint16), "uint16[2, 2], not integers"),
    ("large", np.ones(5_000, np.uint16), "cut its text"),
])  # fmt: skip
def test_unfit_samples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, tokens: np.ndarray, reason: str
) -> None:
    monkeypatch.setattr("megatfm.corpus.writer.MAX_FRAME_BYTES", 10_000)
    with ShardWriter(tmp_path, tokenizer_hash="t", token_dtype="uint16") as writer:
        writer.add("used", np.ones(3_000, np.uint16), "source", 1)
        with pytest.raises(MegatfmError, match="sample") as caught:
            writer.add(key, tokens, "source", 1)
        assert reason in str(caught.value)


def test_no_corpus_without_documents(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no document was added"):
        ShardWriter(tmp_path, tokenizer_hash="t", token_dtype="uint16").finish({})
    assert not list(tmp_path.iterdir())


def test_a_finished_corpus_is_not_written_over(folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(UsageError, match="already holds a corpus"):
        ShardWriter(folder, tokenizer_hash="t", token_dtype="uint16")
    assert contents(folder) == before


def test_leaving_the_block_unfinished_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, tokenizer_hash="t", token_dtype="uint16") as writer:
        writer.add("key", np.ones(10, np.uint16), "source", 1)
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


class PowerLoss(BaseException):
    """Ends a run where it is, past every `except Exception`."""


def interrupted_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, texts: list[np.ndarray]) -> Iterator[int]:
    """Run again and again, each ended at a later rename, until one comes through; yields after each."""
    sync = files.fsync_directory
    for lives in range(100):
        calls = iter(range(lives))

        def dying(folder: Path, calls: Iterator[int] = calls) -> None:
            sync(folder)
            if next(calls, None) is None:
                raise PowerLoss

        monkeypatch.setattr(files, "fsync_directory", dying)
        writer = ShardWriter(
            folder, tokenizer_hash="a" * 64, token_dtype="uint16", shard_bytes=60_000, frame_bytes=8_000, pack=False,
        )  # fmt: skip
        try:
            for i, tokens in enumerate(texts):
                writer.add(f"{i:06d}", tokens, f"folder/file {i} ä.txt", 3 * len(tokens))
            writer.finish({"made by": "a test"})
        except PowerLoss:
            yield lives
            if (folder / "manifest.json").exists():
                return


def test_an_interrupted_run_is_no_corpus_and_the_next_one_is_clean(
    folder: Path, tmp_path: Path, make_documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "notes.txt").write_text("not ours")
    (torn / "shard-000099.tar.zst").write_text("of an earlier, longer run")
    (torn / ".shard-000098.index.zst.partial").write_text("of an earlier, longer run")
    runs = 0
    for _ in interrupted_runs(torn, monkeypatch, make_documents(100)):
        runs += 1
        if not (torn / "manifest.json").exists():
            with pytest.raises(UsageError, match="interrupted"):
                Corpus.open(torn)
    assert runs > 6
    assert contents(torn) == contents(folder) | {"notes.txt": b"not ours"}


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "corpus", tokenizer_hash="t", token_dtype="uint16", frame_bytes=8_000)
    texts = np.random.default_rng(0).integers(0, 65_536, (100, 1000))

    def write() -> None:
        for i, tokens in enumerate(texts):
            writer.add(f"{i}", tokens, "source", 1)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(MegatfmError, match=r"shard-000000\.tar\.zst: File too large"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "corpus").iterdir())


def test_the_manifest_says_what_is_there(folder: Path, make_documents: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    assert manifest["provenance"] == {"made by": "a test"}
    assert sum(shard["samples"] for shard in manifest["shards"]) == 100
    assert sum(shard["tokens"] for shard in manifest["shards"]) == sum(map(len, make_documents(100)))
    for shard in manifest["shards"]:
        for entry in (shard, shard["index"]):
            data = (folder / entry["file"]).read_bytes()
            assert (entry["bytes"], entry["blake3"]) == (len(data), blake3(data).hexdigest())
