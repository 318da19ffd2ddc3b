"""Stored pictures of every kind, against Pillow's own conversions; and those that are refused, with the reason."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from megatfm.data import images
from megatfm.data.images import decode, patchify, resize_and_crop
from megatfm.errors import SampleError


def noise(height: int = 21, width: int = 34, channels: int = 3, seed: int = 0) -> np.ndarray:
    small = np.random.default_rng(seed).integers(
        0, 256, (height // 4 + 1, width // 4 + 1, channels), np.uint8
    )
    return np.asarray(Image.fromarray(small.squeeze()).resize((width, height), Image.Resampling.BICUBIC))


def stored(image: Image.Image, format_: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


@pytest.mark.parametrize("has_simplejpeg", [True, False])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True, "quality": 30}])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_have_pillow_s_pixels(
    has_simplejpeg: bool, options: dict[str, Any], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert images.simplejpeg is not None  # of the extra vision
    if not has_simplejpeg:
        monkeypatch.setattr(images, "simplejpeg", None)
    for data in (
        stored(Image.fromarray(noise()), "JPEG", **options),
        stored(Image.fromarray(noise(channels=1)), "JPEG", **options),
    ):
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(image.convert("RGB" if channels == 3 else "L"))
        np.testing.assert_array_equal(np.asarray(decode(data, "jpg", channels)), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_rotations_of_cameras_are_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "webp" else {}
    data = stored(Image.fromarray(noise()), images.PILLOW_FORMATS[kind], exif=exif, **options)
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
        actual = np.asarray(decode(stored(rgba, images.PILLOW_FORMATS[kind], **options), kind, 3))
        assert np.abs(actual - expected).max() <= 1
        np.testing.assert_array_equal(actual[:3], 255)
        np.testing.assert_array_equal(actual[3:6], pixels[3:6])
    palette = Image.fromarray(noise(channels=1) // 64).convert("P")
    data = stored(palette, "PNG", transparency=1)
    is_clear = np.asarray(palette) == 1
    assert is_clear.any()
    assert (np.asarray(decode(data, "png", 3))[is_clear] == 255).all()


def test_other_modes_become_rgb_or_grey() -> None:
    cmyk = stored(Image.fromarray(noise()).convert("CMYK"), "JPEG")
    with Image.open(io.BytesIO(cmyk)) as image:
        assert image.mode == "CMYK"
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(np.asarray(decode(cmyk, "jpg", 3)), expected)
    bits = noise(channels=1) > 99
    np.testing.assert_array_equal(
        np.asarray(decode(stored(Image.fromarray(bits), "PNG"), "png", 1)), bits * np.uint8(255)
    )
    deep = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    actual = np.asarray(decode(stored(Image.fromarray(deep), "PNG"), "png", 1))
    np.testing.assert_array_equal(actual, np.rint(deep / 257).astype(np.uint8))
    np.testing.assert_array_equal(
        np.asarray(decode(stored(Image.fromarray(deep), "PNG"), "png", 3))[..., 2], actual
    )


def test_a_rotation_is_found_behind_other_segments() -> None:
    """A colour profile of several segments, and a comment with the marker of a scan in it, come first."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(noise())
    upright = decode(stored(image, "JPEG"), "jpg", 3)
    profile, comment = bytes(range(256)) * 600, b"\xff\xda in a comment"
    data = stored(image, "JPEG", exif=exif, icc_profile=profile, comment=comment)
    comment_first = data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]
    for turned in (data, comment_first):
        actual = np.asarray(decode(turned, "jpg", 3))
        np.testing.assert_array_equal(actual, np.rot90(np.asarray(upright), -1))


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(color_type: int, depth: int, height: int, width: int, rows: bytes) -> bytes:
    """A PNG as its standard describes it, for kinds that Pillow can't write."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


@pytest.mark.parametrize(("color_type", "n_colors", "has_alpha"), [(2, 3, False), (6, 3, True), (4, 1, True)])
def test_of_16_bits_in_colour_the_upper_8_are_taken(color_type: int, n_colors: int, has_alpha: bool) -> None:
    values = np.arange(65_536).reshape(256, 256)
    channels = [values] * n_colors + [np.full_like(values, 65_535)] * has_alpha
    pixels = np.stack(channels, axis=-1).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    actual = np.asarray(decode(png_of(color_type, 16, 256, 256, rows), "png", 3))
    np.testing.assert_array_equal(actual, np.repeat((values // 256)[..., None], 3, axis=2))


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.fromarray(noise(seed=n)) for n in range(3)]
    options: dict[str, Any] = {"lossless": True} if kind == "webp" else {}
    data = stored(frames[0], images.PILLOW_FORMATS[kind], save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3  # type: ignore[attr-defined]
    np.testing.assert_array_equal(np.asarray(decode(data, kind, 3)), np.asarray(frames[0]))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_cut_off_files_are_refused(kind: str, has_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_simplejpeg:
        monkeypatch.setattr(images, "simplejpeg", None)
    data = stored(Image.fromarray(noise(64, 64)), images.PILLOW_FORMATS[kind])
    for size in (0, 10, len(data) // 2, len(data) - 40):
        with pytest.raises(SampleError, match=rf"has a \.{kind} that can't be decoded"):
            decode(data[:size], kind, 3)


def test_bombs_and_other_formats_are_refused() -> None:
    bomb = png_of(2, 8, 60_000, 60_000, b"")
    with pytest.raises(SampleError, match=r"has a \.png of over 67,108,864 pixels"):
        decode(bomb, "png", 3)
    with pytest.raises(SampleError, match=r"can't be decoded"):
        decode(stored(Image.fromarray(noise()), "PNG"), "jpg", 3)
    with pytest.raises(SampleError, match="floating-point"):
        images.convert(Image.fromarray(np.zeros((2, 2), np.float32)), 3)


@pytest.mark.parametrize(
    ("shape", "grown", "corner"), [((30, 50), (26, 16), (6, 1)), ((50, 30), (16, 26), (1, 6))]
)
def test_evaluation_cuts_out_the_centre(
    shape: tuple[int, int], grown: tuple[int, int], corner: tuple[int, int]
) -> None:
    """As torchvision's Resize(16) and CenterCrop(14)."""
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
