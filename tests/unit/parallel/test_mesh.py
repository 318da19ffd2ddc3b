"""Axes of a mesh, and process groups along them."""

import pytest
import torch
import torch.distributed as dist

from megatfm.config import ParallelConfig
from megatfm.config.world_size import compute_axis_sizes
from megatfm.describe.per_rank import fake_ranks
from megatfm.errors import UsageError
from megatfm.parallel.mesh import build_mesh, create_group_of
from tests.support.workers import Workers


@pytest.mark.parametrize(("config", "world", "sizes"), [
    (ParallelConfig(), 1, (1, 1, 1, 1, 1)),
    (ParallelConfig(), 6, (1, 1, 6, 1, 1)),
    (ParallelConfig(tp=2), 6, (1, 1, 3, 1, 2)),
    (ParallelConfig(dp_replicate=3, tp=2), 6, (1, 3, 1, 1, 2)),
    (ParallelConfig(dp_replicate=2, dp_shard=2, tp=2), 8, (1, 2, 2, 1, 2)),
    (ParallelConfig(pp=2, tp=2), 8, (2, 1, 2, 1, 2)),
    (ParallelConfig(dp_replicate=2, cp=2), 8, (1, 2, 2, 2, 1)),
])  # fmt: skip
def test_sizes_of_axes(config: ParallelConfig, world: int, sizes: tuple[int, ...]) -> None:
    assert tuple(compute_axis_sizes(config, world).values()) == sizes


@pytest.mark.parametrize(("config", "world", "message"), [
    (ParallelConfig(tp=2), 1, "dp_replicate 1 × tp 2 does not fit 1 process: start 2, or change parallel.tp"),
    (ParallelConfig(tp=2), 5, "dp_replicate 1 × tp 2 does not fit 5 processes: start 4, or change"),
    (ParallelConfig(dp_shard=2, tp=2), 8, "dp_replicate 1 × dp_shard 2 × tp 2 does not fit 8 processes: start 4,"),
    (ParallelConfig(dp_shard=4), 2, "dp_replicate 1 × dp_shard 4 × tp 1 does not fit 2 processes: start 4, or"),
    (ParallelConfig(pp=3), 8, "pp 3 × dp_replicate 1 × tp 1 does not fit 8 processes: start 9, or change"),
    (ParallelConfig(dp_replicate=4, tp=4), 8, "dp_replicate 4 × tp 4 does not fit 8 processes: start 16, or"),
])  # fmt: skip
def test_axes_that_do_not_fit(config: ParallelConfig, world: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compute_axis_sizes(config, world)
    assert str(caught.value).startswith(f"the layout {message}")


def coordinates() -> tuple[int, int, int, int, list[int], list[int]]:
    mesh = build_mesh(ParallelConfig(dp_replicate=2, tp=2), 4, "cpu")
    rank = dist.get_rank()
    neighbours = mesh.gather_objects(rank, ("dp_shard", "tp"))
    total = torch.tensor([rank])
    mesh.all_reduce_(total, ("dp_replicate",))
    return (
        mesh.rank("dp_replicate"), mesh.rank("tp"), mesh.data_rank, mesh.data_ranks, neighbours, total.tolist(),
    )  # fmt: skip


def test_neighbouring_ranks_share_the_tensor_parallel_axis(workers: Workers) -> None:
    assert workers.run(coordinates, 4) == [
        (0, 0, 0, 2, [0, 1], [2]),
        (0, 1, 0, 2, [0, 1], [4]),
        (1, 0, 1, 2, [2, 3], [2]),
        (1, 1, 1, 2, [2, 3], [4]),
    ]


@pytest.mark.parametrize("other_groups", [[], [[2, 3], [6, 7]]], ids=["all ranks", "some ranks"])
def test_on_gpus_groups_are_split_off_at_once(other_groups: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes all ranks of the run. Every rank must be in one group, as torch numbers them by a rank's own."""
    groups = [[0, 1], [4, 5]] if other_groups else [[0, 4], [1, 5], [2, 6], [3, 7]]
    calls: list[list[list[int]]] = []
    with fake_ranks(8, 5):
        monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda", 5))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(dist, "split_group", lambda *, split_ranks: calls.append(split_ranks))
        monkeypatch.setattr(dist, "new_subgroups_by_enumeration", None)
        create_group_of(groups, other_groups)
        monkeypatch.undo()
    (split,) = calls
    assert split[: len(groups)] == groups
    assert sorted(rank for group in split for rank in group) == list(range(8))
