"""The folder of an engine that keeps things in files: nobody else's, and gone with it, also where it was killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm.engines.deepspeed.nvme_offload import CONTENT, MARK, OffloadDirectory
from megatfm.errors import UsageError

KILLED = """
import os, signal, sys
from pathlib import Path
from megatfm.engines.deepspeed.nvme_offload import OffloadDirectory
own = OffloadDirectory(Path(sys.argv[1]))
(own.path / "weights.swp").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def there(path: Path) -> set[Path]:
    return set(path.glob(".megatfm-offload-*/*-*/"))


def test_each_engine_has_a_folder_and_removes_it(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    first, second = OffloadDirectory(tmp_path), OffloadDirectory(tmp_path)
    assert there(tmp_path) == {first.path, second.path}
    (first.path / "rank0").mkdir()
    first.remove()
    assert there(tmp_path) == {second.path}
    second.remove()
    assert (tmp_path / "somebody's").exists()


def test_what_a_killed_process_has_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    folder = OffloadDirectory(tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(there(tmp_path)) == 2
    another = OffloadDirectory(tmp_path)
    assert there(tmp_path) == {folder.path, another.path}
    folder.remove()
    another.remove()


def test_only_what_it_made_itself_is_removed(tmp_path: Path) -> None:
    """Not a user's folder of a like name, nor another host's, nor what a link leads to."""
    offload = OffloadDirectory(tmp_path)
    parent, host = offload.path.parent, offload.path.name.rpartition("-")[0]
    offload.remove()
    for name in ("megatfm-data", "megatfm-lock", f"{parent.name}/mine", f"{parent.name}/{host}-abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("precious")
    (tmp_path / "megatfm-data/lock").touch()
    (parent / f"{host}-abcdefgh" / MARK).write_text("{}")
    elsewhere = tmp_path / "elsewhere"
    other = parent / "other.host-abcdefgh"
    for folder in (elsewhere, other):
        folder.mkdir()
        (folder / MARK).write_bytes(CONTENT)
    (parent / f"{host}-bcdefghi").symlink_to(elsewhere)
    before = sorted(tmp_path.rglob("*"))
    OffloadDirectory(tmp_path).remove()
    assert sorted(tmp_path.rglob("*")) == before
    assert not (tmp_path / "megatfm-lock/lock").exists()


def test_an_engine_s_folder_is_the_user_s_alone(tmp_path: Path) -> None:
    folder = OffloadDirectory(tmp_path)
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.path.parent.rename(tmp_path / "other")
    folder.path.parent.symlink_to(tmp_path / "other")
    with pytest.raises(UsageError, match=r"another user's, or no folder: remove it"):
        OffloadDirectory(tmp_path)


@pytest.mark.parametrize("place", ["nowhere", "file", "/proc"])
def test_a_place_that_can_t_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"deepspeed.nvme_path = '.*name a folder on a local disk"):
        OffloadDirectory(tmp_path / place)
