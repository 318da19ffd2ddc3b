"""Exports hold what a corpus holds, for other readers, whole or not at all; statistics are those counted by hand."""

import json
import math
import os
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import webdataset
import zstandard

from megatfm.config.prep import ReadConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.export import Detokenizer, export_corpus
from megatfm.corpus.images import ImageColumns
from megatfm.corpus.inspect import check_corpus, get_domain, tabulate_stats
from megatfm.corpus.writer import ShardWriter
from megatfm.data_prep.import_token_ids import read_token_ids
from megatfm.errors import MegatfmError, UsageError

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


def test_an_export_of_tars_leaves_hidden_folders_of_others_alone(exported_from: Path, tmp_path: Path) -> None:
    """Another export may still write there, a killed one may have left it, or it is the user's own."""
    hidden = [tmp_path / ".tars.partial", tmp_path / ".tars.partial-01234567"]
    for folder in hidden:
        folder.mkdir()
        (folder / "shard-00099.tar").write_text("of another one")
    export_corpus(exported_from, tmp_path / "tars", None)
    assert sorted(tmp_path.iterdir()) == sorted([*hidden, tmp_path / "tars"])
    assert all((folder / "shard-00099.tar").read_text() == "of another one" for folder in hidden)
    assert not (tmp_path / "tars" / "shard-00099.tar").exists()
    check_corpus(tmp_path / "tars")


def test_plain_tars_keep_the_lengths_of_both_sides(tmp_path: Path) -> None:
    lengths = [(3, 2), (1, 4), (5, 0)]
    with ShardWriter(tmp_path / "corpus", tokenizer_hash="none", token_dtype="uint16", pack=False) as writer:
        for number, sides in enumerate(lengths):
            writer.add(str(number), np.arange(sum(sides), dtype=np.uint16), "answers", 0, side_lengths=sides)
        writer.finish({})
    export_corpus(tmp_path / "corpus", tmp_path / "tars", None)
    for corpus in map(Corpus.open, (tmp_path / "corpus", tmp_path / "tars")):
        assert ImageColumns(corpus, 0, corpus.n_blocks).image_sizes.tolist() == [list(sides) for sides in lengths]


@pytest.mark.parametrize("name", ["tars", "v1.5", "a.csv/"])
def test_a_name_that_says_no_format_is_a_folder(exported_from: Path, tmp_path: Path, name: str) -> None:
    assert "1 plain tar," in export_corpus(exported_from, f"{tmp_path}/{name}", None)
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
    assert by_length[1:] == ["1 1 0 0.0 %", "4 1 4 15.4 %", "8 1 5 19.2 %", "32 1 17 65.4 %"]
    assert by_source[1:] == ["books.txt 1 17 10", "web 2 9 90", "(no name) 1 0 0"]
    assert {table[0].split()[0]: table[1:] for table in by_field} == {
        "domain": ["a.example 2 9 90"],
        "stars": ["2.5 1 5 50", "2 1 4 40"],
        "ok": ["True 1 17 10"],
    }
    assert by_id == ["3 ids occur", "id piece times", "7 9", "9 9", "8 8"]


def test_statistics_of_images_count_classes(tmp_path: Path) -> None:
    """Images have no tokens; the most frequent class comes first, and an image without one is not counted."""
    with ShardWriter(tmp_path, tokenizer_hash="none", token_dtype="uint16") as writer:
        for number, label in enumerate((b"0", b"1", b"1", b"2", None)):
            writer.add(str(number), np.empty(0, np.uint16), "train", 0, {"cls": label} if label else {"txt": b""})
        writer.finish({"classes": ["cat", "dog"]})
    tables = tabulate_stats(tmp_path).split("\n\n")
    assert [" ".join(line.split()) for line in tables[-1].splitlines()] == [
        "class documents tokens bytes of text", "1 (dog) 2 0 0", "0 (cat) 1 0 0", "2 1 0 0",
    ]  # fmt: skip
    assert len(tables) == 3, "the sum, sources, classes"


def test_statistics_of_large_ids_take_little_memory(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, tokenizer_hash="x", token_dtype="uint32") as writer:
        writer.add("a", np.array([30_000_000, 7, 30_000_000]), "x", 1)
        writer.finish({})
    tracemalloc.start()
    text = tabulate_stats(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line.split() for line in text.splitlines()[-2:]] == [["30000000", "2"], ["7", "1"]]
    assert peak < 2**25


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
