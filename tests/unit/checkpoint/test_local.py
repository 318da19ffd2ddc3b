"""Checkpoints on node-local folders, and files that go from rank to rank: what no node has whole is not used."""

import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from megatfm.checkpoint import Saver, ShardedTensor, file_io, load, local, read_state
from megatfm.checkpoint.directory import list_checkpoints
from megatfm.checkpoint.file_format import FileEntry
from megatfm.checkpoint.local import NodeTopology, fetch_missing_files, find_latest_local, remove_local_after
from megatfm.errors import MegatfmError
from tests.support.workers import Workers


def home(folder: Path, ranks_of_a_node: int) -> Path:
    """Ranks with the same folder are of one node."""
    return folder / f"node-{dist.get_rank() // ranks_of_a_node}"


def rows(value: float | None = None, split: int | None = None) -> dict[str, ShardedTensor | Tensor]:
    """Rows of a tensor, their values their own numbers plus `value`, cut over the ranks; and a replica."""
    rank, world = dist.get_rank(), split or dist.get_world_size()
    start, count = 12 // world * rank, 12 // world
    values = torch.arange(start, start + count).repeat(2, 1).T.float()
    filled = values + value if value is not None else torch.full_like(values, -1)
    replica = torch.full((3,), -1 if value is None else value)
    return {"rows": ShardedTensor(filled, (12, 2), (start, 0)), "all": replica}


def save_steps(folder: Path, steps: list[int], per_node: int = 1) -> None:
    with Saver(folder / "shared", local_dir=home(folder, per_node)) as saver:
        for step in steps:
            saver.save(step, rows(step), {"step": step}, local=True)


def save_with_slow_ranks(folder: Path) -> None:
    genuine = file_io.sync_folder

    def slowly(path: Path) -> None:
        time.sleep(0.3 * (dist.get_rank() % 2))
        genuine(path)

    file_io.sync_folder = slowly
    try:
        save_steps(folder, [1], per_node=2)
    finally:
        file_io.sync_folder = genuine


def go_on(folder: Path, per_node: int = 1) -> int | None:
    """Load the newest checkpoint of the nodes; returns its step once every value is right."""
    nodes = NodeTopology.discover(home(folder, per_node), dist.group.WORLD)
    latest = find_latest_local(nodes)
    if latest is None:
        return None
    expected = rows()
    local_shards = {name: ShardedTensor.from_tensor(tensor) for name, tensor in expected.items()}
    path = fetch_missing_files(nodes, latest, local_shards)
    assert load(path, expected) == {"step": latest.step}
    for name, tensor in rows(latest.step).items():
        same = (ShardedTensor.from_tensor(values).tensor for values in (expected[name], tensor))
        assert torch.equal(*same), name
    assert read_state(path) == {"step": latest.step}
    return latest.step


@pytest.mark.parametrize(("world", "per_node"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.extended), (4, 2)])
def test_a_lost_node_is_made_up_for_by_the_next(workers: Workers, tmp_path: Path, world: int, per_node: int) -> None:
    workers.run(save_steps, world, tmp_path, [1, 2, 3], per_node)
    nodes = world // per_node
    for node in range(nodes):
        folder = tmp_path / f"node-{node}"
        assert [path.name for path in list_checkpoints(folder)] == ["step-00000002", "step-00000003"]
        local = {f"rank-{rank:05d}-000.safetensors" for rank in range(node * per_node, (node + 1) * per_node)}
        assert local < {file.name for file in (folder / "step-00000003").iterdir()}
    assert not (tmp_path / "shared").exists()
    for lost in range(nodes):
        copy = tmp_path / f"without-{lost}"
        for node in range(nodes):
            if node != lost:
                shutil.copytree(tmp_path / f"node-{node}", copy / f"node-{node}")
        assert workers.run(go_on, world, copy, per_node) == [3] * world
    for node in (0, 1):  # two neighbours are one too many
        shutil.rmtree(tmp_path / f"node-{node}")
    assert workers.run(go_on, world, tmp_path, per_node) == [None] * world


def test_a_folder_gets_its_name_when_all_of_its_node_have_left_it(workers: Workers, tmp_path: Path) -> None:
    workers.run(save_with_slow_ranks, 4, tmp_path)
    assert workers.run(go_on, 4, tmp_path, 2) == [1] * 4


def test_a_local_checkpoint_that_no_node_has_intact_is_not_used(workers: Workers, tmp_path: Path) -> None:
    workers.run(save_steps, 2, tmp_path, [1, 2])
    name = "step-00000002/rank-00000-000.safetensors"
    for node in range(2):
        file = tmp_path / f"node-{node}" / name
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert workers.run(go_on, 2, tmp_path) == [2 - node] * 2
        if node == 0:  # the damaged one gave way to the whole one of the other node
            assert file.read_bytes() == (tmp_path / "node-1" / name).read_bytes()
            file.write_bytes(content)
    for node in range(2):
        (tmp_path / f"node-{node}" / "step-00000001" / "metadata.json").write_bytes(b"{}")
    assert workers.run(go_on, 2, tmp_path) == [None] * 2


def test_a_renamed_folder_is_not_used(workers: Workers, tmp_path: Path) -> None:
    """Loading looks for the name of its step."""
    workers.run(save_steps, 2, tmp_path, [1, 2])
    for node in range(2):
        (tmp_path / f"node-{node}" / "step-00000002").rename(tmp_path / f"node-{node}" / "step-00000007")
    assert workers.run(go_on, 2, tmp_path) == [1] * 2


def drop_after(folder: Path, newest: int) -> None:
    remove_local_after(NodeTopology.discover(home(folder, 1), dist.group.WORLD), newest)


def test_later_ones_and_leftovers_are_forgotten(workers: Workers, tmp_path: Path) -> None:
    workers.run(save_steps, 2, tmp_path, [4, 6])
    (tmp_path / "node-1" / ".step-00000008.partial-01234567").mkdir()
    workers.run(drop_after, 2, tmp_path, 4)
    for node in range(2):
        assert [path.name for path in (tmp_path / f"node-{node}").iterdir()] == ["step-00000004"]


def full_node(folder: Path) -> str:
    with Saver(folder / "shared", local_dir=home(folder, 1)) as saver:
        saver.save(1, rows(1), {"step": 1}, local=True)
        saver.wait_for_save()
        if dist.get_rank() == 1:
            (folder / "node-1" / "in-the-way").touch()
            saver.topology = NodeTopology(folder / "node-1" / "in-the-way", 1, (0, 1), saver._group)
        saver.save(2, rows(2), {"step": 2}, local=True)
        try:
            saver.wait_for_save()
        except Exception as error:
            return str(error)
    return "saved"


def test_a_folder_that_can_not_be_listed_after_a_save_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank lists the folder, and must not fail alone."""

    def refuse(folder: Path) -> list[Path]:
        raise MegatfmError(f"can't list {folder}: Stale file handle")

    monkeypatch.setattr(local, "list_checkpoints", refuse)
    with Saver(tmp_path / "shared", local_dir=tmp_path / "node") as saver:
        saver.save(1, {"x": torch.ones(2)}, {"step": 1}, local=True)
        assert saver.wait_for_save() == tmp_path / "node" / "step-00000001"
    assert f"old checkpoints could not be removed: can't list {tmp_path}/node: Stale file handle" in caplog.text


def test_a_node_that_can_not_write_is_named_by_all(workers: Workers, tmp_path: Path) -> None:
    first, second = workers.run(full_node, 2, tmp_path)
    assert first == second
    assert first.startswith("checkpoint of step 2 not saved on the nodes: rank 1 on ")
    assert "in-the-way" in first
    assert workers.run(go_on, 2, tmp_path) == [1, 1]


HOST = socket.gethostname()
CONTENT = bytes(range(256)) * 40
ENTRY = FileEntry(bytes=len(CONTENT), blake3=blake3(CONTENT).hexdigest())


def send(folder: Path, fault: str) -> str:
    """Rank 0 sends rank 1 three files in messages of 1,000 bytes; something is wrong with the second. The error."""
    local.MESSAGE_BYTES, source, target = 1000, folder / "from", folder / "to"
    names = ("a", "b", "c")
    if dist.get_rank() == 0:
        source.mkdir()
        for name in names:
            (source / name).write_bytes(CONTENT)
        if fault == "missing":
            (source / "b").unlink()
        elif fault == "short":
            (source / "b").write_bytes(CONTENT[:2500])
        elif fault == "damaged":
            (source / "b").write_bytes(b"x" + CONTENT[1:])
    else:
        target.mkdir()
        if fault == "in the way":
            (target / "b").touch()
    dist.barrier()
    try:
        local.transfer_files(
            "not sent", dist.group.WORLD, source, target, dict.fromkeys(names, ENTRY), [(n, 0, 1) for n in names],
        )  # fmt: skip
    except MegatfmError as error:
        return str(error)
    return "sent"


@pytest.mark.parametrize(("fault", "message"), [
    ("none", "sent"),
    ("missing", "not sent: rank 0 on HOST: can't read FOLDER/from/b: No such file or directory"),
    ("short", "not sent: rank 0 on HOST: can't read FOLDER/from/b: it shrank to 2500 bytes while it was read"),
    ("damaged", "not sent: rank 1 on HOST: FOLDER/to/b is damaged: what came from rank 0 doesn't have its hash"),
    ("in the way", "not sent: rank 1 on HOST: can't write FOLDER/to/b: File exists"),
])  # fmt: skip
def test_a_file_comes_whole_or_all_say_why(workers: Workers, tmp_path: Path, fault: str, message: str) -> None:
    first, second = workers.run(send, 2, tmp_path, fault)
    assert first == second
    assert first.removesuffix(" (also failed: rank 1)") == message.replace("HOST", HOST).replace(
        "FOLDER", str(tmp_path)
    )
    for name in ("a", "c") if fault != "none" else ("a", "b", "c"):
        assert (tmp_path / "to" / name).read_bytes() == CONTENT, "the others came all the same"


def test_a_lost_receiver_is_an_error_of_one_line_and_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    (tmp_path / "a").write_bytes(CONTENT)
    close = file_io.HashedFile.close
    monkeypatch.setattr(file_io.HashedFile, "close", lambda file: (closed.append(file), close(file)))

    def refuse(*_: object) -> None:
        raise RuntimeError("[/gloo/pair.cc:78] the other side is gone\nits stack")

    monkeypatch.setattr(dist, "send", refuse)
    with pytest.raises(MegatfmError) as error:
        local.transfer_files("not sent", None, tmp_path, tmp_path, {"a": ENTRY}, [("a", 0, 1)])
    lost = "not sent: the ranks lost each other: RuntimeError: the other side is gone"
    assert str(error.value) == f"{lost}: the rank whose log ends first is the one to look at"
    assert len(closed) == 1
