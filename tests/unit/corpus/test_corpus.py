"""A corpus gives back what was written, also to other readers, and is refused in one line when it is damaged."""

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import webdataset
import zstandard
from numpy.typing import NDArray

from megatfm.config.prep import ReadConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.export import Detokenizer, export_corpus
from megatfm.corpus.inspect import check_corpus, describe_corpus, get_domain, tabulate_stats
from megatfm.corpus.shard_format import BadFrameError, decompress_frame, decompress_frames
from megatfm.corpus.writer import ShardWriter
from megatfm.data_prep.readers.token_ids import read_token_ids
from megatfm.errors import MegatfmError, UsageError
from tests.support.corpus_fuzzer import ARGUMENTS, CorpusFuzzer, run_examples
from tests.support.packed_corpora import assert_refused

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


def test_check_counts_what_it_has_read(folder: Path) -> None:
    corpus, checked = Corpus.open(folder), check_corpus(folder)
    assert (checked.shards, checked.blocks) == (len(corpus.indexes), corpus.n_blocks)
    assert (checked.samples, checked.tokens) == (100, int(corpus.lengths().sum()))
    assert checked.bytes == sum(path.stat().st_size for path in folder.glob("*.tar.zst"))
    assert "100 samples" in str(checked)


def test_show_gives_the_overview(folder: Path) -> None:
    text = describe_corpus(folder)
    for fact in ("100", "(3.000 a token)", "a" * 64, '{"made by": "a test"}', Corpus.open(folder).fingerprint):
        assert fact in text


def test_show_gives_a_sample(folder: Path) -> None:
    def decode(tokens: NDArray[np.integer]) -> str:
        return f"<text of {len(tokens)} tokens>"

    n = Corpus.open(folder).lengths()[7]
    text = describe_corpus(folder, 7, decode)
    for fact in ("7 of 100", "000007", "folder/file 7 ä.txt", f"<text of {n} tokens>"):
        assert fact in text
    tokens = describe_corpus(folder, 7).splitlines()[-1].split()
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


# ----------------------------------------------------------------------------------------------------- export


EOS = 300
TEXTS = ["one", "Größe\n東京 \N{GRINNING FACE}", "", *(f"text {i} " * (i % 9) for i in range(60))]
CODEC = Detokenizer(lambda tokens: bytes(tokens.tolist()).decode(), EOS)


@pytest.fixture(scope="module", params=["uint16", "uint32"])
def exported_from(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("export") / "corpus"
    with ShardWriter(folder, tokenizer_hash="t", token_dtype=request.param, frame_bytes=1000) as writer:
        for i, text in enumerate(TEXTS):
            data = np.frombuffer(text.encode(), np.uint8)
            writer.add(f"{i:04d}", data.astype(request.param), f"web/a.jsonl#{i}", len(data))
        writer.finish({"made": "here"})
    return folder


def test_text_is_decoded_unchanged(exported_from: Path, tmp_path: Path) -> None:
    expected = [{"text": t, "id": f"{i:04d}", "source": f"web/a.jsonl#{i}"} for i, t in enumerate(TEXTS)]
    for name in ("a.jsonl", "a.jsonl.zst", "a.parquet"):
        output = export_corpus(exported_from, tmp_path / "new" / name, CODEC)
        assert output == f"{tmp_path / 'new' / name}: the text of {len(TEXTS)} documents"
    data = (tmp_path / "new/a.jsonl").read_bytes()
    assert [json.loads(line) for line in data.decode().splitlines()] == expected
    packed = (tmp_path / "new/a.jsonl.zst").read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == data
    rows = pyarrow.parquet.read_table(tmp_path / "new/a.parquet").to_pylist()
    assert rows == [{**record, "fields": None} for record in expected]


def test_sources_that_are_no_unicode_are_exported(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "corpus", tokenizer_hash="t", token_dtype="uint16") as writer:
        fields = {"path": os.fsdecode(b"\xff"), "score": math.nan}
        writer.add("key", np.frombuffer(b"text", np.uint8).astype(np.uint16), os.fsdecode(b"caf\xe9"), 4, fields=fields)
        writer.finish({})
    for name in ("a.jsonl", "a.parquet"):
        export_corpus(tmp_path / "corpus", tmp_path / name, CODEC)
    line = (tmp_path / "a.jsonl").read_text(encoding="utf-8")
    assert json.loads(line, parse_constant=pytest.fail) == {
        "text": "text", "id": "key", "source": "caf\udce9", "fields": {"path": "\udcff", "score": "NaN"},
    }  # fmt: skip
    (row,) = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["source"] == r"caf\udce9"
    assert json.loads(row["fields"]) == {"path": "\udcff", "score": "NaN"}


def test_megatron_s_files_are_those_that_datatrove_writes(exported_from: Path, tmp_path: Path) -> None:
    datatrove = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
    output = export_corpus(exported_from, tmp_path / "ours.bin", CODEC)
    documents = [[*text.encode(), EOS] for text in TEXTS]
    assert f"{sum(map(len, documents)):,} ids of {len(TEXTS)} documents, each ended by {EOS}" in output
    size = np.dtype(Corpus.open(exported_from).manifest.token_dtype).itemsize
    reference = datatrove.MegatronTokenizedFile(str(tmp_path), "theirs", token_size=size)
    for document in documents:
        reference.write(document)
    reference.close()
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()
    config = ReadConfig(folder=str(tmp_path), format="megatron")
    assert [ids.tolist() for ids in read_token_ids(tmp_path / "ours.bin", config)] == documents


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_plain_tars_are_opened_by_webdataset_and_datasets_and_are_a_corpus(
    exported_from: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    export_corpus(exported_from, tmp_path / "tars", None)
    paths = sorted(map(str, (tmp_path / "tars").glob("shard-*.tar")))
    expected = [list(text.encode()) for text in TEXTS]
    read = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    assert [sample["tokens.npy"].tolist() for sample in read] == expected
    assert [sample["meta.json"]["source"] for sample in read] == [f"web/a.jsonl#{i}" for i in range(len(TEXTS))]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded: Any = datasets.load_dataset(
        "webdataset", data_files=paths, split="train", cache_dir=str(tmp_path / "cache"), streaming=True
    )
    loaded = list(loaded)
    assert [list(sample["tokens.npy"]) for sample in loaded] == expected
    assert [sample["meta.json"]["bytes"] for sample in loaded] == [len(text) for text in expected]
    check_corpus(tmp_path / "tars")
    for block in range((corpus := Corpus.open(tmp_path / "tars")).n_blocks):
        for number, tokens in corpus.read_block(block):
            assert tokens.tolist() == expected[number]


def test_a_corpus_that_can_t_be_exported_leaves_no_file(exported_from: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tokenizer beside it"):
        export_corpus(exported_from, tmp_path / "a.jsonl", None)
    other = Detokenizer(lambda tokens: "x" * (len(tokens) + 1), EOS)
    for name in ("a.jsonl", "a.jsonl.zst", "a.parquet"):
        with pytest.raises(MegatfmError, match=r"sample 0 \(web/a.jsonl#0\) decodes to 4 bytes, but had 3"):
            export_corpus(exported_from, tmp_path / name, other)
    with pytest.raises(UsageError, match="too large for Megatron-LM's index"):
        export_corpus(exported_from, tmp_path / "a.bin", Detokenizer(CODEC.decode, 2**31))
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        export_corpus(exported_from, tmp_path / "a.jsonl", CODEC)
    for name in ("a.csv", "a.jsonl.gz", "a.JSONL", "a.idx"):
        with pytest.raises(UsageError, match=rf"{name}: \.\w+ is no format .*\.parquet or \.bin, or .*{name}/ for a"):
            export_corpus(exported_from, tmp_path / name, CODEC)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_parquet_without_package_is_named(exported_from: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MegatfmError, match=r"a\.parquet: Parquet is written by pyarrow: `pip install"):
        export_corpus(exported_from, tmp_path / "a.parquet", CODEC)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["s3://bucket/a.jsonl", "gs://bucket/tars", Path("s3://bucket/ids.bin")])
def test_url_is_no_folder_of_that_name(exported_from: Path, tmp_path: Path, out: str | Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (
        lambda: export_corpus(exported_from, out, CODEC),
        lambda: ShardWriter(out, tokenizer_hash="t", token_dtype="uint16"),
    ):
        with pytest.raises(UsageError, match=r"files are written to this machine, not to (s3|gs)://"):
            write()
    assert not list(tmp_path.iterdir())


def test_exports_write_both_files_or_none(exported_from: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is there is not written over; a disk that is full at the first, or the last, of two names."""
    (tmp_path / "a.idx").write_text("mine")
    with pytest.raises(UsageError, match=r"a\.idx: is there already"):
        export_corpus(exported_from, tmp_path / "a.bin", CODEC)
    replace = Path.replace
    for full in (".bin", ".idx"):

        def fail(self: Path, target: Path, full: str = full) -> Path:
            if target.suffix == full:
                raise OSError(28, "No space left on device")
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", fail)
        with pytest.raises(MegatfmError, match="No space left"):
            export_corpus(exported_from, tmp_path / "b.bin", CODEC)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.idx", "mine")]


@pytest.mark.parametrize("interrupt", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("name", ["new/folders/tars", "new/a.jsonl", "new/a.bin", "new/a.parquet"])
def test_an_export_that_fails_midway_leaves_no_folder(
    exported_from: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, interrupt: BaseException
) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise interrupt

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((MegatfmError, KeyboardInterrupt)):
        export_corpus(exported_from, tmp_path / name, CODEC)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_of_tars_leaves_does_not_stop_the_next(exported_from: Path, tmp_path: Path) -> None:
    (tmp_path / ".tars.partial").mkdir()
    (tmp_path / ".tars.partial" / "shard-00099.tar").write_text("of a killed one")
    export_corpus(exported_from, tmp_path / "tars", None)
    assert [path.name for path in tmp_path.iterdir()] == ["tars"]
    assert not (tmp_path / "tars" / "shard-00099.tar").exists()
    check_corpus(tmp_path / "tars")


@pytest.mark.parametrize("name", ["tars", "v1.5", "a.csv/"])
def test_a_name_that_says_no_format_is_a_folder(exported_from: Path, tmp_path: Path, name: str) -> None:
    assert "plain tars" in export_corpus(exported_from, f"{tmp_path}/{name}", None)
    assert Corpus.open(tmp_path / name).n_samples == len(TEXTS)


@pytest.mark.parametrize(("url", "domain"), [
    ("https://www.example.com/a/b", "example.com"), ("http://EXAMPLE.com", "example.com"),
    ("http://example.com.:8080/", "example.com"), ("https://example.com?page=1", "example.com"),
    ("https://example.com#top", "example.com"), ("http://a:b@www.example.com:80?x=http://b.org/", "example.com"),
    ("https://example.com/?at=me@other.org", "example.com"), ("http://[2001:DB8::1]:80/a", "2001:db8::1"),
    ("http://user@[::1]?x", "::1"), (" http://sub.example.com\\a", "sub.example.com"), ("example.com/a", ""),
    ("", ""), ("http://", ""), ("http://[broken/", "broken"), ("http://example.com\n", "example.com"),
])  # fmt: skip
def test_spellings_of_a_host_are_one_domain(url: str, domain: str) -> None:
    assert get_domain(url) == domain


def test_fields_without_number_are_not_all_counted(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, tokenizer_hash="x", token_dtype="uint16") as writer:
        for number in range(110):
            writer.add(str(number), np.array([5]), "x", 1, fields={"shared": "a", f"field{number}": "b"})
        writer.finish({})
    text = tabulate_stats(tmp_path)
    assert text.count("field") == 99 + 1, "with `shared`, a hundred; and the line below them"
    assert "there are more than 100 fields: further ones are not counted" in text
    assert re.search(r"a +110 +110 +110", text)


def test_statistics_are_those_counted_by_hand(tmp_path: Path) -> None:
    """Lengths on both sides of powers of two, sources with and without a folder, and ids and values that tie."""
    documents = [  # source, ids, bytes of text, metadata
        ("web/a.jsonl#0", [7] * 4, 40, {"url": "https://www.a.example/x", "stars": 2}),
        ("web/b.jsonl#1", [7] * 5, 50, {"url": "https://a.example", "stars": 2.5}),
        ("books.txt#0", [8] * 8 + [9] * 9, 10, {"ok": True, "list": [1]}),
        ("#3", [], 0, {}),
    ]
    with ShardWriter(tmp_path, tokenizer_hash="x", token_dtype="uint16", frame_bytes=1) as writer:
        for number, (source, ids, size, fields) in enumerate(documents):
            writer.add(str(number), np.array(ids, np.uint16), source, size, fields=fields)
        writer.finish({})
    tables = [
        [" ".join(line.split()) for line in table.splitlines()] for table in tabulate_stats(tmp_path).split("\n\n")
    ]
    heading, percentiles, by_length, by_source, *by_field, by_id = tables
    assert heading == ["4 documents, 26 tokens, 100 bytes of text"]
    assert percentiles[1:] == [
        *(f"{percent} % {length}" for percent, length in
          ((1, 4), (10, 4), (25, 4), (50, 5), (75, 17), (90, 17), (99, 17))),
        "all 17",
    ]  # fmt: skip
    assert by_length[1:] == [
        "1 1 0 0.0 %",
        "4 1 4 15.4 %",
        "8 1 5 19.2 %",
        "32 1 17 65.4 %",
    ]
    assert by_source[1:] == ["books.txt 1 17 10", "web 2 9 90", "(no name) 1 0 0"]
    assert {table[0].split()[0]: table[1:] for table in by_field} == {
        "domain": ["a.example 2 9 90"],
        "stars": ["2.5 1 5 50", "2 1 4 40"],
        "ok": ["True 1 17 10"],
    }
    assert by_id == ["3 ids occur", "id piece times", "7 9", "9 9", "8 8"]


def test_long_tables_say_how_many_rows_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.corpus.inspect.MAX_VALUES", 25)
    with ShardWriter(tmp_path, tokenizer_hash="x", token_dtype="uint16") as writer:
        for number in range(30):
            fields = {"even": number % 2 == 0, "some": number % 25, "many": number}
            writer.add(str(number), np.array([100 - number]), "x", 1, fields=fields)
        writer.finish({})
    text = tabulate_stats(tmp_path)
    assert "many: more than 25 values" in text
    assert re.search(r"^some .*\n0 +2 +2 +2\n1 .*\n2 .*\n3 .*\n4 +2 +2 +2\n10 +1 .*\n(.*\n){14}and 5 more$", text, re.M)
    assert [line.split()[0] for line in text.splitlines()[-20:]] == [str(i) for i in range(71, 91)]


def test_statistics_are_counted(exported_from: Path) -> None:
    text = " ".join(tabulate_stats(exported_from, lambda i: chr(i)).split())
    total = sum(len(t.encode()) for t in TEXTS)
    assert f"{len(TEXTS)} documents, {total:,} tokens, {total:,} bytes of text" in text
    assert f"web {len(TEXTS)} {total:,} {total:,}" in text
    assert f"all {max(len(t.encode()) for t in TEXTS)}" in text
    spaces = sum(t.count(" ") for t in TEXTS)
    assert f"32 ' ' {spaces:,}" in text
