"""Tars of images as webdataset, img2dataset and timm write them, read in place: files, classes, order, and damage."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from megatfm.config import ImageClassificationObjective, ImagesConfig, ModelConfig
from megatfm.corpus import webdataset_index
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.export import export_corpus
from megatfm.corpus.images import ImageColumns
from megatfm.corpus.inspect import check_corpus, describe_corpus
from megatfm.corpus.webdataset_images import LabelRule, index_images, read_class_names
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import MegatfmError, UsageError
from megatfm.objectives import build_objective
from tests.support.files import flip_bit
from tests.support.images import encode_noise
from tests.support.packed_corpora import pack_dataset, read_global_batches
from tests.support.webdatasets import make_member, make_tar, pack_tar

SIZES = [(8 + number % 3, 12 - number % 4) for number in range(23)]
NAMES = ["Ärmel", "猫", "zebra"]
MODEL = ModelConfig.from_dotted(
    {
        "family": "encoder", "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8,
        "embedding.name": "patches", "embedding.patch_size": 4, "lm_head.name": "none",
        "extra_heads.classifier": {"n_classes": 10},
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of one to three samples."""
    monkeypatch.setattr(webdataset_index, "FRAME_BYTES", 5000)


def picture(number: int, format_: str = "PNG") -> bytes:
    return encode_noise(*SIZES[number % 23], seed=number, format_=format_)


def timm(folder: Path) -> list[dict[str, bytes]]:
    """Two shards with .cls and .json beside a JPEG, keys in folders, as timm's ImageNet; returns what they hold."""
    folder.mkdir()
    written = []
    for shard, numbers in enumerate((range(14), range(14, 23))):
        with wds.TarWriter(str(folder / f"imagenet1k-train-{shard:04d}.tar")) as writer:
            for n in numbers:
                files = {"jpg": picture(n, "JPEG"), "cls": b"%d" % (n % 10), "json": b'{"label": %d}' % (n % 10)}
                writer.write({"__key__": f"n{n % 3:03d}/im.{n}".replace(".", "_"), **files})
                written.append(files)
    return written


def test_indexed_shards_are_exported_with_sizes(tmp_path: Path) -> None:
    """To one tar: their keys, numbers of samples of a shard where names have folders, repeat."""
    written = timm(tmp_path / "timm")
    index_images(tmp_path / "timm", LabelRule.parse("json:label"))
    export_corpus(tmp_path / "timm", tmp_path / "tars", None)
    corpus = Corpus.open(tmp_path / "tars")
    samples = [sample for block in range(corpus.n_blocks) for sample in corpus.read_block_samples(block)]
    assert [dict(sample.members) for sample in samples] == written
    assert len({sample.key for sample in samples}) == len(written)
    assert len(corpus.manifest.shards) == 1
    sizes = ImageColumns(corpus, 0, corpus.n_blocks).image_sizes
    assert sizes.tolist() == [list(SIZES[number]) for number in range(23)]


def test_labels_may_have_halves_of_surrogate_pairs(tmp_path: Path) -> None:
    files = {
        f"{n}.{kind}": data
        for n in range(4)
        for kind, data in (("png", picture(n)), ("json", b'{"a":"\\ud800%d"}' % n))
    }
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "a.tar").write_bytes(pack_tar(files))
    manifest = index_images(tmp_path / "tars", LabelRule.parse("json:a")).manifest
    assert manifest.class_names == [f"\\ud800{number}" for number in range(4)]
    assert labels_of(Corpus.open(tmp_path / "tars")) == [0, 1, 2, 3]


def test_numbers_of_images_are_exported(tmp_path: Path) -> None:
    """A row's length follows from them."""
    with ShardWriter(tmp_path / "corpus", tokenizer_hash="t", token_dtype="uint16") as writer:
        for n_images in (1, 3, 2):
            files = {f"{number}.png": picture(number) for number in range(n_images)}
            writer.add(f"{n_images}", np.arange(4), "made", 0, files)
        writer.finish({})
    export_corpus(tmp_path / "corpus", tmp_path / "tars", None)
    corpus = Corpus.open(tmp_path / "tars")
    assert ImageColumns(corpus, 0, corpus.n_blocks).image_counts.tolist() == [1, 3, 2]


def img2dataset(folder: Path) -> None:
    """One shard with caption and metadata beside each image."""
    folder.mkdir()
    with wds.TarWriter(str(folder / "00000.tar")) as writer:
        for n in range(23):
            label = {"caption": f"a {n}", "meta": {"label": NAMES[n % 3]}}
            sample = {
                "webp": picture(n, "WEBP"), "txt": NAMES[n % 3], "json": label, "thumb.npy": np.zeros(3),
            }  # fmt: skip
            writer.write({"__key__": f"{n:09d}", **sample})


def labels_of(corpus: Corpus) -> list[int]:
    return [int(corpus.read_sample(number).members["cls"]) for number in range(corpus.n_samples)]


def test_timm_shards_are_read_where_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    written = timm(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "2 shards with 23 samples" in str(index_images(folder, LabelRule()))
    assert {name: (folder / name).read_bytes() for name in before} == before
    corpus = Corpus.open(folder)
    assert corpus.n_blocks > 5
    for number, files in enumerate(written):
        sample = corpus.read_sample(number)
        assert dict(sample.members) == files
        assert len(sample.tokens) == 0
    assert corpus.read_sample(4).source == "imagenet1k-train-0000.tar/n001/im_4"
    np.testing.assert_array_equal(ImageColumns(corpus, 0, corpus.n_blocks).image_sizes, SIZES)
    assert check_corpus(folder).samples == 23
    assert "23" in describe_corpus(folder)
    with pytest.raises(UsageError, match="so it is indexed"):
        index_images(folder, LabelRule())


@pytest.mark.parametrize("rule", ["json:meta.label", "txt"])
def test_classes_from_json_or_text(rule: str, tmp_path: Path) -> None:
    """Alphabetical order by code points, or that of a file; members of other kinds are left alone."""
    img2dataset(tmp_path / "theirs")
    manifest = index_images(tmp_path / "theirs", LabelRule.parse(rule)).manifest
    assert manifest.provenance["classes"] == sorted(NAMES)
    numbers = {name: number for number, name in enumerate(sorted(NAMES))}
    corpus = Corpus.open(tmp_path / "theirs")
    assert labels_of(corpus) == [numbers[NAMES[n % 3]] for n in range(23)]
    assert set(corpus.read_sample(3).members) == {"webp", "txt", "json", "cls"}
    lines = describe_corpus(tmp_path / "theirs").splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert facts["classes"] == f"3 ({', '.join(sorted(NAMES))})"
    assert not {"tokens", "text", "tokenizer"} & facts.keys(), "images alone have none"
    displayed = describe_corpus(tmp_path / "theirs", 4)
    assert f"\nclass   {numbers[NAMES[1]]} ({NAMES[1]})\n" in displayed
    assert ".cls    1 byte" in displayed.splitlines()
    assert "of text" not in displayed
    (tmp_path / "classes").write_text("\n".join(NAMES))
    img2dataset(tmp_path / "others")
    other = index_images(tmp_path / "others", LabelRule.parse(rule), tmp_path / "classes").manifest
    assert labels_of(Corpus.open(tmp_path / "others")) == [n % 3 for n in range(23)]
    assert other.fingerprint != manifest.fingerprint, "the same files with other classes are another corpus"


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_of_indexed_shards_has_each_image_once(ranks: int, tmp_path: Path) -> None:
    timm(tmp_path / "theirs")
    index_images(tmp_path / "theirs", LabelRule())
    images = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0, "transforms": ["random_resized_crop"]})
    objective = build_objective(ImageClassificationObjective(), MODEL, None, (5,), images)
    rows = pack_dataset(Corpus.open(tmp_path / "theirs"), objective, sequence_length=5, seed=3)
    (batch,) = read_global_batches(rows, ranks, steps=1, global_batch=30)
    assert sorted(batch["labels"][:23, 0]) == sorted(n % 10 for n in range(23))
    assert batch["patches"].shape == (30, 5, 48)


IMAGE, CLASS = picture(0), b"1"
GOOD = (make_member("a.png", IMAGE), make_member("a.cls", CLASS))
ENEMIES: dict[str, tuple[bytes, str]] = {
    "two images": (make_tar(*GOOD, make_member("a.jpg", picture(1, "JPEG"))), "sample 'a' has 2 images"),
    "no image": (make_tar(*GOOD, make_member("b.cls", CLASS)), r"sample 'b' has 0 images \(files: .cls\)"),
    "the same name twice": (make_tar(*GOOD, make_member("a.PNG", IMAGE)), "'a.PNG' at byte .* is there twice"),
    "the same key again": (make_tar(*GOOD, make_member("b.png", IMAGE), *GOOD), "sample 'a' is there twice"),
    "no header": (make_tar(make_member("x.png", b"no picture")), "sample 'x' has an image whose header can't be read"),
    "another format": (make_tar(make_member("x.jpg", IMAGE)), "sample 'x' has an image whose header can't be read"),
    "a link": (make_tar(*GOOD, make_member("b.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "is a link"),
    "a way out": (make_tar(make_member("../a.png", IMAGE)), "leads out of the folder"),
    "a pickle": (make_tar(*GOOD, make_member("a.pkl", b"x")), "is a pickle"),
    "cut off": (make_tar(*GOOD)[:700], "not a whole tar|is cut off"),
    "no end": (make_tar(*GOOD)[:-1024], "no mark of a tar's end"),
    "two tars": (make_tar(*GOOD) + make_tar(make_member("b.png", IMAGE)), "data follows its end"),
    "nothing": (make_tar(), "holds no samples"),
    "words as classes": (make_tar(GOOD[0], make_member("a.cls", b"cat")), "its .cls says 'cat', no number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENEMIES)
def test_tars_that_are_refused(kind: str, tmp_path: Path) -> None:
    data, message = ENEMIES[kind]
    (tmp_path / "bad.tar").write_bytes(data)
    with pytest.raises(MegatfmError, match=message) as caught:
        index_images(tmp_path, LabelRule())
    assert "bad.tar" in str(caught.value)
    assert not (tmp_path / "manifest.json").exists()


def test_labels_that_are_missing_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(make_tar(*GOOD, make_member("a.json", json.dumps({"label": ["no"]}).encode())))
    for rule, place in (("txt", "its .txt"), ("json:label", "the field 'label'"), ("json:a.b", "the field 'a.b'")):
        with pytest.raises(UsageError, match=f"x.tar: sample 'a' has no label in {place}"):
            index_images(tmp_path, LabelRule.parse(rule))
    (tmp_path / "x.tar").write_bytes(make_tar(*GOOD, make_member("a.txt", b"dog")))
    (tmp_path / "classes").write_text("\ufeffdog\ncat\n")  # as some editors begin a file
    assert read_class_names(tmp_path / "classes", "--classes") == ["dog", "cat"]
    (tmp_path / "classes").write_text("cat\n")
    with pytest.raises(UsageError, match="the label 'dog', which is none of the 1"):
        index_images(tmp_path, LabelRule("txt"), tmp_path / "classes")
    for text in ("json", "json:", "folder", ""):
        with pytest.raises(UsageError, match="choose cls, txt or json:FIELD"):
            LabelRule.parse(text)


@pytest.mark.parametrize("rule", ["txt", "json:caption"])
def test_captions_are_no_classes(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.corpus.webdataset_images.MAX_UNIQUE_LABELS", 10)

    def write(folder: Path, captions: list[str]) -> Path:
        folder.mkdir()
        members = [
            make_member(f"{number:03d}.{extension}", data)
            for number, caption in enumerate(captions)
            for extension, data in (
                ("png", IMAGE),
                ("txt", caption.encode()),
                ("json", json.dumps({"caption": caption}).encode()),
            )
        ]
        (folder / "x.tar").write_bytes(make_tar(*members))
        return folder

    captions = [f"a cat of {number} years" for number in range(20)]
    mixed = write(tmp_path / "mixed", [*captions[:19], captions[0]])
    with pytest.raises(UsageError, match=rf"sample '000': --labels {rule}: nearly every .* \(19 labels of 20 images\)"):
        index_images(mixed, LabelRule.parse(rule))
    assert not (mixed / "manifest.json").exists()
    (tmp_path / "classes").write_text("\n".join(captions))
    index_images(mixed, LabelRule.parse(rule), tmp_path / "classes")
    few = write(tmp_path / "few", captions[:10] * 2)
    assert len(index_images(few, LabelRule.parse(rule)).manifest.provenance["classes"]) == 10


def test_long_names_and_links_beside(tmp_path: Path) -> None:
    """Names in extended headers; an empty shard beside a good one is refused by name."""
    long = "ordner/" + "ü" * 120
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for n in range(3):
            for extension, data in (("png", picture(n)), ("cls", b"%d" % n)):
                info, _ = make_member(f"{long}{n}.{extension}", data)
                archive.addfile(info, io.BytesIO(data))
    (tmp_path / "long.tar").write_bytes(out.getvalue())
    index_images(tmp_path, LabelRule())
    corpus = Corpus.open(tmp_path)
    assert labels_of(corpus) == [0, 1, 2]
    assert corpus.read_sample(2).members["png"] == picture(2)


def test_a_bit_that_flips_later_is_named(tmp_path: Path) -> None:
    timm(tmp_path / "theirs")
    index_images(tmp_path / "theirs", LabelRule())
    path = tmp_path / "theirs" / "imagenet1k-train-0001.tar"
    flip_bit(path, 3000)
    corpus = Corpus.open(tmp_path / "theirs")
    corpus.read_sample(0)
    with pytest.raises(MegatfmError, match=r"imagenet1k-train-0001.tar: samples 14 to .* its hash is not the"):
        corpus.read_sample(14)


class CountedName(str):
    """A class name that counts its comparisons."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_a_class_is_found_without_comparing_all_names() -> None:
    names = [CountedName(f"class {number}") for number in range(1000)]
    rule = LabelRule("txt", names=names)
    assert rule.apply({"txt": b"class 998", "jpg": b""}) == {"txt": b"class 998", "jpg": b"", "cls": b"998"}
    assert rule.apply({"txt": b"another", "cls": b"1"}) == {"txt": b"another"}
    assert CountedName.comparisons < 10
