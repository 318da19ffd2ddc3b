"""Images as batches, written out apart from the product, and pictures with captions."""

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor


def draw_pixels(height: int, width: int, *, seed: int, channels: int = 3) -> Tensor:
    """Random uint8 pixels [C, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (channels, height, width), generator=generator).to(torch.uint8)


def encode_image(image: Image.Image | NDArray[Any], format_: str = "PNG", **options: Any) -> bytes:
    """An image, or pixels [H, W, C] or [H, W], as a file's content. options: of Pillow's writer of the format."""
    content = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(content, format_, **options)
    return content.getvalue()


def encode_noise(height: int = 8, width: int = 8, *, seed: int = 0, format_: str = "PNG", **options: Any) -> bytes:
    """A file's content with random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encode_image(pixels, format_, **options)


def png_chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def cut_patches(image: Tensor, side: int) -> Tensor:
    """Patches [h · w, C · side²] of an image [C, H, W], row by row; pixels beyond the last whole patch are dropped."""
    height, width = image.shape[1] // side, image.shape[2] // side
    return torch.stack([
        image[:, row * side : (row + 1) * side, column * side : (column + 1) * side].flatten()
        for row in range(height)
        for column in range(width)
    ])  # fmt: skip


def make_patch_grid(height: int, width: int, n_special: int) -> list[list[int]]:
    """Row, column, height and width of each token of an image."""
    special = [[-1, number, height, width] for number in range(n_special)]
    return special + [[row, column, height, width] for row in range(height) for column in range(width)]


def make_batch(
    images: Sequence[Tensor],
    side: int,
    n_special: int,
    rows: Sequence[Sequence[int]],
    *,
    labels: Sequence[int] | None = None,
    row_length: int | None = None,
) -> dict[str, Tensor]:
    """A batch whose rows hold the images of these numbers, filled with padding."""
    sizes = [(image.shape[1] // side, image.shape[2] // side) for image in images]
    lengths = [n_special + height * width for height, width in sizes]
    length = row_length or max(sum(lengths[number] for number in row) for row in rows)
    batch = {
        "patches": torch.zeros(len(rows), length, images[0].shape[0] * side**2, dtype=torch.uint8),
        "grid": torch.tensor([0, 0, 1, 1], dtype=torch.int32).expand(len(rows), length, 4).clone(),
        "positions": torch.zeros(len(rows), length, dtype=torch.int64),
        "documents": torch.full((len(rows), length), -1),
    }
    if labels is not None:
        batch["labels"] = torch.full((len(rows), length), -100)
    for index, row in enumerate(rows):
        begin = 0
        for document, number in enumerate(row):
            end = begin + lengths[number]
            batch["patches"][index, begin + n_special : end] = cut_patches(images[number], side)
            batch["grid"][index, begin:end] = torch.tensor(
                make_patch_grid(*sizes[number], n_special), dtype=torch.int32
            )
            batch["positions"][index, begin:end] = torch.arange(lengths[number])
            batch["documents"][index, begin:end] = document
            if labels is not None:
                batch["labels"][index, begin] = labels[number]
            begin = end
    return batch


def make_masked_batch(
    images: Sequence[Tensor],
    side: int,
    n_special: int,
    rows: Sequence[Sequence[int]],
    visible: Sequence[Sequence[int]],
    lengths: tuple[int, int],
) -> dict[str, Tensor]:
    """A masked autoencoder's batch: `make_batch` for the decoder, and the tokens that are kept for the encoder.

    kept: by image, the patches that the encoder sees. lengths: of the encoder's rows, and of the decoder's.
    """
    full = make_batch(images, side, n_special, rows, row_length=lengths[1])
    batch = {f"encoder_{name}": values[:, : lengths[0]].clone() for name, values in full.items()}
    batch["encoder_patches"].zero_()
    batch["encoder_grid"][:] = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    batch["encoder_positions"].zero_()
    batch["encoder_documents"].fill_(-1)
    batch |= {**full, "source": torch.full(full["documents"].shape, -1)}
    for index, row in enumerate(rows):
        begin = end = 0
        for document, number in enumerate(row):
            tokens = [*range(n_special), *(n_special + patch for patch in visible[number])]
            places = (full["documents"][index] == document).nonzero()[:, 0][tokens]
            begin, end = end, end + len(tokens)
            for name in ("patches", "grid"):
                batch[f"encoder_{name}"][index, begin:end] = full[name][index, places]
            batch["encoder_positions"][index, begin:end] = torch.arange(len(tokens))
            batch["encoder_documents"][index, begin:end] = document
            batch["source"][index, places] = torch.arange(len(tokens))
    return batch


COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (235, 210, 40)}
SHAPES = ("circle", "square", "triangle")
SIDE = 16


def draw_shape(canvas: ImageDraw.ImageDraw, shape: str, colour: str, left: int) -> None:
    box = (left, 4, left + 6, 11)
    if shape == "circle":
        canvas.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        canvas.rectangle(box, fill=COLOURS[colour])
    else:
        canvas.polygon([(left, 11), (left + 6, 11), (left + 3, 4)], fill=COLOURS[colour])


def write_captioned_images(folder: Path, captions: Path, count: int) -> None:
    """Write `count` images, every fifth into validation/, and all captions as texts of their own."""
    random = np.random.default_rng(0)
    captions.mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
    for number in range(count):
        colours = [[*COLOURS][at] for at in random.integers(len(COLOURS), size=2)]
        shapes = [SHAPES[at] for at in random.integers(len(SHAPES), size=2)]
        image = Image.new("RGB", (SIDE, SIDE), tuple(random.integers(90, 160, 3).tolist()))
        canvas = ImageDraw.Draw(image)
        for left, colour, shape in zip((1, 9), colours, shapes, strict=True):
            draw_shape(canvas, shape, colour, left)
        caption = f"a {colours[0]} {shapes[0]} beside a {colours[1]} {shapes[1]}"
        place = folder / ("train" if number % 5 else "validation") / f"{number:04d}"
        image.save(place.with_suffix(".png"))
        place.with_suffix(".txt").write_text(caption)
        (captions / f"{number:04d}.txt").write_text(f"{caption} ({number})\n")
