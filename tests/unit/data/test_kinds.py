"""Rows of other kinds than text: fields of any type and shape, of tokens or of the row, made from stored files.

Worker processes import this file for its kinds: it imports no torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.writer import ShardWriter
from megatfm.data.dataset import PackedDataset
from megatfm.data.documents import Quarantine
from megatfm.data.loader import DataLoader, DataRank
from megatfm.data.mixture import Mixture, Phase
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import MegatfmError
from megatfm.rng import ChunkKey
from tests.support.packed_corpora import assert_same_fields, pack_dataset

WIDTH, PIXELS = 3, (3, 4, 4)


class Vectors:
    """Makes as many float vectors as a sample has tokens, beside others in a row, and their numbers."""

    field_prefixes = ("",)
    padding_values: Mapping[str, int] = MappingProxyType({})
    needs_other_documents, needs_files = False, True
    fields = MappingProxyType(
        {"vectors": Field("float32", (WIDTH,)), "marks": Field("uint8", pad_value=9), "order": Field(pad_value=-1)},
    )  # fmt: skip
    max_tokens: int | None = 16

    def sequence_lengths(self, n_tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return n_tokens

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> dict[str, Any]:
        vectors = np.frombuffer(chunk.files["f32"], np.float32).reshape(-1, WIDTH)
        n = len(vectors)
        return {"vectors": vectors, "marks": np.full(n, key.sample % 7, np.uint8), "order": np.arange(n)}


class Images:
    """One image and its class a row; no tokens at all."""

    field_prefixes = ("",)
    padding_values: Mapping[str, int] = MappingProxyType({})
    needs_other_documents, needs_files = False, True
    fields = MappingProxyType({"pixels": Field("uint8", PIXELS, per="row"), "labels": Field(per="row", pad_value=-100)})
    max_tokens: int | None = 10**6

    def sequence_lengths(self, n_tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return np.full(len(n_tokens), 5)

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> dict[str, Any]:
        pixels = np.frombuffer(chunk.files["raw"], np.uint8).reshape(PIXELS)
        return {"pixels": pixels, "labels": int(chunk.files["cls"])}


def vectors(number: int) -> np.ndarray:
    return np.full((1 + number % 8, WIDTH), number + 0.25, np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Samples with vectors, an image and a class, in frames of a few."""
    with ShardWriter(tmp_path / "kinds", tokenizer_hash="none", token_dtype="uint16", frame_bytes=60_000) as out:
        for number in range(40):
            members = {
                "f32": vectors(number).tobytes(),
                "raw": np.full(PIXELS, number, np.uint8).tobytes(),
                "cls": b"%d" % (number % 5),
            }
            tokens = np.zeros(len(vectors(number)), np.uint16)  # the index tells from these how many there are
            out.add(f"{number:03d}", tokens, "made", 0, members)
        out.finish({})
    return tmp_path / "kinds"


def test_vectors_are_packed_with_their_documents(folder: Path) -> None:
    rows = pack_dataset(Corpus.open(folder), Vectors(), sequence_length=16, seed=3, streams=4)
    documents = []
    for position in range(len(rows)):
        row = rows.read_row(position)
        assert row["vectors"].dtype == np.float32
        assert row["vectors"].shape == (16, WIDTH)
        assert (row["marks"].dtype, row["order"].dtype) == (np.uint8, np.int64)
        padding = row["documents"] < 0
        assert (row["vectors"][padding] == 0).all()
        assert (row["marks"][padding] == 9).all()
        assert (row["order"][padding] == -1).all()
        assert (row["order"][~padding] == row["positions"][~padding]).all()
        for document in range(row["documents"].max() + 1):
            vectors_of_document = row["vectors"][row["documents"] == document]
            number = int(vectors_of_document[0, 0])
            np.testing.assert_array_equal(vectors_of_document, vectors(number))
            assert (row["marks"][row["documents"] == document] == number % 7).all()
            documents.append(number)
    assert sorted(documents) == list(range(40))
    assert len(rows) < 20, "several share a row"


def test_images_and_labels_have_separate_rows(folder: Path) -> None:
    rows = pack_dataset(Corpus.open(folder), Images(), sequence_length=5, seed=3)
    assert len(rows) == 40
    batch = rows.read_rows([*range(40), None])
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((41, *PIXELS), np.uint8)
    assert (batch["labels"].shape, batch["labels"].dtype) == ((41,), np.int64)
    numbers = batch["pixels"][:40, 0, 0, 0]
    assert sorted(numbers) == list(range(40))
    assert (batch["labels"][:40] == numbers % 5).all()
    assert (batch["labels"][40], batch["pixels"][40].max(), batch["documents"][40].max()) == (-100, 0, -1)
    assert (batch["positions"][:40] == np.arange(5)).all()


@pytest.mark.parametrize("kind", [Vectors, Images])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_batches_are_the_same_however_they_are_read(folder: Path, kind: type, workers: int) -> None:

    def rows() -> PackedDataset:
        return pack_dataset(Corpus.open(folder), kind(), sequence_length=16, seed=3, streams=4)

    def read(source: Any, rank: int = 0, ranks: int = 1) -> list[dict[str, np.ndarray]]:
        with DataLoader(
            source, global_batch=4, micro_batch=2, data_rank=DataRank(rank, ranks), end_position=7, workers=workers
        ) as loader:
            return [batch for step in loader for batch in step]

    full, halves = read(rows()), [read(rows(), rank, 2) for rank in range(2)]
    for number, batch in enumerate(full):
        assert_same_fields(batch, halves[number % 2][number // 2])
    mixture = Mixture({"a": rows(), "b": rows()}, [Phase(0, {"a": 1, "b": 2})], seed=1, streams=4)
    mixed = mixture.read_rows([*range(9), None])
    for position in range(9):
        name, at = mixture.find_source(position)
        expected = mixture.sources[name].read_rows([at])
        assert_same_fields({name: mixed[name][position : position + 1] for name in expected}, expected)


def test_quarantined_samples_are_padding(folder: Path) -> None:
    corpus = Corpus.open(folder)
    for kind, empty in ((Vectors, {"vectors": 0}), (Images, {"pixels": 0, "labels": -100})):
        rows = pack_dataset(corpus, kind(), sequence_length=16, seed=3, shuffle=False)
        left_out = Quarantine.parse(["2"], 40)
        without = pack_dataset(corpus, kind(), sequence_length=16, seed=3, shuffle=False, quarantine=left_out)
        changed = 0
        for position in range(len(rows)):
            row, blank = rows.read_row(position), without.read_row(position)
            removed = (row["documents"] >= 0) & (blank["documents"] < 0)
            changed += int(removed.any())
            for name, fill in empty.items():
                of_row = kind.fields[name].per == "row"
                if of_row:
                    assert (blank[name] == fill).all() or not removed.any()
                else:
                    assert (blank[name][removed] == fill).all()
        assert changed == 1


def test_a_word_that_is_not_kept_is_named(folder: Path) -> None:
    def dataset_with(**change: Any) -> Callable[[], Any]:
        kind = type("Broken", (Vectors,), change)
        return lambda: pack_dataset(Corpus.open(folder), kind(), sequence_length=16, seed=3).read_row(0)

    def doubled(self: Any, chunk: DocumentChunk, key: ChunkKey) -> dict[str, Any]:
        return {
            name: values.astype(float) if name == "vectors" else values
            for name, values in Vectors.build_example(self, chunk, key).items()
        }

    def short(self: Any, chunk: DocumentChunk, key: ChunkKey) -> dict[str, Any]:
        return {"vectors": Vectors.build_example(self, chunk, key)["vectors"]}

    for broken, message in (
        (dataset_with(build_example=doubled), r"sample \d+ with 'vectors' = float64 .* say float32 \[n, 3\]"),
        (dataset_with(build_example=short),
         r"with fields \['vectors'\], but its `fields` are \['marks', 'order', 'vectors'\]"),
        (dataset_with(fields={"labels": Field(per="row")}, max_tokens=None),
         "can't be cut at row ends: give it max_tokens"),
    ):  # fmt: skip
        with pytest.raises(MegatfmError, match=message):
            broken()
