"""Files under zstd and xz, unpacked a piece at a time: what a small file claims to hold never fills the memory."""

import io
import lzma
from pathlib import Path
from typing import IO, cast

import zstandard

XZ_MEMORY = 2**28
"""Memory that unpacking xz may take; its strongest preset takes 65 MiB."""
_CHUNK = 2**16
_MAGIC, _SKIPPABLE = 0xFD2FB528, 0x184D2A50
_RAW, _REPEATED = 0, 1


def open_zstd(path: Path) -> IO[bytes]:
    """A zstd file of any number of frames; one that is cut off raises EOFError at its end."""
    return cast(IO[bytes], io.BufferedReader(_Zstd(path), 2**17))


def open_xz(path: Path) -> IO[bytes]:
    """An xz file of any number of streams; one that is cut off raises EOFError at its end."""
    return cast(IO[bytes], io.BufferedReader(_Xz(path), _CHUNK))


class _Unpacked(io.RawIOBase):
    """A stream of what `_fill` gives."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._data:
            piece = self._fill()
            if piece is None:
                return 0
            self._data = memoryview(piece)
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _fill(self) -> bytes | None:
        """The next piece, perhaps empty; None at the end."""
        raise NotImplementedError


class _Zstd(_Unpacked):
    """Fed block by block, each of which holds 128 KiB at most (RFC 8878, section 3.1.1.2.4): the library's own reader
    is bounded as well, but takes the end of a cut file for the end of the text."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._has_checksum = False

    def _fill(self) -> bytes | None:
        if self._frame is None:
            return b"" if self._begin() else None
        head = self._read(3)
        word = int.from_bytes(head, "little")
        is_last, kind, size = word & 1, word >> 1 & 3, word >> 3
        block = head + self._read(1 if kind == _REPEATED else min(size, 2**17 + 1))
        if is_last and self._has_checksum:
            block += self._read(4)
        piece = self._frame.decompress(block)
        if is_last:
            self._frame = None
        return piece

    def _begin(self) -> bool:
        """Read the header of the next frame; False if there is none."""
        magic = self._file.read(4)
        if not magic:
            return False
        number = int.from_bytes(magic, "little")
        if number & ~0xF == _SKIPPABLE and len(magic) == 4:
            left = int.from_bytes(self._read(4), "little")
            while left:
                left -= len(self._read(min(left, _CHUNK)))
            return True
        if number != _MAGIC:
            raise zstandard.ZstdError("no frame begins where one should")
        descriptor = self._read(1)
        flag, is_single, dictionary = descriptor[0] >> 6, descriptor[0] >> 5 & 1, descriptor[0] & 3
        size = (0 if is_single else 1) + (0, 1, 2, 4)[dictionary] + (is_single, 2, 4, 8)[flag]
        self._has_checksum = bool(descriptor[0] >> 2 & 1)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._frame.decompress(magic + descriptor + self._read(size))
        return True

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the last frame is not whole")
        return data


class _Xz(_Unpacked):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stream: lzma.LZMADecompressor | None = None
        self._rest = b""

    def _fill(self) -> bytes | None:
        if self._stream is not None and self._stream.eof:
            self._rest, self._stream = self._stream.unused_data, None
        if self._stream is None:
            # Streams may be padded by zeros, four at a time.
            self._rest = (self._rest or self._file.read(_CHUNK)).lstrip(b"\0")
            if not self._rest:
                return b"" if self._file.peek(1) else None
            self._stream = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
        if self._stream.needs_input and not self._rest:
            self._rest = self._file.read(_CHUNK)
            if not self._rest:
                raise EOFError("the last stream is not whole")
        piece = self._stream.decompress(self._rest, _CHUNK)
        self._rest = b""
        return piece
