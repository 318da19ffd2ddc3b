"""Keyed images that are learned in a few steps: a pattern of its own for each class, in noise."""

import io

import numpy as np
from PIL import Image

from megatfm import rng

CLASSES, SIDE = 10, 8


def image_files(number: int) -> dict[str, bytes]:
    """A grey image of 8 × 8 pixels as PNG, and its class. Half of each pixel is the class's pattern, half noise."""
    noise = rng.random_uint64(1 + SIDE**2, "golden", "image", number)
    label = int(noise[0] % np.uint64(CLASSES))
    pattern = rng.random_uint64(SIDE**2, "golden", "pattern", label) % np.uint64(128)
    pixels = (pattern + noise[1:] % np.uint64(128)).astype(np.uint8).reshape(SIDE, SIDE)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return {"png": out.getvalue(), "cls": b"%d" % label}
