"""Size of a stored image from its header, and how its camera was held. The only file of this room that needs Pillow."""

from collections.abc import Mapping
from io import BytesIO

from PIL import ExifTags, Image

FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
"""Extension of a stored image → its format in Pillow."""
FIRST_TURNED = 5
"""Orientations from here on swap width and height."""


def orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, 1 (upright) to 8. Nothing is decoded for it."""
    if image.format == "PNG" and "exif" not in image.info:  # Pillow would decode it to look behind the pixels
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def upright_size(files: Mapping[str, bytes]) -> tuple[int, int] | None:
    """Height and width of a sample's image once it is turned upright; None if it has none whose header can be read."""
    for extension, data in files.items():
        if extension in FORMATS:
            try:
                image = Image.open(BytesIO(data), formats=[FORMATS[extension]])
                return image.size if orientation(image) >= FIRST_TURNED else image.size[::-1]
            except Exception:  # Pillow raises many kinds; decoding reports the damage
                return None
    return None
