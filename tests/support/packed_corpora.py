"""Small corpora, on disk and in memory, and the simplest objective."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.writer import ShardWriter
from megatfm.data.sequences import DocumentChunk
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
        return [
            np.arange(start, start + n, dtype=np.uint32) for start, n in zip(starts, lengths, strict=False)
        ]

    def lengths(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        end = len(self.blocks) - 1 if end is None else end
        return np.array([*map(len, self.documents[self.blocks[begin] : self.blocks[end]])], np.int64)

    def read_block(self, number: int) -> list[tuple[int, np.ndarray]]:
        return [(i, self.documents[i]) for i in range(*self.blocks[number : number + 2])]


def documents(n: int, seed: int = 0, vocabulary: int = 4000) -> list[np.ndarray]:
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
    return documents


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write documents as a corpus of several shards of several frames; returns its folder."""

    def write(texts: list[np.ndarray], name: str = "corpus", **options: Any) -> Path:
        options = {"tokenizer_hash": "a" * 64, "token_dtype": "uint16"} | options
        options = {"shard_bytes": 60_000, "frame_bytes": 8_000, "pack": False} | options
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
    return write(documents(100))


@pytest.fixture
def packed(write: Callable[..., Path]) -> Path:
    """The same documents, of which many share a member."""
    return write(documents(100), "packed", pack=True, shard_bytes=20_000, frame_bytes=4000)


@pytest.fixture
def corpus(folder: Path) -> Corpus:
    """The same, opened."""
    return Corpus.open(folder)
