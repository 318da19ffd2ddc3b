"""Tensors out of pickles that others wrote, without running anything of theirs.

torch's own restricted reader refuses a file as soon as it names one class that it doesn't know; DeepSpeed's name some.
Here these become objects that hold nothing.
"""

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

from megatfm.errors import MegatfmError

KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
}
"""All that may be called while a file is read, besides what makes torch's storages."""


class Nothing:
    """In the place of an object of a class that isn't known."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Nothing":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Of a list's kind: keeps nothing."""

    def extend(self, items: Any) -> None:
        """Likewise."""


class Reader(pickle.Unpickler):
    """Finds what `KNOWN` holds, and for all else `Nothing`."""

    def find_class(self, module: str, name: str) -> Any:
        """What a file names."""
        return KNOWN.get((module, name), Nothing)


def read(path: Path) -> Any:
    """What torch.save wrote. Raises MegatfmError."""
    tools = SimpleNamespace(
        __name__=__name__, Unpickler=Reader, load=lambda file, **how: Reader(file, **how).load()
    )
    try:
        return torch.load(path, map_location="cpu", pickle_module=tools, weights_only=False)
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
        KeyError,
        TypeError,
    ) as error:
        raise MegatfmError(f"{path}: can't read it: {error}") from None
