"""Samples of several images in a text: planned from the index, the same on any ranks and after a resume."""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from megatfm import data_prep
from megatfm.config import ContrastiveObjective, ImagesConfig, ImageToTextObjective, ModelConfig
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.images import ImageColumns
from megatfm.corpus.writer import ShardWriter
from megatfm.data.contact_sheet import iter_captioned_images
from megatfm.data.dataset import RowDataset
from megatfm.data.documents import Quarantine
from megatfm.data.sequences import DocumentChunk
from megatfm.errors import MegatfmError, UsageError
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey
from tests.support.image_text_models import IMAGE_TOKEN, LLAVA, TOWERS, VOCABULARY
from tests.support.images import encode_image, encode_noise
from tests.support.packed_corpora import assert_same_fields, pack_dataset, read_global_batches, read_row
from tests.support.prep_files import write_file
from tests.support.webdatasets import pack_tar

BOS, EOS, IMG, PATCHES, BATCH = 1, 2, IMAGE_TOKEN, 4, 12
ROWS = (24, 40)
N_SAMPLES = 40


def png(value: int) -> bytes:
    """An image of 8 × 8 pixels of one colour."""
    return encode_image(Image.new("RGB", (8, 8), (value, value, value)))


def n_images_of(number: int) -> int:
    return (1, 3, 2, 1, 4)[number % 5]


def text_of(number: int) -> list[int]:
    """Images between words of one id."""
    word = 8 + number % 40
    parts = [[word] * ((number + place) % 3) + [IMG] for place in range(n_images_of(number))]
    return [*chain(*parts), word]


def files_of(number: int) -> dict[str, bytes]:
    """Images whose colour tells sample and place; stored last first."""
    if n_images_of(number) == 1:
        return {"png": png(6 * number)}
    return {f"{place}.png": png(6 * number + place) for place in reversed(range(n_images_of(number)))}


def write(folder: Path, only: range = range(N_SAMPLES), changes: dict[int, list[int]] | None = None) -> Corpus:
    sizes = {"frame_bytes": 2**13, "shard_bytes": 2**15}
    with ShardWriter(folder, tokenizer_hash="none", token_dtype="uint16", **sizes) as writer:
        for number in only:
            files, text = files_of(number), (changes or {}).get(number, text_of(number))
            writer.add(f"{number:06d}", np.array(text, np.uint16), "made", len(text), files)
        writer.finish({})
    return Corpus.open(folder)


def objective(**options: Any) -> Objective:
    special = SpecialTokens(bos=BOS, eos=EOS, pad=0, vocab_size=VOCABULARY)
    section = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0, "transforms": options.pop("transforms", [])})
    config = ImageToTextObjective(image_placement="in_text", **options)
    return build_objective(config, ModelConfig.from_dotted(LLAVA), special, ROWS, section)


def rows_of(corpus: Corpus, result: Objective, **options: Any) -> RowDataset:
    lengths = {"sequence_length": ROWS[0], "target_length": ROWS[1]}
    return pack_dataset(corpus, result, seed=3, streams=6, **lengths, **options)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write(tmp_path_factory.mktemp("several"))


def samples_in(row: dict[str, NDArray[Any]]) -> list[int]:
    """The numbers of a row's samples, whose tokens, targets and patches are compared with those written out by hand."""
    numbers, colours, n_documents = [], row["encoder_patches"][:, 0], int(row["documents"].max()) + 1
    image_document = 0
    for document in range(n_documents):
        at = row["documents"] == document
        tokens = row["tokens"][at].tolist()
        first = row["encoder_documents"] == image_document
        number = int(colours[first][1]) // 6
        expected = [BOS]
        for token in text_of(number):
            expected += [IMG] * PATCHES if token == IMG else [token]
        assert tokens == expected
        following = [*expected[1:], EOS]
        assert row["targets"][at].tolist() == [-100 if token == IMG else token for token in following]
        assert row["positions"][at].tolist() == [*range(len(tokens))]
        for place in range(n_images_of(number)):
            image = row["encoder_documents"] == image_document
            assert row["encoder_positions"][image].tolist() == [0, 1, 2, 3, 4]
            assert colours[image].tolist() == [0, *[6 * number + place] * PATCHES]
            image_document += 1
        numbers.append(number)
    assert image_document == row["encoder_documents"].max() + 1
    return numbers


def test_each_image_stands_where_its_text_says(corpus: Corpus) -> None:
    columns = ImageColumns(corpus, 0, corpus.n_blocks)
    assert columns.image_counts.tolist() == [n_images_of(number) for number in range(N_SAMPLES)]
    assert len(corpus.manifest.shards) > 1
    rows = rows_of(corpus, objective())
    numbers = [samples_in(read_row(rows, position)) for position in range(len(rows))]  # type: ignore[arg-type]
    assert sorted(chain(*numbers)) == [*range(N_SAMPLES)]
    assert max(map(len, numbers)) > 1


def test_the_log_says_how_many_texts_lose_their_end(tmp_path: Path) -> None:
    """A row holds 40 tokens: the begin token, four patches an image, and words."""
    texts = {5: [IMG] + [9] * 60, 6: [IMG] * 3 + [9] * 27, 11: [IMG] * 3 + [9] * 28}
    (note,) = (note for note in rows_of(write(tmp_path, changes=texts), objective()).warnings if "truncated" in note)
    assert note.startswith(f"{tmp_path}: 2 of 40 texts are truncated at data.target_length = 40,")
    notes = rows_of(write(tmp_path / "whole"), objective()).warnings
    assert not any("truncated" in note for note in notes)
    reason, keys = "images and texts don't fill their rows alike", "data.sequence_length, data.target_length"
    assert any(note.endswith(f"{reason}: choose other lengths ({keys})") for note in notes)


batches = partial(read_global_batches, global_batch=BATCH)


def test_pictures_of_rows_have_their_own_texts(corpus: Corpus) -> None:
    rows = rows_of(corpus, objective(), quarantine=Quarantine.parse(("3", "20-22"), N_SAMPLES))
    count = 0
    for position in range(len(rows)):  # type: ignore[arg-type]
        for picture in iter_captioned_images(rows.read_rows([position]), 4, decode=str, image_token=IMG):
            number = int(picture.pixels[0, 0, 0]) // 6
            assert str(8 + number % 40) in picture.caption
            assert picture.caption.count(str(IMG)) == PATCHES * n_images_of(number)
            count += 1
    assert count == sum(n_images_of(number) for number in range(N_SAMPLES) if number not in (3, 20, 21, 22))


def test_ranks_and_resumes_give_the_same_rows(corpus: Corpus) -> None:
    flips = objective(transforms=["random_resized_crop", "color_jitter"])
    expected = batches(rows_of(corpus, flips), 1, 4)
    for ranks in (2, 3):
        for batch, expected_batch in zip(batches(rows_of(corpus, flips), ranks, 4), expected, strict=True):
            assert_same_fields(batch, expected_batch)
    for step in (1, 3):
        (batch,) = batches(rows_of(corpus, flips), 3, 1, position=step * BATCH)
        assert_same_fields(batch, expected[step])


def test_images_of_a_sample_are_augmented_apart() -> None:
    noise = encode_noise(20, 20)
    chunk = DocumentChunk(np.array([IMG, IMG]), files={"0.png": noise, "1.png": noise})
    crops = objective(transforms=["random_resized_crop"])
    patches = crops.build_example(chunk, ChunkKey(0, 0, 0, 0))["encoder_patches"]
    alone = DocumentChunk(np.array([IMG]), files={"png": noise})
    first = crops.build_example(alone, ChunkKey(0, 0, 0, 0))["encoder_patches"]
    assert (patches[:5] == first).all()
    assert (patches[5:] != first).any()


def test_bad_numbers_are_refused_by_sample(tmp_path: Path) -> None:
    changes = {7: [9, IMG, 9]}
    broken = write(tmp_path / "broken", changes=changes)
    message = r"sample 7 \(key 000007.* names its images 1 times \(token 55\).*'in_text' wants 2, for 2 images.*\"7\""
    with pytest.raises(MegatfmError, match=message):
        batches(rows_of(broken, objective()), 1, 1)
    quarantined = rows_of(broken, objective(), quarantine=Quarantine.parse(("7",), N_SAMPLES))
    samples: list[int] = []  # but sample 0, which is black
    for position in range(len(quarantined)):  # type: ignore[arg-type]
        row = read_row(quarantined, position)
        blank = row["documents"] < 0
        assert (row["targets"][blank] == -100).all()
        patches = row["encoder_patches"][row["encoder_documents"] >= 0, 0]
        samples += sorted({int(value) // 6 for value in patches if value})
    assert sorted(samples) == [number for number in range(1, N_SAMPLES) if number != 7]


def test_too_many_images_are_refused_by_sample(tmp_path: Path) -> None:
    few = write(tmp_path / "few", only=range(4, 5))  # four images of five tokens
    section = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0})
    special = SpecialTokens(bos=BOS, eos=EOS, pad=0, vocab_size=VOCABULARY)
    config = ImageToTextObjective(image_placement="in_text")
    for lengths, message in {
        (16, 40): "sample 0 .* has 4 images of 5 tokens, and their row has 16: choose data.sequence_length=20",
        (24, 18): "sample 0 .* has 1[0-9] tokens before its last image of 4 patches, and a row has 18",
    }.items():
        short = build_objective(config, ModelConfig.from_dotted(LLAVA), special, lengths, section)
        rows = pack_dataset(few, short, sequence_length=lengths[0], target_length=lengths[1], seed=0)
        with pytest.raises(MegatfmError, match=message):
            rows.read_rows([0])


def test_an_objective_of_one_image_refuses_several(corpus: Corpus, tmp_path: Path) -> None:
    model = ModelConfig.from_dotted(TOWERS)
    special = SpecialTokens(bos=BOS, eos=EOS, pad=0, vocab_size=VOCABULARY)
    section = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0})
    contrastive = build_objective(ContrastiveObjective(), model, special, ROWS, section)
    with pytest.raises(MegatfmError, match=r"has 3 images \(\.2\.png, \.1\.png, \.0\.png\), not one"):
        batches(rows_of(corpus, contrastive), 1, 2)
    with pytest.raises(UsageError, match=r"has samples of several images, and data\.images\.max_patches takes one"):
        _ = ImageColumns(corpus, 0, corpus.n_blocks).image_sizes


def prepare(folder: Path, files: dict[str, bytes], *, is_tar: bool) -> Corpus:
    for name, data in ({"all.tar": pack_tar(files)} if is_tar else files).items():
        write_file(folder / "in" / name, data)
    read = {"folder": str(folder / "in"), "format": "images"}
    data_prep.run(PrepConfig.model_validate({"out": str(folder / "out"), "read": read, "split": {"validation": 0.0}}))
    return Corpus.open(folder / "out/train")


def test_prep_takes_numbered_images_of_a_tar(tmp_path: Path) -> None:
    members = {f"a.{place}.png": png(place) for place in (10, 2, 0)} | {"b.png": png(9), "b.txt": b"one"}
    prepared = prepare(tmp_path, members, is_tar=True)
    assert sorted(ImageColumns(prepared, 0, prepared.n_blocks).image_counts.tolist()) == [1, 3]
    samples = {sample.source[-1]: dict(sample.members) for sample in map(prepared.read_sample, range(2))}
    assert samples == {
        "a": {"0.png": png(0), "2.png": png(2), "10.png": png(10)}, "b": {"png": png(9), "txt": b"one"},
    }  # fmt: skip
    assert list(samples["a"]) == ["0.png", "2.png", "10.png"]


def test_prep_takes_numbered_images_of_a_folder(tmp_path: Path) -> None:
    """Images with a common text are one sample; others, without text or each with its own, are samples of one image."""
    files = {f"set/a.{place}.png": png(place) for place in (10, 2, 0)} | {"set/a.txt": b"three"}
    files |= {"b.0.png": png(3), "b.1.PNG": png(4), "b.json": b'{"text": "two"}'}
    files |= {"cat.0.png": png(5), "cat.1.png": png(6)}  # as in Kaggle's "Dogs vs. Cats"
    files |= {"d.0.png": png(7), "d.0.txt": b"own", "e.png": png(8), "e.txt": b"one", "e.0.png": png(9)}
    prepared = prepare(tmp_path, files, is_tar=False)
    samples = [prepared.read_sample(number) for number in range(prepared.n_samples)]
    images = {sample.source: {name: dict(sample.members)[name] for name in sample.members} for sample in samples}
    assert images == {
        "set/a.0.png": {"0.png": png(0), "2.png": png(2), "10.png": png(10), "txt": b"three"},
        "b.0.png": {"0.png": png(3), "1.png": png(4), "json": b'{"text": "two"}'},
        "cat.0.png": {"png": png(5)},
        "cat.1.png": {"png": png(6)},
        "d.0.png": {"png": png(7), "txt": b"own"},
        "e.png": {"png": png(8), "txt": b"one"},
        "e.0.png": {"png": png(9)},
    }
    counts = ImageColumns(prepared, 0, prepared.n_blocks).image_counts.tolist()
    assert sorted(counts) == [1, 1, 1, 1, 1, 2, 3]


TWICE, CUT = {"a.1.png": png(0), "a.1.jpg": png(1)}, {"a.0.png": png(0), "a.1.png": png(1)[:-20]}


@pytest.mark.parametrize(("is_tar", "files", "reason"), [
    (True, {"a.png": png(0), "a.1.png": png(1)}, r"has several images without numbers: \.png and \.1\.png"),
    (True, TWICE, r"has two images of one number: \.1\.png and \.1\.jpg"),
    (True, CUT, r"has a \.1\.png that is no whole PNG"),
    (True, {"a.65.png": png(0)}, r"has a member that is neither an image nor .*: a\.65\.png"),
    (False, {"a.65.png": png(0)}, r"has an image whose number is not 0 to 64 .*: \.65\.png"),
    (False, {"a.01.png": png(0)}, r"has an image whose number .* leading zeros: \.01\.png"),
    (False, TWICE, r"has two images of one number: \.1\.jpg and \.1\.png"),
    (False, CUT, r"has a \.1\.png that is no whole PNG"),
])  # fmt: skip
def test_prep_refuses_images_by_name(tmp_path: Path, is_tar: bool, files: dict[str, bytes], reason: str) -> None:
    with pytest.raises(MegatfmError, match=f"a.*{reason}"):
        prepare(tmp_path, files if is_tar else {**files, "a.txt": b"text"}, is_tar=is_tar)
