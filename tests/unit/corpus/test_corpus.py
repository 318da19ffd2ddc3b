"""A corpus gives back what was written, and is refused in one line when it is damaged."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus, describe_corpus
from megatfm.corpus.shard_format import BadFrameError, decompress_frame, decompress_frames
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import UsageError
from tests.support.packed_corpora import assert_refused
from tests.support.webdatasets import ARGUMENTS, CorpusFuzzer, run_examples

Write = Callable[..., Path]


def test_samples_come_back_by_block_and_by_number(corpus: Corpus, make_documents: Any) -> None:
    texts = make_documents(100)
    read = [pair for number in range(corpus.n_blocks) for pair in corpus.read_block(number)]
    assert [number for number, _ in read] == list(range(100))
    for (_, tokens), text in zip(read, texts, strict=True):
        np.testing.assert_array_equal(tokens, text)
        assert not tokens.flags.writeable
    for number in (0, 17, 99, 50):
        sample = corpus.read_sample(number)
        np.testing.assert_array_equal(sample.tokens, texts[number])
        assert (sample.index, sample.key) == (number, f"{number:06d}")
        assert sample.source == f"folder/file {number} ä.txt"
        assert sample.text_bytes == 3 * len(texts[number])


def test_facts_are_those_of_the_documents(corpus: Corpus, make_documents: Any) -> None:
    lengths = [len(tokens) for tokens in make_documents(100)]
    assert corpus.lengths().tolist() == lengths
    for begin, end in combinations_with_replacement(range(corpus.n_blocks + 1), 2):
        expected = lengths[corpus.blocks[begin] : corpus.blocks[end]]
        assert corpus.lengths(begin, end).tolist() == expected, (begin, end)
    assert (corpus.n_samples, corpus.n_tokens, corpus.n_text_bytes) == (100, sum(lengths), 3 * sum(lengths))
    assert corpus.tokenizer_hash == "a" * 64


def test_sources_that_are_no_unicode_survive(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    with ShardWriter(tmp_path, tokenizer_hash="t", token_dtype="uint16") as writer:
        writer.add("key", np.ones(1, np.uint16), name, 1)
        writer.finish({})
    assert Corpus.open(tmp_path).read_sample(0).source == name


def test_only_numbers_that_exist(corpus: Corpus) -> None:
    assert_refused(lambda: corpus.read_sample(100), "0 to 99, not 100", kind=UsageError)
    assert_refused(lambda: corpus.read_sample(-1), "0 to 99, not -1", kind=UsageError)
    assert_refused(lambda: corpus.read_block(corpus.n_blocks), f"not {corpus.n_blocks}")


def test_the_fingerprint_depends_on_content_and_order(write: Write, make_documents: Any) -> None:
    texts = make_documents(100)

    def fingerprint(name: str, texts: list[np.ndarray], **options: Any) -> str:
        return Corpus.open(write(texts, name, **options)).fingerprint

    changed = [*texts[:-1], texts[-1] ^ 1]
    swapped = [texts[1], texts[0], *texts[2:]]
    same = fingerprint("same", texts)
    assert fingerprint("again", texts, provenance={"other": "words"}) == same
    remaining = [
        fingerprint("changed", changed),
        fingerprint("swapped", swapped),
        fingerprint("tokenizer", texts, tokenizer_hash="b"),
        fingerprint("frames", texts, frame_bytes=16_000),
    ]
    assert len({same, *remaining}) == 5


def test_another_tokenizer_is_refused(corpus: Corpus) -> None:
    corpus.check_tokenizer("a" * 64)
    assert_refused(lambda: corpus.check_tokenizer("b" * 64), "aaaa", "bbbb", kind=UsageError)


def test_folders_that_are_no_corpus(tmp_path: Path, folder: Path) -> None:
    assert_refused(lambda: Corpus.open(tmp_path / "none"), "no such folder", kind=UsageError)
    (tmp_path / "run").mkdir()
    config = tmp_path / "run/config.toml"
    for text, advice in (
        ('[data]\ntrain = "corpora/a"', "data show corpora/a"),
        ('[data.mixture.a]\npath = "s3://b/c"', "data show s3://b/c"),
        ("data = 3", "run `megatfm prep` (again)"),
    ):
        config.write_text(text)
        assert_refused(lambda: Corpus.open(tmp_path / "run"), advice, kind=UsageError)
    assert_refused(lambda: Corpus.open(config), "is a file, not a corpus", kind=UsageError)
    (folder / "manifest.json").unlink()
    assert_refused(lambda: Corpus.open(folder), "no manifest.json", "megatfm prep", kind=UsageError)


def test_the_folder_above_a_training_corpus_is_answered_with_that_corpus(folder: Path) -> None:
    for name in ("train", "validation"):
        shutil.copytree(folder, folder.parent / "both" / name)
    with pytest.raises(UsageError, match=r"each of train, validation: name one of them, for example .*both/train$"):
        Corpus.open(folder.parent / "both")


def test_check_counts_what_it_has_read(folder: Path) -> None:
    corpus, checked = Corpus.open(folder), check_corpus(folder)
    assert (checked.shards, checked.blocks) == (len(corpus.indexes), corpus.n_blocks)
    assert (checked.samples, checked.tokens) == (100, int(corpus.lengths().sum()))
    assert checked.bytes == sum(path.stat().st_size for path in folder.glob("*.tar.zst"))
    assert "100 samples" in str(checked)
    assert str(replace(checked, shards=1, blocks=2)).startswith("whole: 1 shard, 2 blocks, 100 samples, ")


def test_show_gives_the_overview(folder: Path) -> None:
    text = describe_corpus(folder)
    for fact in ("100", "(3.000 a token)", "a" * 64, "made: made by  a test", Corpus.open(folder).fingerprint):
        assert fact in text


def test_show_says_how_a_corpus_was_made(folder: Path) -> None:
    """A line for each section; classes and shares of tokens are described above."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    config = {"version": 5, "read": {"folder": "/ä", "exclude": []}, "steps": [{"name": "language"}]}
    provenance = {
        "split": "train",
        "config": config,
        "holds": {"language": [1, [["en", 1, 1, 1]]]},
        "input": {"b": None},
    }
    manifest["provenance"] = provenance
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    lines = describe_corpus(folder).splitlines()
    assert [line for line in lines if line.startswith(("made", "language"))] == [
        "language              en 100.0 %",
        'made: config.read     folder = "/ä", exclude = []',
        'made: config.steps    [{"name": "language"}]',
        "made: config.version  5",
        "made: input           b = null",
        "made: split           train",
    ]


def test_show_wraps_long_lines_at_the_width_of_a_terminal_or_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["provenance"] = {"config": ["a word"] * 40}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    monkeypatch.delenv("COLUMNS", raising=False)
    for width in (120, 80):
        lines = describe_corpus(folder).splitlines()
        assert all(len(line) <= width for line in lines if len(line.split()) > 2), "a path or a hash stays whole"
        assert f"tokenizer     {'a' * 64}" in lines
        assert lines[-1].startswith(" " * len("made: config  "))
        sample = int(Corpus.open(folder).lengths().argmax())
        assert all(len(line) <= width for line in describe_corpus(folder, sample).splitlines()), "ids are wrapped, too"
        monkeypatch.setenv("COLUMNS", "80")


def test_show_gives_a_sample(folder: Path) -> None:
    def decode(tokens: NDArray[np.integer]) -> str:
        return f"<text of {len(tokens)} tokens>"

    n = Corpus.open(folder).lengths()[7]
    text = describe_corpus(folder, 7, decode)
    for fact in ("7 of 100", "000007", "folder/file 7 ä.txt", f"<text of {n} tokens>"):
        assert fact in text
    tokens = describe_corpus(folder, 7).partition("\n\n")[2].split()
    assert tokens == list(map(str, Corpus.open(folder).read_sample(7).tokens))


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> CorpusFuzzer:
    return CorpusFuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_damage_is_refused_in_one_line(fuzz: CorpusFuzzer, name: str) -> None:
    run_examples(name, fuzz, 40)


# ----------------------------------------------------------------------------------------------------- frames


CONTENTS = {
    "text": b"".join(b"line %d of a text\n" % i for i in range(20_000)),  # several blocks
    "one byte repeated": bytes(300_000),
    "noise": np.random.default_rng(0).bytes(200_000),  # blocks that are not compressed
    "short": b"a",
    "empty": b"",
}


def frame(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compress(data)


@pytest.mark.parametrize("checksum", [True, False])
def test_together_gives_what_each_alone_gives(checksum: bool) -> None:
    packed = [frame(data, write_checksum=checksum) for data in CONTENTS.values()]
    sizes = list(map(len, CONTENTS.values()))
    together = [bytes(data) for data in decompress_frames(packed, sizes)]
    assert together == [decompress_frame(*item) for item in zip(packed, sizes, strict=True)] == [*CONTENTS.values()]


@pytest.mark.parametrize("content", [name for name in CONTENTS if name != "empty"])
@pytest.mark.parametrize("damage", ["cut", "longer", "another frame", "flipped", "nothing", "no frame"])
def test_damage_is_refused_alone_and_together(content: str, damage: str) -> None:
    data, good = CONTENTS[content], frame(CONTENTS[content])
    bad = {
        "cut": good[:-1],
        "longer": good + b"\0",
        "another frame": good + good,
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "nothing": b"",
        "no frame": b"no frame of zstd",
    }[damage]
    with pytest.raises(BadFrameError):
        decompress_frame(bad, len(data))
    with pytest.raises(BadFrameError):
        decompress_frames([good, bad], [len(data)] * 2)


def test_a_size_is_compared_before_memory_is_taken() -> None:
    bomb = frame(bytes(2**20))
    for size in (2**20 - 1, 2**50):
        with pytest.raises(BadFrameError, match=f"holds 1048576 bytes, the index says {size}"):
            decompress_frame(bomb, size)
        with pytest.raises(BadFrameError, match=f"holds 1048576 bytes, the index says {size}"):
            decompress_frames([bomb], [size])


@pytest.mark.parametrize("content", [name for name in CONTENTS if name != "empty"])
def test_a_frame_that_does_not_claim_its_size(content: str) -> None:
    """Shards as `tar … | zstd` writes them."""
    data = CONTENTS[content]
    piped = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    assert decompress_frame(piped, len(data)) == data
    assert [bytes(unpacked) for unpacked in decompress_frames([piped, frame(data)], [len(data)] * 2)] == [data] * 2
    for size in (len(data) - 1, len(data) + 1):
        for unpack in (decompress_frame, lambda piped, size: decompress_frames([piped], [size])):
            with pytest.raises(BadFrameError):
                unpack(piped, size)
    with pytest.raises(BadFrameError):
        decompress_frame(piped[:-1], len(data))


@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_bit_gives_other_bytes(seed: int) -> None:
    data = CONTENTS["text"][:3000]
    good, draw = frame(data), np.random.default_rng(seed)
    for bit in draw.choice(8 * len(good), 200, replace=False).tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        for way in (lambda bad: decompress_frame(bad, len(data)), lambda bad: decompress_frames([bad], [len(data)])[0]):
            with contextlib.suppress(BadFrameError):  # some bits mean nothing
                assert bytes(way(bytes(bad))) == data
