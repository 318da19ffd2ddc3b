"""Images with class, metadata and caption: neighbouring files, or members of a tar, that differ in their extensions.

An image is a `.jpg`, `.jpeg`, `.png` or `.webp`; a `.cls` has the number of its class, a `.json` any metadata, a
`.txt` its caption. A sample may have several images, `KEY.0.jpg`, `KEY.1.jpg` and so on. All are checked, and none is
changed.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from megatfm.config.prep import ReadConfig
from megatfm.corpus.images import (
    MAX_PIXELS,
    ImageFormatError,
    get_image_format,
    list_image_extensions,
    open_image,
)
from megatfm.corpus.images import PILLOW_FORMATS as IMAGES
from megatfm.corpus.webdataset_images import parse_class_number
from megatfm.data_prep.readers.record import (
    MAX_RECORD_BYTES,
    BadRecord,
    find_repeated_key,
    get_nested,
    parse_json,
    replace_surrogates,
)
from megatfm.data_prep.readers.webdataset import find_repeated_extension, read_samples

SIDECAR_EXTENSIONS = ("cls", "json", "txt")
MAX_IMAGES = 64
"""Largest number of images of a sample."""
NUMBERED_IMAGES = [f"{number}.{extension}" for number in range(MAX_IMAGES + 1) for extension in IMAGES]
EXTENSIONS = frozenset((*IMAGES, *SIDECAR_EXTENSIONS, *NUMBERED_IMAGES))

_SCAN, _END = b"\xff\xda", b"\xff\xd9"  # markers of JPEG (ISO 10918-1, table B.1)


@dataclass(frozen=True)
class ImageRecord:
    """An image, or several, and the files beside it, by their extensions, images first; `text` is the caption."""

    key: str
    members: Mapping[str, bytes]
    text: str


def read_tar(path: Path, config: ReadConfig) -> Iterator[ImageRecord | BadRecord]:
    """Yield the samples of a tar. Raises BadFileError at damage."""
    for key, members in read_samples(path, EXTENSIONS):
        fault = next((member.fault for member in members if member.fault), None)
        unknown = next((member.name for member in members if member.data is None), None)
        repeated = find_repeated_extension(members)
        if fault is None and unknown is not None:
            fault = f"has a member that is neither an image nor .{', .'.join(SIDECAR_EXTENSIONS)}: {unknown}"
        if fault is None and repeated is not None:
            fault = f"has a .{repeated} twice"
        yield (
            BadRecord(key, fault)
            if fault
            else make_record(
                key, {member.extension: member.data for member in members if member.data is not None}, config
            )
        )


def read_image_record(key: str, paths: Mapping[str, Path], config: ReadConfig) -> ImageRecord | BadRecord:
    """Read an image and the files beside it. paths: by extension."""
    members = {}
    for extension, path in paths.items():
        try:
            with open(path, "rb") as file:
                members[extension] = file.read(MAX_RECORD_BYTES + 1)
        except OSError as error:
            return BadRecord(key, f"has a .{extension} that can't be read ({error.strerror})")
        if len(members[extension]) > MAX_RECORD_BYTES:
            return BadRecord(key, f"has a .{extension} of over {MAX_RECORD_BYTES:,} bytes")
    return make_record(key, members, config)


def make_record(key: str, members: Mapping[str, bytes], config: ReadConfig) -> ImageRecord | BadRecord:
    """Return the checked record of an image's files, or the reason why they are unusable."""
    images, labels = list_image_extensions(members), config.labels
    if fault := _find_number_fault(images):
        return BadRecord(key, fault)
    for image in images:
        if fault := _find_image_fault(members[image], get_image_format(image)):
            return BadRecord(key, f"has a .{image} that {fault}")
    if parse_class_number(members.get("cls", b"0")) is None:
        return BadRecord(key, "has a .cls that is no number of a class")
    try:
        text = members.get("txt", b"").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRecord(key, f"has a .txt that is not valid UTF-8: byte {error.start}")
    try:
        metadata = parse_json(members.get("json", b"null"))
    except (ValueError, RecursionError):
        return BadRecord(key, "has a .json that is not JSON")
    read_fields = [*([] if "txt" in members else [config.text_key]), *([labels.key] if labels.by == "json" else [])]
    if repeated := find_repeated_key(metadata, read_fields):
        return BadRecord(key, f"has a .json with a key twice: {repeated!r}")
    caption = get_nested(metadata, config.text_key)
    if "txt" not in members and isinstance(caption, str):
        text = replace_surrogates(caption)
    order = [*images, *(extension for extension in SIDECAR_EXTENSIONS if extension in members)]
    return ImageRecord(key, {extension: members[extension] for extension in order}, text)


def _find_number_fault(images: Sequence[str]) -> str | None:
    """Return the reason why these images can't be one sample, as a phrase after "it", or None."""
    if not images:
        return "has no image"
    names = " and ".join(f".{image}" for image in images)
    numbers = [image.rpartition(".")[0] for image in images]
    if len(images) > 1 and "" in numbers:
        return f"has several images without numbers: {names}; name them apart, or .0.jpg, .1.jpg for one sample"
    given_numbers = [int(number) for number in numbers if number]
    if unknown := next((image for image in images if image not in EXTENSIONS), None):
        return f"has an image whose number is not 0 to {MAX_IMAGES} without leading zeros: .{unknown}"
    if len(set(given_numbers)) < len(given_numbers):
        return f"has two images of one number: {names}"
    return f"has over {MAX_IMAGES} images: {len(images)}" if len(images) > MAX_IMAGES else None


def _find_image_fault(data: bytes, format_: str) -> str | None:
    """Return the reason why bytes are no image, as a phrase after "it", or None. Only headers and checksums are
    read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with open_image(data, format_) as image:
                width, height = image.size
                image.verify()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        width, height = MAX_PIXELS, 2
    except ImageFormatError as error:
        return f"is {error}"
    except Exception as error:  # the library raises many kinds, down to SyntaxError
        return f"is no whole {format_}: {str(error).partition(chr(10))[0] or type(error).__name__}"
    if width * height > MAX_PIXELS:
        return f"claims over {MAX_PIXELS:,} pixels"
    if format_ == "JPEG" and data.find(_END, max(0, data.rfind(_SCAN))) < 0:
        return "is cut off: a JPEG without its end"
    if format_ == "WEBP" and int.from_bytes(data[4:8], "little") + 8 > len(data):  # the size in RIFF's header
        return "is cut off: a WEBP without its end"
    return None
