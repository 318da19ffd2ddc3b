"""Restarts that gain nothing, as torchrun's agent makes them."""

from pathlib import Path

import pytest

from megatfm.errors import NO_PROGRESS, NoProgressError
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.startup_checks import ATTEMPTS, check_progress


def start(folder: Path, restarts: int, step: int, agent: str = "none") -> None:
    environment = {"TORCHELASTIC_RUN_ID": agent, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    check_progress(RunDirectory(folder, 0), step, 2, environment)


def test_restarts_without_a_new_checkpoint_are_bounded(tmp_path: Path) -> None:
    start(tmp_path, 0, 0)
    start(tmp_path, 1, 0)
    with pytest.raises(
        NoProgressError, match=r"2 restarts in a row saved no checkpoint after step 0"
    ) as caught:
        start(tmp_path, 2, 0)
    assert caught.value.exit_code == NO_PROGRESS == 76


def test_a_new_checkpoint_starts_the_count_again(tmp_path: Path) -> None:
    for restarts, step in ((0, 0), (1, 0), (2, 4), (3, 4), (4, 8)):
        start(tmp_path, restarts, step)
    start(tmp_path, 5, 8)
    with pytest.raises(NoProgressError):
        start(tmp_path, 6, 8)


def test_another_agent_and_a_new_start_of_the_same_one_count_afresh(tmp_path: Path) -> None:
    start(tmp_path, 3, 4)
    start(tmp_path, 4, 4)
    start(tmp_path, 4, 4, agent="b")
    start(tmp_path, 5, 4, agent="b")
    start(tmp_path, 0, 4, agent="b")
    start(tmp_path, 1, 4, agent="b")


def test_without_an_agent_nothing_is_counted(tmp_path: Path) -> None:
    for _ in range(9):
        check_progress(RunDirectory(tmp_path, 0), 0, 1, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"\x80\x04}.", b"{", b"[1]", b'{"agent": "none"}', b'{"agent": "none", "step": 0, "restarts": "x"}'],
)
def test_a_count_that_is_none_starts_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ATTEMPTS).write_bytes(content)
    for restarts in (7, 8):
        start(tmp_path, restarts, 0)
    with pytest.raises(NoProgressError):
        start(tmp_path, 9, 0)
