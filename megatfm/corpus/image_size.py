"""Size and orientation of a stored image, from its header. The only module of this package that needs Pillow."""

import re
from collections.abc import Iterable, Mapping
from io import BytesIO

from PIL import ExifTags, Image, UnidentifiedImageError

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


def open_image(data: bytes, format_: str) -> Image.Image:
    """Open an image without decoding it. format_: Pillow's name of it. Raises ImageFormatError for another format."""
    try:
        image = Image.open(BytesIO(data), formats=_NAMED_FORMATS)
    except UnidentifiedImageError:  # its message names an object in memory
        raise ImageFormatError(f"no whole {format_}") from None
    actual = "JPEG" if image.format == "MPO" else image.format  # MPO: several JPEGs in a file, as phones write them
    if actual == format_:
        return image
    way_out = "give it the extension of its format" if actual in PILLOW_FORMATS.values() else "convert it"
    raise ImageFormatError(f"{actual} by its content: {way_out}")


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, 1 (upright) to 8, without decoding the image."""
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
    except Exception:  # Pillow raises many kinds; decoding reports the damage
        return None
