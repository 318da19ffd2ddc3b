"""Any layout's checkpoint opens in any other: each rank gets the very bits of its blocks, of weights and optimizer."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import ModelConfig, OptimizerSection, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from tests.support.batches import CAUSAL, global_batch
from tests.support.optimizers import OPTIMIZERS
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

# A vocabulary of no even parts, fewer key heads than tensor-parallel ranks, a tie between the ends of the pipeline.
MODEL = ModelConfig(
    vocab_size=97,
    d_model=16,
    n_layers=2,
    attention={"n_heads": 4, "n_kv_heads": 2},
    ffn={"d_ff": 36},
    embedding={"tied": True},
)
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
}
SCALE = "engine.loss_scale"


def make_engine(parallel: ParallelConfig, precision: str, optimizer: OptimizerSection) -> NativeEngine:
    return build_engine(MODEL, parallel, optimizer, precision=precision)


def train_and_save(folder: Path, optimizer: OptimizerSection) -> None:
    """What all others hand on: a state of which every tensor has moved."""
    engine = make_engine(*LAYOUTS[1]["alone"], optimizer)
    for step in range(2):
        engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
        engine.step(1e-2, clip=0.3)
    checkpoint.save(folder, 1, engine.state_dict(), {})


def load(engine: NativeEngine, path: Path) -> None:
    """Into an engine whose weights are others."""
    for tensor in engine.local.values():
        tensor.fill_(9.0)
    state = engine.empty_state_dict(checkpoint.names(path))
    checkpoint.load(path, state)
    engine.load_state_dict(state)


def differences(engine: NativeEngine, expected: dict[str, Tensor]) -> list[str]:
    """Names of what this rank holds otherwise than it is in the whole tensors."""
    wrong = []
    for name, part in engine.state_dict().items():
        if name.startswith(SCALE):
            continue
        box = checkpoint.ShardedTensor.from_tensor(part)
        cut = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.tensor.shape, strict=True))
        if expected[name].dtype != box.tensor.dtype or not torch.equal(expected[name][cut], box.tensor):
            wrong.append(name)
    return wrong


def hand_on(folder: Path, optimizer: OptimizerSection) -> list[str]:
    """Each layout of this many ranks takes the first checkpoint over, and saves one of its own; what differs."""
    world, wrong = dist.get_world_size(), []
    expected = checkpoint.read_tensors(folder / "first/step-00000001")
    for name, (parallel, precision) in LAYOUTS[world].items():
        engine = make_engine(parallel, precision, optimizer)
        load(engine, folder / "first/step-00000001")
        wrong += [f"first → {name}: {key}" for key in differences(engine, expected)]
        path = checkpoint.save(folder / f"{world} {name}", 1, engine.state_dict(), {})
        tensors = checkpoint.read_tensors(path)
        wrong += [
            f"{name}: {key}"
            for key in expected.keys() | tensors.keys()
            if not key.startswith(SCALE)
            and (key not in expected or key not in tensors or not torch.equal(expected[key], tensors[key]))
        ]
    return wrong


def take_over(folder: Path, optimizer: OptimizerSection, loops: bool) -> tuple[int, list[str]]:
    """Each layout of this many ranks opens every layout's checkpoint (loops: that of the one before in the table)."""
    expected = checkpoint.read_tensors(folder / "first/step-00000001")
    saved = [f"{world} {name}" for world, layouts in LAYOUTS.items() for name in layouts]
    count, wrong = 0, []
    for name, (parallel, precision) in LAYOUTS[dist.get_world_size()].items():
        engine = make_engine(parallel, precision, optimizer)
        place = saved.index(f"{dist.get_world_size()} {name}")
        for other in [saved[place - 1]] if loops else saved:
            load(engine, folder / other / "step-00000001")
            count += 1
            wrong += [f"{other} → {name}: {key}" for key in differences(engine, expected)]
    return count, wrong


SOONER = ("muon", "adafactor")
"""State of each element and of whole matrices, and of their rows and columns."""
CASES = [
    *((name, False) for name in SOONER),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in OPTIMIZERS if name not in SOONER),
    pytest.param("muon", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "every_pair"), CASES)
def test_any_layout_to_any_other(workers: Workers, tmp_path: Path, name: str, every_pair: bool) -> None:
    """Round the table: each layout opens what the one before saved. Or every pair."""
    optimizer, loops, pairs = OPTIMIZERS[name], not every_pair, 0
    workers.run(train_and_save, 1, tmp_path / "first", optimizer)
    first = checkpoint.read_tensors(tmp_path / "first/step-00000001")
    assert all(tensor.abs().max() > 0 for tensor in first.values()), "what is all zeros shows nothing"
    for world in LAYOUTS:
        assert not list(itertools.chain(*workers.run(hand_on, world, tmp_path, optimizer)))
    for world in LAYOUTS:
        results = workers.run(take_over, world, tmp_path, optimizer, loops, timeout=300)
        assert [wrong for _, wrong in results] == [[]] * world
        pairs += results[0][0]
    assert pairs == (13 if loops else 13 * 13)
