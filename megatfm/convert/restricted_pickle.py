"""Read tensors of foreign torch.save files without running their code.

A file must be a zip of one pickle and of the bytes of its tensors, stored as they are. torch never sees it, for
`torch.load` opens a TorchScript archive, whose code then runs, whatever reader it is told to use. Classes in the pickle
that aren't known (DeepSpeed names some) become objects that hold nothing.
"""

import io
import math
import os
import pickle
import pickletools
import re
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from megatfm.errors import MegatfmError

STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
ABOUT = ("version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment")
"""Entries of torch's archives that say something of the file."""
PICKLE_BYTES = 2**26
"""More than the names, shapes and numbers of any model's parameters take."""


class _Placeholder:
    """Placeholder for an object of an unknown class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Placeholder":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Keep nothing, as a list's method."""

    def extend(self, items: Any) -> None:
        """Keep nothing, likewise."""


class _Closed:
    """An object that a pickle can't alter: it has no attributes to set, and refuses a state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a state for what has none")


class Stored(_Closed):
    """A placeholder for a tensor in a pickle."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Function(_Closed):
    """A function that a pickle may call."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _StorageType(_Closed):
    """A name of `STORAGES`."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Reader(pickle.Unpickler):
    """Unpickler that finds tensors, plain containers, and `_Placeholder` for all else."""

    def __init__(self, content: bytes, archive: "_Archive") -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name in a file: one of a few functions, `OrderedDict`, or `_Placeholder`."""
        if module == "torch" and name in STORAGES:
            return _StorageType(STORAGES[name])
        allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): _Function(tuple),
            ("torch._utils", "_rebuild_parameter"): _Function(lambda stored, *_: _checked(stored)),
            ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
        }
        return allowed.get((module, name), _Placeholder)

    def persistent_load(self, pid: Any) -> Tensor:
        """The bytes of a tensor, as a flat tensor of their kind."""
        match pid:
            case ("storage", _StorageType(dtype=dtype), str(key), str(), int(n)):
                return self.archive.storage(key, dtype, n)
        raise pickle.UnpicklingError(f"{pid!r:.80} names no storage")


def _checked(stored: Any) -> Stored:
    if not isinstance(stored, Stored):
        raise pickle.UnpicklingError("a parameter of what is no tensor")
    return stored


def _tensor(flat: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Stored:
    """A view of a storage's elements, each of which it holds at most once."""
    numbers = [offset, *size, *stride]
    if not isinstance(flat, Tensor) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise pickle.UnpicklingError("a tensor of what is no storage, or of sizes that aren't counts")
    if len(size) != len(stride) or math.prod(size) > flat.numel():
        raise pickle.UnpicklingError(f"a tensor {list(size)} out of {flat.numel()} elements")
    return Stored(flat.as_strided(tuple(size), tuple(stride), offset))


class _Archive:
    """The zip of a file. Raises MegatfmError, or what zipfile raises."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.zip = path, zipfile.ZipFile(file)
        entries = self.zip.infolist()
        names = [entry.filename for entry in entries]
        pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        self.prefix = pickles[0].removesuffix("data.pkl") if len(pickles) == 1 else ""
        plain = re.compile(rf"{re.escape(self.prefix)}(data\.pkl|data/\d+|{'|'.join(map(re.escape, ABOUT))})")
        strange = [name for name in names if not self.prefix or not plain.fullmatch(name)]
        if strange:
            self._refuse(f"it holds {min(strange)!r:.80}, so it is another kind of archive", strange)
        if len(set(names)) < len(names) or any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            self._refuse("its entries are compressed, or there twice", names)
        if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
            self._refuse("its entries claim more bytes than the file has", names)
        order = self.zip.read(f"{self.prefix}byteorder") if f"{self.prefix}byteorder" in names else b"little"
        if order != b"little":
            self._refuse(f"its bytes are in the order {order!r:.20}, not 'little'", names)
        self._flat: dict[str, tuple[Tensor, torch.dtype]] = {}

    def _refuse(self, reason: str, names: list[str]) -> None:
        is_script = any(name.endswith("/constants.pkl") or "/code/" in name for name in names)
        kind = " (TorchScript, whose code would run)" * is_script
        raise MegatfmError(
            f"{self.path}: {reason}{kind}: only tables of tensors are opened: write them by torch.save(TABLE, FILE)"
        )

    def content(self) -> bytes:
        """The pickle, none of whose instructions asks for memory beyond its own size."""
        name = f"{self.prefix}data.pkl"
        if self.zip.getinfo(name).file_size > PICKLE_BYTES:
            raise MegatfmError(f"{self.path}: its table has more than {PICKLE_BYTES:,} bytes: no model's has")
        content = self.zip.read(name)
        for code, argument, _ in pickletools.genops(content):
            if "PUT" in code.name and isinstance(argument, int) and argument > len(content):
                raise pickle.UnpicklingError(f"the memo's place {argument}, though there are fewer")
        return content

    def storage(self, key: str, dtype: torch.dtype, n_elements: int) -> Tensor:
        """Elements of a storage; tensors that share one get the same memory."""
        if key not in self._flat:
            content = bytearray(self.zip.read(f"{self.prefix}data/{key}"))
            if len(content) != n_elements * dtype.itemsize:
                raise pickle.UnpicklingError(
                    f"storage {key} has {len(content)} bytes, not {n_elements * dtype.itemsize}"
                )
            flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            self._flat[key] = flat, dtype
        flat, stored_dtype = self._flat[key]
        if (flat.numel(), stored_dtype) != (n_elements, dtype):
            raise pickle.UnpicklingError(f"storage {key} is said to be two")
        return flat


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A regular file: opening a FIFO would wait for a writer."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise MegatfmError(f"{path}: no regular file")
        yield file


def read(path: Path) -> Any:
    """Return what torch.save wrote, its tensors as `Stored`. Raises MegatfmError."""
    try:
        with _opened(path) as file:
            archive = _Archive(path, file)
            return _Reader(archive.content(), archive).load()
    except MegatfmError:
        raise
    except zipfile.BadZipFile as error:
        raise MegatfmError(
            f"{path}: no whole archive of torch.save ({error}): copy it again; files of torch before 1.6 are rewritten "
            "by torch.save(torch.load(FILE, weights_only=True), FILE)"
        ) from None
    # A damaged pickle may raise anything.
    except Exception as error:
        reason = str(cast(Any, error).strerror) if isinstance(error, OSError) else f"{error}"
        raise MegatfmError(f"{path}: can't read it: {reason or type(error).__name__:.200}") from None
