"""Stored pictures of every kind, and transforms of training images, against Pillow's own operations."""

import io
import struct
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from megatfm.config import ImagesConfig
from megatfm.data import images
from megatfm.data.image_transforms import OPERATIONS, TRANSFORMS
from megatfm.data.images import decode, patchify, resize_and_crop
from megatfm.errors import SampleError
from tests.support.images import encode_image, png_chunk


def noise(height: int = 21, width: int = 34, channels: int = 3, seed: int = 0) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, channels), np.uint8)
    return np.asarray(Image.fromarray(small.squeeze()).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("has_simplejpeg", [True, False])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True, "quality": 30}])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_have_pillow_s_pixels(
    has_simplejpeg: bool, options: dict[str, Any], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert images.simplejpeg is not None  # of the extra vision
    if not has_simplejpeg:
        monkeypatch.setattr(images, "simplejpeg", None)
    for data in (encode_image(noise(), "JPEG", **options), encode_image(noise(channels=1), "JPEG", **options)):
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(image.convert("RGB" if channels == 3 else "L"))
        np.testing.assert_array_equal(np.asarray(decode(data, "jpg", channels)), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_rotations_of_cameras_are_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "webp" else {}
    data = encode_image(noise(), images.PILLOW_FORMATS[kind], exif=exif, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert expected.shape == ((34, 21, 3) if orientation > 4 else (21, 34, 3))
    np.testing.assert_array_equal(np.asarray(decode(data, kind, 3)), expected)


def test_transparent_pixels_lie_on_white() -> None:
    pixels = noise(channels=3)
    alpha = noise(channels=1, seed=1).copy()
    alpha[:3], alpha[3:6] = 0, 255
    rgba = Image.fromarray(np.dstack([pixels, alpha]))
    share = alpha[..., None] / 255
    expected = pixels * share + 255 * (1 - share)
    for kind, options in (("png", {}), ("webp", {"lossless": True, "exact": True})):
        actual = np.asarray(decode(encode_image(rgba, images.PILLOW_FORMATS[kind], **options), kind, 3))
        assert np.abs(actual - expected).max() <= 1
        np.testing.assert_array_equal(actual[:3], 255)
        np.testing.assert_array_equal(actual[3:6], pixels[3:6])
    palette = Image.fromarray(noise(channels=1) // 64).convert("P")
    data = encode_image(palette, "PNG", transparency=1)
    is_clear = np.asarray(palette) == 1
    assert is_clear.any()
    assert (np.asarray(decode(data, "png", 3))[is_clear] == 255).all()


def test_other_modes_become_rgb_or_grey() -> None:
    cmyk = encode_image(Image.fromarray(noise()).convert("CMYK"), "JPEG")
    with Image.open(io.BytesIO(cmyk)) as image:
        assert image.mode == "CMYK"
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(np.asarray(decode(cmyk, "jpg", 3)), expected)
    bits = noise(channels=1) > 99
    np.testing.assert_array_equal(np.asarray(decode(encode_image(bits, "PNG"), "png", 1)), bits * np.uint8(255))
    deep = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    actual = np.asarray(decode(encode_image(deep, "PNG"), "png", 1))
    np.testing.assert_array_equal(actual, np.rint(deep / 257).astype(np.uint8))
    np.testing.assert_array_equal(np.asarray(decode(encode_image(deep, "PNG"), "png", 3))[..., 2], actual)


def test_a_rotation_is_found_behind_other_segments() -> None:
    """A colour profile of several segments, and a comment with the marker of a scan in it, come first."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(noise())
    upright = decode(encode_image(image, "JPEG"), "jpg", 3)
    profile, comment = bytes(range(256)) * 600, b"\xff\xda in a comment"
    data = encode_image(image, "JPEG", exif=exif, icc_profile=profile, comment=comment)
    comment_first = data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]
    for turned in (data, comment_first):
        actual = np.asarray(decode(turned, "jpg", 3))
        np.testing.assert_array_equal(actual, np.rot90(np.asarray(upright), -1))


def png_of(color_type: int, depth: int, height: int, width: int, rows: bytes) -> bytes:
    """A PNG as its standard describes it, for kinds that Pillow can't write."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


@pytest.mark.parametrize(("color_type", "n_colors", "has_alpha"), [(2, 3, False), (6, 3, True), (4, 1, True)])
def test_colours_of_16_bits_keep_their_upper_8(color_type: int, n_colors: int, has_alpha: bool) -> None:
    values = np.arange(65_536).reshape(256, 256)
    channels = [values] * n_colors + [np.full_like(values, 65_535)] * has_alpha
    pixels = np.stack(channels, axis=-1).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    actual = np.asarray(decode(png_of(color_type, 16, 256, 256, rows), "png", 3))
    np.testing.assert_array_equal(actual, np.repeat((values // 256)[..., None], 3, axis=2))


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.fromarray(noise(seed=n)) for n in range(3)]
    options: dict[str, Any] = {"lossless": True} if kind == "webp" else {}
    data = encode_image(frames[0], images.PILLOW_FORMATS[kind], save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3  # type: ignore[attr-defined]
    np.testing.assert_array_equal(np.asarray(decode(data, kind, 3)), np.asarray(frames[0]))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_cut_off_files_are_refused(kind: str, has_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_simplejpeg:
        monkeypatch.setattr(images, "simplejpeg", None)
    data = encode_image(noise(64, 64), images.PILLOW_FORMATS[kind])
    for size in (0, 10, len(data) // 2, len(data) - 40):
        with pytest.raises(SampleError, match=rf"has a \.{kind} that can't be decoded"):
            decode(data[:size], kind, 3)


def test_bombs_and_other_formats_are_refused() -> None:
    for side in (8_193, 60_000):  # by our bound, and by Pillow's
        with pytest.raises(SampleError, match=r"has a \.png of over 67,108,864 pixels"):
            decode(png_of(2, 8, side, side, b""), "png", 3)
    for data, kind, reason in (
        (encode_image(noise(), "PNG"), "jpg", "PNG by its content: give it the extension of its format"),
        (encode_image(noise(), "GIF"), "png", "GIF by its content: convert it"),
        (b"no image", "webp", "no whole WEBP"),
    ):
        with pytest.raises(SampleError, match=rf"has a \.{kind} that can't be decoded \({reason}\)"):
            decode(data, kind, 3)
    photos = [Image.fromarray(noise(seed=seed)) for seed in (0, 1)]
    phone = encode_image(photos[0], "MPO", save_all=True, append_images=photos[1:])
    np.testing.assert_array_equal(
        np.asarray(decode(phone, "jpg", 3)), np.asarray(decode(encode_image(photos[0], "JPEG"), "jpg", 3))
    )
    with pytest.raises(SampleError, match="floating-point"):
        images.convert_mode(Image.fromarray(np.zeros((2, 2), np.float32)), 3)
    for value in (-1, 65_536):
        with pytest.raises(SampleError, match="over 16 bits"):
            images.convert_mode(Image.fromarray(np.full((2, 2), value, np.int32)), 3)


def test_images_too_long_to_be_resized_are_refused() -> None:
    """A line of 60,000 pixels would take 9 GB as an image of 224 rows; one that fits is resized as before."""
    line = Image.fromarray(np.zeros((1, 60_000, 3), np.uint8))
    reason = r"has an image of 60000 × 1 pixels, which would be resized to 13440000 × 224: cut it before prep"
    with pytest.raises(SampleError, match=reason):
        resize_and_crop(line, 224, 1.0, Image.Resampling.BICUBIC)
    with pytest.raises(SampleError, match=reason):
        TRANSFORMS.get("resize")(SimpleNamespace(size=224), Image.Resampling.BICUBIC)(line, ("key",), (224, 224))
    assert resize_and_crop(line, 32, 1.0, Image.Resampling.NEAREST).size == (32, 32)


@pytest.mark.parametrize(("shape", "grown", "corner"), [((30, 50), (26, 16), (6, 1)), ((50, 30), (16, 26), (1, 6))])
def test_evaluation_crops_the_centre(shape: tuple[int, int], grown: tuple[int, int], corner: tuple[int, int]) -> None:
    """The crop equals torchvision's Resize(16) and CenterCrop(14)."""
    image = Image.fromarray(noise(*shape))
    left, top = corner
    expected = image.resize(grown, Image.Resampling.BILINEAR).crop((left, top, left + 14, top + 14))
    actual = resize_and_crop(image, 14, 0.875, Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    assert resize_and_crop(Image.fromarray(noise(1, 90)), 9, 1.0, Image.Resampling.BICUBIC).size == (9, 9)


def test_patches_are_those_of_a_convolution() -> None:
    import torch

    pixels = noise(12, 20)
    weight = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.conv2d(tensor, weight, stride=4)[0].flatten(1).T
    actual = torch.from_numpy(patchify(pixels, 4)).double() @ weight.flatten(1).T
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-9)


# ------------------------------------------------------------------------------------------------- transforms


BICUBIC = Image.Resampling.BICUBIC


def picture(height: int = 40, width: int = 60, mode: str = "RGB", seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(1, 255, (10, 15, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), BICUBIC).convert(mode)


def transform(name: str, size: int = 24, **options: Any) -> Any:
    (section,) = ImagesConfig.model_validate({"transforms": [{"name": name, **options}]}).transforms
    result = TRANSFORMS.get(name)(section, BICUBIC)
    return lambda image, key: result(image, key, (size, size))


def coordinates(height: int, width: int) -> Image.Image:
    """An image whose pixels are their columns, rows and 7."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.dstack([columns, rows, np.full_like(rows, 7)]).astype(np.uint8))


def test_random_resized_crops_have_the_areas_and_ratios_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The box is seen where Pillow is asked; then it is cut out and resized by hand."""
    boxes: list[Any] = []
    crop = Image.Image.crop

    def watched(self: Image.Image, box: Any) -> Image.Image:
        boxes.append(box)
        return crop(self, box)

    image, result = picture(200, 240), transform("random_resized_crop", 24, scale=[0.2, 0.5], ratio=[0.8, 1.25])
    shares, places = [], set()
    for number in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image, "crop", watched)
            actual = np.asarray(result(image, (0, number)))
        left, top, right, bottom = boxes[-1]
        assert 0 <= left < right <= 240
        assert 0 <= top < bottom <= 200
        shares.append((right - left) * (bottom - top) / (200 * 240))
        places.add((left, top))
        assert 0.19 < shares[-1] < 0.51
        assert 0.78 < (right - left) / (bottom - top) < 1.28
        expected = image.crop(boxes[-1]).resize((24, 24), BICUBIC)  # which sees nothing outside
        np.testing.assert_array_equal(actual, np.asarray(expected))
    assert 0.32 < np.mean(shares) < 0.38
    assert len(places) > 95


def test_a_crop_that_never_fits_is_the_centre() -> None:
    image = coordinates(10, 200)
    actual = np.asarray(transform("random_resized_crop", 10, scale=[1, 1])(image, (1,)))
    expected = np.asarray(image.crop((93, 0, 106, 10)).resize((10, 10), BICUBIC))
    np.testing.assert_array_equal(actual, expected)


def test_random_crops_pad_with_black() -> None:
    image, starts = coordinates(24, 24), set()
    for number in range(200):
        cropped = np.asarray(transform("random_crop", 24, padding=2)(image, (number,))).astype(int)
        left, top = cropped[12, 12, 0] - 12, cropped[12, 12, 1] - 12
        starts.add((left, top))
        expected = np.zeros((28, 28, 3), int)
        expected[2:26, 2:26] = np.asarray(image)
        np.testing.assert_array_equal(cropped, expected[2 + top : 26 + top, 2 + left : 26 + left])
    assert starts == {(x, y) for x in range(-2, 3) for y in range(-2, 3)}


def test_flips_are_as_frequent_as_asked() -> None:
    image = picture()
    result = [np.asarray(transform("horizontal_flip", p=0.3)(image, (n,))) for n in range(400)]
    plain, mirrored = np.asarray(image), np.asarray(image)[:, ::-1]
    n_flipped = sum(np.array_equal(item, mirrored) for item in result)
    assert n_flipped + sum(np.array_equal(item, plain) for item in result) == 400
    assert 90 < n_flipped < 150


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("fill", ["noise", "color", "black"])
def test_one_rectangle_is_erased(mode: str, fill: str) -> None:
    image = picture(mode=mode)
    result = transform("random_erasing", p=0.5, scale=[0.1, 0.2], fill=fill)
    n_erased = 0
    for number in range(60):
        before = np.asarray(image).reshape(40, 60, -1)
        after = np.asarray(result(image, (number,))).reshape(40, 60, -1)
        ys, xs = np.nonzero((before != after).any(-1))
        if not len(ys):
            continue
        n_erased += 1
        region = after[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
        share = region.shape[0] * region.shape[1] / (40 * 60)
        assert 0.08 < share < 0.22
        if fill == "noise":
            assert abs(region.mean() - 127.5) < 25
        else:
            assert (region == region[0, 0]).all()
            assert fill == "color" or not region.any()
    assert 18 < n_erased < 42


def test_color_jitter_applies_pillow_s_enhancers() -> None:
    image = picture()
    only = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
    for key, kind in (
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ):
        result = np.asarray(transform("color_jitter", **{**only, key: 0.5})(image, (3,)))
        errors = [
            np.abs(np.asarray(kind(image).enhance(factor)).astype(int) - result).mean()
            for factor in np.linspace(0.5, 1.5, 401)
        ]
        assert min(errors) < 0.3 < np.abs(np.asarray(image).astype(int) - result).mean()
    turned = np.asarray(transform("color_jitter", **only, hue=0.5)(image, (5,)).convert("HSV")).astype(int)
    plain = np.asarray(image.convert("HSV")).astype(int)
    assert np.abs(turned[..., 2] - plain[..., 2]).max() <= 2  # brightness stays
    jittered = transform("color_jitter", **only, hue=0.5)(picture(mode="L"), (5,))
    assert np.array_equal(np.asarray(jittered), picture(mode="L"))


def test_operations_of_rand_augment() -> None:
    image = picture(41, 41)
    pixels = np.asarray(image).astype(int)

    def run(name: str, strength: float, inputs: Image.Image = image) -> np.ndarray:
        return np.asarray(OPERATIONS[name](inputs, strength, BICUBIC)).astype(int)

    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "color", "contrast", "brightness"):
        np.testing.assert_array_equal(run(name, 0.0), pixels, name)
        assert (run(name, 0.7) != run(name, -0.7)).any()
    np.testing.assert_array_equal(run("identity", 1.0), pixels)
    turned = np.asarray(image.rotate(-30, BICUBIC, fillcolor=(124, 116, 104))).astype(int)
    other = np.asarray(image.rotate(30, BICUBIC, fillcolor=(124, 116, 104))).astype(int)
    assert min(np.abs(run("rotate", 1.0) - item).mean() for item in (turned, other)) < 0.5
    shifted = np.asarray(OPERATIONS["translate_x"](picture(40, 40), 0.5, BICUBIC)).astype(int)  # by 9 pixels
    np.testing.assert_array_equal(shifted[:, :31], np.asarray(picture(40, 40))[:, 9:])
    assert (shifted[:, 31:] == (124, 116, 104)).all()
    np.testing.assert_array_equal(run("solarize", 0.5), np.where(pixels < 128, pixels, 255 - pixels))
    np.testing.assert_array_equal(run("posterize", -1.0), pixels // 16 * 16)
    np.testing.assert_array_equal(run("equalize", 0.0), np.asarray(ImageOps.equalize(image)))
    np.testing.assert_array_equal(run("brightness", -1.0), np.asarray(ImageEnhance.Brightness(image).enhance(0.1)))
    for name in OPERATIONS:
        assert run(name, 0.8, picture(mode="L")).shape == (40, 60)


def test_rand_augment_is_a_function_of_its_key() -> None:
    result = transform("rand_augment", n_ops=3, magnitude_std=0.5)
    first, second = ([result(picture(), (seed, "a")).tobytes() for seed in range(30)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 25
    assert transform("rand_augment", magnitude=0.0)(picture(), (0,)).size == (60, 40)
