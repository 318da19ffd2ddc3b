"""A shared filesystem that shows one machine late what another one made: rank 0 decides, the others are told."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.checkpoint import ShardedTensor, file_io, find_latest, load, save
from megatfm.errors import MegatfmError
from tests.support.workers import Workers

LAG = 0.3
LOOKS = ("stat", "lstat", "open", "listdir", "scandir")


@contextmanager
def lagging(root: Path) -> Iterator[None]:
    """What others make under `root` is there for this process only a while after it first looks for it."""
    mine: set[str] = set()
    first: dict[str, float] = {}
    real = {name: getattr(os, name) for name in (*LOOKS, "mkdir", "rename")}

    def hidden(path: str) -> bool:
        names = [name for name in (path, *map(str, Path(path).parents)) if name.startswith(f"{root}/")]
        return any(
            name not in mine and time.monotonic() - first.setdefault(name, time.monotonic()) < LAG
            for name in names
            if os.path.basename(name)  # noqa: PTH119
        )

    def look(name: str) -> Any:
        def operation(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            text = os.fspath(path) if not isinstance(path, int) else ""
            makes = name == "open" and args and args[0] & os.O_CREAT
            if text.startswith(f"{root}/") and hidden(str(Path(text).parent) if makes else text):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            if makes:
                mine.add(text)
            return real[name](path, *args, **kwargs)

        return operation

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        real["mkdir"](path, *args, **kwargs)
        mine.add(os.fspath(path))

    def rename(old: Any, new: Any) -> None:
        real["rename"](old, new)
        mine.add(os.fspath(new))
        mine.update(f"{new}{path[len(str(old)) :]}" for path in list(mine) if path.startswith(f"{old}/"))

    for name in LOOKS:
        setattr(os, name, look(name))
    os.mkdir, os.rename = mkdir, rename
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def save_and_load(folder: Path, patience: float) -> tuple[str, list[float]]:
    file_io.NFS_VISIBILITY_SECONDS = patience
    rank = dist.get_rank()
    try:
        with lagging(folder):
            rows = ShardedTensor(torch.full((2, 2), float(rank)), (4, 2), (2 * rank, 0))
            path = save(folder, 1, {"rows": rows}, {"step": 1})
            other = ShardedTensor(torch.full((2, 2), 9.0), (4, 2), (2 - 2 * rank, 0))
            assert load(path, {"rows": other}) == {"step": 1}
            return path.name, other.tensor.flatten().tolist()
    except MegatfmError as error:
        return str(error), []
    finally:
        file_io.NFS_VISIBILITY_SECONDS = 10.0


def test_what_is_seen_late_is_waited_for(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(save_and_load, 2, tmp_path, 10.0) == [
        ("step-00000001", [1.0] * 4),
        ("step-00000001", [0.0] * 4),
    ]
    assert find_latest(tmp_path, hashes=True) == tmp_path / "step-00000001"


def test_but_not_for_ever(workers: Workers, tmp_path: Path) -> None:
    """And so the test above would fail without the wait."""
    (output, _), (other, _) = workers.run(save_and_load, 2, tmp_path, 0.0)
    assert output == other
    assert "No such file or directory" in output


@pytest.mark.parametrize("patience", [0.0, 0.2])
def test_a_name_that_never_comes(tmp_path: Path, patience: float) -> None:
    start = time.monotonic()
    file_io.wait_until_visible(tmp_path / "absent", start + patience)
    assert patience <= time.monotonic() - start < patience + 20
    file_io.wait_until_size(tmp_path, 1, start + patience)
