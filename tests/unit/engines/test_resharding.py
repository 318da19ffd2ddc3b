"""Any layout's checkpoint opens in any other to the bit; whole tensors gathered from boxes, against plain slicing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import ModelConfig, OptimizerSection, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.optimizers import OwnedTensors, _assign_owners
from megatfm.parallel.layout import Region
from tests.support.layouts import EXTENDED
from tests.support.models import OPTIMIZERS
from tests.support.parity import build_engine
from tests.support.sharded_engines import load_checkpoint, train_steps
from tests.support.workers import Workers

# A vocabulary of no even parts, fewer key heads than tensor-parallel ranks, a tie between the ends of the pipeline.
MODEL = ModelConfig(
    vocab_size=97, d_model=16, n_layers=2, attention={"n_heads": 4, "n_kv_heads": 2}, ffn={"d_ff": 36},
    embedding={"tied": True},
)  # fmt: skip
# With its precision: whatever is computed in, weights and state are stored in float32.
LAYOUTS: dict[int, dict[str, tuple[ParallelConfig, str]]] = {
    1: {"alone": (ParallelConfig(), "fp32")},
    2: {
        "zero3": (ParallelConfig(dp_shard=2), "bf16"),
        "zero0": (ParallelConfig(dp_shard=2, zero=0), "fp16"),
        "zero2": (ParallelConfig(dp_shard=2, zero=2), "fp32"),
        "interleaved": (ParallelConfig(pp=2, pp_schedule="interleaved"), "fp32"),
    },
    4: {
        "tp": (ParallelConfig(tp=4), "bf16"),
        "zero1 × tp": (ParallelConfig(dp_shard=2, tp=2, zero=1), "fp16"),
        "hsdp": (ParallelConfig(dp_replicate=2, dp_shard=2), "fp32"),
        "gpipe": (ParallelConfig(pp=4, pp_schedule="gpipe"), "fp32"),
        "1f1b × zero3": (ParallelConfig(pp=2, dp_shard=2), "fp32"),
        "interleaved zero bubble × zero0": (
            ParallelConfig(pp=2, dp_shard=2, zero=0, pp_schedule="interleaved-zero-bubble"),
            "fp32",
        ),
        "zbv × tp": (ParallelConfig(pp=2, tp=2, pp_schedule="zbv"), "bf16"),
        "dualpipev × zero1": (ParallelConfig(pp=2, dp_shard=2, zero=1, pp_schedule="dualpipev"), "fp16"),
    },
}  # fmt: skip
SCALE = "engine.loss_scale"


def make_engine(parallel: ParallelConfig, precision: str, optimizer: OptimizerSection) -> NativeEngine:
    return build_engine(MODEL, parallel, optimizer, precision=precision)


def cut(tensor: Tensor, box: Region) -> Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].clone()


def train_and_save(folder: Path, optimizer: OptimizerSection) -> None:
    """A state of which every tensor has moved, for the tests below."""
    engine = make_engine(*LAYOUTS[1]["alone"], optimizer)
    train_steps(engine, 0, 2)
    checkpoint.save(folder, 1, engine.state_dict(), {})


def differences_after_load(engine: NativeEngine, path: Path, expected: dict[str, Tensor]) -> list[str]:
    """Names of what an engine of other weights holds otherwise than the whole tensors, once it has loaded."""
    for tensor in engine.local.values():
        tensor.fill_(9.0)
    load_checkpoint(engine, path)
    wrong = []
    for name, part in engine.state_dict().items():
        shard = checkpoint.ShardedTensor.from_tensor(part)
        if not name.startswith(SCALE):
            block = cut(expected[name], (shard.offsets, tuple(shard.tensor.shape)))
            if block.dtype != shard.tensor.dtype or not torch.equal(block, shard.tensor):
                wrong.append(name)
    return wrong


def hand_on(folder: Path, optimizer: OptimizerSection, previous: str) -> list[str]:
    """Each layout of this many ranks loads the first checkpoint, saves its own and loads that of the layout before.

    previous: the layout before these. Returns what differs.
    """
    world, wrong = dist.get_world_size(), []
    expected = checkpoint.read_tensors(folder / "first/step-00000001")
    for name, (parallel, precision) in LAYOUTS[world].items():
        engine = make_engine(parallel, precision, optimizer)
        for source in ("first", previous):
            changed = differences_after_load(engine, folder / source / "step-00000001", expected)
            wrong += [f"{source} → {name}: {key}" for key in changed]
            if source == "first":
                path = checkpoint.save(folder / f"{world} {name}", 1, engine.state_dict(), {})
        tensors = {key: tensor for key, tensor in checkpoint.read_tensors(path).items() if not key.startswith(SCALE)}
        assert tensors.keys() == {key for key in expected if not key.startswith(SCALE)}, name
        wrong += [f"{name}: {key}" for key, tensor in tensors.items() if not torch.equal(tensor, expected[key])]
        previous = f"{world} {name}"
    return wrong


def take_over(folder: Path, optimizer: OptimizerSection, sources: list[str]) -> list[str]:
    """Each layout of this many ranks opens each of these checkpoints; returns what differs."""
    expected, wrong = checkpoint.read_tensors(folder / "first/step-00000001"), []
    for name, (parallel, precision) in LAYOUTS[dist.get_world_size()].items():
        engine = make_engine(parallel, precision, optimizer)
        for source in sources:
            changed = differences_after_load(engine, folder / source / "step-00000001", expected)
            wrong += [f"{source} → {name}: {key}" for key in changed]
    return wrong


SOONER = ("muon", "adafactor")
"""State of each element and of whole matrices; of their rows and columns, which test_optimizers.py, too, loads under
another layout."""
CASES = [
    *(pytest.param(name, False, marks=[EXTENDED] * (name == "adafactor")) for name in SOONER),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in OPTIMIZERS if name not in SOONER),
    pytest.param("muon", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "every_pair"), CASES)
def test_any_layout_to_any_other(workers: Workers, tmp_path: Path, name: str, every_pair: bool) -> None:
    """Round the table: each layout opens what the one before saved. Or every pair."""
    optimizer = OPTIMIZERS[name]
    workers.run(train_and_save, 1, tmp_path / "first", optimizer)
    first = checkpoint.read_tensors(tmp_path / "first/step-00000001")
    assert all(tensor.abs().max() > 0 for tensor in first.values()), "what is all zeros shows nothing"
    saved = ["first"]
    for world, layouts in LAYOUTS.items():
        assert workers.run(hand_on, world, tmp_path, optimizer, saved[-1]) == [[]] * world
        saved += [f"{world} {layout}" for layout in layouts]
    assert len(saved) == 1 + 13
    for world in LAYOUTS if every_pair else (1,):  # the first layout of all opens what the last one saved
        sources = saved if every_pair else saved[-1:]
        assert workers.run(take_over, world, tmp_path, optimizer, sources, timeout=300) == [[]] * world


SHAPES = {"rows": (7, 3), "grid": (4, 6), "replicated": (5, 2), "short": (1, 3), "largest": (9, 9)}


def boxes(ranks: int) -> dict[str, list[Region]]:
    """Each tensor's box on every rank: uneven rows, a grid, replicas, empty blocks."""

    def rows(n: int, width: int) -> list[Region]:
        """Return rows as FSDP2 divides them: ceil(n / ranks) each, the last ones shorter or empty."""
        step = -(-n // ranks)
        starts = [min(n, rank * step) for rank in range(ranks)]
        return [((start, 0), (min(step, n - start), width)) for start in starts]

    grid: dict[int, list[Region]] = {
        1: [((0, 0), (4, 6))],
        3: [((0, 2 * rank), (4, 2)) for rank in range(3)],
        4: [((2 * (rank // 2), 3 * (rank % 2)), (2, 3)) for rank in range(4)],
    }
    return {
        "rows": rows(7, 3), "grid": grid[ranks], "replicated": [((0, 0), (5, 2))] * ranks, "short": rows(1, 3),
        "largest": rows(9, 9),
    }  # fmt: skip


def reference(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def check_round_trip() -> list[str]:
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
    owned = workers.run(check_round_trip, ranks)
    assert sorted(name for names in owned for name in names) == sorted(SHAPES)  # one owner each


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_owners_are_shared_out_evenly(ranks: int) -> None:
    sizes = {f"layers.{i}.{part}": n for i in range(4) for part, n in (("wq", 64), ("ffn", 200), ("wk", 16))}
    owners = _assign_owners(sizes, ranks)
    assert owners == _assign_owners(dict(reversed(sizes.items())), ranks), "ranks may list them in another order"
    loads: Sequence[int] = [sum(sizes[n] for n, owner in owners.items() if owner == r) for r in range(ranks)]
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values())
