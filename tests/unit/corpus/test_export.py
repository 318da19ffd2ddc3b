"""What is exported is what others read: compared with their own writers and readers."""

import json
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
from megatfm.corpus.inspect import check_corpus, tabulate_stats
from megatfm.corpus.writer import ShardWriter
from megatfm.data_prep.readers.token_ids import read_token_ids
from megatfm.errors import MegatfmError, UsageError

EOS = 300
TEXTS = ["one", "Größe\n東京 \N{GRINNING FACE}", "", *(f"text {i} " * (i % 9) for i in range(60))]
CODEC = Detokenizer(lambda tokens: bytes(tokens.tolist()).decode(), EOS)


@pytest.fixture(scope="module", params=["uint16", "uint32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("export") / "corpus"
    with ShardWriter(folder, tokenizer_hash="t", token_dtype=request.param, frame_bytes=1000) as writer:
        for i, text in enumerate(TEXTS):
            data = np.frombuffer(text.encode(), np.uint8)
            writer.add(f"{i:04d}", data.astype(request.param), f"web/a.jsonl#{i}", len(data))
        writer.finish({"made": "here"})
    return folder


def test_text_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    expected = [{"text": t, "id": f"{i:04d}", "source": f"web/a.jsonl#{i}"} for i, t in enumerate(TEXTS)]
    for name in ("a.jsonl", "a.jsonl.zst", "a.parquet"):
        output = export_corpus(folder, tmp_path / "new" / name, CODEC)
        assert output == f"{tmp_path / 'new' / name}: the text of {len(TEXTS)} documents"
    data = (tmp_path / "new/a.jsonl").read_bytes()
    assert [json.loads(line) for line in data.decode().splitlines()] == expected
    packed = (tmp_path / "new/a.jsonl.zst").read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed) == data
    assert pyarrow.parquet.read_table(tmp_path / "new/a.parquet").to_pylist() == [
        {**record, "fields": None} for record in expected
    ]


def test_megatron_s_files_are_those_that_datatrove_writes(folder: Path, tmp_path: Path) -> None:
    datatrove = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
    output = export_corpus(folder, tmp_path / "ours.bin", CODEC)
    documents = [[*text.encode(), EOS] for text in TEXTS]
    assert f"{sum(map(len, documents)):,} ids of {len(TEXTS)} documents, each ended by {EOS}" in output
    size = np.dtype(Corpus.open(folder).manifest.token_dtype).itemsize
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
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    export_corpus(folder, tmp_path / "tars", None)
    paths = sorted(map(str, (tmp_path / "tars").glob("shard-*.tar")))
    expected = [list(text.encode()) for text in TEXTS]
    read = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    assert [sample["tokens.npy"].tolist() for sample in read] == expected
    assert [sample["meta.json"]["source"] for sample in read] == [
        f"web/a.jsonl#{i}" for i in range(len(TEXTS))
    ]
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


def test_what_can_t_be_exported_is_said_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tokenizer beside it"):
        export_corpus(folder, tmp_path / "a.jsonl", None)
    other = Detokenizer(lambda tokens: "x" * (len(tokens) + 1), EOS)
    for name in ("a.jsonl", "a.jsonl.zst", "a.parquet"):
        with pytest.raises(MegatfmError, match=r"sample 0 \(web/a.jsonl#0\) decodes to 4 bytes, but had 3"):
            export_corpus(folder, tmp_path / name, other)
    with pytest.raises(UsageError, match="too large for Megatron-LM's index"):
        export_corpus(folder, tmp_path / "a.bin", Detokenizer(CODEC.decode, 2**31))
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        export_corpus(folder, tmp_path / "a.jsonl", CODEC)
    for name in ("a.csv", "a.jsonl.gz", "a.JSONL", "a.idx"):
        with pytest.raises(
            UsageError, match=rf"{name}: \.\w+ is no format .*\.parquet or \.bin, or .*{name}/ for a"
        ):
            export_corpus(folder, tmp_path / name, CODEC)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("out", ["s3://bucket/a.jsonl", "gs://bucket/tars", Path("s3://bucket/ids.bin")])
def test_a_url_is_no_folder_of_that_name(
    folder: Path, tmp_path: Path, out: str | Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (
        lambda: export_corpus(folder, out, CODEC),
        lambda: ShardWriter(out, tokenizer_hash="t", token_dtype="uint16"),
    ):
        with pytest.raises(UsageError, match=r"files are written to this machine, not to (s3|gs)://"):
            write()
    assert not list(tmp_path.iterdir())


def test_ids_come_with_their_index_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is there is not written over; a disk that is full at the first, or the last, of two names."""
    (tmp_path / "a.idx").write_text("mine")
    with pytest.raises(UsageError, match=r"a\.idx: is there already"):
        export_corpus(folder, tmp_path / "a.bin", CODEC)
    replace = Path.replace
    for full in (".bin", ".idx"):

        def fail(self: Path, target: Path, full: str = full) -> Path:
            if target.suffix == full:
                raise OSError(28, "No space left on device")
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", fail)
        with pytest.raises(MegatfmError, match="No space left"):
            export_corpus(folder, tmp_path / "b.bin", CODEC)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.idx", "mine")]


@pytest.mark.parametrize("name", ["tars", "v1.5", "a.csv/"])
def test_a_name_that_says_no_format_is_a_folder(folder: Path, tmp_path: Path, name: str) -> None:
    assert "plain tars" in export_corpus(folder, f"{tmp_path}/{name}", None)
    assert Corpus.open(tmp_path / name).n_samples == len(TEXTS)


def test_statistics_are_counted(folder: Path) -> None:
    text = " ".join(tabulate_stats(folder, lambda i: chr(i)).split())
    total = sum(len(t.encode()) for t in TEXTS)
    assert f"{len(TEXTS)} documents, {total:,} tokens, {total:,} bytes of text" in text
    assert f"web {len(TEXTS)} {total:,} {total:,}" in text
    assert f"all {max(len(t.encode()) for t in TEXTS)}" in text
    spaces = sum(t.count(" ") for t in TEXTS)
    assert f"32 ' ' {spaces:,}" in text
