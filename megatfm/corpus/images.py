"""Stored images: their extensions, size and orientation from the header, and the columns of indexes on them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image

    from megatfm.corpus.corpus import Corpus
    from megatfm.corpus.shard_index import ShardIndex


PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
"""Extension of a stored image → Pillow's name of its format."""
MAX_PIXELS = 2**26
"""Pixels of the largest image: decoding a larger one would take over 200 MB."""
NUMBERED = re.compile(r"(?:([0-9]{1,4})\.)?([a-z]+)")
"""Extension of one of a sample's files, with its number where the sample has several images (`0.jpg`, `1.jpg`)."""
FIRST_SIDEWAYS = 5
"""First of the EXIF orientations that swap width and height."""
_NAMED_FORMATS = (*dict.fromkeys(PILLOW_FORMATS.values()), "GIF", "TIFF", "BMP", "ICO")  # those that errors can name


class ImageFormatError(ValueError):
    """An image that is not of its extension's format. Its message is a phrase after "is"."""


def open_image(data: bytes, format_: str) -> "Image.Image":
    """Open an image without decoding it. format_: Pillow's name of it. Raises ImageFormatError for another format."""
    from PIL import Image, UnidentifiedImageError  # on use, since corpora of text need no Pillow

    try:
        image = Image.open(BytesIO(data), formats=_NAMED_FORMATS)
    except UnidentifiedImageError:  # its message names an object in memory
        raise ImageFormatError(f"no whole {format_}") from None
    actual = "JPEG" if image.format == "MPO" else image.format  # MPO: several JPEGs in a file, as phones write them
    if actual == format_:
        return image
    way_out = "give it the extension of its format" if actual in PILLOW_FORMATS.values() else "convert it"
    raise ImageFormatError(f"{actual} by its content: {way_out}")


def read_orientation(image: "Image.Image") -> int:
    """Return the EXIF orientation of an opened image, 1 (upright) to 8, without decoding the image."""
    from PIL import ExifTags

    if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode it to look behind the pixels
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def list_image_extensions(extensions: Iterable[str]) -> list[str]:
    """Return the extensions of images, in the order of their numbers; one without a number is the first."""
    numbers = {
        extension: int(match[1] or -1)
        for extension in extensions
        if (match := NUMBERED.fullmatch(extension)) and match[2] in PILLOW_FORMATS
    }
    return sorted(numbers, key=numbers.__getitem__)


def get_image_format(extension: str) -> str:
    """Return Pillow's name of the format of an image's extension, `jpg` or `0.jpg`."""
    return PILLOW_FORMATS[extension.rpartition(".")[2]]


def measure_images(files: Mapping[str, bytes]) -> tuple[tuple[int, int] | None, int | None]:
    """Return height and width of a sample's image, and its number of images, for the index; None without images."""
    n_images = len(list_image_extensions(files))
    return (read_upright_size(files), n_images) if n_images else (None, None)


def read_upright_size(files: Mapping[str, bytes]) -> tuple[int, int] | None:
    """Return height and width in pixels of a sample's image, turned upright.

    files: the sample's files by extension. Returns None if they have not one image, or its header can't be read.
    """
    images = list_image_extensions(files)
    if len(images) != 1:
        return None
    try:
        image = open_image(files[images[0]], get_image_format(images[0]))
        return image.size if read_orientation(image) >= FIRST_SIDEWAYS else image.size[::-1]
    except ImportError:
        raise
    except Exception:  # Pillow raises many kinds; decoding reports the damage
        return None


class ImageIndex(Protocol):
    """Sizes and numbers of the images of consecutive documents."""

    @property
    def image_sizes(self) -> NDArray[np.int64]:
        """Height and width of the image of each [D, 2], where the objective asks for them."""
        ...

    @property
    def image_counts(self) -> NDArray[np.int64]:
        """Number of images of each [D], where the objective asks for it."""
        ...


@dataclass(frozen=True)
class ImageColumns:
    """The images of the samples in blocks `begin` to `end` − 1 of a corpus."""

    corpus: "Corpus"
    begin: int
    end: int

    @cached_property
    def image_sizes(self) -> NDArray[np.int64]:
        """Upright height and width [n, 2] of each sample's only image.

        Raises a UsageError if an index lacks image sizes.
        """
        sizes = [np.empty((0, 2), np.int64)]
        for shard, index, rows in self._tables():
            if index.has_image_counts:
                raise UsageError(
                    f"{self.corpus.shard_path(shard)}: has samples of several images, and data.images.max_patches "
                    "takes one: set data.images.size"
                )
            if not index.has_image_sizes:
                raise UsageError(
                    f"{self.corpus.shard_path(shard)}: its index lacks the sizes of images, which "
                    "data.images.max_patches needs: prepare the corpus again, or set data.images.size"
                )
            sizes.append(np.stack([rows["height"], rows["width"]], axis=1).astype(np.int64))
        return np.concatenate(sizes)

    @cached_property
    def image_counts(self) -> NDArray[np.int64]:
        """Number of images of each sample [n]; an index without it is of samples with one each."""
        counts = [np.empty(0, np.int64)]
        for _, index, rows in self._tables():
            counts.append(rows["images"].astype(np.int64) if index.has_image_counts else np.ones(len(rows), np.int64))
        return np.concatenate(counts)

    def _tables(self) -> Iterator[tuple[int, "ShardIndex", NDArray[Any]]]:
        """Yield number, index and rows of these samples of each shard."""
        begin = self.begin
        while begin < self.end:
            shard, blocks = self.corpus.find_shard(begin)
            index, stop = self.corpus.indexes.complete(shard), min(self.end, blocks.stop)
            bounds = index.first_samples[[begin - blocks.start, stop - blocks.start]]
            yield shard, index, index.samples[slice(*bounds.tolist())]
            begin = stop
