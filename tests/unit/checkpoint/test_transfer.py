"""Files from rank to rank: what can't be read or written is named by all, and nobody is left waiting."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from blake3 import blake3

from megatfm.checkpoint import file_io, local
from megatfm.checkpoint.file_format import FileEntry
from megatfm.errors import MegatfmError
from tests.support.workers import Workers

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
            "not sent",
            dist.group.WORLD,
            source,
            target,
            dict.fromkeys(names, ENTRY),
            [(n, 0, 1) for n in names],
        )
    except MegatfmError as error:
        return str(error)
    return "sent"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", "sent"),
        ("missing", "not sent: rank 0 on HOST: cannot read FOLDER/from/b: No such file or directory"),
        (
            "short",
            "not sent: rank 0 on HOST: cannot read FOLDER/from/b: it shrank to 2500 bytes while it was read",
        ),
        (
            "damaged",
            "not sent: rank 1 on HOST: FOLDER/to/b is damaged: what came from rank 0 doesn't have its hash",
        ),
        ("in the way", "not sent: rank 1 on HOST: cannot write FOLDER/to/b: File exists"),
    ],
)
def test_a_file_comes_whole_or_all_say_why(
    workers: Workers, tmp_path: Path, fault: str, message: str
) -> None:
    first, second = workers.run(send, 2, tmp_path, fault)
    assert first == second
    assert first.removesuffix(" (also failed: rank 1)") == message.replace("HOST", HOST).replace(
        "FOLDER", str(tmp_path)
    )
    for name in ("a", "c") if fault != "none" else ("a", "b", "c"):
        assert (tmp_path / "to" / name).read_bytes() == CONTENT, "the others came all the same"


def test_a_file_is_closed_where_sending_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, closed = tmp_path / "a", []
    path.write_bytes(CONTENT)
    close = file_io.HashedFile.close
    monkeypatch.setattr(file_io.HashedFile, "close", lambda file: (closed.append(file), close(file)))

    def refuse(*_: object) -> None:
        raise RuntimeError("the other side is gone")

    monkeypatch.setattr(dist, "send", refuse)
    with pytest.raises(RuntimeError, match="gone"):
        local._send(path, ENTRY, 1, None, [])
    assert len(closed) == 1
