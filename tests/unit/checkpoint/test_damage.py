"""Damaged and planted files: each is refused by name, and the checkpoint before it is used."""

import errno
import json
import os
import pickle
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from megatfm.checkpoint import (
    check_all_bytes,
    chunked_io,
    file_format,
    find_latest,
    load,
    read_state,
    read_tensor_specs,
    read_tensors,
    save,
)
from megatfm.checkpoint.directory import find_latest_intact
from megatfm.errors import MegatfmError, UsageError
from tests.support.files import METADATA, edit_metadata, write_schema_1

SHARD = "rank-00000-000.safetensors"


@pytest.fixture(params=["through the page cache", "past it"])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Step 2, with a whole step 1 before it."""
    if request.param == "past it":
        monkeypatch.setattr(file_format, "DIRECT_BYTES", 0)
        monkeypatch.setattr(chunked_io, "_is_in_page_cache", lambda fd, size: False)
    tensors = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(6)}
    save(tmp_path, 1, tensors, {"step": 1})
    return save(tmp_path, 2, tensors, {"step": 2})


BOMB_TRACE = Path(tempfile.mkdtemp(prefix="megatfm-")) / "bomb-went-off"
"""Made by the pickle, were it loaded."""


class MaliciousPickle:
    """A pickle that leaves a trace when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {BOMB_TRACE}",)


HARM: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1), "empty": lambda file: os.truncate(file, 0),
    "extended": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "blown up": lambda file: os.truncate(file, 2**40), "removed": Path.unlink,
    "a link": lambda file: file.symlink_to(file.rename(file.with_name("elsewhere"))),
    "a folder": lambda file: (file.unlink(), file.mkdir()), "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a pickle": lambda file: file.write_bytes(pickle.dumps(MaliciousPickle())),
}  # fmt: skip


@pytest.mark.parametrize("name", [SHARD, METADATA])
@pytest.mark.parametrize("harm", HARM)
def test_harm_is_named_and_the_one_before_is_used(
    path: Path, harm: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    HARM[harm](path / name)
    for use in (read_tensors, check_all_bytes, lambda path: load(path, {"w": torch.zeros(4, 6)})):
        with pytest.raises(MegatfmError, match=re.escape(str(path / name))) as error:
            use(path)
        assert "\n" not in str(error.value)
    assert find_latest(path.parent) == path.parent / "step-00000001"
    assert "step-00000002 is not used" in caplog.text
    assert name in caplog.text
    assert not BOMB_TRACE.exists()


def iter_flipped(content: bytes, every: int = 1) -> Iterator[bytes]:
    """The content with a bit changed: in each byte, or in one of `every`."""
    for at in range(0, len(content), every):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_every_flipped_byte_of_the_metadata_is_seen(path: Path) -> None:
    for flipped in iter_flipped((path / METADATA).read_bytes()):
        (path / METADATA).write_bytes(flipped)
        with pytest.raises(MegatfmError, match=METADATA):
            read_state(path)


def test_every_flipped_byte_of_the_tensors_is_seen(path: Path) -> None:
    every = 1 if file_format.DIRECT_BYTES else 23  # past the page cache each one goes to the disk and back
    for flipped in iter_flipped((path / SHARD).read_bytes(), every):
        (path / SHARD).write_bytes(flipped)
        with pytest.raises(MegatfmError, match=f"{SHARD} is damaged: its content doesn't have its hash"):
            load(path, {"b": torch.zeros(6, dtype=torch.int64)})
    assert find_latest(path.parent) == path  # the sizes are right
    assert find_latest(path.parent, hashes=True) == path.parent / "step-00000001"


def test_no_whole_checkpoint_is_no_fresh_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path / SHARD).unlink()
    HARM["truncated"](path.parent / "step-00000001" / METADATA)
    with pytest.raises(MegatfmError, match="none of its 2 checkpoints is intact"):
        find_latest(path.parent)
    assert "step-00000001 is not used" in caplog.text


def test_a_checkpoint_without_permission(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(file: Path, *args: Any, **kwargs: Any) -> int:
        if path in file.parents:  # chmod would not stop root
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert find_latest(path.parent) == path.parent / "step-00000001"
    assert f"step-00000002 is not used: can't read {path / METADATA}: Permission denied" in caplog.text


def test_a_renamed_or_linked_checkpoint_is_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(path, path.with_name("step-00000009"))
    path.with_name("step-00000008").symlink_to(path)
    assert find_latest(path.parent) == path
    assert "step-00000009 is not used: it holds step 2" in caplog.text
    assert "step-00000008 is not used: it is a symbolic link" in caplog.text


def test_links_in_a_checkpoint_folder_are_refused_at_start(path: Path, tmp_path: Path) -> None:
    path.with_name("step-00000008").symlink_to(path)
    with pytest.raises(UsageError, match=r"step-00000008 is a symbolic link: put the checkpoint itself"):
        find_latest_intact(path.parent)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(MegatfmError, match=r"link is a symbolic link to no folder"):
        find_latest_intact(tmp_path / "link")


def forge_shard(path: Path, content: bytes) -> None:
    """Put another file in the place of the shard, with size and hash in the metadata to match."""
    (path / SHARD).write_bytes(content)
    entry = {"bytes": len(content), "blake3": blake3(content).hexdigest()}
    edit_metadata(path, lambda body: body["files"].update({SHARD: entry}))


def move_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(SHARD)
        for tensor in body.get("tensors", {}).values():
            for piece in tensor["pieces"]:
                piece["file"] = name

    return change


def piece_1(body: dict[str, Any]) -> Any:
    """The piece of w in schema 1."""
    return body["tensors"]["w"]["pieces"][0]


def group(body: dict[str, Any]) -> Any:
    """The group of w."""
    return body["groups"][1]


def piece(body: dict[str, Any]) -> Any:
    return group(body)["pieces"][0]


def grow_shape(body: dict[str, Any], size: int) -> None:
    group(body)["shape"][0] = piece(body)["sizes"][0] = size


def nest_state(body: dict[str, Any]) -> None:
    for _ in range(900):
        body["state"] = {"a": body["state"]}


def check_refusal(path: Path, reason: str) -> None:
    for use in (read_tensors, check_all_bytes):
        with pytest.raises(MegatfmError, match=re.escape(reason)) as error:
            use(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("change", "reason"), [
    (move_file("../step-00000001/" + SHARD), "files.../step-00000001/rank-00000-000.safetensors"),
    (move_file("/etc/passwd"), "not '/etc/passwd'"),
    (move_file("rank-00000-000.pt"), "not 'rank-00000-000.pt'"),
    (move_file(SHARD + "\n"), r"not 'rank-00000-000.safetensors\n'"),
    (move_file("rank-00007-000.safetensors"), "rank-00007-000.safetensors: No such file"),
    (lambda body: body["files"].update({"x": body["files"][SHARD]}), "files.x"),
    (lambda body: piece(body).update(runs=[[1, 1]]), "file 1, which it doesn't list"),
    (lambda body: piece(body).update(runs=[[-1, 1]]), "greater than or equal to 0"),
    (lambda body: piece(body).update(runs=[[0, 0]]), "greater than 0"),
    (lambda body: piece(body).update(runs=[]), "another number of tensors than the 1"),
    (lambda body: piece(body).update(runs=[[0, 2]]), "another number of tensors than the 1"),
    (lambda body: group(body).update(names=[]), "groups.1.names"),
    (lambda body: group(body).update(names=["w", "w"]), "another number of tensors than the 2"),
    (lambda body: group(body).update(names=["b"]), "lists 1 tensors twice"),
    (lambda body: group(body).update(names=["x"]), f"{SHARD} is not what {METADATA} says: x is missing"),
    (lambda body: piece(body).update(offsets=[1, 0]), "tensor w: a piece of shape (4, 6) at (1, 0) lies outside"),
    (lambda body: piece(body).update(offsets=[-1, 0]), "greater than or equal to 0"),
    (lambda body: piece(body).update(sizes=[4.0, 6]), "valid integer"),
    (lambda body: group(body)["pieces"].append(piece(body)), "the pieces hold 48 elements"),
    (lambda body: group(body)["pieces"].clear(), "the pieces hold 0 elements"),
    (lambda body: grow_shape(body, 2**40), f"bytes of tensors in {SHARD}"),
    (lambda body: grow_shape(body, 2**70), "less than"),
    (lambda body: group(body).update(shape=[2**40, 2**40, 0], pieces=[]), "absurd shape"),
    (lambda body: group(body).update(dtype="OBJECT"), "unknown dtype 'OBJECT'"),
    (lambda body: group(body).update(dtype="I32"), "is not what"),
    (lambda body: body["files"][SHARD].update(bytes=2**59), "bytes instead of"),
    (lambda body: body["files"][SHARD].update(blake3="0" * 64), "doesn't have its hash"),
    (lambda body: body.update(schema_version=3), "schema version 3"),
    (lambda body: body.update(schema_version=0), "schema version 0"),
    (lambda body: body.update(schema_version=1), "tensors: Field required"),
    (lambda body: body.pop("schema_version"), "has schema version None"),
    (lambda body: body.update(format="other"), "format"),
    (lambda body: body.update(pickle="gASV"), "pickle: Extra inputs"),
    (lambda body: body.update(step="2"), "step"),
    (lambda body: body.pop("files"), "files: Field required"),
    (nest_state, "metadata.json"),
])  # fmt: skip
def test_forged_metadata_is_refused(path: Path, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    edit_metadata(path, change)
    check_refusal(path, reason)


@pytest.mark.parametrize(("change", "reason"), [
    (move_file("../step-00000001/" + SHARD), "not '../step-00000001/rank-00000-000.safetensors'"),
    (lambda body: piece_1(body).update(file="../" + SHARD), "tensors.w.pieces.0.file"),
    (lambda body: piece_1(body).update(file="rank-00007-000.safetensors"), "which it doesn't list"),
    (lambda body: piece_1(body).update(key="b"), "tensor w: its piece w has the key 'b'"),
    (lambda body: piece_1(body).update(offsets=[1, 0], key="w"),
     "tensor w: a piece of shape (4, 6) at (1, 0) lies outside"),
    (lambda body: body["tensors"]["w"]["pieces"].append(piece_1(body)), "the pieces hold 48 elements"),
    (lambda body: body["tensors"]["w"]["pieces"].clear(), "the pieces hold 0 elements"),
    (lambda body: body["tensors"]["w"].update(dtype="I32"), "is not what"),
    (lambda body: body.update(schema_version=2), "groups: Field required"),
    (lambda body: body.update(groups=[]), "groups: Extra inputs"),
])  # fmt: skip
def test_forged_metadata_of_earlier_versions_is_refused(
    path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    write_schema_1(path)
    assert torch.equal(read_tensors(path)["w"], torch.arange(24.0).reshape(4, 6))
    edit_metadata(path, change)
    check_refusal(path, reason)


def header(content: object, size: int | None = None) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw


W = {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}


@pytest.mark.parametrize("content", [
    pickle.dumps(MaliciousPickle()),
    *(header({}, size=2**63), header({}, size=2**20)),
    *(header(b"\xff" * 9), header(b"[" * 50_000), header([1, 2]), header({"w": 1})),
    *(header({"w": {**W, "dtype": "OBJECT"}}), header({"w": {**W, "shape": "ab"}})),
    *(header({"w": {**W, "data_offsets": offsets}}) for offsets in ([-96, 0], [200, 296], [0, 95])),
    header({"w": {**W, "shape": [-4, -6]}}),
    *(header({"w": {**W, "shape": s, "data_offsets": [0, 0]}}) for s in ([2**70, 0], [2**50, 2**50, 0])),
], ids=lambda content: f"{len(content)} bytes")  # fmt: skip
def test_forged_files_are_refused(path: Path, content: bytes) -> None:
    forge_shard(path, content + bytes(200))
    check_refusal(path, f"{path / SHARD} is not a safetensors file")
    assert not BOMB_TRACE.exists()


def test_the_store_is_read_without_its_tensors(path: Path) -> None:
    (path / SHARD).unlink()
    assert read_state(path) == {"step": 2}
    assert read_tensor_specs(path) == {"w": (torch.float32, (4, 6)), "b": (torch.int64, (6,))}


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegatfmError, match=r"can't read .*metadata\.json: No such file"):
        read_state(tmp_path / "step-00000001")
