"""Saved under one layout, loaded under another: bit for bit, on 1, 2 and 4 ranks."""

import itertools
import socket
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.checkpoint import (
    ShardedTensor,
    check_all_bytes,
    find_latest_intact,
    load,
    metadata,
    read_tensors,
    save,
    sharded_tensor,
)
from megatfm.errors import MegatfmError
from tests.support.files import write_schema_1
from tests.support.workers import Workers

HOST = socket.gethostname()
SHAPES = {
    "embedding": ((13, 6), torch.float32), "norm": ((7,), torch.float64), "experts": ((3, 4, 5), torch.bfloat16),
    "counts": ((5, 3), torch.int64), "step": ((), torch.int64), "empty": ((0, 4), torch.float32),
}  # fmt: skip
LAYOUTS = ("rows", "columns", "replicated", "grid", "stages")


def reference() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def shard(tensor: Tensor, parts: dict[int, tuple[int, int]]) -> ShardedTensor:
    """The box of part `index` of `count` along each dim given, as torch.chunk cuts (the last may be empty)."""
    offsets = [0] * tensor.dim()
    block = tensor
    for dim, (index, count) in parts.items():
        if dim < tensor.dim():
            size = tensor.shape[dim]
            width = -(-size // count)
            offsets[dim] = min(index * width, size)
            block = block.narrow(dim, offsets[dim], max(0, min(width, size - offsets[dim])))
    return ShardedTensor(block.clone(), tuple(tensor.shape), tuple(offsets))


def arrange(layout: str, tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, ShardedTensor | Tensor]:
    """A rank's tensors: rows as FSDP, columns as TP, a grid as TP × FSDP, stages as a pipeline cuts."""
    if layout == "replicated":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    if layout == "stages":
        return {name: tensor.clone() for i, (name, tensor) in enumerate(tensors.items()) if i % world == rank}
    tp = 2 if world > 1 else 1
    parts = {
        "rows": {0: (rank, world)},
        "columns": {1: (rank, world)},
        "grid": {1: (rank % tp, tp), 0: (rank // tp, world // tp)},
    }[layout]
    return {name: shard(tensor, parts) for name, tensor in tensors.items()}


def save_as(folder: Path, *layouts: str) -> list[Path]:
    """Save under each layout, in pieces of at most 64 bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_tensor, "PIECE_BYTES", 64)
        return [save(folder / name, 1, arrange(name, reference(), rank, world), {"a": 1}) for name in layouts]


def load_as(paths: list[Path], layouts: tuple[str, ...] = LAYOUTS) -> None:
    """Load each checkpoint under each layout."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for path, layout in itertools.product(paths, layouts):
        expected = {
            name: ShardedTensor.from_tensor(part) for name, part in arrange(layout, reference(), rank, world).items()
        }
        target = {
            name: ShardedTensor(torch.full_like(part.tensor, 9), part.global_shape, part.offsets)
            for name, part in expected.items()
        }
        assert load(path, target) == {"a": 1}
        for name, part in expected.items():
            assert torch.equal(target[name].tensor, part.tensor), (path, layout, name)


def check_whole(path: Path) -> None:
    check_all_bytes(path)
    tensors = read_tensors(path)
    assert tensors.keys() == SHAPES.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in reference().items())


@pytest.mark.parametrize("world", [2, 4])
def test_any_layout_to_any_other(workers: Workers, tmp_path: Path, world: int) -> None:
    paths = [tmp_path / layout / "step-00000001" for layout in LAYOUTS]
    assert workers.run(save_as, world, tmp_path, *LAYOUTS) == [paths] * world
    for path in paths:
        check_whole(path)
    workers.run(load_as, 1, paths, LAYOUTS[:1])  # alone, all layouts are one
    for other_world in (2, 4):
        workers.run(load_as, other_world, paths)


@pytest.mark.parametrize("world", [3, 5])
def test_ranks_that_share_no_name_or_few(workers: Workers, tmp_path: Path, world: int) -> None:
    """Each rank's names are sent to rank 0, as no two of them have the same."""
    paths = workers.run(save_as, world, tmp_path, "stages")[0]
    check_whole(paths[0])
    workers.run(load_as, world, paths, ("stages", "rows", "columns"))


def test_checkpoints_of_earlier_versions_load_under_any_layout(workers: Workers, tmp_path: Path) -> None:
    paths = workers.run(save_as, 4, tmp_path, "columns", "stages")[0]
    for path in paths:
        write_schema_1(path)
        check_whole(path)
        assert find_latest_intact(path.parent) == path
    workers.run(load_as, 4, paths)


def save_hsdp(folder: Path) -> Path:
    """Two replicas of two shards, and one tensor that all four have."""
    rank = dist.get_rank()
    tensors: dict[str, ShardedTensor | Tensor] = {
        name: shard(torch.arange(4096.0).reshape(64, 64), {0: (rank % 2, 2)}) for name in ("a", "b", "c")
    }
    return save(folder, 1, {**tensors, "all": torch.ones(100, 8), "small": torch.ones(3)}, {})


def test_replicas_are_written_once_and_by_turns(workers: Workers, tmp_path: Path) -> None:
    path = workers.run(save_hsdp, 4, tmp_path)[0]
    content = metadata.read_metadata(path)
    stored = Counter[str]()
    for piece in content.iter_pieces_in(content.files):
        stored[piece.file] += prod(piece.sizes) * piece.dtype.itemsize
    total = 3 * 4096 * 4 + 100 * 8 * 4 + 3 * 4
    assert sum(stored.values()) == total
    assert len(stored) == 4
    # A fair share is 13 KB and the largest piece 8 KB: largest-first stays within one piece of it.
    assert max(stored.values()) <= total / 4 + 8192
    on_disk = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert total <= on_disk <= total + 4 * 1024


def test_the_layout_decides_the_bytes_and_nothing_else_does(workers: Workers, tmp_path: Path) -> None:
    (first,), (second,) = (workers.run(save_as, 4, tmp_path / name, "grid")[0] for name in "ab")
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {f.name: f.read_bytes() for f in second.iterdir()}
    assert workers.run(save_as, 4, tmp_path / "a", "grid")[0] == [first]


def save_wrongly(folder: Path, fault: str) -> str:
    rank = dist.get_rank()
    tensor = torch.zeros(4, 2)
    rows = shard(tensor, {0: (rank, 2)})
    tensors: dict[str, ShardedTensor | Tensor] = {
        "gap": {"w": rows if rank else ShardedTensor(torch.zeros(1, 2), (4, 2), (0, 0))},
        "overlap": {"w": ShardedTensor(torch.zeros(3, 2), (4, 2), (rank, 0))},
        # One quarter twice and one missing: the number of elements alone looks right.
        "twice": {
            "w": ShardedTensor(torch.zeros(2, 2), (4, 2), (0, 0))
            if rank
            else ShardedTensor(torch.zeros(4, 1), (4, 2), (0, 1))
        },
        "replica": {"w": tensor if rank else rows},
        "dtype": {"w": ShardedTensor(rows.tensor.double(), (4, 2), rows.offsets) if rank else rows},
        "shape": {"w": ShardedTensor(rows.tensor, (4 + rank, 2), rows.offsets)},
        "dtensor": {"w": rows},
        "state": {"w": rows},
    }[fault]
    state: dict[str, object] = {"bad": (1,)} if fault == "state" and rank == 1 else {}
    if fault == "dtensor" and rank == 1:
        mesh = dist.device_mesh.DeviceMesh("cpu", [rank], _init_backend=False)
        tensors = {"w": dist.tensor.DTensor.from_local(tensor, mesh, [dist.tensor.Replicate()], run_check=False)}
    try:
        save(folder, 2, tensors, state)  # type: ignore[arg-type]
    except MegatfmError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(("fault", "reason"), [
    ("gap", "rank 0 on HOST: tensor w: the pieces hold 6 elements, but its shape (4, 2) has 8"),
    ("overlap", "rank 0 on HOST: tensor w: the pieces hold 12 elements, but its shape (4, 2) has 8"),
    ("twice", "rank 0 on HOST: tensor w: the pieces at (0, 0) and (0, 1) overlap"),
    ("replica", "rank 0 on HOST: tensor w: ranks 0 and 1 hold different shards at (0, 0)"),
    ("dtype",
     "rank 0 on HOST: tensor w: ranks disagree on dtype or shape, torch.float32 (4, 2) or torch.float64 (4, 2)"),
    ("shape",
     "rank 0 on HOST: tensor w: ranks disagree on dtype or shape, torch.float32 (4, 2) or torch.float32 (5, 2)"),
    ("dtensor", "rank 1 on HOST: a DTensor can't be stored as it is"),
    ("state", "rank 1 on HOST: state 'bad' would change in a JSON round trip"),
])  # fmt: skip
def test_boxes_that_make_up_no_tensor(workers: Workers, tmp_path: Path, fault: str, reason: str) -> None:
    first, second = workers.run(save_wrongly, 2, tmp_path, fault)
    assert first == second
    assert first.startswith(f"checkpoint of step 2 not saved: {reason.replace('HOST', HOST)}")
    assert "\n" not in first
    assert list(tmp_path.iterdir()) == []


def load_damaged(path: Path) -> str:
    try:
        rows = arrange("rows", reference(), dist.get_rank(), dist.get_world_size())
        load(path, {"embedding": rows["embedding"]})
    except MegatfmError as error:
        return str(error)
    return "loaded"


def test_one_rank_s_damaged_file_stops_all(workers: Workers, tmp_path: Path) -> None:
    (path,) = workers.run(save_as, 2, tmp_path, "rows")[0]
    file = path / "rank-00001-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first, second = workers.run(load_damaged, 2, path)
    assert first == second
    reason = f"rank 1 on {HOST}: {file} is damaged: its content doesn't have its hash"
    assert first == f"checkpoint {path} not loaded: {reason}"
