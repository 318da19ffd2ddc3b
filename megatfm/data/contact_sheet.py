"""Contact sheets: training images as the model sees them, after all transforms and mixing, with their labels."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from megatfm.data.images import Pixels
from megatfm.data.sequences import IGNORE_INDEX, Fields

CELL, CAPTION, GAP = 128, 18, 6
"""Pixels of an image's longer side, of the line below it, and between two."""
MAX_CAPTION = 24
"""Characters of a caption that are drawn, at most: more never fit below an image."""


class CaptionedImage(NamedTuple):
    """An image of a row, pixels [H, W, C], and its label or text."""

    pixels: Pixels
    caption: str


def iter_captioned_images(
    rows: Fields,
    patch_size: int,
    class_names: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    image_token: int | None = None,
) -> Iterator[CaptionedImage]:
    """Yield the images of a batch in order, except those in quarantine.

    class_names: by class index; empty: numbers. decode: returns the text of token ids. image_token: id that stands in a
    text for a patch, by which an image's text is found; None: image i belongs to text i.
    """
    prefix = "" if "patches" in rows else "encoder_"
    documents, grid = rows[f"{prefix}documents"], rows[f"{prefix}grid"]
    for row, patches in enumerate(rows[f"{prefix}patches"]):
        for image in range(int(documents[row].max()) + 1):
            tokens = np.flatnonzero(documents[row] == image)
            if not len(tokens) or ("labels" in rows and rows["labels"][row, tokens[0]] == IGNORE_INDEX):
                continue  # in quarantine
            is_patch = grid[row, tokens, 0] >= 0
            pixels = join_patches(patches[tokens[is_patch]], grid[row, tokens[-1], 2:], patch_size)
            if "labels" in rows:
                caption = _format_label(rows, row, int(tokens[0]), class_names)
            elif decode is not None and "tokens" in rows:
                text = image if image_token is None else _find_text(rows, row, int(tokens[0]), image_token)
                caption = decode(rows["tokens"][row, rows["documents"][row] == text].tolist())
            else:
                caption = ""
            yield CaptionedImage(pixels, caption)


def _find_text(rows: Fields, row: int, token: int, image_token: int) -> int:
    """Return the index in its row of the text with an image, whose first token of the encoder's row is `token`."""
    is_patch = (rows["encoder_grid"][row, :token, 0] >= 0) & (rows["encoder_documents"][row, :token] >= 0)
    n_patches_before = int(is_patch.sum())
    image_positions = np.flatnonzero(rows["tokens"][row] == image_token)
    return int(rows["documents"][row, image_positions[n_patches_before]])


def join_patches(patches: Pixels, grid: np.ndarray, patch_size: int) -> Pixels:
    """Return pixels [H, W, C] of patches [h · w, C · P · P], the inverse of `patchify`. grid: (h, w)."""
    height, width = grid.tolist()
    cells = patches.reshape(height, width, -1, patch_size, patch_size)
    return cells.transpose(0, 3, 1, 4, 2).reshape(height * patch_size, width * patch_size, -1)


def get_class_name(names: Sequence[str], label: int) -> str:
    """Return the name of a class; the number of one without a name."""
    return names[label] if label < len(names) else str(label)


def _format_label(rows: Fields, row: int, token: int, names: Sequence[str]) -> str:
    """Return the class of an image; of a mixed one both classes, with their shares."""

    def name(field: str) -> str:
        return get_class_name(names, int(rows[field][row, token]))

    weight = float(rows["label_weights"][row, token]) if "label_weights" in rows else 1.0
    if weight == 1.0 or name("labels") == name("mixed_labels"):
        return name("labels")
    return f"{weight:.2f} {name('labels')} + {1 - weight:.2f} {name('mixed_labels')}"


def draw_contact_sheet(images: Sequence[CaptionedImage], columns: int = 8) -> Image.Image:
    """Return one picture of all images, at least one, in rows with their captions below."""
    columns = min(columns, len(images))
    n_rows = -(-len(images) // columns)
    step = (CELL + GAP, CELL + CAPTION + GAP)
    sheet = Image.new("RGB", (columns * step[0] + GAP, n_rows * step[1] + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for index, (pixels, caption) in enumerate(images):
        left, top = GAP + index % columns * step[0], GAP + index // columns * step[1]
        scale = CELL / max(pixels.shape[:2])
        size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
        # Enlarged pixels stay visible as such.
        filter_ = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
        picture = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
        sheet.paste(picture.resize(size, filter_), (left, top))
        line = " ".join(caption.split())[:MAX_CAPTION]  # Pillow measures single lines only
        while draw.textlength(line, font=font) > CELL:
            line = line[:-1]
        draw.text((left, top + CELL + 2), line, fill="black", font=font)
    return sheet
