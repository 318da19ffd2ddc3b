"""Damage and malice are named, in one line, before they do harm."""

import contextlib
import errno
import functools
import json
import os
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus
from megatfm.corpus.manifest import MANIFEST
from megatfm.corpus.shard_format import decode_packed_documents, decode_sample
from megatfm.corpus.shard_index import MAX_FRAME_BYTES
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import MegatfmError
from tests.support.files import flip_bit
from tests.support.packed_corpora import (
    INDEX,
    SHARD,
    Change,
    Json,
    assert_refused,
    edit_index,
    edit_index_bytes,
    edit_manifest,
    replace_index,
    replace_shard,
)
from tests.support.webdatasets import encode_npy, make_member, make_tar

Write = Callable[..., Path]


def test_too_many_open_files_are_no_damage(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(MegatfmError) as refused:
            Corpus.open(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in str(refused.value)
    assert "delete" not in str(refused.value)


@pytest.mark.parametrize(("number", "advice"), [
    (errno.EIO, "try again later"), (errno.EACCES, "the right to read"), (errno.ENXIO, "restore it"),
])  # fmt: skip
def test_read_errors_come_with_advice(folder: Path, number: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    corpus = Corpus.open(folder)
    monkeypatch.setattr(os, "pread", fail)
    assert_refused(lambda: corpus.read_block(0), f"cannot be read at byte 0 ({os.strerror(number)})", advice)


@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_missing_cut_and_linked_files_are_named_at_opening(folder: Path, tmp_path: Path, name: str) -> None:
    path, elsewhere = folder / name, tmp_path / "elsewhere"
    data = path.read_bytes()
    elsewhere.write_bytes(data)
    for damage, reason in (
        (lambda: path.write_bytes(data[:-1]), f"has {len(data) - 1} bytes, its manifest says {len(data)}"),
        (lambda: path.write_bytes(data + b"x"), f"has {len(data) + 1} bytes"),
        (lambda: None, "No such file"),
        (lambda: os.mkfifo(path), "special file"),
        (lambda: path.symlink_to(elsewhere), "is a link"),
        (lambda: path.mkdir(), "special file"),
    ):
        path.unlink(missing_ok=True)
        damage()
        assert_refused(lambda: Corpus.open(folder), name, reason, "restore it")


def test_a_shard_that_is_cut_or_becomes_a_link_after_opening_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    path = corpus.folder / SHARD
    shutil.copy(path, tmp_path / "elsewhere")
    path.write_bytes(path.read_bytes()[:1000])
    assert_refused(lambda: corpus.read_block(corpus.shard_blocks(1)[-1]), SHARD, "ends at byte")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert_refused(lambda: corpus.read_block(corpus.shard_blocks(1)[0]), SHARD, "Too many levels of symbolic links")


def test_packed_frames_are_checked_against_the_index(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, sources, lengths, bytes and places are changed in a frame whose checksum is right."""
    corpus = Corpus.open(packed)
    block = corpus.shard_blocks(1)[0]
    frame, first = zstandard.decompress(corpus.read_frame(block)), int(corpus.blocks[block])
    for old, new, reason in (
        (b'"keys": ["%06d"' % first, b'"keys": ["%06d"' % 999_999, "other keys or numbers of tokens"),
        (b'"sources": ["', b'"sources":  "', "is not readable"),
        (b'"sources": ["f', b'"sources": [1,', "is not readable"),
        (b'"bytes": [', b'"bytes": [1', "other numbers of bytes"),
        (b"\x93NUMPY", b"\x93NUMPX", "no array of"),
        (b"%06d.meta.json" % first, b"%06d.meta.jsom" % first, "no tar header"),
    ):
        assert frame.count(old) == 1
        start = frame.index(old)
        changed = frame[:start] + new + frame[start + len(new) :]
        stored = zstandard.ZstdCompressor(write_checksum=True).compress(changed)
        monkeypatch.setattr(Corpus, "read_frame", lambda *_, stored=stored: stored)
        samples = f"samples {first} to {corpus.blocks[block + 1] - 1}"
        assert_refused(lambda: corpus.read_block_samples(block), SHARD, samples, reason)


OF_ONE = {"source": "x", "bytes": 9, "members": ["jpg"]}
OF_TWO = {"sources": ["x", "y"], "bytes": [9, 9], "keys": ["a", "b"], "tokens": [1, 2]}


@pytest.mark.parametrize(("meta", "changes", "reason"), [
    (OF_ONE, {}, ""),
    (OF_ONE, {"bytes": "9"}, "lacks a source or a number of bytes"),
    (OF_ONE, {"source": None}, "lacks a source or a number of bytes"),
    (OF_ONE, {"fields": 7}, "has fields that are no table"),
    (OF_ONE, {"members": 7}, "names members that can't be"),
    (OF_ONE, {"members": ["../jpg"]}, "names members that can't be"),
    (OF_ONE, {"members": ["png"]}, "lies 'a.jpg', not the file 'a.png'"),
    (OF_ONE, {"members": ["jpg", "jpg"]}, "names a member twice"),
    (OF_ONE, {"members": ["jpg", "jpg", "png"]}, r"its \.png ends outside its frame"),
    (OF_ONE, b"[1]", "is not readable"),
    (OF_TWO, {}, ""),
    (OF_TWO, {"tokens": [2, 1]}, "other keys or numbers of tokens"),
    (OF_TWO, {"bytes": [9]}, "lacks sources or numbers of bytes"),
    (OF_TWO, {"bytes": [9, "9"]}, "lacks a source or a number of bytes"),
    (OF_TWO, {"fields": [{}, 7]}, "has fields that are no table"),
    (OF_TWO, {"sources": 7}, "is not readable"),
    (OF_TWO, b"[" * 100_000, "is not readable"),
])  # fmt: skip
def test_metadata_that_can_not_be_are_named(meta: Json, changes: Json | bytes, reason: str) -> None:
    content = changes if isinstance(changes, bytes) else json.dumps(meta | changes).encode()
    array = encode_npy(np.arange(3, dtype="<u2"))
    files = {"a.tokens.npy": array, "a.meta.json": content, "a.jpg": b"1"}
    members = [make_member(name, data) for name, data in files.items()]
    frame = make_tar(*members, make_member("a.jpg", b"2"), make_member("a.png", size=1025))
    with pytest.raises(MegatfmError, match=reason) if reason else contextlib.nullcontext():
        if meta is OF_ONE:
            decode_sample(frame, 0, "a", 3, np.dtype("<u2"))
        else:
            decode_packed_documents(frame, ["a", "b"], [1, 2], np.dtype("<u2"))


def test_a_flipped_bit_is_named_with_frame_and_offset(corpus: Corpus) -> None:
    path, index = corpus.folder / SHARD, corpus.indexes[1]
    frame, offset = 2, int(index.offsets[2])
    flip_bit(path, offset + 100)
    bad = corpus.shard_blocks(1)[frame]
    samples = f"samples {corpus.blocks[bad]} to {corpus.blocks[bad + 1] - 1}"
    for read in (
        lambda: corpus.read_block(bad),
        lambda: corpus.read_sample(int(corpus.blocks[bad])),
        lambda: check_corpus(path.parent),
    ):
        assert_refused(read, SHARD, f"{samples} in frame 2 at byte {offset}: damaged", "restore it")
    corpus.read_block(bad - 1)
    corpus.read_block(bad + 1)


def test_the_check_hashes_bytes_outside_of_frames(folder: Path) -> None:
    edit_manifest(folder, lambda m: m["shards"][1].update(blake3="0" * 64))
    Corpus.open(folder)
    assert_refused(lambda: check_corpus(folder), SHARD, "BLAKE3")


@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_no_flipped_bit_passes_the_check(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    for where in np.random.default_rng(0).integers(0, 8 * len(data), 60):
        flipped = bytearray(data)
        flipped[where // 8] ^= 1 << where % 8
        path.write_bytes(flipped)
        assert_refused(lambda: check_corpus(folder), name)
    path.write_bytes(data)
    check_corpus(folder)


def test_frames_of_another_shard_are_noticed(folder: Path) -> None:
    """Each frame has a right checksum, but is not the one that the index describes."""
    corpus = Corpus.open(folder)
    start, end = corpus.indexes[1].offsets[1:3]
    frame = corpus.read_frame(corpus.shard_blocks(0)[1])
    data = (folder / SHARD).read_bytes()
    replace_shard(folder, data[:start] + frame + data[end:])
    bad = corpus.shard_blocks(1)[1]
    length = put("frames.compressed", {1: len(frame)})
    size = put("frames.uncompressed", {1: corpus.indexes[0].frames["uncompressed"][1]})
    for changes, reason in (([length], "the index says"), ([length, size], "no array")):
        replace_index(folder, edit_index_bytes(corpus.indexes.complete(1), *changes))
        assert_refused(lambda: Corpus.open(folder).read_block(bad), SHARD, "frame 1", reason)


def put(column: str, values: Mapping[int, Any], *, adds: bool = False) -> Change:
    """A change of an index: puts values into rows of a column such as `samples.offset`, or adds them."""
    table, _, field = column.partition(".")

    def change(frames: np.ndarray, samples: np.ndarray) -> None:
        array = {"frames": frames, "samples": samples}[table][field]
        for row, value in values.items():
            array[row] = int(array[row]) + value if adds else value

    return change


add = functools.partial(put, adds=True)


def merge_frames(frames: np.ndarray, samples: np.ndarray) -> None:
    frames["samples"][1] += frames["samples"][2]
    frames["samples"][2] = 0


IMPOSSIBLE = {
    "a sample outside": put("samples.offset", {3: 2**31}),
    "a sample before all": put("samples.offset", {0: 5}),
    "an odd offset": add("samples.offset", {3: 1}),
    "an absurd frame": put("frames.uncompressed", {1: MAX_FRAME_BYTES + 1}),
    "too small a frame": put("frames.uncompressed", {1: 4}),
    "an empty frame": merge_frames,
    "fewer samples": add("frames.samples", {2: -1}),
}
DISAGREEING = {
    "a moved sample": add("samples.offset", {3: 2}),
    "longer and shorter samples": add("samples.tokens", {3: 1, 4: -1}),
    "other text bytes": add("samples.text_bytes", {3: 1, 4: -1}),
    "a longer and a shorter frame": add("frames.compressed", {1: 1, 2: -1}),
    "regrouped samples": add("frames.samples", {1: 1, 2: -1}),
    "another key": put("samples.key", {3: b"../../"}),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_index_that_cannot_be_true_is_named_at_opening(folder: Path, change: Change) -> None:
    edit_index(folder, change)
    assert_refused(lambda: Corpus.open(folder), INDEX)


@pytest.mark.parametrize("change", DISAGREEING.values(), ids=DISAGREEING)
def test_an_index_that_disagrees_with_its_shard_is_named(folder: Path, change: Change) -> None:
    edit_index(folder, change)
    assert_refused(lambda: check_corpus(folder), SHARD)


def test_an_index_that_gives_one_sample_twice_is_named(write: Write) -> None:
    folder = write([np.full(100, i, np.uint16) for i in range(300)])
    edit_index(folder, lambda _, samples: samples["offset"].__setitem__(1, samples["offset"][0]))
    second = len(Corpus.open(folder).indexes[0].samples) + 1
    assert_refused(lambda: check_corpus(folder), SHARD, f"sample {second} in frame 0", "should start at byte 2048")


def test_a_key_that_is_there_twice_is_named(tmp_path: Path) -> None:
    """In tar and index alike, so that each sample is what the index says."""
    with ShardWriter(tmp_path, tokenizer_hash="t", token_dtype="uint16", shard_bytes=5000, pack=False) as writer:
        for key in ("ab", "ba", "cd", "dc"):  # two in each shard
            writer.add(key, np.arange(5, dtype=np.uint16), "", 0)
        writer.finish({})
    index = Corpus.open(tmp_path).indexes.complete(1)
    content = zstandard.decompress((tmp_path / SHARD).read_bytes())
    data = zstandard.compress(content.replace(b"dc.", b"cd."))  # the sums of headers stay right
    replace_shard(tmp_path, data)
    changes = put("samples.key", {1: b"cd"}), put("frames.compressed", {0: len(data)})
    replace_index(tmp_path, edit_index_bytes(index, *changes))
    assert_refused(lambda: check_corpus(tmp_path), SHARD, "sample 'cd' is there twice")


def test_another_index_than_the_manifests_is_named(folder: Path) -> None:
    edit_index(folder, lambda frames, samples: None)
    Corpus.open(folder)
    edit_manifest(folder, lambda m: m["shards"][1]["index"].update(blake3="0" * 64))
    assert_refused(lambda: Corpus.open(folder), INDEX, "BLAKE3")


def test_an_index_with_more_than_it_says_is_named_and_one_with_far_more_is_not_unpacked(folder: Path) -> None:
    content = zstandard.decompress((folder / INDEX).read_bytes())
    for longer, reason in ((content + b"more", "longer"), (bytes(10**8), "absurd")):
        replace_index(folder, zstandard.compress(longer))
        assert_refused(lambda: Corpus.open(folder), INDEX, reason)


def test_a_frame_with_more_than_the_index_says_is_named(folder: Path) -> None:
    corpus = Corpus.open(folder)
    data, index = (folder / SHARD).read_bytes(), corpus.indexes.complete(1)
    plain = zstandard.decompress(data[: index.offsets[1]]) + b"more".ljust(512, b"\0")
    frame = zstandard.compress(plain)
    replace_shard(folder, frame + data[index.offsets[1] :])
    changes = put("frames.compressed", {0: len(frame)}), put("frames.uncompressed", {0: len(plain)})
    replace_index(folder, edit_index_bytes(index, *changes))
    assert_refused(lambda: check_corpus(folder), SHARD, "frame 0", "unknown data")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]\n", b'{"schema_version": 2}\n', b"[" * 100_000, b"\xff\n"])
def test_an_index_that_is_none_is_named(folder: Path, content: bytes) -> None:
    replace_index(folder, zstandard.compress(content))
    assert_refused(lambda: Corpus.open(folder), INDEX)
    replace_index(folder, content)
    assert_refused(lambda: Corpus.open(folder), INDEX)


@pytest.mark.parametrize("counts", [
    {"frames": 10**15}, {"frames": 1e999}, {"frames": None}, {"samples": 10**15}, {"samples": -7},
    {"key_width": 10**12}, {"key_width": 0},
])  # fmt: skip
def test_absurd_counts_in_an_index_are_named(folder: Path, counts: Json) -> None:
    content = zstandard.decompress((folder / INDEX).read_bytes())
    line, _, arrays = content.partition(b"\n")
    replace_index(folder, zstandard.compress(json.dumps(json.loads(line) | counts).encode() + b"\n" + arrays))
    assert_refused(lambda: Corpus.open(folder), INDEX)


@pytest.mark.parametrize(("change", "word"), [
    (lambda m: m["shards"][1].update(file="../shard-000001.tar.zst"), "shards.1.file"),
    (lambda m: m["shards"][1].update(file="/etc/passwd"), "shards.1.file"),
    (lambda m: m["shards"][1].update(file="shard-000001.tar.zst\n"), "shards.1.file"),
    (lambda m: m["shards"][1].update(file="pipe:rm"), "shards.1.file"),
    (lambda m: m["shards"][1]["index"].update(file="../shard-000001.index.zst"), "shards.1.index.file"),
    (lambda m: m["shards"][1].update(file=m["shards"][0]["file"]), "listed twice"),
    (lambda m: m["shards"][1].update(bytes=10**15), "its manifest says 1000000000000000"),
    (lambda m: m["shards"][1].update(bytes=10**30), "shards.1.bytes"),
    (lambda m: m["shards"][1].update(bytes=-1), "shards.1.bytes"),
    (lambda m: m["shards"][1].update(samples=10**15), "samples can't lie"),
    (lambda m: m["shards"][1].update(samples=0, tokens=0, text_bytes=0), "shards.1.samples"),
    *((lambda m, samples=samples: m["shards"][1].update(samples=samples), "shard") for samples in (0, 3, 10**6)),
    (lambda m: m["shards"][1].update(tokens=1), "disagrees with the manifest"),
    (lambda m: m["shards"][1].update(text_bytes=1), "disagrees with the manifest"),
    (lambda m: m["shards"][1].update(blake3="x"), "shards.1.blake3"),
    (lambda m: m.update(schema_version=2), "schema_version 2, and this megatfm reads 1: update it"),
    (lambda m: m.update(schema_version="2"), "schema_version: Input should be 1"),
    (lambda m: m.update(token_dtype="object"), "token_dtype"),
    (lambda m: m.update(unknown=1), "unknown"),
    (lambda m: m.update(shards=[]), "shards"),
    (lambda m: m.pop("tokenizer_hash"), "tokenizer_hash"),
    (lambda m: m.clear(), "token_dtype"),
])  # fmt: skip
def test_hostile_manifests_are_named(folder: Path, change: Callable[[Json], object], word: str) -> None:
    edit_manifest(folder, change)
    assert_refused(lambda: Corpus.open(folder), word)


@pytest.mark.parametrize("content", [b"", b"not json", b"\xff\xfe", b"[" * 100_000, b"null", b"[]"])
def test_manifests_that_are_none_are_named(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    assert_refused(lambda: Corpus.open(folder), "manifest.json")


def test_a_manifest_that_is_no_plain_file_is_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "manifest.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert_refused(lambda: Corpus.open(folder), "manifest.json", "is a link")
    path.unlink()
    os.mkfifo(path)
    assert_refused(lambda: Corpus.open(folder), "manifest.json", "special file")


def test_a_hostile_corpus_opens_nothing_outside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_manifest(folder, lambda m: m["shards"][1].update(file="../corpus/shard-000001.tar.zst"))
    opened, os_open = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **kw: opened.append(path) or os_open(path, *args, **kw))
    assert_refused(lambda: Corpus.open(folder), "shards.1.file")
    assert opened == [folder / "manifest.json"]


@pytest.mark.parametrize("names", [7, "cats", {"cat": 0}, [1, 2], None])
def test_class_names_that_are_no_list_of_names_are_refused(folder: Path, names: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["provenance"]["classes"] = names
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(MegatfmError, match=r"manifest\.json.*provenance\.classes is no list of names"):
        Corpus.open(folder)
