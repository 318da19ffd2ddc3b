"""Small corpora: on disk, in memory, behind a URL, damaged; and the simplest objective."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import numpy as np
import pytest
from blake3 import blake3

from megatfm.corpus import storage as module
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.shard_index import ShardIndex
from megatfm.corpus.storage import ShardCacheConfig
from megatfm.corpus.writer import ShardWriter
from megatfm.data.dataset import PackedDataset, RowDataset
from megatfm.data.loader import DataLoader, DataRank
from megatfm.data.sequences import DocumentChunk, Fields, PackingConfig, PackingObjective
from megatfm.errors import MegatfmError
from megatfm.rng import ChunkKey

BOS, EOS = 1, 2


class Causal:
    """[BOS, d…] → [d…, EOS], and the keys it was called with."""

    field_prefixes: tuple[str, ...] = ("",)
    max_tokens: int | None = None
    padding_values: Mapping[str, int] = MappingProxyType({})
    fields = None
    needs_other_documents = False
    needs_files = False

    def __init__(self) -> None:
        self.keys: list[ChunkKey] = []

    def sequence_lengths(self, n_tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return n_tokens + 1

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> dict[str, np.ndarray]:
        self.keys.append(key)
        ids = chunk.tokens.astype(np.int64)
        return {"tokens": np.append(BOS, ids), "targets": np.append(ids, EOS)}


class MemoryCorpus:
    """A corpus in memory, as `PackedDataset` reads it, from blocks of documents' lengths."""

    folder = Path("memory")
    fingerprint = "memory"

    def __init__(self, blocks: list[list[int]]) -> None:
        self.documents = self.make_documents([n for block in blocks for n in block])
        self.blocks = np.cumsum([0] + [len(block) for block in blocks])
        self.n_samples = len(self.documents)

    def make_documents(self, lengths: list[int]) -> list[np.ndarray]:
        """Documents of these lengths, no two tokens of which are the same."""
        starts = np.cumsum([10, *lengths])
        return [np.arange(start, start + n, dtype=np.uint32) for start, n in zip(starts, lengths, strict=False)]

    def lengths(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        end = len(self.blocks) - 1 if end is None else end
        return np.array([*map(len, self.documents[self.blocks[begin] : self.blocks[end]])], np.int64)

    def read_block(self, number: int) -> list[tuple[int, np.ndarray]]:
        return [(i, self.documents[i]) for i in range(*self.blocks[number : number + 2])]


def pack_dataset(
    corpus: Any,
    objective: PackingObjective,
    *,
    sequence_length: int,
    target_length: int | None = None,
    seed: int,
    pad_id: int = 0,
    attend_across_documents: bool = False,
    **options: Any,
) -> PackedDataset:
    """A `PackedDataset` with rows of these lengths."""
    row_lengths = (sequence_length, target_length or sequence_length)[: len(objective.field_prefixes)]
    packing = PackingConfig(objective, row_lengths, seed, pad_id, attend_across_documents)
    return PackedDataset(corpus, packing, **options)


def draw_documents(n: int, seed: int = 0, vocabulary: int = 4000) -> list[np.ndarray]:
    """Documents of random tokens, some of them empty."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 300, n)
    lengths[::20] = 0  # empty documents are documents, too
    return [draw.integers(3, vocabulary, length).astype(np.uint16) for length in lengths]


@pytest.fixture
def causal() -> Causal:
    """The simplest objective."""
    return Causal()


@pytest.fixture(scope="session")
def causal_type() -> type[Causal]:
    """Class of the simplest objective."""
    return Causal


@pytest.fixture(scope="session")
def memory_corpus() -> type[MemoryCorpus]:
    """Class of corpora in memory."""
    return MemoryCorpus


@pytest.fixture
def make_documents() -> Callable[..., list[np.ndarray]]:
    """`make_documents(n)`: documents of random tokens."""
    return draw_documents


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write documents as a corpus of several shards of several frames; returns its folder."""

    def write(texts: list[np.ndarray], name: str = "corpus", **options: Any) -> Path:
        sizes: dict[str, Any] = {"shard_bytes": 60_000, "frame_bytes": 8_000, "pack": False}
        options = {"tokenizer_hash": "a" * 64, "token_dtype": "uint16"} | sizes | options
        provenance = options.pop("provenance", {"made by": "a test"})
        with ShardWriter(tmp_path / name, **options) as writer:
            for i, tokens in enumerate(texts):
                writer.add(f"{i:06d}", tokens, f"folder/file {i} ä.txt", 3 * len(tokens))
            writer.finish(provenance)
        return tmp_path / name

    return write


@pytest.fixture
def folder(write: Callable[..., Path]) -> Path:
    """A corpus of 100 documents on disk."""
    return write(draw_documents(100))


@pytest.fixture
def packed(write: Callable[..., Path]) -> Path:
    """The documents in a corpus of which many share a member."""
    return write(draw_documents(100), "packed", pack=True, shard_bytes=20_000, frame_bytes=4000)


@pytest.fixture
def corpus(folder: Path) -> Corpus:
    """The corpus, opened."""
    return Corpus.open(folder)


Json = dict[str, Any]
Change = Callable[[np.ndarray, np.ndarray], None]  # of an index's frames and samples

SHARD, INDEX = "shard-000001.tar.zst", "shard-000001.index.zst"


def edit_manifest(folder: Path, change: Callable[[Json], object]) -> None:
    """Change the manifest in place."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def replace_index(folder: Path, data: bytes) -> None:
    """Put another index for shard 1, with the manifest's consent."""
    (folder / INDEX).write_bytes(data)
    entry = {"file": INDEX, "bytes": len(data), "blake3": blake3(data).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["shards"][1].update(index=entry))


def replace_shard(folder: Path, data: bytes) -> None:
    """Put another shard 1, with the manifest's consent."""
    (folder / SHARD).write_bytes(data)
    facts = {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["shards"][1].update(facts))


def edit_index_bytes(index: ShardIndex, *changes: Change) -> bytes:
    """Bytes of an index after changes of its frames and samples."""
    frames, samples = index.frames.copy(), index.samples.copy()
    for change in changes:
        change(frames, samples)
    return ShardIndex(frames, samples).encode()


def edit_index(folder: Path, change: Change) -> None:
    """Change the index of shard 1, with the manifest's consent."""
    replace_index(folder, edit_index_bytes(Corpus.open(folder).indexes.complete(1), change))


def assert_refused(read: Callable[[], object], *words: str, kind: type[MegatfmError] = MegatfmError) -> None:
    """Assert that reading raises one line that has all these words."""
    with pytest.raises(MegatfmError) as caught:
        read()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    """The corpus at memory://, and the URL."""
    fs = fsspec.filesystem("memory")
    for path in folder.iterdir():
        fs.pipe(f"/bucket/corpus/{path.name}", path.read_bytes())
    yield "memory://bucket/corpus"
    fs.rm("/bucket", recursive=True)


@pytest.fixture
def cache(tmp_path: Path) -> ShardCacheConfig:
    """A cache of shards in a temporary folder."""
    return ShardCacheConfig(tmp_path / "cache")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of downloaded files."""
    names: list[str] = []
    download = module.CachedRemoteStorage._download

    def watched(self: Any, path: Path, known: Any) -> None:
        names.append(known.file)
        download(self, path, known)

    monkeypatch.setattr(module.CachedRemoteStorage, "_download", watched)
    monkeypatch.setattr("megatfm.corpus.remote.time.sleep", lambda seconds: None)
    return names


def have_same_documents(first: Corpus, second: Corpus) -> bool:
    """Whether two corpora have the same documents."""
    return all(
        np.array_equal(a, b)
        for number in range(first.n_blocks)
        for (_, a), (_, b) in zip(first.read_block(number), second.read_block(number), strict=True)
    )


@contextmanager
def serve_s3() -> Iterator[str]:
    """Serve S3 at the URL that is yielded."""
    from moto.server import ThreadedMotoServer  # slow to import

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def use_s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fsspec find S3 at a stand-in's URL."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.config.conf.pop("s3", None)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def read_row(rows: RowDataset, position: int | None) -> Fields:
    """A single row; without a position, one of padding."""
    return {name: values[0] for name, values in rows.read_rows([position]).items()}


def read_epoch(rows: RowDataset, epoch: int = 0) -> list[Fields]:
    """All rows of an epoch in their order."""
    n_rows = len(rows)  # type: ignore[arg-type]
    return [read_row(rows, position) for position in range(epoch * n_rows, (epoch + 1) * n_rows)]


def read_global_batches(
    rows: RowDataset, ranks: int, steps: int, position: int = 0, *, global_batch: int, workers: int = 0
) -> list[Fields]:
    """The global batch of each step, put together from all ranks."""
    options: dict[str, Any] = {"global_batch": global_batch, "position": position, "workers": workers}
    loaders = [DataLoader(rows, micro_batch=2, data_rank=DataRank(rank, ranks), **options) for rank in range(ranks)]
    try:
        parts = [[batch for loader in loaders for batch in next(loader)] for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()
    # A batch whose rows are one document each has no numbers of documents.
    names = [set.intersection(*map(set, step)) for step in parts]
    return [
        {name: np.concatenate([batch[name] for batch in step]) for name in shared}
        for step, shared in zip(parts, names, strict=True)
    ]


def assert_same_fields(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that rows have the same fields, types and numbers."""
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert values.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(values, expected[name], name)
