"""The layout that fits the processes that are left, and restarts that gain nothing."""

from pathlib import Path

import pytest

from megatfm.config import Config, load_config
from megatfm.errors import NO_PROGRESS, NoProgressError, UsageError
from megatfm.parallel.mesh import axis_sizes
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.startup_checks import (
    ATTEMPTS,
    adapt_layout,
    check_progress,
    fit_layout,
    list_layout_changes,
)


def config(**settings: object) -> Config:
    words = ["data.tokenizer=t", "data.train=d", "train.global_batch=24", "train.micro_batch=4"]
    return load_config("quickstart", words + [f"{key}={value}" for key, value in settings.items()])


def layout(config: Config, world_size: int) -> tuple[dict[str, int], int]:
    return axis_sizes(config.parallel, world_size), config.train.micro_batch


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_what_fits_stays(world_size: int) -> None:
    result = config()
    assert fit_layout(result, world_size) == (result, None)


@pytest.mark.parametrize(
    ("settings", "world_size", "axes", "micro_batch"),
    [
        ({}, 4, (1, 4, 1), 3),  # a share of 6 rows
        ({}, 8, (1, 8, 1), 3),
        ({}, 24, (1, 24, 1), 1),
        ({"parallel.dp_shard": 8}, 6, (1, 6, 1), 4),
        ({"parallel.dp_shard": 4, "parallel.dp_replicate": 2}, 6, (2, 3, 1), 4),
        ({"parallel.dp_replicate": 4}, 6, (2, 3, 1), 4),
        ({"parallel.dp_replicate": 2}, 3, (1, 3, 1), 4),
        ({"parallel.tp": 2, "parallel.dp_shard": 4}, 6, (1, 3, 2), 4),
    ],
)
def test_the_data_axes_and_the_micro_batch_give_way(
    settings: dict[str, object], world_size: int, axes: tuple[int, int, int], micro_batch: int
) -> None:
    before = config(**settings)
    after, output = fit_layout(before, world_size)
    sizes, micro = layout(after, world_size)
    assert (sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"]) == axes
    assert micro == micro_batch
    assert after.train.global_batch == before.train.global_batch
    assert output is not None
    assert all(" → " in change for change in output.split(", "))


def test_fewer_ranks_divide_experts() -> None:
    """The experts of a rank are more, and what is computed the same."""
    experts = {"model.ffn.name": "moe", "model.ffn.n_experts": 8, "model.ffn.top_k": 2}
    after, output = fit_layout(config(**experts, **{"parallel.ep": 4, "parallel.dp_shard": 4}), 6)
    assert layout(after, 6)[0]["dp_shard"] == 6
    assert after.parallel.ep == 2
    assert output == "parallel.dp_shard 4 → -1, parallel.ep 4 → 2"


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        (
            {},
            5,
            "no layout fits 5 processes: train.global_batch = 24 and 1 ranks per model allow 1, 2, 3, 4, 6, 8",
        ),
        ({"parallel.tp": 2}, 3, "allow 2, 4, 6, 8"),
        ({"parallel.tp": 2}, 1, "no layout fits 1 process:"),
    ],
)
def test_what_can_not_fit_is_said(settings: dict[str, object], world_size: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fit_layout(config(**settings), world_size)


def test_a_run_is_elastic_only_where_it_is_asked_to() -> None:
    assert adapt_layout(config(), 4) == config()
    assert adapt_layout(config(**{"resilience.elastic": "true"}), 4).train.micro_batch == 3


def test_what_was_changed_is_what_differs() -> None:
    inputs = config(**{"parallel.dp_replicate": 2, "train.micro_batch": 2})
    fitted, output = fit_layout(inputs, 3)
    assert output == ", ".join(list_layout_changes(inputs, fitted))
    assert list_layout_changes(inputs, inputs) == []


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
