"""Round trips: one process, every dtype and shape, and the errors of a request that doesn't fit."""

import errno
import fcntl
import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatfm.checkpoint import (
    ShardedTensor,
    check_all_bytes,
    chunked_io,
    file_format,
    load,
    read_state,
    read_tensor_specs,
    read_tensors,
    save,
    sharded_tensor,
    update_state,
    writer,
)
from megatfm.checkpoint.file_format import DTYPES
from megatfm.checkpoint.metadata import check_json_round_trip
from megatfm.errors import MegatfmError, UsageError


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal down to the sign of zero and the payload of NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def sample() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    floats = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return {
        "weight": floats.float(),
        "transposed": floats.T,
        "half": floats[:, :3].bfloat16(),
        "special": torch.tensor([math.nan, -0.0, math.inf, 5e-324], dtype=torch.float64),
        "moment": torch.tensor(3.5, dtype=torch.float64),
        "steps": torch.tensor(2**62 + 1),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
    }


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2 if name == "BOOL" else 256, (8, 8), generator=torch.Generator().manual_seed(0))
    tensor = raw.to(torch.uint8).view(DTYPES[name])
    path = save(tmp_path, 1, {"x": tensor}, {})
    assert same_bits(read_tensors(path)["x"], tensor)


def test_round_trip_in_place(tmp_path: Path) -> None:
    """Also the library of the format reads the file."""
    tensors = sample()
    state = {"step": 7, "text": "é\ud800", "nested": {"list": [1, 1.0, True, None, 0.1, -0.0]}, "big": 2**200}
    path = save(tmp_path, 7, tensors, state)
    assert path == tmp_path / "step-00000007"
    targets = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    back = load(path, targets)
    assert json.dumps(back) == json.dumps(state)
    assert json.dumps(read_state(path)) == json.dumps(state)
    by_library = load_file(path / "rank-00000-000.safetensors")
    assert by_library.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(targets[name], tensor), name
        assert same_bits(by_library[name], tensor), name
    assert read_tensor_specs(path) == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    check_all_bytes(path)


def test_parameters_are_filled_where_they_are(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    path = save(tmp_path, 0, model.state_dict(), {})
    other = torch.nn.Linear(3, 2)
    load(path, dict(other.named_parameters()))
    assert other.weight.requires_grad
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_a_part_can_be_read_and_converted(tmp_path: Path) -> None:
    tensors = sample()
    path = save(tmp_path, 1, tensors, {})
    assert list(read_tensors(path, "st")) == ["steps"]
    block = torch.zeros(2, 3)
    load(path, {"weight": ShardedTensor(block, (6, 4), (3, 1))})
    assert torch.equal(block, tensors["weight"][3:5, 1:4])
    half = torch.zeros(6, 4, dtype=torch.bfloat16)
    load(path, {"weight": half}, cast=True)
    assert torch.equal(half, tensors["weight"].bfloat16())


def test_large_boxes_are_cut_into_pieces_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_tensor, "PIECE_BYTES", 64)
    monkeypatch.setattr(writer, "FILE_BYTES", 200)
    tensors = {"wide": torch.arange(120.0).reshape(3, 40), "long": torch.arange(119.0).reshape(17, 7)}
    path = save(tmp_path, 1, tensors, {})
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 4
    pieces = {key: piece for file in files for key, piece in load_file(file).items()}
    assert torch.equal(pieces["wide[1:2,0:40]"], tensors["wide"][1:2])
    assert all(piece.nbytes <= 64 or len(piece) == 1 for piece in pieces.values())
    assert all(same_bits(tensor, tensors[name]) for name, tensor in read_tensors(path).items())


def test_files_are_read_once_and_only_if_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 100)
    path = save(tmp_path, 1, {"a": torch.zeros(20), "b": torch.zeros(20), "c": torch.zeros(20)}, {})
    read, opened = file_format.read_safetensors, []
    note = lambda file, *remaining: opened.append(file.name) or read(file, *remaining)  # noqa: E731
    monkeypatch.setattr(file_format, "read_safetensors", note)
    load(path, {"a": torch.ones(20), "c": torch.ones(20)})
    assert opened == ["rank-00000-000.safetensors", "rank-00000-002.safetensors"]


@pytest.mark.parametrize("bytes_of_rows", [1, 4096, 8191])
@pytest.mark.parametrize("short", [False, True])
def test_files_written_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_of_rows: int, short: bool
) -> None:
    monkeypatch.setattr(file_format, "DIRECT_BYTES", 0)
    monkeypatch.setattr(chunked_io, "CHUNK_BYTES", 16384)
    flags, real = [], os.write

    def write(fd: int, data: memoryview) -> int:
        flags.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data[: len(data) // 8192 * 4096] if short and len(data) > 8192 else data)

    monkeypatch.setattr(os, "write", write)
    tensors = {name: torch.randint(0, 255, (23, bytes_of_rows), dtype=torch.uint8) for name in ("a", "b")}
    path = save(tmp_path, 1, {**tensors, "c": torch.tensor(1.0)}, {})
    assert not flags[-1], "the last part block"
    if 23 * bytes_of_rows > 8192 and not short:
        assert any(flags) or tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev
    check_all_bytes(path)
    assert all(torch.equal(read_tensors(path)[name], tensor) for name, tensor in tensors.items())


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    first = save(tmp_path / "a", 3, sample(), {"seed": 1})
    second = save(tmp_path / "b", 3, dict(reversed(sample().items())), {"seed": 1})
    content = {file.name: file.read_bytes() for file in first.iterdir()}
    assert content == {file.name: file.read_bytes() for file in second.iterdir()}


def test_saving_a_step_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, 3, sample(), {"seed": 1})
    before = (path / "metadata.json").stat().st_ino
    assert save(tmp_path, 3, sample(), {"seed": 1}) == path
    assert (path / "metadata.json").stat().st_ino == before
    with pytest.raises(MegatfmError, match="step-00000003 already holds another checkpoint"):
        save(tmp_path, 3, sample(), {"seed": 2})
    assert read_state(path) == {"seed": 1}
    assert list(tmp_path.iterdir()) == [path]
    file = path / "rank-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert save(tmp_path, 3, sample(), {"seed": 2}) == path
    check_all_bytes(path)
    assert read_state(path) == {"seed": 2}
    assert "damaged" in caplog.text


@pytest.mark.parametrize(("targets", "message"), [
    ({"absent": torch.zeros(2)}, r"step-00000001 not loaded: it has no tensor absent$"),
    ({"weight": torch.zeros(4, 6)}, r"tensor weight has shape \(6, 4\) there, but \(4, 6\) here$"),
    ({"weight": torch.zeros(6, 4).half()}, r"tensor weight is F32 there, but F16 here: pass cast=True"),
])  # fmt: skip
def test_a_request_that_does_not_fit(tmp_path: Path, targets: dict[str, Tensor], message: str) -> None:
    path = save(tmp_path, 1, sample(), {})
    with pytest.raises(MegatfmError, match=message):
        load(path, targets)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"x": torch.zeros(2, dtype=torch.complex64)}, "tensor x: torch.complex64 on cpu can't be stored"),
    ({"x": torch.zeros(2, device="meta")}, "tensor x: torch.float32 on meta can't be stored"),
    ({"": torch.zeros(2)}, "under the name ''"),
    ({"__metadata__": torch.zeros(2)}, "under the name '__metadata__'"),
    ({"x": ShardedTensor(torch.zeros(2), (4,), (1,))},
     r"tensor x: the pieces hold 2 elements, but its shape \(4,\) has 4"),
])  # fmt: skip
def test_tensors_that_can_not_be_stored_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(MegatfmError, match=message):
        save(tmp_path, 1, tensors, {})
    assert list(tmp_path.iterdir()) == []


def test_a_name_like_another_one_s_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_tensor, "PIECE_BYTES", 4)
    with pytest.raises(MegatfmError, match="same key"):
        save(tmp_path, 1, {"x": torch.zeros(2), "x[0:1]": torch.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_box_outside_its_tensor() -> None:
    with pytest.raises(MegatfmError, match=r"shard of shape \(3,\) at \(2,\) lies outside its tensor of shape \(4,\)"):
        ShardedTensor(torch.zeros(3), (4,), (2,))
    with pytest.raises(MegatfmError, match="lies outside"):
        ShardedTensor(torch.zeros(3), (4, 1), (0, 0))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, (1, 2), {1: 2}, {"a": [(1,)]}, {1, 2}, torch.tensor(1), b"x", float]
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(MegatfmError, match="state 'value'"):
        check_json_round_trip({"value": value})  # type: ignore[dict-item]


def test_keep_must_keep_something(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep = 0"):
        save(tmp_path, 1, {}, {}, keep=0)


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {}, {"only": "state"})
    assert load(path, {}) == {"only": "state"}
    assert read_tensors(path) == {}


def test_a_state_is_changed_at_once_and_tensors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1, sample(), {"kept": 1, "changed": [2], "removed": {"a": 3}})
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", refuse)
        with pytest.raises(MegatfmError, match=r"can't write .*step-00000001/metadata\.json: No space left"):
            update_state(path, {"removed": None})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    update_state(path, {"changed": 4.5, "removed": None, "added": "x"})
    assert read_state(path) == {"kept": 1, "changed": 4.5, "added": "x"}
    check_all_bytes(path)
    after = {file.name: file.read_bytes() for file in path.iterdir()}
    assert after.keys() == before.keys()
    assert {name for name, content in after.items() if content != before[name]} == {"metadata.json"}
