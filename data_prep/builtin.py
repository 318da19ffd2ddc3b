"""Built-in corpora without a download: scikit-learn's digits, written as a folder of images."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np

from megatfm import rng
from megatfm.config.prep import ReadConfig
from megatfm.errors import UsageError
from megatfm.files import atomic_write

TRAIN_SHARE = (2, 3)
"""Share of the digits for training, as numerator and denominator: the first ones; other people wrote the last ones."""


def with_builtin_folder(config: ReadConfig, scratch: Path) -> ReadConfig:
    """Return the config with the folder of its built-in images, written to `scratch` unless it exists."""
    if config.builtin != "digits" or config.folder is not None:
        return config
    folder = scratch / "digits"
    write_digits(folder)
    return config.model_copy(update={"folder": str(folder)})


def write_digits(folder: Path) -> None:
    """Write 1,797 handwritten digits of 8 × 8 grey pixels (Alpaydin & Kaynak 1998) as train.tar and validation.tar.

    Files have fixed times, so that prep can resume. Raises UsageError without scikit-learn or Pillow.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"read.builtin = 'digits' needs scikit-learn and Pillow ({error}): pip install 'megatfm[vision]', or set "
            "read.folder to a folder of images"
        ) from error
    digits = load_digits()
    n_train = len(digits.images) * TRAIN_SHARE[0] // TRAIN_SHARE[1]
    splits = {
        "train": rng.permutation(n_train, 0, "digits"),
        "validation": np.arange(n_train, len(digits.images)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split, indices in splits.items():
        path = folder / f"{split}.tar"
        if path.exists():
            continue
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for index in indices.tolist():
                png = io.BytesIO()
                pixels = np.round(digits.images[index] * (255 / 16)).astype(np.uint8)
                Image.fromarray(pixels).save(png, "PNG")
                _add(tar, f"{index:04d}.png", png.getvalue())
                _add(tar, f"{index:04d}.cls", str(digits.target[index]).encode())
        atomic_write(path, content.getvalue())
        os.utime(path, (0, 0))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
