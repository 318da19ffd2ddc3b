"""The folder of an engine that keeps things in files: nobody else's, and gone with it, also where it was killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm.engines.deepspeed.folders import OwnFolder
from megatfm.errors import UsageError

KILLED = """
import os, signal, sys
from pathlib import Path
from megatfm.engines.deepspeed.folders import OwnFolder
own = OwnFolder(Path(sys.argv[1]))
(own.path / "weights.swp").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def there(path: Path) -> set[Path]:
    return set(path.glob("megatfm-*/"))


def test_each_engine_has_its_own_and_removes_it(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    first, second = OwnFolder(tmp_path), OwnFolder(tmp_path)
    assert there(tmp_path) == {first.path, second.path}
    (first.path / "rank0").mkdir()
    first.remove()
    assert there(tmp_path) == {second.path}
    second.remove()
    assert (tmp_path / "somebody's").exists()


def test_what_a_killed_process_has_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    own = OwnFolder(tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(there(tmp_path)) == 2
    another = OwnFolder(tmp_path)
    assert there(tmp_path) == {own.path, another.path}
    own.remove()
    another.remove()


@pytest.mark.parametrize("place", ["nowhere", "file", "/proc"])
def test_a_place_that_can_t_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"deepspeed.nvme_path = '.*name a folder on a local disk"):
        OwnFolder(tmp_path / place)
