"""From stored images to patches: decode, transform or crop, and cut into squares.

A file that can't be read raises SampleError, to which the reader of the corpus adds shard and sample. Conversions: the
EXIF rotation is applied, CMYK and palettes become RGB, transparent pixels lie on white, 16 bits become 8, and of an
animation the first frame is taken.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megatfm.corpus.images import (
    MAX_PIXELS,
    PILLOW_FORMATS,
    get_image_format,
    list_image_extensions,
    open_image,
    read_orientation,
)
from megatfm.data.image_transforms import Key, Size, Transform, resize_image
from megatfm.data.sequences import BEGINS, Field
from megatfm.errors import SampleError
from megatfm.rng import ChunkKey

try:
    simplejpeg: ModuleType | None = importlib.import_module("simplejpeg")
except ImportError:
    simplejpeg = None

MODES = {1: "L", 3: "RGB"}
"""Channels → mode in Pillow."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → transposition that turns the image upright."""
ORIENTATION_MARKS = (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/")
"""Heads of the segments of a JPEG that may hold an orientation."""
START_OF_SCAN = 0xDA
"""Marker of a JPEG after which its pixels follow."""
# Ignore Pillow's warnings of damaged EXIF, odd palettes and many pixels: where these matter there is an error. Once for
# the process, since threads that ignore warnings for a while leave each other's filters behind.
for _category in (UserWarning, Image.DecompressionBombWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"PIL\.")

Pixels = NDArray[np.uint8]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class PatchLayout:
    """Shape of an image's tokens: `n_special` tokens, then square patches."""

    patch_size: int
    channels: int
    n_special: int

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.channels * self.patch_size**2

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of a batch that hold an image."""
        return {"patches": Field("uint8", (self.patch_values,)), "grid": Field("int32", (4,), pad_value=(0, 0, 1, 1))}

    def n_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image of `height` × `width` pixels."""
        return self.n_special + (height // self.patch_size) * (width // self.patch_size)

    def build(self, pixels: Pixels) -> dict[str, NDArray[Any]]:
        """Return the `fields` of an image [H, W, C], whose sides are multiples of the patch's."""
        height, width = pixels.shape[0] // self.patch_size, pixels.shape[1] // self.patch_size
        patches = np.zeros((self.n_special + height * width, self.patch_values), np.uint8)
        patches[self.n_special :] = patchify(pixels, self.patch_size)
        return {"patches": patches, "grid": _make_grid(height, width, self.n_special)}


@dataclass(frozen=True)
class ImageReader:
    """Builds an image's tokens from stored files: a pure function of the files and the key.

    size: side of every image in pixels; None: each image keeps its shape, with at most `max_patches`. crop_pct: see
    `ImagesConfig`. filter: of resizes. crops_all: crop images of that size, too, as in evaluation.
    """

    layout: PatchLayout
    size: int | None
    max_patches: int = 0
    transforms: Sequence[Transform] = ()
    crop_pct: float = 1.0
    filter: Image.Resampling = Image.Resampling.BICUBIC
    crops_all: bool = False

    @property
    def n_tokens(self) -> int:
        """Maximal tokens of an image."""
        if self.size is None:
            return self.layout.n_special + self.max_patches
        return self.layout.n_tokens(self.size, self.size)

    def image_lengths(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of tokens [n] of images that keep their shape, by their heights and widths [n, 2]."""
        grids = compute_native_grids(sizes, self.layout.patch_size, self.max_patches)
        return self.layout.n_special + grids.prod(axis=1)

    def read(self, files: Mapping[str, bytes], key: Key) -> Pixels:
        """Return pixels [H, W, C]. Raises SampleError for files that hold no readable image."""
        extension = find_image(files)
        image = decode(files[extension], extension, self.layout.channels)
        size = self._choose_size(image)
        for number, transform in enumerate(self.transforms):
            image = transform(image, (*key, "transform", number), size)
        if self.size is not None and (image.size != size or self.crops_all):
            image = resize_and_crop(image, self.size, self.crop_pct, self.filter)
        elif image.size != size:
            image = image.resize(size, self.filter)
        return to_array(image)

    def build(self, files: Mapping[str, bytes], key: Key) -> dict[str, NDArray[Any]]:
        """Return the image's tokens, as `PatchLayout.fields` declares."""
        return self.layout.build(self.read(files, key))

    def build_several(self, files: Mapping[str, bytes], key: ChunkKey) -> dict[str, NDArray[Any]]:
        """Return the tokens of all images of a sample, in the order of their numbers, and `begins`.

        begins [n]: 1 at the first token of each image but the first. Raises SampleError for files without an image.
        """
        extensions = list_image_extensions(files) or [find_image(files)]
        images = []
        for number, extension in enumerate(extensions):
            image_key = (*key, "image", number) if number else key
            images.append(self.build({extension: files[extension]}, image_key))
        fields = {name: np.concatenate([image[name] for image in images]) for name in images[0]}
        begins = np.zeros(len(fields["grid"]), np.int64)
        begins[np.cumsum([len(image["grid"]) for image in images])[:-1]] = 1
        return {**fields, BEGINS: begins}

    def _choose_size(self, image: Image.Image) -> Size:
        if self.size is not None:
            return self.size, self.size
        stored = np.array([[image.height, image.width]])
        height, width = compute_native_grids(stored, self.layout.patch_size, self.max_patches)[0].tolist()
        return width * self.layout.patch_size, height * self.layout.patch_size


def compute_native_grids(sizes: NDArray[np.int64], patch_size: int, max_patches: int) -> NDArray[np.int64]:
    """Return rows and columns of patches [n, 2] of images by their heights and widths [n, 2].

    Incomplete patches are cut off. An image with more than `max_patches` is shrunk; one smaller than a patch is
    enlarged to one (NaViT; Dehghani et al. 2023, section 2.1).
    """
    sides = sizes.astype(np.float64) / patch_size
    scale = np.minimum(1.0, np.sqrt(max_patches / sides.prod(axis=1, keepdims=True)))
    # Rounding errors must not turn a side of exactly 7 patches into 6.
    grid = np.maximum(np.floor(sides * scale + 1e-9), 1).astype(np.int64)
    # An image that is many times as long as wide: a side of 1 was rounded up.
    longest = max_patches // grid.min(axis=1, keepdims=True)
    return np.minimum(grid, longest)


def find_image(files: Mapping[str, bytes]) -> str:
    """Return the extension of a sample's only image."""
    extensions = list_image_extensions(files)
    if len(extensions) != 1:
        stored = ", ".join(f".{extension}" for extension in files) or "no file"
        raise SampleError(
            f"has {len(extensions)} images ({stored}), not one: an image is a "
            + ", ".join(f".{extension}" for extension in PILLOW_FORMATS)
        )
    return extensions[0]


def decode(data: bytes, extension: str, channels: int) -> Image.Image:
    """Return the image in RGB, or in grey for one channel. Raises SampleError for a damaged or too large file."""
    try:
        image = _decode_plain_jpeg(data) if get_image_format(extension) == "JPEG" else None
        return convert_mode(image or _decode_any(data, extension), channels)
    except (SampleError, MemoryError):
        raise
    except Image.DecompressionBombError:  # Pillow's own bound is larger
        raise SampleError(f"has a .{extension} of over {MAX_PIXELS:,} pixels: resize it before prep") from None
    except Exception as error:  # Pillow raises many kinds, even SyntaxError
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise SampleError(f"has a .{extension} that can't be decoded ({reason})") from error


def _decode_any(data: bytes, extension: str) -> Image.Image:
    """Decode an image by Pillow, and turn it upright."""
    image = open_image(data, get_image_format(extension))
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    turn = TURNS.get(read_orientation(image))
    image.load()
    return image if turn is None else image.transpose(turn)


def _decode_plain_jpeg(data: bytes) -> Image.Image | None:
    """Decode by simplejpeg, which is faster than Pillow and gives the same pixels.

    Return None for images that Pillow has to decode: CMYK, those with an orientation, and unusual or damaged ones.
    """
    if simplejpeg is None:
        return None
    end = _find_jpeg_scan(data)
    if any(data.find(mark, 0, end) >= 0 for mark in ORIENTATION_MARKS):
        return None
    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(data)
        if color not in ("YCbCr", "RGB", "Gray") or height * width > MAX_PIXELS:
            return None
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if color == "Gray" else "RGB")
    except ValueError:
        return None
    return Image.fromarray(pixels[..., 0] if color == "Gray" else pixels)


def _find_jpeg_scan(data: bytes) -> int:
    """Return the offset of a JPEG's scan, after its segments of metadata; the file's end if these are unusual."""
    offset = 2
    while data[offset : offset + 1] == b"\xff" and offset + 4 <= len(data):
        if data[offset + 1] == START_OF_SCAN:
            return offset
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return len(data)


def convert_mode(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image of any mode to RGB, or to grey for one channel. Raises SampleError for floating-point pixels."""
    if image.mode == MODES[channels]:
        return image
    if image.mode == "F":
        raise SampleError("has floating-point pixels, whose range is unknown: store 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65_535:
            raise SampleError("has pixels of over 16 bits: store 8 or 16 bits a channel")
        image = Image.fromarray(((values.astype(np.uint32) * 255 + 32_767) // 65_535).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def resize_and_crop(image: Image.Image, size: int, crop_pct: float, filter_: Image.Resampling) -> Image.Image:
    """Return the centre of an image whose shorter side was resized to size / crop_pct. Raises SampleError."""
    shorter = min(image.size)
    resized = int(size / crop_pct)
    width, height = (int(resized * side / shorter) for side in image.size)  # rounded as torchvision does
    if (width, height) != image.size:
        image = resize_image(image, (width, height), filter_)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def to_array(image: Image.Image) -> Pixels:
    """Return pixels [H, W, C]."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def patchify(pixels: NDArray[Number], patch_size: int) -> NDArray[Number]:
    """Return patches [h · w, C · P · P] of pixels [h · P, w · P, C], row by row; in a patch channels come first."""
    height, width, channels = pixels.shape
    grid = pixels.reshape(height // patch_size, patch_size, width // patch_size, patch_size, channels)
    return grid.transpose(0, 2, 4, 1, 3).reshape(-1, channels * patch_size**2)


@lru_cache(maxsize=256)
def _make_grid(height: int, width: int, n_special: int) -> NDArray[np.int32]:
    """Return (row, column, height, width) of each token [n, 4], in patches; special token i is at (−1, i)."""
    grid = np.empty((n_special + height * width, 4), np.int32)
    grid[:, 2:] = height, width
    grid[:n_special, 0], grid[:n_special, 1] = -1, np.arange(n_special)
    grid[n_special:, 0], grid[n_special:, 1] = np.divmod(np.arange(height * width), width)
    grid.flags.writeable = False
    return grid
