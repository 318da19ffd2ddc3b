"""Whole tensors gathered from boxes and scattered back, against plain slicing."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.engines.optimizers import OwnedTensors, _assign_owners
from megatfm.parallel.layout import Chunk
from tests.support.workers import Workers

SHAPES = {"rows": (7, 3), "grid": (4, 6), "replicated": (5, 2), "short": (1, 3), "largest": (9, 9)}


def boxes(ranks: int) -> dict[str, list[Chunk]]:
    """Each tensor's box on every rank: uneven rows, a grid, replicas, empty blocks."""

    def rows(n: int, width: int) -> list[Chunk]:
        """As FSDP2 cuts them: ceil(n / ranks) each, the last ones shorter or empty."""
        step = -(-n // ranks)
        starts = [min(n, rank * step) for rank in range(ranks)]
        return [((start, 0), (min(step, n - start), width)) for start in starts]

    grid: dict[int, list[Chunk]] = {
        1: [((0, 0), (4, 6))],
        3: [((0, 2 * rank), (4, 2)) for rank in range(3)],
        4: [((2 * (rank // 2), 3 * (rank % 2)), (2, 3)) for rank in range(4)],
    }
    return {
        "rows": rows(7, 3),
        "grid": grid[ranks],
        "replicated": [((0, 0), (5, 2))] * ranks,
        "short": rows(1, 3),
        "largest": rows(9, 9),
    }


def cut(tensor: Tensor, box: Chunk) -> Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].clone()


def reference(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def there_and_back() -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cuts, before, gradients = boxes(ranks), reference(1), reference(2)
    local = {name: cut(tensor, cuts[name][rank]) for name, tensor in before.items()}
    group = dist.group.WORLD
    assert group is not None
    owned = OwnedTensors(local, cuts, SHAPES, group)
    owned.refresh()
    for name, tensor in owned.full.items():
        assert torch.equal(tensor, before[name]), name
    blocks = {name: cut(gradients[name], cuts[name][rank]) for name in local}
    if rank:
        blocks["replicated"].fill_(torch.nan)  # the first of the ranks that hold a box sends it, and no other
    gathered = owned.gather(blocks)
    assert gathered.keys() == owned.full.keys()
    for name, tensor in gathered.items():
        assert torch.equal(tensor, gradients[name]), name
        owned.full[name].sub_(tensor)
    owned.scatter()
    for name, block in local.items():
        assert torch.equal(block, cut(before[name] - gradients[name], cuts[name][rank])), name
    return list(owned.full)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_gather_and_scatter(workers: Workers, ranks: int) -> None:
    owned = workers.run(there_and_back, ranks)
    assert sorted(name for names in owned for name in names) == sorted(SHAPES)  # one owner each


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_owners_are_shared_out_evenly(ranks: int) -> None:
    sizes = {f"layers.{i}.{part}": n for i in range(4) for part, n in (("wq", 64), ("ffn", 200), ("wk", 16))}
    owners = _assign_owners(sizes, ranks)
    assert owners == _assign_owners(dict(reversed(sizes.items())), ranks), (
        "ranks may list them in another order"
    )
    loads: Sequence[int] = [sum(sizes[n] for n, owner in owners.items() if owner == r) for r in range(ranks)]
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values())
