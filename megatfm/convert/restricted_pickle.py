"""Read tensors of foreign torch.save files without running their code.

A file must be a zip of one pickle and the uncompressed bytes of its tensors. `torch.load` is not used: it opens
TorchScript archives, whose code then runs, whatever unpickler it is given. Unknown classes in the pickle (DeepSpeed's)
become empty placeholders.
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
METADATA_ENTRIES = ("version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment")
"""Entries of torch's archives about the file itself."""
MAX_PICKLE_BYTES = 2**26
"""More than the names and shapes of any model's parameters need."""


class _Placeholder:
    """Object of an unknown class, which keeps nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Placeholder":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Keep nothing."""

    def extend(self, items: Any) -> None:
        """Keep nothing."""


class _Immutable:
    """Object that a pickle can't change: it has no attributes to set, and refuses a state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a state for an object that has none")


class Stored(_Immutable):
    """A tensor of a pickle."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Function(_Immutable):
    """A function that a pickle may call."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _StorageType(_Immutable):
    """A storage class, as `STORAGES` lists them."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Reader(pickle.Unpickler):
    """Unpickler that knows tensors and plain containers, and `_Placeholder` for all other classes."""

    def __init__(self, content: bytes, archive: "_Archive") -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name of a pickle: one of a few functions, `OrderedDict`, or `_Placeholder`."""
        if module == "torch" and name in STORAGES:
            return _StorageType(STORAGES[name])
        allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): _Function(tuple),
            ("torch._utils", "_rebuild_parameter"): _Function(lambda stored, *_: _check_stored(stored)),
            ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor),
        }
        return allowed.get((module, name), _Placeholder)

    def persistent_load(self, pid: Any) -> Tensor:
        """Return a storage as a flat tensor."""
        match pid:
            case ("storage", _StorageType(dtype=dtype), str(key), str(), int(n)):
                return self.archive.storage(key, dtype, n)
        raise pickle.UnpicklingError(f"{pid!r:.80} names no storage")


def _check_stored(stored: Any) -> Stored:
    if not isinstance(stored, Stored):
        raise pickle.UnpicklingError("a parameter of what is no tensor")
    return stored


def _rebuild_tensor(flat: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Stored:
    """Return a view of a storage with at most as many elements. Raises UnpicklingError for invalid sizes."""
    numbers = [offset, *size, *stride]
    if not isinstance(flat, Tensor) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
        raise pickle.UnpicklingError("a tensor of what is no storage, or of sizes that aren't counts")
    if len(size) != len(stride) or math.prod(size) > flat.numel():
        raise pickle.UnpicklingError(f"a tensor {list(size)} out of {flat.numel()} elements")
    return Stored(flat.as_strided(tuple(size), tuple(stride), offset))


class _Archive:
    """The zip archive of a file. Raises MegatfmError, or the errors of zipfile."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.zip = path, zipfile.ZipFile(file)
        entries = self.zip.infolist()
        names = [entry.filename for entry in entries]
        pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        self.prefix = pickles[0].removesuffix("data.pkl") if len(pickles) == 1 else ""
        allowed = re.compile(
            rf"{re.escape(self.prefix)}(data\.pkl|data/\d+|{'|'.join(map(re.escape, METADATA_ENTRIES))})"
        )
        unknown = [name for name in names if not self.prefix or not allowed.fullmatch(name)]
        if unknown:
            self._refuse(f"it holds {min(unknown)!r:.80}, so it is another kind of archive", unknown)
        if len(set(names)) < len(names) or any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            self._refuse("its entries are compressed, or there twice", names)
        if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
            self._refuse("its entries claim more bytes than the file has", names)
        byte_order = self.zip.read(f"{self.prefix}byteorder") if f"{self.prefix}byteorder" in names else b"little"
        if byte_order != b"little":
            self._refuse(f"its bytes are in the order {byte_order!r:.20}, not 'little'", names)
        self._storages: dict[str, tuple[Tensor, torch.dtype]] = {}

    def _refuse(self, reason: str, names: list[str]) -> None:
        is_script = any(name.endswith("/constants.pkl") or "/code/" in name for name in names)
        kind = " (TorchScript, whose code would run)" * is_script
        raise MegatfmError(
            f"{self.path}: {reason}{kind}: only tables of tensors are opened: write them by torch.save(TABLE, FILE)"
        )

    def content(self) -> bytes:
        """Return the pickle. Raises an error if one of its instructions needs more memory than its size."""
        name = f"{self.prefix}data.pkl"
        if self.zip.getinfo(name).file_size > MAX_PICKLE_BYTES:
            raise MegatfmError(f"{self.path}: its table has more than {MAX_PICKLE_BYTES:,} bytes: no model's has")
        content = self.zip.read(name)
        for code, argument, _ in pickletools.genops(content):
            if "PUT" in code.name and isinstance(argument, int) and argument > len(content):
                raise pickle.UnpicklingError(f"the memo's place {argument}, though there are fewer")
        return content

    def storage(self, key: str, dtype: torch.dtype, n_elements: int) -> Tensor:
        """Return a storage as a flat tensor; tensors that share it get the same memory."""
        if key not in self._storages:
            content = bytearray(self.zip.read(f"{self.prefix}data/{key}"))
            if len(content) != n_elements * dtype.itemsize:
                raise pickle.UnpicklingError(
                    f"storage {key} has {len(content)} bytes, not {n_elements * dtype.itemsize}"
                )
            flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            self._storages[key] = flat, dtype
        flat, stored_dtype = self._storages[key]
        if (flat.numel(), stored_dtype) != (n_elements, dtype):
            raise pickle.UnpicklingError(f"storage {key} is said to be two")
        return flat


@contextmanager
def _open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file. Raises MegatfmError for another kind: opening a FIFO would wait for a writer."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise MegatfmError(f"{path}: no regular file")
        yield file


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save, with its tensors as `Stored`. Raises MegatfmError."""
    try:
        with _open_regular(path) as file:
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
