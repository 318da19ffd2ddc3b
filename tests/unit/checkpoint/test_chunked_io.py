"""Files past the page cache: the same bytes, hashes and errors as through it, and only where that is of use."""

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blake3 import blake3
from safetensors.torch import load_file

from megatfm.checkpoint import (
    Saver,
    ShardedTensor,
    check_all_bytes,
    chunked_io,
    file_format,
    file_io,
    load,
    read_tensors,
    save,
)
from megatfm.errors import MegatfmError
from tests.support.workers import Workers

CHUNK = 16384
SIZES = [0, 1, 4095, 4096, CHUNK, 3 * CHUNK, 7 * CHUNK + 4097]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files past the page cache, however small they are."""
    monkeypatch.setattr(chunked_io, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(chunked_io, "MIN_DIRECT_BYTES", CHUNK // 2)
    monkeypatch.setattr(chunked_io, "_is_in_page_cache", lambda fd, size: False)
    monkeypatch.setattr(file_format, "DIRECT_BYTES", 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each read by position was a direct one."""
    actual, real = [], os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        actual.append(is_direct(fd))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return actual


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def write_random(path: Path, size: int) -> bytes:
    content = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    path.write_bytes(content.numpy().tobytes())
    return path.read_bytes()


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatfm-read")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n_bytes", [1000, 4096, CHUNK + 1, 10**6])
def test_a_file_is_read_unchanged(tmp_path: Path, reads: list[bool], size: int, n_bytes: int) -> None:
    content, read = write_random(tmp_path / "file", size), bytearray()
    with file_io.HashedFile(tmp_path / "file", direct=True) as file:
        while file.remaining:
            read += file.read(min(n_bytes, file.remaining))
        assert file.hexdigest() == blake3(content).hexdigest()
    assert read == content
    assert any(reads) == (size > 0)
    assert readers() == []


def test_skipped_bytes_are_hashed(tmp_path: Path, reads: list[bool]) -> None:
    content = write_random(tmp_path / "file", SIZES[-1])
    with file_io.HashedFile(tmp_path / "file", direct=True) as file:
        file.skip(100)
        assert bytes(file.read(9000)) == content[100:9100]
        assert file.hexdigest() == blake3(content).hexdigest()
    assert any(reads)


@pytest.mark.parametrize("part", [1, 512, 4096])
def test_reads_that_give_less_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    content, real = write_random(tmp_path / "file", SIZES[-1]), os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        actual = real(fd, buffers, offset)
        return min(actual, part) if is_direct(fd) else actual

    monkeypatch.setattr(os, "preadv", short)
    with file_io.HashedFile(tmp_path / "file", direct=True) as file:
        assert bytes(file.read(file.size)) == content
        assert file.hexdigest() == blake3(content).hexdigest()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.EINVAL])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_read_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, code: int, number: int
) -> None:
    """EINVAL, too, where it doesn't come from reading past the page cache."""
    write_random(tmp_path / "file", SIZES[-1])
    first = (number - 1) * CHUNK

    def failing(genuine: Callable[..., int]) -> Callable[..., int]:
        def read(fd: int, buffers: Any, offset: int | None = None) -> int:
            at = os.lseek(fd, 0, os.SEEK_CUR) if offset is None else offset
            if at >= first:
                raise OSError(code, os.strerror(code))
            return genuine(fd, buffers, *([] if offset is None else [offset]))

        return read

    for name in ("readv", "preadv"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with (
        file_io.HashedFile(tmp_path / "file", direct) as file,
        pytest.raises(MegatfmError, match=f"can't read {tmp_path}/file: {os.strerror(code)}"),
    ):
        file.read(file.size)
    assert readers() == []


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("left", [0, 4000, 4096, CHUNK, 5 * CHUNK + 1])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, direct: bool, left: int) -> None:
    write_random(tmp_path / "file", SIZES[-1])
    fd = os.open(tmp_path / "file", os.O_RDWR)
    source = file_io.chunked_io.open_reader

    def shrinks(*args: Any) -> chunked_io.FileReader:
        os.ftruncate(fd, left)
        return source(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_io, "open_reader", shrinks)
        with (
            file_io.HashedFile(tmp_path / "file", direct) as file,
            pytest.raises(MegatfmError, match=f"file: it shrank to {left} bytes while it was read"),
        ):
            file.read(file.size)
    os.close(fd)


def test_filesystems_that_can_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some say so when they are asked for it, and some when it is done."""
    content, control, preadv = write_random(tmp_path / "file", SIZES[-1]), fcntl.fcntl, os.preadv
    refused = []

    def refuse(fd: int, *args: Any) -> int:
        if args[0] == fcntl.F_SETFL and args[1] & os.O_DIRECT:
            refused.append("asked")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(fd, *args)

    def fail(fd: int, *args: Any) -> int:
        if is_direct(fd):
            refused.append("done")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(fd, *args)

    for module, name, replacement in ((fcntl, "fcntl", refuse), (os, "preadv", fail)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, replacement)
            with file_io.HashedFile(tmp_path / "file", direct=True) as file:
                assert bytes(file.read(file.size)) == content
    assert {"asked", "done"} == set(refused)


@pytest.mark.parametrize(
    ("cached_pages", "direct"),
    [([1, 1, 1], False), ([1, 1, errno.EAGAIN], True), ([errno.EAGAIN], True), ([errno.EOPNOTSUPP], True)],
)
def test_cached_pages_are_read_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_pages: list[int], direct: bool
) -> None:
    monkeypatch.undo()
    write_random(tmp_path / "file", 10)
    answers = iter(cached_pages)

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags != os.RWF_NOWAIT:
            return real(fd, buffers, offset)
        if (answer := next(answers)) != 1:
            raise OSError(answer, os.strerror(answer))
        return 1

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    source = chunked_io.open_reader(fd, 10, True)
    assert isinstance(source, chunked_io.DirectFileReader) == direct
    assert next(answers, None) is None
    source.close()
    os.close(fd)


# ------------------------------------------------------------------------------------------------------ checkpoints


def list_direct_reads(folder: Path) -> list[list[str]]:
    """The files that are read past the page cache, of a checkpoint of two ranks: each its own, all, of two hosts."""
    rank, actual, genuine = dist.get_rank(), [], file_format.read_safetensors
    local_rows = ShardedTensor(torch.full((2, 3), float(rank)), (4, 3), (2 * rank, 0))
    path = save(folder, 1, {"rows": local_rows}, {})

    def read(path: Path, entry: Any, places: Any, direct: bool = False) -> Any:
        if direct:
            actual[-1].append(path.name)
        return genuine(path, entry, places, direct)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_format, "read_safetensors", read)
        for expected, host in ((local_rows, "one"), (torch.empty(4, 3), "one"), (torch.empty(4, 3), f"host-{rank}")):
            actual.append([])
            patch.setattr(socket, "gethostname", lambda host=host: host)
            load(path, {"rows": expected})
    return actual


def test_files_that_several_local_ranks_read_come_through_the_page_cache(workers: Workers, tmp_path: Path) -> None:
    first, second = (f"rank-0000{rank}-000.safetensors" for rank in range(2))
    both = [first, second]
    assert workers.run(list_direct_reads, 2, tmp_path) == [[[first], [], both], [[second], [], both]]


@pytest.mark.parametrize("operation", ["open", "write"])
def test_filesystems_that_can_not_write_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Some create the file before they refuse to open it."""
    real, refused = getattr(os, operation), []

    def fail(file: Any, argument: Any, *mode: int) -> int:
        if is_direct(file) if operation == "write" else argument & os.O_DIRECT:
            refused.append(file)
            if operation == "open":
                file.touch()
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, argument, *mode)

    monkeypatch.setattr(os, operation, fail)
    tensors = {"large": torch.randn(64, 1024), "odd": torch.randn(33, 1023)}
    path = save(tmp_path, 1, tensors, {})
    assert len(refused) == 1, "tried once"
    assert all(torch.equal(read_tensors(path)[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address and size of each direct write."""
    actual, real = [], os.write

    def write(fd: int, data: Any) -> int:
        if is_direct(fd):
            actual.append((torch.frombuffer(data, dtype=torch.uint8).data_ptr(), len(data)))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    return actual


def test_whole_blocks_are_written_right_out_of_the_copy(tmp_path: Path, written: list[tuple[int, int]]) -> None:
    """And only what is small or no whole blocks goes through the buffer; the library reads it all."""
    tensors = {
        "a": torch.arange(5.0),
        "double": torch.arange(3.0, dtype=torch.float64),
        "large": torch.randn(64, 1024),
        "odd": torch.randn(33, 1023),
        "other": torch.randn(4096, 13).to(torch.bfloat16),
        "small": torch.randn(1024),
    }
    with Saver(tmp_path) as saver:
        saver.save(1, tensors, {})
        saver.wait_for_save()
        start, size = saver._staging._buffer.data_ptr(), len(saver._staging._buffer)
    assert start % chunked_io.BLOCK_BYTES == 0
    assert all(address % chunked_io.BLOCK_BYTES == length % chunked_io.BLOCK_BYTES == 0 for address, length in written)
    straight = sum(length for address, length in written if start <= address < start + size)
    assert straight == tensors["large"].nbytes + tensors["other"].nbytes
    path = tmp_path / "step-00000001"
    check_all_bytes(path)
    reference = load_file(path / "rank-00000-000.safetensors")
    for read in (reference, read_tensors(path)):
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
