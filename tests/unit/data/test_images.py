"""Images from shards to batches: the same on any ranks, after a resume, in mixtures; mixed with partners by pixel."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatfm.config import ImagesConfig, ModelConfig
from megatfm.config.objective import ImageClassificationObjective
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.images import ImageColumns
from megatfm.corpus.writer import ShardWriter
from megatfm.data.contact_sheet import draw_contact_sheet, iter_captioned_images
from megatfm.data.dataset import RowDataset
from megatfm.data.documents import Quarantine
from megatfm.data.image_mixing import MixedImages
from megatfm.data.mixture import Mixture, Phase, make_source_seed
from megatfm.errors import MegatfmError, UsageError
from megatfm.objectives import Objective, build_objective
from tests.support.images import encode_noise
from tests.support.packed_corpora import assert_same_fields, pack_dataset, read_global_batches, read_row

SIZE, PATCH, TOKENS, BATCH = 8, 4, 5, 30
TRANSFORMS = [
    "random_resized_crop", "horizontal_flip", {"name": "color_jitter", "hue": 0.1}, "random_erasing",
]  # fmt: skip
TRANSFORMS += ["rand_augment"]


def objective(row: int = TOKENS, **images: Any) -> Objective:
    model = ModelConfig.from_dotted(
        {
            "family": "encoder", "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8,
            "embedding.name": "patches", "embedding.patch_size": PATCH, "lm_head.name": "none",
            "extra_heads.classifier": {"n_classes": 100},
        }
    )  # fmt: skip
    section = ImagesConfig.model_validate({"size": SIZE, "transforms": TRANSFORMS, **images})
    return build_objective(ImageClassificationObjective(), model, None, (row,), section)


def write(folder: Path, n: int, *, first: int = 0, damaged: int | None = None) -> Corpus:
    with ShardWriter(folder, tokenizer_hash="none", token_dtype="uint16", frame_bytes=2**13) as writer:
        for number in range(first, first + n):
            data = encode_noise(10 + number % 5, 9, seed=number)
            files = {"png": data if number != damaged else data[:-60], "cls": b"%d" % (number % 100)}
            writer.add(f"{number:06d}", np.zeros(0, np.uint16), "made", 0, files)
        writer.finish({})
    return Corpus.open(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write(tmp_path_factory.mktemp("images"), 70)


def rows_of(corpus: Corpus, result: Objective, **options: Any) -> RowDataset:
    return pack_dataset(corpus, result, sequence_length=options.pop("row", TOKENS), seed=3, streams=10, **options)


batches = partial(read_global_batches, global_batch=BATCH)


@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.9}])
def test_every_number_of_ranks_and_every_resume_gives_the_same_pixels(corpus: Corpus, mixed: Any) -> None:
    result = objective(**mixed)
    expected = batches(result.prepare_rows(rows_of(corpus, result), 1), 1, 4)
    for ranks in (3, 5):
        again = batches(result.prepare_rows(rows_of(corpus, result), 1), ranks, 4)
        for batch, expected_batch in zip(again, expected, strict=True):
            assert_same_fields(batch, expected_batch)
    for step in (1, 3):  # step 3 is in the second epoch
        (batch,) = batches(result.prepare_rows(rows_of(corpus, result), 1), 3, 1, position=step * BATCH)
        assert_same_fields(batch, expected[step])


@pytest.mark.slow
def test_worker_processes_give_the_same_pixels(corpus: Corpus) -> None:
    result = objective(mixup=0.8)
    rows = result.prepare_rows(rows_of(corpus, result), 1)
    for batch, expected in zip(batches(rows, 1, 2, workers=2), batches(rows, 1, 2), strict=True):
        assert_same_fields(batch, expected)


def test_epochs_differ_and_evaluation_does_not(corpus: Corpus) -> None:
    result = objective()
    pixels: dict[int, list[bytes]] = {}
    rows = rows_of(corpus, result)
    for position in range(140):
        row = rows.read_rows([position])
        pixels.setdefault(int(row["labels"][0, 0]), []).append(row["patches"].tobytes())
    assert sorted(pixels) == list(range(70))
    assert all(len(pixel) == 2 and pixel[0] != pixel[1] for pixel in pixels.values())
    still = rows_of(corpus, result.for_evaluation(), shuffle=False)
    for position in range(70):
        first, second = (still.read_rows([at]) for at in (position, position + 70))
        assert first["labels"][0, 0] == position
        assert_same_fields(first, second)


def test_mixtures_of_image_corpora(corpus: Corpus, tmp_path: Path) -> None:
    """A class is balanced by a corpus of its own, with a weight."""
    rare = write(tmp_path / "rare", 7, first=90)
    result = objective(cutmix=1.0)
    sources = {
        name: pack_dataset(item, result, sequence_length=TOKENS, seed=make_source_seed(3, name), streams=5)
        for name, item in (("many", corpus), ("rare", rare))
    }
    mixture = Mixture(sources, [Phase(0, {"many": 0.5, "rare": 0.5})], seed=3, streams=5, block=10)
    (batch,) = batches(result.prepare_rows(mixture, 1), 1, 1)
    assert abs(int((batch["labels"][:, 0] >= 90).sum()) - BATCH // 2) <= 5
    (repeated,) = batches(result.prepare_rows(mixture, 1), 5, 1)
    assert_same_fields(repeated, batch)


def unpatched(patches: np.ndarray) -> np.ndarray:
    """Pixels [H, W, C] of patches [4, C · P · P], one by one."""
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    for n in range(4):
        for value, at in zip(patches[n], np.ndindex(3, PATCH, PATCH), strict=True):
            pixels[n // 2 * PATCH + at[1], n % 2 * PATCH + at[2], at[0]] = value
    return pixels


@pytest.mark.parametrize("turn", [1, 3])
def test_mixed_rows_are_weighted_sums_of_two_rows(corpus: Corpus, turn: int) -> None:
    result = objective(mixup=1.0)
    plain = rows_of(corpus, result)
    mixed = MixedImages(plain, result.mixing, turn)  # type: ignore[attr-defined]
    weights = []
    for position in range(24):
        turns, place = divmod(position, turn)
        partner = next(q for q in range(48) if q != position and (q // turn, q % turn) == (turns ^ 1, place))
        pairs = (plain, position), (plain, partner), (mixed, position)
        local, other, actual = (rows.read_rows([at]) for rows, at in pairs)
        weight = actual["label_weights"][0, 0]
        weights.append(weight)
        expected = local["patches"] * float(weight) + other["patches"] * (1 - float(weight))
        assert np.abs(actual["patches"] - expected).max() <= 0.51
        assert actual["labels"][0, 0] == local["labels"][0, 0]
        assert actual["mixed_labels"][0, 0] == other["labels"][0, 0]
        assert (actual["mixed_labels"][0, 1:] == -100).all()
        assert not actual["patches"][0, 0].any()
    assert len(set(weights)) == 24
    assert abs(np.mean(weights) - 0.5) < 0.2


def test_cutmix_pastes_one_rectangle_and_weighs_by_its_area(corpus: Corpus) -> None:
    result = objective(cutmix=1.0, transforms=[])
    plain = rows_of(corpus, result)
    mixed = result.prepare_rows(plain, 1)
    shares = []
    for position in range(40):
        pairs = (plain, position), (plain, position ^ 1), (mixed, position)
        local, other, actual = (rows.read_rows([at]) for rows, at in pairs)
        a, b, c = (unpatched(row["patches"][0, 1:]) for row in (local, other, actual))
        is_own, is_other = (c == a).all(-1), (c == b).all(-1)
        assert (is_own | is_other).all()
        ys, xs = np.nonzero(~is_own)
        share = 1 - actual["label_weights"][0, 0]
        if len(ys):
            box = np.s_[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
            assert is_other[box].all()
            assert share * SIZE**2 == pytest.approx(c[box].shape[0] * c[box].shape[1])
        else:
            assert share == pytest.approx(0)
        shares.append(share)
    assert max(shares) > 0.5
    assert min(shares) < 0.2


def test_draws_of_beta_have_its_moments() -> None:
    from megatfm.data.image_mixing import draw_beta
    from megatfm.data.image_transforms import Draws

    for alpha in (0.2, 0.8, 1.0, 4.0):
        numbers = np.array([draw_beta(Draws((n, "beta")), alpha) for n in range(3000)])
        assert numbers.mean() == pytest.approx(0.5, abs=0.03)
        assert numbers.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)  # of Beta(α, α)
    assert 0 <= draw_beta(Draws((0,)), 1e-3) <= 1


def test_a_damaged_image_is_named_and_quarantined(tmp_path: Path) -> None:
    corpus = write(tmp_path / "damaged", 70, damaged=41)
    result = objective(mixup=0.5, row=2 * TOKENS)
    prepared = result.prepare_rows(rows_of(corpus, result, row=2 * TOKENS), 1)
    with pytest.raises(
        MegatfmError,
        match=r"shard-000000\.tar\.zst: sample 41 \(key 000041, frame \d+\) has a \.png that "
        r'can\'t be decoded .*put "41" into the corpus\'s quarantine',
    ):
        prepared.read_rows(range(len(rows_of(corpus, result, row=2 * TOKENS))))
    rows = rows_of(corpus, result, row=2 * TOKENS, quarantine=Quarantine.parse(["41"], 70))
    mixed = result.prepare_rows(rows, 1).read_rows(range(len(rows)))
    labels = mixed["labels"][mixed["labels"] >= 0]
    assert sorted(labels) == [n for n in range(70) if n != 41]
    at = mixed["labels"] >= 0
    assert 41 not in mixed["mixed_labels"][at]
    assert (mixed["label_weights"][at] == 1).sum() >= 1  # its partner stays as it is


def write_shapes(folder: Path, shapes: list[tuple[int, int]], compress: bool = True) -> Corpus:
    with ShardWriter(
        folder, tokenizer_hash="none", token_dtype="uint16", frame_bytes=2**13, shard_bytes=2**15, compress=compress
    ) as writer:
        for number, (height, width) in enumerate(shapes):
            exif = Image.Exif()
            exif[0x0112] = 6 if number % 3 == 0 else 1  # every third lies on its side
            data = encode_noise(height, width, seed=number, format_="JPEG", exif=exif)
            files = {"jpg": data, "cls": b"%d" % (number % 100)}
            writer.add(f"{number:06d}", np.zeros(0, np.uint16), "made", 0, files)
        writer.finish({})
    return Corpus.open(folder)


@pytest.mark.parametrize("compress", [True, False])
def test_images_keep_their_shapes_in_packed_rows(tmp_path: Path, compress: bool) -> None:
    """Rows are planned from the index; each image has the grid that its upright shape gives, by brute force."""
    random = np.random.default_rng(5)
    shapes = [tuple(map(int, random.integers(1, 60, 2))) for _ in range(60)]
    corpus = write_shapes(tmp_path / "c", shapes, compress)
    upright = [shape[::-1] if n % 3 == 0 else shape for n, shape in enumerate(shapes)]
    assert len(corpus.manifest.shards) > 1
    assert ImageColumns(corpus, 0, corpus.n_blocks).image_sizes.tolist() == [list(shape) for shape in upright]
    sizes = [list(size) for size in upright[corpus.blocks[1] : corpus.blocks[3]]]
    assert ImageColumns(corpus, 1, 3).image_sizes.tolist() == sizes
    limit, row = 20, 64
    result = objective(row=row, max_patches=limit, transforms=["horizontal_flip", "random_resized_crop"])
    rows = rows_of(corpus, result, row=row)
    actual: dict[int, tuple[int, int]] = {}
    for position in range(len(rows)):  # type: ignore[arg-type]
        batch = read_row(rows, position)
        for number in range(batch["documents"].max() + 1):
            at = batch["documents"] == number
            label, (_, _, height, width) = int(batch["labels"][at][0]), batch["grid"][at][0].tolist()
            assert at.sum() == 1 + height * width
            assert batch["grid"][at][1:, :2].tolist() == [[y, x] for y in range(height) for x in range(width)]
            actual[label] = (height, width)
    assert sorted(actual) == list(range(60))
    for label, (height, width) in actual.items():
        h, w = upright[label]
        assert height * width <= limit
        if (h // PATCH) * (w // PATCH) <= limit and min(h, w) >= PATCH and h * w <= limit * PATCH**2:
            assert (height, width) == (h // PATCH, w // PATCH)
        elif min(height, width) > 1:
            assert abs(np.log(height / width) - np.log(h / w)) < 1.0
            assert (height + 1) * (width + 1) > limit * 0.8
    assert 0 < rows.padding_fraction < 0.2  # type: ignore[attr-defined]
    quarantined = rows_of(corpus, result, row=row, quarantine=Quarantine.parse(["7"], 60))
    everything = quarantined.read_rows(range(len(quarantined)))["labels"]  # type: ignore[arg-type]
    assert sorted(everything[everything >= 0]) == [n for n in range(60) if n != 7]


def test_native_resolution_needs_sizes_in_the_index(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, tokenizer_hash="none", token_dtype="uint16") as writer:
        writer.add("0", np.zeros(0, np.uint16), "made", 0, {"png": b"", "cls": b"0"})
        writer.finish({})
    with pytest.raises(UsageError, match=r"holds no tokens of text: prepare it with tokenizer\.file"):
        Corpus.open(tmp_path).check_tokenizer("b" * 64)
    result = objective(row=64, max_patches=20)
    with pytest.raises(UsageError, match=r"its index lacks the sizes of images.*prepare the corpus again"):
        rows_of(Corpus.open(tmp_path), result, row=64)
    with pytest.raises(ValueError, match="mixup and cutmix need images of one size"):
        objective(max_patches=20, mixup=0.2)
    with pytest.raises(UsageError, match=r"max_patches = 80, which takes 81 tokens"):
        objective(row=64, max_patches=80)


def test_contact_sheets_show_pixels_of_rows(corpus: Corpus) -> None:
    result = objective(row=4 * TOKENS, transforms=[], crop_pct=1.0, mixup=0.5, mix_probability=0.5)
    rows = result.prepare_rows(rows_of(corpus, result, row=4 * TOKENS, quarantine=Quarantine.parse(["3"], 70)), 1)
    batch = rows.read_rows(range(18))
    pictures = list(iter_captioned_images(batch, PATCH, [f"kind {n}" for n in range(70)]))
    assert len(pictures) == 69
    labels = batch["labels"][batch["labels"] >= 0]
    weights = batch["label_weights"][batch["labels"] >= 0]
    assert {0.0, 1.0} & set(weights.tolist()) == {1.0}
    for image, label, weight in zip(pictures, labels.tolist(), weights.tolist(), strict=True):
        assert image.caption.startswith(f"kind {label}" if weight == 1 else f"{weight:.2f} kind {label} + ")
    assert {image.caption for image in iter_captioned_images(batch, PATCH, ["kind"] * 70)} == {"kind"}
    tokens = np.flatnonzero(batch["documents"][0] == 2)
    np.testing.assert_array_equal(pictures[2].pixels, unpatched(batch["patches"][0, tokens[1:]]))
    captions = ["a\nb\r\n\tc\u2028d", "\u732b\u3068\u72ac", "", "W" * 500]
    captioned = [image._replace(caption=text) for image, text in zip(pictures, captions, strict=False)]
    sheet = draw_contact_sheet([*captioned, pictures[4]], columns=2)
    assert sheet.size == (2 * 134 + 6, 3 * 152 + 6)
    assert sheet.getpixel((6, 6)) == tuple(pictures[0].pixels[0, 0])
