"""Size and orientation of a stored image, from its header. The only module of this package that needs Pillow."""

from collections.abc import Mapping
from io import BytesIO

from PIL import ExifTags, Image

PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
"""Extension of a stored image → Pillow's name of its format."""
FIRST_SIDEWAYS = 5
"""First of the EXIF orientations that swap width and height."""


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, 1 (upright) to 8, without decoding the image."""
    if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode it to look behind the pixels
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def upright_size(files: Mapping[str, bytes]) -> tuple[int, int] | None:
    """Return height and width in pixels of a sample's image, turned upright.

    files: the sample's files by extension. Returns None if none is an image, or its header can't be read.
    """
    for extension, data in files.items():
        if extension in PILLOW_FORMATS:
            try:
                image = Image.open(BytesIO(data), formats=[PILLOW_FORMATS[extension]])
                return image.size if orientation(image) >= FIRST_SIDEWAYS else image.size[::-1]
            except Exception:  # Pillow raises many kinds; decoding reports the damage
                return None
    return None
