"""Pictures of two coloured shapes and their captions, as a folder of images with a .txt beside each."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

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


def write_captioned_images(folder: Path, captions: Path, count: int, seed: int = 0) -> None:
    """Write `count` images, every fifth into validation/, and all captions as texts of their own."""
    random = np.random.default_rng(seed)
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
